"""BASE: gives every expert the same number of tokens, by solving an assignment problem.

Lewis et al., "BASE Layers: Simplifying Training of Large, Sparse Models" (2021), sections 3.1 and
3.2.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.top_k import top_k_indices
from moesaic.routing.router import LinearRouter, chosen, token_choice
from moesaic.routing.routing import Choice, Scores

DECIMALS = 9
"""Decimals of the scores that are assigned."""


class BalancedAssignment(LinearRouter):
    """A router that sends each token to one expert, with weight `sigmoid(score)`.

    In training it chooses the assignment with the largest summed score under equal load; in
    evaluation, each token's best expert. The problem is solved on the host by
    `scipy.optimize.linear_sum_assignment` with `ceil(tokens / num_experts)` seats per expert. The
    solution is exact, and cubic in the tokens in the worst case: 2,048 tokens need about a second,
    so keep micro-batches small. A choice in training depends on the other tokens of the batch,
    later ones included.

    Args:
        dim, num_experts, bias, scale, device, dtype: as for `LinearRouter`.
    """

    takes_best_ranked = False

    @property
    def looks_across_tokens(self) -> bool:
        return self.training

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        logits_TE = self.logits(x_TD)
        return Scores(
            logits_TE,
            probs=logits_TE.softmax(-1),
            gates=logits_TE.sigmoid(),
            rank_by=logits_TE.detach(),
        )

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose one expert for each token; in training so that all experts get equally many."""
        experts_T1 = top_k_indices(scores.rank_by, 1)
        if self.training:
            # `tokens`, on the host: those that are not padding
            if valid_T is None:
                tokens = torch.arange(len(experts_T1))
            else:
                tokens = valid_T.nonzero().squeeze(1).cpu()
            scores_TE = scores.rank_by.double().cpu().numpy()
            assigned = torch.from_numpy(balanced_assignment(scores_TE[tokens.numpy()]))
            # padding keeps its best expert
            experts_T1[tokens.to(experts_T1.device), 0] = assigned.to(experts_T1.device)
        return token_choice(experts_T1)

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return self.scale * chosen(scores.gates, choice, top_k).reshape(-1)

    def check_fits(self, top_k: int) -> None:
        super().check_fits(top_k)
        if top_k != 1:
            raise InputError(
                f"the BASE router assigns one expert per token, got top_k={top_k}: set top_k=1"
            )


def balanced_assignment(scores: np.ndarray) -> np.ndarray:
    """Return the experts that maximise the summed score, if no expert may have more than
    `ceil(rows / experts)` rows.

    A row that contains NaN or an infinity counts as all zeros, and gets a seat that the other rows
    leave free. Scores are rounded to `DECIMALS`, so that rows which are equal but for the order of
    sums (a token at the start of two sequences) get the same seats on every processor and mesh.

    Args:
        scores: (rows, experts) float64.

    Returns:
        (rows,) int64, each row's expert.
    """
    from scipy.optimize import linear_sum_assignment

    num_rows, num_experts = scores.shape
    if num_rows == 0:
        return np.zeros(0, dtype=np.int64)
    seats = math.ceil(num_rows / num_experts)
    is_finite = np.isfinite(scores).all(axis=1, keepdims=True)
    scores = np.where(is_finite, scores, 0.0).round(DECIMALS)
    # a column for each seat, those of one expert side by side
    seat_scores = np.repeat(scores, seats, axis=1)
    _, columns = linear_sum_assignment(seat_scores, maximize=True)
    return columns.astype(np.int64) // seats  # the expert of each row's seat
