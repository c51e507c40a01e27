"""Experts that gather all tokens, with and without bugs; `test_routed_experts.py` runs them in
processes."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moesaic.testing.certify import AbstractRoutedExperts, Certified, LayerSpec, MoEWeights, certify


class _Gather(torch.autograd.Function):
    """Gathers all ranks' rows, padded to one length. The backward pass sums all ranks' gradients of
    a rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(gathered, rows.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


class Gathering(AbstractRoutedExperts):
    """Runs each rank's own experts on the tokens of all ranks, and sums the outputs on the rank
    that holds the token."""

    bug = ""

    def __init__(self, spec: LayerSpec) -> None:
        self.group = spec.group
        own = spec.weights.owned(spec.group)
        self.first = self.group.rank() * own.num_experts
        self.w1, self.w3, self.w2 = (
            each.clone().requires_grad_() for each in (own.w1, own.w3, own.w2)
        )

    def run(self, x: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        if self.bug == "fails":
            raise ValueError("no such thing\nas two lines")
        if self.bug == "fails on rank 1" and self.group.rank() == 1 and len(x) == 1:
            raise ValueError("not with one token")
        most = torch.tensor(len(x))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        missing = int(most) - len(x)
        if self.bug == "router detached":
            gates = gates.detach() + 0 * gates
        xs = _Gather.apply(F.pad(x, (0, 0, 0, missing)), self.group).flatten(0, 1)
        weights = _Gather.apply(F.pad(gates, (0, 0, 0, missing)), self.group).flatten(0, 1)
        chosen = _Gather.apply(F.pad(experts, (0, 0, 0, missing)), self.group).flatten(0, 1)
        y = torch.zeros_like(xs)
        for number, (w1, w3, w2) in enumerate(zip(self.w1, self.w3, self.w2)):
            weight = (weights * (chosen == self.first + number)).sum(1, keepdim=True)
            y = y + weight * ((F.silu(xs @ w1.T) * (xs @ w3.T)) @ w2.T)
        y = _Summed.apply(y, self.group)
        start = self.group.rank() * int(most)
        return y[start : start + len(x)]

    def gradients(self) -> MoEWeights:
        scale = 1 / self.group.size() if self.bug == "experts averaged" else 1.0
        return MoEWeights(
            *(
                torch.zeros_like(w) if w.grad is None else w.grad * scale
                for w in (self.w1, self.w3, self.w2)
            )
        )


class _Summed(torch.autograd.Function):
    """Sums over ranks. The backward pass sums too, since each rank's loss reads the rank's own
    rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = rows.clone()
        dist.all_reduce(rows, group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def findings(bugs: list[str]) -> dict[str, list[Certified]]:
    """Return the findings for each bug."""
    findings = {}
    for bug in bugs:
        buggy = type("Buggy", (Gathering,), {"bug": bug})
        findings[bug] = certify(buggy)
    return findings


def findings_of_one_that_fails() -> list[Certified]:
    """Return the findings if one rank raises while the other waits for it, until a short
    timeout."""
    # longer than one rank ever lags behind the other
    brief = dist.new_group(timeout=datetime.timedelta(seconds=10))
    return certify(type("Buggy", (Gathering,), {"bug": "fails on rank 1"}), brief)
