"""`moesaic bench device`: one layer on one device, beside its matrix products alone and beside other people's layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from moesaic.errors import InputError
from moesaic.kernels.memory import keep_freed_memory
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Told, same
from moesaic_lab.device import run
from moesaic_lab.device.cases import DeviceCase
from moesaic_lab.device.cases import cases as all_cases
from moesaic_lab.device.claims import NOTES, claims, device_table, merged, summary

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(BenchmarkOptions):
    """What to measure."""

    device: Literal["cpu"] = "cpu"
    """Where."""
    add: bool = False
    """Keep the rows of cases in the --json file that this run does not measure, and claim over all: a long run in parts."""
    threads: int = 2
    """Of torch."""
    repeats: int = 20
    """Timed rounds of all methods per case."""
    only: str | None = None
    """Only cases whose name has all of these words, as "e32 bfloat16 swiglu zipf"; several such lists as "e8 gelu,e32"."""
    peers: bool = True
    """Also measure the layers of others that are installed: transformers, deepspeed."""
    given_routing: bool = False
    """Also measure our experts with the routing given."""
    keep_freed_memory: bool = True
    """Let the allocator keep what is freed, as a training program may, for all methods alike."""


def cases(options: DeviceOptions) -> tuple[list[DeviceCase], Rows]:
    """Return the cases that were asked for, and the rows that `--add` keeps."""
    if options.repeats < 1 or options.threads < 1:
        raise InputError(f"--repeats {options.repeats} --threads {options.threads}: both must be at least 1")
    wanted = [set(words.split()) for words in (options.only or "").split(",")]
    chosen = [case for case in all_cases() if any(words <= _words(case) for words in wanted)]
    if not chosen:
        raise InputError(
            f"--only {options.only!r} leaves no case: give words such as e8, e32, e64, float32, gelu, zipf"
        )
    return chosen, _old_rows(options)


def measure(options: DeviceOptions, cases: tuple[list[DeviceCase], Rows], told: Told) -> Rows:
    """Measure case after case; a run that is cut off loses one case."""
    chosen, rows = cases
    kept = options.keep_freed_memory and keep_freed_memory()
    setting = {"threads": options.threads, "kept_memory": kept}
    torch.set_num_threads(options.threads)
    for number, case in enumerate(chosen, 1):
        if case.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            told(f"{number} of {len(chosen)}  {case.name}: left out, this CPU has no instructions for bfloat16")
            continue  # beside its products, seventy times as long, a layer is nothing
        cell = run.measure(case, options.repeats, options.peers, options.given_routing)
        told(f"{number} of {len(chosen)}  {summary(cell)}")
        rows = merged(rows, [row | setting for row in cell.rows()])
        if options.json not in (None, "-"):
            BENCHMARK.measurement(rows).write(str(options.json))
    return rows


def _old_rows(options: DeviceOptions) -> Rows:
    if not options.add:
        return []
    if options.json in (None, "-"):
        raise InputError("--add without a --json file: name the file whose rows are kept")
    path = Path(str(options.json))
    if not path.exists():
        return []
    try:
        rows: Rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--add {path}: this is no result of moesaic bench device: name another --json file"
        ) from error
    if any(row.get("threads") != options.threads for row in rows):
        raise InputError(
            f"--add {path}: it has rows of other than --threads {options.threads}: measure it anew, without --add"
        )
    return rows


def _words(case: DeviceCase) -> set[str]:
    """Return the words that a case is chosen by."""
    return {*case.shape.name.split("_"), case.shape.name, case.dtype, case.activation, case.routed}


BENCHMARK: Benchmark[DeviceOptions, tuple[list[DeviceCase], Rows], Rows] = Benchmark(
    name="device", description="Measure one MoE layer against its matrix products alone and against other people's layers.",
    options=DeviceOptions, notes=NOTES, cases=cases, measure=measure, rows=same, claims=claims,
    columns=lambda rows: [device_table(rows)], packages=("torch", "numpy", "transformers", "deepspeed"),
)  # fmt: skip
