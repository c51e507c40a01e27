"""`moesaic bench model`: predicted times of layers beside measured ones, on an emulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moesaic.cli.arguments import parse
from moesaic_lab.cli.emulated import checked_pictures, require_cluster, write_results


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    config: str | None = None
    """Beds and layers from this TOML file; the committed one if not given."""
    keep: str = "model-times"
    """Folder for what was measured. What is there is not measured again: a run can be split and taken up."""
    only: str | None = None
    """Only these: profile, plans, real, speed, a bed or a case; several as "2x2,speed". The others are read from the folder
    if they are there."""
    json: str | None = None
    """Write the results there; "-" for standard output."""
    picture: str | None = None
    """Draw predicted over measured times into this .svg, .png or .pdf file."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Predict the times of MoE layers from a profile of an emulated cluster, and measure them there."
    options = parse(Options, arguments, prog="moesaic bench model", description=description)
    from moesaic_lab.model.claims import NOTES, case_rows, case_table, claims, panels, rows_of
    from moesaic_lab.model.config import COMMITTED, narrowed, read_config
    from moesaic_lab.model.run import kept
    from moesaic_lab.model.run import run as measure
    from moesaic_lab.model.speed import speeds

    only = tuple(options.only.split(",")) if options.only else ()
    config = read_config(Path(options.config) if options.config else COMMITTED)
    wanted, folder = narrowed(config, only), Path(options.keep)
    pictures = checked_pictures(options.picture)
    times = speeds() if not only or "speed" in only else {}
    if wanted.cases or "profile" in only:
        require_cluster()
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            measure(wanted, folder, lambda what: bar.update(task, description=what), profiles="profile" in only)
    found = kept(config, folder)
    write_results(
        [case_table(found)] if found else [], [*case_rows(found), *rows_of(found)], claims(found, times), panels(found),
        title="One MoE layer over emulated links: predicted and measured", notes=NOTES, json=options.json,
        pictures=pictures if found else [], columns=2,
    )  # fmt: skip
    return 0
