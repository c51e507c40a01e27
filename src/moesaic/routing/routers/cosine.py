"""The cosine router: Chi et al., "On the Representation Collapse of Sparse Mixture of Experts"
(2022), section 3; Hwang et al., "Tutel" (2023), C.3, for the projection width and the floor
of the temperature.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.routing.router import SoftmaxWeights, check_scale, linear_scores
from moesaic.routing.routing import Scores


class CosineTopK(SoftmaxWeights):
    """A router with cosine logits: the cosine of the projected token and each expert's embedding,
    over a learnt temperature.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`.
        projection: width of the projected tokens and the embeddings; 256 in Tutel.
        temperature: initial temperature.
        floor: lower bound of the temperature.
        normalize: as for `SoftmaxTopK`.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        projection: int = 256,
        temperature: float = 0.07,
        floor: float = 0.01,
        normalize: Literal["before", "after"] = "before",
        bias: bool = False,
        scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts)
        if not 0 < floor <= temperature:
            raise InputError(
                f"a cosine router needs 0 < floor <= temperature, got {floor=}, {temperature=}"
            )
        self.projection = linear_scores(dim, projection, device, dtype)  # (projection, dim)
        self.embedding = linear_scores(projection, num_experts, device, dtype)  # a row per expert
        # one element, since FSDP2 takes no scalars
        log_temperature = torch.tensor([math.log(temperature)], device=device, dtype=dtype)
        self.log_temperature = nn.Parameter(log_temperature)
        self._set_normalize(normalize)
        self.logit_bias: nn.Parameter | None = None
        if bias:
            zeros = torch.zeros(num_experts, device=device, dtype=dtype)
            self.logit_bias = nn.Parameter(zeros)
        self.temperature = temperature
        self.floor = floor
        self.scale = check_scale(scale)

    @torch.no_grad()
    def reset_state(self) -> None:
        self.log_temperature.fill_(math.log(self.temperature))
        if self.logit_bias is not None:
            self.logit_bias.zero_()

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Return the softmax of the cosines between tokens and experts over the temperature."""
        dtype = x_TD.dtype
        # P is the width of the projection
        projected_TP = F.normalize(F.linear(x_TD, self.projection.to(dtype)), dim=-1)
        embedding_EP = F.normalize(self.embedding.to(dtype), dim=-1)
        cosine_TE = F.linear(projected_TP, embedding_EP)
        temperature = self.log_temperature.to(dtype).exp().clamp_min(self.floor)
        logits_TE = cosine_TE / temperature
        if self.logit_bias is not None:
            logits_TE = logits_TE + self.logit_bias.to(dtype)
        probs_TE = logits_TE.softmax(-1)
        return Scores(logits_TE, probs=probs_TE, gates=probs_TE, rank_by=logits_TE.detach())
