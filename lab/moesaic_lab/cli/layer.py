"""`moesaic bench layer`: ways to run one MoE layer, in turn on an emulated cluster, with virtual compute."""

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
    """Beds, shapes and virtual rates from this TOML file; the committed one if not given."""
    json: str | None = None
    """Write the results there; "-" for standard output."""
    picture: str | None = None
    """Draw the results into this .svg, .png or .pdf file."""
    svg: str | None = None
    """Also draw them into this folder, as layer.svg: for documentation."""
    only: str | None = None
    """Only these parts: schedules, adaptive_r, pipelining, codecs, ablation; several as "codecs,ablation"."""
    repeats: int | None = None
    """How often each method is timed, everywhere; ratios near 1 are claimed from 30 on only."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Measure ways to run an MoE layer in turn on an emulated cluster, with virtual compute."
    options = parse(Options, arguments, prog="moesaic bench layer", description=description)
    from moesaic_lab.layer.claims import claims
    from moesaic_lab.layer.config import COMMITTED, read_config
    from moesaic_lab.layer.pictures import panels
    from moesaic_lab.layer.rows import NOTES, all_rows, tables
    from moesaic_lab.layer.run import run as measure

    config = read_config(Path(options.config) if options.config else COMMITTED)
    config = config.narrowed(only=tuple(options.only.split(",")) if options.only else (), repeats=options.repeats)
    pictures = checked_pictures(options.picture, options.svg, "layer")
    require_cluster()
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        cells = measure(config, lambda what, done: bar.update(task, description=f"{done} done; {what}"))
    write_results(
        tables(cells), all_rows(cells), claims(cells), panels(cells),
        title="One MoE layer over emulated links, virtual compute", notes=NOTES, json=options.json, pictures=pictures,
    )  # fmt: skip
    return 0
