"""Tiles that a search found on a device, shipped with the package: one file of
`moesaic bench device` for each device.

A product takes the tile of the nearest measured one: of the same kind and element size, with rows
per expert and widths that differ least, in powers of two. Larger sizes keep a tile, which large
products gain most from; smaller ones leave too few tiles to share among the multiprocessors. A
device without a file takes that of its generation. A product that is too small or of odd widths, or
a generation without a file, takes `default_tile`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from math import log2
from operator import itemgetter, le

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
SMALLER = (3.0, 2.0, 2.0)
"""How much smaller than measured, in powers of two, each of `Sizes` may be."""

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
    wanted_kind, wanted_sizes = _parsed(bucket(shape))
    near = list[tuple[float, Tile]]()
    for (kind, sizes), tile in _tiles(device.name, device.capability).items():
        # by how many powers of two each size is smaller than the measured one; negative if larger
        smaller = [log2(size / wanted) for size, wanted in zip(sizes, wanted_sizes)]
        fits = shared_bytes(tile, shape) <= device.shared_bytes and not shape.is_odd
        if fits and kind == wanted_kind and all(map(le, smaller, SMALLER)):
            near.append((max(map(abs, smaller)), tile))
    return min(near, key=itemgetter(0))[1] if near else default_tile(shape, device)


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
