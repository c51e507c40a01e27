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


@dataclass(frozen=True)
class DispatchRoute:
    """The way that the rows of one dispatch took. It keeps its buffer alive, whatever later calls use."""

    buffer: Any
    """The `ElasticBuffer` that dispatched."""
    handle: Any
    """What the buffer returned."""

    def again(self, x: Tensor) -> Tensor:
        """Send other rows of the same tokens: (tokens, dim) bfloat16 -> (R, dim)."""
        # num_sms is said because DeepEP 2.0 and 2.1 compute a default from num_experts before they read it off the handle.
        rows, _, _, _, event = self.buffer.dispatch(
            x, handle=self.handle, num_sms=self.handle.num_sms, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return rows

    def back(self, rows: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the sums of rows, and of weights where there are any, at the origins."""
        sums, weights, event = self.buffer.combine(
            rows, handle=self.handle, topk_weights=weight, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return sums, weights


@dataclass
class Received:
    """Tokens that have at least one expert on this rank."""

    x: Tensor
    """(R, dim), differentiable."""
    expert: Tensor
    """(R, top_k) int64: the rank's own expert, -1 for one elsewhere."""
    weight: Tensor
    """(R, top_k) float32 routing weights, differentiable."""
    sent: DispatchRoute
    """What combine needs."""


@dataclass(frozen=True)
class _Room:
    """A buffer, and what it has room for."""

    tokens: int
    """Of each rank."""
    buffer: Any


class DeepEP:
    """Dispatch and combine within a group. All layers of a mesh share one, and so its buffers.

    There is one buffer for each (dim, top_k), as large as the largest call so far. Opening one takes all ranks of the group;
    they agree on when, since all of them pass the same `most_tokens`. A buffer that became too small goes once the last call
    that used it has run backward.

    Args:
        group: the process group over ep.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._module = importlib.import_module("deep_ep")
        self._rooms: dict[tuple[int, int], _Room] = {}

    def dispatch(self, x: Tensor, expert: Tensor, weight: Tensor, *, num_experts: int, most_tokens: int) -> Received:
        """Send each token once to every rank that has one of its experts; differentiable.

        Args:
            x: (tokens, dim) bfloat16.
            expert: (tokens, top_k) int64, -1 for a dropped copy.
            weight: (tokens, top_k) float32.
            num_experts: how many experts the layer has.
            most_tokens: how many tokens any rank of the group has at most, the same on all of them.
        """
        room = self._room(x.shape[1], expert.shape[1], most_tokens)
        box: list[DispatchRoute] = []
        rows, weights, experts = _Dispatch.apply(room, num_experts, box, x, weight, expert)
        return Received(rows, experts, weights, box[0])

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Sum each token's rows at its origin: (R, dim) -> (tokens, dim); differentiable."""
        out: Tensor = _Combine.apply(received.sent, rows)
        return out

    def _room(self, dim: int, top_k: int, most_tokens: int) -> _Room:
        room = self._rooms.get((dim, top_k))
        if room is None or room.tokens < most_tokens:
            buffer = self._module.ElasticBuffer(
                self._group, num_max_tokens_per_rank=most_tokens, hidden=dim, num_topk=top_k
            )
            room = self._rooms[dim, top_k] = _Room(most_tokens, buffer)
        return room


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, room: _Room, num_experts: int, box: list[DispatchRoute], x: Tensor, weight: Tensor, expert: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, experts, weights, handle, event = room.buffer.dispatch(
            x,
            topk_idx=expert,
            topk_weights=weight,
            num_experts=num_experts,
            num_max_tokens_per_rank=room.tokens,
            expert_alignment=1,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        ctx.sent = DispatchRoute(room.buffer, handle)
        box.append(ctx.sent)
        ctx.mark_non_differentiable(experts)
        return rows, weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_weights: Tensor, _: Tensor) -> tuple[Any, ...]:
        d_x, d_weight = ctx.sent.back(d_rows.contiguous(), d_weights.contiguous())
        return None, None, None, d_x, d_weight, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: DispatchRoute, rows: Tensor) -> Tensor:
        ctx.sent = sent
        return sent.back(rows)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sums: Tensor) -> tuple[None, Tensor]:
        return None, ctx.sent.again(d_sums.contiguous())
