"""`moesaic bench layer`: ways to run one MoE layer, in turn on an emulated cluster, with virtual compute."""

from __future__ import annotations

from moesaic_lab.benchmark import Benchmark, EmulatedOptions, Told, narrowed_config, require_cluster
from moesaic_lab.layer.claims import claims
from moesaic_lab.layer.config import LayerBenchConfig, read_config
from moesaic_lab.layer.pictures import panels
from moesaic_lab.layer.rows import NOTES, all_rows, tables
from moesaic_lab.layer.run import LayerCell, run


def cases(options: EmulatedOptions) -> LayerBenchConfig:
    """Return the parts that were asked for."""
    config = narrowed_config(options, read_config)
    require_cluster()
    return config


def measure(options: EmulatedOptions, config: LayerBenchConfig, told: Told) -> list[LayerCell]:
    """Measure on one bed after the other."""
    return run(config, lambda what, done: told(f"{done} done; {what}"))


BENCHMARK = Benchmark(
    name="layer", description="Measure ways to run an MoE layer in turn on an emulated cluster, with virtual compute.",
    options=EmulatedOptions, notes=NOTES, cases=cases, measure=measure, rows=all_rows, claims=claims, columns=tables,
    panels=panels, title="One MoE layer over emulated links, virtual compute", panels_in_a_row=3,
)  # fmt: skip
