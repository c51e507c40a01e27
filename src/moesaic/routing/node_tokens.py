"""The nodes, and the places of ep on them, to which each of a rank's tokens goes: the indices that
multicast reads.

Under multicast a token is sent once to each node that has some of its experts (a visit), and from
there once to each place of ep, a rank or ranks with the same experts (a stop). Chunks are the parts
of each expert's copies that a program sends one after the other. A cell is one element of a table
(places or nodes, chunks, tokens), numbered in that order. `Grid.cast_levels` are the numbers of
nodes and of places of ep, or of places alone if the mesh has no level of nodes.
"""

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
        stop_cell = places_of(self.stops.flatten(), self._num_stops)
        if self.visits is None:
            return (stop_cell % tokens).int().unsqueeze(1)
        # the cell of the same chunk and token on the place's node; places come first in a cell's
        # number, and those of a node follow one another
        cells_of_place = chunks * tokens
        places_per_node = num_places // len(self.visits)
        node = stop_cell // (places_per_node * cells_of_place)
        visit_cell = node * cells_of_place + stop_cell % cells_of_place
        number_of_visit = _numbered(self.visits).flatten()
        return number_of_visit.index_select(0, visit_cell).int().unsqueeze(1)

    @property
    def indices(self) -> Mapping[str, Tensor]:
        """The INDEX inputs, by name, of a program with multicast."""
        indices = {}
        if self.node_token_index is not None:
            indices["node_token_index"] = self.node_token_index
        indices["rank_token_index"] = self.rank_token_index
        indices["copy_index"] = self.copy_index
        return indices

    @property
    def _visit_cells(self) -> Tensor:
        """The cells of this rank's visits, (visits,) int64."""
        assert self.visits is not None
        num_visits = None
        if self.of_all is not None:
            num_visits = int(self.of_all[self.rank, : len(self.visits)].sum())
        return places_of(self.visits.flatten(), num_visits)

    @property
    def _num_stops(self) -> int | None:
        """The number of this rank's stops; None if the host does not know it."""
        if self.of_all is None:
            return None
        # the stops' counts come last
        return int(self.of_all[self.rank, -len(self.stops) :].sum())


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
    tokens = max(num_tokens, 1)  # of the tables, which are not empty then
    place_of_ep = expert // (num_experts // grid.ep)  # `grid.ep`, one too many, for unsent copies
    place_and_chunk = place_of_ep * num_chunks
    if num_chunks > 1:
        place_and_chunk = place_and_chunk + _chunk_of(expert, num_experts, num_chunks)
    num_cells = grid.ep * num_chunks * tokens
    # unsent copies go to one extra cell, which is cut off
    cell = (place_and_chunk * tokens + token).clamp_max(num_cells)
    is_stop = torch.zeros(num_cells + 1, dtype=torch.bool, device=cell.device)
    is_stop.index_fill_(0, cell, True)
    stops = is_stop[:num_cells].view(grid.ep, num_chunks, tokens)

    number_of_stop = _numbered(stops).flatten()
    # unsent copies read the last cell
    copy_index = number_of_stop.index_select(0, cell.clamp_max(num_cells - 1)).int().unsqueeze(1)
    stop_counts = stops.sum(2)
    if len(grid.cast_levels) == 1:  # no level of nodes
        return NodeTokens(stop_counts, copy_index, stops, visits=None)
    # a token visits a node if it stops at one of its places
    nodes = grid.nodes_per_replica
    visits = stops.view(nodes, grid.ep // nodes, num_chunks, tokens).any(1)
    counts = torch.cat([visits.sum(2), stop_counts])
    return NodeTokens(counts, copy_index, stops, visits)


def places_of(is_there: Tensor, number: int | None) -> Tensor:
    """Return the indices at which a mask is True, (number,) int64, ascending.

    Args:
        is_there: (n,) bool, the mask.
        number: how many entries are True; None to count them, for which the host waits for a GPU.
    """
    if number is None or is_there.device.type == "cpu":
        return is_there.nonzero().squeeze(1)
    # a True index goes to the number of those before it; the False ones go to an extra entry, which
    # is cut off
    position = torch.where(is_there, is_there.cumsum(0) - 1, number)
    index = torch.arange(len(is_there), device=position.device)
    return position.new_empty(number + 1).scatter_(0, position, index)[:number]


def _numbered(table: Tensor) -> Tensor:
    """Return, at each True entry, the number of those before it on the last axis: (..., tokens)
    bool -> (..., tokens) int64."""
    return table.cumsum(-1) - 1


def _chunk_of(expert: Tensor, num_experts: int, num_chunks: int) -> Tensor:
    """Return the chunk of each copy, (copies,): the copies of each expert are split into contiguous
    parts."""
    # of unsent copies too, under the number E
    counts_E = count(expert, alive_N=None, num_experts=num_experts + 1)
    start_E = counts_E.cumsum(0) - counts_E
    place = torch.arange(len(expert), device=expert.device) - start_E[expert]
    # (E + 1, chunks): where each chunk of an expert's copies ends
    chunk = torch.arange(1, num_chunks + 1, device=expert.device)
    ends_EC = counts_E.unsqueeze(1) * chunk // num_chunks
    # a copy's chunk is the number of chunks that end before it
    return (place.unsqueeze(1) >= ends_EC[expert]).sum(1)
