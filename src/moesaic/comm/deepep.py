"""DeepEP as an all-to-all that is not lowered: its kernels move tokens, one row per token and rank, between GPUs.

Optional: looked for, never required. Written to the interface of its `ElasticBuffer` (version 2); it has not run on GPUs here,
a test runs it against an imitation of that interface. Backward of dispatch is combine, and the other way round.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def missing() -> str:
    """Return why DeepEP cannot run here; "" if it can."""
    if importlib.util.find_spec("deep_ep") is None:
        return "the package deep_ep is not installed"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not hasattr(importlib.import_module("deep_ep"), "ElasticBuffer"):
        return "the package deep_ep has no ElasticBuffer (it comes with version 2)"
    return ""


@dataclass
class Received:
    """Tokens that have at least one expert on this rank."""

    x: Tensor
    """(R, dim), differentiable."""
    expert: Tensor
    """(R, top_k) int64: the rank's own expert, -1 for one elsewhere."""
    weight: Tensor
    """(R, top_k) float32 routing weights, differentiable."""
    handle: Any
    """What combine needs."""


class DeepEP:
    """Dispatch and combine within a group.

    Args:
        group: the process group over ep.
        num_experts: of the layer.
    """

    def __init__(self, group: Any, num_experts: int) -> None:
        self._group = group
        self._num_experts = num_experts
        self._module = importlib.import_module("deep_ep")
        self._buffer: Any = None
        self._room = 0

    def dispatch(self, x: Tensor, expert: Tensor, weight: Tensor, most_tokens: int) -> Received:
        """Send each token once to every rank that has one of its experts; differentiable.

        Args:
            x: (tokens, dim) bfloat16.
            expert: (tokens, top_k) int64, -1 for a dropped copy.
            weight: (tokens, top_k) float32.
            most_tokens: of any rank of the group, the same on all of them.
        """
        if most_tokens > self._room:
            self._room = most_tokens
            self._buffer = self._module.ElasticBuffer(
                self._group, num_max_tokens_per_rank=most_tokens, hidden=x.shape[1], num_topk=expert.shape[1]
            )
        box: list[Any] = []
        rows, weights, experts = _Dispatch.apply(self, box, x, weight, expert)
        return Received(rows, experts, weights, box[0])

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Sum each token's rows at its origin: (R, dim) -> (tokens, dim); differentiable."""
        out: Tensor = _Combine.apply(self, rows, received.handle)
        return out

    def send(self, x: Tensor, handle: Any) -> Tensor:
        """Send rows along the way that a handle keeps."""
        rows, _, _, _, event = self._buffer.dispatch(x, handle=handle, async_with_compute_stream=True)
        event.current_stream_wait()
        return rows

    def first_send(self, x: Tensor, expert: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Send rows by experts; return rows, experts, weights and the handle."""
        rows, experts, weights, handle, event = self._buffer.dispatch(
            x,
            topk_idx=expert,
            topk_weights=weight,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._room,
            expert_alignment=1,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        return rows, experts, weights, handle

    def sum_back(self, rows: Tensor, handle: Any, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the sums of rows, and of weights where there are any, at the origins."""
        sums, weights, event = self._buffer.combine(
            rows, handle=handle, topk_weights=weight, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return sums, weights


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, deepep: DeepEP, box: list[Any], x: Tensor, weight: Tensor, expert: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, experts, weights, handle = deepep.first_send(x, expert, weight)
        ctx.deepep, ctx.handle = deepep, handle
        box.append(handle)
        ctx.mark_non_differentiable(experts)
        return rows, weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_weights: Tensor, _: Tensor) -> tuple[Any, ...]:
        d_x, d_weight = ctx.deepep.sum_back(d_rows.contiguous(), ctx.handle, d_weights.contiguous())
        return None, None, d_x, d_weight, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deepep: DeepEP, rows: Tensor, handle: Any) -> Tensor:
        ctx.deepep, ctx.handle = deepep, handle
        return deepep.sum_back(rows, handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sums: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.deepep.send(d_sums.contiguous(), ctx.handle), None
