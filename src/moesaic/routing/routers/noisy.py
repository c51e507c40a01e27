"""Noisy top-k gating: Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2.1,
equations 3 to 5."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.routing.router import LinearRouter, SoftmaxWeights
from moesaic.routing.routing import Scores


class NoisyTopK(SoftmaxWeights, LinearRouter):
    """A router that in training adds Gaussian noise to each logit, with a learnt standard deviation
    `softplus(x @ W_noise)`.

    Weights come from the noisy logits, as `normalize` says. The gate matrix is initialised as by
    `nn.Linear`, and `W_noise` with zeros as in the paper's appendix A: every logit starts with
    noise of standard deviation ln 2.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`.
        normalize: as for `SoftmaxTopK`.
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
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, dim, device=device, dtype=dtype))
        """(num_experts, dim): `W_noise`, transposed."""

    @torch.no_grad()
    def reset_state(self) -> None:
        super().reset_state()
        self.noise_weight.zero_()

    def draw(self, num_tokens: int, device: torch.device) -> Tensor | None:
        return torch.randn(num_tokens, self.num_experts, device=device) if self.training else None

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Return the softmax of the logits, with learnt noise if there is noise."""
        logits_TE = self.logits(x_TD)
        if noise is not None:
            deviation_TE = F.softplus(F.linear(x_TD, self.noise_weight.to(x_TD.dtype)))
            logits_TE = logits_TE + noise.to(x_TD.dtype) * deviation_TE
        probs_TE = logits_TE.softmax(-1)
        return Scores(logits_TE, probs=probs_TE, gates=probs_TE, rank_by=logits_TE.detach())
