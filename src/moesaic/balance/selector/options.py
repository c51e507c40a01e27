"""What the arbiter weighs: the programs that a call may run, each with every table of replicated copies that is worth a look,
and what the model says of it.

The programs are those of the plan alone, with replication, with other r, and each step by step.

A recipe says how a table is made, so that the next call's table can be made from its own counts without weighing anything.
Options are few, and tables of different kinds: what the model cannot tell apart, a noisy machine cannot either, and trials of
it are calls that are lost.

The model is that of `replication/cost.py`, in closed form over the busiest place and link, so that it may be asked at every
call, with what other options need: start-up of messages, weights that are gathered for adaptive r (Tutel, Hwang et al. 2023,
section 4.1), and computing that goes on while the next part travels (FasterMoE, He et al. 2022, section 4.2). It ranks options;
a simulation of each program may correct it by a factor.
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
"""The plan as it is, nothing replicated."""


def option_plans(plan: AnyPlan, grid: Grid) -> Iterator[AnyPlan]:
    """Yield the plans whose programs the arbiter may run in a call, that of the plan itself first; some may not compile.

    All move the same tokens from the same routing, so the choice may wait for the counts.

    Args:
        plan: with `replication="arbiter"`.
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
    """Return the groups of the smart schedule: a node's places of ep each, or where one node has them all, each its own."""
    nodes = grid.nodes_per_replica
    return nodes if nodes > 1 and grid.ep % nodes == 0 else grid.ep


def name_of(chosen: PolicyPlan, plan: PolicyPlan, policy: str = "") -> str:
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


REDUNDANT = (1, 2)
"""Redundant experts of each place that are tried: one, or two where weights are light."""


@dataclass(frozen=True)
class Recipe:
    """How a table is made: what of a decision stays as it is while loads change little."""

    shadows: bool = False
    """Let places compute their own copies of hot experts."""
    whole: bool = False
    """Replicate such an expert to all places or to none."""
    limit: float | None = None
    """Spill what places have above so many times the mean; None for no spilling."""
    near_first: bool = False
    """Spill inside nodes first."""
    redundant: int = 0
    """Lay out so many redundant experts on each place, as EPLB does; 0 for none."""
    least: tuple[float, ...] = ()
    """By replica: the share of all copies from which a pair, or an expert that is replicated whole, was worth it when this was
    weighed; how many have so much, each call's counts say."""

    @property
    def policy(self) -> str:
        """Its name; "" for one that replicates nothing."""
        if self.shadows:
            return "whole shadow" if self.whole else "shadow"
        return "redundant" if self.redundant else "spill" if self.limit is not None else ""

    @property
    def is_quick(self) -> bool:
        """Whether a small table is made as quickly as shares of an earlier one are found."""
        return self.limit is None and not self.redundant

    def table(self, replica: ReplicaLoad, least: float, at_most: int) -> Replications:
        """Return what it replicates between the places of a replica; `least` is that of the replica."""
        if self.redundant:
            return redundant(replica, self.redundant)
        if self.limit is not None:
            return spills(replica, NOTHING, self.limit, near_first=self.near_first)
        if self.shadows and least < 1:
            return shadows_above(replica, least, at_most=at_most, whole=self.whole)
        return NOTHING


@dataclass(frozen=True)
class CallChoice:
    """What a call runs."""

    name: str
    program: int
    recipe: Recipe


NO_CHANGE = CallChoice(ALONE, 0, Recipe())
"""Leaving a call alone."""


@dataclass(frozen=True)
class Option:
    """One way of running a call."""

    choice: CallChoice
    replicated: tuple[Replications, ...]
    """By replica of the experts."""
    cost: Cost
    seconds: float
    """By the model."""

    @property
    def name(self) -> str:
        """Of the choice."""
        return self.choice.name

    @property
    def content(self) -> bytes:
        """What options have in common that run the same program with the same tables."""
        columns = (column.tobytes() for replicated in self.replicated for column in replicated)
        return b"|".join([b"%d" % self.choice.program, *columns])


class Weigher:
    """Models the options of a layer's calls.

    Args:
        plan: of the layer.
        plans: of the programs that it may run, the plan without replication first.
        costs: rates.
        at_most: experts that a place may be replicated for its own copies.
        part_us: microseconds that each further part of a pass costs.
        factors: by option, what its modelled seconds are multiplied by.
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
        self._told = costs
        self._times: LinkTimes = {}

    def hear(self, speeds: tuple[float, ...], links: LinkTimes) -> None:
        """Go by other speeds of ranks, and of links, from the next call on.

        Args:
            speeds: as `ReplicationCosts.speeds`; () for those that it goes by.
            links: inside nodes or between them, over what the costs say at the start.
        """
        speeds = speeds or self._costs.speeds
        if speeds != self._costs.speeds or links != self._times:
            self._costs, self._links = replace(self._told.with_links(links), speeds=speeds), None
            self._times = dict(links)

    def replica_loads(self, load: CallLoad) -> list[ReplicaLoad]:
        """Return the load of each replica in a call; what stays the same from call to call is made once."""
        if self._links is None or self._links[0] != load.grid:
            self._links = (load.grid, replica_links(load, self._costs))
        return [ReplicaLoad(load, each) for each in self._links[1]]

    def alone(self, found: Sequence[ReplicaLoad]) -> Option:
        """Return what leaving a call alone takes."""
        nothing = (NOTHING,) * len(found)
        return self._option(0, Recipe(), nothing, self._cost(found, nothing), found[0])

    def tables(self, recipe: Recipe, found: Sequence[ReplicaLoad]) -> tuple[Replications, ...] | None:
        """Return what a recipe replicates in a call; None where it would replicate and finds nothing, which no program
        wants."""
        each_least = recipe.least or (1.0,) * len(found)
        replicated = tuple(recipe.table(replica, least, self._at_most) for replica, least in zip(found, each_least))
        return None if recipe.policy and all(each.is_empty for each in replicated) else replicated

    def anew(self, recipe: Recipe, found: Sequence[ReplicaLoad]) -> tuple[Replications, ...] | None:
        """Return what a recipe replicates under a load that is not the one for which it was weighed: as many shadows as are
        worth it now. It takes longer than `tables`."""
        if recipe.shadows:
            best = self._shadows(found, whole=recipe.whole)
            recipe = replace(recipe, least=_least_of(found, best, whole=recipe.whole))
        return self.tables(recipe, found)

    def priced(
        self,
        choice: CallChoice,
        replicated: tuple[Replications, ...],
        found: Sequence[ReplicaLoad],
        alone: Option | None = None,
    ) -> Option:
        """Return what a choice takes in a call, its tables made already."""
        plan = self.plans[choice.program]
        cost = alone.cost if alone is not None and not choice.recipe.policy else self._cost(found, replicated)
        return self._option(choice.program, choice.recipe, replicated, self._program_cost(plan, cost, found), found[0])

    def all(self, found: Sequence[ReplicaLoad], alone: Option, *, anew: bool) -> list[Option]:
        """Return the options for a call, leaving it alone first.

        Args:
            found: the call's loads, by replica.
            alone: what leaving it alone takes.
            anew: try all limits again, and not only neighbours of the last best.
        """
        if anew:
            self._limit = None
        replications = None
        options = [alone]
        for number, plan in list(enumerate(self.plans))[1:]:
            if not plan.replicates:
                nothing = CallChoice(name_of(plan, self.plan), number, Recipe())
                options.append(self.priced(nothing, alone.replicated, found, alone))
                continue
            replications = self._replications(found) if replications is None else replications
            options += [
                self._option(number, recipe, replicated, cost, found[0]) for recipe, replicated, cost in replications
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

    def _cost(self, found: Sequence[ReplicaLoad], replicated: Sequence[Replications]) -> Cost:
        return worst([replicated_cost(replica, each, self.plan.chunks) for replica, each in zip(found, replicated)])

    def _program_cost(self, plan: PolicyPlan, cost: Cost, found: Sequence[ReplicaLoad]) -> Cost:
        """Return the cost under another r, if the plan has one."""
        r = plan.gather_weights
        if r is None or r == self.plan.gather_weights:
            return cost
        return worst([gathered_cost(replica, cost, r) for replica in found])

    def _replications(self, found: Sequence[ReplicaLoad]) -> list[tuple[Recipe, tuple[Replications, ...], Cost]]:
        """Return the best table of each policy that replicates anything."""
        tried: dict[Recipe, tuple[Recipe, tuple[Replications, ...], Cost]] = {}

        def table(recipe: Recipe) -> tuple[Recipe, tuple[Replications, ...], Cost]:
            if recipe not in tried:
                replicated = tuple(recipe.table(replica, 1.0, self._at_most) for replica in found)
                tried[recipe] = (recipe, replicated, self._cost(found, replicated))
            return tried[recipe]

        def seconds(recipe: Recipe) -> float:
            return round(table(recipe)[2].seconds(self.plan.chunks), DECIMALS)

        kept = []
        for whole in (False, True):
            shadowed = self._shadows(found, whole=whole)
            recipe = Recipe(shadows=True, whole=whole, least=_least_of(found, shadowed, whole=whole))
            kept.append((recipe, shadowed, self._cost(found, shadowed)))
        at = self._limit
        places = range(len(LIMITS)) if at is None else range(max(at - 1, 0), min(at + 2, len(LIMITS)))
        best = min((Recipe(limit=LIMITS[place]) for place in places), key=seconds)
        assert best.limit is not None
        self._limit = LIMITS.index(best.limit)
        kept.append(table(min((best, replace(best, near_first=True)), key=seconds)))
        kept.append(table(min((Recipe(redundant=each) for each in REDUNDANT), key=seconds)))
        return [each for each in kept if not all(replicated.is_empty for replicated in each[1])]

    def _shadows(self, found: Sequence[ReplicaLoad], *, whole: bool) -> tuple[Replications, ...]:
        """Return the shadows that are worth what each expert costs the host besides."""
        price = self._costs.expert_us * 1e-6
        return tuple(shadows(replica, price, at_most=self._at_most, whole=whole) for replica in found)


def _least_of(found: Sequence[ReplicaLoad], shadows: Sequence[Replications], *, whole: bool) -> tuple[float, ...]:
    """Return by replica from which share of all copies on something is shadowed; 1 for nothing."""
    return tuple(
        1.0 if each.is_empty else least_of(replica, each, whole=whole) for replica, each in zip(found, shadows)
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a layer, forward and backward, on the busiest of its replicas."""

    compute: float
    """Seconds of products."""
    travel: float
    """Seconds that tokens take of the fullest link."""
    fetch: float
    """Seconds that weights and their gradients take of it."""
    rows: tuple[int, ...]
    """Copies that each place of ep computes, replica after replica."""
    token_bytes: int = 0
    """That cross links, of all replicas."""
    weight_bytes: int = 0
    """Likewise; gradients of weights included."""

    def seconds(self, parts: int) -> float:
        """Return the modelled time if tokens travel in so many parts, each computed while the next one travels."""
        longer, shorter = max(self.compute, self.travel), min(self.compute, self.travel)
        return longer + shorter / parts + self.fetch


def worst(costs: Sequence[Cost]) -> Cost:
    """Return the cost of several replicas: the slowest one's times, everyone's bytes."""
    slowest = max(costs, key=lambda each: each.seconds(1))
    return Cost(
        compute=slowest.compute,
        travel=slowest.travel,
        fetch=slowest.fetch,
        rows=tuple(rows for each in costs for rows in each.rows),
        token_bytes=sum(each.token_bytes for each in costs),
        weight_bytes=sum(each.weight_bytes for each in costs),
    )


def replicated_cost(replica: ReplicaLoad, replicated: Replications, chunks: int = 1) -> Cost:
    """Return the cost under a table of replicated copies.

    Args:
        replica: the load of one replica of the experts.
        replicated: between its places.
        chunks: parts that the copies which stay at home travel in.
    """
    rows, shards, passes = rows_of(replica, replicated), replica.origins.shape[1], replica.passes
    messages = replica.links.start_up
    moved = rows.home + rows.replicated
    starts = messages * (chunks * (rows.home > 0) + (rows.replicated > 0))
    across = int(moved.sum() - np.trace(moved))
    # Replicated copies travel behind those that stay, and their results behind theirs: the two do not share a link's time.
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
        alone: its cost with r = etp.
        r: shards that a token visits; 0: weights come to the tokens.
    """
    shards, each = replica.origins.shape[1], replica.load.num_experts // len(replica.origins)
    within = _within_place(replica)
    if r:
        got = (shards // r - 1) * each
        gathered = got * replica.weight_bytes * within
        weight_bytes = (replica.passes - 1) * got * replica.weight_bytes * replica.origins.size
        return Cost(
            compute=alone.compute,
            travel=alone.travel * r / shards,
            fetch=(replica.passes - 1) * gathered,  # forward, again in backward, and the gradients back
            rows=alone.rows,
            token_bytes=alone.token_bytes * r // shards,
            weight_bytes=weight_bytes,
        )
    # Every rank fetches all shards of all experts of the replica and computes what is its own.
    own = replica.load.copies[replica.origins].sum(2)
    sent = shards * each * (1 - np.eye(len(replica.origins)))
    fetched = replica.weight_bytes * replica.fullest(sent, 1) + _fullest(shards * replica.links.start_up)
    fetched += (shards - 1) * each * replica.weight_bytes * within
    got = (replica.origins.size - 1) * each
    return Cost(
        compute=replica.compute_seconds(replica.busiest(own.max(1)) * shards),
        travel=0.0,
        fetch=(replica.passes - 1) * fetched,
        rows=tuple(own.sum(1).tolist()),
        weight_bytes=(replica.passes - 1) * got * replica.weight_bytes * replica.origins.size,
    )


def is_even(replica: ReplicaLoad, margin: float) -> bool:
    """Whether nothing that depends on the counts can gain much: no place computes, sends or gets more than the margin above
    the mean, and no expert's weights are fewer bytes than the tokens that one place sends it.

    Args:
        replica: the load of one replica of the experts.
        margin: a share.
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
    """Return what the place that sends or gets most needs, (ep, ep) -> ()."""
    return float(max(seconds.sum(0).max(), seconds.sum(1).max()))


def _within_place(replica: ReplicaLoad) -> float:
    """Return the seconds of a byte between two ranks that hold shards of the same experts."""
    machine, grid = replica.costs.machine, replica.load.grid
    nodes = {grid.node_of(int(rank)) for rank in replica.origins[0]}
    return 8 / ((machine.intra_gbps if len(nodes) == 1 else machine.inter_gbps) * 1e9)
