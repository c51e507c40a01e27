"""Tests any system's expert parallelism as a black box: does it compute the outputs and gradients of the dense experts?

The layer under test takes each rank's tokens with their experts and routing weights, and returns each token's weighted sum.
Every system has this interface, however it dispatches, multiplies and combines. Every rank runs the layer on its own tokens
and back-propagates the sum over its own outputs. The requirements are:

- The gradients of a token and of its routing weights are complete on the rank that holds the token.
- An expert's gradient on its owner is the sum over all tokens that reached the expert, from any rank.

    def make(weights, group):           # on every rank, in an initialised process group
        return MyExperts(weights, group)

    for finding in certify(make, group): # all ranks of the group together
        print(finding)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class SwiGLUWeights:
    """The experts of all ranks: y = w2 (silu(w1 x) * w3 x)."""

    w1: Tensor
    """(E, hidden, dim)."""
    w3: Tensor
    """(E, hidden, dim)."""
    w2: Tensor
    """(E, dim, hidden)."""

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks together."""
        return len(self.w1)

    def owned(self, group: dist.ProcessGroup) -> SwiGLUWeights:
        """Return this rank's experts. Ranks own contiguous, equal shares in the order of ranks."""
        per_rank = self.num_experts // group.size()
        part = slice(group.rank() * per_rank, (group.rank() + 1) * per_rank)
        return SwiGLUWeights(self.w1[part], self.w3[part], self.w2[part])


class AbstractRoutedExperts(ABC):
    """One rank's part of the experts under test."""

    @abstractmethod
    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Return each token's weighted sum of expert outputs, (tokens, dim); all ranks call it together.

        Args:
            x: (tokens, dim), requires a gradient unless the situation says otherwise; there may be no tokens.
            experts: (tokens, top_k) int64 indices into the experts of all ranks; a token's experts are distinct.
            gates: (tokens, top_k) routing weights, require a gradient.
        """

    @abstractmethod
    def gradients(self) -> SwiGLUWeights:
        """Return the gradients accumulated so far for this rank's experts; zeros for an expert without any."""


Make = Callable[[SwiGLUWeights, dist.ProcessGroup], AbstractRoutedExperts]
"""Makes one rank's part from the weights of all experts; `SwiGLUWeights.owned` returns the rank's own."""


@dataclass(frozen=True)
class Situation:
    """Numbers of tokens, and a routing, with which some implementations fail."""

    name: str
    says: str
    """What is special about it, for readers."""
    tokens: tuple[int, ...]
    """Number of tokens of each rank in turn, repeated as needed."""
    experts: Callable[[Tensor, int], Tensor]
    """Maps random choices (tokens, top_k) and the number of experts to the choices that are used."""
    calls: int = 1
    """Number of forward and backward passes over which gradients accumulate."""
    tokens_learn: bool = True
    """Whether tokens require a gradient. After a frozen embedding, those of the first layer do not."""
    recomputes: bool = False
    """Run under activation checkpointing: the forward pass runs again inside the backward pass."""
    is_summed: bool = False
    """Whether the gradient of the output is one expanded number, as in the backward pass of a sum."""


def _as_drawn(chosen: Tensor, num_experts: int) -> Tensor:
    return chosen


def _first_ones(chosen: Tensor, num_experts: int) -> Tensor:
    """Choose the first top_k experts for every token."""
    return torch.arange(chosen.shape[1]).expand_as(chosen).contiguous()


def _last_half(chosen: Tensor, num_experts: int) -> Tensor:
    """Choose only experts of the last half, so that the first ranks receive no token."""
    half = num_experts // 2
    return half + (chosen[:, :1] + torch.arange(chosen.shape[1])) % half


SITUATIONS = (
    Situation("even", "the same number of tokens on every rank", (6,), _as_drawn),
    Situation("uneven", "ranks hold different numbers of tokens", (5, 1, 9, 2), _as_drawn),
    Situation("empty rank", "a rank holds no token", (4, 0, 3, 5), _as_drawn),
    Situation("one owner", "all tokens go to the experts of the first rank", (6, 3), _first_ones),
    Situation("idle owner", "the experts of a rank get no token", (6, 3), _last_half),
    Situation("no tokens", "no rank holds any token", (0,), _as_drawn),
    Situation("accumulation", "two backward passes before a step", (4, 7), _as_drawn, calls=2),
    Situation(
        "frozen tokens",
        "only experts and routing weights need gradients",
        (4, 0, 7),
        _as_drawn,
        tokens_learn=False,
    ),
    Situation("recomputation", "under torch.utils.checkpoint", (4, 7), _as_drawn, recomputes=True),
    Situation("summed", "the gradient of the output is one number, expanded", (4, 7), _as_drawn, is_summed=True),
)
"""The situations that `certify` tries by default."""


@dataclass(frozen=True)
class Certified:
    """The finding for one quantity in one situation, over all ranks."""

    situation: str
    quantity: str
    """output, or the gradients of tokens, gates or experts; `certify_layer` has further ones."""
    error: float
    """Largest absolute difference over all ranks, relative to the largest expected value; inf for NaN."""
    factor: float | None
    """The factor by which all values are off; None if no single factor explains the error."""
    failed: str = ""
    """The exception that was raised instead of a result, if any; the error is infinite then."""

    def holds(self, tolerance: float = 1e-4) -> bool:
        """Whether the error is within the tolerance. The default allows for experts computed in float32."""
        return self.error <= tolerance

    def __str__(self) -> str:
        """Return a line that says whether the quantity is right, and how far it is off."""
        if self.failed:
            return f"{self.situation}: {self.failed}"
        by = f", {self.factor:.4g} times what it should be" if self.factor is not None and not self.holds() else ""
        return f"{self.situation}: {self.quantity} {'right' if self.holds() else 'wrong'}, {self.error:.1e}{by}"


def certify(
    make: Make,
    group: dist.ProcessGroup | None = None,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    dim: int = 16,
    hidden: int = 24,
    dtype: torch.dtype = torch.float32,
    situations: Sequence[Situation] = SITUATIONS,
) -> list[Certified]:
    """Run the experts in every situation and compare them with dense experts in float64. Returns the same on every rank.

    Args:
        make: makes one rank's part; called once per situation.
        group: the ranks that share the experts; None for all.
        num_experts: experts of all ranks together; a multiple of the number of ranks, at least twice `top_k`.
        top_k: experts per token.
        dim: width of a token.
        hidden: inner width of an expert.
        dtype: dtype of tokens and weights.
        situations: the situations to try.
    """
    group = group or dist.group.WORLD
    assert group is not None, "start a process group first"
    # The comparison has a process group of its own: a rank that raises may leave messages of the experts pending. The group is
    # never destroyed, since a later group of the same ranks would take its name and find its stale addresses in the store.
    compare_group = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    findings, is_over = [], False
    for situation in situations:
        drawn = _draw(situation, group.size(), num_experts, top_k, dim, hidden, dtype)
        expected = _dense(drawn, group)
        results, failed, is_over = attempted(partial(_run, make, drawn, group), compare_group, is_over=is_over)
        errors = dict.fromkeys(expected, _NO_RESULT) if results is None else _compared(results, expected, compare_group)
        findings += [Certified(situation.name, name, *errors[name], failed) for name in expected]
    return findings


def attempted(run: Callable[[], T], group: dist.ProcessGroup, *, is_over: bool) -> tuple[T | None, str, bool]:
    """Run the code under test on every rank of a group, and exchange what it raised.

    Args:
        run: the code under test.
        group: the process group over which exceptions are exchanged.
        is_over: whether ranks have failed differently before. They may then wait for different messages: nothing is run.

    Returns:
        result: what `run` returned; None if any rank failed.
        failure: what failed, the same text on all ranks; empty if nothing did.
        is_over: whether nothing can be run from now on.
    """
    if is_over:
        return None, "is left out: after what failed before, ranks are not at the same place", True
    result, failed = None, ""
    try:
        result = run()
    except Exception as error:  # the code under test may raise anything, which is a finding
        failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    failures: list[str] = [""] * group.size()
    dist.all_gather_object(failures, failed, group=group)
    if len(set(failures)) > 1:
        return None, "; ".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure), True
    return result, failed, False


_NO_RESULT = (torch.inf, None)


@dataclass(frozen=True)
class _Drawn:
    """A situation with the weights and the inputs of all ranks."""

    situation: Situation
    weights: SwiGLUWeights
    calls: list[list[tuple[Tensor, Tensor, Tensor, Tensor]]]
    """By call, then by rank: (tokens, experts, gates, gradient of the output)."""


def _draw(
    situation: Situation, world: int, num_experts: int, top_k: int, dim: int, hidden: int, dtype: torch.dtype
) -> _Drawn:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    scale = dim**-0.5
    weights = SwiGLUWeights(
        normal(num_experts, hidden, dim) * scale, normal(num_experts, hidden, dim) * scale,
        normal(num_experts, dim, hidden) * scale,
    )  # fmt: skip
    calls = []
    for _ in range(situation.calls):
        ranks = []
        for rank in range(world):
            count = situation.tokens[rank % len(situation.tokens)]
            chosen = torch.rand(count, num_experts, generator=generator).topk(top_k).indices
            gates = torch.rand(count, top_k, generator=generator, dtype=torch.float64).to(dtype)
            dy = torch.ones(1, 1, dtype=dtype).expand(count, dim) if situation.is_summed else normal(count, dim)
            ranks.append((normal(count, dim), situation.experts(chosen, num_experts), gates, dy))
        calls.append(ranks)
    return _Drawn(situation, weights, calls)


Results = dict[str, list[Tensor]]
"""Quantity -> its tensors on one rank."""


def _run(make: Make, drawn: _Drawn, group: dist.ProcessGroup) -> Results:
    layer, situation = make(drawn.weights, group), drawn.situation
    results: Results = {"output": [], "tokens": [], "gates": []}
    for call in drawn.calls:
        tokens, experts, weights, dy = call[group.rank()]
        x, gates = tokens.clone().requires_grad_(situation.tokens_learn), weights.clone().requires_grad_()
        y = (
            checkpoint(layer.run, x, experts, gates, use_reentrant=False)
            if situation.recomputes
            else layer.run(x, experts, gates)
        )
        torch.autograd.backward(y, dy)
        results["output"].append(y.detach())
        if situation.tokens_learn:
            results["tokens"].append(torch.zeros_like(x) if x.grad is None else x.grad)
        results["gates"].append(torch.zeros_like(gates) if gates.grad is None else gates.grad)
    gradients = layer.gradients()
    return {**results, "experts": [gradients.w1, gradients.w3, gradients.w2]}


def _dense(drawn: _Drawn, group: dist.ProcessGroup) -> Results:
    """Return the results that this rank must have, computed in float64 by multiplying every token with every expert."""
    names = ("w1", "w3", "w2")
    leaves = SwiGLUWeights(*(getattr(drawn.weights, name).double().requires_grad_() for name in names))
    results: Results = {"output": [], "tokens": [], "gates": []}
    for call in drawn.calls:
        own = call[group.rank()]
        for rank, (x, experts, gates, dy) in enumerate(call):
            x_TD, gates_TK = x.double().requires_grad_(), gates.double().requires_grad_()
            weight_TE = torch.zeros(len(x), leaves.num_experts, dtype=torch.float64).scatter(1, experts, gates_TK)
            up_TEI = torch.einsum("td,eid->tei", x_TD, leaves.w3)
            inner_TEI = F.silu(torch.einsum("td,eid->tei", x_TD, leaves.w1)) * up_TEI
            y = torch.einsum("tei,edi,te->td", inner_TEI, leaves.w2, weight_TE)
            (y * dy.double()).sum().backward()
            if call[rank] is own:
                assert x_TD.grad is not None
                assert gates_TK.grad is not None
                results["output"].append(y.detach())
                if drawn.situation.tokens_learn:
                    results["tokens"].append(x_TD.grad)
                results["gates"].append(gates_TK.grad)
    owned = SwiGLUWeights(*(getattr(leaves, name).grad for name in names)).owned(group)
    return {**results, "experts": [owned.w1, owned.w3, owned.w2]}


def _compared(
    actual: Mapping[str, list[Tensor]], right: Mapping[str, list[Tensor]], group: dist.ProcessGroup
) -> dict[str, tuple[float, float | None]]:
    """Return, over all ranks, each quantity's error and the factor that explains it, or None."""
    errors: dict[str, tuple[float, float | None]] = {}
    for quantity, expected in right.items():
        empty = torch.zeros(0, dtype=torch.float64)
        computed = [tensor.detach().double() for tensor in actual[quantity]]
        has_same_shapes = [tensor.shape for tensor in computed] == [tensor.shape for tensor in expected]
        b = torch.cat([empty, *(tensor.flatten() for tensor in expected)])
        a = (
            torch.cat([empty, *(tensor.flatten() for tensor in computed)])
            if has_same_shapes
            else torch.full_like(b, torch.inf)
        )
        sums = torch.stack([(a * b).sum(), (b * b).sum()])
        dist.all_reduce(sums, group=group)
        factor = float(sums[0] / sums[1]) if sums[1] else 1.0
        largest = torch.stack([_largest(a - b), _largest(b), _largest(a - factor * b)])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        error, scale, explained = largest.nan_to_num(nan=torch.inf).tolist()
        errors[quantity] = (error / (scale or 1.0), factor if explained <= 1e-3 * scale else None)
    return errors


def _largest(values: Tensor) -> Tensor:
    """Return the largest magnitude: inf if a value is NaN, 0 if there are no values."""
    return values.abs().nan_to_num(nan=torch.inf).max() if values.numel() else values.new_zeros(())
