"""What the whole conformance suite gives: cases, mutants and worlds of processes, as claims that can be checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moesaic.testing.equivalence import failures
from moesaic.testing.mutants import GLOO, MUTANTS, Mutant, Verdict, judge
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
        """All cases that did not pass, on whatever wire."""
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
        workers: processes for these.
        gloo: start processes too; without them the mutants that need some are left out.
        told: hears what is going on and how many of it are done.
    """
    evidence = Evidence()
    for mutant in MUTANTS:
        if mutant.case != "gloo":
            evidence.verdicts.append(judge(mutant))
            told("mutants", len(evidence.verdicts))
    evidence.summary = run_seeds(seeds, workers=workers, done=lambda summary: told("cases", summary.cases))
    if gloo:
        for world in WORLDS:
            _run_world(world, evidence)
            told("worlds", len(evidence.worlds))
    return evidence


def _run_world(world: int, evidence: Evidence) -> None:
    """Run the cases of one world, in that of the fixed case its mutants too."""
    cases = cases_for(world, GLOO_CASES[world])
    mutants = [mutant for mutant in MUTANTS if mutant.case == "gloo" and world == GLOO.grid.world]
    found = run_on_gloo([*map(Job, cases), *(Job(GLOO, mutant.patch) for mutant in mutants)])
    for case, errors in zip(cases, found):
        wrong = failures(case, errors)
        if wrong:
            reason = ", ".join(f"{quantity} {error:.1e}" for quantity, error in wrong.items())
            evidence.gloo_failures.append(Failure(case, f"on {world} processes: {reason}"))
    evidence.verdicts += [_verdict(mutant, errors) for mutant, errors in zip(mutants, found[len(cases) :])]
    evidence.worlds[world] = len(cases)


def _verdict(mutant: Mutant, errors: dict[str, float]) -> Verdict:
    wrong = failures(GLOO, errors)
    how = ", ".join(f"{quantity} {error:.1e}" for quantity, error in wrong.items())
    return Verdict(mutant, "numbers" if wrong else "nobody", how)
