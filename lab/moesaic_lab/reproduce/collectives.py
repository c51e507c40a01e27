"""How long collectives take by start-up cost and rate, each in a function of its own.

`alpha` is the seconds that a message costs whatever its size, `beta` the seconds per byte of one rank's link. The rings and
trees are those of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).
They are for one kind of link; what crosses several is `topology.py`'s.
"""

from __future__ import annotations

import math


def all_to_all(ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of sending each other rank its part, one message each (Thakur et al., section 6, long messages).

    Args:
        ranks: n.
        num_bytes: that one rank holds for all, its own part included.
        alpha: seconds per message.
        beta: seconds per byte.
    """
    return (ranks - 1) * (alpha + beta * num_bytes / ranks)


def all_gather(ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a ring: n - 1 steps, in each one n-th of the result.

    Args:
        ranks: n.
        num_bytes: of the result.
        alpha: seconds per message.
        beta: seconds per byte.
    """
    return (ranks - 1) * (alpha + beta * num_bytes / ranks)


def reduce_scatter(ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a ring: the all-gather backwards.

    Args:
        ranks: n.
        num_bytes: of one rank's input.
        alpha: seconds per message.
        beta: seconds per byte.
    """
    return all_gather(ranks, num_bytes, alpha, beta)


def all_reduce(ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a ring: a reduce-scatter and an all-gather, 2 (n - 1) / n of the bytes per link.

    FasterMoE (PPoPP 2022), section 3.2.
    """
    return reduce_scatter(ranks, num_bytes, alpha, beta) + all_gather(ranks, num_bytes, alpha, beta)


def broadcast(ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a pipelined tree: its depth in start-ups, the bytes once over each link."""
    return math.ceil(math.log2(ranks)) * alpha + (beta * num_bytes if ranks > 1 else 0.0)


def reduce(ranks: int, num_bytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of a broadcast backwards."""
    return broadcast(ranks, num_bytes, alpha, beta)


def in_turn_all_to_all(ranks: int, per_node: int, intra: float, inter: float) -> float:
    """Return the seconds of one message after the other, the own block counted as one inside (ScheMoE, eq. 17).

    Args:
        ranks: in all.
        per_node: ranks of a node.
        intra: seconds of one message inside a node.
        inter: seconds of one between nodes.
    """
    return per_node * intra + (ranks - per_node) * inter


def pipelined_all_to_all(ranks: int, per_node: int, intra: float, inter: float) -> float:
    """Return the seconds of messages inside and between nodes on two lanes (ScheMoE, eq. 16); arguments as before."""
    return max(per_node * intra, (ranks - per_node) * inter)


def pipelined_speedup(ranks: int, per_node: int, intra: float, inter: float) -> float:
    """Return how much faster two lanes are (ScheMoE, eq. 18); 2 at most, where both take equally long."""
    return in_turn_all_to_all(ranks, per_node, intra, inter) / pipelined_all_to_all(ranks, per_node, intra, inter)


def hierarchical_all_to_all(
    nodes: int, per_node: int, num_bytes: float, intra: tuple[float, float], inter: tuple[float, float]
) -> float:
    """Return the seconds of 2DH: all-to-all inside nodes, then between ranks of equal place (Tutel, section 4.3).

    Args:
        nodes: N.
        per_node: ranks of each.
        num_bytes: that one rank holds for all.
        intra: (alpha, beta) inside a node.
        inter: (alpha, beta) of one rank's way between nodes.
    """
    return all_to_all(per_node, num_bytes, *intra) + all_to_all(nodes, num_bytes, *inter)


def hierarchical_all_reduce(
    nodes: int, per_node: int, num_bytes: float, intra: tuple[float, float], inter: tuple[float, float]
) -> float:
    """Return the seconds of reduce-scatter inside nodes, all-reduce between, all-gather inside; arguments as of 2DH."""
    within = 2 * reduce_scatter(per_node, num_bytes, *intra)
    return within + all_reduce(nodes, num_bytes / per_node, *inter)
