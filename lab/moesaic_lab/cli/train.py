"""`moesaic bench train`: the demo model end to end on an emulated cluster, beside the layers of others."""

from __future__ import annotations

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
    """Cases and plans from this TOML file; the committed one if not given."""
    json: str | None = None
    """Write the results there; "-" for standard output."""
    picture: str | None = None
    """Draw the results into this .svg, .png or .pdf file."""
    svg: str | None = None
    """Also draw them into this folder, as train.svg: for documentation."""
    repeats: int | None = None
    """How often each system is timed, everywhere; claims need 12, and 30 for ratios above 0.9."""
    only: str | None = None
    """Only these cases, by name, as "demo,layout"."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Train the demo model on an emulated cluster, its MoE layers by our plans and by others, in turn."
    options = parse(Options, arguments, prog="moesaic bench train", description=description)
    from moesaic_lab.train.claims import claims
    from moesaic_lab.train.config import COMMITTED, read_config
    from moesaic_lab.train.pictures import panels
    from moesaic_lab.train.run import NOTES, measurement_rows, tables
    from moesaic_lab.train.run import run as measure

    config = read_config(Path(options.config) if options.config else COMMITTED)
    config = config.narrowed(only=tuple(options.only.split(",")) if options.only else (), repeats=options.repeats)
    pictures = checked_pictures(options.picture, options.svg, "train")
    if config.cases:
        require_cluster()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        results = measure(
            config, lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        )
    write_results(
        tables(results), measurement_rows(results), claims(results), panels(results),
        title="The demo model over emulated links", notes=NOTES, json=options.json, pictures=pictures,
        packages=("torch", "numpy", "deepspeed"), columns=2,
    )  # fmt: skip
    return 0
