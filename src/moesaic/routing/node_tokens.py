"""The nodes, and the places of ep on them, to which each of a rank's tokens goes: the indices that
multicast reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moesaic.program.grid import Grid
from moesaic.routing.capacity import count


@dataclass(frozen=True)
class NodeTokens:
    """The visits and stops of a rank's tokens under multicast, per chunk.

    A token visits each node, and stops at each place of ep, where it has a copy: once, whatever the
    number of its copies there.
    """

    counts: Tensor
    """(sum of `Grid.cast_levels`, chunks) int64: visits of each node, then stops at each place of
    ep."""
    copy_index: Tensor
    """(copies, 1) int32: the stop of each copy, numbered within its place of ep and chunk."""
    stops: Tensor
    """(ep, chunks, tokens) bool: the tokens that stop at each place of ep."""
    visits: Tensor | None
    """(nodes, chunks, tokens) bool: the tokens that visit each node; None if the mesh has no level
    of nodes."""
    of_all: np.ndarray | None = None
    """(world, sum of `Grid.cast_levels`, chunks) int64: the `counts` of all ranks; None before
    their exchange."""
    rank: int = 0
    """The index of this rank in `of_all`."""

    def with_counts(self, of_all: np.ndarray, rank: int) -> NodeTokens:
        """Return a copy with the counts of all ranks, and this rank's index in them; with these a
        host waits for no GPU."""
        return replace(self, of_all=of_all, rank=rank)

    @cached_property
    def node_token_index(self) -> Tensor | None:
        """(visits, 1) int32: the token of each visit, ordered by node, chunk and token; None if
        `visits` is None."""
        if self.visits is None:
            return None
        return (self._visit_cells % max(self.visits.shape[2], 1)).int().unsqueeze(1)

    @cached_property
    def rank_token_index(self) -> Tensor:
        """(stops, 1) int32, ordered by place of ep, chunk and token: the visit of each stop,
        numbered within its node and chunk. If `visits` is None, the token of each stop."""
        num_places, chunks, tokens = self.stops.shape
        stop = places_of(self.stops.flatten(), self._num_stops)
        if self.visits is None:
            return (stop % tokens).int().unsqueeze(1)
        of_place = chunks * tokens
        per_node = num_places // len(self.visits)
        visit = stop // (per_node * of_place) * of_place + stop % of_place
        return _numbered(self.visits).flatten().index_select(0, visit).int().unsqueeze(1)

    @property
    def indices(self) -> Mapping[str, Tensor]:
        """The INDEX inputs, by name, of a program with multicast."""
        by_node = (
            {} if self.node_token_index is None else {"node_token_index": self.node_token_index}
        )
        return {**by_node, "rank_token_index": self.rank_token_index, "copy_index": self.copy_index}

    @property
    def _visit_cells(self) -> Tensor:
        """Return the positions of this rank's visits among the tokens of nodes."""
        assert self.visits is not None
        counts = self.of_all
        return places_of(
            self.visits.flatten(),
            None if counts is None else int(counts[self.rank, : len(self.visits)].sum()),
        )

    @property
    def _num_stops(self) -> int | None:
        return (
            None if self.of_all is None else int(self.of_all[self.rank, -len(self.stops) :].sum())
        )


def find_node_tokens(
    token: Tensor, expert: Tensor, num_experts: int, num_tokens: int, num_chunks: int, grid: Grid
) -> NodeTokens:
    """Return a rank's visits and stops, without waiting for the device.

    Args:
        token: (copies,) int64, the token of each copy, with copies sorted by expert.
        expert: (copies,) int64, ascending; `num_experts` for copies that are not sent, which come
            last.
        num_tokens: number of tokens to which `token` refers.
        num_chunks: number of chunks of the program.
        grid: the mesh.
    """
    tokens = max(num_tokens, 1)
    nodes = grid.nodes_per_replica
    cell = expert // (num_experts // grid.ep) * num_chunks
    if num_chunks > 1:
        cell = cell + _chunk_of(expert, num_experts, num_chunks)
    last = grid.ep * num_chunks * tokens
    # unsent copies go to one extra cell, which is cut off
    place = (cell * tokens + token).clamp_max(last)
    stops = torch.zeros(last + 1, dtype=torch.bool, device=place.device).index_fill_(
        0, place, True
    )[:last]
    stops = stops.view(grid.ep, num_chunks, tokens)
    copy_index = (
        _numbered(stops).flatten().index_select(0, place.clamp_max(last - 1)).int().unsqueeze(1)
    )
    counts = stops.sum(2)
    if len(grid.cast_levels) == 1:
        return NodeTokens(counts, copy_index, stops, visits=None)
    visits = stops.view(nodes, grid.ep // nodes, num_chunks, tokens).any(1)
    return NodeTokens(torch.cat([visits.sum(2), counts]), copy_index, stops, visits)


def places_of(is_there: Tensor, number: int | None) -> Tensor:
    """Return the indices at which a mask is True, (number,) int64, ascending.

    Args:
        is_there: (n,) bool, the mask.
        number: how many entries are True; None to count them, for which the host waits for a GPU.
    """
    if number is None or is_there.device.type == "cpu":
        return is_there.nonzero().squeeze(1)
    target = torch.where(is_there, is_there.cumsum(0) - 1, number)
    place = torch.arange(len(is_there), device=target.device)
    return target.new_empty(number + 1).scatter_(0, target, place)[:number]


def _numbered(table: Tensor) -> Tensor:
    """Return, at each True entry, the number of those before it on the last axis: (..., tokens)
    bool -> (..., tokens) int64."""
    return table.cumsum(-1) - 1


def _chunk_of(expert: Tensor, num_experts: int, num_chunks: int) -> Tensor:
    """Return the chunk of each copy, (copies,): the copies of each expert are split into contiguous
    parts."""
    counts_E = count(expert, None, num_experts + 1)
    start_E = counts_E.cumsum(0) - counts_E
    place = torch.arange(len(expert), device=expert.device) - start_E[expert]
    cuts_EC = (
        counts_E.unsqueeze(1) * torch.arange(1, num_chunks + 1, device=expert.device) // num_chunks
    )
    return (place.unsqueeze(1) >= cuts_EC[expert]).sum(1)
