"""`moesaic bench comm`: all-to-alls in turn on an emulated cluster, beside the limit of its links."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moesaic.cli.arguments import parse
from moesaic_lab.cli.emulated import checked_pictures, require_cluster, write_results


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    config: str | None = None
    """Beds, sizes and methods from this TOML file; the committed one if not given."""
    json: str | None = None
    """Write the results there; "-" for standard output."""
    picture: str | None = None
    """Draw the results into this .svg, .png or .pdf file."""
    repeats: int | None = None
    """How often each method is timed, everywhere; ratios near 1 are claimed from 30 on only."""
    only: str | None = None
    """Only on beds of these shapes, as "2x2,4x4"."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Measure all-to-alls in turn on an emulated cluster, beside the limit of its links."
    options = parse(Options, arguments, prog="moesaic bench comm", description=description)
    from moesaic_lab.comm.claims import claims
    from moesaic_lab.comm.config import COMMITTED, read_config
    from moesaic_lab.comm.pictures import panels
    from moesaic_lab.comm.run import NOTES, rows_of, tables
    from moesaic_lab.comm.run import run as measure

    config = read_config(Path(options.config) if options.config else COMMITTED)
    config = config.narrowed(only=tuple(options.only.split(",")) if options.only else (), repeats=options.repeats)
    pictures = checked_pictures(options.picture)
    require_cluster()
    console = Console(stderr=True)
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        cells = measure(
            config, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    console.print(f"measured in {time.monotonic() - start:.0f} s")
    write_results(
        tables(cells), [row for cell in cells for row in rows_of(cell)], claims(cells), panels(cells),
        title="All-to-alls over emulated links", notes=NOTES, json=options.json, pictures=pictures,
    )  # fmt: skip
    return 0
