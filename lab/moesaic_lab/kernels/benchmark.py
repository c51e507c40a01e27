"""`moesaic bench kernels`: each operation of a layer beside the plain way to write it and beside the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moesaic.errors import InputError
from moesaic_lab.benchmark import Benchmark, DrawnOptions, Shown, Told, same
from moesaic_lab.kernels import run
from moesaic_lab.tables import Column, byte_size, milliseconds, share


@dataclass(frozen=True, kw_only=True)
class KernelOptions(DrawnOptions):
    """What to measure."""

    threads: int = 2
    """Of torch."""
    repeats: int = 20
    """Timed calls of either way per operation."""


def cases(options: KernelOptions) -> None:
    """Refuse numbers that make no sense."""
    if options.repeats < 1 or options.threads < 1:
        raise InputError(f"--repeats {options.repeats} --threads {options.threads}: both must be at least 1")


def measure(options: KernelOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Measure every operation."""
    torch.set_num_threads(options.threads)
    return run.measure(options.repeats)


COLUMNS = (
    Column(key="dtype", title="dtype", is_text=True), Column(key="op", title="operation", is_text=True),
    Column(key="median_seconds", title="ms", show=milliseconds), Column(key="over_plain", title="over plain", show=share),
    Column(key="of_bound", title="of the bound", show=share), Column(key="error", title="error", show="{:.1e}".format),
    Column(key="growth_bytes", title="growth", show=byte_size),
    Column(key="plain_growth_bytes", title="plain growth", show=byte_size),
)  # fmt: skip

BENCHMARK = Benchmark(
    name="kernels", description="Measure each operation of a layer against the plain way to write it and the roofline.",
    options=KernelOptions, notes=run.NOTES, cases=cases, measure=measure, rows=same, claims=run.claims,
    columns=(Shown(title="Operations of one layer", columns=COLUMNS, group_by=("dtype",)),), panels=run.panels,
    title="Operations of one layer",
)  # fmt: skip
