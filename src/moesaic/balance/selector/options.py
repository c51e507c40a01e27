"""The options among which the arbiter chooses: programs that a call may run, with replication tables and modelled times.

The programs are those of the plan without replication, with replication, with other values of r, and each also step by step.

A recipe describes how to build a table. By it the table of the next call is built from that call's own counts, without
comparing options again. There are few options, with tables of different kinds: a noisy machine cannot distinguish what the
model cannot, and every trial of such an option is a wasted call.

The model is that of `replication/cost.py`, a closed form over the busiest place and link that is cheap enough for every call.
It is extended by what other options need: start-up times of messages, gathered weights for adaptive r (Tutel, Hwang et al.
2023, section 4.1), and products that overlap with the transfer of the next part (FasterMoE, He et al. 2022, section 4.2). The
model ranks options; factors from a simulation of each program may correct it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.balance.replication import NO_REPLICATION
from moesaic.balance.replication.cost import (
    CallLoad,
    LinkTimes,
    ReplicaLinks,
    ReplicaLoad,
    ReplicationCosts,
    replica_links,
)
from moesaic.balance.replication.eplb import redundant
from moesaic.balance.replication.policy import AnyPlan, PolicyPlan
from moesaic.balance.replication.spill import LIMITS
from moesaic.balance.replication.tables import (
    DECIMALS,
    NOTHING,
    Replications,
    least_of,
    rows_of,
    shadows,
    shadows_above,
    spills,
)
from moesaic.program.grid import Grid

ALONE = "alone"
"""The name of the option that runs the plan itself without replication ("leaving a call alone")."""


def option_plans(plan: AnyPlan, grid: Grid) -> Iterator[AnyPlan]:
    """Yield the plans whose programs the arbiter may run in a call, first the plan without replication. Some may not compile.

    All programs move the same tokens from the same routing, so the choice can wait for the counts.

    Args:
        plan: the plan with `replication="arbiter"`.
        grid: the mesh.
    """
    alone, replicates = replace(plan, replication=NO_REPLICATION), replace(plan, replication="spill")
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
    """Return the number of peer groups of FasterMoE's smart schedule: one per node, or one per place of ep on a single node."""
    nodes = grid.nodes_per_replica
    return nodes if nodes > 1 and grid.ep % nodes == 0 else grid.ep


def name_of(chosen: PolicyPlan, plan: PolicyPlan, policy: str = "") -> str:
    """Return an option's name: "alone", "shadow", "r=0", "steps", "steps+shadow".

    Args:
        chosen: one of `option_plans`.
        plan: the layer's plan.
        policy: name of the policy that builds the table, if `chosen` replicates.
    """
    parts = ["steps"] if chosen.peer_groups != plan.peer_groups else []
    parts += [policy or "lend"] if chosen.replicates else []
    parts += [f"r={chosen.gather_weights}"] if chosen.gather_weights != plan.gather_weights else []
    return "+".join(parts) or ALONE


REDUNDANT = (1, 2)
"""The numbers of redundant experts per place that are tried; two may pay if weights are small."""


@dataclass(frozen=True)
class Recipe:
    """The parameters from which a table is built. They stay valid as long as loads change little."""

    shadows: bool = False
    """Whether places compute their own copies for hot experts."""
    whole: bool = False
    """Whether a hot expert is replicated to all places or to none."""
    limit: float | None = None
    """The load above which a place spills copies, relative to the place's share; None for no spilling."""
    near_first: bool = False
    """Whether copies are spilled inside nodes first."""
    redundant: int = 0
    """Number of redundant experts on each place, as in EPLB; 0 for none."""
    least: tuple[float, ...] = ()
    """For each replica of the experts, the share of all copies from which a pair is shadowed (an expert, with `whole`); see
    `tables.least_of`. It is set when options are compared. The counts of each call then decide how many pairs reach it."""

    @property
    def policy(self) -> str:
        """Name of the policy; "" if the recipe replicates nothing."""
        if self.shadows:
            return "whole shadow" if self.whole else "shadow"
        return "redundant" if self.redundant else "spill" if self.limit is not None else ""

    @property
    def is_quick(self) -> bool:
        """Whether building a small table is as fast as scaling an earlier one."""
        return self.limit is None and not self.redundant

    def table(self, replica: ReplicaLoad, least: float, at_most: int) -> Replications:
        """Return the replications between the places of one replica of the experts.

        Args:
            replica: the load of that replica.
            least: the entry of `Recipe.least` for that replica.
            at_most: most experts that may be replicated to a place as shadows.
        """
        if self.redundant:
            return redundant(replica, self.redundant)
        if self.limit is not None:
            return spills(replica, NOTHING, self.limit, near_first=self.near_first)
        if self.shadows and least < 1:
            return shadows_above(replica, least, at_most=at_most, whole=self.whole)
        return NOTHING


@dataclass(frozen=True)
class CallChoice:
    """The program and the recipe that a call runs."""

    name: str
    """Name of the option, as returned by `name_of`."""
    program: int
    """Index of the program's plan among the plans of the arbiter."""
    recipe: Recipe


NO_CHANGE = CallChoice(ALONE, 0, Recipe())
"""The choice that leaves a call alone."""


@dataclass(frozen=True)
class Option:
    """One way of running a call: a choice with its tables and modelled time."""

    choice: CallChoice
    replicated: tuple[Replications, ...]
    """The replications within each replica of the experts."""
    cost: Cost
    seconds: float
    """Modelled seconds of the call."""

    @property
    def name(self) -> str:
        """Name of the choice."""
        return self.choice.name

    @property
    def content(self) -> bytes:
        """A key that is equal for options that run the same program with the same tables."""
        columns = (column.tobytes() for replicated in self.replicated for column in replicated)
        return b"|".join([b"%d" % self.choice.program, *columns])


class Weigher:
    """The model of the options of a layer's calls.

    Args:
        plan: the plan of the layer.
        plans: the plans of the programs that the layer may run, the plan without replication first.
        costs: rates of the cost model.
        at_most: most experts that may be replicated to a place as shadows.
        part_us: microseconds of each further part of a pass.
        factors: by name of an option, the factor on its modelled seconds.
    """

    def __init__(
        self,
        plan: PolicyPlan,
        plans: Sequence[PolicyPlan],
        costs: ReplicationCosts,
        *,
        at_most: int,
        part_us: float,
        factors: Mapping[str, float],
    ) -> None:
        self.plan, self.plans, self._costs, self._at_most = plan, tuple(plans), costs, at_most
        self._part_us, self._factors = part_us, factors
        self._limit: int | None = None
        self._links: tuple[Grid, list[ReplicaLinks]] | None = None
        self._initial_costs = costs
        self._link_times: LinkTimes = {}

    def set_rates(self, speeds: tuple[float, ...], links: LinkTimes) -> None:
        """Update the speeds of ranks and of links for the following calls.

        Args:
            speeds: as `ReplicationCosts.speeds`; () to keep the present speeds.
            links: rates of links inside and between nodes, relative to the initial costs.
        """
        speeds = speeds or self._costs.speeds
        if speeds != self._costs.speeds or links != self._link_times:
            self._costs, self._links = replace(self._initial_costs.with_links(links), speeds=speeds), None
            self._link_times = dict(links)

    def replica_loads(self, load: CallLoad) -> list[ReplicaLoad]:
        """Return the load of each replica of the experts in a call. The links, which do not change, are computed once."""
        if self._links is None or self._links[0] != load.grid:
            self._links = (load.grid, replica_links(load, self._costs))
        return [ReplicaLoad(load, each) for each in self._links[1]]

    def alone(self, replicas: Sequence[ReplicaLoad]) -> Option:
        """Return the option of leaving a call alone."""
        nothing = (NOTHING,) * len(replicas)
        return self._option(0, Recipe(), nothing, self._cost(replicas, nothing), replicas[0])

    def tables(self, recipe: Recipe, replicas: Sequence[ReplicaLoad]) -> tuple[Replications, ...] | None:
        """Return the replications of a recipe in a call; None if the recipe should replicate but all its tables are empty."""
        thresholds = recipe.least or (1.0,) * len(replicas)
        replicated = tuple(recipe.table(replica, least, self._at_most) for replica, least in zip(replicas, thresholds))
        return None if recipe.policy and all(each.is_empty for each in replicated) else replicated

    def retuned(self, recipe: Recipe, replicas: Sequence[ReplicaLoad]) -> tuple[Replications, ...] | None:
        """Return the replications of a recipe under a load unlike the one for which the recipe was made.

        The number of shadows is chosen again. This takes longer than `tables`.
        """
        if recipe.shadows:
            best = self._shadows(replicas, whole=recipe.whole)
            recipe = replace(recipe, least=_least_of(replicas, best, whole=recipe.whole))
        return self.tables(recipe, replicas)

    def priced(
        self,
        choice: CallChoice,
        replicated: tuple[Replications, ...],
        replicas: Sequence[ReplicaLoad],
        alone: Option | None = None,
    ) -> Option:
        """Return the option of a choice whose tables have been built, with its cost in a call."""
        plan = self.plans[choice.program]
        cost = alone.cost if alone is not None and not choice.recipe.policy else self._cost(replicas, replicated)
        return self._option(
            choice.program, choice.recipe, replicated, self._program_cost(plan, cost, replicas), replicas[0]
        )

    def all(self, replicas: Sequence[ReplicaLoad], alone: Option, *, anew: bool) -> list[Option]:
        """Return all options for a call, first that of leaving the call alone.

        Args:
            replicas: the call's loads, by replica of the experts.
            alone: the option of leaving the call alone.
            anew: try all limits again, and not only the neighbours of the last best limit.
        """
        if anew:
            self._limit = None
        replications = None
        options = [alone]
        for number, plan in list(enumerate(self.plans))[1:]:
            if not plan.replicates:
                nothing = CallChoice(name_of(plan, self.plan), number, Recipe())
                options.append(self.priced(nothing, alone.replicated, replicas, alone))
                continue
            replications = self._replications(replicas) if replications is None else replications
            options += [
                self._option(number, recipe, replicated, cost, replicas[0]) for recipe, replicated, cost in replications
            ]
        return options

    def _option(
        self, number: int, recipe: Recipe, replicated: tuple[Replications, ...], cost: Cost, replica: ReplicaLoad
    ) -> Option:
        plan = self.plans[number]
        steps, name = plan.peer_groups, name_of(plan, self.plan, recipe.policy)
        seconds = cost.seconds(plan.chunks * steps)
        seconds += (steps - self.plan.peer_groups) * replica.passes / 2 * self._part_us * 1e-6
        factor = self._factors.get(name, 1.0)
        return Option(CallChoice(name, number, recipe), replicated, cost, round(seconds * factor, DECIMALS))

    def _cost(self, replicas: Sequence[ReplicaLoad], replicated: Sequence[Replications]) -> Cost:
        return worst([replicated_cost(replica, each, self.plan.chunks) for replica, each in zip(replicas, replicated)])

    def _program_cost(self, plan: PolicyPlan, cost: Cost, replicas: Sequence[ReplicaLoad]) -> Cost:
        """Return the cost under the r of `plan`, given the cost under that of the layer's plan."""
        r = plan.gather_weights
        if r is None or r == self.plan.gather_weights:
            return cost
        return worst([gathered_cost(replica, cost, r) for replica in replicas])

    def _replications(self, replicas: Sequence[ReplicaLoad]) -> list[tuple[Recipe, tuple[Replications, ...], Cost]]:
        """Return the recipe, tables and cost of the best table of each policy, without policies that replicate nothing."""
        built: dict[Recipe, tuple[Recipe, tuple[Replications, ...], Cost]] = {}

        def table(recipe: Recipe) -> tuple[Recipe, tuple[Replications, ...], Cost]:
            if recipe not in built:
                replicated = tuple(recipe.table(replica, 1.0, self._at_most) for replica in replicas)
                built[recipe] = (recipe, replicated, self._cost(replicas, replicated))
            return built[recipe]

        def seconds(recipe: Recipe) -> float:
            return round(table(recipe)[2].seconds(self.plan.chunks), DECIMALS)

        best_tables = []
        for whole in (False, True):
            shadowed = self._shadows(replicas, whole=whole)
            recipe = Recipe(shadows=True, whole=whole, least=_least_of(replicas, shadowed, whole=whole))
            best_tables.append((recipe, shadowed, self._cost(replicas, shadowed)))
        last = self._limit
        places = range(len(LIMITS)) if last is None else range(max(last - 1, 0), min(last + 2, len(LIMITS)))
        best = min((Recipe(limit=LIMITS[place]) for place in places), key=seconds)
        assert best.limit is not None
        self._limit = LIMITS.index(best.limit)
        best_tables.append(table(min((best, replace(best, near_first=True)), key=seconds)))
        best_tables.append(table(min((Recipe(redundant=each) for each in REDUNDANT), key=seconds)))
        return [each for each in best_tables if not all(replicated.is_empty for replicated in each[1])]

    def _shadows(self, replicas: Sequence[ReplicaLoad], *, whole: bool) -> tuple[Replications, ...]:
        """Return the best shadows if the host time of each replicated expert is counted."""
        price = self._costs.expert_us * 1e-6
        return tuple(shadows(replica, price, at_most=self._at_most, whole=whole) for replica in replicas)


def _least_of(replicas: Sequence[ReplicaLoad], shadows: Sequence[Replications], *, whole: bool) -> tuple[float, ...]:
    """Return, by replica of the experts, the threshold of `least_of`; 1 if nothing is shadowed."""
    return tuple(
        1.0 if each.is_empty else least_of(replica, each, whole=whole) for replica, each in zip(replicas, shadows)
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a call, forward and backward, on the slowest replica of the experts."""

    compute: float
    """Seconds of products."""
    travel: float
    """Seconds of tokens on the fullest link."""
    fetch: float
    """Seconds of weights and their gradients on the fullest link."""
    rows: tuple[int, ...]
    """Copies that each place of ep computes, replica after replica."""
    token_bytes: int = 0
    """Bytes of tokens that cross links, over all replicas."""
    weight_bytes: int = 0
    """Bytes of weights and their gradients that cross links, over all replicas."""

    def seconds(self, parts: int) -> float:
        """Return the modelled seconds if tokens travel in `parts` parts, each of which is computed while the next travels."""
        longer, shorter = max(self.compute, self.travel), min(self.compute, self.travel)
        return longer + shorter / parts + self.fetch


def worst(costs: Sequence[Cost]) -> Cost:
    """Return the cost of several replicas: the times of the slowest one, and the bytes of all."""
    slowest = max(costs, key=lambda cost: cost.seconds(1))
    return Cost(
        compute=slowest.compute,
        travel=slowest.travel,
        fetch=slowest.fetch,
        rows=tuple(rows for cost in costs for rows in cost.rows),
        token_bytes=sum(cost.token_bytes for cost in costs),
        weight_bytes=sum(cost.weight_bytes for cost in costs),
    )


def replicated_cost(replica: ReplicaLoad, replicated: Replications, chunks: int = 1) -> Cost:
    """Return the cost under a table of replicated copies.

    Args:
        replica: the load of one replica of the experts.
        replicated: the replications between the places of that replica.
        chunks: number of chunks in which the copies that are not replicated travel.
    """
    rows, shards, passes = rows_of(replica, replicated), replica.origins.shape[1], replica.passes
    messages = replica.links.start_up
    moved = rows.home + rows.replicated
    starts = messages * (chunks * (rows.home > 0) + (rows.replicated > 0))
    across = int(moved.sum() - np.trace(moved))
    # Replicated copies, and their results, travel after the others, so the times of both on a link add up.
    travelling = replica.fullest(rows.home, 0) + replica.fullest(rows.replicated, 0)
    return Cost(
        compute=replica.compute_seconds(replica.busiest(moved.sum(0))),
        travel=replica.travel_seconds(travelling) + passes * _fullest(starts),
        fetch=replica.fetch_seconds(replica.fullest(rows.fetched, 1))
        + passes / 2 * _fullest(messages * (rows.fetched > 0))
        + rows.held * replica.costs.expert_us * 1e-6,
        rows=tuple(moved.sum(0).tolist()),
        token_bytes=passes * across * replica.row_bytes * shards,
        weight_bytes=passes // 2 * int(rows.fetched.sum()) * replica.weight_bytes * shards,
    )


def gathered_cost(replica: ReplicaLoad, alone: Cost, r: int) -> Cost:
    """Return the cost with `gather_weights` r below etp.

    Args:
        replica: the load of one replica of the experts.
        alone: the cost of that replica with r = etp.
        r: number of shards that a token visits; 0 if weights travel to the tokens instead.
    """
    shards, per_place = replica.origins.shape[1], replica.load.num_experts // len(replica.origins)
    within = _within_place(replica)
    if r:
        num_fetched = (shards // r - 1) * per_place
        gathered = num_fetched * replica.weight_bytes * within
        weight_bytes = (replica.passes - 1) * num_fetched * replica.weight_bytes * replica.origins.size
        return Cost(
            compute=alone.compute,
            travel=alone.travel * r / shards,
            fetch=(replica.passes - 1) * gathered,  # forward, again in backward, and the gradients back
            rows=alone.rows,
            token_bytes=alone.token_bytes * r // shards,
            weight_bytes=weight_bytes,
        )
    # Every rank fetches all shards of all experts of the replica and computes its own copies.
    own_copies = replica.load.copies[replica.origins].sum(2)
    sent = shards * per_place * (1 - np.eye(len(replica.origins)))
    fetched = replica.weight_bytes * replica.fullest(sent, 1) + _fullest(shards * replica.links.start_up)
    fetched += (shards - 1) * per_place * replica.weight_bytes * within
    num_fetched = (replica.origins.size - 1) * per_place
    return Cost(
        compute=replica.compute_seconds(replica.busiest(own_copies.max(1)) * shards),
        travel=0.0,
        fetch=(replica.passes - 1) * fetched,
        rows=tuple(own_copies.sum(1).tolist()),
        weight_bytes=(replica.passes - 1) * num_fetched * replica.weight_bytes * replica.origins.size,
    )


def is_even(replica: ReplicaLoad, margin: float) -> bool:
    """Return whether a load is so even that replication cannot gain much.

    That is so if no place computes, sends or receives more than the mean by `margin`, and if no place exchanges more bytes of
    tokens with an expert of another place than the expert's weights have.

    Args:
        replica: the load of one replica of the experts.
        margin: a share of the mean.
    """
    home, ep = replica.load.home, len(replica.origins)
    away = replica.copies * (np.arange(ep)[:, None] != home[None, :])
    if 2 * int(away.max(initial=0)) * replica.row_bytes > replica.weight_bytes:
        return False
    rows = rows_of(replica, NOTHING).home
    travel = rows * replica.seconds_per_byte
    loads = (rows.sum(0) * replica.links.slowness, travel.sum(0), travel.sum(1))
    return all(float(each.max()) <= (1 + margin) * float(each.mean()) for each in loads)


def _fullest(seconds: np.ndarray) -> float:
    """Return the seconds of the place that sends or receives longest, from the seconds between places, (ep, ep)."""
    return float(max(seconds.sum(0).max(), seconds.sum(1).max()))


def _within_place(replica: ReplicaLoad) -> float:
    """Return the seconds per byte between two ranks with shards of the same experts."""
    machine, grid = replica.costs.machine, replica.load.grid
    nodes = {grid.node_of(int(rank)) for rank in replica.origins[0]}
    return 8 / ((machine.intra_gbps if len(nodes) == 1 else machine.inter_gbps) * 1e9)
