"""`moesaic bench balance`: answers to skewed routing, in turn on an emulated cluster, and simulated on larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moesaic.cli.arguments import parse
from moesaic_lab.cli.emulated import checked_pictures, require_cluster, write_results


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    config: str | None = None
    """Beds, layers and loads from this TOML file; the committed one if not given."""
    json: str | None = None
    """Write the results there; "-" for standard output."""
    picture: str | None = None
    """Draw the results into this .svg, .png or .pdf file."""
    only: str | None = None
    """Only these cases, as "4x2-2"; beds, as "4x2"; "trace"; or "simulated"; several as "2x2-0,simulated"."""
    repeats: int | None = None
    """How often each method is timed, everywhere; ratios near 1 are claimed from 30 on only."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Measure answers to skewed routing in turn on an emulated cluster, with virtual compute."
    options = parse(Options, arguments, prog="moesaic bench balance", description=description)
    from moesaic_lab.balance.claims import claims
    from moesaic_lab.balance.config import COMMITTED, read_config
    from moesaic_lab.balance.pictures import panels
    from moesaic_lab.balance.rows import NOTES, all_rows, tables
    from moesaic_lab.balance.run import run as measure
    from moesaic_lab.balance.simulated import simulate

    config = read_config(Path(options.config) if options.config else COMMITTED)
    only = tuple(options.only.split(",")) if options.only else ()
    config = replace(config, only=only).repeated(options.repeats)
    config.check()
    pictures = checked_pictures(options.picture)
    if config.cases():
        require_cluster()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        cells = measure(config, lambda what, done: bar.update(task, description=f"{done} done; {what}"))
        forecasts = []
        if config.simulates:
            assert config.simulated is not None
            forecasts = simulate(config.simulated, config.seed, lambda what: bar.update(task, description=what))
    write_results(
        tables(cells, forecasts), all_rows(cells, forecasts), claims(cells, forecasts), panels(cells, forecasts),
        title="One MoE layer under skewed routing, virtual compute", notes=NOTES, json=options.json, pictures=pictures,
    )  # fmt: skip
    return 0
