"""Which of a rank's tokens go to which nodes: the indices that multicast reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moesaic.program.grid import Grid


@dataclass(frozen=True)
class Visits:
    """A rank's visits: each token once per node on which it has a copy, and per chunk."""

    counts: Tensor
    """(nodes, chunks) int64."""
    visit_index: Tensor
    """(visits, 1) int64: each visit's token, by node, then chunk, then token."""
    copy_index: Tensor
    """(copies, 1) int64: each copy's visit, counted within its node and chunk."""
    of_all: np.ndarray | None = None
    """(world, nodes, chunks) int64: every rank's counts, once they are known."""


def find_visits(
    token: Tensor, expert: Tensor, num_experts: int, num_tokens: int, num_chunks: int, grid: Grid
) -> Visits:
    """Find a rank's visits. The number of visits depends on the data: one host sync.

    Args:
        token: (copies,) int64, expert after expert, as the copies travel.
        expert: (copies,) int64, ascending.
        num_experts: of the layer.
        num_tokens: that `token` counts.
        num_chunks: as the program was cut.
        grid: the mesh.
    """
    per_node = num_experts // grid.nodes_per_replica
    counts_E = torch.bincount(expert, minlength=num_experts)
    start_E = counts_E.cumsum(0) - counts_E
    place = torch.arange(len(expert), device=expert.device) - start_E[expert]
    cuts_EC = counts_E.unsqueeze(1) * torch.arange(1, num_chunks + 1, device=expert.device) // num_chunks
    chunk = (place.unsqueeze(1) >= cuts_EC[expert]).sum(1)
    cell = expert // per_node * num_chunks + chunk
    visits, of_copy = torch.unique(cell * max(num_tokens, 1) + token, return_inverse=True)
    cell_of_visit = visits // max(num_tokens, 1)
    counts = torch.bincount(cell_of_visit, minlength=grid.nodes_per_replica * num_chunks)
    start = counts.cumsum(0) - counts
    return Visits(
        counts=counts.view(grid.nodes_per_replica, num_chunks),
        visit_index=(visits % max(num_tokens, 1)).unsqueeze(1),
        copy_index=(of_copy - start[cell]).unsqueeze(1),
    )
