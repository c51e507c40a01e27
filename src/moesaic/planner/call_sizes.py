"""Computes the `CallSizes` of a call of any program from counts per data-parallel group.

A visit is a token that is sent once to a node on which it has at least one expert, and a stop the
same for an ep rank. Their numbers are expected values, since counts do not say which copies belong
to one token. Copies of a run, those of one rank for one expert, are cut into chunks.
"""

from __future__ import annotations

from functools import cache
from math import comb, erf, sqrt

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.workload import Workload, uniform_counts
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex
from moesaic.program.replications import NOTHING, Replications
from moesaic.program.sizes import CallSizes
from moesaic.program.task import ONCE, Program


def chunks_of(program: Program) -> int:
    """Return the number of chunks into which a program cuts each run of copies."""
    # numbered from 0; chunks of replicated copies have words in place of numbers
    numbers = [slot.layout.chunk for slot in program.slots if isinstance(slot.layout.chunk, int)]
    return 1 + max(numbers, default=0)


def copies_by_rank(program: Program, grid: Grid, counts: np.ndarray) -> np.ndarray:
    """Return the copies that each rank sends to each expert, (world, num_experts) int64.

    Args:
        program: decides whether the ranks of a tensor-parallel group share its copies evenly or
            each send all of them.
        grid: the mesh.
        counts: (dp, num_experts) int64, copies that each data-parallel group sends to each expert.
    """
    ranks = np.arange(grid.world)
    group_copies = counts[ranks // grid.tp]
    if program.is_redundant:
        return group_copies
    place = (ranks % grid.tp)[:, None]
    return _part_of(group_copies, place, grid.tp)


def _part_of(total: np.ndarray, place: np.ndarray, parts: int) -> np.ndarray:
    """Return the size of part number `place` if `total` rows are cut into contiguous parts whose
    ends are rounded down, so that the sizes sum to the total."""
    start = total * place // parts
    end = total * (place + 1) // parts
    size: np.ndarray = end - start
    return size


def sizes_of(
    program: Program,
    workload: Workload,
    grid: Grid,
    counts: np.ndarray | None = None,
    *,
    replicated: Replications | None = None,
    shapes: LayoutIndex | None = None,
) -> CallSizes:
    """Return the sizes of a call.

    Ranks of a tensor-parallel group share each run of copies evenly, in contiguous parts. Multicast
    sends the distinct tokens among the copies for a node or a rank. Their number is estimated,
    assuming that a token's experts are drawn one after the other.

    Args:
        program: forward or backward.
        workload: the layer and its tokens.
        grid: the mesh, with etp factored as the plan requires.
        counts: (dp, num_experts) copies that each data-parallel group sends to each expert; None:
            even counts.
        replicated: as in `CallSizes`, for programs with replication; None: no copies are
            replicated.
        shapes: of the same grid, experts and chunks (`Compiled.shapes`), to share between calls,
            since they are most of the cost.

    Raises:
        InputError: if the counts do not fit the mesh.
    """
    counts = _checked_counts(counts, workload, grid)
    copies = copies_by_rank(program, grid, counts)
    chunks = chunks_of(program)
    node_tokens = None
    sends_tokens_once = any(slot.layout.flow in ONCE for slot in program.slots)
    if sends_tokens_once:
        num_sharers = 1 if program.is_redundant else grid.tp
        # a level is the number of destinations: of nodes, or of ep ranks
        by_level = [
            _node_tokens(copies, workload, num_sharers, level, chunks) for level in grid.cast_levels
        ]
        node_tokens = np.concatenate(by_level, axis=1)
    # chunks of replicated copies have words in place of numbers
    has_replicas = any(isinstance(slot.layout.chunk, str) for slot in program.slots)
    if has_replicas and replicated is None:
        replicated = NOTHING
    return CallSizes(
        grid,
        copies,
        tokens=_tokens_by_rank(program, workload, grid),
        num_chunks=chunks,
        node_tokens=node_tokens,
        units=max(1, workload.hidden // grid.etp),
        replicated=replicated,
        shapes=shapes,
    )


def _checked_counts(counts: np.ndarray | None, workload: Workload, grid: Grid) -> np.ndarray:
    """Return the counts of a call, even ones if none are given, or refuse those that do not fit."""
    if counts is None:
        return uniform_counts(grid.dp, workload)
    if counts.shape != (grid.dp, workload.num_experts):
        raise InputError(
            f"counts of shape {counts.shape} do not fit {grid.dp} data-parallel groups and "
            f"{workload.num_experts} experts: give ({grid.dp}, {workload.num_experts})"
        )
    return counts


def _tokens_by_rank(program: Program, workload: Workload, grid: Grid) -> np.ndarray:
    """Return the tokens that each rank sends, all of its group's or its even share, (world,)."""
    tokens = np.full(grid.world, workload.tokens)
    if program.is_redundant:
        return tokens
    return _part_of(tokens, np.arange(grid.world) % grid.tp, grid.tp)


def node_tokens_per_node(workload: Workload, nodes: int, chunks: int) -> float:
    """Return how many of a group's tokens have an expert on a node under even routing, summed over
    chunks.

    With ep ranks in place of nodes, return how many have an expert on an ep rank. A token with k of
    E experts has one among E / n of them with probability 1 - C(E - E / n, k) / C(E, k). If a token
    uses only some groups of experts, E counts the experts of these groups, and all choices of
    groups are equally likely. A chunk has the same share of each expert's copies, in the order of
    tokens. So the copies of a token are mostly in one chunk, and only around a cut are they on both
    sides of it.
    """
    node_copies = workload.copies / nodes
    # the mean number of nodes that a token visits, if it is known
    known_visits = dict(workload.visits).get(nodes)
    if known_visits is not None:
        return min(workload.tokens * known_visits / nodes, node_copies)
    group_size = workload.num_experts // workload.groups
    experts_per_node = workload.num_experts // nodes
    groups = _groups_met(workload, group_size, experts_per_node)

    # the share of tokens none of whose experts, drawn one after the other, is on the node
    missed_share = 0.0
    for probability, on_node in groups:  # experts of the token's groups that are on the node
        missed_probability = probability
        for drawn in range(workload.top_k):
            # `reachable`: all experts of the groups that a token uses; 0 once those elsewhere are
            # used up, so that the next one is on the node
            elsewhere = max(workload.reachable - on_node - drawn, 0)
            missed_probability *= elsewhere / (workload.reachable - drawn)
        missed_share += missed_probability
    visiting_tokens = workload.tokens * (1 - missed_share)
    if chunks == 1:
        return min(visiting_tokens, node_copies)

    # Tokens with copies on both sides of a cut visit the node once more: as large a share of the
    # tokens as the copies of one are spread over, a number of standard deviations times one.
    cut_share = _copies_apart(workload, groups) * _spread_at_cuts(workload, chunks)
    visits = workload.tokens * (1 - missed_share + cut_share)
    # at most one visit for each copy, and one per chunk for each token
    return min(visits, node_copies, visiting_tokens * chunks)


def _copies_apart(workload: Workload, groups: list[tuple[float, int]]) -> float:
    """Return the expected distance between the copies of a token on a node, in standard deviations
    of one copy's place in its expert's run (`_spread_at_cuts`).

    This is the mean, over all tokens, of the expected range of as many normal variables as a token
    has copies on the node. Tokens with fewer than two copies there count as 0.

    Args:
        workload: the layer and its tokens.
        groups: as returned by `_groups_met`.
    """
    experts = workload.reachable
    ways = comb(experts, workload.top_k)
    distance = 0.0
    for probability, on_node in groups:
        for copies in range(2, min(workload.top_k, on_node) + 1):
            # hypergeometric: so many of a token's experts are among those of the node
            ways_here = comb(on_node, copies) * comb(experts - on_node, workload.top_k - copies)
            distance += probability * ways_here / ways * _normal_range(copies)
    return distance


def _spread_at_cuts(workload: Workload, chunks: int) -> float:
    """Return how far from a cut, in its expert's run, a copy of a token at the cut lies: one
    standard deviation, as a share of the run, summed over all cuts.

    A run has an expert's n copies in the order of their tokens. Of the n, x n belong to the first
    share x of the tokens, with standard deviation sqrt(x (1 - x) n), by chance and for each expert
    anew. So the copies of the token at share x lie about x n into their runs, some before a cut
    there and some behind it. Every cut does this to other tokens, whose shares add up.
    """
    # at least the copy whose place is asked for
    copies_per_expert = max(workload.copies / workload.num_experts, 1.0)
    shares_before_cut = [cut / chunks for cut in range(1, chunks)]
    return sum(sqrt(share * (1 - share) / copies_per_expert) for share in shares_before_cut)


@cache
def _normal_range(count: int) -> float:
    """Return the expected range of `count` independent standard normal variables: the integral of
    1 - F(x)^count - (1 - F(x))^count for their distribution F (Tippett, Biometrika 1925)."""
    x = np.linspace(-8.0, 8.0, 4001)
    distribution = 0.5 * (1 + np.array([erf(each / sqrt(2)) for each in x.tolist()]))
    return float(np.trapezoid(1 - distribution**count - (1 - distribution) ** count, x))


def _groups_met(
    workload: Workload, group_size: int, experts_per_node: int
) -> list[tuple[float, int]]:
    """Return the distribution of the number of experts on a node that a token may choose, as
    (probability, experts).

    Args:
        workload: the layer and its tokens.
        group_size: experts of a group.
        experts_per_node: experts of a node: whole groups or a part of one.
    """
    if workload.groups == 1:
        return [(1.0, experts_per_node)]
    if experts_per_node < group_size:  # all of them are in one group, which a token uses or not
        probability = workload.top_groups / workload.groups
        return [(probability, experts_per_node), (1 - probability, 0)]
    # whole groups: hypergeometric in the groups of the node that a token uses
    groups_per_node = experts_per_node // group_size
    other_groups = workload.groups - groups_per_node
    ways = comb(workload.groups, workload.top_groups)
    distribution = []
    for num_met in range(min(groups_per_node, workload.top_groups) + 1):
        ways_here = comb(groups_per_node, num_met)
        ways_elsewhere = comb(other_groups, workload.top_groups - num_met)
        distribution.append((ways_here * ways_elsewhere / ways, num_met * group_size))
    return distribution


def _node_tokens(
    copies: np.ndarray, workload: Workload, num_sharers: int, nodes: int, chunks: int
) -> np.ndarray:
    """Return the expected visits, (world, nodes, chunks) int64; with ep ranks in place of nodes,
    the expected stops.

    Args:
        copies: (world, num_experts) copies that each rank sends to each expert.
        workload: the layer and its tokens.
        num_sharers: number of ranks that share a group's tokens.
        nodes: number of nodes, each with equally many experts.
        chunks: number of chunks.
    """
    node_copies = copies.reshape(len(copies), nodes, -1).sum(axis=2)
    chunk_copies = node_copies / chunks
    expected = chunk_copies  # if there are no copies at all
    even_copies = workload.copies / num_sharers / nodes
    if even_copies:
        tokens = workload.tokens / num_sharers
        even_visits = node_tokens_per_node(workload, nodes, chunks=1) / num_sharers
        even_chunk_visits = node_tokens_per_node(workload, nodes, chunks) / num_sharers
        # A token misses a node with the probability under even routing, to the power of the node's
        # load over its even load. Chunks add visits as they do under even routing.
        miss_probability = (1 - min(even_visits / tokens, 1.0)) ** (node_copies / even_copies)
        visits = tokens * (1 - miss_probability)
        expected = visits / chunks * even_chunk_visits / even_visits
    # a visit is for one copy of a token at least, and for all of them at most
    bounded = np.minimum(np.maximum(expected, chunk_copies / workload.top_k), chunk_copies)
    visits_per_chunk = np.rint(bounded).astype(np.int64)[:, :, None]
    return np.repeat(visits_per_chunk, chunks, axis=2)  # the same in every chunk
