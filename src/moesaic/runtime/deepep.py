"""A layer's dispatch, experts and combine with DeepEP instead of programs: its kernels move tokens
between GPUs, one row per token and rank.

DeepEP is an optional package. The code uses the interface of its `ElasticBuffer` (version 2). It
has not run on GPUs here; a test runs it against an imitation of that interface. The backward pass
of dispatch is combine, and vice versa.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.collectives import with_gradient
from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, ExpertCall, Weights, compute_dtype
from moesaic.kernels.permute import permute, sort_by_expert, unpermute
from moesaic.routing.route import Routed


def missing() -> str:
    """Return the reason why DeepEP cannot run here; "" if it can."""
    if importlib.util.find_spec("deep_ep") is None:
        return "the package deep_ep is not installed"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not hasattr(importlib.import_module("deep_ep"), "ElasticBuffer"):
        return "the package deep_ep has no ElasticBuffer (it comes with version 2)"
    return ""


@dataclass(frozen=True)
class DispatchRoute:
    """The route of one dispatch, for combine and the backward pass. It keeps its buffer alive when
    later calls use another."""

    buffer: Any
    """The `ElasticBuffer` of the dispatch."""
    handle: Any
    """The handle that the buffer returned."""

    def redispatch(self, x: Tensor) -> Tensor:
        """Send other rows of the same tokens: (tokens, dim) bfloat16 -> (R, dim)."""
        # num_sms is passed because DeepEP 2.0 and 2.1 compute a default from num_experts before
        # they read it off the handle.
        rows, _, _, _, event = self.buffer.dispatch(
            x, handle=self.handle, num_sms=self.handle.num_sms, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return rows

    def combine(self, rows: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the sums of rows, and of weights if there are any, at their origins."""
        sums, weights, event = self.buffer.combine(
            rows, handle=self.handle, topk_weights=weight, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return sums, weights


@dataclass
class Received:
    """The tokens that have at least one expert on this rank."""

    x: Tensor
    """(R, dim), differentiable."""
    expert: Tensor
    """(R, top_k) int64: expert on this rank, or -1 for an expert of another rank."""
    weight: Tensor
    """(R, top_k) float32 routing weights, differentiable."""
    route: DispatchRoute
    """The route back, for combine."""


class DeepEP:
    """Dispatch and combine within a group. All layers of a mesh share one object and its buffers;
    get it with `DeepEP.of`.

    There is one buffer for each (dim, top_k), large enough for the largest call so far. All ranks
    of the group open a buffer together; they agree on when, since all of them pass the same
    `most_tokens`. A buffer that became too small is freed after the backward pass of the last call
    that used it.

    Args:
        group: the process group over ep.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._module = importlib.import_module("deep_ep")
        self._buffers: dict[tuple[int, int], tuple[int, Any]] = {}
        """By (dim, top_k): the number of tokens per rank for which there is room, and the
        buffer."""

    @classmethod
    def of(cls, mesh: Mesh) -> DeepEP:
        """Return the object for a mesh's ep group. The package must be installed."""
        if cls not in mesh.shared:
            mesh.shared[cls] = cls(mesh.sparse["ep"].get_group())
        deepep: DeepEP = mesh.shared[cls]
        return deepep

    def dispatch(
        self, x: Tensor, expert: Tensor, weight: Tensor, *, num_experts: int, most_tokens: int
    ) -> Received:
        """Send each token once to every rank that has one of its experts; differentiable.

        Args:
            x: (tokens, dim) bfloat16.
            expert: (tokens, top_k) int64, -1 for a dropped copy.
            weight: (tokens, top_k) float32.
            num_experts: number of experts of the layer.
            most_tokens: largest number of tokens of any rank of the group, the same on all of them.
        """
        dim = x.shape[1]
        top_k = expert.shape[1]
        room, _ = self._buffers.get((dim, top_k), (-1, None))  # -1: there is no buffer yet
        if room < most_tokens:
            buffer = self._module.ElasticBuffer(
                self._group, num_max_tokens_per_rank=most_tokens, hidden=dim, num_topk=top_k
            )
            self._buffers[(dim, top_k)] = (most_tokens, buffer)
        room_and_buffer = self._buffers[(dim, top_k)]
        # `_Dispatch` appends the route, since an autograd function returns only tensors to autograd
        routes: list[DispatchRoute] = []
        rows, weights, experts = _Dispatch.apply(
            *room_and_buffer, num_experts, routes, x, weight, expert
        )
        return Received(rows, expert=experts, weight=weights, route=routes[0])

    def combine(self, rows: Tensor, received: Received) -> Tensor:
        """Sum each token's rows at its origin: (R, dim) -> (tokens, dim); differentiable."""
        route = received.route
        return with_gradient(
            rows,
            lambda rows: route.combine(rows)[0],
            lambda d_sums: route.redispatch(d_sums.contiguous()),
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        room: int,
        buffer: Any,
        num_experts: int,
        routes: list[DispatchRoute],
        x: Tensor,
        weight: Tensor,
        expert: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send tokens to the ranks of their experts, and keep the route for the way back."""
        rows, experts, weights, handle, event = buffer.dispatch(
            x,
            topk_idx=expert,
            topk_weights=weight,
            num_experts=num_experts,
            num_max_tokens_per_rank=room,
            expert_alignment=1,  # no rows between experts
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        ctx.route = DispatchRoute(buffer, handle)
        routes.append(ctx.route)
        ctx.mark_non_differentiable(experts)
        return rows, weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_weights: Tensor, _: Tensor) -> tuple[Any, ...]:
        d_x, d_weight = ctx.route.combine(d_rows.contiguous(), d_weights.contiguous())
        return None, None, None, None, d_x, d_weight, None


def run_by_deepep(deepep: DeepEP, experts: AbstractExperts, x_TD: Tensor, routed: Routed) -> Tensor:
    """Run dispatch, experts and combine: (tokens, dim) -> (tokens, dim).

    Raises:
        InputError: if the tokens' products are not in bfloat16, or the router is not one in which
            each token chooses top_k.
    """
    if compute_dtype(x_TD.dtype, x_TD.device) is not torch.bfloat16:
        raise InputError(
            "plan.all_to_all=deepep moves bfloat16: train with --precision bfloat16, or "
            "choose multicast"
        )
    top_k = routed.record.choice.per_token
    if top_k is None:
        raise InputError(
            "plan.all_to_all=deepep needs a router in which every token chooses top_k "
            "experts: choose multicast"
        )
    routing = routed.routing
    gathered = routed.record.gathered
    assert gathered is not None
    sent = routed.record.sent
    expert = routed.record.choice.expert
    weight = routing.weight
    if sent is not None:  # some copies were dropped
        expert = expert.masked_fill(~sent, -1)
        if not routing.has_unsent:  # dropped copies have no weight in the routing
            weight = weight.new_zeros(len(expert)).masked_scatter(sent, weight)
    tokens_of_ranks = gathered.on_host[:, 1]  # messages begin: valid tokens, tokens
    most_tokens = int(tokens_of_ranks.max())

    def run(x: Tensor, gate: Tensor | None, sharded: Weights, common: Weights) -> Tensor:
        """Send tokens to their experts' ranks, run these, and return the sums of the results."""
        assert gate is not None
        received = deepep.dispatch(
            x,
            expert.view(-1, top_k),
            gate.view(-1, top_k),
            num_experts=experts.num_experts,
            most_tokens=most_tokens,
        )
        # A copy is a token (row of what arrived) and one of its top_k choices that is here.
        is_local = received.expert >= 0
        token, choice = is_local.nonzero(as_tuple=True)
        local_expert = received.expert[token, choice].long()
        num_local = len(sharded[0])
        counts = torch.bincount(local_expert, minlength=num_local)
        order = sort_by_expert(
            token, local_expert, counts, num_tokens=len(received.x), rows_per_token=None
        )
        gates = received.weight[token, choice][order.order]  # sorted by expert, as rows are
        rows = permute(received.x, order)
        out = experts.compute(ExpertCall(sharded, common, rows=rows, gates=gates, ends=order.ends))
        return deepep.combine(unpermute(out, order, dtype=x.dtype), received)

    y: Tensor = experts(x_TD.to(torch.bfloat16), weight.float(), run=run)
    return y.to(x_TD.dtype)
