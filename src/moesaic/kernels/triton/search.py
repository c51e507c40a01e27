"""Finds tiles by timing them, within a budget, and keeps what it found in a file that says what it is good for.

Triton's own autotuner keeps its findings in the process or in a cache nobody names, and searches in the middle of a
training step. Here a search is something that you start, its result is data that you pass, and a file written on another
device or under other versions is not read but kept beside.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import triton

from moesaic.errors import InputError
from moesaic.kernels.triton.tiles import Device, Shape, Tile, candidates, default_tile

FORMAT = 1
"""Of the file; raise it when a tile's fields change their meaning."""
WORSE = 1.02
"""A candidate must be faster than the default by this factor to replace it: less is noise."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Tiles that a search found on one device."""

    device: Device
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


def load(path: Path | str | None, device: Device) -> Tuned:
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
    names = [each.name for each in fields(Tile)]
    held[tuned.key] = {
        bucket: {name: getattr(tile, name) for name in names} for bucket, tile in sorted(tuned.found.items())
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.writing")
    aside.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def search(
    shape: Shape,
    device: Device,
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
        False if the deadline cut the search off.
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
    return best, True


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
