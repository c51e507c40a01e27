"""`moesaic bench train`: the demo model end to end on an emulated cluster, beside the layers of others."""

from __future__ import annotations

from moesaic_lab.benchmark import emulated
from moesaic_lab.train.claims import claims
from moesaic_lab.train.config import read_config
from moesaic_lab.train.pictures import panels
from moesaic_lab.train.run import NOTES, measurement_rows, run, tables

BENCHMARK = emulated(
    name="train",
    description="Train the demo model on an emulated cluster, its MoE layers by our plans and by others, in turn.",
    notes=NOTES, read_config=read_config, run=run, needs_cluster=lambda config: bool(config.cases), rows=measurement_rows,
    claims=claims, columns=tables, panels=panels, title="The demo model over emulated links",
    packages=("torch", "numpy", "deepspeed"),
)  # fmt: skip
