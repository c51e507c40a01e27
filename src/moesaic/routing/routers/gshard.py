"""GShard top-2 with a sampled second choice: Lepikhin et al., "GShard" (2020), section 2.2 and
algorithm 1."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.choice import normalized
from moesaic.kernels.top_k import top_k_indices
from moesaic.routing.router import LinearRouter, chosen, token_choice
from moesaic.routing.routing import Choice, Scores


class GShardTop2(LinearRouter):
    """A router that always uses the best expert, and a second one that is random in training and
    second best in evaluation.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`; at least 2 experts.
        second: "sampled" draws the second expert from the softmax over the others (by the
            Gumbel-max trick, as Mesh-TensorFlow and DeepSpeed do). "random_dispatch" takes the
            second best expert and sends the token to it with probability `min(1, 2 * g2)`, where g2
            is its normalised weight, as in the GShard paper.
        normalize: divide a token's weights by their sum; False uses the probabilities of the
            softmax over all experts.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        second: Literal["sampled", "random_dispatch"] = "sampled",
        normalize: bool = True,
        bias: bool = False,
        scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts, bias=bias, scale=scale, device=device, dtype=dtype)
        if second not in ("sampled", "random_dispatch"):
            raise InputError(
                f'second={second!r} is unknown: write second="sampled" or second="random_dispatch"'
            )
        self.second = second
        self.normalize = normalize

    def draw(self, num_tokens: int, device: torch.device) -> Tensor | None:
        if not self.training:
            return None
        # a number for each expert to sample from, or one that decides whether the second is sent
        width = self.num_experts if self.second == "sampled" else 1
        return torch.rand(num_tokens, width, device=device)

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(-1)
        return Scores(logits_TE, probs=probs_TE, gates=probs_TE, rank_by=logits_TE.detach())

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose the best expert, and a second one that is sampled, or sent with a probability that
        grows with its weight."""
        first = top_k_indices(scores.rank_by, 1)
        rank_by = scores.rank_by
        float_range = torch.finfo(rank_by.dtype)
        if noise is not None and self.second == "sampled":
            # the largest of logits plus Gumbel noise, -log(-log(uniform)), is a sample
            uniform = noise.to(rank_by.dtype).clamp_min(float_range.tiny)
            rank_by = rank_by - torch.log(-torch.log(uniform))
        # the first expert gets -inf, and all others at least the lowest finite number: it is not
        # chosen again
        rank_by = rank_by.clamp_min(float_range.min).scatter(1, first, float("-inf"))
        second = top_k_indices(rank_by, 1)
        choice = token_choice(torch.cat([first, second], dim=1))
        if noise is None or self.second == "sampled":
            return choice

        # "random_dispatch": the second best, which is sent with probability min(1, 2 * g2)
        gates_T2 = normalized(chosen(scores.gates.detach(), choice, 2)).view(-1, 2)
        second_gate = gates_T2[:, 1]
        sent_T2 = torch.ones_like(choice.slot, dtype=torch.bool).view(-1, 2)
        sent_T2[:, 1] = noise[:, 0] < 2 * second_gate  # one uniform number for each token
        return choice._replace(sent=sent_T2.reshape(-1))

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        gates_TK = chosen(scores.gates, choice, top_k)
        weight_N = normalized(gates_TK) if self.normalize else gates_TK.reshape(-1)
        return self.scale * weight_N

    def check_fits(self, top_k: int) -> None:
        super().check_fits(top_k)
        if top_k != 2:
            raise InputError(
                f"the GShard router chooses two experts per token, got top_k={top_k}: set top_k=2"
            )
