"""What the whole conformance suite gives: cases, mutants and worlds of processes, as claims that can be checked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch

from moesaic.testing.diagnosis import Finding
from moesaic.testing.equivalence import failures
from moesaic.testing.mutants import GLOO, MUTANTS, Catcher, Mutant, Verdict, judge, judge_on_gloo
from moesaic.testing.processes import WORLDS, Job, cases_for, run_on_gloo
from moesaic.testing.suite import Failure, Summary, run_seeds

GLOO_CASES = {2: 8, 4: 6, 8: 4}
"""World size to how many cases run as processes: starting these takes longer than running them."""


@dataclass
class Evidence:
    """What was found."""

    summary: Summary = field(default_factory=Summary)
    """Of the cases on loopback."""
    verdicts: list[Verdict] = field(default_factory=list)
    """One per mutant that ran."""
    worlds: dict[int, int] = field(default_factory=dict)
    """World size to the cases that ran as processes."""
    gloo_failures: list[Failure] = field(default_factory=list)

    @property
    def failures(self) -> list[Failure]:
        """All cases that did not pass, on whatever transport."""
        return [*self.summary.failures, *self.gloo_failures]

    @property
    def escaped(self) -> list[Verdict]:
        """Mutants that nobody noticed."""
        return [verdict for verdict in self.verdicts if verdict.caught_by == "nobody"]

    @property
    def passed(self) -> bool:
        """Whether no case failed and no mutant escaped."""
        return not self.failures and not self.escaped


def gather_evidence(
    seeds: Sequence[int], *, workers: int, gloo: bool, told: Callable[[str, int], None] = lambda what, number: None
) -> Evidence:
    """Run cases, mutants and, with `gloo`, worlds of processes.

    Args:
        seeds: of the cases on loopback.
        workers: processes for these and for the mutants.
        gloo: start processes too; without them the mutants that need some are left out.
        told: hears what is going on and how many of it are done.
    """
    evidence = Evidence()
    for verdict in _verdicts(workers):
        evidence.verdicts.append(verdict)
        told("mutants", len(evidence.verdicts))
    evidence.summary = run_seeds(seeds, workers=workers, done=lambda summary: told("cases", summary.cases))
    if gloo:
        for world in WORLDS:
            _run_world(world, evidence)
            told("worlds", len(evidence.worlds))
    return evidence


def _verdicts(workers: int) -> Iterator[Verdict]:
    """Yield the verdicts on the mutants that need no processes of their own, in their order."""
    names = [mutant.name for mutant in MUTANTS if mutant.case != "gloo"]
    if workers == 1:
        yield from map(_judge_named, names)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name, (caught_by, how, findings) in zip(names, pool.map(_told_of, names)):
            yield Verdict(_named(name), caught_by, how, findings)


def _named(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def _judge_named(name: str) -> Verdict:
    return judge(_named(name))


def _told_of(name: str) -> tuple[Catcher, str, tuple[Finding, ...]]:
    """Return a verdict without its mutant, whose functions do not travel between processes."""
    verdict = _judge_named(name)
    return verdict.caught_by, verdict.how, verdict.findings


def _run_world(world: int, evidence: Evidence) -> None:
    """Run the cases of one world, in that of the fixed cases their mutants too."""
    cases = cases_for(world, GLOO_CASES[world])
    mutants = [mutant for mutant in MUTANTS if mutant.case == "gloo" and world == GLOO[0].grid.world]
    planted = [Job(case, mutant.patch) for mutant in mutants for case in GLOO]
    found = run_on_gloo([*map(Job, cases), *planted])
    for ran in found[: len(cases)]:
        wrong = failures(ran.case, ran.errors)
        if wrong:
            reason = ", ".join(f"{quantity} {error:.1e}" for quantity, error in wrong.items())
            evidence.gloo_failures.append(Failure(ran.case, f"on {world} processes: {reason}"))
    for number, mutant in enumerate(mutants):
        first = len(cases) + number * len(GLOO)
        evidence.verdicts.append(judge_on_gloo(mutant, found[first : first + len(GLOO)]))
    evidence.worlds[world] = len(cases)
