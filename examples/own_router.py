"""A router of your own in twenty lines: each token goes to the experts with the largest random
fixed projections of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic import MoE
from moesaic.kernels.choice import normalized
from moesaic.kernels.top_k import top_k_indices
from moesaic.routing.router import AbstractRouter, chosen, token_choice
from moesaic.routing.routing import Choice, Scores


class LocalitySensitive(AbstractRouter):
    """A router without learnt parameters that sends tokens of similar direction to the same
    experts."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.register_buffer("directions", F.normalize(torch.randn(num_experts, dim), dim=1))

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Score each expert by the token's projection on the expert's direction."""
        logits = F.linear(x_TD, self.directions.to(x_TD.dtype))
        probs = logits.softmax(-1)
        return Scores(logits, probs, probs, logits.detach())

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose the `top_k` experts with the largest scores."""
        return token_choice(top_k_indices(scores.rank_by, top_k))

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        """Normalise the routing weights over the chosen experts."""
        return normalized(chosen(scores.gates, choice, top_k))


def main() -> None:
    """Route random tokens through a layer with this router."""
    torch.manual_seed(0)
    moe = MoE(dim=32, hidden=64, num_experts=4, top_k=2, router=LocalitySensitive, losses=())
    y, routing = moe(torch.randn(100, 32), return_routing=True)
    print(tuple(y.shape), "tokens per expert:", routing.counts.tolist())


if __name__ == "__main__":
    main()
