"""Linear softmax top-k.

Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2.1 (softmax over the chosen experts);
Fedus et al., "Switch Transformers" (2021), section 2.1 (softmax over all experts, one of them chosen).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moesaic.routing.router import LinearRouter, SoftmaxWeights, softmax_rows
from moesaic.routing.routing import Scores


class SoftmaxTopK(SoftmaxWeights, LinearRouter):
    """Each token goes to the `top_k` experts with the largest logits.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`.
        normalize: "after" applies the softmax to the chosen logits, so that a token's weights sum to one (Mixtral,
            Qwen3); "before" applies it to all of them and keeps the chosen probabilities as they are (Switch, OLMoE).
            With one expert per token "after" would always give weight 1 and no gradient, so it is refused in training.
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
        return Scores(logits_TE, probs_TE, probs_TE, logits_TE.detach())
