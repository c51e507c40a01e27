"""Tiles that a search found on a device, shipped with the package: one file of
`moesaic bench device` for each device.

A product takes the tile of the nearest measured one: of the same kind and element size, with rows
per expert and widths that differ least, in powers of two. Larger sizes keep a tile, which large
products gain most from; smaller ones leave too few tiles to share among the multiprocessors. A
device without a file takes that of its generation. A product that is too small or of odd widths, or
a generation without a file, takes `default_tile`.

A file maps the key of a bucket, "product-rows-columns-depth-itemsize" and perhaps "-gated", to the
fields of its `Tile`. A kind is what of a key must be equal: the product, the size of an element,
and whether there is a gate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from math import inf, log2

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
    depth = shape.depth
    if shape.product == "weight_grad":
        depth = power_of_two(depth)  # it is a number of rows
    sizes = f"{power_of_two(shape.rows_per_expert)}-{shape.columns}-{depth}-{shape.itemsize}"
    return f"{shape.product}-{sizes}{'-gated' if shape.gated else ''}"


def tile_for(shape: Shape, device: TileDevice) -> Tile:
    """Return the tile of a product on a device: the nearest measured one, or the default."""
    if shape.is_odd:
        return default_tile(shape, device)
    wanted_kind, wanted_sizes = _parsed(bucket(shape))
    nearest = None
    least_distance = inf
    for (kind, measured_sizes), tile in _tiles(device.name, device.capability).items():
        if kind != wanted_kind or shared_bytes(tile, shape) > device.shared_bytes:
            continue
        # by how many powers of two each wanted size is smaller than the measured one; negative if
        # larger
        smaller = [
            log2(measured / wanted) for measured, wanted in zip(measured_sizes, wanted_sizes)
        ]
        if any(difference > most for difference, most in zip(smaller, SMALLER)):
            continue
        distance = max(abs(difference) for difference in smaller)
        if distance < least_distance:
            nearest = tile
            least_distance = distance
    return default_tile(shape, device) if nearest is None else nearest


def _parsed(key: str) -> tuple[tuple[str, ...], Sizes]:
    """Return the kind of a bucket, and its rows per expert, columns and depth, from its key."""
    product, rows, columns, depth, *kind = key.split("-")
    # sizes of at least 1, which have logarithms
    return (product, *kind), (int(rows), max(1, int(columns)), max(1, int(depth)))


@lru_cache(maxsize=8)
def _tiles(name: str, capability: tuple[int, int]) -> Mapping[tuple[tuple[str, ...], Sizes], Tile]:
    """Return the measured tiles for a device by kind and sizes."""
    names = FILES.get(capability, ())
    if not names:
        return {}
    own_name = name.lower().replace(" ", "_")
    file_name = own_name if own_name in names else names[0]
    file = files(__package__).joinpath(f"{file_name}.json")
    # one device in a file
    (fields_by_key,) = json.loads(file.read_text(encoding="utf-8")).values()
    return {_parsed(key): Tile(**fields) for key, fields in fields_by_key.items()}
