"""Linear softmax top-k.

Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2.1 (softmax over the chosen experts);
Fedus et al., "Switch Transformers" (2021), section 2.1 (softmax over all experts, one of them chosen).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.routing.router import AbstractRouter, chosen, linear_scores, token_choice, top_k_indices
from moesaic.routing.routing import Choice, Scores


class SoftmaxTopK(AbstractRouter):
    """Each token goes to the `top_k` experts with the largest logits.

    Args:
        dim: width of a token.
        num_experts: how many experts there are.
        normalize: "after" applies the softmax to the chosen logits, so that a token's weights sum to one (Mixtral,
            Qwen3); "before" applies it to all of them and keeps the chosen probabilities as they are (Switch, OLMoE).
            With one expert per token "after" would always give weight 1 and no gradient, so it is refused in training.
        bias: add a trained bias to the logits, zero at first (gpt-oss).
        scale: factor on the weights (`routed_scaling_factor` of DeepSeek-V2).
        device: where parameters are made; None for torch's default device.
        dtype: of the parameters; None for torch's default dtype.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        normalize: Literal["before", "after"] = "after",
        bias: bool = False,
        scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts)
        if normalize not in ("before", "after"):
            raise InputError(f'normalize={normalize!r} is unknown: write normalize="before" or normalize="after"')
        self.weight = linear_scores(dim, num_experts, device, dtype)
        self.bias = nn.Parameter(torch.zeros(num_experts, device=device, dtype=dtype)) if bias else None
        self.normalize, self.scale = normalize, scale

    @torch.no_grad()
    def reset_state(self) -> None:
        if self.bias is not None:
            self.bias.zero_()

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        bias = None if self.bias is None else self.bias.to(x_TD.dtype)
        logits_TE = F.linear(x_TD, self.weight.to(x_TD.dtype), bias)
        probs_TE = logits_TE.softmax(-1)
        return Scores(logits_TE, probs_TE, probs_TE, logits_TE.detach())

    def choose(self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        return token_choice(top_k_indices(scores.rank_by, top_k))

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        if self.normalize == "after":
            return self.scale * chosen(scores.logits, choice, top_k).softmax(-1).reshape(-1)
        return self.scale * chosen(scores.gates, choice, top_k).reshape(-1)

    def check(self, top_k: int) -> None:
        super().check(top_k)
        if top_k == 1 and self.normalize == "after" and self.num_experts > 1:
            raise InputError(
                'top_k=1 with normalize="after" gives every token weight 1 and the router no gradient: '
                'use SoftmaxTopK(..., normalize="before")'
            )
