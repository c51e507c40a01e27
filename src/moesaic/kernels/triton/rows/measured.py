"""Tiles that a search found on a device, shipped with the package: one file of
`moesaic bench device` for each device.

A product takes the tile of the nearest measured one: of the same kind and element size, with rows
per expert and widths that differ least, in powers of two. A device without a file takes that of its
generation. A product whose sizes all differ too much, or a generation without a file, takes
`default_tile`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from math import log2

from moesaic.kernels.triton.rows.tiles import (
    Shape,
    Tile,
    TileDevice,
    default_tile,
    power_of_two,
    shared_bytes,
)

FILES: dict[tuple[int, int], tuple[str, ...]] = {(9, 0): ("nvidia_h200",)}
"""By compute capability, the names of the files; a device whose name none has takes the first."""
FARTHEST = 2.0
"""The largest distance of a size, as a power of two, at which a tile is still taken."""

Sizes = tuple[int, int, int]
"""Rows per expert, columns and depth."""


def bucket(shape: Shape) -> str:
    """Return the key of a tile in a file: the exact sizes that affect the choice, row counts
    rounded up to powers of two."""
    # it sums over rows
    depth = power_of_two(shape.depth) if shape.product == "weight_grad" else shape.depth
    sizes = f"{power_of_two(shape.rows_per_expert)}-{shape.columns}-{depth}-{shape.itemsize}"
    return f"{shape.product}-{sizes}{'-gated' if shape.gated else ''}"


def tile_for(shape: Shape, device: TileDevice) -> Tile:
    """Return the tile of a product on a device: the nearest measured one, or the default."""
    wanted = _parsed(bucket(shape))
    distance = FARTHEST
    tile = None
    for (kind, sizes), candidate in _tiles(device.name, device.capability).items():
        if kind == wanted[0] and shared_bytes(candidate, shape) <= device.shared_bytes:
            farthest = max(abs(log2(size / other)) for size, other in zip(sizes, wanted[1]))
            if farthest <= distance:
                distance = farthest
                tile = candidate
    return default_tile(shape, device) if tile is None else tile


def _parsed(key: str) -> tuple[tuple[str, ...], Sizes]:
    """Return the kind of a bucket's product, and its rows per expert, columns and depth."""
    product, rows, columns, depth, *kind = key.split("-")
    return (product, *kind), (int(rows), max(1, int(columns)), max(1, int(depth)))


@lru_cache(maxsize=8)
def _tiles(name: str, capability: tuple[int, int]) -> Mapping[tuple[tuple[str, ...], Sizes], Tile]:
    """Return the measured tiles for a device by kind and sizes."""
    names = FILES.get(capability, ())
    own = name.lower().replace(" ", "_")
    if not names:
        return {}
    file = files(__package__).joinpath(f"{own if own in names else names[0]}.json")
    (tiles,) = json.loads(file.read_text(encoding="utf-8")).values()
    return {_parsed(key): Tile(**tile) for key, tile in tiles.items()}
