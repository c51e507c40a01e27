"""How a grouped product is cut into tiles, as data: chosen by shape and device.

Knows no Triton and no device: sizes in, a `Tile` out. The laboratory times others beside the default (`gpu/search.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

PRODUCTS = ("up", "down", "down_grad", "rows_grad", "weight_grad")
"""The five kinds of grouped products of a layer; `expert_stage.py` says which is which."""
RESERVED_BYTES = 1024
"""Shared memory that CUDA keeps of each program."""
HOPPER = (9, 0)
"""The compute capability from which tiles may be fetched by the tensor memory accelerator."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One program's share of a grouped product and how it is worked through."""

    rows: int
    """Of the output tile: token copies, or a weight gradient's rows. A multiple of 16."""
    columns: int
    """Of the output tile; of each of the two where a gate is fused."""
    depth: int
    """Of the reduction, per step of the software pipeline."""
    warps: int
    """Per program; the tensor cores of Hopper want a multiple of 4."""
    stages: int
    """Steps of the pipeline that are in flight."""
    group: int = 8
    """Tiles of rows that are worked off before the next tile of columns: what the L2 cache holds meanwhile."""
    programs: int = 0
    """Persistent programs per multiprocessor; 0 for a program per tile."""
    descriptors: int = 0
    """1: operands that are not gathered come through tensor descriptors (TMA on Hopper); 0: through pointers."""

    def as_ints(self) -> list[int]:
        """Return the fields in order, as an operator's argument."""
        return list(astuple(self))

    @staticmethod
    def of(numbers: Sequence[int]) -> Tile:
        """Return the tile of `as_ints`."""
        return Tile(**dict(zip((field.name for field in fields(Tile)), numbers, strict=True)))


@dataclass(frozen=True, kw_only=True)
class TileDevice:
    """What a choice of tiles depends on."""

    name: str
    capability: tuple[int, int]
    """Compute capability: (8, 0) Ampere, (8, 9) Ada, (9, 0) Hopper."""
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one program may have."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one grouped product."""

    product: str
    """A name in `PRODUCTS`."""
    rows: int
    """Token copies, of all experts together."""
    num_experts: int
    columns: int
    """Of the output, of each of the two where a gate is fused."""
    depth: int
    """Of the reduction: the rows of an expert (its mean) for a weight gradient."""
    itemsize: int
    """Bytes of an element: 2 for bfloat16 and float16, 4 for float32."""
    gated: bool = False
    """Whether the layer has a gate."""

    @property
    def is_doubled(self) -> bool:
        """Whether a tile is made twice, of the gate and of what it gates."""
        return self.gated and self.product == "up"

    @property
    def rows_per_expert(self) -> int:
        """Mean rows of an expert, at least 1."""
        return max(1, self.rows // self.num_experts)

    @property
    def bucket(self) -> str:
        """Name what a tuned tile is good for: sizes that matter as they are, row counts by powers of two."""
        depth = _power_of_two(self.depth) if self.product == "weight_grad" else self.depth  # where it runs over rows
        sizes = f"{_power_of_two(self.rows_per_expert)}-{self.columns}-{depth}-{self.itemsize}"
        return f"{self.product}-{sizes}{'-gated' if self.gated else ''}"


def shared_bytes(tile: Tile, shape: Shape) -> int:
    """Return the shared memory that a tile's pipeline takes, operands of every stage; the epilogue reuses it.

    Persistent programs overlap a tile's epilogue with the next tile's loads, so the result needs a place of its own.
    """
    columns = tile.columns * (2 if shape.is_doubled else 1)
    aside = tile.rows * tile.columns * shape.itemsize // 2 if tile.programs else 0
    return tile.stages * (tile.rows + columns) * tile.depth * shape.itemsize + aside + RESERVED_BYTES


def num_bites(tile: Tile, *, is_long: bool = False) -> int:
    """Return in how many parts an epilogue takes its columns: 32 values of each operand per thread, 16 columns at least.

    Args:
        tile: whose epilogue it is.
        is_long: whether the epilogue's formula takes many registers; then 16 values, as where the next tile's loads are
            under way, whose addresses take registers.
    """
    per_thread = tile.rows * tile.columns // (tile.warps * 32)
    return max(1, min(per_thread // (16 if is_long or tile.programs else 32), tile.columns // 16))


def default_tile(shape: Shape, device: TileDevice) -> Tile:
    """Return a tile without a search.

    128 x 128 with two programs on a multiprocessor at a time, so that one's epilogue hides behind the other's products;
    fewer rows where experts have few, since a tile's rows beyond an expert's last are wasted. float32 gets a quarter of
    that and no descriptors: without TF32 its products run on registers, and larger tiles spill kilobytes.
    """
    is_wide, is_hopper = shape.itemsize == 4, device.capability >= HOPPER
    most = 64 if is_wide else 128
    rows = most if shape.product == "weight_grad" else min(most, max(16, _power_of_two(shape.rows_per_expert)))
    columns = min(most // 2 if shape.is_doubled else most, max(16, _power_of_two(shape.columns)))
    depth = min(deepest(shape), max(16, _power_of_two(shape.depth)))
    is_full = rows * columns * (2 if shape.is_doubled else 1) >= 128 * 128
    tile = Tile(
        rows=rows, columns=columns, depth=depth, stages=3,
        warps=8 if is_full and not is_hopper else 4,  # operands stand in registers too where there is no wgmma
        descriptors=int(is_hopper and not is_wide),
    )  # fmt: skip
    while shared_bytes(tile, shape) > device.shared_bytes and tile.stages > 1:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def deepest(shape: Shape) -> int:
    """Return the depth of a step: 128 bytes of a row, the width of a swizzled line of shared memory."""
    return 128 // shape.itemsize


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`, and at least 1."""
    return 1 << (max(1, size) - 1).bit_length()
