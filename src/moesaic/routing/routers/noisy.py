"""Noisy top-k gating: Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2.1, equations 3 to 5."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.routing.router import AbstractRouter, chosen, linear_scores, token_choice, top_k_indices
from moesaic.routing.routing import Choice, Scores


class NoisyTopK(AbstractRouter):
    """In training each logit gets Gaussian noise with a learnt standard deviation, `softplus(x @ W_noise)`.

    Weights are the softmax over the chosen noisy logits. The gate matrix starts as `nn.Linear` does and `W_noise` at
    zero (so every logit starts with noise of ln 2), as in the paper's appendix A.

    Args:
        dim: width of a token.
        num_experts: how many experts there are.
        device: where parameters are made; None for torch's default device.
        dtype: of the parameters; None for torch's default dtype.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts)
        self.weight = linear_scores(dim, num_experts, device, dtype)
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, dim, device=device, dtype=dtype))

    @torch.no_grad()
    def init_normal(self, std: float) -> None:
        """Draw the gate matrix anew from N(0, std); `W_noise` goes back to zero."""
        self.weight.normal_(std=std)
        self.reset_state()

    @torch.no_grad()
    def reset_state(self) -> None:
        self.noise_weight.zero_()

    def draw(self, num_tokens: int, device: torch.device) -> Tensor | None:
        return torch.randn(num_tokens, self.num_experts, device=device) if self.training else None

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        logits_TE = F.linear(x_TD, self.weight.to(x_TD.dtype))
        if noise is not None:
            deviation_TE = F.softplus(F.linear(x_TD, self.noise_weight.to(x_TD.dtype)))
            logits_TE = logits_TE + noise.to(x_TD.dtype) * deviation_TE
        probs_TE = logits_TE.softmax(-1)
        return Scores(logits_TE, probs_TE, probs_TE, logits_TE.detach())

    def choose(self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        return token_choice(top_k_indices(scores.rank_by, top_k))

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return chosen(scores.logits, choice, top_k).softmax(-1).reshape(-1)

    def check(self, top_k: int) -> None:
        super().check(top_k)
        if top_k == 1 and self.num_experts > 1:
            raise InputError("noisy top-k with top_k=1 gives every token weight 1 and no gradient: use top_k >= 2")
