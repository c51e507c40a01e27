"""`moesaic plan emit`: prints the best layout, or your own, as flags of a training system."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import tyro

from moesaic.cli.arguments import joined, parse
from moesaic.cli.plan_search import SearchOptions
from moesaic.errors import InputError
from moesaic.planner.emit import SYSTEMS, layout_of
from moesaic.planner.job import Job
from moesaic.planner.other_systems import OthersLayout
from moesaic.planner.simulated_plans import PlannedStep

if TYPE_CHECKING:
    EmitName: TypeAlias = str
else:
    EmitName = Literal[tuple(SYSTEMS)]
"""A key of `SYSTEMS`; the command line lists them as choices."""


@dataclass(frozen=True, kw_only=True)
class EmitOptions(SearchOptions):
    """Options of `moesaic plan emit`."""

    system: Annotated[EmitName, tyro.conf.Positional, tyro.conf.arg(metavar="SYSTEM")]
    """The training system whose flags are printed. With --pp, it is the best layout of that
    system, not of ours."""
    flags: str | None = None
    """Megatron or torchtitan flags of a layout of your own, in quotes, to print in place of the
    best one."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(
        EmitOptions,
        joined(arguments, "--flags"),
        prog="moesaic plan emit",
        description="Print only the flags with which a training system runs the best layout.",
    )
    simulator = options.simulator()
    cluster = simulator.cluster
    job = options.job(cluster)

    if options.flags is not None:
        return _emit(options.system, job, options.layout_of(options.flags, job, cluster))
    if options.system != "moesaic" and options.pp is not None:
        best = options.best_of(options.system, job, cluster)
        if best is None:
            raise InputError(
                f"--pp {options.pp}: no layout of {cluster.world} devices with {options.pp} stages "
                "fits: try another number"
            )
        layout, _ = best
        return _emit(options.system, job, layout)

    job, result = options.searched(job, simulator)
    layout = layout_of(job, result.best)  # what is most like our best plan
    return _emit(options.system, job, layout, planned=result.best)


def _emit(
    system: EmitName, job: Job, layout: OthersLayout, planned: PlannedStep | None = None
) -> int:
    """Print flags, and on standard error the version of the system that accepts them; return the
    exit code."""
    lines = SYSTEMS[system].flags(system, job, layout, planned)
    if SYSTEMS[system].version:
        print(f"flags of {SYSTEMS[system].version}", file=sys.stderr)
    print("\n".join(lines))
    return 0
