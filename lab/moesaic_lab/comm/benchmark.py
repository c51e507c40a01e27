"""`moesaic bench comm`: all-to-alls in turn on an emulated cluster, beside the limit of its links."""

from __future__ import annotations

from moesaic_lab.benchmark import Benchmark, EmulatedOptions, Told, narrowed_config, require_cluster
from moesaic_lab.comm.claims import claims
from moesaic_lab.comm.config import CommConfig, read_config
from moesaic_lab.comm.pictures import panels
from moesaic_lab.comm.run import NOTES, CommCell, rows_of, run, tables


def cases(options: EmulatedOptions) -> CommConfig:
    """Return the sweeps that were asked for."""
    config = narrowed_config(options, read_config)
    require_cluster()
    return config


def measure(options: EmulatedOptions, config: CommConfig, told: Told) -> list[CommCell]:
    """Measure on one bed after the other."""
    return run(config, lambda what, done, total: told(f"{done} of {total} done; {what}"))


BENCHMARK = Benchmark(
    name="comm", description="Measure all-to-alls in turn on an emulated cluster, beside the limit of its links.",
    options=EmulatedOptions, notes=NOTES, cases=cases, measure=measure, claims=claims, columns=tables, panels=panels,
    rows=lambda cells: [row for cell in cells for row in rows_of(cell)],
    title="All-to-alls over emulated links", panels_in_a_row=3,
)  # fmt: skip
