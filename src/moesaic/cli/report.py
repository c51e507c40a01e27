"""`moesaic report RUN ...`: writes one HTML page about one or more runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, in_one_line
from moesaic.files import require_writable, write


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `moesaic report`."""

    runs: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)"),
    ] = ()
    """Run folders; the page compares them if there are several."""
    out: str | None = None
    """File to write; None for report.html in the folder of the first run."""
    perfetto: str | None = None
    """Also write a timeline of the runs to this file, a Chrome trace in JSON, which ui.perfetto.dev
    and chrome://tracing open: a row per rank, with its computing and waiting between two lines of
    metrics.jsonl."""
    json: bool = False
    """Print the summary of each run as JSON instead of the path of the page."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(
        ReportOptions,
        arguments,
        prog="moesaic report",
        description="Write one self-contained HTML page about one or more runs; it works offline.",
    )
    if not options.runs:
        raise InputError("name at least one run folder: moesaic report runs/demo/moe")
    if options.out == "":
        raise InputError("out: give a file name")
    require_writable(options.out, "--out", makes_parents=True)
    require_writable(options.perfetto, "--perfetto")
    from moesaic.report.summary import read_runs

    runs = read_runs([Path(folder) for folder in options.runs])
    from moesaic.report.page import write_page

    if options.perfetto is not None:
        from moesaic.report.run_timeline import run_trace

        write(Path(options.perfetto), json.dumps(run_trace(runs)), typed=True)
    path = write_page(runs, Path(options.out) if options.out else None)
    if options.json:
        print(json.dumps({"page": str(path), "runs": [one.headline() for one in runs]}))
    else:
        print(in_one_line(str(path)))
        if options.perfetto is not None:
            print(in_one_line(options.perfetto))
    return 0
