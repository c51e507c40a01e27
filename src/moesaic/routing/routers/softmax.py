"""Softmax top-k routing with linear logits.

Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2.1 (softmax over the chosen
experts); Fedus et al., "Switch Transformers" (2021), section 2.1 (softmax over all experts, one of
them chosen).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moesaic.kernels.choice import softmax_rows
from moesaic.kernels.choice_call import ChoiceRule
from moesaic.routing.router import FusedChoice, LinearRouter, SoftmaxWeights
from moesaic.routing.routing import Scores


class SoftmaxTopK(SoftmaxWeights, LinearRouter):
    """A router that sends each token to the `top_k` experts with the largest logits.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`.
        normalize: "after" applies the softmax to the chosen logits, and a token's weights sum to
            one (Mixtral, Qwen3). "before" applies the softmax to all logits and uses the chosen
            probabilities unchanged (Switch, OLMoE). With one expert per token "after" always gives
            weight 1 and no gradient, so training refuses it.
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
        super().__init__(dim, num_experts, bias=bias, scale=scale, device=device, dtype=dtype)
        self._set_normalize(normalize)

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        logits_TE = self.logits(x_TD)
        probs_TE = softmax_rows(logits_TE)
        return Scores(logits_TE, probs=probs_TE, gates=probs_TE, rank_by=logits_TE.detach())

    def fused(self, top_k: int) -> FusedChoice | None:
        """Return this router as one operation; None if a subclass or the caller has replaced a
        step."""
        rule = ChoiceRule(
            top_k, by_sigmoid=False, normalize=self.normalize == "after", scale=self.scale
        )
        return FusedChoice(self.logits, rule) if self.is_as_in(SoftmaxTopK) else None
