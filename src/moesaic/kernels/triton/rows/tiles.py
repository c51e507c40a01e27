"""The tiles of grouped products: a `Tile` is chosen from the sizes of a product and the properties
of a device.

This module imports neither Triton nor torch. `lab/moesaic_lab/device/search.py` compares other
tiles with the default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RESERVED_BYTES = 1024
"""The shared memory of each program that CUDA reserves."""
HOPPER = (9, 0)
"""The lowest compute capability with a tensor memory accelerator (TMA), which loads tiles by
descriptor."""
LOWEST = 32
"""The fewest rows of an expert in a tile. Lower ones save no time, since such products wait for
matrices, and would be compiled apart."""
WGMMA = (9, 10)
"""The major compute capabilities whose tensor cores read operands from shared memory. Consumer
Blackwell (12) has TMA, but operands in registers."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The part of a grouped product that a program computes at a time, and the launch parameters of
    the kernel."""

    rows: int
    """Rows of the output tile: token copies, or rows of a weight gradient. A multiple of 16."""
    columns: int
    """Columns of the output tile; with a fused gate, columns of each of the two matrices."""
    depth: int
    """Elements of the reduction per step of the software pipeline."""
    warps: int
    """Warps per program; Hopper's tensor cores require a multiple of 4."""
    stages: int
    """Steps of the pipeline that are in flight."""
    group: int = 8
    """Tiles of rows that are processed before the next tile of columns; the L2 cache should hold
    their rows."""
    programs: int = 0
    """Persistent programs per multiprocessor; 0 for a program per tile."""
    descriptors: int = 0
    """1: operands that are not gathered are loaded through tensor descriptors (TMA on Hopper); 0:
    through pointers."""


@dataclass(frozen=True, kw_only=True)
class TileDevice:
    """The properties of a device that the choice of tiles depends on."""

    name: str
    capability: tuple[int, int]
    """Compute capability: (8, 0) Ampere, (8, 9) Ada, (9, 0) Hopper, (10, 0) and (12, 0)
    Blackwell."""
    multiprocessors: int
    shared_bytes: int
    """The most shared memory of one program."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one grouped product."""

    product: str
    """"up", "down", "down_grad", "rows_grad" or "weight_grad", explained in `expert_stage.py`."""
    rows: int
    """Token copies of all experts together."""
    num_experts: int
    columns: int
    """Columns of the output; with a fused gate, columns of each of the two matrices."""
    depth: int
    """Length of the reduction; for a weight gradient the mean rows of an expert."""
    itemsize: int
    """Bytes of an element: 2 for bfloat16 and float16, 4 for float32."""
    gated: bool = False
    """Whether the layer has a gate."""
    is_odd: bool = False
    """Whether rows of an operand are no multiples of 16 bytes, so that it is loaded element by
    element, each at an address in registers."""

    @property
    def is_doubled(self) -> bool:
        """Whether a program computes two output tiles, one of the gate and one of the gated
        matrix."""
        return self.gated and self.product == "up"

    @property
    def rows_per_expert(self) -> int:
        """Mean rows of an expert, at least 1."""
        return max(1, self.rows // self.num_experts)


def shared_bytes(tile: Tile, shape: Shape) -> int:
    """Return the shared memory of a program: the operands of every stage. The epilogue reuses that
    memory.

    Persistent programs overlap a tile's epilogue with loads of the next tile, so their result needs
    memory of its own.
    """
    columns = tile.columns * (2 if shape.is_doubled else 1)  # of both matrices
    stage_bytes = (tile.rows + columns) * tile.depth * shape.itemsize
    result_bytes = 0
    if tile.programs:
        result_bytes = tile.rows * tile.columns * shape.itemsize // 2
    return tile.stages * stage_bytes + result_bytes + RESERVED_BYTES


def num_column_splits(tile: Tile, *, is_long: bool = False) -> int:
    """Return into how many parts an epilogue splits its columns: 32 values per operand and thread,
    at least 16 columns.

    Args:
        tile: the tile of the product.
        is_long: whether the epilogue's formula needs many registers. It then takes 16 values per
            thread, like the epilogues of persistent programs, where addresses for the next tile's
            loads occupy registers.
    """
    num_threads = tile.warps * 32
    values_per_thread = tile.rows * tile.columns // num_threads
    most_per_thread = 16 if is_long or tile.programs else 32
    return max(1, min(values_per_thread // most_per_thread, tile.columns // 16))


def default_tile(shape: Shape, device: TileDevice) -> Tile:
    """Choose a tile without a search.

    The tile is 128 x 128, with two programs per multiprocessor at a time: the epilogue of one
    overlaps with the products of the other. It has fewer rows if experts have few, since rows
    beyond an expert's last one are wasted. float32 and odd widths get a quarter of that: without
    TF32 the products of float32 use registers, and so do the addresses of single elements; larger
    tiles spill kilobytes.
    """
    is_wide = shape.itemsize == 4
    is_weight_grad = shape.product == "weight_grad"
    parts = 2 if shape.is_doubled else 1
    largest = 64 if is_wide or shape.is_odd else 128

    # of a weight gradient the experts' rows are the depth, elsewhere the rows
    rows = largest
    if not is_weight_grad:
        rows = min(largest, max(LOWEST, power_of_two(shape.rows_per_expert)))
    columns = min(largest // parts, max(16, power_of_two(shape.columns)))
    least_depth = LOWEST if is_weight_grad else 16
    most_depth = 32 if shape.is_odd else deepest(shape)
    depth = min(most_depth, max(least_depth, power_of_two(shape.depth)))

    # without wgmma, operands occupy registers too
    major, _ = device.capability
    is_full = rows * columns * parts >= 128 * 128
    needs_registers = shape.is_odd or (is_full and major not in WGMMA)
    tile = Tile(
        rows=rows,
        columns=columns,
        depth=depth,
        stages=3,
        warps=8 if needs_registers else 4,
        descriptors=int(device.capability >= HOPPER and not is_wide),
    )
    while shared_bytes(tile, shape) > device.shared_bytes and tile.stages > 1:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def deepest(shape: Shape) -> int:
    """Return the depth of a step: 128 bytes of a row, the width of a swizzled line of shared
    memory."""
    return 128 // shape.itemsize


def is_odd_width(width: int, itemsize: int) -> bool:
    """Return whether rows of a width are no multiples of 16 bytes; see `Shape.is_odd`."""
    return bool(width * itemsize % 16)


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`, and at least 1."""
    return 1 << (max(1, size) - 1).bit_length()
