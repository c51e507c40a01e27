"""`moesaic bench device`: one layer on one device, beside its matrix products alone and beside other people's layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = "Measure one MoE layer against its matrix products alone and against other people's layers."
    options = parse(Options, arguments, prog="moesaic bench device", description=description)
    if options.repeats < 1 or options.threads < 1:
        raise InputError(f"--repeats {options.repeats} --threads {options.threads}: both must be at least 1")
    import torch

    from moesaic.kernels.memory import keep_freed_memory
    from moesaic_lab.claims import Measurement
    from moesaic_lab.device.cases import cases
    from moesaic_lab.device.claims import NOTES, claims, device_table, merged, summary
    from moesaic_lab.device.run import measure
    from moesaic_lab.tables import claims_table

    wanted = [set(words.split()) for words in (options.only or "").split(",")]
    chosen = [case for case in cases() if any(words <= _words(case) for words in wanted)]
    if not chosen:
        raise InputError(
            f"--only {options.only!r} leaves no case: give words such as e8, e32, e64, float32, gelu, zipf"
        )
    kept = options.keep_freed_memory and keep_freed_memory()
    setting = {"threads": options.threads, "kept_memory": kept}
    rows = _old_rows(options)
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    for number, case in enumerate(chosen, 1):
        cell = measure(case, options.repeats, options.peers, options.given_routing)
        console.print(f"{number} of {len(chosen)}  {summary(cell)}", highlight=False)
        rows = merged(rows, [row | setting for row in cell.rows()])
        if options.json and (options.json != "-" or number == len(chosen)):  # a run that is cut off loses one case
            packages = ("torch", "numpy", "transformers", "deepspeed")
            Measurement(rows=rows, claims=claims(rows), notes=NOTES, packages=packages).write(options.json)
    shown = Console(stderr=options.json == "-")
    shown.print(device_table(rows))
    shown.print(claims_table(claims(rows)))
    return 0


def _old_rows(options: Options) -> list[dict[str, Any]]:
    """Return the rows that `--add` keeps."""
    if not options.add:
        return []
    if options.json in (None, "-"):
        raise InputError("--add without a --json file: name the file whose rows are kept")
    path = Path(str(options.json))
    if not path.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--add {path}: this is no result of moesaic bench device: name another --json file"
        ) from error
    if any(row.get("threads") != options.threads for row in rows):
        raise InputError(
            f"--add {path}: it has rows of other than --threads {options.threads}: measure it anew, without --add"
        )
    return rows


def _words(case: object) -> set[str]:
    """Return the words that a case is chosen by."""
    from moesaic_lab.device.cases import Case

    assert isinstance(case, Case)
    return {*case.shape.name.split("_"), case.shape.name, case.dtype, case.activation, case.routed}
