"""`moesaic plan explain`: predicts the speed of a layout of your own, and compares it with the best
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.cli.arguments import joined, parse
from moesaic.cli.plan_rank import PlanOptions, ranked
from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(PlanOptions):
    """Options of `moesaic plan explain`."""

    flags: str = ""
    """Megatron or torchtitan flags of a layout of your own, in quotes. Their global batch is also
    that of the best layout, unless --batch-size or --accumulation is given."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(
        ExplainOptions,
        joined(arguments, "--flags"),
        prog="moesaic plan explain",
        description=(
            "Predict the speed of a layout of your own, given as flags of Megatron or torchtitan, "
            "and compare it with the best layout."
        ),
    )
    if not options.flags:
        raise InputError('--flags is missing: give those of your layout in quotes, --flags "..."')
    simulator = options.simulator()
    options.require_writable()
    job = options.job(simulator.cluster)
    # called before the search for what it refuses, too
    layout = options.layout_of(options.flags, job, simulator.cluster)
    if layout.global_batch and options.batch_size is options.accumulation is None:
        # the best layout is then that for as many sequences
        options = replace(options, accumulation=max(1, layout.global_batch // job.batch_size))
        job = options.job(simulator.cluster)
    return ranked(options, job, simulator, options.flags)
