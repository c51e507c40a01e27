"""Finds tiles by timing them, within a budget, and keeps what it found in a file that says what it is good for.

Triton's own autotuner keeps its findings in the process or in a cache nobody names, and searches in the middle of a
training step. Here a search is something that you start, its result is data that you pass, and a file written on another
device or under other versions is not read but kept beside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import triton

from moesaic.errors import InputError
from moesaic.kernels.triton.rows.tiles import (
    HOPPER,
    RESERVED_BYTES,
    Shape,
    Tile,
    TileDevice,
    deepest,
    default_tile,
    shared_bytes,
)
from moesaic_lab.claims import write_whole

FORMAT = 2
"""Of the file; raise it when a tile's fields change their meaning."""
WORSE = 1.02
"""A candidate must be faster than the default by this factor to replace it: less is noise."""
CUTS = (
    (128, 128, 4, 3, 2), (128, 256, 8, 3, 0), (128, 256, 8, 3, 1), (128, 256, 8, 4, 1), (256, 128, 8, 3, 0),
    (256, 128, 8, 3, 1), (256, 128, 8, 4, 1), (64, 256, 4, 3, 0), (128, 128, 4, 4, 0), (128, 128, 8, 3, 0),
    (128, 128, 8, 4, 1), (128, 64, 4, 4, 0), (64, 128, 4, 4, 0),
)  # fmt: skip
"""Rows, columns, warps, stages and programs that a search tries; the last narrow ones are for Ada's 99 KiB."""
GATED_CUTS = (
    (128, 128, 8, 3, 0), (128, 128, 8, 4, 0), (64, 128, 4, 3, 0), (128, 64, 8, 4, 0), (256, 64, 8, 3, 0), (64, 64, 4, 3, 0),
)  # fmt: skip
"""The same for a projection with a gate, whose tile holds its columns twice; none persistent, since the assembler then makes
their products wait for each other (C7515, all four that were tried, Triton 3.6 for sm_90a)."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Tiles that a search found on one device."""

    device: TileDevice
    found: Mapping[str, Tile] = field(default_factory=dict)
    """By `Shape.bucket`."""

    @property
    def key(self) -> str:
        """Name what the tiles are good for."""
        return f"{self.device.name}, triton {triton.__version__}, torch {torch.__version__}, format {FORMAT}"

    def tile(self, shape: Shape) -> Tile:
        """Return the tile found for a product of this shape, or the default."""
        return self.found.get(shape.bucket) or default_tile(shape, self.device)

    def tiles(self, shapes: Mapping[str, Shape]) -> dict[str, Tile]:
        """Return the tiles of a layer's products, from `expert_stage.shapes`."""
        return {name: self.tile(shape) for name, shape in shapes.items()}

    def with_tile(self, shape: Shape, tile: Tile) -> Tuned:
        """Return the same with one more tile."""
        return Tuned(device=self.device, found={**self.found, shape.bucket: tile})


def load(path: Path | str | None, device: TileDevice) -> Tuned:
    """Read the tiles of this device and these versions from a file; none if there is no such file.

    Raises:
        InputError: the file is not one of `save`.
    """
    nothing = Tuned(device=device)
    if path is None or not Path(path).exists():
        return nothing
    tiles = _read(Path(path)).get(nothing.key, {})
    return Tuned(device=device, found={bucket: Tile(**tile) for bucket, tile in tiles.items()})


def save(path: Path | str, tuned: Tuned) -> None:
    """Write tiles to a file, whole or not at all; what it holds for other devices and versions stays.

    Raises:
        InputError: the file exists and is not one of `save`.
    """
    path = Path(path)
    held = _read(path) if path.exists() else {}
    held[tuned.key] = {bucket: asdict(tile) for bucket, tile in sorted(tuned.found.items())}
    write_whole(path, json.dumps(held, indent=1) + "\n")


def search(
    shape: Shape,
    device: TileDevice,
    seconds_of: Callable[[Tile], float],
    *,
    at_most: int = 24,
    deadline: float = float("inf"),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Tile, bool]:
    """Time candidates in order and return the fastest, and whether all were tried.

    Args:
        shape: the product.
        device: that it runs on.
        seconds_of: runs the product with a tile; what it raises counts as a tile that does not work.
        at_most: candidates to try.
        deadline: of `time.monotonic`, after which no other candidate is tried and the search does not count as done.
        say: is told each candidate's outcome.

    Returns:
        The fastest tile; the default, which comes first, unless another is faster by `WORSE`, or if none worked. And
        False if the deadline cut the search off, or none worked: that is no finding.
    """
    best, best_seconds = default_tile(shape, device), float("inf")
    for number, tile in enumerate(candidates(shape, device)):
        if number >= at_most:
            break
        if time.monotonic() > deadline:
            return best, False
        try:
            seconds = seconds_of(tile)
        except Exception as error:  # whatever a compiler or a driver makes of an unlucky tile
            say(f"{shape.bucket}: {_words(tile)}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        say(f"{shape.bucket}: {_words(tile)}: {seconds * 1e3:.3f} ms")
        if seconds * (WORSE if number else 1.0) < best_seconds:
            best, best_seconds = tile, seconds
    return best, best_seconds < float("inf")


def fits(tile: Tile, shape: Shape, device: TileDevice) -> bool:
    """Say whether a tile runs at all and is no obvious waste."""
    accumulators = tile.rows * tile.columns * (2 if shape.is_doubled else 1) / (tile.warps * 32)
    if tile.descriptors and device.capability < HOPPER:
        return False
    if accumulators > 128 or accumulators < 16:  # registers of a thread: 255 in all
        return False
    if tile.programs and tile.programs * (shared_bytes(tile, shape) + RESERVED_BYTES) > device.shared_bytes + 2048:
        return False
    return shared_bytes(tile, shape) <= device.shared_bytes


def candidates(shape: Shape, device: TileDevice) -> Iterator[Tile]:
    """Yield the tiles that a search tries, the default first, those that do not fit left out."""
    first = default_tile(shape, device)
    yield first
    if first.descriptors:
        yield replace(first, descriptors=0)
    cuts = GATED_CUTS if shape.is_doubled else CUTS
    for rows, columns, warps, stages, programs in cuts:
        if programs and shape.product == "weight_grad":  # experts differ in rows: no fixed share of the tiles is fair
            continue
        tile = Tile(
            rows=rows, columns=columns, depth=deepest(shape), warps=warps, programs=programs,
            descriptors=first.descriptors, stages=stages,
        )  # fmt: skip
        if tile != first and fits(tile, shape, device) and columns < 2 * shape.columns:
            yield tile


def _words(tile: Tile) -> str:
    size = f"{tile.rows}x{tile.columns}x{tile.depth}"
    return f"{size} warps {tile.warps} stages {tile.stages} programs {tile.programs} descriptors {tile.descriptors}"


def _read(path: Path) -> dict[str, dict]:
    wanted = {each.name for each in fields(Tile)}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        tiles = [tile for of_device in held.values() for tile in of_device.values()]
        is_ours = all(isinstance(tile, dict) for tile in tiles)
    except (ValueError, AttributeError, UnicodeDecodeError):
        is_ours, tiles = False, []
    if not is_ours:
        raise InputError(f"{path} is no file of tuned tiles: delete it, or name another file")
    for key, of_device in held.items():
        if key.endswith(f"format {FORMAT}") and any(set(tile) != wanted for tile in of_device.values()):
            raise InputError(
                f"{path}: tiles of {key} lack fields or have unknown ones: delete it, or name another file"
            )
    return held
