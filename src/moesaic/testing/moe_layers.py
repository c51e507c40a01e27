"""Tests any system's complete MoE layer over ranks as a black box: router, experts, auxiliary loss, capacity, gradient norm.

`routed_experts` tests only what follows the router; this module includes the router. Every rank runs the layer on its own
tokens and back-propagates the sum over its own outputs.

- The router's gradient, summed over the ranks, must be that of all tokens. What data parallelism makes of it is not tested.
- An auxiliary loss may be computed over a rank's own tokens or over all tokens. The test finds out which, and the factor by
  which the loss is multiplied.
- Under a capacity, the output row of a dropped token must be 0 and every other row exact. As many tokens must be kept as fit;
  which of them are kept is not tested.

    for finding in certify_layer(make, group):  # all ranks of the group together
        print(finding)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moesaic.testing.routed_experts import Certified, SwiGLUWeights, attempted


class AbstractMoELayer(ABC):
    """One rank's part of a layer under test: a softmax router without a bias, and SwiGLU experts."""

    def normalizes(self, top_k: int) -> bool:
        """Whether a token's routing weights are divided by their sum. If so, top_k=1 leaves the router without a gradient."""
        return top_k > 1

    @abstractmethod
    def run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output (tokens, dim) and the auxiliary loss (), or None if the layer has no such loss.

        Args:
            x: (tokens, dim); there may be no tokens.
        """

    @abstractmethod
    def gradients(self) -> tuple[Tensor, SwiGLUWeights]:
        """Return this rank's gradient of the router (E, dim), and those of this rank's experts; zeros where it has none."""

    def norm(self) -> float | None:
        """Return the norm of the whole gradient that the system computes for clipping; None if it computes none."""
        return None


@dataclass(frozen=True)
class LayerSpec:
    """The weights and settings from which one rank's part of the layer is made."""

    router: Tensor
    """(E, dim)."""
    experts: SwiGLUWeights
    """The experts of all ranks; `SwiGLUWeights.owned` returns one rank's."""
    group: dist.ProcessGroup
    top_k: int
    capacity: float | None
    """Capacity factor: each rank sends an expert at most this many times the even share of its copies. None drops nothing."""


MakeLayer = Callable[[LayerSpec], AbstractMoELayer | None]
"""Makes one rank's part of the layer; all ranks ask for the same. Returns None if the system has no such capacity."""


@dataclass(frozen=True)
class LayerSituation:
    """Numbers of tokens, and router settings, with which some layers fail."""

    name: str
    says: str
    tokens: tuple[int, ...]
    """Number of tokens of each rank in turn, repeated as needed."""
    top_k: int = 2
    capacity: float | None = None


LAYER_SITUATIONS = (
    LayerSituation("even", "the same number of tokens on every rank", (16,)),
    LayerSituation("uneven", "ranks hold different numbers of tokens", (9, 3, 12, 5)),
    LayerSituation("one expert", "the same, and one expert per token", (9, 3, 12, 5), top_k=1),
    LayerSituation("empty rank", "a rank holds no token", (8, 0, 5, 3)),
    LayerSituation("capacity", "copies beyond a rank's even share are dropped; one expert per token", (16,), 1, 1.0),
)
"""The situations that `certify_layer` tries by default."""
DIM, HIDDEN, EXPERTS = 16, 24, 8


def certify_layer(
    make: MakeLayer, group: dist.ProcessGroup | None = None, *, situations: Sequence[LayerSituation] = LAYER_SITUATIONS
) -> list[Certified]:
    """Run a layer in every situation and compare it with a dense one in float64. Returns the same on every rank.

    Args:
        make: makes one rank's part of the layer; called twice per situation.
        group: the ranks that share the experts; None for all. Their number must divide 8.
        situations: the situations to try.

    Returns:
        a finding per situation and quantity. Situations with a capacity that the system does not have are skipped. If some
        ranks fail in a situation while others succeed, the remaining situations are not run.
    """
    group = group or dist.group.WORLD
    assert group is not None, "start a process group first"
    compare_group = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    findings: list[Certified] = []
    is_over = False
    for situation in situations:
        spec, xs, dys = _draw(situation, group)
        run = partial(_run, make, spec, xs[group.rank()], dys[group.rank()])
        results, failed, is_over = attempted(run, compare_group, is_over=is_over)
        if failed:
            findings.append(Certified(situation.name, "all", torch.inf, None, failed))
        if results is None:
            continue
        errors_by_rank: list[_Errors] = [{}] * group.size()
        own_errors = _errors(results, _Dense(spec, xs, dys, results.normalizes), situation, compare_group)
        dist.all_gather_object(errors_by_rank, own_errors, group=compare_group)
        for name in dict.fromkeys(name for errors in errors_by_rank for name in errors):
            worst = max((errors.get(name, (torch.inf, None)) for errors in errors_by_rank), key=lambda pair: pair[0])
            findings.append(Certified(situation.name, name, *worst))
    return findings


_Errors = dict[str, tuple[float, float | None]]
"""Quantity -> (its error, the single factor that explains the error or None)."""


@dataclass(frozen=True)
class _LayerResults:
    """Results of one rank in one situation."""

    normalizes: bool
    y: Tensor
    dx: Tensor
    router: Tensor
    experts: SwiGLUWeights
    norm: float | None
    auxiliary: tuple[Tensor, Tensor] | None
    """The auxiliary loss, and the router's gradient of that loss alone."""


def _run(make: MakeLayer, spec: LayerSpec, tokens: Tensor, dy: Tensor) -> _LayerResults | None:
    layer, auxiliary_layer = make(spec), make(spec)
    if layer is None or auxiliary_layer is None:
        return None
    x = tokens.clone().requires_grad_()
    y, loss = layer.run(x)
    torch.autograd.backward(y, dy)
    router, experts = layer.gradients()
    router, experts = router.clone(), SwiGLUWeights(experts.w1.clone(), experts.w3.clone(), experts.w2.clone())
    dx, norm, auxiliary = torch.zeros_like(x) if x.grad is None else x.grad, layer.norm(), None
    if loss is not None:
        other_y, loss = auxiliary_layer.run(tokens.clone().requires_grad_())
        assert loss is not None
        (loss + 0 * other_y.sum()).backward()
        auxiliary = loss.detach(), auxiliary_layer.gradients()[0]
    return _LayerResults(layer.normalizes(spec.top_k), y.detach(), dx, router, experts, norm, auxiliary)


def _errors(results: _LayerResults, dense: _Dense, situation: LayerSituation, group: dist.ProcessGroup) -> _Errors:
    """Return this rank's errors in a situation, by quantity."""
    rank = group.rank()
    if situation.capacity is not None:
        return {"capacity": (dense.capacity_error(results.y, rank, situation.capacity), None)}
    own, names = dense.experts.owned(group), ("w1", "w3", "w2")
    errors = {
        "output": _relative_error([results.y], [dense.ys[rank]]),
        "tokens": _relative_error([results.dx], [dense.dxs[rank]]),
        "router": _relative_error([_sum_over_ranks(results.router, group)], [dense.router]),
        "experts": _relative_error(
            [getattr(results.experts, name) for name in names], [getattr(own, name) for name in names]
        ),
    }
    if results.norm is not None:
        errors["gradient norm"] = _relative_error([torch.tensor(results.norm)], [dense.norm()])
    if results.auxiliary is not None:
        errors |= _auxiliary(*results.auxiliary, dense, group)
    return errors


def _auxiliary(value: Tensor, router: Tensor, dense: _Dense, group: dist.ProcessGroup) -> _Errors:
    """Return {the tokens that an auxiliary loss is computed over: (its error, the factor by which it is multiplied)}.

    The gradient of a loss over all tokens may be split between the ranks, or be complete on every rank.
    """
    values = [torch.zeros((), dtype=torch.float64) for _ in range(group.size())]
    dist.all_gather(values, value.double(), group=group)
    values_by_rank, router_gradient, errors = torch.stack(values), _sum_over_ranks(router, group), {}
    for scope, (expected, gradient) in dense.auxiliary().items():
        factor = float((values_by_rank * expected).sum() / (expected * expected).sum())
        shares = (1.0, 1 / group.size()) if scope.endswith("all tokens") else (1.0,)
        value_error = _relative_error([values_by_rank], [factor * expected])[0]
        gradient_errors = [_relative_error([router_gradient], [share * factor * gradient])[0] for share in shares]
        is_number = not any(math.isnan(number) for number in (factor, value_error, *gradient_errors))
        error = max(value_error, min(gradient_errors)) if is_number else torch.inf
        errors[f"auxiliary loss over {scope}"] = (error, factor)
    closest = min(errors, key=lambda name: errors[name][0])
    return {closest: errors[closest]}


class _Dense:
    """The values that all ranks must have, computed in float64 by multiplying every token with every expert."""

    def __init__(self, spec: LayerSpec, xs: Sequence[Tensor], dys: Sequence[Tensor], normalizes: bool) -> None:
        self._router, self._top_k, self._xs = spec.router.double(), spec.top_k, [x.double() for x in xs]
        router = self._router.clone().requires_grad_()
        leaves = [getattr(spec.experts, name).double().requires_grad_() for name in ("w1", "w3", "w2")]
        inputs = [x.clone().requires_grad_() for x in self._xs]
        self.ys, self._chosen = [], []
        for x, dy in zip(inputs, dys):
            probs = F.linear(x, router).softmax(-1)
            weights, chosen = probs.topk(spec.top_k)
            weights = weights / weights.sum(-1, keepdim=True) if normalizes else weights
            weight_TE = torch.zeros_like(probs).scatter(1, chosen, weights)
            inner = F.silu(torch.einsum("td,eid->tei", x, leaves[0])) * torch.einsum("td,eid->tei", x, leaves[1])
            y = torch.einsum("tei,edi,te->td", inner, leaves[2], weight_TE)
            (y * dy.double()).sum().backward()
            self.ys.append(y.detach())
            self._chosen.append(chosen)
        self.dxs = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        self.router = router.grad if router.grad is not None else torch.zeros_like(router)
        self.experts = SwiGLUWeights(*(leaf.grad for leaf in leaves))

    def norm(self) -> Tensor:
        """Return the norm of the gradient of all parameters, router and experts together."""
        gradients = (self.router, self.experts.w1, self.experts.w3, self.experts.w2)
        return torch.stack([tensor.square().sum() for tensor in gradients]).sum().sqrt()

    def auxiliary(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return E * sum_e f_e P_e of each rank and the router's gradient summed over ranks, for each possible set of tokens.

        A rank without tokens has 0. f counts the copies of all choices or, as in GShard, only those of a token's first choice.
        """
        per_rank, all_tokens = list(zip(self._xs, self._chosen)), (torch.cat(self._xs), torch.cat(self._chosen))
        losses = {}
        for scope, sets in (("own tokens", per_rank), ("all tokens", [all_tokens] * len(per_rank))):
            for name, choices in ((scope, self._top_k), (f"first choices of {scope}", 1)):
                router = self._router.clone().requires_grad_()
                values = []
                for x, chosen in sets:
                    copies = torch.bincount(chosen[:, :choices].flatten(), minlength=EXPERTS).double()
                    share = copies / copies.sum().clamp(min=1)
                    probs = F.linear(x, router).softmax(-1).sum(0) / max(len(x), 1)
                    values.append(EXPERTS * (share * probs).sum())
                torch.stack(values).sum().backward()
                assert router.grad is not None
                losses[name] = (torch.stack(values).detach(), router.grad)
        return losses

    def capacity_error(self, y: Tensor, rank: int, factor: float) -> float:
        """Return the error of the rows that were kept; inf if more or fewer rows were kept than fit."""
        expected, chosen = self.ys[rank], self._chosen[rank].flatten()
        is_kept = (y != 0).any(1)
        room = -int(-factor * len(y) // EXPERTS)
        for expert in range(EXPERTS):
            of_expert = chosen == expert
            if int((is_kept & of_expert).sum()) != min(int(of_expert.sum()), room):
                return torch.inf
        return _relative_error([y[is_kept]], [expected[is_kept]])[0]


def _draw(situation: LayerSituation, group: dist.ProcessGroup) -> tuple[LayerSpec, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    counts = [situation.tokens[rank % len(situation.tokens)] for rank in range(group.size())]
    scale = DIM**-0.5
    experts = SwiGLUWeights(
        normal(EXPERTS, HIDDEN, DIM) * scale, normal(EXPERTS, HIDDEN, DIM) * scale, normal(EXPERTS, DIM, HIDDEN) * scale
    )
    spec = LayerSpec(normal(EXPERTS, DIM), experts, group, situation.top_k, situation.capacity)
    return spec, [normal(count, DIM) for count in counts], [normal(count, DIM) for count in counts]


def _sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.detach().double()
    dist.all_reduce(total, group=group)
    return total


def _relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float | None]:
    """Return the largest difference relative to the largest expected value, and the factor that explains it, if one does."""
    if [each.shape for each in actual] != [each.shape for each in expected]:
        return torch.inf, None
    a, b = (torch.cat([each.detach().double().flatten() for each in side]) for side in (actual, expected))
    if not b.numel():
        return 0.0, None
    scale = max(float(b.abs().max()), 1e-2)  # a gradient that should be 0 still has rounding errors
    error = float((a - b).abs().nan_to_num(nan=torch.inf).max()) / scale
    factor = float((a * b).sum() / (b * b).sum()) if bool(b.any()) else 1.0
    return error, factor if float((a - factor * b).abs().nan_to_num(nan=torch.inf).max()) <= 1e-3 * scale else None
