"""What the benchmarks on an emulated cluster share: the machine's rights first, then tables, JSON and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from moesaic.errors import InputError

if TYPE_CHECKING:
    from moesaic_lab.claims import Claim
    from moesaic_lab.pictures import Panel


def require_cluster() -> None:
    """Make sure that beds can run functions here.

    Raises:
        ModuleNotFoundError: without torch.
        InputError: if this machine cannot emulate clusters; one line says why and what would help.
    """
    from moesaic.testbed import refusal

    import_module("torch")
    missing = refusal()
    if missing:
        raise InputError(missing)


def checked_pictures(picture: str | None, folder: str | None = None, name: str = "") -> list[Path]:
    """Return the files to draw into, before anything is measured.

    Args:
        picture: one file, .html or .svg.
        folder: of documentation, which gets `name`.svg.
        name: of the benchmark.

    Raises:
        InputError: for a file that no picture can be written to.
    """
    from moesaic_lab.pictures import check_picture

    paths = [Path(picture)] if picture else []
    paths += [Path(folder) / f"{name}.svg"] if folder else []
    for path in paths:
        check_picture(path)
    return paths


def write_results(
    tables: Iterable[Table],
    rows: list[dict[str, Any]],
    claims: list[Claim],
    panels: Sequence[Panel],
    *,
    title: str,
    notes: str,
    json: str | None,
    pictures: Sequence[Path],
    packages: tuple[str, ...] = ("torch", "numpy"),
    columns: int = 3,
) -> None:
    """Print tables and claims, write JSON and pictures.

    Args:
        tables: for people.
        rows: of the JSON.
        claims: printed, and part of the JSON.
        panels: of the picture.
        title: of the picture.
        notes: what a reader must know.
        json: file, "-" for standard output, None for none.
        pictures: files.
        packages: whose versions the JSON names.
        columns: of panels.
    """
    from moesaic_lab.claims import Measurement
    from moesaic_lab.pictures import write_picture
    from moesaic_lab.tables import claims_table

    shown = Console(stderr=json == "-")
    for each in tables:
        shown.print(each)
    shown.print(claims_table(claims))
    if json:
        Measurement(rows=rows, claims=claims, notes=notes, packages=packages).write(json)
    for path in pictures:
        write_picture(path, title, panels, notes, columns=columns)
        Console(stderr=True).print(f"wrote {path}")
