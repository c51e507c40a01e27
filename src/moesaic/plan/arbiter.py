"""The arbiter: for each call of a layer, from its counts, whether tokens, weights or nothing special moves.

Every rank has the counts of all ranks after the one exchange of a call, so all of them come to the same option without
asking each other. The decision is a pure function of these counts and of earlier decisions. Where all ranks have alike to
do, a call is left alone: what is best then the plan says already. Else the option with the least modelled time runs, unless
the last one is about as good; and as soon as nothing gains, the call is left alone again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moesaic.errors import InputError
from moesaic.plan.arbiter_cost import Cost, gathered_cost, is_even, lent_cost, start_up, worst
from moesaic.plan.arbiter_options import ALONE, name_of
from moesaic.plan.arbiter_tables import NOTHING, Lendings, shadows, spills, spread
from moesaic.plan.lending.cost import Board, LendingCosts, boards
from moesaic.plan.lending.lender import AbstractLender, Load
from moesaic.plan.plan import Plan
from moesaic.program.grid import Grid

LIMITS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Copies per place, over the mean, that are tried as what a place may compute where it spills."""

JUMP = 0.15
"""Change of the seconds per copy, as a share, from which all limits are tried again, not only neighbours of the last best."""


@dataclass(frozen=True)
class Verdict:
    """What was decided for a call, and from what."""

    option: str
    """Its name, as `arbiter_options.name_of` gives it."""
    program: int
    """Which of the plans that were offered runs."""
    lent: np.ndarray | None
    """(world, num_experts, ep) int64: copies that other ranks than their experts' homes compute; None for none."""
    seconds: Mapping[str, float]
    """Of every option that was weighed, forward and backward, by the model."""
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    """Copies that each place of ep computes, replica after replica: if the call is left alone, and as it was decided."""
    token_bytes: tuple[int, int]
    """Of tokens and their gradients that cross links: left alone, and as it was decided."""
    weight_bytes: int
    """Of weights and their gradients that cross links."""
    decision_seconds: float
    """What deciding took on this rank."""

    @property
    def copies_lent(self) -> int:
        """Copies that another rank computes."""
        return 0 if self.lent is None else int(self.lent.sum())


@dataclass(frozen=True, kw_only=True)
class Arbiter(AbstractLender):
    """How a layer's arbiter weighs options. Settings only: `start` makes one for a layer."""

    costs: LendingCosts = field(default_factory=LendingCosts)
    """Rates of the machine; `cost.Machine`'s unless a cluster or a profile gave others."""
    margin: float = 0.05
    """Leave an option only for one that is faster by this share."""
    memory: float = 0.25
    """How much earlier calls count, 0 to below 1: each call's weight is this share of the next one's."""
    part_us: float = 100.0
    """Microseconds that each further part of a pass costs, for launching it, where a call goes step by step."""
    weigh_every: int = 16
    """Calls of about the same load until all options are weighed again; between, only the last one's table is made anew."""
    at_most: int = 8
    """Experts that one place may be lent for its own copies; they need memory for weights and gradients."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By option: what its modelled seconds are multiplied by, where a simulation says that the model is off."""

    def __post_init__(self) -> None:
        for name in ("margin", "memory"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"arbiter.{name}={getattr(self, name)}: choose a share of at least 0 and below 1")
        for name in ("at_most", "weigh_every"):
            if getattr(self, name) < 1:
                raise InputError(f"arbiter.{name}={getattr(self, name)}: must be at least 1")

    def start(self, plan: Plan, plans: Sequence[Plan]) -> Arbitration:
        """Return the arbiter of one layer.

        Args:
            plan: of the layer.
            plans: of the programs that it may run, the plan without lending first.
        """
        return Arbitration(self, plan, plans)

    def decide(self, load: Load) -> np.ndarray:
        """Return the cheapest table of lent copies for a call alone, as lenders do; (world, num_experts, ep) int64."""
        plan = Plan(lending="spill")
        lent = Arbitration(self, plan, [Plan(), plan]).choose(load).lent
        return np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64) if lent is None else lent


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

    @property
    def policy(self) -> str:
        """Its name; "" for one that lends nothing."""
        return "+".join(
            ["whole shadow" if self.whole else "shadow"] * self.shadows + ["spill"] * (self.limit is not None)
        )

    def table(self, board: Board, at_most: int) -> Lendings:
        """Return what it lends between the places of a replica."""
        found = shadows(board, at_most=at_most, whole=self.whole) if self.shadows else NOTHING
        if self.limit is None:
            return found
        return found.joined(spills(board, found, self.limit, near_first=self.near_first))


class Choice(NamedTuple):
    """What a layer ran last."""

    name: str
    program: int
    recipe: Recipe


@dataclass(frozen=True)
class Option:
    """One way of running a call."""

    name: str
    program: int
    recipe: Recipe
    lent: tuple[Lendings, ...]
    """By replica of the experts."""
    cost: Cost
    seconds: float


class Arbitration:
    """The arbiter of one layer: what it decided last, and how options fared of late.

    Args:
        settings: how it weighs.
        plan: of the layer.
        plans: of the programs that it may run, the plan without lending first.
    """

    def __init__(self, settings: Arbiter, plan: Plan, plans: Sequence[Plan]) -> None:
        self.settings, self.plan, self.plans = settings, plan, tuple(plans)
        self.last = Choice(ALONE, 0, Recipe())
        """Of the last call."""
        self._shares: dict[str, float] = {}
        self._limits: dict[bool, int] = {}
        """Which of `LIMITS` was best last, without shadows and with them."""
        self._weighed_at = 0.0
        self._calls_until = 0
        self._geometry: tuple[Grid, list[np.ndarray], list[np.ndarray]] | None = None

    def choose(self, load: Load) -> Verdict:
        """Return the decision for a call; the same on all ranks.

        Args:
            load: of the call.
        """
        started = time.perf_counter()
        found, messages = self._boards(load)
        options = {each.name: each for each in self.weigh(found, messages)}
        chosen = options[self._settle({name: each.seconds for name, each in options.items()})]
        self.last = Choice(chosen.name, chosen.program, chosen.recipe)
        return Verdict(
            option=chosen.name,
            program=chosen.program,
            lent=spread(found, chosen.lent),
            seconds={name: each.seconds for name, each in options.items()},
            rows=(options[ALONE].cost.rows, chosen.cost.rows),
            token_bytes=(options[ALONE].cost.token_bytes, chosen.cost.token_bytes),
            weight_bytes=chosen.cost.weight_bytes,
            decision_seconds=time.perf_counter() - started,
        )

    def offers(self, load: Load) -> list[tuple[Option, np.ndarray | None]]:
        """Return the options for a call, with the table that each lends, (world, num_experts, ep) int64; decides nothing."""
        found, messages = self._boards(load)
        return [(option, spread(found, option.lent)) for option in self.weigh(found, messages)]

    def weigh(self, found: Sequence[Board], messages: Sequence[np.ndarray]) -> list[Option]:
        """Return the options for a call, leaving it alone first.

        Nothing else if all places have alike to do; the last call's option only, its table made anew, as long as the load is
        about the one for which all options were weighed, or until `weigh_every` calls have gone by.

        Args:
            found: the call's boards.
            messages: what `start_up` returns for each.
        """
        nothing = (NOTHING,) * len(found)
        alone = self._option(0, Recipe(), nothing, self._cost(found, nothing, messages), found[0])
        if all(is_even(board, self.settings.margin) for board in found):
            self._calls_until = 0
            return [alone]
        each_copy = alone.seconds / max(1, sum(int(board.copies.sum()) for board in found))
        self._calls_until -= 1
        if self._calls_until > 0 and abs(each_copy - self._weighed_at) <= 2 * self.settings.margin * self._weighed_at:
            last = self._again(found, messages, alone)
            if last is None or last.seconds < alone.seconds:
                return [alone] if last is None else [alone, last]
        if abs(each_copy - self._weighed_at) > JUMP * self._weighed_at:
            self._limits = {}
        self._weighed_at, self._calls_until = each_copy, self.settings.weigh_every
        lendings = None
        options = [alone]
        for number, plan in list(enumerate(self.plans))[1:]:
            if plan.lending == "none":
                cost = self._program_cost(plan, alone.cost, found, messages)
                options.append(self._option(number, Recipe(), nothing, cost, found[0]))
                continue
            lendings = self._lendings(found, messages) if lendings is None else lendings
            options += [self._option(number, recipe, lent, cost, found[0]) for recipe, lent, cost in lendings]
        return options

    def _boards(self, load: Load) -> tuple[list[Board], list[np.ndarray]]:
        """Return the boards of a call, and the start-up of messages between their places."""
        if self._geometry is None or self._geometry[0] != load.grid:
            found = boards(load, self.settings.costs)
            self._geometry = (load.grid, [board.origins for board in found], [start_up(board) for board in found])
        _, origins, messages = self._geometry
        return [Board(load, each, self.settings.costs) for each in origins], messages

    def _again(self, found: Sequence[Board], messages: Sequence[np.ndarray], alone: Option) -> Option | None:
        """Return the last call's option for this call; None if it was leaving alone, or has nothing left to lend."""
        if self.last.name == ALONE:
            return None
        plan, recipe = self.plans[self.last.program], self.last.recipe
        lent = tuple(recipe.table(board, self.settings.at_most) for board in found)
        if recipe.policy and all(each.is_empty for each in lent):
            return None  # a program that lends wants a table
        cost = self._cost(found, lent, messages) if recipe.policy else alone.cost
        cost = self._program_cost(plan, cost, found, messages)
        return self._option(self.last.program, recipe, lent, cost, found[0])

    def _option(self, number: int, recipe: Recipe, lent: tuple[Lendings, ...], cost: Cost, board: Board) -> Option:
        plan = self.plans[number]
        steps, name = plan.peer_groups, name_of(plan, self.plan, recipe.policy)
        seconds = cost.seconds(plan.chunks * steps)
        seconds += (steps - self.plan.peer_groups) * board.passes / 2 * self.settings.part_us * 1e-6
        return Option(name, number, recipe, lent, cost, seconds * self.settings.factors.get(name, 1.0))

    def _cost(self, found: Sequence[Board], lent: Sequence[Lendings], messages: Sequence[np.ndarray]) -> Cost:
        chunks = self.plan.chunks
        return worst([lent_cost(*each, chunks) for each in zip(found, lent, messages)])

    def _program_cost(self, plan: Plan, cost: Cost, found: Sequence[Board], messages: Sequence[np.ndarray]) -> Cost:
        """Return the cost under another r, if the plan has one."""
        r = plan.gather_weights
        if r is None or r == self.plan.gather_weights:
            return cost
        return worst([gathered_cost(board, cost, r, starts) for board, starts in zip(found, messages)])

    def _lendings(
        self, found: Sequence[Board], messages: Sequence[np.ndarray]
    ) -> list[tuple[Recipe, tuple[Lendings, ...], Cost]]:
        """Return the best table of each policy that lends anything."""
        at_most, tried = self.settings.at_most, {}
        shadowed = tuple(shadows(board, at_most=at_most) for board in found)
        bases = {False: (NOTHING,) * len(found), True: shadowed}
        if all(each.is_empty for each in shadowed):
            del bases[True]

        def table(recipe: Recipe) -> tuple[Recipe, tuple[Lendings, ...], Cost]:
            if recipe not in tried:
                lent = bases[recipe.shadows]
                if recipe.limit is not None:
                    near = recipe.near_first
                    more = (spills(board, base, recipe.limit, near_first=near) for board, base in zip(found, lent))
                    lent = tuple(base.joined(each) for base, each in zip(lent, more))
                tried[recipe] = (recipe, lent, self._cost(found, lent, messages))
            return tried[recipe]

        def seconds(recipe: Recipe) -> float:
            return table(recipe)[2].seconds(self.plan.chunks)

        kept = [table(Recipe(shadows=True))] if True in bases else []
        everywhere = tuple(shadows(board, at_most=at_most, whole=True) for board in found)
        whole = Recipe(shadows=True, whole=True)
        kept.append((whole, everywhere, self._cost(found, everywhere, messages)))
        for base in bases:
            at = self._limits.get(base)
            places = range(len(LIMITS)) if at is None else range(max(at - 1, 0), min(at + 2, len(LIMITS)))
            at = self._limits[base] = min(places, key=lambda place: seconds(Recipe(base, limit=LIMITS[place])))
            recipes = [Recipe(base, limit=LIMITS[at]), Recipe(base, limit=LIMITS[at], near_first=True)]
            kept.append(table(min(recipes, key=seconds)))
        return [each for each in kept if not all(lent.is_empty for lent in each[1])]

    def _settle(self, seconds: Mapping[str, float]) -> str:
        """Return the option that runs: the last one unless another is faster by the margin, or it gains nothing any more."""
        memory, margin = self.settings.memory, self.settings.margin
        now = {name: each / seconds[ALONE] if seconds[ALONE] else 1.0 for name, each in seconds.items()}
        for name, share in now.items():
            self._shares[name] = (1 - memory) * share + memory * self._shares.get(name, share)
        shares = {name: self._shares[name] for name in now}
        best = min(shares, key=lambda name: (shares[name], name != ALONE))
        last = self.last.name if self.last.name in shares else ALONE
        if shares[best] < (1 - margin) * shares[last]:
            last = best
        return last if now[last] < 1 else ALONE
