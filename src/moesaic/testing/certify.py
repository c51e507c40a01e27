"""Certifies anybody's MoE layer: does it compute the outputs and gradients of a dense layer in
float64?

What is certified may be

- experts, which get tokens with their routing and return each token's weighted sum
  (`AbstractRoutedExperts`);
- a whole layer with its router, auxiliary loss and gradient norm (`AbstractMoELayer`);
- a layer under its trainer, on every small mesh in one process (`assert_equivalent`).

Experts and whole layers run on the ranks of a process group, of one rank or more. Each rank runs
them on its own tokens and back-propagates the sum over its own outputs. The gradients of a token
and of its routing weights must be complete on the token's rank. An expert's gradient on its owner
is the sum over all tokens that reached the expert. The router's gradient is summed over the ranks.
Ranks may also share one batch (`shares_tokens`): then every rank has the whole of all gradients. A
layer that clips must leave the router, the experts and a parameter outside of it with their
gradients times one factor. An auxiliary loss may be over a rank's own tokens or over all tokens,
times any factor: the finding says which. Under a capacity, rows of dropped tokens must be 0, all
others exact, and as many are kept as fit. What is certified is called the system, and the dense
layer in float64 the twin; a situation is numbers of tokens and a routing to try; E is the number of
experts.

    for finding in certify(YourExperts):  # on all ranks together
        print(finding)

`moesaic certify yours.py:YourExperts` starts the ranks itself.
"""

from __future__ import annotations

import math
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moesaic.comm.collectives import all_gather, all_reduce_sum
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.process_groups import timeout_of
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.program.grid import Axis, Grid
from moesaic.routing.losses import LoadBalance
from moesaic.routing.routers import SoftmaxTopK
from moesaic.testing.reference import (
    Copy,
    ratio,
    reference_choice,
    reference_loss,
    reference_output,
    relative,
)


@dataclass(frozen=True)
class MoEWeights:
    """The weights, or their gradients, of SwiGLU experts, y = w2 (silu(w1 x) * w3 x), and of a
    router without a bias."""

    w1: Tensor
    """(E, hidden, dim)."""
    w3: Tensor
    """(E, hidden, dim)."""
    w2: Tensor
    """(E, dim, hidden)."""
    router: Tensor | None = None
    """(E, dim); None for experts alone."""

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.w1)

    def owned(self, group: dist.ProcessGroup) -> MoEWeights:
        """Return this rank's experts. Ranks own contiguous, equal shares in the order of ranks."""
        return self._part(group.rank(), group.size())

    def _part(self, rank: int, world: int) -> MoEWeights:
        """Return the experts of a rank, and the whole router."""
        per_rank = self.num_experts // world
        own = slice(rank * per_rank, (rank + 1) * per_rank)
        return MoEWeights(self.w1[own], w3=self.w3[own], w2=self.w2[own], router=self.router)

    @property
    def experts(self) -> list[Tensor]:
        """w1, w3 and w2."""
        return [self.w1, self.w3, self.w2]


@dataclass(frozen=True)
class LayerSpec:
    """What one rank's part of a system is made from; the same on all ranks."""

    weights: MoEWeights
    """The router and the experts of all ranks; `MoEWeights.owned` returns one rank's."""
    group: dist.ProcessGroup
    """The ranks that share the experts."""
    top_k: int
    capacity: float | None = None
    """Capacity factor: each rank sends an expert at most this many times the even share of its
    copies. None drops nothing."""

    @property
    def router(self) -> Tensor:
        """The router's weight, (E, dim)."""
        assert self.weights.router is not None
        return self.weights.router


class AbstractCertified(ABC):
    """One rank's part of a system under test, made from a `LayerSpec`."""

    has_capacity: ClassVar[bool] = False
    """Whether a capacity can be set; if not, situations with one are left out."""
    shares_tokens: ClassVar[bool] = False
    """Whether all ranks hold the same tokens, as under tensor parallelism, and each has the whole
    gradient of that batch."""

    @abstractmethod
    def __init__(self, spec: LayerSpec) -> None:
        """Make this rank's part."""

    @abstractmethod
    def gradients(self) -> MoEWeights:
        """Return this rank's gradients so far: of its own experts and, for a whole layer, of the
        router; zeros where none."""


class AbstractRoutedExperts(AbstractCertified):
    """Experts that get their tokens' routing."""

    @abstractmethod
    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Return each token's weighted sum of expert outputs, (tokens, dim); all ranks call it
        together.

        Args:
            x: (tokens, dim), requires a gradient unless the situation says otherwise; there may be
                no tokens.
            experts: (tokens, top_k) int64 indices into the experts of all ranks; a token's experts
                are distinct.
            gates: (tokens, top_k) routing weights, require a gradient.
        """


class AbstractMoELayer(AbstractCertified):
    """A layer that routes its tokens itself, by a softmax router without a bias."""

    @classmethod
    def normalizes(cls, top_k: int) -> bool:
        """Whether a token's routing weights are divided by their sum. If so, top_k=1 leaves the
        router without a gradient."""
        return top_k > 1

    @abstractmethod
    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output (tokens, dim) and the auxiliary loss (), or None if the layer has no
        such loss.

        Args:
            x: (tokens, dim); there may be no tokens.
        """

    def clip(self, max_norm: float, dense: nn.Parameter) -> float | None:
        """Clip the gradients as the system does before an optimizer step; None if it never clips.

        The router's gradient is reduced over the ranks before, to the sum. Afterwards `gradients`
        returns clipped gradients.

        Args:
            max_norm: largest norm of all gradients together: the router's, every expert's and that
                of `dense`.
            dense: a parameter outside of the layer, whose gradient is the same on all ranks.

        Returns:
            the norm before clipping.
        """
        return None


@dataclass(frozen=True)
class Situation:
    """Numbers of tokens, and a routing, with which some implementations fail."""

    name: str
    says: str
    """What is special about it, for readers."""
    tokens: tuple[int, ...]
    """Number of tokens of each rank in turn, repeated as needed."""
    top_k: int = 2
    capacity: float | None = None
    """Capacity factor; see `LayerSpec.capacity`."""
    experts: Callable[[Tensor, int], Tensor] = lambda chosen, num_experts: chosen
    """Maps random choices (tokens, top_k) and the number of experts to the choices that
    `AbstractRoutedExperts` get."""
    calls: int = 1
    """Number of forward and backward passes over which gradients accumulate."""
    tokens_learn: bool = True
    """Whether tokens require a gradient. After a frozen embedding, those of the first layer do
    not."""
    recomputes: bool = False
    """Run under activation checkpointing: the forward pass runs again inside the backward pass."""
    is_summed: bool = False
    """Whether the gradient of the output is one expanded number, as in the backward pass of a
    sum."""
    is_unequal: bool = False
    """Whether it is about ranks with unequal numbers of tokens, which ranks that share their tokens
    cannot have."""


def _first_ones(chosen: Tensor, num_experts: int) -> Tensor:
    """Choose the first top_k experts for every token, however many experts there are."""
    return torch.arange(chosen.shape[1]).expand_as(chosen).contiguous()


def _last_half(chosen: Tensor, num_experts: int) -> Tensor:
    """Choose only experts of the last half, so that the first ranks receive no token."""
    half = num_experts // 2
    # consecutive ones from the first choice on, so that they are distinct
    consecutive = chosen[:, :1] + torch.arange(chosen.shape[1])
    return half + consecutive % half


SITUATIONS = (
    Situation("even", "the same number of tokens on every rank", (6,)),
    Situation("uneven", "ranks hold different numbers of tokens", (5, 1, 9, 2), is_unequal=True),
    Situation("empty rank", "a rank holds no token", (4, 0, 3, 5), is_unequal=True),
    Situation(
        "one owner", "all tokens go to the experts of the first rank", (6, 3), experts=_first_ones
    ),
    Situation("idle owner", "the experts of a rank get no token", (6, 3), experts=_last_half),
    Situation("no tokens", "no rank holds any token", (0,)),
    Situation("accumulation", "two backward passes before a step", (4, 7), calls=2),
    Situation(
        "frozen tokens",
        "only experts and routing weights need gradients",
        (4, 0, 7),
        tokens_learn=False,
    ),
    Situation("recomputation", "under torch.utils.checkpoint", (4, 7), recomputes=True),
    Situation(
        "summed", "the gradient of the output is one number, expanded", (4, 7), is_summed=True
    ),
)
"""The situations that `certify` tries by default with experts."""
LAYER_SITUATIONS = (
    Situation("even", "the same number of tokens on every rank", (16,)),
    Situation("uneven", "ranks hold different numbers of tokens", (9, 3, 12, 5), is_unequal=True),
    Situation("one expert", "the same, and one expert per token", (9, 3, 12, 5), top_k=1),
    Situation("empty rank", "a rank holds no token", (8, 0, 5, 3), is_unequal=True),
    Situation(
        "capacity",
        "copies beyond a rank's even share are dropped; one expert per token",
        (16,),
        top_k=1,
        capacity=1.0,
    ),
)
"""The situations that `certify` tries by default with whole layers."""


@dataclass(frozen=True)
class Certified:
    """The finding for one quantity in one situation, over all ranks."""

    situation: str
    quantity: str
    """output, tokens, gates, router and experts (their gradients), gradient norm, router, experts
    and dense after clipping, capacity, auxiliary loss over some tokens."""
    error: float
    """Largest absolute difference over all ranks, relative to the largest expected value; inf for
    NaN."""
    factor: float | None
    """The factor by which all values are off; None if no single factor explains the error."""
    failed: str = ""
    """The exception that was raised instead of a result, if any; the error is infinite then."""

    @classmethod
    def without_result(cls, situation: Situation, failed: str) -> Certified:
        """Return the finding for a situation in which the system gave no result."""
        return cls(situation.name, "all", error=torch.inf, factor=None, failed=failed)

    def holds(self, tolerance: float = 1e-4) -> bool:
        """Whether the error is within the tolerance. The default allows for experts computed in
        float32."""
        return self.error <= tolerance

    def __str__(self) -> str:
        """Return a line that says whether the quantity is right, and how far it is off."""
        if self.failed:
            return f"{self.situation}: {self.failed}"
        verdict = "right" if self.holds() else "wrong"
        line = f"{self.situation}: {self.quantity} {verdict}, {self.error:.1e}"
        if self.factor is not None and not self.holds():
            line += f", {self.factor:.4g} times what it should be"
        return line


LEFT_OUT = "is left out: after what failed before, ranks are not at the same place"
"""Why a situation is not tried."""


def certify(
    system: type[AbstractRoutedExperts] | type[AbstractMoELayer],
    group: dist.ProcessGroup | None = None,
    *,
    situations: Sequence[Situation] = (),
    num_experts: int = 8,
    dim: int = 16,
    hidden: int = 24,
    dtype: torch.dtype = torch.float32,
    poisons: bool = True,
) -> list[Certified]:
    """Run a system in every situation and compare it with a dense layer in float64. Returns the
    same on every rank.

    Args:
        system: the class of one rank's part; an object is made for each situation, and a second one
            for an auxiliary loss.
        group: the ranks that share the experts; None for all.
        situations: the situations to try; none for `SITUATIONS` or `LAYER_SITUATIONS`.
        num_experts: experts of all ranks together; a multiple of the number of ranks, at least
            twice any `top_k`.
        dim: width of a token.
        hidden: inner width of an expert.
        dtype: dtype of tokens and weights.
        poisons: fill memory that torch allocates without a value with NaN while the system runs.
            Otherwise rows that nothing writes are often 0 by chance in a fresh process. It takes
            torch's deterministic algorithms.

    Returns:
        a finding per situation and quantity, or one with the exception. If ranks fail differently
        in a situation, they may wait for different messages: the remaining situations are not run.
    """
    group = group or dist.group.WORLD
    assert group is not None, "start a process group first"
    compare_group = _comparing(group)
    findings: list[Certified] = []
    is_over = False  # whether the remaining situations are left out
    for situation in _fitting(system, situations):
        if is_over:
            findings.append(Certified.without_result(situation, LEFT_OUT))
            continue
        drawn = _draw(
            situation,
            group,
            num_experts=num_experts,
            dim=dim,
            hidden=hidden,
            dtype=dtype,
            shares=system.shares_tokens,
        )
        with _poisoned() if poisons else nullcontext():
            results, failures = _attempted(partial(_run, system, drawn), compare_group)
        is_over = len(set(failures)) > 1  # ranks failed differently, or some of them
        if any(failures):
            failed = _in_words(failures) if is_over else failures[0]
            findings.append(Certified.without_result(situation, failed))
        else:
            findings += _certified(situation, _compared(system, drawn, results))
    return findings


def _certified(situation: Situation, found: Iterable[_Found]) -> list[Certified]:
    """Return the findings of a situation with its name."""
    return [Certified(situation.name, each.quantity, each.error, each.factor) for each in found]


def _comparing(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a further process group of the same ranks, over which they compare.

    A rank that raises may leave messages of the experts pending. The group is never destroyed,
    since a later group of the same ranks would take its name and find its stale addresses in the
    store. It waits twice as long: a rank that raises compares while others wait for it.
    """
    members = dist.get_process_group_ranks(group)
    timeout = timeout_of(group)
    patience = None if timeout is None else 2 * timeout
    return dist.new_group(members, timeout=patience, use_local_synchronization=True)


def _fitting(
    system: type[AbstractRoutedExperts] | type[AbstractMoELayer], situations: Sequence[Situation]
) -> list[Situation]:
    """Return the situations, by default those of the system's kind, that the system can be in."""
    is_whole = issubclass(system, AbstractMoELayer)
    tried = situations or (LAYER_SITUATIONS if is_whole else SITUATIONS)
    fitting = []
    for situation in tried:
        lacks_capacity = situation.capacity is not None and not system.has_capacity
        lacks_unequal_counts = situation.is_unequal and system.shares_tokens
        if not lacks_capacity and not lacks_unequal_counts:
            fitting.append(situation)
    return fitting


def _in_words(failures: Sequence[str]) -> str:
    """Return the exceptions of all ranks in one line."""
    return "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(failures) if each)


def certify_named(name: str, poisons: bool = True) -> list[Certified]:
    """Certify the class "module:Class" or "file.py:Class" on all ranks; see `certify`.

    Raises:
        InputError: there is no such class, or it is none of the two kinds.
    """
    return certify(system_named(name), poisons=poisons)


def system_named(name: str) -> type[AbstractRoutedExperts] | type[AbstractMoELayer]:
    """Return the class "module:Class" or "file.py:Class"; the working folder is searched for
    modules too."""
    where, _, class_name = name.partition(":")
    path = Path(where)
    folder = Path.cwd()
    module = where
    if path.suffix == ".py" and not path.is_file():
        raise InputError(f"{name}: {where}: no such file")
    try:
        if path.suffix == ".py":
            folder = path.resolve().parent
            module = path.stem
        sys.path.insert(0, str(folder))
        system = getattr(import_module(module), class_name)
    except (ImportError, ValueError, AttributeError) as error:
        raise InputError(
            f"{name}: {error}: write package.module:Class or path/to/file.py:Class"
        ) from error
    is_class = isinstance(system, type)
    if not is_class or not issubclass(system, AbstractRoutedExperts | AbstractMoELayer):
        raise InputError(
            f"{name}: must be a class derived from AbstractRoutedExperts or AbstractMoELayer"
        )
    return system


@contextmanager
def _poisoned() -> Iterator[None]:
    """Let torch fill new memory with NaN, which it does under deterministic algorithms; those that
    it lacks only warn."""
    settings: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    did_fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory = did_fill


class _Input(NamedTuple):
    """What one rank passes in one call."""

    tokens: Tensor
    """(tokens, dim)."""
    experts: Tensor
    """(tokens, top_k) int64."""
    gates: Tensor
    """(tokens, top_k)."""
    dy: Tensor
    """(tokens, dim), the gradient of the output."""


@dataclass(frozen=True)
class _Drawn:
    """A situation with the weights and the inputs of all ranks."""

    situation: Situation
    spec: LayerSpec
    calls: list[list[_Input]]
    """By call, then by rank."""


def _draw(
    situation: Situation,
    group: dist.ProcessGroup,
    num_experts: int,
    dim: int,
    hidden: int,
    dtype: torch.dtype,
    shares: bool,
) -> _Drawn:
    """Draw weights, tokens and a routing, the same on every rank.

    Args:
        shares: whether all ranks have the tokens of the first.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        """Draw normally distributed numbers."""
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def draw_input(count: int) -> _Input:
        """Draw what a rank with `count` tokens passes."""
        scores = torch.rand(count, num_experts, generator=generator)
        chosen = scores.topk(situation.top_k).indices  # random and distinct
        gates = torch.rand(count, situation.top_k, generator=generator, dtype=torch.float64)
        if situation.is_summed:  # one number for all, as the backward pass of a sum has it
            dy = torch.ones(1, 1, dtype=dtype).expand(count, dim)
        else:
            dy = normal(count, dim)
        return _Input(
            tokens=normal(count, dim),
            experts=situation.experts(chosen, num_experts),
            gates=gates.to(dtype),
            dy=dy,
        )

    # scaled so that products are about as large as tokens
    w1, w3, transposed_w2 = normal(3, num_experts, hidden, dim) * dim**-0.5
    w2 = transposed_w2.transpose(1, 2).contiguous()
    weights = MoEWeights(w1, w3=w3, w2=w2, router=normal(num_experts, dim))
    calls = []
    for _ in range(situation.calls):
        if shares:
            call = [draw_input(situation.tokens[0])] * group.size()
        else:
            call = []
            for rank in range(group.size()):
                count = situation.tokens[rank % len(situation.tokens)]
                call.append(draw_input(count))
        calls.append(call)
    return _Drawn(situation, LayerSpec(weights, group, situation.top_k, situation.capacity), calls)


Results = dict[str, list[Tensor]]
"""Quantity -> its tensors on one rank."""


def _attempted(
    run: Callable[[], Results], group: dist.ProcessGroup
) -> tuple[list[Results], list[str]]:
    """Run the code under test on every rank, and return the results and the exceptions ("" for
    none) of all ranks."""
    result = {}
    failed = ""
    try:
        result = run()
    except Exception as error:  # the code under test may raise anything, which is a finding
        lines = str(error).splitlines() or [""]
        failed = f"{type(error).__name__}: {lines[0]}"
    # by rank; the gathering replaces every entry
    outcomes: list[tuple[Results, str]] = [({}, "")] * group.size()
    dist.all_gather_object(outcomes, (result, failed), group=group)
    results = [results_of_rank for results_of_rank, _ in outcomes]
    failures = [failed_of_rank for _, failed_of_rank in outcomes]
    return results, failures


def _run(system: type[AbstractRoutedExperts] | type[AbstractMoELayer], drawn: _Drawn) -> Results:
    """Run a system on this rank, and return the values that `_expected` has for it."""
    layer = system(drawn.spec)
    rank = drawn.spec.group.rank()
    loss = None  # the auxiliary loss of the last call
    # scales tokens, as a norm before the layer does
    dense = nn.Parameter(torch.ones_like(drawn.spec.router[0]))
    results: Results = {"output": [], "tokens": [], "gates": []}
    for call in drawn.calls:
        inputs = call[rank]
        x = inputs.tokens.clone().requires_grad_(drawn.situation.tokens_learn)
        gates = inputs.gates.clone().requires_grad_()
        run: Callable[..., Any] = layer.run
        if drawn.situation.recomputes:
            run = partial(checkpoint, layer.run, use_reentrant=False)
        if isinstance(layer, AbstractMoELayer):
            y, loss = run(x * dense if drawn.situation.tokens_learn else x)
        else:
            y = run(x, inputs.experts, gates)
        torch.autograd.backward(y, inputs.dy)
        results["output"].append(y)
        results["tokens"].append(_grad_or_zeros(x))
        # zeros of a whole layer, which takes no gates; not compared then
        results["gates"].append(_grad_or_zeros(gates))

    gradients = layer.gradients()
    results["experts"] = gradients.experts
    if isinstance(layer, AbstractMoELayer):
        assert gradients.router is not None, "gradients() of a whole layer includes the router's"
        # copies, since `clip` changes gradients in place
        results["router"] = [gradients.router.clone()]
        results["experts"] = [each.clone() for each in gradients.experts]
        results |= _clipped(layer, dense, drawn.spec.group)
        if loss is not None:  # a second layer, whose gradients are those of the loss alone
            last_call = drawn.calls[-1]
            second = system(drawn.spec)
            assert isinstance(second, AbstractMoELayer)
            results["auxiliary"] = _run_loss(second, last_call[rank].tokens)
    return {
        name: [each.detach().double().cpu() for each in tensors]
        for name, tensors in results.items()
    }


def _grad_or_zeros(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; zeros if it got none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _clipped(layer: AbstractMoELayer, dense: nn.Parameter, group: dist.ProcessGroup) -> Results:
    """Clip the gradients and return the norm and the clipped gradients; nothing if the layer does
    not clip. `dense` is a parameter outside of the layer."""
    # all ranks take part in the sum below, even those where `dense` got no gradient
    dense.grad = _grad_or_zeros(dense)
    if not layer.shares_tokens:
        dist.all_reduce(dense.grad, group=group)
    norm = layer.clip(MAX_NORM, dense)
    if norm is None:
        return {}
    clipped = layer.gradients()
    assert clipped.router is not None
    return {
        "gradient norm": [torch.tensor(norm)],
        "router after clipping": [clipped.router],
        "experts after clipping": clipped.experts,
        "dense after clipping": [dense.grad],
    }


def _run_loss(layer: AbstractMoELayer, tokens: Tensor) -> list[Tensor]:
    """Return the auxiliary loss and the router's gradient of that loss alone."""
    y, loss = layer.run(tokens.clone().requires_grad_())
    assert loss is not None
    (loss + 0 * y.sum()).backward()  # through the whole layer, as in training
    router = layer.gradients().router
    assert router is not None
    return [loss, router]


MAX_NORM = 1.0
"""Norm to which layers clip, far below that of their gradients."""
CLIPPED = ("gradient norm", *(f"{name} after clipping" for name in ("router", "experts", "dense")))
"""Quantities of a layer that clips."""


class _Found(NamedTuple):
    """The finding for one quantity; see `Certified`."""

    quantity: str
    error: float
    factor: float | None


def _compared(
    system: type[AbstractRoutedExperts] | type[AbstractMoELayer],
    drawn: _Drawn,
    actual: list[Results],
) -> list[_Found]:
    """Return the findings for the results of all ranks."""
    is_whole = issubclass(system, AbstractMoELayer)
    normalizes = issubclass(system, AbstractMoELayer) and system.normalizes(drawn.spec.top_k)
    twin = _dense_layer(drawn.spec, normalizes=normalizes)
    # where copies are dropped, only the outputs of the first call are compared
    if drawn.situation.capacity is not None:
        first_call = drawn.calls[0]
        errors = [
            _capacity_error(twin, inputs.tokens.double(), results["output"][0], drawn)
            for inputs, results in zip(first_call, actual)
        ]
        return [_Found("capacity", max(errors), factor=None)]

    if is_whole and not system.shares_tokens:  # the router's gradient is summed over the ranks
        router = torch.stack([results["router"][0] for results in actual]).sum(0)
        actual = [results | {"router": [router]} for results in actual]
    expected = _expected(twin, drawn, is_whole=is_whole, shares=system.shares_tokens)
    names = ["output"]
    if drawn.situation.tokens_learn:
        names.append("tokens")
    names.append("router" if is_whole else "gates")
    names.append("experts")
    names += [name for name in CLIPPED if name in actual[0]]
    found = [_difference(actual, expected, name) for name in names]
    if "auxiliary" in actual[0]:
        losses = []
        router_gradients = []
        for results in actual:
            loss, router_gradient = results["auxiliary"]
            losses.append(loss)
            router_gradients.append(router_gradient)
        router = torch.stack(router_gradients).sum(0)
        found.append(_compared_losses(twin, drawn, torch.stack(losses), router))
    return found


def _difference(actual: list[Results], expected: list[Results], name: str) -> _Found:
    """Return a quantity's error over all ranks, and the factor that explains it or None."""
    actual_tensors: list[Tensor] = []
    expected_tensors: list[Tensor] = []
    for actual_of_rank, expected_of_rank in zip(actual, expected):
        actual_tensors += actual_of_rank[name]
        expected_tensors += expected_of_rank[name]
    actual_shapes = [tensor.shape for tensor in actual_tensors]
    if actual_shapes != [tensor.shape for tensor in expected_tensors]:
        return _Found(name, error=torch.inf, factor=None)
    all_actual = torch.cat([tensor.flatten() for tensor in actual_tensors])
    all_expected = torch.cat([tensor.flatten() for tensor in expected_tensors])
    # what should be 0 still has rounding errors
    error = relative(all_actual, all_expected, least=1e-2)
    return _Found(name, error, ratio(all_actual, all_expected))


def _dense_layer(spec: LayerSpec, *, normalizes: bool) -> MoE:
    """Return the reference's layer with the weights of a system, in float64."""
    weights = spec.weights
    _, hidden, dim = weights.w1.shape
    options = {"normalize": "before"}
    twin = MoE(
        dim, hidden, weights.num_experts, spec.top_k, router_options=options, losses=()
    ).double()
    assert isinstance(twin.router, SoftmaxTopK)
    # "after" divides a token's weights by their sum; set only now, since a layer of ours refuses it
    # with top_k=1
    twin.router.normalize = "after" if normalizes else "before"
    w13 = torch.stack([weights.w1, weights.w3], 1)  # (E, 2, hidden, dim), as the layer has them
    values = {"w13": w13, "w2": weights.w2}
    with torch.no_grad():
        twin.router.get_parameter("weight").copy_(spec.router)
        for name, value in values.items():
            twin.experts.get_parameter(name).copy_(value)
    return twin


def _choice(twin: MoE, x: Tensor) -> tuple[Tensor, Tensor, list[Copy]]:
    """Return logits, probabilities and copies of tokens as the reference chooses them."""
    is_valid = torch.ones(len(x), dtype=torch.bool)
    return reference_choice(twin, x, is_valid, noise=None, token_ids=None, top_k=twin.top_k)


def _expected(twin: MoE, drawn: _Drawn, *, is_whole: bool, shares: bool) -> list[Results]:
    """Return the results that each rank must have: outputs, and gradients of tokens, of routing
    weights and of parameters, as the reference's layer computes them.

    Args:
        is_whole: whether the system routes its tokens itself.
        shares: whether all ranks have the same tokens; they are then computed once.
    """
    world = drawn.spec.group.size()
    expected: list[Results] = [  # by rank, or of the first rank alone
        {"output": [], "tokens": [], "gates": []} for _ in range(1 if shares else world)
    ]
    # gradient of the parameter before the layer, of ones, with which tokens are multiplied, (dim,)
    dense = torch.zeros_like(drawn.spec.router[0], dtype=torch.float64)
    for call in drawn.calls:
        for results, inputs in zip(expected, call):
            of_dense = _add_expected(results, twin, inputs, is_whole=is_whole)
            if drawn.situation.tokens_learn:  # else the system's tokens are not multiplied
                dense += of_dense
    whole = _gradients_of(twin)  # of all experts: `backward` added up those of all ranks and calls
    if shares:
        expected = expected * world  # every rank has the results of the first
    return [
        results | _expected_gradients(whole, dense, own=whole._part(rank, world))
        for rank, results in enumerate(expected)
    ]


def _add_expected(results: Results, twin: MoE, inputs: _Input, *, is_whole: bool) -> Tensor:
    """Run the reference's layer forward and backward on a rank's input, and add the output and the
    gradients of tokens and routing weights to the rank's results. Return the gradient of a
    parameter of ones with which tokens are multiplied, (dim,)."""
    x = inputs.tokens.double().requires_grad_()
    gates = inputs.gates.double().requires_grad_()
    if is_whole:
        _, _, copies = _choice(twin, x)
    else:
        copies = _given_copies(inputs.experts, gates)
    y = reference_output(twin, x, copies)
    nothing = 0 * (x.sum() + gates.sum())  # so that both have a gradient
    loss = (y * inputs.dy.double()).sum() + nothing
    loss.backward()
    assert x.grad is not None
    assert gates.grad is not None
    results["output"].append(y.detach())
    results["tokens"].append(x.grad)
    results["gates"].append(gates.grad)
    return (x.grad * x.detach()).sum(0)


def _given_copies(experts: Tensor, gates: Tensor) -> list[Copy]:
    """Return the copies of tokens by their given routing, (tokens, top_k) both."""
    copies = []
    for token, experts_of_token in enumerate(experts.tolist()):
        for slot, expert in enumerate(experts_of_token):
            copies.append(Copy(token, expert, slot, weight=gates[token, slot]))
    return copies


def _gradients_of(twin: MoE) -> MoEWeights:
    """Return the gradients of the reference's layer."""
    w1, w3 = _grad_or_zeros(twin.experts.get_parameter("w13")).unbind(1)
    return MoEWeights(
        w1=w1,
        w3=w3,
        w2=_grad_or_zeros(twin.experts.get_parameter("w2")),
        router=_grad_or_zeros(twin.router.get_parameter("weight")),
    )


def _expected_gradients(whole: MoEWeights, dense: Tensor, own: MoEWeights) -> Results:
    """Return the gradients that a rank must have, before and after clipping, and their norm.

    Args:
        whole: gradients of the router and of all experts.
        dense: gradient of the parameter outside of the layer, (dim,).
        own: gradients of the rank's experts.
    """
    assert whole.router is not None
    squares = [tensor.square().sum() for tensor in (whole.router, dense, *whole.experts)]
    norm = torch.stack(squares).sum().sqrt()
    factor = (MAX_NORM / norm).clamp(max=1)  # by which all gradients are clipped
    gradients = {"router": [whole.router], "experts": own.experts, "dense": [dense]}
    results = dict(gradients)
    for name, tensors in gradients.items():
        results[f"{name} after clipping"] = [factor * tensor for tensor in tensors]
    results["gradient norm"] = [norm]
    return results


def _compared_losses(twin: MoE, drawn: _Drawn, values: Tensor, router: Tensor) -> _Found:
    """Return the finding for an auxiliary loss: the tokens that it is over, its error and the
    factor it is multiplied by.

    The expected loss is E * sum_e f_e P_e; a rank without tokens has 0. f counts the copies of all
    choices or, as in GShard, only those of a token's first choice. The gradient of a loss over all
    tokens may be split between the ranks, or be complete on every rank.

    Args:
        twin: the reference's layer.
        drawn: the situation.
        values: (ranks,) the losses that the system returned.
        router: (E, dim) the sum over the ranks of the router's gradients of the losses.
    """
    xs = [inputs.tokens.double() for inputs in drawn.calls[-1]]
    all_tokens = torch.cat(xs)
    split = 1 / len(xs)  # of the gradient, if the ranks share it
    top_k = twin.top_k
    # what the loss may be over: its tokens on each rank, the choices that count, and the shares of
    # the gradient that a rank may have
    scopes: list[tuple[str, list[Tensor], int, tuple[float, ...]]] = [
        ("own tokens", xs, top_k, (1.0,)),
        ("first choices of own tokens", xs, 1, (1.0,)),
        ("all tokens", [all_tokens] * len(xs), top_k, (1.0, split)),
        ("first choices of all tokens", [all_tokens] * len(xs), 1, (1.0, split)),
    ]
    found = []
    for scope, tokens_of_ranks, choices, shares in scopes:
        losses = torch.stack([_balance_loss(twin, x, choices) for x in tokens_of_ranks])
        (gradient,) = torch.autograd.grad(losses.sum(), twin.router.get_parameter("weight"))
        losses = losses.detach()
        factor = float((values * losses).sum() / losses.square().sum())  # the least-squares fit
        loss_error = relative(values, factor * losses, least=1e-2)
        gradient_error = min(
            relative(router, share * factor * gradient, least=1e-2) for share in shares
        )
        # NaN: no factor can be told, as if all expected losses are 0
        error = torch.inf if math.isnan(factor) else max(loss_error, gradient_error)
        found.append(_Found(f"auxiliary loss over {scope}", error, factor))
    return min(found, key=lambda each: each.error)


def _balance_loss(twin: MoE, x: Tensor, choices: int) -> Tensor:
    """Return the load-balance loss over tokens, with loads from the first `choices` choices of each
    token."""
    logits, probs, copies = _choice(twin, x)
    every = torch.ones(len(x), dtype=torch.bool)
    counted = [each for each in copies if each.slot < choices]
    return reference_loss(
        LoadBalance(1.0),
        logits,
        probs=probs,
        copies=counted,
        valid_T=every,
        sequence_T=torch.zeros(len(x)),
        earlier_E=twin.step_counts,
    )


def _capacity_error(twin: MoE, x: Tensor, y: Tensor, drawn: _Drawn) -> float:
    """Return the error of the rows that a rank kept; inf if more or fewer rows were kept than
    fit.

    Args:
        x: the rank's tokens, (tokens, dim); each has one expert.
        y: what the system returned for them.
    """
    _, _, copies = _choice(twin, x)
    is_kept = (y != 0).any(1)  # rows of dropped tokens must be 0
    capacity = drawn.situation.capacity
    assert capacity is not None
    # the rows that an expert accepts: its even share of the copies times the factor, rounded up
    room = -int(-capacity * len(x) // twin.num_experts)
    for expert in range(twin.num_experts):
        tokens = [copy.token for copy in copies if copy.expert == expert]
        if int(is_kept[tokens].sum()) != min(len(tokens), room):
            return torch.inf
    without_drops = reference_output(twin, x, copies).detach()
    return relative(y[is_kept], without_drops[is_kept], least=1e-2)


Shard = Callable[[str, dict[str, Tensor], "Rank"], Tensor]
"""(name of a parameter, the reference's gradients by name, the rank) -> the gradient that the
rank's parameter must have."""


@dataclass(frozen=True)
class Rank:
    """One rank of a mesh, with its collectives. All ranks of a group must call a collective
    together."""

    mesh: Mesh

    @property
    def grid(self) -> Grid:
        """The mesh: `grid.dp`, `grid.ep`, `grid.coordinate(rank, "ep")`."""
        return self.mesh.grid

    @property
    def number(self) -> int:
        """This rank's number in the mesh."""
        return self.mesh.rank

    def group(self, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks, this one included, whose coordinates differ from this rank's on `axes`
        only, ascending."""
        return self.grid.group(self.number, axes)

    def all_reduce(self, tensor: Tensor, *axes: Axis) -> Tensor:
        """Return the sum of `tensor` over the group along `axes`; not differentiable."""
        return all_reduce_sum(self.mesh.transport, self.group(*axes), tensor)

    def all_gather(self, tensor: Tensor, *axes: Axis) -> list[Tensor]:
        """Return the tensors of all ranks of the group along `axes`, which must have one shape; not
        differentiable."""
        return all_gather(self.mesh.transport, self.group(*axes), tensor)

    def all_to_all(self, parts: Sequence[Tensor], *axes: Axis) -> list[Tensor]:
        """Send part i to the i-th rank of the group and return the parts that its ranks sent to
        this one; not differentiable.

        Args:
            parts: one tensor per rank of the group, (rows, ...). The number of rows may differ;
                other dimensions may not.
            axes: the axes along which the group lies.
        """
        peers = self.group(*axes)
        transport = self.mesh.transport
        assert len(parts) == len(peers), f"{len(parts)} parts for the {len(peers)} ranks of {axes}"
        # how many rows each peer sends to each one
        counts_of_peers = self.all_gather(torch.tensor([len(part) for part in parts]), *axes)
        place = peers.index(self.number)  # which of the peers this rank is
        received = []
        sends = {}
        receives = {}
        for peer, part, counts in zip(peers, parts, counts_of_peers):
            if peer == self.number:
                received.append(part.detach().clone())
                continue
            buffer = part.new_empty(int(counts[place]), *part.shape[1:])
            received.append(buffer)
            if len(part):
                sends[peer] = part.detach().contiguous()
            if len(buffer):
                receives[peer] = buffer
        tag = transport.take_tags(1)
        transfer = Transfer(rank=self.number, tag=tag, sends=sends, receives=receives)
        handle = transport.issue(transfer)
        transport.wait(handle)
        return received


def small_meshes(max_ranks: int = 4, axes: Sequence[Axis] = ("tp", "ep", "etp")) -> list[Grid]:
    """Return every mesh of 1, 2, 4, ... ranks up to `max_ranks` whose sizes are powers of two.

    Args:
        max_ranks: number of ranks of the largest mesh.
        axes: the axes, of tp, ep and etp, that may be larger than 1.
    """
    powers = [2**n for n in range(max_ranks.bit_length()) if 2**n <= max_ranks]

    def sizes(axis: Axis, world: int) -> list[int]:
        """Return the sizes that an axis may have in a mesh of `world` ranks."""
        if axis not in axes:
            return [1]
        return [power for power in powers if world % power == 0]

    meshes = []
    for world in powers:
        for tp, ep, etp in product(sizes("tp", world), sizes("ep", world), sizes("etp", world)):
            if world % (ep * etp) == 0:
                meshes.append(Grid(world=world, tp=tp, ep=ep, etp=etp))
    return meshes


def assert_equivalent(
    make_layer: Callable[[Rank], nn.Module],
    reference: nn.Module,
    grid: Grid,
    *,
    dim: int,
    shard: Shard,
    finish: Callable[[nn.Module, Rank], None],
    tokens: Sequence[int] = (5, 0, 3, 1),
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Compare a layer on a mesh with a single-rank reference: outputs, input gradients, and every
    parameter's gradient.

    All ranks run in this process, so the layer's collectives must be those of `Rank`. The loss is
    the mean over data-parallel groups of sum(y * dy). Every rank runs backward on its own group's
    sum. Then `finish` reduces the gradients as training does before the optimizer steps, and they
    are compared with the reference's.

    Args:
        make_layer: builds a rank's layer in float64 with the reference's weights. The layer maps
            (tokens, dim) to the same shape.
        reference: the single-rank layer, in float64.
        grid: the mesh.
        dim: width of a token.
        shard: returns the gradient that a rank's parameter must have, given the reference's
            gradients.
        finish: reduces a layer's gradients over the ranks, as your training loop does.
        tokens: number of tokens of each data-parallel group in turn, repeated as needed; should
            include a 0.
        tolerance: largest error that passes, relative to the largest expected value.
        seed: seed of the tokens, the cotangents and the order in which ranks run.

    Raises:
        AssertionError: a value is wrong. The message names it, its mesh and rank and, if one factor
            explains it, the factor.
    """
    single = _SingleRankRun.of(reference, grid, dim=dim, tokens=tokens, seed=seed)

    def run(transport: AbstractTransport) -> dict[str, tuple[Tensor, Tensor]]:
        """Run one rank and return (actual, expected) of its values by name."""
        rank = Rank(Mesh(grid, transport))
        group = grid.coordinate(rank.number, "dp")
        layer = make_layer(rank)
        x = single.xs[group].clone().requires_grad_()
        y = layer(x)
        (y * single.dys[group]).sum().backward()
        finish(layer, rank)
        pairs = {
            "output": (y.detach(), single.expected_y[group]),
            "gradient of the input": (_grad_or_zeros(x), single.expected_dx[group]),
        }
        for name, parameter in layer.named_parameters():
            expected = shard(name, single.gradients, rank)
            actual = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
            pairs[f"gradient of {name}"] = (actual, expected)
        return pairs

    _check(run_ranks(grid.world, run, seed=seed), grid, tolerance)


@dataclass(frozen=True, kw_only=True)
class _SingleRankRun:
    """Each data-parallel group's tokens and cotangents, and what a single-rank layer makes of
    them."""

    xs: list[Tensor]
    """(tokens, dim) float64 of each group."""
    dys: list[Tensor]
    """Cotangents of the output, of the tokens' shape."""
    expected_y: Sequence[Tensor]
    """The output of each group."""
    expected_dx: Sequence[Tensor]
    """The gradient of each group's tokens in a rank's own backward pass."""
    gradients: dict[str, Tensor]
    """The gradients of the reference's parameters by name; zeros where it has none."""

    @classmethod
    def of(
        cls, reference: nn.Module, grid: Grid, *, dim: int, tokens: Sequence[int], seed: int
    ) -> _SingleRankRun:
        """Draw the groups' tokens and cotangents and run the reference on all of them."""
        generator = torch.Generator().manual_seed(seed)
        counts = [tokens[group % len(tokens)] for group in range(grid.dp)]

        def normal() -> list[Tensor]:
            """Draw normally distributed numbers, (tokens, dim) for each group."""
            return [
                torch.randn(count, dim, generator=generator, dtype=torch.float64)
                for count in counts
            ]

        xs = normal()
        dys = normal()
        leaf = torch.cat(xs).requires_grad_()
        reference.zero_grad()
        y = reference(leaf)
        ((y * torch.cat(dys)).sum() / grid.dp).backward()
        assert leaf.grad is not None
        return cls(
            xs=xs,
            dys=dys,
            expected_y=y.detach().split(counts),
            expected_dx=(leaf.grad * grid.dp).split(counts),  # of a group's sum, not of the mean
            gradients={
                name: _grad_or_zeros(parameter).clone()
                for name, parameter in reference.named_parameters()
            },
        )


def _check(
    by_rank: Sequence[dict[str, tuple[Tensor, Tensor]]], grid: Grid, tolerance: float
) -> None:
    """Raise an AssertionError for the first wrong value of {quantity: (actual, expected)} of all
    ranks."""
    # by quantity in the order of the first ranks that have it, then by rank
    pairs_of_ranks: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for rank, pairs in enumerate(by_rank):
        for quantity, pair in pairs.items():
            pairs_of_ranks.setdefault(quantity, {})[rank] = pair
    for quantity, pairs_by_rank in pairs_of_ranks.items():
        for rank, (actual, expected) in pairs_by_rank.items():
            # divided by 1e-6 at least, for values that are expected to be 0
            error = relative(actual, expected, least=1e-6)
            if error <= tolerance:
                continue
            if actual.shape == expected.shape:
                says = (
                    f"relative error {error:.1e}: {_factor_in_words(list(pairs_by_rank.values()))}"
                )
            else:
                says = f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
            mesh = f"tp={grid.tp} ep={grid.ep} etp={grid.etp} of {grid.world} ranks"
            raise AssertionError(f"{quantity} on {mesh}, rank {rank}: {says}")


def _factor_in_words(pairs: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Return a text about the factor by which (actual, expected) of all ranks are off."""
    factor = ratio(
        torch.cat([actual.flatten() for actual, _ in pairs]),
        torch.cat([expected.flatten() for _, expected in pairs]),
    )
    if factor is None:
        return "no single factor explains it"
    return f"it is {factor:.4g} times what it should be"
