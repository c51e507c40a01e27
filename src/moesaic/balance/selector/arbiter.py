"""The arbiter: chooses for each call of a layer how tokens and weights move, by one model.

After the one exchange of a call, every rank has the counts of all ranks. From these all ranks
choose the same option without further messages: the one that the model predicts to be fastest.
Comparing all options takes longer than a call could gain, so they are compared now and then, and
what each saved is averaged over comparisons, since loads may alternate. In between, the chosen
program runs with a table that is built from each call's own counts, or *scaled*: each entry of an
earlier table keeps its share of the copies. *Alone* is the call without replication; options and
recipes are those of `options.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad
from moesaic.balance.replication.policy import (
    ALONE,
    REPLICATED,
    AbstractChooser,
    AbstractReplicationPolicy,
    CallDecision,
    CallTraffic,
)
from moesaic.balance.replication.tables import spread, within
from moesaic.balance.selector.options import (
    STEPS,
    STEPS_REPLICATED,
    Option,
    Recipe,
    Weigher,
    Work,
    is_even,
    option_plans,
)
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.plan import NO_REPLICATION, Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications

EVERY = 11
COUNTS = 192
"""All options are compared in every `EVERY`-th call, less often if a call has more than `EVERY`
times `COUNTS` counts: it takes longer then. The number is odd, since loads may alternate with a
period of four."""
SMALL = 1024
"""The largest number of counts with which shadows are chosen anew in every call, as quickly as a
table is scaled."""
WORSE = 0.15
"""Share of the mean load by which a scaled table may leave the busiest place busier than when the
table was built."""


@dataclass(frozen=True, kw_only=True)
class Arbiter(AbstractReplicationPolicy):
    """The settings of an arbiter, as a replication policy. `start` builds the arbiter of one
    layer."""

    has_choice = True
    costs: Rates = field(default_factory=Rates)
    """Rates of the cost model."""
    margin: float = 0.02
    """Share by which an option must be faster than leaving the call alone."""
    at_most: int = 8
    """Most experts that may be replicated to one place as shadows; they need memory for weights and
    gradients."""

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise InputError(
                f"arbiter.margin={self.margin}: choose a share of at least 0 and below 1"
            )
        if self.at_most < 1:
            raise InputError(f"arbiter.at_most={self.at_most}: must be at least 1")

    def option_plans(self, plan: Plan, grid: Grid) -> dict[str, Plan]:
        """Return the plans among which the arbiter chooses: without replication, with it, with
        other r, and step by step."""
        return option_plans(plan, grid)

    def start(self, plans: Mapping[str, Plan]) -> Arbitration:
        """Return the arbiter of one layer."""
        return Arbitration(self, plans)

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the fastest table of replicated copies by the model, (world, num_experts, ep)
        int64."""
        plans = {ALONE: Plan(replication=NO_REPLICATION), REPLICATED: Plan(replication="arbiter")}
        decision = self.start(plans).choose(load)
        replicated = decision.replicated or NOTHING
        return replicated.table((*load.copies.shape, load.grid.ep))


class Arbitration(AbstractChooser):
    """The arbiter of one layer, with the option that was fastest when all were last compared.

    Args:
        plans: the plans of the programs that the layer may run, by name; the one without
            replication first.
    """

    def __init__(self, settings: Arbiter, plans: Mapping[str, Plan]) -> None:
        self.settings = settings
        self.weigher = Weigher(plans, settings.costs, settings.at_most)
        self._last = Option(ALONE, recipe=Recipe(), replicated=(), seconds=0.0)
        self._seconds: dict[str, float] = {}
        """Modelled seconds of each option in the last comparison."""
        self._known: dict[str, Option] = {}
        """The options of all comparisons, as they were last."""
        self._saved: dict[str, float] = {}
        """The share of the seconds of leaving calls alone that each option saved lately."""
        self._scaled: ScaledTable | None = None
        """The table that the next calls scale; None if the next call builds one."""
        self._calls = 0
        """Calls so far."""

    def choose(self, load: CallLoad) -> CallDecision:
        """Return the decision for a call, from its counts and the model; the same on all ranks."""
        started = time.thread_time()
        replicas = self.weigher.replica_loads(load)
        self._calls += 1
        calls_between_comparisons = max(EVERY, load.copies.size // COUNTS)
        if self._calls % calls_between_comparisons == 1:  # the first call, too
            self._compare(replicas)
            table = self._spread(replicas, self._last.replicated)
        else:
            table = self._repeated(replicas)
        option = self._last
        # the recipe replicates, but nothing in this call: the same steps without replication
        if table.is_empty and option.recipe.policy:
            program = STEPS if option.program == STEPS_REPLICATED else ALONE
            option = Option(program, recipe=Recipe(), replicated=(), seconds=0.0)

        def moved() -> tuple[CallTraffic, CallTraffic]:
            """Return what a call moves without replication, and what it moved."""
            nothing = (NOTHING,) * len(replicas)
            tables = [within(replica, table) for replica in replicas]
            alone = self.weigher.works(ALONE, replicas, nothing)
            decided = self.weigher.works(option.program, replicas, tables)
            return _traffic(alone), _traffic(decided)

        return CallDecision(
            option=option.name,
            program=option.program,
            replicated=None if table.is_empty else table,
            seconds=self._seconds,
            moved=moved,
            decision_seconds=time.thread_time() - started,
        )

    def _compare(self, replicas: Sequence[ReplicaLoad]) -> None:
        """Compare all options for a call, and keep the fastest one. Under an even load the call is
        left alone, since the plan was chosen for that case."""
        margin = self.settings.margin
        if all(is_even(replica, margin) for replica in replicas):
            options = [self.weigher.alone(replicas)]
        else:
            options = self.weigher.all(replicas)
        self._seconds = {option.name: option.seconds for option in options}
        fastest = self._fastest_lately(options)
        if all(option is not fastest for option in options):  # its tables are of an earlier call
            tables = self.weigher.tables(fastest.recipe, replicas)
            fastest = replace(fastest, replicated=tables)
        self._last = fastest
        self._scaled = None

    def _fastest_lately(self, options: Sequence[Option]) -> Option:
        """Return the option that saved most in all comparisons, each of which counts twice as much
        as the one before.

        An option that is not among those of a call replicates nothing there, and so saves what its
        program saves without.
        """
        seconds_alone = options[0].seconds
        saved_now = {}
        for option in options:
            self._known[option.name] = option
            share = 1 - option.seconds / seconds_alone if seconds_alone else 0.0
            saved_now[option.name] = share
        # an option that is missing now runs its program without a table: step by step, or alone
        steps_share = saved_now.get(STEPS, 0.0)
        for name in self._saved:
            if name not in saved_now:
                saved_now[name] = steps_share if name.startswith(STEPS) else 0.0

        self._saved = {
            name: (self._saved.get(name, share) + share) / 2 for name, share in saved_now.items()
        }
        best = max(self._saved, key=lambda name: self._saved[name])
        return self._known[best if self._saved[best] > self.settings.margin else ALONE]

    def _repeated(self, replicas: Sequence[ReplicaLoad]) -> Replications:
        """Return the table of the last option for another call."""
        if not self._last.recipe.policy:  # the option replicates nothing
            return NOTHING
        if self._scaled is not None:
            scaled = self._scaled.fitted(replicas[0].load)
            if scaled is not None:
                return scaled
        return self._spread(replicas, self.weigher.tables(self._last.recipe, replicas))

    def _spread(
        self, replicas: Sequence[ReplicaLoad], replicated: Sequence[Replications]
    ) -> Replications:
        """Return a table over all ranks; it is kept for later calls, unless shadows are chosen as
        quickly as it is scaled."""
        table = spread(replicas, replicated)
        is_built_quickly = self._last.recipe.shadows and replicas[0].load.copies.size <= SMALL
        if not table.is_empty and not is_built_quickly:
            self._scaled = ScaledTable(replicas[0], table)
        return table


def _traffic(works: Sequence[Work]) -> CallTraffic:
    """Return what a call computes and moves, from its work by replica of the experts."""
    return CallTraffic(
        tuple(rows for work in works for rows in work.rows),
        sum(work.token_bytes for work in works),
        sum(work.weight_bytes for work in works),
    )


class ScaledTable:
    """A table of replicated copies that is scaled to the counts of other calls: every entry keeps
    its share of the copies.

    With many ranks and experts, building a table anew takes milliseconds; this is one integer
    product per entry.

    Args:
        replica: the load of a replica of the experts in the call for which the table was built.
        table: the replications over all ranks.
    """

    def __init__(self, replica: ReplicaLoad, table: Replications) -> None:
        load = replica.load
        self._table = table
        self._cells = table.origin * load.num_experts + table.expert
        """For each entry, the index of its origin's copies for its expert in `CallLoad.copies`."""
        self._before = load.copies.reshape(-1)[self._cells]
        """For each entry, these copies in the call for which the table was built."""
        self._slowness = replica.links.slowness
        """(ep,): the relative time of a copy at each place."""
        self._source = load.home[table.expert]
        """For each entry, the place that is its expert's home."""
        self._busiest = self._busiest_under(load, table.amount)
        """The load of the busiest place over the mean when the table was built."""

    def fitted(self, load: CallLoad) -> Replications | None:
        """Return the table for a call; None if the load has changed too much for it."""
        copies = load.copies.reshape(-1)[self._cells]
        # `_before` is never 0, since an entry replicates some of these copies
        amounts: np.ndarray = self._table.amount * copies // self._before
        if self._busiest_under(load, amounts) > self._busiest + WORSE:
            return None
        return self._table._replace(amount=amounts).where(amounts > 0)

    def _busiest_under(self, load: CallLoad, amounts: np.ndarray) -> float:
        """Return the load of the busiest place if each entry replicates its one of the `amounts`,
        relative to the mean."""
        ep = load.grid.ep
        copies = load.copies.sum(0)
        at_home = copies.reshape(ep, -1).sum(1)  # every place has equally many
        gained = np.bincount(self._table.helper, amounts, ep)
        lost = np.bincount(self._source, amounts, ep)
        loads = (at_home + (gained - lost)) * self._slowness
        return float(loads.max()) * ep / max(1, int(copies.sum()))
