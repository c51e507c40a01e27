"""What the whole conformance suite gives: cases on loopback and worlds of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moesaic.testing.equivalence import failures
from moesaic.testing.processes import WORLDS, ProcessCase, cases_for, run_on_gloo
from moesaic.testing.suite import FailedCase, Summary, run_seeds

GLOO_CASES = {2: 8, 4: 6, 8: 4}
"""World size to how many cases run as processes: starting these takes longer than running them."""


@dataclass
class Evidence:
    """What was found."""

    summary: Summary = field(default_factory=Summary)
    """Of the cases on loopback."""
    worlds: dict[int, int] = field(default_factory=dict)
    """World size to the cases that ran as processes."""
    gloo_failures: list[FailedCase] = field(default_factory=list)

    @property
    def failures(self) -> list[FailedCase]:
        """All cases that did not pass, on whatever transport."""
        return [*self.summary.failures, *self.gloo_failures]

    @property
    def passed(self) -> bool:
        """Whether no case failed."""
        return not self.failures


def gather_evidence(
    seeds: Sequence[int], *, workers: int, gloo: bool, told: Callable[[str, int], None] = lambda what, number: None
) -> Evidence:
    """Run cases and, with `gloo`, worlds of processes.

    Args:
        seeds: of the cases on loopback.
        workers: processes for these.
        gloo: start processes too.
        told: hears what is going on and how many of it are done.
    """
    evidence = Evidence()
    evidence.summary = run_seeds(seeds, workers=workers, done=lambda summary: told("cases", summary.cases))
    for world in WORLDS if gloo else ():
        cases = cases_for(world, GLOO_CASES[world])
        for ran in run_on_gloo([ProcessCase(case) for case in cases]):
            if wrong := failures(ran.case, ran.errors):
                reason = ", ".join(f"{quantity} {error:.1e}" for quantity, error in wrong.items())
                evidence.gloo_failures.append(FailedCase(ran.case, f"on {world} processes: {reason}"))
        evidence.worlds[world] = len(cases)
        told("worlds", len(evidence.worlds))
    return evidence
