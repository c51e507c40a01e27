"""ScheMoE's formulas for an all-to-all, as oracles. Both count the copy to the rank itself as a
message inside the node."""

from __future__ import annotations


def in_turn_all_to_all(ranks: int, per_node: int, intra: float, inter: float) -> float:
    """Return the seconds of one message after the other (eq. 17).

    Args:
        ranks: in all.
        per_node: ranks of a node.
        intra: seconds of one message inside a node.
        inter: seconds of one between nodes.
    """
    return per_node * intra + (ranks - per_node) * inter


def pipelined_all_to_all(ranks: int, per_node: int, intra: float, inter: float) -> float:
    """Return the seconds of messages inside and between nodes on two lanes (eq. 16); arguments as
    before."""
    return max(per_node * intra, (ranks - per_node) * inter)
