"""An MoE layer on a mesh: routing that agrees over the ranks, then the compiled programs.

What decides, call by call, which programs run is a call policy; `PlainCalls` decides nothing.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moesaic.comm.collectives import all_gather, broadcast, share, share_of, slice_rows
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, Weights, compute_dtype
from moesaic.plan import Compiled, Plan
from moesaic.plan.budget import CountedCall
from moesaic.plan.plan import Crossing
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.routing.capacity import AbstractCapacity, Capacity, count
from moesaic.routing.losses import AbstractLoss
from moesaic.routing.node_tokens import NodeTokens, find_node_tokens, places_of
from moesaic.routing.peers import Peers
from moesaic.routing.route import Routed, RoutingRecord, TokenInfo, route, route_chosen
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Routing
from moesaic.runtime.deepep import DeepEP, run_by_deepep
from moesaic.runtime.executor import LayerRun, run_program
from moesaic.runtime.expert_order import ExpertOrder
from moesaic.runtime.spread import compiled_for, fitting
from moesaic.runtime.tasks import Call, Codecs, Indices, Meter, TaskClock, known_codec

T = TypeVar("T")

NUMBERS = 6
"""Numbers that every rank tells the others with a call's counts, under every plan: ranks that brought different plans must be
able to tell so."""


class Chosen(NamedTuple):
    """What a call runs."""

    compiled: Compiled
    replicated: np.ndarray | None = None
    """(world, num_experts, ep) int64: copies that helpers compute; None where the programs replicate nothing."""
    run_slices: Callable[[UncutCall, Tensor, Tensor, Weights, Weights], Tensor] | None = None
    """Runs the call slice by slice, from x, gates, split and common parameters; None where the call runs as a whole."""


class AbstractCallPolicy(ABC):
    """Decides for the calls of one layer under one plan; alike on all ranks, from what all of them know.

    Args:
        compiled: the compiled plan of the layer.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.meter: Meter | None = None
        """Takes the time of the experts' tasks; None where nothing is decided by it."""
        self.speeds: tuple[float, ...] = ()
        """Of the ranks' products, as all of them heard last; () where nobody measures them."""

    @property
    def digest(self) -> bytes:
        """16 bytes that two ranks share if they run the same programs and decide alike."""
        return self.compiled.digest

    def tell(self) -> Sequence[float]:
        """Return what to tell the other ranks with the counts of the call that begins, `NUMBERS` numbers."""
        return (0.0,) * NUMBERS

    def refuse_padding(self) -> None:
        """Raise InputError if decisions need the counts of a call, which no rank has under a padded capacity."""
        return

    @abstractmethod
    def choose(self, record: RoutingRecord, call: CountedCall) -> Chosen:
        """Return what a call runs.

        Args:
            record: the record of the call's routing; a recomputation has the record of its forward pass.
            call: what all ranks know of it.
        """

    @abstractmethod
    def timed(self, record: RoutingRecord, chosen: Chosen, program: Callable[[], Tensor]) -> Tensor:
        """Run a call's program and return its result; a policy that learns takes the time.

        Args:
            record: the record of the call's routing, after `choose`.
            chosen: what `choose` returned.
            program: runs it; it may be broken off in a recomputation, when all is there that the backward pass wants.
        """


class PlainCalls(AbstractCallPolicy):
    """Every call runs the plan's programs, whatever its counts."""

    def choose(self, record: RoutingRecord, call: CountedCall) -> Chosen:
        return Chosen(self.compiled)

    def timed(self, record: RoutingRecord, chosen: Chosen, program: Callable[[], Tensor]) -> Tensor:
        return program()


@dataclass(frozen=True)
class UncutCall:
    """A call of a layer that does not run as a whole: what it takes to run it slice by slice."""

    whole: LayerRun
    """The call; its sizes, indices and tags are those of no slice."""
    origins: tuple[int, ...]
    """The ranks whose rows this rank's routing has: its own, or those of its tensor group."""
    token: Tensor
    """(rows,) int64: each row's token, expert after expert."""
    expert: Tensor
    """(rows,) int64: each row's expert, ascending."""
    find: Callable[[Tensor, Tensor], NodeTokens] | None
    """Under multicast, finds the node tokens of this rank's own rows, from their tokens and experts; None under other plans."""
    sizes: Callable[[np.ndarray | None, np.ndarray, NodeTokens | None], CallSizes]
    """From replicated copies, copies and node tokens to sizes."""


@dataclass(frozen=True)
class _Way:
    """What a layer keeps of one plan: nothing here is as large as a weight."""

    compiled: Compiled
    peers: Peers
    deepep: DeepEP | None
    calls: AbstractCallPolicy
    """Decides what a call runs."""


class ExpertParallel:
    """How one layer runs on a mesh under a plan. All ranks make it together.

    Args:
        grid: the mesh.
        transport: the transport between the ranks.
        plan: the choices, compiled for this mesh or not yet.
        experts: the experts of the layer, whole.
        weight_first: multiply by the routing weight before the expert.
        calls_under: returns the policy that decides for the layer's calls under a compiled plan.
        settings, weights: what all ranks must bring alike; see `fitting`.
        deepep: returns what DeepEP keeps for all layers of the mesh; called under plans with deepep alone.

    Raises:
        InputError: if the plan does not fit the mesh; on every rank, if they brought different plans or layers.
    """

    def __init__(
        self,
        grid: Grid,
        transport: AbstractTransport,
        plan: Plan | Compiled,
        experts: AbstractExperts,
        weight_first: bool,
        calls_under: Callable[[Compiled], AbstractCallPolicy],
        settings: Mapping[str, object] | None = None,
        weights: Mapping[str, str] | None = None,
        deepep: Callable[[], DeepEP] | None = None,
    ) -> None:
        compiled = fitting(plan, grid, transport, experts, settings, weights)
        self._mesh, self.transport, self.rank = grid, transport, transport.rank
        self.num_experts, self._calls_under = experts.num_experts, calls_under
        self.codecs: Codecs = known_codec
        """What encodes rows; a benchmark may put others in their place that lay messages out alike."""
        self.auto: Callable[[int, int, torch.dtype], None] | None = None
        """Hears of every call (tokens of the tensor group, experts per token, dtype) and chooses the plan; None where that is
        given."""
        self.clock: TaskClock | None = None
        """Takes the time of every task, each alone; None where nobody asks."""
        self._order: ExpertOrder | None = None
        self._weight_first = weight_first
        self._tensor_group = grid.group(self.rank, ("tp",))
        self._place = grid.coordinate(self.rank, "tp")
        by_deepep = compiled.plan.crossing is Crossing.DEEPEP
        if by_deepep and weight_first:
            raise InputError('apply_weight="before" clashes with plan.all_to_all=deepep: choose multicast')
        assert deepep is not None or not by_deepep
        way = self._prepare(compiled, deepep() if deepep is not None and by_deepep else None)
        self._ways: dict[Plan | bytes, _Way] = {_key(plan): way}
        self._enter(way)

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertParallel:
        """Return how a copy of the layer runs: over the same connections, by the same plans, with nothing learnt yet."""
        other = object.__new__(ExpertParallel)
        memo[id(self)] = other
        other.__dict__.update(self.__dict__)
        other.auto = other.clock = None  # it goes on under the plan that it has
        other._order = copy.deepcopy(self._order, memo)
        other._ways = {key: other._prepare(way.compiled, way.deepep) for key, way in self._ways.items()}
        other._enter(next(way for way in other._ways.values() if way.compiled is self.compiled))
        return other

    def use(self, plan: Plan | Compiled, experts: AbstractExperts) -> None:
        """Run under another plan from the next call on; see `MoE.use_plan`.

        Args:
            plan: the choices; what was made for them is kept, so that coming back costs a look-up.
            experts: the experts of the layer.

        Raises:
            InputError: if the plan does not fit the layer, or wants process groups that the layer does not have.
        """
        way = self._ways.get(_key(plan))
        if way is None:
            choices = plan if isinstance(plan, Plan) else plan.plan
            if choices.crossing is Crossing.DEEPEP:
                raise InputError(
                    "plan.all_to_all=deepep needs process groups, which only MoE.parallelize makes: switch to multicast, or "
                    "parallelize the layer with deepep"
                )
            way = self._prepare(compiled_for(plan, self._mesh, self.transport, experts), None)
            self._ways[_key(plan)] = way
        if way.compiled is not self.compiled:
            way.peers.length = self.peers.length
            self._enter(way)
            self.peers.all_agree = False

    def _prepare(self, compiled: Compiled, deepep: DeepEP | None) -> _Way:
        find = partial(_find, self.num_experts, compiled) if compiled.is_multicast else None
        calls, slices = self._calls_under(compiled), compiled.routes_slices
        peers = Peers(self.transport, compiled.grid, slices, calls.digest, find, self._slots, tell=calls.tell)
        return _Way(compiled, peers, deepep, calls)

    def _enter(self, way: _Way) -> None:
        self.compiled, self.grid = way.compiled, way.compiled.grid
        self.peers, self.calls, self._deepep = way.peers, way.calls, way.deepep
        self._agreed = False
        self._padded: dict[tuple[int, int, int] | None, tuple[CallSizes, Indices]] = {}

    @property
    def order(self) -> ExpertOrder:
        """Which expert is where; kept from when somebody first asks, since experts move only where somebody does."""
        if self._order is None:
            self._order = ExpertOrder(self.num_experts)
        return self._order

    def note(self, record: RoutingRecord) -> None:
        """Add a call's copies to what the order of the experts has seen, if anybody may move them."""
        if self._order is not None:
            self._order.note(record)

    def _slots(self, expert: Tensor) -> Tensor:
        """Return the slot of each expert."""
        return expert if self._order is None else self._order.slots(expert)

    @property
    def loss_share(self) -> int:
        """What a loss over all ranks' tokens is multiplied by, since gradients are averaged over data-parallel groups."""
        return self.grid.dp

    def route(
        self,
        router: AbstractRouter,
        x_TD: Tensor,
        *,
        top_k: int,
        capacity: AbstractCapacity,
        losses: Sequence[AbstractLoss],
        batch: TokenInfo,
        replay: RoutingRecord | None,
    ) -> Routed:
        """Route this rank's tokens: under S1 its slice of the tensor group's, else all of them; see `route`."""
        dtype = compute_dtype(x_TD.dtype, x_TD.device)
        if self.auto is not None and replay is None:
            self.auto(len(x_TD), top_k, dtype)
        settings = {"dtype": dtype, "top_k": top_k, "capacity": capacity, "losses": losses}
        if any(loss.needs_sequences for loss in losses):  # sums per sequence are told with the counts
            settings["sequences"] = batch.num_sequences
        if self.peers.call_with({f"call.{name}": value for name, value in settings.items()}):
            self._agreed = False
        if replay is None:
            batch = replace(batch, noise=self._draw(router, x_TD))
        shared: AbstractContextManager[None] = nullcontext()
        if self.compiled.routes_slices:
            mine = share_of(len(x_TD), self._place, self.grid.tp)
            batch = replace(
                batch,
                valid_T=None if batch.valid_T is None else batch.valid_T[mine],
                token_ids=None if batch.token_ids is None else batch.token_ids[mine],
                noise=None if batch.noise is None else batch.noise[mine],
                first_token=mine.start,
                sequence_length=max(len(x_TD) // batch.num_sequences, 1),
            )
            x_TD = slice_rows(self.transport, self._tensor_group, x_TD)
            shared = shared_parameters(router, self.transport, self._tensor_group)
        with shared:
            return route(
                router,
                x_TD,
                top_k=top_k,
                capacity=capacity,
                losses=losses,
                batch=batch,
                replay=replay,
                peers=self.peers,
            )

    def route_chosen(self, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Routed:
        """Route this rank's tokens to experts that somebody else has chosen; under S1 its slice of the tensor group's.

        Args:
            x_TD: all tokens of the tensor group.
            expert_TK: (tokens, K) int64; alike on all ranks of the group, as x_TD and weight_TK are.
            weight_TK: (tokens, K) routing weights; every rank of the group gets their whole gradient.
        """
        dtype = compute_dtype(x_TD.dtype, x_TD.device)
        if self.auto is not None:
            self.auto(len(x_TD), expert_TK.shape[1], dtype)
        if self.peers.call_with({"call.dtype": dtype, "call.top_k": expert_TK.shape[1]}):
            self._agreed = False
        if self.compiled.routes_slices:
            expert_TK = expert_TK[share_of(len(x_TD), self._place, self.grid.tp)]
            weight_TK = slice_rows(self.transport, self._tensor_group, weight_TK)
        return route_chosen(expert_TK, weight_TK, self.num_experts, self.peers)

    def run_experts(self, experts: AbstractExperts, x_TD: Tensor, routed: Routed, padded_rows: int | None) -> Tensor:
        """Dispatch, run and combine: (tokens, dim) -> (tokens, dim).

        Args:
            experts: the experts of the layer.
            x_TD: all tokens of the tensor group.
            routed: what `route` returned.
            padded_rows: what `padded_rows` returned.
        """
        if self._deepep is not None:
            by_slot = routed if self._order is None else self._order.routed(routed)
            return run_by_deepep(self._deepep, experts, x_TD, by_slot)
        routing = routed.routing if self._order is None else self._order.in_slots(routed.routing)
        token, expert, gates, node_tokens = self._copies(routed, routing, padded_rows)
        if padded_rows is None or not self._agreed:
            self._check_digests(routed, together=padded_rows is None)
        self.peers.skips_digests = padded_rows is not None
        if padded_rows is None:
            copies, tokens = counts_of(routed.record, self.compiled)
        else:
            copies, tokens = even_counts(self.compiled, self.num_experts, routing.num_tokens, padded_rows)
        if node_tokens is None and self.compiled.is_multicast:
            node_tokens = self._node_tokens(token, expert, routing.num_tokens, int(copies[self.rank].sum()))
        copies = copies if self._order is None else self._order.columns(copies)
        dtype = compute_dtype(x_TD.dtype, x_TD.device)

        def run(x: Tensor, gate: Tensor | None, sharded: Weights, common: Weights) -> Tensor:
            assert gate is not None
            x, units = x.to(dtype), experts.num_units(sharded)
            counted = CountedCall(copies, tokens, units, partial(experts.sizes, sharded, dtype))
            chosen = self.calls.choose(routed.record, counted)
            compiled, replicated, run_slices = chosen
            key = None if padded_rows is None else (padded_rows, routing.num_tokens, units)
            of_call = None if node_tokens is None or run_slices else self._told(node_tokens)
            known = self._padded.get(key) or (
                self._sizes(compiled, replicated, copies, tokens, of_call, units),
                Indices(),
            )
            if key is not None:
                self._padded[key] = known
            call = Call(
                self.rank, known[0], experts, 0, self._weight_first, key is not None, True, self.codecs,
                self.calls.meter, known[1], self.clock,
            )  # fmt: skip
            indices = {"index": token.unsqueeze(1)} if of_call is None else dict(of_call.indices)
            work = LayerRun(compiled, self.transport, call, indices)
            cast = (tuple(weight.to(dtype) for weight in weights) for weights in (sharded, common))
            if run_slices is not None:
                uncut = self._uncut(work, tokens, (token, expert), routing.num_tokens, units)
                return run_slices(uncut, x, gate, *cast)
            work.take_tags()
            return self.calls.timed(routed.record, chosen, lambda: run_program(work, x, gate, *cast))

        y: Tensor = experts(x_TD, gates.unsqueeze(1), run=run)
        return y.to(x_TD.dtype)

    def _copies(
        self, routed: Routed, routing: Routing, padded_rows: int | None
    ) -> tuple[Tensor, Tensor, Tensor, NodeTokens | None]:
        """Return tokens, slots and weights of this rank's copies, slot after slot, and the node tokens that were told already;
        `routing` is that of `routed`, to slots."""
        order, node_tokens = self.peers.order(routing.expert), None
        if routing.has_unsent and padded_rows is None:  # they come last
            assert routed.record.gathered is not None
            order = order[: int(routed.record.gathered.sent_on_host[self.peers.place].sum())]
        token, expert, gates = (t.index_select(0, order) for t in (routing.token, routing.expert, routing.weight))
        if padded_rows is not None:
            gates, token = pad_copies(gates, token, expert, self.num_experts, padded_rows)
        elif self.compiled.is_multicast:
            node_tokens = self.peers.node_tokens(routed.record.choice, routed.record.gathered)
            if node_tokens is not None and len(node_tokens.copy_index) != len(order):
                node_tokens = replace(node_tokens, copy_index=node_tokens.copy_index[: len(order)])
        return token, expert, gates, node_tokens

    def padded_rows(self, capacity: AbstractCapacity, num_tokens: int, top_k: int) -> int | None:
        """Return the rows that this rank's routing sends each expert under a padded capacity; None under others.

        Args:
            capacity: the capacity of the call.
            num_tokens: how many tokens the tensor group has, equally many on all ranks.
            top_k: experts per token.

        Raises:
            InputError: for a plan whose sizes depend on the routing, or tokens that do not split over tp.
        """
        if not isinstance(capacity, Capacity) or not capacity.is_padded:
            return None
        self.calls.refuse_padding()
        if self.compiled.replicates:
            raise InputError(
                f"a padded capacity clashes with replication={self.compiled.plan.replication}, which is decided from "
                "counts that no rank then has: choose a capacity that is not padded, or replication none"
            )
        if self.compiled.is_multicast:
            raise InputError(
                "a padded capacity clashes with multicast, whose visits depend on the routing: choose another "
                "plan.all_to_all, or a capacity that is not padded"
            )
        if num_tokens % self.grid.tp:
            raise InputError(
                f"a padded capacity needs tokens that split over mesh.tp={self.grid.tp}, got {num_tokens}: pad the batch"
            )
        rows = capacity.fixed_rows(
            num_tokens // (self.grid.tp if self.compiled.routes_slices else 1), top_k, self.num_experts
        )
        return -(-rows // self.compiled.capacity_multiple) * self.compiled.capacity_multiple

    @staticmethod
    def refuse_ddp(parameters: Iterable[nn.Parameter]) -> None:
        """Raise InputError if the DDP whose forward pass runs takes parameters of experts that are spread over a mesh, of which
        every rank has its own, for copies of the same."""
        if torch.compiler.is_compiling():
            return
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and not all(hasattr(parameter, "_ddp_ignored") for parameter in parameters):
            raise InputError(
                "DDP would give all ranks the first one's experts, which are spread over a mesh: call "
                "moesaic.parallel.prepare_ddp(model, mesh) before DDP wraps the model"
            )

    def _draw(self, router: AbstractRouter, x_TD: Tensor) -> Tensor | None:
        """Draw the noise of all tokens of the tensor group, the same on each of its ranks; where none is, no seed."""
        if self.grid.tp == 1 or router.draw(0, x_TD.device) is None:
            return router.draw(len(x_TD), x_TD.device)
        seed = torch.randint(2**62, (1,))
        seed = broadcast(self.transport, self._tensor_group, seed.to(x_TD.device), self._tensor_group[0])
        with torch.random.fork_rng([x_TD.device] if x_TD.is_cuda else []):
            torch.manual_seed(int(seed))
            return router.draw(len(x_TD), x_TD.device)

    def _check_digests(self, routed: Routed, *, together: bool = True) -> None:
        """Raise InputError, on every rank, unless all run the same programs, and a recomputation those of its forward pass;
        `together` says whether all ranks do this in this call."""
        assert routed.record.gathered is not None
        digests = routed.record.gathered.digests_on_host
        if not (digests == self.peers.digest.numpy()).all():
            self.peers.check(torch.from_numpy(digests), self.peers.ranks, together=together)
            raise InputError(
                "the layer's plan, or the dtype of the call, was changed between a forward pass and its recomputation: call "
                "MoE.use_plan between steps"
            )
        self._agreed = True

    def _sizes(
        self,
        compiled: Compiled,
        replicated: np.ndarray | None,
        copies: np.ndarray,
        tokens: np.ndarray,
        node_tokens: NodeTokens | None,
        units: int,
    ) -> CallSizes:
        chunks, shapes = compiled.plan.chunks, compiled.shapes(self.num_experts)
        table = None if node_tokens is None else node_tokens.of_all
        return CallSizes(
            compiled.grid, copies, tokens, chunks, node_tokens=table, units=units, replicated=replicated, shapes=shapes
        )

    def _told(self, node_tokens: NodeTokens) -> NodeTokens:
        """Return node tokens with every rank's counts, which all ranks tell each other now unless they did before."""
        if node_tokens.of_all is not None:
            return node_tokens
        told = all_gather(self.transport, tuple(range(self.grid.world)), node_tokens.counts)
        return node_tokens.told(torch.stack(told).cpu().numpy(), self.rank)

    def _uncut(
        self, work: LayerRun, tokens: np.ndarray, routing: tuple[Tensor, Tensor], num_tokens: int, units: int
    ) -> UncutCall:
        """Return a call that is to run slice by slice; `routing` is token and expert of this rank's rows."""
        compiled = work.compiled
        alone = compiled.routes_slices or compiled.is_redundant
        find = partial(_find, self.num_experts, compiled, num_tokens=num_tokens) if compiled.is_multicast else None

        def bind(replicated: np.ndarray | None, copies: np.ndarray, node_tokens: NodeTokens | None) -> CallSizes:
            return self._sizes(compiled, replicated, copies, tokens, node_tokens, units)

        return UncutCall(work, (self.rank,) if alone else self._tensor_group, *routing, find, bind)

    def _node_tokens(self, token: Tensor, expert: Tensor, num_tokens: int, num_copies: int) -> NodeTokens:
        """Find the visits of the copies that this rank sends, which are `num_copies`."""
        if not self.compiled.routes_slices and self.grid.tp > 1:
            counts_E = count(expert, None, self.num_experts)
            start_E = counts_E.cumsum(0) - counts_E
            place = torch.arange(len(expert), device=expert.device) - start_E[expert]
            first, end = (counts_E * each // self.grid.tp for each in (self._place, self._place + 1))
            own = (place >= first[expert]) & (place < end[expert])
            at = places_of(own, num_copies)
            token, expert = token[at], expert[at]
        return _find(self.num_experts, self.compiled, token, expert, num_tokens)


def _find(num_experts: int, compiled: Compiled, token: Tensor, expert: Tensor, num_tokens: int) -> NodeTokens:
    return find_node_tokens(token, expert, num_experts, num_tokens, compiled.plan.chunks, compiled.grid)


def _key(plan: Plan | Compiled) -> Plan | bytes:
    """Return what a plan is found by again."""
    return plan if isinstance(plan, Plan) else plan.digest


def counts_of(record: RoutingRecord, compiled: Compiled) -> tuple[np.ndarray, np.ndarray]:
    """Return copies (world, experts) and tokens (world,) of every rank, from the exchanged record of a call's routing."""
    grid = compiled.grid
    assert record.gathered is not None
    copies, tokens = record.gathered.sent_on_host, record.gathered.on_host[:, 1].astype(np.int64)
    if compiled.routes_slices:
        return copies, tokens
    copies, tokens = np.repeat(copies, grid.tp, axis=0), np.repeat(tokens, grid.tp)
    if compiled.is_redundant:
        return copies, tokens
    place = np.arange(grid.world) % grid.tp
    return _cut(copies, place[:, None], grid.tp), _cut(tokens, place, grid.tp)


def even_counts(compiled: Compiled, num_experts: int, num_tokens: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the same where every rank routes `num_tokens` and sends each expert `rows`; nothing comes from the device."""
    grid = compiled.grid
    ranks = 1 if compiled.is_redundant or compiled.routes_slices else grid.tp
    return np.full((grid.world, num_experts), rows // ranks), np.full(grid.world, num_tokens // ranks)


def _cut(counts: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """Return the share that each rank of a tensor group has of its group's runs."""
    return counts * (place + 1) // size - counts * place // size


def pad_copies(gates: Tensor, token: Tensor, expert: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Give every expert the same number of rows; the empty ones have no token (-1) and weight 0.

    Args:
        gates: (copies,) differentiable, expert after expert.
        token: (copies,) int64.
        expert: (copies,) int64, at most `rows` copies each; `num_experts` for copies that nobody takes.
        num_experts: how many experts the layer has.
        rows: rows per expert in what is returned, gates and tokens, (num_experts * rows,).
    """
    counts_E = count(expert, None, num_experts + 1)
    start_E = counts_E.cumsum(0) - counts_E
    last = num_experts * rows  # one more row, for copies that nobody takes, is cut off
    row = (expert * rows + torch.arange(len(expert), device=expert.device) - start_E[expert]).clamp_max(last)
    padded = gates.new_zeros(last + 1).scatter(0, row, gates)[:last]
    return padded, token.new_full((last + 1,), -1).scatter(0, row, token)[:last]


@contextmanager
def shared_parameters(module: nn.Module, transport: AbstractTransport, group: tuple[int, ...]) -> Iterator[None]:
    """Let a module's parameters be used on different tokens by the ranks of a group: their gradients are summed."""
    held = [(part, name, value) for part in module.modules() for name, value in part._parameters.items()]
    try:
        for part, name, value in held:
            if value is not None and value.requires_grad and torch.is_grad_enabled():
                part._parameters[name] = share(transport, group, value)  # type: ignore[assignment]
        yield
    finally:
        for part, name, value in held:
            part._parameters[name] = value


@torch.compiler.disable(reason="a MoE layer on a mesh runs programs over connections: compile without fullgraph")
def outside_graphs(function: Callable[..., T], *args: object) -> T:
    """Call a function and return its result; `torch.compile` leaves it out of its graphs."""
    return function(*args)
