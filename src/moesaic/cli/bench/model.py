"""`moesaic bench model`: predicted times of layers beside measured ones, on an emulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moesaic.cli.arguments import parse
from moesaic.errors import InputError


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
    """Draw predicted over measured times into this .html or .svg file."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Predict the times of MoE layers from a profile of an emulated cluster, and measure them there."
    options = parse(Options, arguments, prog="moesaic bench model", description=description)
    from moesaic.bench.model_claims import NOTES, case_rows, case_table, claims, panels, rows_of
    from moesaic.bench.model_config import COMMITTED, narrowed, read_config
    from moesaic.bench.model_run import kept
    from moesaic.bench.model_run import run as measure
    from moesaic.bench.model_speed import speeds
    from moesaic.bench.pictures import check_picture, write_picture
    from moesaic.bench.tables import claims_table
    from moesaic.report.claims import Measurement
    from moesaic.testbed import refusal

    only = tuple(options.only.split(",")) if options.only else ()
    config = read_config(Path(options.config) if options.config else COMMITTED)
    wanted, folder = narrowed(config, only), Path(options.keep)
    if options.picture:
        check_picture(Path(options.picture))
    times = speeds() if not only or "speed" in only else {}
    if wanted.cases or "profile" in only:
        missing = refusal()
        if missing:
            raise InputError(f"no emulated cluster on this machine: {missing}")
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            measure(wanted, folder, lambda what: bar.update(task, description=what), profiles="profile" in only)
    found = kept(config, folder)
    made = claims(found, times)
    shown = Console(stderr=options.json == "-")
    if found:
        shown.print(case_table(found))
    shown.print(claims_table(made))
    if options.json:
        Measurement(rows=[*case_rows(found), *rows_of(found)], claims=made, notes=NOTES).write(options.json)
    if options.picture and found:
        title = "One MoE layer over emulated links: predicted and measured"
        write_picture(Path(options.picture), title, panels(found), NOTES, columns=2)
        shown.print(f"wrote {options.picture}")
    return 0
