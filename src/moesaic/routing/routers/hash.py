"""Hash routing: Roller et al., "Hash Layers For Large Sparse Models" (2021), section 3: a fixed
table, nothing learnt."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.routing.router import AbstractRouter, check_scale, token_choice
from moesaic.routing.routing import Choice, Scores
from moesaic.shapes import HASH_BUCKETS


class Hash(AbstractRouter):
    """A router that looks up a token's experts by its vocabulary id, in a table drawn once from a
    seed.

    Each row of the table is a random permutation of the experts, so the `top_k` experts of a token
    differ. Routing weights are `scale / top_k`.

    Args:
        dim: width of a token; not used.
        buckets: rows of the table; ids are taken modulo this number.
        scale: factor on the routing weights.
        device: device of the table; None for torch's default device.
        dtype: ignored; accepted since other routers take it.
    """

    needs_token_ids = True
    takes_best_ranked = False
    table: Tensor

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        buckets: int = HASH_BUCKETS,
        seed: int = 0,
        scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, num_experts)
        if buckets < 1:
            raise InputError(f"a hash router needs at least one bucket, got buckets={buckets}")
        self.buckets = buckets
        self.seed = seed
        self.scale = check_scale(scale)
        table = torch.empty(buckets, num_experts, dtype=torch.int32, device=device)
        self.register_buffer("table", table)
        self.reset_state()

    @torch.no_grad()
    def reset_state(self) -> None:
        if not self.table.is_meta:  # which has no values
            generator = torch.Generator().manual_seed(self.seed)
            # sorted, random numbers give every bucket a random order of the experts
            numbers = torch.rand(self.buckets, self.num_experts, generator=generator, device="cpu")
            self.table.copy_(numbers.argsort(dim=1, stable=True))

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Return scores that rank each token's experts in the order of the table."""
        if token_ids is None:
            raise InputError(
                "the hash router reads token ids: call the layer as moe(x, token_ids=ids)"
            )
        order_TE = self.table[token_ids % len(self.table)].long()
        # in float32: bfloat16 has no whole numbers between 256 and 258, so experts would tie
        rank_by = torch.zeros_like(order_TE, dtype=torch.float32)
        # the first expert of a row gets E, the second E - 1, and the last 1
        ranks_E = torch.arange(self.num_experts, 0, -1, device=x_TD.device, dtype=torch.float32)
        rank_by.scatter_(1, order_TE, ranks_E.expand_as(rank_by))
        gates = torch.ones_like(order_TE, dtype=x_TD.dtype)
        return Scores(
            logits=gates.new_zeros(()).expand_as(gates),
            probs=gates / self.num_experts,
            gates=gates,
            rank_by=rank_by,
        )

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose the first experts of each token's row of the table."""
        order_TE = scores.rank_by.argsort(dim=1, descending=True, stable=True)
        return token_choice(order_TE[:, :top_k])

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return torch.full_like(choice.expert, self.scale / top_k, dtype=scores.gates.dtype)
