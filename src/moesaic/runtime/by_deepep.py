"""A layer's dispatch, experts and combine with DeepEP in place of the programs."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.comm.deepep import DeepEP
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, Weights, compute_dtype
from moesaic.kernels.permute import permute, sort_by_expert, unpermute
from moesaic.routing.route import Routed


def run_by_deepep(deepep: DeepEP, experts: AbstractExperts, x_TD: Tensor, routed: Routed) -> Tensor:
    """Dispatch, run and combine: (tokens, dim) -> (tokens, dim).

    Raises:
        InputError: for tokens that are not computed in bfloat16, or a router in which tokens do not choose.
    """
    if compute_dtype(x_TD.dtype, x_TD.device) is not torch.bfloat16:
        raise InputError("plan.all_to_all=deepep moves bfloat16: train with --precision bfloat16, or choose multicast")
    top_k = routed.record.choice.per_token
    if top_k is None:
        raise InputError(
            "plan.all_to_all=deepep needs a router in which every token chooses top_k experts: choose multicast"
        )
    routing, gathered = routed.routing, routed.record.gathered
    assert gathered is not None
    sent = routed.record.sent
    expert, weight = routed.record.choice.expert, routing.weight
    if sent is not None:
        expert = expert.masked_fill(~sent, -1)
        weight = weight if routing.has_unsent else weight.new_zeros(len(expert)).masked_scatter(sent, weight)
    most_tokens = int(gathered.tokens.max())

    def run(x: Tensor, gate: Tensor | None, sharded: Weights, common: Weights) -> Tensor:
        assert gate is not None
        received = deepep.dispatch(
            x, expert.view(-1, top_k), gate.view(-1, top_k), num_experts=experts.num_experts, most_tokens=most_tokens
        )
        here = received.expert >= 0
        token, slot = here.nonzero(as_tuple=True)
        local = received.expert[token, slot].long()
        held = len(sharded[0])
        counts = torch.bincount(local, minlength=held)
        order = sort_by_expert(token, local, counts, len(received.x), None)
        gates = received.weight[token, slot][order.order]
        out = experts.compute(sharded, common, permute(received.x, order), gates, order.ends)
        return deepep.combine(unpermute(out, order, dtype=x.dtype), received)

    y: Tensor = experts(x_TD.to(torch.bfloat16), weight.float(), run=run)
    return y.to(x_TD.dtype)
