"""The methods that the benchmark compares: published techniques for skewed routing, one at a time,
and ours, which chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.balance import replication_policy
from moesaic.balance.expert_placement import ExpertLoad, SmartMoE
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic_lab.policies.laer import LAERLayout
from moesaic_lab.policies.least_loaded import LeastLoaded
from moesaic_lab.policies.lplb import LPLB

PLAIN = "plain ep"
OURS = "ours"
SMART = "smart schedule"
NETMOE = "NetMoE"
PLACED = "expert placement"
OURS_PLACED = "ours, experts placed"
BOUNDED = "ours, memory budget"
LAER = "LAER re-layout"
"""Names of methods that other modules use."""

BASELINES: dict[str, type[AbstractReplicationPolicy]] = {
    "least_loaded": LeastLoaded,
    "lplb": LPLB,
    "laer": LAERLayout,
}
"""Replication policies of the laboratory, by the name in a method's plan."""


@dataclass(frozen=True, kw_only=True)
class BalanceMethod:
    """One way to run the layer."""

    plan: Plan
    is_single: bool = True
    """Whether this is one technique, rather than a choice among several or a combination of two."""
    places_experts: bool = False
    """Whether experts are placed beforehand according to the history."""
    moves_samples: bool = False
    """Whether results go to new home ranks of their samples."""


def methods(grid: Grid, budget: int | None = None) -> dict[str, BalanceMethod]:
    """Return the methods for a mesh, by name, in the order of the tables. There is one peer group
    per node.

    Args:
        budget: memory budget in bytes per rank for the method that has one; None leaves that method
            out.
    """
    nodes = grid.world // (grid.ranks_per_node or grid.world)
    by_name = {
        PLAIN: BalanceMethod(plan=Plan()),
        "ZeRO-3 (r = 0)": BalanceMethod(plan=Plan(gather_weights=0)),
        "shadow, published": BalanceMethod(plan=Plan(replication="published")),
        "shadow": BalanceMethod(plan=Plan(replication="shadow")),
        "spill": BalanceMethod(plan=Plan(replication="spill")),
        "least loaded": BalanceMethod(plan=Plan(replication="least_loaded")),
        "EPLB": BalanceMethod(plan=Plan(replication="eplb")),
        "LPLB": BalanceMethod(plan=Plan(replication="lplb")),
        LAER: BalanceMethod(plan=Plan(replication="laer")),
        SMART: BalanceMethod(plan=Plan(peer_groups=nodes)),
        "smart + shadow": BalanceMethod(
            plan=Plan(replication="shadow", peer_groups=nodes), is_single=False
        ),
        NETMOE: BalanceMethod(plan=Plan(), moves_samples=True),
        PLACED: BalanceMethod(plan=Plan(), places_experts=True),
        OURS: BalanceMethod(plan=Plan(replication="arbiter"), is_single=False),
        OURS_PLACED: BalanceMethod(
            plan=Plan(replication="arbiter"), is_single=False, places_experts=True
        ),
    }
    if budget:
        plan = Plan(replication="arbiter", memory_budget=budget)
        by_name[BOUNDED] = BalanceMethod(plan=plan, is_single=False)
    return by_name


def policy_of(method: BalanceMethod, costs: Rates) -> AbstractReplicationPolicy | None:
    """Return the replication policy of a method, which gets the cost model; None for a method that
    replicates nothing."""
    name = method.plan.replication
    if not method.plan.replicates:
        return None
    return BASELINES[name]() if name in BASELINES else replication_policy(name, costs)


def placed_by(history: np.ndarray, grid: Grid) -> np.ndarray:
    """Return the slot of each expert, (num_experts,) int64, a permutation, as SmartMoE's policy
    chooses it.

    Slots are numbered rank by rank. No figure includes the cost of moving the experts there.

    Args:
        history: (num_experts,) copies for each expert, assumed to come from all ranks equally.
        grid: the mesh.
    """
    # SmartMoE balances loads and reads no sizes
    load = ExpertLoad(
        grid=grid,
        copies=np.tile(history / grid.world, (grid.world, 1)),
        order=np.arange(len(history)),
        dim=1,
        expert_parameters=1,
        expert_bytes=1,
        steps=1,
    )
    expert_of_slot = SmartMoE().decide(load)
    return np.argsort(expert_of_slot)  # the inverse permutation
