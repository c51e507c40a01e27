"""Multicast: a token crosses to a node once, whatever the number of its experts and shards there, and fans out inside.

Ours. The ranks with the same place on every node form a rail. A rank sends each of its tokens once per node to its
rail-mate there, with the places of the copies; the mate makes the copies and delivers them on the links inside the node.
On the way back the mate sums a token's results, in float32, before they cross once. For top-k routing and shards this
divides the bytes between nodes by up to top_k * etp, in both directions; the backward program, derived, does the same.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.build.builder import Builder, States
from moesaic.program.grid import Grid
from moesaic.program.task import Kind, Layout, Program, Stage, State

_OWN = Layout()
_MATE = Layout(spread=("node",), experts="node")
_VISITS = Layout(flow="visits")
_VISITS_HERE = Layout(flow="visits", spread=("node",), experts="node")
_AT_EXPERTS = Layout(spread=("ep", "etp"), experts="rank")


def multicast(schedule: str, grid: Grid, *, bias: bool = False) -> Program:
    """Return s1 or s2 with multicast in place of deliver and collect.

    The program reads two more indices: `visit_index`, each visit's token, and `copy_index`, each copy's visit among those
    of its origin to its node (and of its chunk). `Sizes` needs the visits.

    Args:
        schedule: "s1" or "s2".
        grid: the mesh, with nodes.
        bias: as for a schedule.

    Raises:
        InputError: for another schedule, or experts that do not lie evenly on the nodes with all their shards inside one.
    """
    if schedule not in ("s1", "s2"):
        raise InputError(
            f"multicast clashes with {schedule}: it replaces the all-to-all over ep and etp, which s1 and s2 have: "
            "choose one of them, or another plan.all_to_all"
        )
    if not grid.nodes_per_replica or not grid.has_shards_inside_nodes:
        raise InputError(
            f"multicast needs every copy of the experts on whole nodes, and all shards of an expert on one: mesh.ep={grid.ep}, "
            f"mesh.etp={grid.etp} do not lie so on nodes of {grid.ranks_per_node} ranks: choose another plan.all_to_all"
        )
    build = Builder(f"{schedule}, multicast", bias)
    tokens, y_layout, tp = _tokens(build, schedule)
    visit_index = build.input("visit_index", Kind.INDEX, _VISITS, {})
    copy_index = build.input("copy_index", Kind.INDEX, _OWN, {})
    visits = build.permute(tokens, visit_index, "visits", _VISITS, {})
    gates = _gates(build, schedule)
    here = build.move(visits, "visits_here", _VISITS_HERE, ("node",), {}, Stage.DISPATCH)
    places = build.move(copy_index, "copies_here", _MATE, ("node",), {}, Stage.DISPATCH)
    gates_here = build.move(gates, "gates_here", _MATE, ("node",), {}, Stage.DISPATCH)
    rows = build.permute(here, places, "rows", _MATE)
    shards: States = {"etp": State.REPLICATED}
    h = build.move(rows, "h", _AT_EXPERTS, ("local",), shards, Stage.DISPATCH)
    g = build.move(gates_here, "g", _AT_EXPERTS, ("local",), shards, Stage.DISPATCH)
    out = build.expert(h, g, "out")
    at_mate = build.move(out, "z_copies", _MATE, ("local",), {"etp": State.SHARDED}, Stage.COMBINE)
    summed = build.combine(at_mate, places, "z_here", _VISITS_HERE)
    z = build.move(summed, "z", _VISITS, ("node",), {}, Stage.COMBINE)
    y = build.combine(z, visit_index, "y_part", y_layout, tp)
    whole = Layout(flow="tokens", whole_tp=True)
    build.move(y, "y", whole, ("tp",), {"tp": State.IDENTICAL}, Stage.COMBINE)
    return build.build("y")


def _gates(build: Builder, schedule: str) -> str:
    """Declare the routing weights and return those of the rank's own copies."""
    if schedule == "s1":
        return build.input("gates", Kind.LANE, _OWN, {})
    gates = build.input("gates", Kind.LANE, Layout(whole_tp=True), {"tp": State.IDENTICAL})
    return build.move(gates, "gates_mine", _OWN, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH)


def _tokens(build: Builder, schedule: str) -> tuple[str, Layout, States]:
    """Declare x and return the tokens that visits are taken from, their layout, and the states of their sums."""
    whole = Layout(flow="tokens", whole_tp=True)
    x = build.input("x", Kind.TOKENS, whole, {"tp": State.IDENTICAL})
    if schedule == "s1":
        own = replace(whole, whole_tp=False)
        return build.move(x, "x_mine", own, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH), own, {}
    shared: States = {"tp": State.REPLICATED}
    return build.move(x, "x_shared", whole, ("tp",), shared, Stage.DISPATCH), whole, {"tp": State.PARTIAL}
