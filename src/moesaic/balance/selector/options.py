"""The programs among which the arbiter chooses: the plan alone, with replication, with other r, and each step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moesaic.balance.choices import AnyPlan, PlanChoices
from moesaic.program.grid import Grid

ALONE = "alone"
"""The plan as it is, nothing replicated."""


def option_plans(plan: AnyPlan, grid: Grid) -> Iterator[AnyPlan]:
    """Yield the plans whose programs the arbiter may run in a call, that of the plan itself first; some may not compile.

    All move the same tokens from the same routing, so the choice may wait for the counts.

    Args:
        plan: with `replication="arbiter"`.
        grid: the mesh.
    """
    alone, replicates = replace(plan, replication="none"), replace(plan, replication="spill")
    yield alone
    yield replicates
    for r in range(grid.etp):
        if r == 0 or grid.etp % r == 0:
            yield replace(alone, gather_weights=r)
    groups = steps_of(grid)
    if plan.peer_groups == 1 and groups > 1:
        yield replace(alone, peer_groups=groups)
        yield replace(replicates, peer_groups=groups)


def steps_of(grid: Grid) -> int:
    """Return the groups of the smart schedule: a node's places of ep each, or where one node has them all, each its own."""
    nodes = grid.nodes_per_replica
    return nodes if nodes > 1 and grid.ep % nodes == 0 else grid.ep


def name_of(chosen: PlanChoices, plan: PlanChoices, policy: str = "") -> str:
    """Return an option's name: "alone", "shadow", "r=0", "steps", "steps+shadow".

    Args:
        chosen: one of `option_plans`.
        plan: what it is an option of.
        policy: whose table a program that replicates is given.
    """
    parts = ["steps"] if chosen.peer_groups != plan.peer_groups else []
    parts += [policy or "lend"] if chosen.replicates else []
    parts += [f"r={chosen.gather_weights}"] if chosen.gather_weights != plan.gather_weights else []
    return "+".join(parts) or ALONE
