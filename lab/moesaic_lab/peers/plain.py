"""Expert parallelism in plain PyTorch, as commonly written today: the reference of
`moesaic bench train`.

The stages are those of torchtitan's expert parallelism (2026): sort token copies by expert,
exchange the counts, send the rows, order the received rows by expert, run the experts as one
grouped product, send the results back, undo the sort, and sum each token's copies by their routing
weights. Autograd computes the backward pass. The stages run one after another without overlap.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from moesaic.experts.experts import ExpertCall
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.runtime.sharding import shard_experts
from moesaic_lab.peers.exchange import AbstractExchange


class PlainExpertParallel(nn.Module):
    """A dropless top-k layer with experts split over all ranks and its own copy of a layer's
    weights.

    Args:
        layer: our unsharded layer, the same on all ranks. Its router gives each token the same
            number of copies.
        exchange: exchanges rows between all ranks.
    """

    def __init__(self, layer: MoE, exchange: AbstractExchange) -> None:
        super().__init__()
        self.top_k = layer.top_k
        self.num_experts = layer.num_experts
        self.router = copy.deepcopy(layer.router)
        self.experts = copy.deepcopy(layer.experts)
        grid = Grid(world=exchange.world, ep=exchange.world)
        shard_experts(self.experts, grid, exchange.rank, device_mesh=None)  # as plain tensors
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (..., dim) -> (..., dim)."""
        x_TD = x.reshape(-1, x.shape[-1])
        scores = self.router.scores(x_TD, noise=None, token_ids=None)
        choice = self.router.choose(scores, self.top_k, valid_T=None, noise=None)
        weight_TK = self.router.weigh(scores, choice, self.top_k).view(-1, self.top_k)

        # rows in the order of their experts, so of the experts' ranks too
        order = choice.expert.argsort(stable=True)
        rows = x_TD.index_select(0, choice.token[order])

        # every rank tells each other one how many rows it sends to each of its experts
        world = self.exchange.world
        counts = torch.bincount(choice.expert, minlength=self.num_experts)
        of_each_rank = (self.num_experts // world,) * world
        received = self.exchange.move(counts, of_each_rank, of_each_rank).view(world, -1)
        sends = counts.view(world, -1).sum(1).tolist()
        receives = received.sum(1).tolist()

        # dispatch, experts, combine
        arrived = self.exchange(rows, sends, receives)
        results = self._run_experts(arrived, received)
        out = self.exchange(results, receives, sends)
        in_token_order = out.index_select(0, _inverse(order))
        results_TKD = in_token_order.view(len(x_TD), self.top_k, -1)
        weight_T1K = weight_TK.to(out.dtype).unsqueeze(1)
        y_TD = torch.bmm(weight_T1K, results_TKD).squeeze(1)
        return y_TD.view(x.shape)

    def _run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run this rank's experts over rows in the order (source, expert) and return the results in
        the same order.

        Args:
            rows: (R, dim) received rows.
            counts: (world, experts of this rank) int64, number of rows by source and expert.
        """
        # the local expert of each (source, expert), then of each row
        expert_of_count = torch.arange(counts.shape[1]).repeat(len(counts))
        expert = expert_of_count.repeat_interleave(counts.view(-1), output_size=len(rows))
        order = expert.argsort(stable=True)
        ends = counts.sum(0).cumsum(0).to(torch.int32)
        sorted_rows = rows.index_select(0, order)
        # without routing weights, which are applied later, where tokens are summed
        call = ExpertCall(*self.experts.weights(), rows=sorted_rows, gates=None, ends=ends)
        out = self.experts.compute(call)
        return out.index_select(0, _inverse(order))


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
