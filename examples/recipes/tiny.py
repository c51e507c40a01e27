"""The model and the data that all recipes train: two blocks with MoE layers, sequences that count
upwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic import MoE

VOCAB = 16
DIM = 16
BATCH = 8
LENGTH = 12
STEPS = 8


class Block(nn.Module):
    """A residual MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE(DIM, 32, num_experts=8, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Tiny(nn.Module):
    """Predicts the next token; its forward pass returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # all ranks begin with the same weights
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batches(rank: int = 0, ranks: int = 1) -> Iterator[Tensor]:
    """Yield a rank's part of the batch of each step, (BATCH / ranks, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        first = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        yield ((first + torch.arange(LENGTH + 1)) % VOCAB).chunk(ranks)[rank]
