"""What every launch of a grouped product needs: how many programs, operands as descriptors, the precision of float32."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.kernels.triton.rows.tiles import HOPPER, Tile, TileDevice

ALIGNMENT = 16
"""Bytes that descriptors want of addresses and strides."""
INTERPRETED = TileDevice(name="interpreter", capability=HOPPER, multiprocessors=2, shared_bytes=232_448)
"""What stands for the device under Triton's interpreter: a Hopper with two multiprocessors."""


def num_programs(tile: Tile, num_tiles: int, device: torch.device) -> int:
    """Return how many programs run `num_tiles` tiles or fewer.

    Where they are persistent a program's tiles are one pipelined loop: the next tile's loads start before the last one's
    epilogue.
    """
    return min(num_tiles, tile.programs * device_of(device).multiprocessors) if tile.programs else num_tiles


def device_of(device: torch.device) -> TileDevice:
    """Return what a choice of tiles depends on; where there is no GPU, and so only the interpreter, `INTERPRETED`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return INTERPRETED
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=32)
def _gpu(index: int) -> TileDevice:
    properties = torch.cuda.get_device_properties(index)
    return TileDevice(
        name=properties.name,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_bytes=driver.active.utils.get_device_properties(index)["max_shared_mem"],
    )


def as_operand(x: Tensor, block: tuple[int, ...], tile: Tile | None) -> tuple[Tensor | TensorDescriptor, bool]:
    """Return a kernel's operand, as a descriptor where the tile asks for it and the tensor's alignment allows it.

    Args:
        x: whose last dimension has stride 1.
        block: the part that one load fetches.
        tile: None for an operand that is gathered, which goes through pointers.

    Returns:
        The operand and whether it is a descriptor.
    """
    if tile is None or not tile.descriptors or not _is_aligned(x):
        return x, False
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block)), True


def unit_stride(x: Tensor) -> Tensor:
    """Return the tensor itself where its last dimension has stride 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_aligned(x: Tensor) -> bool:
    steps = [step * x.itemsize for step in x.stride()[:-1]]
    return min(x.shape) > 0 and x.data_ptr() % ALIGNMENT == 0 and all(step % ALIGNMENT == 0 for step in steps)


def dot_precision(dtype: torch.dtype) -> str:
    """Return how float32 operands are multiplied: as `torch.set_float32_matmul_precision` says; 16-bit ones as they are."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"
