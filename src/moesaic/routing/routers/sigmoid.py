"""Sigmoid scores with a bias that corrects only the selection: balance without an auxiliary loss.

Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), section 3;
DeepSeek-V3 technical report (2024), section 2.1.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.choice import normalized
from moesaic.kernels.choice_call import ChoiceRule
from moesaic.routing.router import FusedChoice, LinearRouter, chosen
from moesaic.routing.routing import Choice, Scores


class SigmoidTopK(LinearRouter):
    """A router that ranks experts by sigmoid score plus a bias, and computes weights from the
    scores alone.

    Each optimizer step lowers the bias of experts with more than the mean load by `bias_rate`, and
    raises it for experts with less: `b += bias_rate * sign(mean(load) - load)`. The bias is a
    persistent buffer, stored in checkpoints. `moesaic.balance_on_step(optimizer, model)` calls the
    update once per step.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`. The attribute
            `logit_bias` is the trained bias, `bias` the balancing bias, which keeps torch's default
            dtype.
        bias_rate: change of the bias per step; 0 turns the correction off. DeepSeek-V3 uses 0.001;
            short runs need more.
        normalize: divide a token's weights by their sum.
    """

    float32_buffers = ("bias",)
    bias: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        bias_rate: float = 1e-3,
        normalize: bool = True,
        bias: bool = False,
        scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts, bias=bias, scale=scale, device=device, dtype=dtype)
        if not 0 <= bias_rate < math.inf:
            raise InputError(f"bias_rate={bias_rate}: must be 0 or more and finite")
        self.register_buffer("bias", torch.zeros(num_experts, device=device))
        self.bias_rate = bias_rate
        self.normalize = normalize

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Return the sigmoid of the logits; experts are ranked by it plus the bias."""
        logits_TE = self.logits(x_TD)
        gates_TE = logits_TE.sigmoid()
        probs_TE = gates_TE / gates_TE.sum(-1, keepdim=True)
        return Scores(
            logits_TE, probs=probs_TE, gates=gates_TE, rank_by=gates_TE.detach() + self.bias
        )

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        gates_TK = chosen(scores.gates, choice, top_k)
        weight_N = normalized(gates_TK) if self.normalize else gates_TK.reshape(-1)
        return self.scale * weight_N

    def fused(self, top_k: int) -> FusedChoice | None:
        """Return this router as one operation; None if a subclass or the caller has replaced a
        step."""
        rule = ChoiceRule(top_k, by_sigmoid=True, normalize=self.normalize, scale=self.scale)
        return FusedChoice(self.logits, rule, self.bias) if self.is_as_in(SigmoidTopK) else None

    def check(self, top_k: int) -> None:
        """Refuse weights that are always 1."""
        super().check(top_k)
        if top_k == 1 and self.normalize and self.num_experts > 1:
            raise InputError(
                "top_k=1 with normalize=True gives every token the same weight and the router no "
                "gradient: use SigmoidTopK(..., normalize=False)"
            )

    @torch.no_grad()
    def reset_state(self) -> None:
        super().reset_state()
        self.bias.zero_()

    @torch.no_grad()
    def update(self, load_E: Tensor) -> None:
        load = load_E.to(self.bias)
        self.bias += self.bias_rate * torch.sign(load.mean() - load)
