"""Searches tiles by timing candidates within a budget, and keeps the results in a file keyed by
device and versions.

Triton's own autotuner keeps its results in the process or in an anonymous cache, and searches in
the middle of a training step. Here you start a search explicitly and pass its result as data.
Results from another device or other versions stay in the file but are ignored.
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
from moesaic.kernels.triton.rows.measured import bucket, tile_for
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
from moesaic_lab.device.results import reason

FORMAT = 2
"""Version of the file format; increase it when a field of `Tile` changes its meaning."""
WORSE = 1.02
"""Factor by which a candidate must be faster than the default to replace it; smaller differences
are noise."""
CUTS = (
    (128, 128, 4, 3, 2),
    (128, 256, 8, 3, 0),
    (128, 256, 8, 3, 1),
    (128, 256, 8, 4, 1),
    (256, 128, 8, 3, 0),
    (256, 128, 8, 3, 1),
    (256, 128, 8, 4, 1),
    (64, 256, 4, 3, 0),
    (128, 128, 4, 4, 0),
    (128, 128, 8, 3, 0),
    (128, 128, 8, 4, 1),
    (128, 64, 4, 4, 0),
    (64, 128, 4, 4, 0),
)
"""(rows, columns, warps, stages, programs) of the candidates; the last narrow ones are for Ada's 99
KiB of shared memory."""
GATED_CUTS = (
    (128, 128, 8, 3, 0),
    (128, 128, 8, 4, 0),
    (64, 128, 4, 3, 0),
    (128, 64, 8, 4, 0),
    (256, 64, 8, 3, 0),
    (64, 64, 4, 3, 0),
)
"""Candidates for a projection with a gate; such a tile holds its columns twice. None is persistent:
the assembler serialized the tensor-core instructions of all four persistent candidates (warning
C7515, Triton 3.6 for sm_90a)."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """Tiles that a search found on one device."""

    device: TileDevice
    by_bucket: Mapping[str, Tile] = field(default_factory=dict)
    """Tiles by `bucket`."""

    @property
    def key(self) -> str:
        """The key of these tiles in a file: device, versions and format."""
        return (
            f"{self.device.name}, triton {triton.__version__}, torch {torch.__version__}, format "
            f"{FORMAT}"
        )

    def tile(self, shape: Shape) -> Tile:
        """Return the tile found for a product of this shape, or the one that the layer takes."""
        return self.by_bucket.get(bucket(shape)) or tile_for(shape, self.device)

    def tiles(self, shapes: Mapping[str, Shape]) -> dict[str, Tile]:
        """Return the tiles of a layer's products by name.

        Args:
            shapes: shapes of the products by name, from `expert_stage.shapes`.
        """
        return {name: self.tile(shape) for name, shape in shapes.items()}

    def with_tile(self, shape: Shape, tile: Tile) -> Tuned:
        """Return a copy with one more tile."""
        return Tuned(device=self.device, by_bucket={**self.by_bucket, bucket(shape): tile})


def load(path: Path | str | None, device: TileDevice) -> Tuned:
    """Read the tiles of this device and these versions from a file; return no tiles if the file
    does not exist.

    Raises:
        InputError: the file was not written by `save`.
    """
    empty = Tuned(device=device)
    if path is None or not Path(path).exists():
        return empty
    tiles = _read(Path(path)).get(empty.key, {})
    return Tuned(device=device, by_bucket={bucket: Tile(**tile) for bucket, tile in tiles.items()})


def save(path: Path | str, tuned: Tuned) -> None:
    """Write tiles to a file atomically; tiles in it for other devices and versions are kept.

    Raises:
        InputError: the file exists and was not written by `save`.
    """
    path = Path(path)
    content = _read(path) if path.exists() else {}
    content[tuned.key] = {bucket: asdict(tile) for bucket, tile in sorted(tuned.by_bucket.items())}
    write_whole(path, json.dumps(content, indent=1) + "\n")


def search(
    shape: Shape,
    device: TileDevice,
    seconds_of: Callable[[Tile], float],
    *,
    at_most: int = 24,
    deadline: float = float("inf"),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Tile, bool]:
    """Time candidates in order and return the fastest tile and whether the search is complete.

    Args:
        shape: shape of the product.
        device: device that runs the product.
        seconds_of: runs the product with a tile and returns its seconds; if it raises, the tile is
            skipped.
        at_most: largest number of candidates to try.
        deadline: time of `time.monotonic` after which no further candidate is tried.
        say: called with a line of text about each candidate.

    Returns:
        The fastest tile, or the default tile if no other is faster by `WORSE` or none worked. And
        whether the search is complete: False if it reached the deadline or no tile worked.
    """
    best = default_tile(shape, device)
    best_seconds = float("inf")
    for number, tile in enumerate(candidates(shape, device)):
        if number >= at_most:
            break
        if time.monotonic() > deadline:
            return best, False
        try:
            seconds = seconds_of(tile)
        except Exception as error:  # whatever the compiler or the driver raises for a bad tile
            say(f"{bucket(shape)}: {_described(tile)}: {reason(error)}")
            continue
        say(f"{bucket(shape)}: {_described(tile)}: {seconds * 1e3:.3f} ms")
        is_default = number == 0
        if seconds * (1.0 if is_default else WORSE) < best_seconds:
            best = tile
            best_seconds = seconds
    worked = best_seconds < float("inf")
    return best, worked


def fits(tile: Tile, shape: Shape, device: TileDevice) -> bool:
    """Return whether a tile can run and does not obviously waste resources."""
    if tile.descriptors and device.capability < HOPPER:
        return False
    threads = 32 * tile.warps
    results = tile.rows * tile.columns * (2 if shape.is_doubled else 1)
    accumulators = results / threads
    if accumulators > 128 or accumulators < 16:  # registers of a thread: 255 in all
        return False
    tile_bytes = shared_bytes(tile, shape)
    if tile.programs:  # persistent programs that share a multiprocessor
        needed_bytes = tile.programs * (tile_bytes + RESERVED_BYTES)
        if needed_bytes > device.shared_bytes + 2048:
            return False
    return tile_bytes <= device.shared_bytes


def candidates(shape: Shape, device: TileDevice) -> Iterator[Tile]:
    """Yield the tiles that a search tries, the default first, without those that do not fit."""
    default = default_tile(shape, device)
    yield default
    if default.descriptors:
        yield replace(default, descriptors=0)
    cuts = GATED_CUTS if shape.is_doubled else CUTS
    for rows, columns, warps, stages, programs in cuts:
        # experts differ in rows: equal shares of tiles are unbalanced
        if programs and shape.product == "weight_grad":
            continue
        tile = Tile(
            rows=rows,
            columns=columns,
            depth=deepest(shape),
            warps=warps,
            programs=programs,
            descriptors=default.descriptors,
            stages=stages,
        )
        # at least half of a tile of twice the product's columns would be empty
        is_too_wide = columns >= 2 * shape.columns
        if tile != default and fits(tile, shape, device) and not is_too_wide:
            yield tile


def _described(tile: Tile) -> str:
    """Return a tile in words."""
    size = f"{tile.rows}x{tile.columns}x{tile.depth}"
    return (
        f"{size} warps {tile.warps} stages {tile.stages} programs {tile.programs} descriptors "
        f"{tile.descriptors}"
    )


def _read(path: Path) -> dict[str, dict]:
    """Return the tiles in a file, as dicts of their fields, by `Tuned.key` and then by bucket."""
    names = {field.name for field in fields(Tile)}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_ours = True
        for by_bucket in content.values():
            for tile in by_bucket.values():
                if not isinstance(tile, dict):
                    is_ours = False
    except (ValueError, AttributeError, UnicodeDecodeError):
        is_ours = False
    if not is_ours:
        raise InputError(f"{path} is not a file of tuned tiles: delete it, or name another file")

    for key, by_bucket in content.items():
        is_current = key.endswith(f"format {FORMAT}")
        if is_current and any(set(tile) != names for tile in by_bucket.values()):
            raise InputError(
                f"{path}: tiles of {key} lack fields or have unknown ones: delete it, or name "
                "another file"
            )
    return content
