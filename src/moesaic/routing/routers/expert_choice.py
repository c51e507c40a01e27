"""Expert-choice routing: Zhou et al., "Mixture-of-Experts with Expert Choice Routing" (2022),
section 3."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.top_k import top_k_indices
from moesaic.routing.router import LinearRouter
from moesaic.routing.routing import Choice, Scores


class ExpertChoice(LinearRouter):
    """A router in which each expert takes the `ceil(top_k * tokens / num_experts)` tokens with the
    highest scores for it.

    Load is balanced by construction. A token may be taken by several experts, or by none, which
    makes its output zero.

    Causality: whether an expert takes a token depends on all tokens of the set, later positions and
    other sequences included. In a causal language model this leaks the future in training and
    cannot be reproduced in token-by-token decoding. The router is meant for encoders. The set is
    all valid tokens of the call: (batch x sequence) of one micro-batch, without padding.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`.
    """

    takes_best_ranked = False
    looks_across_tokens = True

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(-1)
        return Scores(logits_TE, probs=probs_TE, gates=probs_TE, rank_by=probs_TE.detach())

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Let each expert choose its tokens, equally many; padding is chosen by none."""
        rank_by = scores.rank_by
        num_valid = len(rank_by)
        if valid_T is not None:
            rank_by = rank_by.masked_fill(~valid_T.unsqueeze(1), float("-inf"))
            num_valid = int(valid_T.sum())
        num_copies = top_k * num_valid
        mean_load = (num_copies + self.num_experts - 1) // self.num_experts  # rounded up
        per_expert = min(num_valid, mean_load)
        tokens_EC = top_k_indices(rank_by.t(), per_expert)
        expert = torch.arange(self.num_experts, device=rank_by.device).repeat_interleave(per_expert)
        # a token's choices have no order: all are first choices
        return Choice(tokens_EC.reshape(-1), expert, slot=torch.zeros_like(expert))

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return self.scale * scores.gates[choice.token, choice.expert]
