"""`moesaic bench train`: the demo model end to end on an emulated cluster, beside the layers of others."""

from __future__ import annotations

from moesaic_lab.benchmark import Benchmark, EmulatedOptions, Told, narrowed_config, require_cluster
from moesaic_lab.train.claims import claims
from moesaic_lab.train.config import TrainBenchConfig, read_config
from moesaic_lab.train.pictures import panels
from moesaic_lab.train.run import NOTES, TrainResults, measurement_rows, run, tables


def cases(options: EmulatedOptions) -> TrainBenchConfig:
    """Return the cases that were asked for, by name."""
    config = narrowed_config(options, read_config)
    if config.cases:
        require_cluster()
    return config


def measure(options: EmulatedOptions, config: TrainBenchConfig, told: Told) -> TrainResults:
    """Measure one case after the other."""
    return run(config, lambda what, done, total: told(f"{done} of {total} done; {what}"))


BENCHMARK = Benchmark(
    name="train",
    description="Train the demo model on an emulated cluster, its MoE layers by our plans and by others, in turn.",
    options=EmulatedOptions, notes=NOTES, cases=cases, measure=measure, rows=measurement_rows, claims=claims,
    columns=tables, panels=panels, title="The demo model over emulated links", packages=("torch", "numpy", "deepspeed"),
)  # fmt: skip
