"""Runs many random cases over worker processes, for `moesaic check` and the tests.

Also checks an invariant of every run of a program: values that are replicated between ranks agree bit for bit.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from moesaic.balance import REPLICATION_POLICIES
from moesaic.comm.transport import Handle, Transfer
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import HELPERS, Kind, Program, Slot, State
from moesaic.runtime import executor
from moesaic.runtime.executor import interpret
from moesaic.runtime.tasks import Call, Environment, Value
from moesaic.testing.cases import Case, Refusals, draw_case
from moesaic.testing.diagnosis import diagnose
from moesaic.testing.equivalence import Errors, failures, ran_case, run_case


@dataclass(frozen=True)
class Observed:
    """One run of a program on one rank."""

    program: Program
    call: Call
    values: Environment


@contextmanager
def observed() -> Iterator[list[Observed]]:
    """Collect every program that a layer runs inside the context, in the order in which the runs finish."""
    runs: list[Observed] = []

    def watching(
        program: Program, values: Mapping[str, Value], call: Call, wanted: Collection[str] | None = None
    ) -> Generator[Transfer | Handle, Handle | None, Environment]:
        environment = yield from interpret(program, values, call)  # without `wanted`, so that every slot is computed
        runs.append(Observed(program, call, environment))
        return environment

    with mock.patch.object(executor, "interpret", watching):
        yield runs


def disagreements(runs: list[Observed]) -> list[str]:
    """Return a line for each slot that should be replicated or identical on an axis but has different bits on two ranks.

    Weights for replicated copies are not compared: each rank gets those that its copies need, so ranks may differ.

    Args:
        runs: the runs of all ranks; each rank must have done its runs in the same order.
    """
    by_rank: dict[int, list[Observed]] = {}
    for run in runs:
        by_rank.setdefault(run.call.rank, []).append(run)
    lines = set()
    for together in zip(*(by_rank[rank] for rank in sorted(by_rank))):
        grid, program = together[0].call.sizes.grid, together[0].program
        for slot in program.slots:
            if slot.kind is Kind.WEIGHT and slot.layout.chunk in HELPERS:
                continue
            for rank, other in _replicas(slot, grid):
                first, second = (together[r].values.get(slot.name) for r in (rank, other))
                if first is not None and second is not None and not _same(first, second):
                    lines.add(f"{program.name}: {slot.name} differs between ranks {rank} and {other}")
    return sorted(lines)


def same_axes(slot: Slot) -> list[Axis]:
    """Return the axes along which all ranks hold the same value of a slot."""
    return [axis for axis, state in slot.state if state in (State.REPLICATED, State.IDENTICAL)]


def _replicas(slot: Slot, grid: Grid) -> Iterator[tuple[int, int]]:
    """Yield pairs (first rank of the group, other rank) that must hold the same value of a slot."""
    if slot.kind is Kind.PACKETS:
        return
    for axis in same_axes(slot):
        for rank in range(grid.world):
            first = grid.group(rank, (axis,))[0]
            if first != rank:
                yield first, rank


def _same(first: Value, second: Value) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return len(first) == len(second) and all(map(torch.equal, first, second))


PART = 20
"""Number of cases that a worker runs per task."""


@dataclass(frozen=True)
class FailedCase:
    """A case that failed, and why."""

    case: Case
    reason: str
    """The quantities that are wrong with their errors, or the exception that was raised."""

    def __str__(self) -> str:
        return f"seed {self.case.seed}: {self.reason}\n  {self.case}"


@dataclass
class Summary:
    """Results of several cases."""

    cases: int = 0
    refused: int = 0
    """Number of plans that were drawn but are illegal on their mesh; they do not count as cases."""
    failures: list[FailedCase] = field(default_factory=list)
    worst: Errors = field(default_factory=dict)
    """Largest error of each quantity, over the cases that must be exact in float64."""
    features: Counter[str] = field(default_factory=Counter)
    """Number of cases that have each feature; see `features`."""

    def add(self, other: Summary) -> None:
        """Add the results of other cases to these."""
        self.cases += other.cases
        self.refused += other.refused
        self.failures += other.failures
        self.features += other.features
        for quantity, error in other.worst.items():
            self.worst[quantity] = max(self.worst.get(quantity, 0.0), error)


def run_seeds(
    seeds: Sequence[int], *, workers: int = 1, progress: Callable[[Summary], None] = lambda _: None
) -> Summary:
    """Run the cases that `draw_case` draws from `seeds`.

    Args:
        seeds: one seed per case.
        workers: number of worker processes; 1 runs the cases in this process.
        progress: called with the results so far after every `PART` cases.
    """
    total = Summary()
    parts = [seeds[start : start + PART] for start in range(0, len(seeds), PART)]
    if workers == 1:
        for part in parts:
            total.add(run_part(part))
            progress(total)
        return total
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for future in as_completed([pool.submit(run_part, part) for part in parts]):
            total.add(future.result())
            progress(total)
    total.failures.sort(key=lambda failure: failure.case.seed)
    return total


def run_part(seeds: Iterable[int]) -> Summary:
    """Run the cases of `seeds` one after the other, in this process."""
    summary, refusals = Summary(), Refusals()
    for seed in seeds:
        case = draw_case(seed, refusals)
        summary.cases += 1
        summary.features.update(features(case))
        errors, reason = check_case(case)
        if reason:
            summary.failures.append(FailedCase(case, reason))
        if case.is_exact and case.precision == "float64":
            for quantity, error in errors.items():
                summary.worst[quantity] = max(summary.worst.get(quantity, 0.0), error)
    summary.refused = refusals.count
    return summary


def check_case(case: Case) -> tuple[Errors, str]:
    """Run a case and return (its errors, the reason why it failed); the reason is empty if it passed.

    If the plan is lossless, replicas must also agree bit for bit at every slot of every program.
    """
    try:
        with observed() as runs:
            errors = run_case(case)
        differing = disagreements(runs) if case.plan.is_lossless and case.replicates_bits else []
    except Exception as error:  # a bug may raise anything, and the suite must report it
        return {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    wrong = [f"{quantity} {error:.1e}" for quantity, error in failures(case, errors).items()]
    return errors, ", ".join([*wrong, *differing[:3]])


def looks_like(case: Case) -> list[str]:
    """Diagnose a failing case and return a line per wrong quantity; empty if the case raises or its numbers are right."""
    try:
        return [str(finding) for finding in diagnose(case, ran_case).findings]
    except Exception:  # the failure itself is reported elsewhere; the diagnosis only explains it
        return []


def answers(case: Case) -> list[str]:
    """Return the means by which a case balances skewed routing, as names from `BALANCE`."""
    at_random = {} if case.by_policy else {"shadow": "replication at random", "arbiter": "arbiter at random"}
    replication = case.plan.replication
    used = [at_random.get(replication, replication)] if case.plan.replicates else []
    used += {"none": [], "random": ["samples anywhere"], "solved": ["samples by policy"]}[case.placement]
    holds = {
        "experts in random orders": case.experts_move,
        "memory budget": case.plan.memory_budget is not None,
        "weights to tokens (r)": case.plan.gather_weights is not None,
        "steps (peer groups)": case.plan.peer_groups > 1,
    }
    return used + [name for name, applies in holds.items() if applies]


BALANCE = (
    *REPLICATION_POLICIES, "replication at random", "arbiter at random", "samples anywhere",
    "samples by policy", "experts in random orders", "memory budget", "weights to tokens (r)", "steps (peer groups)",
)  # fmt: skip
"""Means of balancing skewed routing that cases use; see docs/balance.md."""


def features(case: Case) -> list[str]:
    """Return the features of a case: `field=value`, or the name of a switch that is on."""
    plan = case.plan
    present = [
        f"{name}={getattr(case, name)}"
        for name in ("router", "experts", "precision", "apply_weight", "sequences", "placement", "experts_move")
    ]
    names = (
        "schedule",
        "all_to_all",
        "codec",
        "backward_codec",
        "order",
        "chunks",
        "peer_groups",
        "gather_weights",
        "replication",
    )
    present += [f"{name}={getattr(plan, name)}" for name in names]
    present += [f"{axis}={getattr(case.grid, axis)}" for axis in ("world", "tp", "ep", "etp", "innermost")]
    present += [f"loss={loss.name}" for loss in case.losses]
    present += [f"balance={answer}" for answer in answers(case)]
    switches = {
        "overlap_gather": plan.overlap_gather,
        "fuse": plan.fuse,
        "padding": case.padding,
        "recompute": case.recompute,
        "evaluate": case.evaluate,
        "shared": case.shared,
        "accumulation": len(case.lengths) > 1,
        "group without tokens": any(0 in of_groups for of_groups in case.lengths),
        "uneven groups": any(len(set(of_groups)) > 1 for of_groups in case.lengths),
        "coded, exact": case.is_exact and not plan.is_lossless,
        "several nodes": case.grid.node_of(case.grid.world - 1) > 0,
        "capacity": case.capacity.admits_by_score or case.capacity.spans_mesh or hasattr(case.capacity, "factor"),
        "capacity per rank": hasattr(case.capacity, "factor") and not case.capacity.spans_mesh,
        "padded capacity": case.capacity.is_padded,
        "admission by score": case.capacity.admits_by_score,
    }
    return present + [name for name, holds in switches.items() if holds]
