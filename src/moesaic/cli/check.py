"""`moesaic check`: runs the conformance suite, which tests that every plan computes what the plain
layer computes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.errors import InputError
from moesaic.measure.here import machine, versions

if TYPE_CHECKING:
    from moesaic.testing.runner import Evidence

DESCRIPTION = (
    "Compare random meshes, plans and workloads with a dense float64 reference, with the ranks "
    "in one process and as real processes. The exit code is 1 if a case fails."
)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `moesaic check`."""

    cases: int = 2000
    """Number of random cases, each on up to 8 ranks in one process (loopback)."""
    seed: int = 0
    """Seed of the first case; each further case adds 1."""
    only: int | None = None
    """Run only the case with this seed, as printed with a failure, and print all of its errors."""
    world: int | None = None
    """With --only: number of ranks of the case, if the failure printed one."""
    gloo: bool = True
    """Also run cases on 2, 4 and 8 real processes."""
    workers: int = 0
    """Processes that run cases in parallel; 0 for one per core, at most 8."""
    json: bool = False
    """Print only the results, as JSON."""

    def __post_init__(self) -> None:
        for name, least in (("cases", 1), ("seed", 0), ("workers", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)}: must be at least {least}")
        fits_one_case = self.only is not None and self.world in (1, 2, 4, 8)
        if self.world is not None and not fits_one_case:
            raise InputError(f"--world {self.world}: goes with --only and is 1, 2, 4 or 8")

    @property
    def at_once(self) -> int:
        """Number of processes that run cases in parallel."""
        return self.workers or min(os.cpu_count() or 1, 8)


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(CheckOptions, arguments, prog="moesaic check", description=DESCRIPTION)
    import torch

    torch.set_num_threads(1)
    if options.only is not None:
        return _run_one(options.only, options.world)
    evidence = gather(options)
    if options.json:
        sys.stdout.write(json.dumps(as_dict(evidence), indent=2) + "\n")
    else:
        _print(evidence)
    return 1 if evidence.failures else 0


def _run_one(seed: int, world: int | None) -> int:
    """Run one case and print the case, its errors and the reason of a failure; returns the exit
    code."""
    from moesaic.testing.cases import draw_case
    from moesaic.testing.runner import check_case

    checked = check_case(draw_case(seed, world=world))
    console = Console(soft_wrap=True)
    console.print(checked.case)
    table = Table("quantity", "relative error", title=f"tolerance {checked.case.tolerance:.0e}")
    for quantity, error in checked.errors.items():
        table.add_row(quantity, f"{error:.1e}")
    console.print(table)
    console.print(f"failed: {checked.reason}" if checked.reason else "passed", markup=False)
    return 1 if checked.reason else 0


def gather(options: CheckOptions) -> Evidence:
    """Run the suite, with progress bars on standard error."""
    from moesaic.testing.runner import GLOO_CASES, gather_evidence

    # what `gather_evidence` counts (cases, numbers of ranks) -> how many there are in all
    totals = {"cases": options.cases}
    if options.gloo:
        totals["worlds"] = len(GLOO_CASES)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {what: progress.add_task(what, total=total) for what, total in totals.items()}
        return gather_evidence(
            range(options.seed, options.seed + options.cases),
            workers=options.at_once,
            gloo=options.gloo,
            progress=lambda what, number: progress.update(tasks[what], completed=number),
        )


def as_dict(evidence: Evidence) -> dict[str, Any]:
    """Return the results as plain data, with the machine and the versions of the software."""
    from moesaic.kernels.codecs import missing_codecs

    return {
        "machine": machine(),
        "versions": versions(),
        "passed": not evidence.failures,
        "cases": len(evidence.loopback),
        "codecs_not_installed": missing_codecs(),
        "cases_by_processes": evidence.worlds,
        "failures": [
            {"seed": failure.case.seed, "failure": failure.reason} for failure in evidence.failures
        ],
        "worst_errors": dict(sorted(evidence.worst.items())),
    }


def _print(evidence: Evidence) -> None:
    """Print a table of the results, and each failed case with the command that repeats it."""
    from moesaic.kernels.codecs import missing_codecs

    console = Console()
    table = Table("check", "result", title="moesaic check")
    failed = sum(bool(checked.reason) for checked in evidence.loopback)
    table.add_row("cases on loopback", f"{len(evidence.loopback):,}, {failed} failed")
    missing = missing_codecs()
    if missing:
        table.add_row("codecs that are not installed, and so in no case", ", ".join(missing))
    for world, count in evidence.worlds.items():
        table.add_row(f"cases on {world} processes", str(count))
    table.add_section()
    for quantity, error in sorted(evidence.worst.items()):
        table.add_row(f"worst error, {quantity}", f"{error:.1e}")
    console.print(table)
    # the failures on loopback come first, `failed` of them; those on processes are repeated with
    # their number of ranks
    for number, checked in enumerate(evidence.failures):
        flag = f" --world {checked.case.grid.world}" if number >= failed else ""
        again = f"moesaic check --only {checked.case.seed}{flag}"
        console.print(f"failed: {checked}\n  again: {again}", markup=False, soft_wrap=True)
