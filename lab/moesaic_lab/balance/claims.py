"""Claims of the balance benchmark: figures computed from its cells, compared with targets.

A cell holds the times of all methods in one case on an emulated bed; a share is the simulated time
of one method in one call. `some(values, what)` returns the values, or makes the claim one without a
value if there are none; `enough` does so for ratios of too few pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from moesaic_lab.balance.cells import BalanceCell
from moesaic_lab.balance.config import RecordedLoads, SharesOfForced, SkewedCase
from moesaic_lab.balance.methods import BOUNDED, LAER, OURS, OURS_PLACED, PLACED, PLAIN
from moesaic_lab.balance.shares import RECORDED, SLOW, Share
from moesaic_lab.balance.simulated import BEST, TimedDecision
from moesaic_lab.balance.tracked_memory import BudgetHeld
from moesaic_lab.claims import Claim, claimed, enough, some
from moesaic_lab.measure import MANY, NEAR, Ratio, paired

EQUIVALENT = 1.03
"""Two times count as equal if they differ by no more than this factor."""


def claims(
    cells: Sequence[BalanceCell],
    shares: Sequence[Share] = (),
    decided: Sequence[TimedDecision] = (),
    under_budget: Sequence[BudgetHeld] = (),
) -> list[Claim]:
    """Return all claims, including those that this run did not measure."""
    return [
        *_claims_of_speed(cells),
        claimed("balance.memory_worst", lambda: memory_worst(under_budget, cells), 1.1),
        claimed("balance.memory_worst_unbounded", lambda: memory_unbounded(under_budget), None),
        claimed("balance.decision_us_64", lambda: decision_us(decided), 100, unit="us"),
        *_claims_of_simulation(shares),
    ]


def _claims_of_speed(cells: Sequence[BalanceCell]) -> list[Claim]:
    """Return the claims about times that were measured."""

    def slow_rank() -> float:
        """Return the least speedup with a slow rank."""
        found = _speedups(cells, lambda case: case.place.slow_rank < 1)
        return min(some(found, "with a slow rank"))

    def slow_link() -> float:
        """Return the least speedup with a slow link."""
        found = _speedups(cells, lambda case: bool(case.place.slow_link))
        return min(some(found, "with a slow link"))

    def recorded() -> float:
        """Return the median speedup under recorded routing."""
        found = _speedups(cells, lambda case: case.max_vio is None)
        return statistics.median(some(found, "of recorded routing"))

    def placed() -> float:
        """Return the share of forced balance if experts are placed."""
        return share_of_forced(cells, OURS_PLACED)

    return [
        claimed("balance.speedup_maxvio2", lambda: speedup(cells, 2.0), 1.8, ">="),
        claimed("balance.over_best_single", lambda: over_best_single(cells), EQUIVALENT),
        claimed("balance.equivalent_to_best_single", lambda: equivalent(cells), None, ">="),
        claimed("balance.slow_rank_speedup", slow_rank, None, ">="),
        claimed("balance.slow_link_speedup", slow_link, None, ">="),
        claimed("balance.share_of_forced_real", lambda: share_of_forced(cells, OURS), 0.97, ">="),
        claimed("balance.share_of_forced_real_placed", placed, None, ">="),
        claimed("balance.overhead_maxvio0", lambda: overhead(cells), 0.01),
        claimed("balance.budget_speedup_maxvio4", lambda: budget_speedup(cells), None, ">="),
        claimed("balance.decision_share", lambda: decision_share(cells), 0.005),
        claimed("balance.recorded_speedup", recorded, None, ">="),
    ]


def _claims_of_simulation(shares: Sequence[Share]) -> list[Claim]:
    """Return the claims about simulated clusters."""

    def ours() -> float:
        """Return our share of forced balance."""
        return simulated_share(shares, OURS)

    def placed() -> float:
        """Return the same if experts are placed."""
        return simulated_share(shares, OURS_PLACED)

    def of_best() -> float:
        """Return our share of the best option's throughput."""
        return share_of_best_option(shares)

    return [
        claimed("balance.simulated_slow_rank_speedup", lambda: simulated_slow(shares), None, ">="),
        claimed("balance.simulated_share_of_forced", ours, 0.94, ">="),
        claimed("balance.simulated_share_of_forced_placed", placed, 0.94, ">="),
        claimed("balance.shares_over_best_single", lambda: shares_over_best(shares), EQUIVALENT),
        claimed("balance.simulated_share_of_best_option", of_best, None, ">="),
        *over_laer(shares),
    ]


def _speedups(cells: Sequence[BalanceCell], selects: Callable[[SkewedCase], bool]) -> list[float]:
    """Return our speedups over the plain layer in selected cases."""
    return [cell.ratio(PLAIN, OURS).median for cell in cells if selects(cell.job.case)]


def speedup(cells: Sequence[BalanceCell], max_vio: float) -> float:
    """Return the plain layer's time over ours at a MaxVio, on the bed with most ranks: the median
    if it is above `NEAR`, else the lower end of the 95 % interval."""
    largest = max(_at_max_vio(cells, max_vio), key=lambda cell: cell.job.case.place.bed.world)
    ratio = largest.ratio(PLAIN, OURS)
    return ratio.median if ratio.median > NEAR else ratio.low


def over_best_single(cells: Sequence[BalanceCell]) -> float:
    """Return our time over that of the fastest single technique, at the upper 95 % bound, for the
    worst case. Cases in which the two are equivalent (`is_equivalent`) count as 1."""
    ratios = [
        1.0 if is_equivalent(cell) else against_best(cell).high
        for cell in some(list(cells), "with all methods")
    ]
    return max(ratios)


def equivalent(cells: Sequence[BalanceCell]) -> float:
    """Return the share of cases in which ours and the fastest single technique pass the test of
    equivalence."""
    passed = [is_equivalent(cell) for cell in some(list(cells), "with all methods")]
    return sum(passed) / len(passed)


def is_equivalent(cell: BalanceCell) -> bool:
    """Whether ours takes as long as the fastest single technique, by two one-sided tests at 5 %
    (Schuirmann 1987).

    The 90 % interval of the ratio must lie within `EQUIVALENT` on both sides, over at least `MANY`
    pairs.
    """
    ratio = against_best(cell, 0.9)
    return ratio.repeats >= MANY and ratio.low >= 1 / EQUIVALENT and ratio.high <= EQUIVALENT


def against_best(cell: BalanceCell, level: float = 0.95) -> Ratio:
    """Return our time over that of the fastest single technique.

    If the two were timed in further rounds, only those rounds count. Among many methods of about
    equal speed, the one that was fastest in the first rounds was partly lucky.

    Args:
        cell: the case.
        level: level of the ratio's confidence interval.
    """
    best = cell.best_single()
    if OURS in cell.near and best in cell.near:
        first_rounds = len(cell.timings[OURS].seconds)
        ours = cell.near[OURS][first_rounds:]
        others = cell.near[best][first_rounds:]
        if len(ours) >= MANY and len(others) >= MANY:
            return paired(ours, others, level)
    return enough(cell.ratio(OURS, best), cell.job.case.label)


def share_of_forced(cells: Sequence[BalanceCell], method: str) -> float:
    """Return the plain layer's time under even loads over a method's time under recorded loads of
    ranks, on the bed with most ranks. The method's time is the median over the layers."""
    real = some(
        [cell for cell in cells if isinstance(cell.job.case.place, RecordedLoads)],
        "of recorded loads of ranks",
    )
    world = max(cell.job.case.place.bed.world for cell in real)
    even = [cell for cell in _at_max_vio(cells, 0.0) if cell.job.case.place.bed.world == world]
    first, *_ = some(even, f"with MaxVio 0 on {world} ranks")
    forced = first.timings[PLAIN].median
    medians = [cell.timings[method].median for cell in real if method in cell.timings]
    return forced / statistics.median(some(medians, f"of {method}"))


def simulated_share(shares: Sequence[Share], method: str) -> float:
    """Return a method's share of forced balance under recorded loads, as the median over the calls,
    for the worst cluster of 64 ranks."""
    chosen = [
        share
        for share in shares
        if share.ranks == 64 and share.load == RECORDED and share.method == method
    ]
    by_cluster: dict[str, list[float]] = {}
    for share in some(chosen, "of 64 simulated ranks"):
        by_cluster.setdefault(share.cluster, []).append(share.of_forced)
    return min(statistics.median(values) for values in by_cluster.values())


def share_of_best_option(shares: Sequence[Share]) -> float:
    """Return our throughput over that of the best option chosen with known counts, for the worst
    load (median over its calls)."""
    # seconds of the best option, by call and by the method that chooses among the same options
    best = {
        (_call_of(share), BEST[share.method]): share.whole_seconds
        for share in shares
        if share.method in BEST
    }
    ratios: dict[tuple[str, int, str, float, str], list[float]] = {}  # by load and method
    for share in shares:
        best_seconds = best.get((_call_of(share), share.method))
        if best_seconds is not None:
            key = (share.cluster, share.ranks, share.load, share.ratio, share.method)
            ratios.setdefault(key, []).append(best_seconds / share.whole_seconds)
    loads = some(list(ratios.values()), "of best options")
    return min(statistics.median(values) for values in loads)


def shares_over_best(shares: Sequence[Share]) -> float:
    """Return our time over that of the fastest single technique, for the worst simulated call.

    Methods that place experts are left out, and only calls with experts of the default weight ratio
    (`SharesOfForced.ratio`) count.
    """
    ours: dict[tuple[object, ...], float] = {}  # seconds by call
    others: dict[tuple[object, ...], list[float]] = {}
    for share in shares:
        if share.ratio != SharesOfForced.ratio or share.method in (PLACED, OURS_PLACED, *BEST):
            continue
        call = _call_of(share)
        if share.method == OURS:
            ours[call] = share.seconds
        else:
            others.setdefault(call, []).append(share.seconds)
    ratios = [seconds / min(others[call]) for call, seconds in ours.items() if call in others]
    return max(some(ratios, "simulated"))


def decision_us(decided: Sequence[TimedDecision]) -> float:
    """Return the time by which a decision delays a rank, in microseconds: the median over the calls
    that replicate."""
    seconds = [decision.seconds for decision in decided if decision.replicates]
    return 1e6 * statistics.median(some(seconds, "of decisions by themselves"))


def over_laer(shares: Sequence[Share]) -> list[Claim]:
    """Return our time over that of LAER's re-layout under recorded loads, a claim for each weight
    ratio. None has a target."""
    laer = {_call_of(share): share.seconds for share in shares if share.method == LAER}
    ratios: dict[float, list[float]] = {}
    for share in shares:
        if share.method == OURS and share.load == RECORDED:
            ratios.setdefault(share.ratio, []).append(share.seconds / laer[_call_of(share)])
    return [
        claimed(f"balance.over_laer_policy_{ratio:g}", partial(statistics.median, values), None)
        for ratio, values in sorted(ratios.items())
    ]


def overhead(cells: Sequence[BalanceCell]) -> float:
    """Return how much slower ours is than the plain layer under even loads, at the upper 95 %
    bound, for the worst bed."""
    even = _at_max_vio(cells, 0.0)
    ratios = [enough(cell.ratio(OURS, PLAIN), cell.job.case.label) for cell in even]
    return max(ratio.high for ratio in ratios) - 1


def budget_speedup(cells: Sequence[BalanceCell]) -> float:
    """Return the plain layer's time over ours with a memory budget at MaxVio 4, for the worst
    bed."""
    speedups = [
        cell.ratio(PLAIN, BOUNDED).median
        for cell in _at_max_vio(cells, 4.0)
        if BOUNDED in cell.timings
    ]
    return min(some(speedups, "with MaxVio 4 and a memory budget"))


def memory_worst(under_budget: Sequence[BudgetHeld], cells: Sequence[BalanceCell]) -> float:
    """Return the most bytes that a rank held under a memory budget over that budget, for the worst
    load, plan and bed."""
    ratios = [
        run.peak_bytes / run.promised_bytes
        for run in some(list(under_budget), "of memory under budgets")
    ]
    for cell in cells:
        for name, method in cell.job.methods.items():
            if method.plan.memory_budget:
                ratios.append(cell.peak_bytes[name] / method.plan.memory_budget)
    return max(ratios)


def memory_unbounded(under_budget: Sequence[BudgetHeld]) -> float:
    """Return the bytes that a rank held without a budget over the smallest budget for the same
    load, for the worst load."""
    return max(
        run.unbounded_bytes / run.promised_bytes
        for run in some(list(under_budget), "of memory under budgets")
    )


def decision_share(cells: Sequence[BalanceCell]) -> float:
    """Return the share of our step time that a rank spends on decisions, for the worst case (median
    over the calls)."""
    deciding = [cell for cell in cells if OURS in cell.decided and OURS in cell.timings]
    shares = [
        statistics.median(cell.decided[OURS].seconds) / cell.timings[OURS].median
        for cell in deciding
    ]
    return max(some(shares, "with all methods"))


def simulated_slow(shares: Sequence[Share]) -> float:
    """Return the simulated time of the plain layer over ours with one slow rank, for the worst
    cluster."""
    chosen = [share for share in some(list(shares), "simulated") if share.load == SLOW]
    plain = {
        (share.cluster, share.ranks, share.step): share.seconds
        for share in chosen
        if share.method == PLAIN
    }
    ours = [share for share in chosen if share.method == OURS]
    speedups = [plain[share.cluster, share.ranks, share.step] / share.seconds for share in ours]
    return min(some(speedups, "with a slow rank simulated"))


def _call_of(share: Share) -> tuple[str, int, str, int, int, float, float]:
    """Return what names the call that a share was simulated for."""
    return (
        share.cluster,
        share.ranks,
        share.load,
        share.layer,
        share.step,
        share.ratio,
        share.max_vio,
    )


def _at_max_vio(cells: Sequence[BalanceCell], max_vio: float) -> list[BalanceCell]:
    """Return the cells at a MaxVio without a slow rank or link."""
    found = []
    for cell in cells:
        case = cell.job.case
        is_slowed = case.place.slow_rank != 1 or bool(case.place.slow_link)
        if case.max_vio == max_vio and not is_slowed:
            found.append(cell)
    return some(found, f"with MaxVio {max_vio:g}")
