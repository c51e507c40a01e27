"""The bugs of `mutants.py`: each changes a compiled program or replaces one function of the
library.

Each plant is a real mistake in one place. Its docstring describes the library's behaviour with the
bug. The source of the bug is given in `mutants.py`.

A `Patch` returns a context manager that replaces something of the library while it is entered. What
`around` puts in place of a function gets the original first, then its arguments. dp, tp, ep and etp
are the sizes of the axes of a mesh: data, tensor and expert parallelism, and shards of an expert;
edp is the number of copies of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

import moesaic.parallel as norm_module
from moesaic.balance.run import calls, expert_moves
from moesaic.balance.run.relocate import SampleMove, SampleTrip
from moesaic.comm.collectives import all_reduce_sum, share
from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.kernels.codecs import codec_named
from moesaic.layer import CallArguments, MoE
from moesaic.program.all_to_all import ALL_TO_ALLS, Hier2D
from moesaic.program.all_to_all.all_to_all import Leg, NodeMap, legs_of
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Axis, Grid
from moesaic.program.sizes import Runs
from moesaic.program.task import Op, Program, Slot, State, Task
from moesaic.routing import peers
from moesaic.routing import route as route_module
from moesaic.routing.capacity import Capacity, count
from moesaic.routing.losses import LoadBalance, RouterStatistics
from moesaic.routing.node_tokens import NodeTokens
from moesaic.routing.peers import Gathered
from moesaic.routing.routers import SigmoidTopK
from moesaic.routing.routing import Scores
from moesaic.runtime import data_parallel, executor, expert_parallel, messages, tasks
from moesaic.runtime.expert_order import ExpertOrder
from moesaic.runtime.routing_cache import RoutingCache
from moesaic.runtime.tasks import Indices
from moesaic.testing import runner
from moesaic.testing.equivalence import Patch


def replaced(owner: object, name: str, value: object) -> Patch:
    """Return a patch that replaces an attribute of a module or class while it is entered."""
    return lambda: mock.patch.object(owner, name, value)


def around(owner: object, name: str, change: Callable[..., Any]) -> Patch:
    """Return a patch that replaces a function of a module or class by `change`, called with the
    original and its arguments."""

    def patch() -> AbstractContextManager[object]:
        """Replace the function as it is now."""
        original = getattr(owner, name)

        def changed(*args: Any, **options: Any) -> Any:
            """Call `change` in place of the original."""
            return change(original, *args, **options)

        return mock.patch.object(owner, name, changed)

    return patch


def changed_slots(
    program: Program, is_changed: Callable[[Slot], bool], state: tuple[Any, ...]
) -> Program:
    """Return a program in which the slots that `is_changed` selects have another state."""
    slots = tuple(
        replace(slot, state=state) if is_changed(slot) else slot for slot in program.slots
    )
    return replace(program, slots=slots)


# Programs


def backward_scale_dropped(compiled: Compiled) -> Compiled:
    """The baseline's redundant copies are summed and never divided."""
    undivided = _each_task(compiled.backward, lambda task: replace(task, power=0))
    return replace(compiled, backward=undivided)


def last_gather_reduced(compiled: Compiled) -> Compiled:
    """S2's last gather is transposed to a reduce-scatter, though the incoming gradient is identical
    on all ranks."""
    state = (("tp", State.PARTIAL),)
    return replace(
        compiled,
        backward=changed_slots(
            compiled.backward, lambda slot: slot.name.startswith("z_full."), state
        ),
    )


def chunks_swapped(compiled: Compiled) -> Compiled:
    """The experts multiply one chunk's rows by the other chunk's routing weights."""
    other = {"g.0": "g.1", "g.1": "g.0"}

    def swapped(task: Task) -> Task:
        """Return an expert task that reads the other chunk's weights; other tasks unchanged."""
        if task.op is not Op.EXPERT:
            return task
        return replace(task, reads=tuple(other.get(name, name) for name in task.reads))

    forward = _each_task(compiled.forward, swapped)
    # The weights of both chunks must have arrived before the first expert task.
    after_experts = _after_experts(forward)
    before = [task for task in forward.tasks if task.name not in after_experts]
    after = [task for task in forward.tasks if task.name in after_experts]
    return replace(compiled, forward=replace(forward, tasks=(*before, *after)))


def gradients_coded(compiled: Compiled) -> Compiled:
    """Gradients go through the codec of the forward pass, though the plan says that they do not."""
    coded = compile_plan(replace(compiled.plan, backward_codec=compiled.plan.codec), compiled.grid)
    return replace(compiled, backward=coded.backward)


def shards_not_summed_backward(compiled: Compiled) -> Compiled:
    """The gradient of gathered rows is assumed identical on all shards of an expert, and not
    summed."""

    def is_gradient(slot: Slot) -> bool:
        """Whether a slot holds the gradient of gathered rows; a gradient's name has a prime."""
        return slot.name.startswith("h.") and "'" in slot.name

    backward = changed_slots(compiled.backward, is_gradient, (("etp", State.REPLICATED),))
    return replace(compiled, backward=backward)


def edge_removed(compiled: Compiled) -> Compiled:
    """The experts run before their rows have been exchanged."""
    experts = [task for task in compiled.forward.tasks if task.op is Op.EXPERT]
    others = [task for task in compiled.forward.tasks if task.op is not Op.EXPERT]
    return replace(compiled, forward=replace(compiled.forward, tasks=(*experts, *others)))


def partial_forgotten(compiled: Compiled) -> Compiled:
    """A pass does not declare that the shards' results are partial sums."""
    forward = changed_slots(compiled.forward, lambda slot: slot.name == "out", ())
    return replace(compiled, forward=forward)


def _each_task(program: Program, change: Callable[[Task], Task]) -> Program:
    """Return the program with every task changed."""
    return replace(program, tasks=tuple(change(task) for task in program.tasks))


def _after_experts(program: Program) -> set[str]:
    """Return the names of the expert tasks and of the tasks that depend on them."""
    written: set[str] = set()  # slots that these tasks write
    names = set()
    for task in program.tasks:
        if task.op is Op.EXPERT or not written.isdisjoint(task.reads):
            written.update(task.writes)
            names.add(task.name)
    return names


# Gradients


def gradients_then(change: Callable[[nn.Module, Any, dict[str, Tensor]], None]) -> Patch:
    """Return a patch that spoils the gradients after they were averaged correctly.

    `change` gets the module, the mesh, and the gradients by name from before they were averaged.
    """

    def spoiled(average: Callable[..., None], module: nn.Module, mesh: Any) -> None:
        """Average the gradients, then spoil them."""
        before = {
            name: parameter.grad.clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        average(module, mesh)
        change(module, mesh, before)

    return around(data_parallel, "average_gradients", spoiled)


def experts_times(factor: Callable[[Any, Grid], float]) -> Patch:
    """Expert gradients are wrong by a factor, which depends on the layer and the mesh."""

    def scaled(module: nn.Module, mesh: Any, before: dict[str, Tensor]) -> None:
        """Scale the gradients of experts."""
        _scale(data_parallel.expert_parameters(module), factor(module, mesh.grid))

    return gradients_then(scaled)


def everything_times(factor: Callable[[Grid], float]) -> Patch:
    """All gradients are wrong by a factor, which depends on the mesh."""
    return gradients_then(
        lambda module, mesh, before: _scale(module.parameters(), factor(mesh.grid))
    )


def _scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply gradients by a factor."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= factor


def experts_summed_over(axis: Axis | None) -> Patch:
    """Expert gradients are summed over the ranks of a wrong axis, or not at all for None, but
    divided correctly."""

    def summed(module: nn.Module, mesh: Any, before: dict[str, Tensor]) -> None:
        """Replace the gradients of experts by wrong sums of the local ones."""
        group = (mesh.rank,) if axis is None else mesh.grid.group(mesh.rank, (axis,))
        of_experts = {id(parameter) for parameter in data_parallel.expert_parameters(module)}
        for name, parameter in module.named_parameters():
            if id(parameter) not in of_experts or parameter.grad is None:
                continue
            local = before.get(name, torch.zeros_like(parameter.grad))
            total = all_reduce_sum(mesh.transport, group, local)
            parameter.grad.copy_(total / mesh.grid.dp)

    return gradients_then(summed)


def router_of_own_group(module: nn.Module, mesh: Any, before: dict[str, Tensor]) -> None:
    """The router's gradient is never reduced over the data-parallel groups."""
    for name, parameter in module.named_parameters():
        if name.startswith("router") and name in before:
            parameter.grad = before[name]


def shared_of_its_copies(module: nn.Module, mesh: Any, before: dict[str, Tensor]) -> None:
    """A shared expert is treated as a routed one: its gradient is summed over the ranks that hold
    the same routed experts."""
    group = mesh.grid.group(mesh.rank, ("edp",))
    for name, parameter in module.named_parameters():
        if name.startswith("shared") and name in before:
            parameter.grad = all_reduce_sum(mesh.transport, group, before[name]) / mesh.grid.dp


def averaged_over_peers(
    transport: AbstractTransport, peers: tuple[int, ...], tensor: Tensor
) -> Tensor:
    """A tensor that each rank applies to its own slice gets the mean of the ranks' gradients
    instead of the sum."""
    return share(transport, peers, _ScaledGradient.apply(tensor, 1 / len(peers)))


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


RUN_EXPERTS = (expert_parallel.ExpertParallel, "run_experts")

input_gradient_summed_over_tp = around(
    *RUN_EXPERTS,
    lambda run, self, experts, x_TD, *rest, **options: run(
        self, experts, _ScaledGradient.apply(x_TD, self.grid.tp), *rest, **options
    ),
)
"""The experts' gradient of the input is summed over the tensor-parallel group a second time."""

weights_without_gradient = around(
    route_module,
    "_routing",
    lambda routing, record, weight_N, *rest: routing(record, weight_N.detach(), *rest),
)
"""Routing weights are detached from the experts' results, so only the auxiliary losses train the
router."""


def _with_local_weights(
    run: Callable[..., Tensor],
    self: Any,
    experts: Any,
    x_TD: Tensor,
    routed: Any,
    *rest: Any,
    **options: Any,
) -> Tensor:
    """Run with gradients of the routing weights of this rank's experts only."""
    routing = routed.routing
    experts_per_place = routing.num_experts // self.grid.ep
    own_place = self.grid.coordinate(self.rank, "ep")
    is_local = routing.expert // experts_per_place == own_place
    weight = torch.where(is_local, routing.weight, routing.weight.detach())
    changed = routed._replace(routing=replace(routing, weight=weight))
    return run(self, experts, x_TD, changed, *rest, **options)


weights_of_local_experts = around(*RUN_EXPERTS, _with_local_weights)
"""Routing weights get gradients only from experts on their own rank."""


def norm_with(
    of_experts: Callable[[Grid], float], of_others: Callable[[Grid], float]
) -> AbstractContextManager[object]:
    """In the square of the gradient norm, the parts of the experts and of all other weights are
    multiplied by factors."""

    def wrapped(layer: MoE, mesh: Any) -> float:
        """Return the wrong norm of a layer's gradients."""
        experts = list(data_parallel.expert_parameters(layer))
        ids_of_experts = {id(parameter) for parameter in experts}
        others = [
            parameter for parameter in layer.parameters() if id(parameter) not in ids_of_experts
        ]
        experts_square = norm_module.gradient_norm(experts).square() * of_experts(mesh.grid)
        others_square = norm_module.gradient_norm(others).square() * of_others(mesh.grid)
        return float((experts_square + others_square).sqrt())

    return mock.patch.object(runner, "_norm", wrapped)


def norm_of_first_tensor_rank() -> AbstractContextManager[object]:
    """Experts count on one rank of each tensor-parallel group only, like dense weights, though
    ranks hold different experts."""
    return norm_with(lambda grid: 1 / grid.tp, lambda grid: 1)


def norm_of_every_tensor_rank() -> AbstractContextManager[object]:
    """A weight that all ranks of a tensor-parallel group hold identically counts once per rank."""
    return norm_with(lambda grid: 1, lambda grid: grid.tp)


def norm_of_every_expert_copy() -> AbstractContextManager[object]:
    """Experts count once per replica."""
    return norm_with(lambda grid: grid.edp, lambda grid: 1)


def norm_without_experts() -> AbstractContextManager[object]:
    """The norm does not include the experts."""

    def copies(original: Callable[..., float], tensor: Tensor, holders: int) -> float:
        """Return infinitely many copies of an expert's gradient: the norm divides its square by
        them, which leaves 0. Of these layers only experts are sharded, into DTensors."""
        return float("inf") if isinstance(tensor, DTensor) else original(tensor, holders)

    return around(norm_module, "num_copies", copies)()


def norm_with_replicas() -> AbstractContextManager[object]:
    """Every rank's copy of a replicated gradient counts in the norm."""
    return mock.patch.object(norm_module, "num_copies", return_value=1)


# The layer: losses, counts, routing


def loss_share(factor: Callable[[Any], float]) -> Patch:
    """A loss over all ranks' tokens is multiplied by another factor."""
    return replaced(
        expert_parallel.ExpertParallel, "loss_share", property(lambda self: factor(self.grid))
    )


loss_never_used = replaced(MoE, "inject_loss", lambda self, y, *_: y)
"""The auxiliary loss is computed but not used."""


def counting(also: Callable[[MoE, Any, bool], bool]) -> Patch:
    """A call's copies are counted once more if `also`, called with (layer, routed, is replaying),
    returns True."""

    def counted(route: Callable[..., Any], self: MoE, *args: Any) -> Any:
        """Route, and count the copies once more."""
        routed = route(self, *args)
        is_replaying = self.routing_cache is not None and self.routing_cache.is_replaying
        if also(self, routed, is_replaying):
            self.step_counts += routed.routing.requested
        return routed

    return around(MoE, "_route", counted)


def _with_padding(route: Callable[..., Any], self: MoE, *args: Any) -> Any:
    """Route, and count padding too."""
    routed = route(self, *args)
    _, call, *_ = args
    is_token_T = call.mask.reshape(-1)
    choice = routed.record.choice  # the token and the expert of each copy
    if self.training and len(choice.token):
        is_padding = ~is_token_T[choice.token]
        self.step_counts += torch.bincount(choice.expert[is_padding], minlength=self.num_experts)
    return routed


padding_counts = around(MoE, "_route", _with_padding)
"""Padding counts in the load that the router adapts to."""


def counting_anew(count: Callable[[MoE, Any], Tensor | int]) -> Patch:
    """The load that the router adapts to grows by `count(layer, routed)` instead of the call's
    copies."""

    def counted(route: Callable[..., Any], self: MoE, *args: Any) -> Any:
        """Route, and count in another way where the layer counts."""
        before = self.step_counts.clone()
        routed = route(self, *args)
        if not torch.equal(self.step_counts, before):
            self.step_counts.copy_(before + count(self, routed))
        return routed

    return around(MoE, "_route", counted)


def own_copies(layer: MoE, routed: Any) -> Tensor:
    """Return the numbers of copies of only this rank's tokens, (num_experts,)."""
    choice = routed.record.choice
    return count(choice.expert, choice.sent, layer.num_experts)


def every_tensor_rank(layer: MoE, routed: Any) -> Tensor:
    """Return the numbers of copies summed over all ranks, so that each token counts tp times,
    (num_experts,)."""
    assert layer.on_mesh is not None
    counts: Tensor = routed.routing.requested * layer.on_mesh.grid.tp
    return counts


def _with_shifted_mask(
    route: Callable[..., Any], self: MoE, x_TD: Tensor, call: CallArguments, *args: Any
) -> Any:
    """Route with the padding mask of each token's neighbour."""
    if call.mask is not None:
        shifted = call.mask.flatten().roll(1).view(call.mask.shape)
        call = call._replace(mask=shifted)
    return route(self, x_TD, call, *args)


padding_mask_of_others = around(MoE, "_route", _with_shifted_mask)
"""The padding mask is split over another group of ranks than the tokens."""


def _drawn_by_rank(self: Any, router: Any, x_TD: Tensor) -> Tensor | None:
    """Draw noise that differs between ranks."""
    with torch.random.fork_rng([]):
        torch.manual_seed(self.rank)
        noise: Tensor | None = router.draw(len(x_TD), x_TD.device)
    return noise


noise_of_every_rank = replaced(expert_parallel.ExpertParallel, "_draw", _drawn_by_rank)
"""The ranks of a tensor-parallel group draw different noise for the tokens that they share."""


def load_balance(value: Callable[[LoadBalance, RouterStatistics], Tensor]) -> Patch:
    """The load-balance loss is computed by another formula."""
    return replaced(LoadBalance, "value", value)


def balance_over_wrong_pairs(loss: LoadBalance, statistics: RouterStatistics) -> Tensor:
    """Shares and mean scores are broadcast against each other. The sum over all pairs hardly
    depends on the routing."""
    share_E = statistics.counts_GE.sum(0) / statistics.counts_GE.sum().clamp_min(1)
    score_E = statistics.probs_GE.sum(0) / statistics.tokens_G.sum().clamp_min(1)
    products_EE = share_E.unsqueeze(1) * score_E
    return products_EE.sum()


def balance_without_experts(loss: LoadBalance, statistics: RouterStatistics) -> Tensor:
    """The factor of the number of experts is missing."""
    return _right_balance(loss, statistics) / statistics.counts_GE.shape[1]


def balance_of_choices(loss: LoadBalance, statistics: RouterStatistics) -> Tensor:
    """Copies per expert are divided by tokens instead of copies, so shares add up to top_k."""
    return (
        _right_balance(loss, statistics)
        * statistics.counts_GE.sum()
        / statistics.tokens_G.sum().clamp_min(1)
    )


def balance_of_this_micro_batch(loss: LoadBalance, statistics: RouterStatistics) -> Tensor:
    """The copies of the whole step are divided by those of one micro-batch."""
    return (
        _right_balance(loss, statistics)
        * statistics.step_counts_E.sum()
        / statistics.counts_GE.sum().clamp_min(1)
    )


_right_balance = LoadBalance.value


def softmax_again() -> AbstractContextManager[object]:
    """The softmax before the losses is applied to probabilities instead of logits."""
    original = RouterStatistics.of.__func__  # type: ignore[attr-defined]

    def wrapped(cls: type, scores: Scores, *args: Any, **options: Any) -> Any:
        """Return the statistics of scores after another softmax."""
        twice = scores._replace(probs=scores.probs.softmax(-1))
        return original(cls, twice, *args, **options)

    return mock.patch.object(RouterStatistics, "of", classmethod(wrapped))


losses_of_own_tokens = replaced(Gathered, "statistics", lambda self, local, *rest: local)
"""Every rank evaluates its losses on only its own tokens, though they are losses over all
tokens."""

biased_weights = around(
    SigmoidTopK,
    "weigh",
    lambda weigh, self, scores, *rest: weigh(
        self, scores._replace(gates=scores.gates + self.bias), *rest
    ),
)
"""The bias that is meant only for selecting experts is also added to the routing weights."""


def _without_first_expert(routing_of: Callable[..., Any], *args: Any) -> Any:
    """Return a routing without the weights of expert 0."""
    routing = routing_of(*args)
    return replace(routing, weight=routing.weight * (routing.expert > 0))


first_expert_skipped = around(route_module, "_routing", _without_first_expert)
"""Combine interprets expert 0 as "no expert"."""


def _with_share_of_shared(
    forward: Callable[..., Any], self: MoE, *args: Any, **options: Any
) -> Any:
    """Run with a rank's share of the shared expert's output."""
    if self.shared is None or self.on_mesh is None:
        return forward(self, *args, **options)
    tp = self.on_mesh.grid.tp
    hook = self.shared.register_forward_hook(lambda module, inputs, out: out / tp)
    try:
        return forward(self, *args, **options)
    finally:
        hook.remove()


shared_partial = around(MoE, "forward", _with_share_of_shared)
"""The shared expert's partial sums over tp are not summed, so each rank has only its part."""


def _and_adapt(forward: Callable[..., Any], self: MoE, *args: Any, **options: Any) -> Any:
    """Run, and finish the step after each call."""
    y = forward(self, *args, **options)
    if self.training:
        self.finish_step()
    return y


bias_each_micro_batch = around(MoE, "forward", _and_adapt)
"""The router adapts after every micro-batch."""

routes_again = around(
    RoutingCache, "read", lambda read, routing_cache, layer: read(routing_cache, layer) and None
)
"""A recomputation routes again, with new noise."""

drops_per_rank = replaced(Capacity, "spans_mesh", property(lambda self: False))
"""A global capacity is applied to each rank's tokens separately."""


def _over_tp(
    init: Callable[..., None],
    self: Any,
    transport: AbstractTransport,
    grid: Any,
    *rest: Any,
    **options: Any,
) -> None:
    """Let an object exchange over the tensor-parallel group."""
    init(self, transport, grid, *rest, **options)
    self.ranks = grid.group(transport.rank, ("tp",))
    self.number = len(self.ranks)
    self.place = self.ranks.index(transport.rank)


counted_over_tp = around(peers.Peers, "__init__", _over_tp)
"""Counts are exchanged over the tensor-parallel group, although its ranks have the same tokens."""


# Moving and computing


def last_shard_only(
    parts: Sequence[Tensor], runs: Runs, num_rows: int, sums: bool, indices: Indices
) -> Tensor | tasks.IndexedRows:
    """Rows from several shards overwrite each other instead of being summed."""
    if not sums:
        return tasks.placed(parts, runs, num_rows, sums=False, indices=indices)
    out = parts[0].new_zeros(num_rows, parts[0].shape[1])
    rows = torch.from_numpy(runs.rows)
    return out.index_copy_(0, rows, torch.cat([*parts]))  # where `index_add_` would be right


def sorted_again(
    parts: Sequence[Tensor], runs: Runs, num_rows: int, sums: bool, indices: Indices
) -> Tensor | tasks.IndexedRows:
    """Rows are restored by the permutation that sorted them instead of by its inverse."""
    num_places = len(set(runs.rows.tolist()))
    is_permutation = not sums and runs.total == num_rows and num_places == num_rows
    if is_permutation:
        inverse = np.argsort(runs.rows)
        runs = Runs(inverse, np.ones(runs.total, dtype=np.int64))
    return tasks.placed(parts, runs, num_rows, sums, indices)


class StrideByColumns(Hier2D):
    """2DH with the index as printed in algorithm 2, which divides by the number of nodes instead of
    the ranks per node."""

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        number = places.ranks.index(target)
        num_nodes = len({places.node(rank) for rank in places.ranks})
        local, node = divmod(number, num_nodes)
        intermediate = places.rank(places.node(source), local)
        return legs_of((0, source, intermediate), (1, intermediate, places.rank(node, local)))


@contextmanager
def stride_by_columns() -> Iterator[None]:
    """Plant `StrideByColumns`; the cache of legs is cleared before and after."""
    with mock.patch.dict(ALL_TO_ALLS, {"hier2d": StrideByColumns()}):
        messages._legs.cache_clear()
        try:
            yield
        finally:
            messages._legs.cache_clear()


def _with_own_rows_coded(
    pack: Callable[..., Any], task: Task, slots: Any, value: Tensor, call: Any
) -> Any:
    """Pack rows, and encode those that stay on the rank."""
    packed = pack(task, slots, value, call)
    codec = codec_named(task.codec or "none")
    if packed.own is not None and len(packed.own):
        coded = codec.encode(packed.own)
        packed.own = codec.decode(coded, len(packed.own), packed.dim, packed.dtype)
    return packed


own_rows_coded = around(executor, "pack", _with_own_rows_coded)
"""Rows that stay on their rank are also encoded and decoded."""


def _next_tokens(find: Callable[..., NodeTokens], *args: Any) -> NodeTokens:
    """Return the tokens that visit a node, with each copy taken from the next of them."""
    node_tokens = find(*args)
    counts = node_tokens.counts.flatten()
    counts = counts[counts > 0]
    # the smallest number of tokens: an index below it is in range wherever it is used
    num_safe = int(counts.min()) if len(counts) else 1
    next_index = node_tokens.copy_index + 1
    shifted = torch.where(next_index < num_safe, next_index, node_tokens.copy_index)
    return replace(node_tokens, copy_index=shifted)


node_tokens_off_by_one = around(expert_parallel, "find_node_tokens", _next_tokens)
"""Every copy is taken from the next token that visits the node."""


def _driven(steps: Any, transport: AbstractTransport, wait: Callable[[Handle], None]) -> Any:
    """Drive a program as the executor does, except that `wait` handles its waits.

    Args:
        steps: a generator that yields transfers, for which it gets handles, and handles to wait
            for; it returns the result.
    """
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = transport.issue(request) if isinstance(request, Transfer) else None
        if isinstance(request, Handle):
            wait(request)


def _waiting_last(steps: Any, transport: AbstractTransport) -> Any:
    """Wait for messages only after all steps."""
    late: list[Handle] = []
    result = _driven(steps, transport, late.append)
    for handle in late:
        transport.wait(handle)
    return result


read_before_waiting = replaced(executor, "drive", _waiting_last)
"""All of a program's waits take place at its end."""


def _swapping(steps: Any, transport: AbstractTransport) -> Any:
    """Swap the first two messages that a step receives."""

    def wait(handle: Handle) -> None:
        """Wait for the messages, and swap the first two."""
        transport.wait(handle)
        buffers = list(handle.transfer.receives.values())
        if len(buffers) < 2:
            return
        one, other, *_ = buffers
        if one.shape == other.shape:
            of_one = one.clone()
            one.copy_(other)
            other.copy_(of_one)

    return _driven(steps, transport, wait)


messages_swapped = replaced(executor, "drive", _swapping)
"""The messages of two peers are swapped if they have the same size."""

padding_routed = replaced(route_module, "_alive", lambda choice, valid: choice.sent)
"""Padding is routed like other tokens."""

bias_of_every_shard = replaced(tasks, "_shards", lambda *_: 1)
"""Every shard of an expert adds the whole output bias."""


# Balance: the arbiter's memory, sample placement, expert placement


class _Forgetful(WeakIdKeyDictionary):
    """A table by identity that stores nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore the item."""


decides_again = replaced(calls, "WeakIdKeyDictionary", _Forgetful)
"""A recomputation asks the arbiter again, and runs another program than the forward pass did."""

labels_stay = replaced(SampleTrip, "take_home", lambda self, x: x)
"""Samples move to other ranks, but their labels stay."""


def _in_reverse(
    targets: Callable[[Any], tuple[np.ndarray, np.ndarray]], self: SampleMove
) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets of samples with the slots in reverse."""
    rank, slot = targets(self)
    return rank, self.before.slots - 1 - slot


slots_reversed = around(SampleMove, "targets", _in_reverse)
"""Results are sent to the right rank, but to another sample's slot there."""

counts_by_number = replaced(ExpertOrder, "columns", lambda self, counts: counts)
"""Experts have moved to other slots, but sizes and replication still use counts in the order of
their numbers."""

gradients_stay = around(
    expert_moves,
    "_belongings",
    lambda of, *arguments: (found for found in of(*arguments) if found[0] == "weight"),
)
"""Weights move to another rank, but their gradients and other state do not."""
