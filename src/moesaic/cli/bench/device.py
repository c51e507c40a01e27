"""`moesaic bench device`: one layer on one device, beside its matrix products alone and beside other people's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from moesaic.cli.arguments import parse
from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    device: Literal["cpu"] = "cpu"
    """Where."""
    json: str | None = None
    """Write the results there; "-" for standard output."""
    threads: int = 2
    """Of torch."""
    repeats: int = 20
    """Timed rounds of all methods per case."""
    only: str | None = None
    """Only cases whose name has all of these words, as "e32 bfloat16 swiglu zipf"."""
    peers: bool = True
    """Also measure the layers of others that are installed: transformers, deepspeed."""
    keep_freed_memory: bool = True
    """Let the allocator keep what is freed, as a training program may, for all methods alike."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Measure one MoE layer against its matrix products alone and against other people's layers."
    options = parse(Options, arguments, prog="moesaic bench device", description=description)
    if options.repeats < 1 or options.threads < 1:
        raise InputError(f"--repeats {options.repeats} --threads {options.threads}: both must be at least 1")
    import torch

    from moesaic.bench.device import measure
    from moesaic.bench.device_cases import cases
    from moesaic.bench.device_claims import NOTES, claims, device_table, summary
    from moesaic.bench.tables import claims_table
    from moesaic.kernels.memory import keep_freed_memory
    from moesaic.report.claims import Measurement

    chosen = [case for case in cases() if all(word in _words(case) for word in (options.only or "").split())]
    if not chosen:
        raise InputError(
            f"--only {options.only!r} leaves no case: give words such as e8, e32, e64, float32, gelu, zipf"
        )
    kept = options.keep_freed_memory and keep_freed_memory()
    torch.set_num_threads(options.threads)
    console, cells = Console(stderr=True), []
    for number, case in enumerate(chosen, 1):
        cells.append(measure(case, options.repeats, options.peers))
        console.print(f"{number} of {len(chosen)}  {summary(cells[-1])}", highlight=False)
    found = claims(cells)
    shown = Console(stderr=options.json == "-")
    shown.print(device_table(cells))
    shown.print(claims_table(found))
    if options.json:
        rows = [row | {"threads": options.threads, "kept_memory": kept} for cell in cells for row in cell.rows()]
        packages = ("torch", "numpy", "transformers", "deepspeed")
        Measurement(rows=rows, claims=found, notes=NOTES, packages=packages).write(options.json)
    return 0


def _words(case: object) -> set[str]:
    """Return the words that a case is chosen by."""
    from moesaic.bench.device_cases import Case

    assert isinstance(case, Case)
    return {*case.shape.name.split("_"), case.shape.name, case.dtype, case.activation, case.routed}
