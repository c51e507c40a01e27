"""`moesaic bench layer`: ways to run one MoE layer, in turn on an emulated cluster, with virtual compute."""

from __future__ import annotations

from moesaic_lab.benchmark import emulated
from moesaic_lab.layer.claims import claims
from moesaic_lab.layer.config import read_config
from moesaic_lab.layer.pictures import panels
from moesaic_lab.layer.rows import NOTES, all_rows, tables
from moesaic_lab.layer.run import run

BENCHMARK = emulated(
    name="layer", description="Measure ways to run an MoE layer in turn on an emulated cluster, with virtual compute.",
    notes=NOTES, read_config=read_config, run=run, rows=all_rows, claims=claims, columns=tables, panels=panels,
    title="One MoE layer over emulated links, virtual compute", panels_in_a_row=3,
)  # fmt: skip
