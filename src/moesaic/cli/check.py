"""`moesaic check`: the conformance suite, on this machine: every plan computes what the plain layer computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.errors import InputError
from moesaic.report.claims import Claim, Measurement

if TYPE_CHECKING:
    from moesaic.testing.evidence import Evidence

DESCRIPTION = (
    "Run random meshes, plans and workloads against a dense float64 reference, planted bugs that must be noticed, and "
    "cases over real processes. Exit code 1 if a case fails or a bug escapes."
)
LEAST_CASES, LEAST_MUTANTS = 2000, 40
EXPLAINED = 3
"""Failures whose numbers are explained: each takes as long as some ten cases."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How much to check."""

    cases: int = 2000
    """Random cases on up to 8 ranks in one process (loopback)."""
    seed: int = 0
    """Of the first case; the others follow."""
    only: int | None = None
    """Run this one case and print every error: the seed that a failure names."""
    world: int | None = None
    """With --only: the ranks, where a failure names them."""
    gloo: bool = True
    """Also run cases over 2, 4 and 8 real processes."""
    workers: int = 0
    """Processes for the cases; 0 for one per core, at most 8."""
    json: bool = False
    """Print machine, table and claims as JSON and nothing else."""

    def __post_init__(self) -> None:
        for name, least in (("cases", 1), ("seed", 0), ("workers", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)}: must be at least {least}")
        if self.world is not None and (self.only is None or self.world not in (1, 2, 4, 8)):
            raise InputError(f"--world {self.world}: goes with --only and is 1, 2, 4 or 8")


def run(arguments: Sequence[str]) -> int:
    """Check; returns the exit code."""
    options = parse(CheckOptions, arguments, prog="moesaic check", description=DESCRIPTION)
    import torch

    torch.set_num_threads(1)
    if options.only is not None:
        return _run_one(options.only, options.world)
    evidence = _gather(options)
    if options.json:
        _measurement(evidence).write("-")
    else:
        _print(evidence)
    return 0 if evidence.passed else 1


def _run_one(seed: int, world: int | None) -> int:
    """Run one case and print it, its errors, and what is wrong."""
    from moesaic.testing.cases import draw_case
    from moesaic.testing.suite import check_case, looks_like

    case = draw_case(seed, world=world)
    errors, reason = check_case(case)
    console = Console(soft_wrap=True)
    console.print(case)
    table = Table("quantity", "relative error", title=f"tolerance {case.tolerance:.0e}")
    for quantity, error in errors.items():
        table.add_row(quantity, f"{error:.1e}")
    console.print(table)
    console.print(f"failed: {reason}" if reason else "passed", markup=False)
    for line in looks_like(case) if reason else ():
        console.print(f"  {line}", markup=False)
    return 1 if reason else 0


def _gather(options: CheckOptions) -> Evidence:
    from moesaic.testing.evidence import gather_evidence
    from moesaic.testing.mutants import MUTANTS
    from moesaic.testing.processes import WORLDS

    totals = {"mutants": sum(mutant.case != "gloo" for mutant in MUTANTS), "cases": options.cases}
    totals |= {"worlds": len(WORLDS)} if options.gloo else {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {what: progress.add_task(what, total=total) for what, total in totals.items()}
        return gather_evidence(
            range(options.seed, options.seed + options.cases),
            workers=options.workers or min(os.cpu_count() or 1, 8),
            gloo=options.gloo,
            told=lambda what, number: progress.update(tasks[what], completed=number),
        )


def _measurement(evidence: Evidence) -> Measurement:
    from moesaic.testing.suite import BALANCE

    summary, worlds = evidence.summary, evidence.worlds
    caught = len(evidence.verdicts) - len(evidence.escaped)
    reason = "" if worlds else "run without processes (--no-gloo)"

    def claim(name: str, value: float | None, target: float, op: str, why: str = "") -> Claim:
        return Claim(name=f"check.{name}", value=value, unit="1", target=target, op=op, reason=why)  # type: ignore[arg-type]

    return Measurement(
        rows=[{"quantity": quantity, "worst_error": error} for quantity, error in sorted(summary.worst.items())]
        + [
            {
                "mutant": v.mutant.name,
                "source": v.mutant.source,
                "caught_by": v.caught_by,
                "looks_like": "; ".join(str(finding) for finding in v.findings if finding.factor),
            }
            for v in evidence.verdicts
        ]
        + [{"world": world, "cases": cases} for world, cases in worlds.items()]
        + [{"balance": answer, "cases": summary.features[f"balance={answer}"]} for answer in BALANCE]
        + [{"seed": failure.case.seed, "failure": failure.reason} for failure in evidence.failures],
        claims=[
            claim("cases", summary.cases, LEAST_CASES, ">="),
            claim("failures", len(evidence.failures), 0, "<="),
            claim("mutants", len(evidence.verdicts), LEAST_MUTANTS, ">="),
            claim("mutants_caught", caught, len(evidence.verdicts), ">="),
            claim("gloo_worlds", len(worlds) or None, 3, ">=", reason),
        ],
        notes="Relative errors of cases in float64 whose expected values are exact; cases run on loopback unless a world "
        "of processes is named.",
    )


def _print(evidence: Evidence) -> None:
    from moesaic.testing.suite import BALANCE, looks_like

    summary = evidence.summary
    console = Console()
    table = Table("what", "found", title="moesaic check")
    table.add_row("cases on loopback", f"{summary.cases:,}, {len(summary.failures)} failed")
    table.add_row("plans refused while drawing", f"{summary.refused:,}")
    for world, count in evidence.worlds.items():
        table.add_row(f"cases on {world} processes", str(count))
    table.add_row("planted bugs", f"{len(evidence.verdicts)}, {len(evidence.verdicts) - len(evidence.escaped)} caught")
    table.add_section()
    for answer in BALANCE:
        table.add_row(f"cases with {answer}", f"{summary.features[f'balance={answer}']:,}")
    table.add_section()
    for quantity, error in sorted(summary.worst.items()):
        table.add_row(f"worst error, {quantity}", f"{error:.1e}")
    console.print(table)
    planted = Table("planted bug", "seen in", "caught by", "looks like", title="planted bugs")
    for verdict in evidence.verdicts:
        lines = [str(finding) for finding in verdict.findings if finding.factor]
        planted.add_row(verdict.mutant.name, verdict.mutant.source, verdict.caught_by, "\n".join(lines))
    console.print(planted)
    for verdict in evidence.escaped:
        console.print(f"escaped: {verdict.mutant.name} ({verdict.mutant.source})", markup=False)
    for number, failure in enumerate(evidence.failures):
        again = f"--only {failure.case.seed}"
        again += f" --world {failure.case.grid.world}" if failure in evidence.gloo_failures else ""
        said = "".join(f"\n  {line}" for line in (looks_like(failure.case) if number < EXPLAINED else ()))
        console.print(f"failed: {failure}{said}\n  again: moesaic check {again}", markup=False, soft_wrap=True)
