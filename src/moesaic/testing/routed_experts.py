"""Anybody's expert parallelism, black box: does it compute what the dense experts compute, and all of their gradients?

What is tested takes each rank's tokens with their experts and routing weights, and returns each token's weighted sum. That is
the seam that every system has: how it dispatches, multiplies and combines is its own. Every rank runs it on tokens of its own
and back-propagates the sum over its own outputs. Then a token's and a routing weight's gradient must be whole on the rank that
holds the token, and an expert's gradient on its owner must be the sum over all tokens that reached it, from any rank.

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
        """Of all ranks."""
        return len(self.w1)

    def owned(self, group: dist.ProcessGroup) -> SwiGLUWeights:
        """Return this rank's experts: contiguous shares in the order of ranks."""
        each = self.num_experts // group.size()
        part = slice(group.rank() * each, (group.rank() + 1) * each)
        return SwiGLUWeights(self.w1[part], self.w3[part], self.w2[part])


class AbstractRoutedExperts(ABC):
    """One rank's end of the experts under test."""

    @abstractmethod
    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Return each token's weighted sum of expert outputs, (tokens, dim); all ranks call it together.

        Args:
            x: (tokens, dim), with gradient; possibly no token.
            experts: (tokens, top_k) int64 numbers among the experts of all ranks, different for one token.
            gates: (tokens, top_k) routing weights, with gradient.
        """

    @abstractmethod
    def gradients(self) -> SwiGLUWeights:
        """Return the gradients of this rank's experts that have added up so far; zeros for an expert without any."""


Make = Callable[[SwiGLUWeights, dist.ProcessGroup], AbstractRoutedExperts]
"""Makes one rank's end from the weights of all experts, of which it takes its own (`SwiGLUWeights.owned`)."""


@dataclass(frozen=True)
class Situation:
    """Tokens and routing that some exchanges do not survive."""

    name: str
    says: str
    """What is special."""
    tokens: tuple[int, ...]
    """Per rank in turn, repeated as needed."""
    experts: Callable[[Tensor, int], Tensor]
    """From random choices (tokens, top_k) and the number of experts to the choices."""
    calls: int = 1
    """Forward and backward passes whose gradients add up."""
    tokens_learn: bool = True
    """Tokens want a gradient; in the first layer behind a frozen embedding they want none."""
    recomputes: bool = False
    """The forward pass runs again inside the backward pass (activation checkpointing)."""
    is_summed: bool = False
    """The gradient of the output is one number, expanded, as the backward pass of a sum makes it."""


def _as_drawn(chosen: Tensor, num_experts: int) -> Tensor:
    return chosen


def _first_ones(chosen: Tensor, num_experts: int) -> Tensor:
    """Every token to the first top_k experts."""
    return torch.arange(chosen.shape[1]).expand_as(chosen).contiguous()


def _last_half(chosen: Tensor, num_experts: int) -> Tensor:
    """No token to the experts of the first ranks."""
    half = num_experts // 2
    return half + (chosen[:, :1] + torch.arange(chosen.shape[1])) % half


SITUATIONS = (
    Situation("even", "as many tokens on every rank", (6,), _as_drawn),
    Situation("uneven", "ranks hold different numbers of tokens", (5, 1, 9, 2), _as_drawn),
    Situation("empty rank", "a rank holds no token", (4, 0, 3, 5), _as_drawn),
    Situation("one owner", "all tokens go to the experts of the first rank", (6, 3), _first_ones),
    Situation("idle owner", "the experts of a rank get no token", (6, 3), _last_half),
    Situation("no tokens", "no rank holds any token", (0,), _as_drawn),
    Situation("accumulation", "two backward passes before a step", (4, 7), _as_drawn, calls=2),
    Situation(
        "frozen tokens",
        "tokens want no gradient, experts and routing weights do",
        (4, 0, 7),
        _as_drawn,
        tokens_learn=False,
    ),
    Situation("recomputation", "under torch.utils.checkpoint", (4, 7), _as_drawn, recomputes=True),
    Situation("summed", "the gradient of the output is one number, expanded", (4, 7), _as_drawn, is_summed=True),
)
"""What `certify` tries."""


@dataclass(frozen=True)
class Certified:
    """One quantity of one situation, over all ranks."""

    situation: str
    quantity: str
    """output, tokens (their gradients), gates (theirs), experts (theirs)."""
    error: float
    """Largest absolute difference over all ranks by the largest expected value; inf where it is not a number."""
    factor: float | None
    """What everything is off by, where one factor explains it."""
    failed: str = ""
    """What was raised instead of a result; the errors are infinite then."""

    def holds(self, tolerance: float = 1e-4) -> bool:
        """Whether it is right to a tolerance: experts may be computed in float32."""
        return self.error <= tolerance

    def __str__(self) -> str:
        """Say what is wrong, or that nothing is."""
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
    """Run somebody's experts in every situation and compare with dense experts in float64; the same on every rank.

    Args:
        make: makes one rank's end; called once per situation.
        group: the ranks that share the experts; None for all.
        num_experts: of all ranks; a multiple of the ranks, at least twice `top_k`.
        top_k: experts per token.
        dim: of a token.
        hidden: of an expert.
        dtype: of tokens and weights.
        situations: to try.
    """
    group = group or dist.group.WORLD
    assert group is not None, "start a process group first"
    # What is compared travels apart from what the experts send, of which a rank that raised may leave something behind. The
    # group stays: another one of the same ranks would take over its name and meet its addresses in the store.
    beside = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    found, is_over = [], False
    for situation in situations:
        drawn = _draw(situation, group.size(), num_experts, top_k, dim, hidden, dtype)
        right = _dense(drawn, group)
        results, failed, is_over = attempted(partial(_run, make, drawn, group), beside, is_over=is_over)
        errors = dict.fromkeys(right, _NOTHING) if results is None else _compared(results, right, beside)
        found += [Certified(situation.name, name, *errors[name], failed) for name in right]
    return found


def attempted(run: Callable[[], T], group: dist.ProcessGroup, *, is_over: bool) -> tuple[T | None, str, bool]:
    """Run somebody's code on every rank of a group.

    Args:
        run: the code.
        group: tells what it raised.
        is_over: ranks are not at the same place any more, so nothing can be run.

    Returns:
        what it returned, None where any rank failed; what failed, the same on all ranks; whether it is over from now on.
    """
    if is_over:
        return None, "is left out: after what failed before, ranks are not at the same place", True
    result, failed = None, ""
    try:
        result = run()
    except Exception as error:  # whatever somebody's code raises is the finding
        failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    said: list[str] = [""] * group.size()
    dist.all_gather_object(said, failed, group=group)
    if len(set(said)) > 1:
        return None, "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(said) if each), True
    return result, failed, False


_NOTHING = (torch.inf, None)


@dataclass(frozen=True)
class _Drawn:
    """What the ranks of a situation hold."""

    situation: Situation
    weights: SwiGLUWeights
    calls: list[list[tuple[Tensor, Tensor, Tensor, Tensor]]]
    """Per call and rank: tokens, experts, gates, gradient of the output."""


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
"""Tensors of one rank by quantity."""


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
    """Return what this rank must have, by products of every token with every expert in float64."""
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
    """Return each quantity's error and the one factor that explains it, over all ranks."""
    found: dict[str, tuple[float, float | None]] = {}
    for quantity, expected in right.items():
        nothing = torch.zeros(0, dtype=torch.float64)
        got = [each.detach().double() for each in actual[quantity]]
        is_alike = [each.shape for each in got] == [each.shape for each in expected]
        b = torch.cat([nothing, *(each.flatten() for each in expected)])
        a = torch.cat([nothing, *(each.flatten() for each in got)]) if is_alike else torch.full_like(b, torch.inf)
        sums = torch.stack([(a * b).sum(), (b * b).sum()])
        dist.all_reduce(sums, group=group)
        factor = float(sums[0] / sums[1]) if sums[1] else 1.0
        largest = torch.stack([_largest(a - b), _largest(b), _largest(a - factor * b)])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        error, scale, explained = largest.nan_to_num(nan=torch.inf).tolist()
        found[quantity] = (error / (scale or 1.0), factor if explained <= 1e-3 * scale else None)
    return found


def _largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, inf where one is not a number; 0 of none."""
    return values.abs().nan_to_num(nan=torch.inf).max() if values.numel() else values.new_zeros(())
