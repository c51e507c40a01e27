"""`moesaic bench comm`: all-to-alls in turn on an emulated cluster, beside the limit of its links."""

from __future__ import annotations

from moesaic_lab.benchmark import emulated
from moesaic_lab.comm.claims import claims
from moesaic_lab.comm.config import read_config
from moesaic_lab.comm.pictures import panels
from moesaic_lab.comm.run import NOTES, rows_of, run, tables

BENCHMARK = emulated(
    name="comm", description="Measure all-to-alls in turn on an emulated cluster, beside the limit of its links.",
    notes=NOTES, read_config=read_config, run=run, claims=claims, columns=tables, panels=panels,
    rows=lambda cells: [row for cell in cells for row in rows_of(cell)],
    title="All-to-alls over emulated links", panels_in_a_row=3,
)  # fmt: skip
