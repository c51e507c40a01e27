"""Which of a rank's tokens go to which nodes, and to which places of ep there: the indices that multicast reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moesaic.program.grid import Grid


@dataclass(frozen=True)
class NodeTokens:
    """A rank's visits and stops: each token once per node, and per place of ep, at which it has a copy; per chunk."""

    counts: Tensor
    """(sum of `Grid.cast_levels`, chunks) int64: visits of each node, then stops at each place of ep."""
    node_token_index: Tensor | None
    """(visits, 1) int32: each visit's token, by node, then chunk, then token; None where there are stops only."""
    rank_token_index: Tensor
    """(stops, 1) int32, by place of ep, then chunk, then token: each stop's visit, counted within its node and chunk;
    where there are stops only, its token."""
    copy_index: Tensor
    """(copies, 1) int32: each copy's stop, counted within its place of ep and chunk."""
    of_all: np.ndarray | None = None
    """(world, sum of `Grid.cast_levels`, chunks) int64: every rank's counts, once they are known."""

    @property
    def indices(self) -> Mapping[str, Tensor]:
        """The INDEX inputs of a program with multicast, by name."""
        by_node_token = {} if self.node_token_index is None else {"node_token_index": self.node_token_index}
        return {**by_node_token, "rank_token_index": self.rank_token_index, "copy_index": self.copy_index}


def find_node_tokens(
    token: Tensor, expert: Tensor, num_experts: int, num_tokens: int, num_chunks: int, grid: Grid
) -> NodeTokens:
    """Find a rank's visits and stops. Their numbers depend on the data: host syncs.

    Args:
        token: (copies,) int64, expert after expert, as the copies travel.
        expert: (copies,) int64, ascending.
        num_experts: how many experts the layer has.
        num_tokens: how many tokens `token` counts.
        num_chunks: into how many chunks the program was cut.
        grid: the mesh.
    """
    tokens, nodes = max(num_tokens, 1), grid.nodes_per_replica
    cell = expert // (num_experts // grid.ep) * num_chunks
    if num_chunks > 1:
        cell = cell + _chunk_of(expert, num_experts, num_chunks)
    rank_tokens, num_rank_tokens, copy_index = _distinct(cell * tokens + token, grid.ep * num_chunks, tokens)
    if len(grid.cast_levels) == 1:
        counts = num_rank_tokens.view(-1, num_chunks)
        return NodeTokens(counts, None, (rank_tokens % tokens).int().unsqueeze(1), copy_index.int().unsqueeze(1))
    of_place = num_chunks * tokens
    node_token_of_rank_token = rank_tokens // (grid.ep // nodes * of_place) * of_place + rank_tokens % of_place
    node_tokens, num_node_tokens, rank_token_index = _distinct(node_token_of_rank_token, nodes * num_chunks, tokens)
    counts = torch.cat([num_node_tokens, num_rank_tokens]).view(-1, num_chunks)
    node_token_index, rank_token_index, copy_index = (
        index.int().unsqueeze(1) for index in (node_tokens % tokens, rank_token_index, copy_index)
    )
    return NodeTokens(counts, node_token_index, rank_token_index, copy_index)


def _distinct(place: Tensor, num_cells: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the distinct places of a table of cells by tokens, marking them in it: nothing is sorted.

    Args:
        place: (n,) int64, cell * tokens + token.
        num_cells: how many cells the table has.
        tokens: how many columns the table has.

    Returns:
        (m,) the distinct places, ascending; (num_cells,) how many of them each cell has; (n,) for each of `place` which one of
        its cell it is.
    """
    table = torch.zeros(num_cells * tokens, dtype=torch.bool, device=place.device)
    table[place] = True
    found = table.nonzero().squeeze(1)
    starts = torch.searchsorted(found, torch.arange(num_cells + 1, device=place.device) * tokens)
    number = torch.empty(len(table), dtype=torch.int64, device=place.device)
    number[found] = torch.arange(len(found), device=place.device) - starts[found // tokens]
    return found, starts.diff(), number[place]


def _chunk_of(expert: Tensor, num_experts: int, num_chunks: int) -> Tensor:
    """Return the chunk of each copy, (copies,): each expert's run is cut into contiguous parts."""
    counts_E = torch.bincount(expert, minlength=num_experts)
    start_E = counts_E.cumsum(0) - counts_E
    place = torch.arange(len(expert), device=expert.device) - start_E[expert]
    cuts_EC = counts_E.unsqueeze(1) * torch.arange(1, num_chunks + 1, device=expert.device) // num_chunks
    return (place.unsqueeze(1) >= cuts_EC[expert]).sum(1)
