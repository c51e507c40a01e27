"""`moesaic bench kernels`: each operation of a layer beside the plain way to write it and beside the roofline; layer memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moesaic.cli.arguments import parse
from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    json: str | None = None
    """Write the results there; "-" for standard output."""
    picture: str | None = None
    """Draw rooflines into this .svg, .png or .pdf file."""
    threads: int = 2
    """Of torch."""
    repeats: int = 20
    """Timed calls of either way per operation."""
    memory: bool = False
    """Instead of times: the memory of one layer at the sizes of Tutel's Table 5."""
    measured_up_to: int = 8192
    """With --memory: tokens up to which it is measured, half a minute at 8192; larger sizes by the formula."""


def run(arguments: Sequence[str]) -> int:
    """Measure; returns the exit code."""
    description = (
        "Measure each operation of a layer against the plain way to write it and the roofline, or a layer's memory."
    )
    options = parse(Options, arguments, prog="moesaic bench kernels", description=description)
    if options.repeats < 1 or options.threads < 1:
        raise InputError(f"--repeats {options.repeats} --threads {options.threads}: both must be at least 1")
    import torch

    from moesaic_lab.pictures import check_picture, write_picture

    if options.picture:
        if options.memory:
            raise InputError("--picture with --memory: there is only a table: leave one of them out")
        check_picture(Path(options.picture))
    torch.set_num_threads(options.threads)
    if options.memory:
        return _memory(options)
    from moesaic_lab.kernels.run import NOTES, claims, measure, panels
    from moesaic_lab.tables import Column, byte_size, milliseconds, share, table

    rows = measure(options.repeats)
    columns = (
        Column(key="dtype", title="dtype", is_text=True), Column(key="op", title="operation", is_text=True),
        Column(key="median_seconds", title="ms", show=milliseconds), Column(key="over_plain", title="over plain", show=share),
        Column(key="of_bound", title="of the bound", show=share), Column(key="error", title="error", show="{:.1e}".format),
        Column(key="growth_bytes", title="growth", show=byte_size),
        Column(key="plain_growth_bytes", title="plain growth", show=byte_size),
    )  # fmt: skip
    _report(options, rows, claims(rows), table("Operations of one layer", rows, columns, group_by=("dtype",)), NOTES)
    if options.picture:
        write_picture(Path(options.picture), "Operations of one layer", panels(rows), NOTES, columns=2)
    return 0


def _memory(options: Options) -> int:
    from moesaic_lab.kernels.memory import claims, rows
    from moesaic_lab.tables import Column, share, table

    found = rows(options.measured_up_to)
    titles = {"measured_gib": "measured", "formula_gib": "formula", "tutel_gib": "Tutel"}
    columns = (
        Column(key="tokens", title="tokens"),
        *(Column(key=k, title=f"{t}, GiB", show=share) for k, t in titles.items()),
    )
    notes = (
        "Peak of all tensors in a training step of one layer, weights and gradients included: width 4,096, hidden 4,096, "
        "top-2, 2 experts, float32, GELU; Tutel's figures from its Table 5. Sizes that were not measured are by the formula of "
        "docs/kernels.md."
    )
    _report(options, found, claims(found), table("Memory of one layer", found, columns), notes)
    return 0


def _report(options: Options, rows: list[dict[str, Any]], found: Any, shown_table: Any, notes: str) -> None:
    from moesaic_lab.claims import Measurement
    from moesaic_lab.tables import claims_table

    shown = Console(stderr=options.json == "-")
    shown.print(shown_table)
    shown.print(claims_table(found))
    if options.json:
        Measurement(rows=rows, claims=found, notes=notes).write(options.json)
