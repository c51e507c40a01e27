"""Dequantizes fp8 weights with any form of scales that checkpoints of the hub have.

A weight (rows, columns) has one of these:

- blocks (DeepSeek-V3, Qwen3, MiniMax): `weight_scale_inv`, one number for each block of
  `weight_block_size`;
- one number (AutoFP8, Model Optimizer, Quark, Ministral): `weight_scale` or `weight_scale_inv`,
  () or (1,);
- channels (compressed-tensors, FBGEMM): `weight_scale`, (rows, 1) or (rows,);
- groups and blocks (compressed-tensors, MXFP8, Model Optimizer): `weight_scale`, a grid; Model
  Optimizer's has ones between;
- experts in one tensor: the same, with one dimension more; of FBGEMM's transposed matrices
  (experts, 1, columns).

A value is an element times its scale, whatever the name of the scale, rounded once from float32 to
bfloat16. Scales of activations, which only a product in fp8 needs, are left behind.

A `block` here is the shape (in elements) of what shares one scale, with a size for each dimension
of the weight; a `grid` is the number of blocks along each dimension, which is the shape of the
scales. `table` is the `quantization_config` of a config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.weights.layout import Computed, Region, first_names, full_region, ranges
from moesaic.weights.tensor_files import Stored

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
"""Dtypes that scales may have; e8m0, also stored as plain bytes, is a power of two."""
BLOCK = 128
GROUP = 32
"""Rows and columns of a block, and columns of a group of MXFP8, where the configuration says
nothing."""
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of a tensor with the scales of a weight; `x.weight` may also have `x.scale`, as
DeepSeek's own files do."""
UNUSED = re.compile(
    r"(\w+_)?(input|activation|act|output)_scale(_inv|_ub)?|(input|weight|output)_zero_point|"
    r"(kv|[qkv]|prob)_scale"
)
"""Last parts of names of tensors that no value of a weight depends on; zero points do, unless they
are zero."""
PACKED = re.compile(r"(.+)\.(weight_packed|qweight|weight_scale_2)")
"""Names of tensors of weights in other forms."""


class Fp8:
    """The weights of a checkpoint that are in fp8.

    Args:
        stored: the stored tensors, by the hub's names.
        table: how its configuration says that they are quantized.
        folder: the checkpoint's folder, for messages.

    Raises:
        InputError: weights are in a form of less than eight bits, or in integers.
    """

    def __init__(
        self, stored: Mapping[str, Stored], table: Mapping[str, Any], folder: Path
    ) -> None:
        self._stored = stored
        self._table = table
        self._folder = folder
        packed = [name for name in stored if PACKED.fullmatch(name)]
        if packed:
            raise InputError(
                f"{folder}: {first_names(packed)}: the weights are packed in four bits, and of "
                "such only mxfp4 with _blocks and _scales is read: convert the checkpoint that "
                "they were quantized from"
            )
        self._weights = {
            name
            for name, tensor in stored.items()
            if tensor.dtype in FP8 and not self._scales_something(name)
        }
        self.left_behind = self._others() if self._weights else []
        """Names of tensors that no value of a weight depends on."""

    def is_weight(self, name: str) -> bool:
        """Return whether a tensor is a weight in fp8."""
        return name in self._weights

    def values(self, name: str) -> tuple[Computed, list[str]]:
        """Return a weight's values, and the names of the tensors that these were computed from
        besides the weight.

        Raises:
            InputError: its scales are missing or do not fit it.
        """
        weight = self._stored[name]
        scale_names = [name + suffix for suffix in SCALE_SUFFIXES]
        if name.endswith(".weight"):
            scale_names.append(name.removesuffix("weight") + "scale")
        found = [each for each in scale_names if each in self._stored]
        if len(found) != 1:
            has = f"scales of two names, {' and '.join(found)}" if found else "no scales"
            # for the message, the block that scales of the usual name would have
            rows_and_columns, _ = self._configured_block(scale_name="_scale_inv")
            raise self._refusal(name, f"it has {has}", rows_and_columns)

        (scale_name,) = found
        scales = self._stored[scale_name]
        if scales.dtype not in SCALES:
            raise self._refusal(name, f"its scales are {str(scales.dtype).removeprefix('torch.')}")
        block = self._block(name, scale_name)
        grid = _num_blocks(weight.shape, block)
        make = partial(_product, weight, scales, grid, block)
        return Computed(torch.bfloat16, weight.shape, make), [scale_name]

    def _block(self, name: str, scale_name: str) -> tuple[int, ...]:
        """Return the block of a weight, given the names of the weight and of its scales.

        Raises:
            InputError: the shape of the scales fits neither the weight nor the configuration's
                block size.
        """
        shape = self._stored[name].shape
        grid = _without_ones(self._stored[scale_name].shape, shape)
        rows_and_columns, is_of_all_weights = self._configured_block(scale_name)
        if rows_and_columns is not None and len(shape) >= 2:
            # Each index of a leading dimension, such as each expert, has blocks of its own.
            leading = (1,) * (len(shape) - 2)
            block = (*leading, *rows_and_columns)
            expected = _num_blocks(shape, block)
            # One scale of one block may have any number of dimensions: (), (1,) or (1, 1).
            if grid == expected or math.prod(grid) == math.prod(expected) == 1:
                return block
            if is_of_all_weights:
                raise self._refusal(
                    name, f"is {list(shape)}, and its scales are {list(grid)}", rows_and_columns
                )
        # No block was configured, or only that of some weights: the shapes must tell.
        if math.prod(grid) == 1:
            # one scale for the whole weight; an empty dimension has no block, and 1 divides it
            return tuple(max(size, 1) for size in shape)

        aligned = self._aligned(shape, grid)
        if aligned is None:
            raise self._refusal(
                name, f"is {list(shape)}, and its scales are {list(grid)}", rows_and_columns
            )
        return aligned

    def _aligned(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the block that follows from the shapes of a weight and of its scales; None if none
        does."""
        missing = len(shape) - len(grid)
        if missing < 0:
            return None
        # A missing dimension is the last one: (rows,) are channels, (experts,) or (experts, rows)
        # those of stacked weights. Otherwise experts share their scales.
        ones = (1,) * missing
        begins_alike = len(grid) < 2 or grid[0] == shape[0]
        counts = (*grid, *ones) if begins_alike else (*ones, *grid)

        block = []
        for size, num_scales in zip(shape, counts):
            shared = self._num_sharing(size, num_scales)
            if shared is None:
                return None
            block.append(shared)
        return tuple(block)

    def _num_sharing(self, size: int, num_scales: int) -> int | None:
        """Return how many elements along a dimension of a weight share a scale; None if no usual
        number gives the dimension so many scales."""
        candidates: tuple[int, ...]
        if num_scales == 1:
            candidates = (size,)
        elif num_scales == size:
            candidates = (1,)
        else:
            candidates = (self._group_size(), BLOCK, GROUP)
        for candidate in candidates:  # the configured size is 0 if the configuration has none
            if candidate > 0 and -(-size // candidate) == num_scales:  # rounded up
                return candidate
        return None

    def _configured_block(self, scale_name: str) -> tuple[tuple[int, int] | None, bool]:
        """Return (rows, columns) of the blocks by the configuration, or None if it says nothing,
        and whether that holds for all weights.

        Args:
            scale_name: name of the tensor of scales, whose ending tells the usual blocks.

        Raises:
            InputError: the configuration says what cannot be.
        """
        configured = self._table.get("weight_block_size")
        is_of_all_weights = configured is not None
        if configured is None:
            of_groups = [group.get("block_structure") for group in self._groups()]
            of_groups = [structure for structure in of_groups if structure]
            configured = of_groups[0] if of_groups else None
        if configured is None:
            is_fp8 = self._table.get("quant_method", "fp8") == "fp8"
            is_unsaid = is_fp8 and "weight_block_size" not in self._table  # null is an answer
            if is_unsaid and scale_name.endswith("_inv"):
                return (BLOCK, BLOCK), False
            return None, False

        are_sizes = isinstance(configured, list) and all(
            type(size) is int and size > 0 for size in configured
        )
        if not are_sizes or len(configured) != 2:
            raise InputError(
                f"{self._folder / 'config.json'}: quantization_config.weight_block_size is not two "
                "numbers above 0, such as [128, 128]: restore the file"
            )
        rows, columns = configured
        return (rows, columns), is_of_all_weights

    def _group_size(self) -> int:
        """Return how many columns share a scale, as the configuration says; 0 if it does not."""
        for table in (self._table, *self._groups()):
            size = table.get("group_size")
            if type(size) is int and size > 0:
                return size
        return 0

    def _groups(self) -> list[dict[str, Any]]:
        """Return what `config_groups` of compressed-tensors say of weights."""
        groups = self._table.get("config_groups")
        if not isinstance(groups, dict):
            return []
        tables = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        return [table for table in tables if isinstance(table, dict)]

    def _scales_something(self, name: str) -> bool:
        """Return whether a tensor in fp8 holds scales of another tensor."""
        return any(
            name.endswith(suffix) and name.removesuffix(suffix) in self._stored
            for suffix in SCALE_SUFFIXES
        )

    def _others(self) -> list[str]:
        """Return the names of tensors that no value of a weight depends on.

        Raises:
            InputError: a zero point is not zero.
        """
        modules = set()  # those that hold a weight in fp8, at any depth
        for name in self._weights:
            parts = name.split(".")
            modules |= {".".join(parts[:depth]) for depth in range(1, len(parts))}

        found = []
        for name, tensor in self._stored.items():
            module, _, last = name.rpartition(".")
            if module not in modules or not UNUSED.fullmatch(last):
                continue
            if name.endswith("weight_zero_point") and tensor.read(full_region(tensor.shape)).any():
                raise self._refusal(name, "is not zero")
            found.append(name)
        return found

    def _refusal(self, name: str, what: str, block: tuple[int, int] | None = None) -> InputError:
        """Return the error that says what is wrong with a weight's scales; `block` is (rows,
        columns) if they are known."""
        scales = f"scales of {list(block)} blocks" if block else "scales that fit it"
        return InputError(
            f"{self._folder}: {name} is fp8 without {scales} ({what}): correct "
            "quantization_config.weight_block_size, or convert the checkpoint that it was "
            "quantized from"
        )


def sizes_of_blocks(table: Mapping[str, Any]) -> list[int] | None:
    """Return (rows, columns) of the blocks in which a table says that all weights are, as
    transformers itself reads them."""
    sizes = table.get("weight_block_size")
    return sizes if table.get("quant_method") == "fp8" and isinstance(sizes, list) else None


def _num_blocks(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Return the grid of a weight's blocks, of which the last along a dimension may be smaller."""
    return tuple(-(-size // of_block) for size, of_block in zip(shape, block))


def _without_ones(grid: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of scales without the ones that Model Optimizer puts after each of the last
    two dimensions, as in (..., rows, 1, columns, 1)."""
    if len(shape) >= 2 and len(grid) == len(shape) + 2 and grid[-3] == grid[-1] == 1:
        *leading, rows, _, columns, _ = grid
        return (*leading, rows, columns)
    return grid


def _product(
    weight: Stored, scales: Stored, grid: tuple[int, ...], block: tuple[int, ...], at: Region
) -> Tensor:
    """Return a weight's values in a region `at`, bfloat16: its elements times their scales."""
    whole = ranges(at)
    elements = torch.from_numpy(weight.read(whole)).view(weight.dtype).float()

    stored_scales = torch.from_numpy(scales.read(full_region(scales.shape)))
    # plain bytes are e8m0
    kind = torch.float8_e8m0fnu if scales.dtype == torch.uint8 else scales.dtype
    factors = stored_scales.reshape(-1).view(kind).float().view(grid)
    # Repeats each block's scale for the elements of the region that lie in it.
    for dim, (positions, size) in enumerate(zip(whole, block)):
        factors = factors.index_select(dim, torch.tensor(list(positions)) // size)

    sizes = [len(dim) for dim in at if isinstance(dim, range)]
    return (elements * factors).bfloat16().view(sizes)
