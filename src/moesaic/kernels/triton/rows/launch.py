"""Helpers for launching grouped products: the number of programs, tensor descriptors, the precision
of float32 products."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.kernels.triton.rows.tiles import HOPPER, Tile, TileDevice

ALIGNMENT = 16
"""Descriptors require addresses and strides that are multiples of this number of bytes."""
INTERPRETED = TileDevice(
    name="interpreter", capability=HOPPER, multiprocessors=2, shared_bytes=232_448
)
"""The device that tiles are chosen for under Triton's interpreter: a Hopper with two
multiprocessors."""


def num_programs(tile: Tile, num_tiles: int, device: torch.device) -> int:
    """Return how many programs to launch for at most `num_tiles` tiles.

    A persistent program processes its tiles in one pipelined loop: loads of the next tile start
    before a tile's epilogue.
    """
    if not tile.programs:
        return num_tiles
    return min(num_tiles, tile.programs * device_of(device).multiprocessors)


def device_of(device: torch.device) -> TileDevice:
    """Return the properties of a device that the choice of tiles depends on; `INTERPRETED` if there
    is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return INTERPRETED
    index = torch.cuda.current_device() if device.index is None else device.index
    return _gpu(index)


@lru_cache(maxsize=32)
def _gpu(index: int) -> TileDevice:
    """Return the properties of a GPU, asked once."""
    properties = torch.cuda.get_device_properties(index)
    return TileDevice(
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_bytes=driver.active.utils.get_device_properties(index)["max_shared_mem"],
    )


def as_operand(
    x: Tensor, block: tuple[int, ...], tile: Tile | None
) -> tuple[Tensor | TensorDescriptor, bool]:
    """Return a kernel's operand, as a descriptor if the tile asks for descriptors and the tensor is
    aligned.

    Args:
        x: the tensor; its last dimension has stride 1.
        block: the shape of the part that one load fetches.
        tile: the tile of the product; None for an operand that is gathered, which needs pointers.

    Returns:
        The operand and whether it is a descriptor.
    """
    if tile is None or not tile.descriptors or not _is_aligned(x):
        return x, False
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block)), True


def tile_constants(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of `grouped.Form` by which a tile of rows of a dtype is multiplied."""
    return {
        "precision": dot_precision(dtype),
        "flatten": tile.programs > 0,
        "block_r": tile.rows,
        "block_n": tile.columns,
        "block_k": tile.depth,
        "group": tile.group,
    }


def unit_stride(x: Tensor) -> Tensor:
    """Return the tensor itself if its last dimension has stride 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_aligned(x: Tensor) -> bool:
    """Return whether a descriptor can load a tensor."""
    if min(x.shape) == 0 or x.data_ptr() % ALIGNMENT:
        return False
    return all(stride * x.itemsize % ALIGNMENT == 0 for stride in x.stride()[:-1])


def dot_precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of `tl.dot`: for float32 that of
    `torch.set_float32_matmul_precision`, else "ieee"."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"
