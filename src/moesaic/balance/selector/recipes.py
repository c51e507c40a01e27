"""What the arbiter weighs: every program with every table of replicated copies that is worth a look, and what the model
says of it.

A recipe says how a table is made, so that the next call's table can be made from its own counts without weighing anything.
The model may be off by more than options are apart, above all in what an expert that is replicated costs the host. So
shadows come in several degrees of thrift, which only measured times can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.balance.choices import PlanChoices
from moesaic.balance.replication.cost import Board, Ground, ReplicationCosts, grounds
from moesaic.balance.replication.load import Load
from moesaic.balance.replication.spill import LIMITS
from moesaic.balance.replication.tables import DECIMALS, NOTHING, Lendings, first_shadows, shadows_at, spills
from moesaic.balance.selector.cost import Cost, gathered_cost, replicated_cost, worst
from moesaic.balance.selector.options import ALONE, name_of
from moesaic.program.grid import Grid

THRIFTS = (0.0, 0.02, 0.06)
"""Shares of the time left alone that each expert which is shadowed must save; the model alone would always choose 0."""


@dataclass(frozen=True)
class Recipe:
    """How a table is made: what of a decision stays as it is while loads change little."""

    shadows: bool = False
    """Let places compute their own copies of hot experts."""
    whole: bool = False
    """Lend such an expert to all places or to none."""
    limit: float | None = None
    """Then spill what places have above so many times the mean; None for no spilling."""
    near_first: bool = False
    """Spill inside nodes first."""
    thrift: float = 0.0
    """One of `THRIFTS`."""
    counts: tuple[int, ...] = ()
    """By replica: the pairs, or experts that are replicated whole, that were worth it when this was weighed."""

    @property
    def policy(self) -> str:
        """Its name; "" for one that replicates nothing."""
        return self._named(f" {self.thrift:.0%}" if self.thrift else "")

    @property
    def family(self) -> str:
        """Its name, whatever its thrift."""
        return self._named("")

    def _named(self, thrift: str) -> str:
        shadow = ("whole shadow" if self.whole else "shadow") + thrift
        return "+".join([shadow] * self.shadows + ["spill"] * (self.limit is not None))

    def table(self, board: Board, count: int, at_most: int) -> Lendings:
        """Return what it replicates between the places of a replica; `count` is that of the replica."""
        found = NOTHING
        if self.shadows and count:
            found = first_shadows(board, count, at_most=at_most, whole=self.whole)
        if self.limit is None:
            return found
        return found.joined(spills(board, found, self.limit, near_first=self.near_first))


@dataclass(frozen=True)
class Choice:
    """What a call runs."""

    name: str
    program: int
    recipe: Recipe


NO_CHANGE = Choice(ALONE, 0, Recipe())
"""Leaving a call alone."""


@dataclass(frozen=True)
class Option:
    """One way of running a call."""

    choice: Choice
    replicated: tuple[Lendings, ...]
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
        thrifts: of shadows.
    """

    def __init__(
        self,
        plan: PlanChoices,
        plans: Sequence[PlanChoices],
        costs: ReplicationCosts,
        *,
        at_most: int,
        part_us: float,
        factors: Mapping[str, float],
        thrifts: Sequence[float] = (0.0,),
    ) -> None:
        self.plan, self.plans, self._costs, self._at_most = plan, tuple(plans), costs, at_most
        self._part_us, self._factors, self._thrifts = part_us, factors, tuple(thrifts)
        self._limits: dict[bool, int] = {}
        self._ground: tuple[Grid, list[Ground]] | None = None

    def boards(self, load: Load) -> list[Board]:
        """Return the boards of a call; what they stand on is made once."""
        if self._ground is None or self._ground[0] != load.grid:
            self._ground = (load.grid, grounds(load, self._costs))
        return [Board(load, each) for each in self._ground[1]]

    def alone(self, found: Sequence[Board]) -> Option:
        """Return what leaving a call alone takes."""
        nothing = (NOTHING,) * len(found)
        return self._option(0, Recipe(), nothing, self._cost(found, nothing), found[0])

    def tables(self, recipe: Recipe, found: Sequence[Board]) -> tuple[Lendings, ...] | None:
        """Return what a recipe replicates in a call; None where it would replicate and finds nothing, which no program
        wants."""
        counts = recipe.counts or (0,) * len(found)
        replicated = tuple(recipe.table(board, count, self._at_most) for board, count in zip(found, counts))
        return None if recipe.policy and all(each.is_empty for each in replicated) else replicated

    def priced(
        self, choice: Choice, replicated: tuple[Lendings, ...], found: Sequence[Board], alone: Option | None = None
    ) -> Option:
        """Return what a choice takes in a call, its tables made already."""
        plan = self.plans[choice.program]
        cost = alone.cost if alone is not None and not choice.recipe.policy else self._cost(found, replicated)
        return self._option(choice.program, choice.recipe, replicated, self._program_cost(plan, cost, found), found[0])

    def all(self, found: Sequence[Board], alone: Option, *, anew: bool) -> list[Option]:
        """Return the options for a call, leaving it alone first.

        Args:
            found: the call's boards.
            alone: what leaving it alone takes.
            anew: try all limits again, and not only neighbours of the last best.
        """
        if anew:
            self._limits = {}
        lendings = None
        options = [alone]
        for number, plan in list(enumerate(self.plans))[1:]:
            if not plan.replicates:
                nothing = Choice(name_of(plan, self.plan), number, Recipe())
                options.append(self.priced(nothing, alone.replicated, found, alone))
                continue
            lendings = self._lendings(found, alone) if lendings is None else lendings
            options += [
                self._option(number, recipe, replicated, cost, found[0]) for recipe, replicated, cost in lendings
            ]
        return options

    def _option(
        self, number: int, recipe: Recipe, replicated: tuple[Lendings, ...], cost: Cost, board: Board
    ) -> Option:
        plan = self.plans[number]
        steps, name = plan.peer_groups, name_of(plan, self.plan, recipe.policy)
        seconds = cost.seconds(plan.chunks * steps)
        seconds += (steps - self.plan.peer_groups) * board.passes / 2 * self._part_us * 1e-6
        factor = self._factors.get(name_of(plan, self.plan, recipe.family), 1.0)
        return Option(Choice(name, number, recipe), replicated, cost, round(seconds * factor, DECIMALS))

    def _cost(self, found: Sequence[Board], replicated: Sequence[Lendings]) -> Cost:
        return worst([replicated_cost(board, each, self.plan.chunks) for board, each in zip(found, replicated)])

    def _program_cost(self, plan: PlanChoices, cost: Cost, found: Sequence[Board]) -> Cost:
        """Return the cost under another r, if the plan has one."""
        r = plan.gather_weights
        if r is None or r == self.plan.gather_weights:
            return cost
        return worst([gathered_cost(board, cost, r) for board in found])

    def _lendings(self, found: Sequence[Board], alone: Option) -> list[tuple[Recipe, tuple[Lendings, ...], Cost]]:
        """Return the best table of each policy that replicates anything."""
        shadowed = self._shadowed(found, alone)
        bases = {False: (NOTHING,) * len(found)}
        if shadowed and not shadowed[0][0].whole:
            bases[True] = shadowed[0][1]
        tried: dict[Recipe, tuple[Recipe, tuple[Lendings, ...], Cost]] = {}

        def table(recipe: Recipe) -> tuple[Recipe, tuple[Lendings, ...], Cost]:
            if recipe not in tried:
                replicated, limit, near = bases[recipe.shadows], recipe.limit, recipe.near_first
                assert limit is not None
                more = (spills(board, base, limit, near_first=near) for board, base in zip(found, replicated))
                replicated = tuple(base.joined(each) for base, each in zip(replicated, more))
                tried[recipe] = (recipe, replicated, self._cost(found, replicated))
            return tried[recipe]

        def seconds(recipe: Recipe) -> float:
            return round(table(recipe)[2].seconds(self.plan.chunks), DECIMALS)

        kept = [(recipe, replicated, self._cost(found, replicated)) for recipe, replicated in shadowed]
        for base in bases:
            plain = shadowed[0][0] if base else Recipe()
            at = self._limits.get(base)
            places = range(len(LIMITS)) if at is None else range(max(at - 1, 0), min(at + 2, len(LIMITS)))
            by_limit = [replace(plain, limit=LIMITS[place]) for place in places]
            best = min(by_limit, key=seconds)
            assert best.limit is not None
            self._limits[base] = LIMITS.index(best.limit)
            kept.append(table(min((best, replace(best, near_first=True)), key=seconds)))
        return [each for each in kept if not all(replicated.is_empty for replicated in each[1])]

    def _shadowed(self, found: Sequence[Board], alone: Option) -> list[tuple[Recipe, tuple[Lendings, ...]]]:
        """Return the shadows of every thrift that replicate anything; for some places first, then whole ones."""
        told = self._costs.expert_us * 1e-6
        prices = [told + thrift * alone.seconds for thrift in self._thrifts]
        kept = []
        for whole in (False, True):
            by_board = [shadows_at(board, prices, at_most=self._at_most, whole=whole) for board in found]
            for thrift, *replicated in zip(self._thrifts, *by_board):
                if not all(each.is_empty for each in replicated):
                    counts = tuple(len(np.unique(each.expert)) if whole else len(each.expert) for each in replicated)
                    kept.append((Recipe(True, whole, thrift=thrift, counts=counts), tuple(replicated)))
        return kept
