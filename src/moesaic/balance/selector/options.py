"""The options among which the arbiter chooses: programs that a call may run, with replication
tables and modelled times.

The programs are those of the plan without replication, with replication, with other values of r,
and each also step by step.

A *recipe* describes how to build a table. By it the table of a call is built from that call's own
counts, without comparing options again. An *option* is a program with a recipe. Places, homes and
helpers are those of `replication/cost.py`, and r is `Plan.gather_weights`.

The model is that of `replication/cost.py`, a closed form over the busiest place and link that is
cheap enough for every call. It is extended by what other options need: start-up times of messages,
gathered weights for adaptive r (Tutel, Hwang et al. 2023, section 4.1), products that overlap with
the transfer of the next part (FasterMoE, He et al. 2022, section 4.2), weights that travel while
the experts at home compute, and the host's time for each replicated expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicaLinks, ReplicaLoad, replica_links
from moesaic.balance.replication.eplb import redundant
from moesaic.balance.replication.policy import ALONE, REPLICATED
from moesaic.balance.replication.tables import (
    DECIMALS,
    least_of,
    rows_of,
    shadows,
    shadows_above,
    spills,
)
from moesaic.program.grid import Grid
from moesaic.program.plan import NO_REPLICATION, Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications

STEPS = "steps"
STEPS_REPLICATED = f"steps+{REPLICATED}"
"""Names of the programs that exchange group by group."""


def option_plans(plan: Plan, grid: Grid) -> dict[str, Plan]:
    """Return the plans whose programs the arbiter may run in a call, by name. Some may not compile.

    All programs move the same tokens from the same routing, so the choice can wait for the counts.

    Args:
        plan: the plan of the layer, which replicates.
        grid: the mesh.
    """
    alone = replace(plan, replication=NO_REPLICATION)
    plans = {ALONE: alone, REPLICATED: plan}
    # r: shards that a token visits, fewer than all; 0: weights travel to the tokens
    for r in range(grid.etp):
        divides = r == 0 or grid.etp % r == 0
        if divides and r != plan.gather_weights:
            plans[f"r={r}"] = replace(alone, gather_weights=r)
    groups = steps_of(grid)  # of peers, which exchange step by step
    if plan.peer_groups == 1 and groups > 1:
        plans[STEPS] = replace(alone, peer_groups=groups)
        plans[STEPS_REPLICATED] = replace(plan, peer_groups=groups)
    return plans


def steps_of(grid: Grid) -> int:
    """Return the number of peer groups of FasterMoE's smart schedule: one per node, or one per
    place of ep on a single node."""
    nodes = grid.nodes_per_replica
    return nodes if nodes > 1 and grid.ep % nodes == 0 else grid.ep


SPILLS = (1.0, 1.25, 2.0)
"""The limits above which places spill copies that are tried, relative to a place's share."""
REDUNDANT = (1, 2)
"""The numbers of redundant experts per place that are tried; two may pay if weights are small."""


@dataclass(frozen=True)
class Recipe:
    """The parameters from which a table is built. They stay valid as long as loads change
    little."""

    shadows: bool = False
    """Whether places compute their own copies for hot experts."""
    whole: bool = False
    """Whether a hot expert is replicated to all places or to none."""
    limit: float | None = None
    """The load above which a place spills copies, relative to the place's share; None for no
    spilling."""
    near_first: bool = False
    """Whether copies are spilled inside nodes first."""
    redundant: int = 0
    """Number of redundant experts on each place, as in EPLB; 0 for none."""
    least: tuple[float, ...] = ()
    """For each replica of the experts, the share of all copies from which a pair is shadowed (an
    expert, with `whole`); see `tables.least_of`. It is set when options are compared. The counts of
    each call then decide how many pairs reach it."""

    @property
    def policy(self) -> str:
        """Name of the policy; "" if the recipe replicates nothing."""
        if self.shadows:
            return "whole shadow" if self.whole else "shadow"
        if self.redundant:
            return "redundant"
        return "" if self.limit is None else "spill"

    def table(self, replica: ReplicaLoad, least: float, at_most: int) -> Replications:
        """Return the replications between the places of one replica of the experts.

        Args:
            least: the entry of `Recipe.least` for that replica.
            at_most: most experts that may be replicated to a place as shadows.
        """
        if self.redundant:
            return redundant(replica, self.redundant)
        if self.limit is not None:
            return spills(replica, NOTHING, self.limit, near_first=self.near_first)
        if self.shadows and least < 1:  # nothing reaches a share of 1
            return shadows_above(replica, least, at_most=at_most, whole=self.whole)
        return NOTHING


@dataclass(frozen=True)
class Option:
    """One way of running a call: a program and a recipe, with the tables and the modelled time for
    the call."""

    program: str
    """Name of the program among `option_plans`."""
    recipe: Recipe
    replicated: tuple[Replications, ...]
    """The replications within each replica of the experts."""
    seconds: float
    """Modelled seconds of the call."""

    @property
    def name(self) -> str:
        """The name of the program, with the policy that builds the table: "alone", "shadow", "r=0",
        "steps+spill"."""
        return self.program.replace(REPLICATED, self.recipe.policy)


class Weigher:
    """The model of the options of a layer's calls.

    Args:
        plans: the plans of the programs that the layer may run, by name; the one without
            replication first.
        costs: rates of the cost model.
        at_most: most experts that may be replicated to a place as shadows.
    """

    def __init__(self, plans: Mapping[str, Plan], costs: Rates, at_most: int) -> None:
        self._plans = dict(plans)
        self._costs = costs
        self._at_most = at_most
        self._links: tuple[Grid, list[ReplicaLinks]] | None = None
        """The mesh of the last call, and the links of its replicas; None before the first call."""

    def replica_loads(self, load: CallLoad) -> list[ReplicaLoad]:
        """Return the load of each replica of the experts in a call. The links, which do not change,
        are computed once."""
        if self._links is None or self._links[0] != load.grid:
            self._links = (load.grid, replica_links(load, self._costs))
        _, links_of_replicas = self._links
        return [ReplicaLoad(load, links) for links in links_of_replicas]

    def tables(self, recipe: Recipe, replicas: Sequence[ReplicaLoad]) -> tuple[Replications, ...]:
        """Return the replications of a recipe in a call, within each replica of the experts."""
        # no pair reaches a threshold of 1
        thresholds = recipe.least or (1.0,) * len(replicas)
        return tuple(
            recipe.table(replica, least, self._at_most)
            for replica, least in zip(replicas, thresholds)
        )

    def works(
        self, program: str, replicas: Sequence[ReplicaLoad], replicated: Sequence[Replications]
    ) -> list[Work]:
        """Return the work of a call under a program, by replica of the experts."""
        plan = self._plans[program]
        works = [
            work_of(replica, table, plan.chunks) for replica, table in zip(replicas, replicated)
        ]
        r = plan.gather_weights
        # the program has no r of its own
        if r is None or r == self._plans[ALONE].gather_weights:
            return works
        return [gathered_work(replica, work, r) for replica, work in zip(replicas, works)]

    def alone(self, replicas: Sequence[ReplicaLoad]) -> Option:
        """Return the option of leaving a call alone."""
        nothing = (NOTHING,) * len(replicas)
        return self._option(ALONE, Recipe(), nothing, self.works(ALONE, replicas, nothing))

    def all(self, replicas: Sequence[ReplicaLoad]) -> list[Option]:
        """Return all options for a call, first that of leaving the call alone."""
        alone = self.alone(replicas)
        tables = self._best_tables(replicas)
        options = [alone]
        other_plans = list(self._plans.items())[1:]
        for program, plan in other_plans:
            if plan.replicates:  # an option for each policy's table
                options += [
                    self._option(program, recipe, replicated, works)
                    for recipe, replicated, works in tables
                ]
            else:  # without a table
                works = self.works(program, replicas, alone.replicated)
                options.append(self._option(program, Recipe(), alone.replicated, works))
        return options

    def _option(
        self, program: str, recipe: Recipe, replicated: tuple[Replications, ...], works: list[Work]
    ) -> Option:
        """Return a program as an option, with its predicted seconds."""
        plan = self._plans[program]
        costs = self._costs
        # tokens travel in parts, by chunk and by group of peers
        seconds = max(work.seconds(plan.chunks * plan.peer_groups) for work in works)
        # each further part starts a message and a product
        further_parts = (plan.peer_groups - self._plans[ALONE].peer_groups) * costs.passes
        seconds += further_parts * (costs.part_us + costs.inter_latency_us) * 1e-6
        return Option(program, recipe, replicated, seconds=round(seconds, DECIMALS))

    def _best_tables(
        self, replicas: Sequence[ReplicaLoad]
    ) -> list[tuple[Recipe, tuple[Replications, ...], list[Work]]]:
        """Return recipe, table and work of the best table of each policy, without policies that
        replicate nothing."""
        # with the host's seconds per replicated expert, and without; once if they are 0
        prices = dict.fromkeys((self._costs.expert_us * 1e-6, 0.0))
        spilling = [Recipe(limit=limit) for limit in SPILLS]
        num_nodes = len(set(replicas[0].links.nodes.tolist()))
        if num_nodes > 1:
            spilling += [replace(recipe, near_first=True) for recipe in spilling]
        redundancies = [Recipe(redundant=number) for number in REDUNDANT]
        candidates_by_policy = [
            [self._shadowed(replicas, price, whole=False) for price in prices],
            [self._shadowed(replicas, price, whole=True) for price in prices],
            [(recipe, self.tables(recipe, replicas)) for recipe in spilling],
            [(recipe, self.tables(recipe, replicas)) for recipe in redundancies],
        ]

        best_tables = []
        for candidates in candidates_by_policy:
            with_works = [
                (recipe, tables, self.works(REPLICATED, replicas, tables))
                for recipe, tables in candidates
            ]
            best = min(with_works, key=lambda each: self._option(REPLICATED, *each).seconds)
            _, tables, _ = best
            if not all(table.is_empty for table in tables):
                best_tables.append(best)
        return best_tables

    def _shadowed(
        self, replicas: Sequence[ReplicaLoad], price: float, *, whole: bool
    ) -> tuple[Recipe, tuple[Replications, ...]]:
        """Return the recipe and the tables of shadows, by replica of the experts, if each expert
        costs `price` more seconds."""
        tables = []
        thresholds = []
        for replica in replicas:
            table = shadows(replica, price, at_most=self._at_most, whole=whole)
            tables.append(table)
            # no pair has all copies, so that nothing reaches a threshold of 1
            threshold = 1.0 if table.is_empty else least_of(replica, table, whole=whole)
            thresholds.append(threshold)
        recipe = Recipe(shadows=True, whole=whole, least=tuple(thresholds))
        return recipe, tuple(tables)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a call does within one replica of the experts, forward and backward."""

    home: np.ndarray
    """(ep,) float64: seconds of each place's products for its own experts."""
    helped: np.ndarray
    """(ep,) float64: seconds of each place's products for replicated experts."""
    travel: float
    """Seconds of tokens that travel to their experts' homes and back, on the fullest link."""
    travel_helped: float = 0.0
    """Seconds of tokens that travel to helpers and back, on the fullest link."""
    fetch: float = 0.0
    """Seconds of weights and their gradients on the fullest link."""
    host: float = 0.0
    """Seconds of the host for replicated experts."""
    replicates: bool = False
    """Whether the program that replicates runs."""
    rows: tuple[int, ...]
    """Copies that each place computes."""
    token_bytes: int = 0
    """Bytes of tokens and their gradients that cross links."""
    weight_bytes: int = 0
    """Bytes of weights and their gradients that cross links."""

    def seconds(self, parts: int) -> float:
        """Return the modelled seconds if tokens travel home in `parts` parts, each of which is
        computed while the next travels.

        If the program replicates, weights and replicated copies travel while homes compute, and
        results return to their origins while helpers compute.
        """
        compute = self.home
        travel = self.travel
        if not self.replicates:
            # the longer of the two hides the other, except for its first or last part
            busiest = float(compute.max())
            return max(busiest, travel) + min(busiest, travel) / parts + self.fetch

        # weights and replicated copies, over the same links as tokens that travel home
        arrives = self.fetch + self.travel_helped / 2
        # in one part: half of `travel` goes there, homes compute while the rest arrives, and the
        # other half comes back while helpers compute
        returns = np.maximum(self.helped, travel / 2)
        whole = travel / 2 + np.maximum(compute, arrives) + returns
        # products at home overlap with all messages, except for the first or last part; then
        # helpers compute
        in_parts = (
            np.maximum(compute, travel + arrives)
            + np.minimum(compute, travel) / parts
            + self.helped
        )
        # of each place
        seconds = whole if parts == 1 else np.minimum(whole, in_parts)
        # at the end the helpers' results travel
        return float(seconds.max()) + self.travel_helped / 2 + self.host


def work_of(replica: ReplicaLoad, replicated: Replications, chunks: int = 1) -> Work:
    """Return the work of a call under a table of replicated copies.

    Args:
        replica: the load of one replica of the experts.
        replicated: the replications between the places of that replica.
        chunks: number of chunks in which the copies that are not replicated travel.
    """
    rows = rows_of(replica, replicated)
    shards = replica.origins.shape[1]
    # how often a row crosses a link: there and back, again for gradients. Weights cross half as
    # often: they go out, and their gradients come back.
    passes = replica.costs.passes
    slowness = replica.links.slowness

    # seconds for the bytes on the fullest link, and for the start-up of messages
    start_up = replica.links.start_up
    travel = replica.travel_seconds(replica.fullest(rows.home))
    travel += passes * _fullest(start_up * chunks * (rows.home > 0))
    travel_helped = replica.travel_seconds(replica.fullest(rows.replicated))
    travel_helped += passes * _fullest(start_up * (rows.replicated > 0))
    fetch = replica.fetch_seconds(replica.fullest(rows.fetched))
    fetch += passes / 2 * _fullest(start_up * (rows.fetched > 0))

    computed = rows.home + rows.replicated  # (ep, ep): by origin and place that computes
    across = int(computed.sum() - np.trace(computed))
    return Work(
        home=replica.compute_seconds(rows.home.sum(0) * slowness),
        helped=replica.compute_seconds(rows.replicated.sum(0) * slowness),
        travel=travel,
        travel_helped=travel_helped,
        fetch=fetch,
        host=rows.held * replica.costs.expert_us * 1e-6,
        replicates=not replicated.is_empty,
        rows=tuple(computed.sum(0).tolist()),
        token_bytes=passes * across * replica.row_bytes * shards,
        weight_bytes=passes // 2 * int(rows.fetched.sum()) * replica.weight_bytes * shards,
    )


def gathered_work(replica: ReplicaLoad, alone: Work, r: int) -> Work:
    """Return the work of a call with `gather_weights` r below etp.

    Args:
        replica: the load of one replica of the experts.
        alone: the work in that replica with r = etp.
        r: number of shards that a token visits; 0 if weights travel to the tokens instead.
    """
    return _shards_gathered(replica, alone, r) if r else _all_gathered(replica, alone)


def _shards_gathered(replica: ReplicaLoad, alone: Work, r: int) -> Work:
    """Return the work of a call in which a token visits `r` shards of an expert, and each rank
    gathers the shards that the others of its place would have computed."""
    shards = replica.origins.shape[1]
    per_place = replica.load.num_experts // len(replica.origins)
    transfers = replica.costs.passes - 1  # forward, backward again, gradients back
    # a rank computes shards / r shards of each expert of its place, and has one of them
    num_fetched = (shards // r - 1) * per_place
    gathered = num_fetched * replica.weight_bytes * _within_place(replica)
    return replace(
        alone,
        # rows go to r ranks of a place instead of to all
        travel=alone.travel * r / shards,
        # a rank gathers inside its place only
        fetch=transfers * gathered,
        # as with `travel`
        token_bytes=alone.token_bytes * r // shards,
        # all ranks of the replica gather the same number of shards
        weight_bytes=transfers * num_fetched * replica.weight_bytes * replica.origins.size,
    )


def _all_gathered(replica: ReplicaLoad, alone: Work) -> Work:
    """Return the work of a call in which weights travel to the tokens: every rank fetches all
    shards of all experts of the replica, and computes its own copies."""
    shards = replica.origins.shape[1]
    per_place = replica.load.num_experts // len(replica.origins)
    transfers = replica.costs.passes - 1  # forward, backward again, gradients back
    own_copies = replica.load.copies[replica.origins].sum(2)  # (ep, ranks of a place)

    # between places: every place sends all its shards to each other place
    sent = shards * per_place * (1 - np.eye(len(replica.origins)))
    fetched = replica.weight_bytes * replica.fullest(sent)
    # start-up: one message from each rank of another place
    fetched += _fullest(shards * replica.links.start_up)
    # inside a place: the shards of the other ranks
    fetched += (shards - 1) * per_place * replica.weight_bytes * _within_place(replica)

    # the shards of all other ranks
    num_fetched = (replica.origins.size - 1) * per_place
    return Work(
        # the fullest rank of each place, whose products have whole experts instead of a shard
        home=replica.compute_seconds(own_copies.max(1) * shards * replica.links.slowness),
        # unchanged
        helped=alone.helped,
        # tokens stay
        travel=0.0,
        fetch=transfers * fetched,
        rows=tuple(own_copies.sum(1).tolist()),
        # all ranks of the replica fetch the same number of shards
        weight_bytes=transfers * num_fetched * replica.weight_bytes * replica.origins.size,
    )


def is_even(replica: ReplicaLoad, margin: float) -> bool:
    """Return whether a load is so even that replication cannot gain much.

    That is so if no place computes, sends or receives more than the mean by `margin`, and if no
    place exchanges more bytes of tokens with an expert of another place than the expert's weights
    have.

    Args:
        replica: the load of one replica of the experts.
        margin: a share of the mean.
    """
    home = replica.load.home
    ep = len(replica.origins)
    is_away = np.arange(ep)[:, None] != home[None, :]
    away = replica.copies * is_away
    exchanged_bytes = 2 * int(away.max(initial=0)) * replica.row_bytes  # there and back
    if exchanged_bytes > replica.weight_bytes:
        return False
    rows = rows_of(replica, NOTHING).home
    travel = rows * replica.links.seconds_per_byte
    computed = rows.sum(0) * replica.links.slowness
    received = travel.sum(0)
    sent = travel.sum(1)
    for load in (computed, received, sent):
        if not float(load.max()) <= (1 + margin) * float(load.mean()):
            return False
    return True


def _fullest(seconds: np.ndarray) -> float:
    """Return the seconds of the place that sends or receives longest, from the seconds between
    places, (ep, ep)."""
    received = seconds.sum(0)
    sent = seconds.sum(1)
    return float(max(received.max(), sent.max()))


def _within_place(replica: ReplicaLoad) -> float:
    """Return the seconds per byte between two ranks with shards of the same experts."""
    rates = replica.costs
    grid = replica.load.grid
    nodes = {grid.node_of(int(rank)) for rank in replica.origins[0]}
    gbps = rates.intra_gbps if len(nodes) == 1 else rates.inter_gbps
    return 8 / (gbps * 1e9)
