"""`moesaic bench device`: what a layer costs on one device, a CPU or a GPU.

On a CPU, `--part layer` compares a whole layer with its matrix products and with other people's
layers, `operations` each operation with plain PyTorch code and the roofline, and `memory` the
memory of a training step with Tutel's. On a GPU (`--device cuda`) all figures come from one
command, whose steps `steps.py` lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from moesaic.errors import InputError
from moesaic_lab.benchmark import (
    Benchmark,
    DrawnOptions,
    KeptOptions,
    Shown,
    Told,
    notes_of,
    require_positive,
)
from moesaic_lab.claims import Claim, describe_machine, today
from moesaic_lab.device import on_cpu, operations, products, steps, tutel_memory
from moesaic_lab.pictures import Panel

Rows = list[dict[str, Any]]
OPERATIONS = "operations"
PRODUCTS = "products"
"""The halves of --part operations."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(KeptOptions, DrawnOptions):
    """Options of the benchmark. Those about steps are for --device cuda, the others for --device
    cpu."""

    device: Literal["cpu", "cuda"] = "cpu"
    """What is measured. cuda: all figures of one GPU; --keep names the folder of results, by
    default gpu_results."""
    part: Literal["layer", "operations", "memory"] = "layer"
    """What is measured on a CPU: a whole layer, each of its operations, or the memory of one
    layer."""
    threads: int = 2
    """Number of torch's threads."""
    repeats: int = 20
    """Timed rounds of all methods per case."""
    only: str | None = None
    """Measure only the cases whose name has all of these words, e.g. "e32 bfloat16 swiglu zipf", or
    the steps whose name begins with one of them; separate alternatives by commas, e.g. "e8
    gelu,e32". With --part operations: operations or products, of which the other keeps its rows in
    the file of --json."""
    peers: bool = True
    """Also measure the layers of others that are installed (transformers, deepspeed)."""
    keep_freed_memory: bool = True
    """Let the allocator keep freed memory, as a training program may; applies to all methods."""
    measured_up_to: int = 8192
    """Largest number of tokens whose memory is measured, half a minute for 8192; that of more is
    computed by the formula."""
    seconds: float = steps.SECONDS
    """Time limit of all steps together."""
    dry: bool = False
    """Test that every step runs, without a GPU."""


@dataclass(frozen=True, kw_only=True)
class DevicePart:
    """One part of the benchmark, on one kind of device."""

    notes: str
    measure: Callable[[DeviceOptions, Told], Rows]
    claims: Callable[[Rows], list[Claim]]
    shown: Shown
    panels: Callable[[Rows], Sequence[Panel]] | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a part has measured."""

    part: DevicePart
    rows: Rows


def _layers(options: DeviceOptions, told: Told) -> Rows:
    """Measure the layers on the CPU."""
    return on_cpu.measure_all(
        options.only,
        options.repeats,
        threads=options.threads,
        peers=options.peers,
        keep_freed=options.keep_freed_memory,
        keep=options.keep,
        told=told,
    )


def _operations(options: DeviceOptions, told: Told) -> Rows:
    """Measure both halves, or one and take the other's rows from the file of --json. Each row says
    where it was measured."""
    told("operations")
    halves: dict[str, Callable[[], Rows]] = {
        OPERATIONS: lambda: operations.measure(options.repeats, threads=options.threads),
        PRODUCTS: lambda: products.measure(told, options.keep, options.threads),
    }
    where = {"cpu": describe_machine()["cpu"], "date": today()}
    earlier = kept_rows(Path(options.json)) if options.json and options.json != "-" else []
    rows = []
    for half, measure in halves.items():
        if options.only in (None, half):
            rows += [row | where for row in measure()]
        else:
            rows += [row for row in earlier if _half(row) == half]
    return rows


def kept_rows(path: Path) -> Rows:
    """Return the rows of a result file, each with the processor and the date of its measurement; []
    if there is no file."""
    if not path.exists():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    where = {"cpu": result["machine"]["cpu"], "date": result["date"]}
    # what a row itself says of its measurement counts; the file's is for rows that say nothing
    return [where | row for row in result["rows"]]


def _half(row: Mapping[str, Any]) -> str:
    """Return which half of --part operations a row is of."""
    return OPERATIONS if "op" in row else PRODUCTS


def _operations_claims(rows: Rows) -> list[Claim]:
    """Return the claims of both halves."""
    return [*operations.claims(rows), *products.claims(rows)]


def _steps(options: DeviceOptions, told: Told) -> Rows:
    """Run the steps on a GPU."""
    folder = Path(options.keep or "gpu_results")
    return steps.run(folder, dry=options.dry, seconds=options.seconds, only=options.only, told=told)


PARTS = {
    "layer": DevicePart(
        notes=notes_of(on_cpu.__doc__),
        measure=_layers,
        claims=on_cpu.claims,
        shown=Shown(
            title="One layer, forward + backward", columns=on_cpu.COLUMNS, group_by=on_cpu.CASE
        ),
    ),
    "operations": DevicePart(
        notes=f"{notes_of(operations.__doc__)} Products: {notes_of(products.__doc__)}",
        measure=_operations,
        claims=_operations_claims,
        panels=operations.panels,
        shown=Shown(
            title="Operations of one layer", columns=operations.COLUMNS, group_by=("dtype",)
        ),
    ),
    "memory": DevicePart(
        notes=notes_of(tutel_memory.__doc__),
        measure=lambda options, _: tutel_memory.rows(options.measured_up_to),
        claims=tutel_memory.claims,
        shown=Shown(title="Memory of one layer"),
    ),
    "steps": DevicePart(
        notes=steps.NOTES,
        measure=_steps,
        claims=steps.claims,
        shown=Shown(
            title="Steps on a GPU", columns=("step", "seconds", "ended"), where={"what": ("step",)}
        ),
    ),
}
"""The parts on a CPU by name, and the one of a GPU."""


def part_of(options: DeviceOptions) -> DevicePart:
    """Return the part that the options choose.

    Raises:
        InputError: a number is below 1, `only` matches nothing, or there is no GPU.
    """
    require_positive({"repeats": options.repeats, "threads": options.threads}, "--")
    name = options.part if options.device == "cpu" else "steps"
    if options.picture and PARTS[name].panels is None:
        raise InputError(f"--picture {options.picture}: only --part operations has a picture")
    if name == "operations" and options.only not in (None, OPERATIONS, PRODUCTS):
        raise InputError(
            f"--only {options.only}: with --part operations write {OPERATIONS} or {PRODUCTS}"
        )
    if options.picture and options.only == PRODUCTS:
        raise InputError(
            f"--picture {options.picture}: the picture shows operations: leave out --only "
            f"{PRODUCTS}"
        )
    if name == "layer":
        on_cpu.chosen(options.only)
    if name == "steps":
        steps.require(dry=options.dry)
    return PARTS[name]


def tables(found: Found) -> list[Table]:
    """Return the tables of a part's rows."""
    of_products = [row for row in found.rows if row.get("part") == PRODUCTS]
    others = [row for row in found.rows if row.get("part") != PRODUCTS]
    worst = Shown(
        title="Products beside torch's: the worst of each layout",
        columns=products.COLUMNS,
        group_by=("product",),
    )
    return [*found.part.shown.of(others), *worst.of(products.worst(of_products))]


BENCHMARK = Benchmark(
    name="device",
    description=(
        "Measure what a MoE layer costs on one device, a CPU or a GPU, beside the layers of others."
    ),
    options=DeviceOptions,
    notes=lambda found: found.part.notes,
    cases=part_of,
    rows=lambda found: found.rows,
    measure=lambda options, part, told: Found(part=part, rows=part.measure(options, told)),
    claims=lambda found: found.part.claims(found.rows),
    columns=tables,
    title="Operations of one layer",
    panels=lambda found: [] if found.part.panels is None else found.part.panels(found.rows),
    packages=("torch", "numpy", "triton", "transformers", "deepspeed", "liger_kernel"),
)
