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
OF_WEIGHT = ("_scale_inv", "_scale")
"""Suffixes of a tensor with the scales of a weight; `x.weight` may also have `x.scale`, as
DeepSeek's own files do."""
OTHERS = re.compile(
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
        if packed := [name for name in stored if PACKED.fullmatch(name)]:
            raise InputError(
                f"{folder}: {first_names(packed)}: the weights are packed in four bits, and of "
                "such only mxfp4 with _blocks and _scales is read: convert the checkpoint that "
                "they were quantized from"
            )
        self._weights = {
            name
            for name, each in stored.items()
            if each.dtype in FP8 and not self._scales_something(name)
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
        stem = name.removesuffix("weight") if name.endswith(".weight") else ""
        names = [*(name + suffix for suffix in OF_WEIGHT), *([stem + "scale"] if stem else [])]
        found = [each for each in names if each in self._stored]
        if len(found) != 1:
            has = f"scales of two names, {' and '.join(found)}" if found else "no scales"
            raise self._refusal(name, f"it has {has}", self._block_sizes("_scale_inv")[0])
        scales = self._stored[found[0]]
        if scales.dtype not in SCALES:
            raise self._refusal(name, f"its scales are {str(scales.dtype).removeprefix('torch.')}")
        sizes = self._block(name, found[0])
        grid = tuple(-(-n // size) for n, size in zip(weight.shape, sizes))
        return Computed(
            torch.bfloat16, weight.shape, partial(_product, weight, scales, grid, sizes)
        ), found

    def _block(self, name: str, scale: str) -> tuple[int, ...]:
        """Return the sizes of the blocks of a weight that share a scale, one size for each of its
        dimensions.

        Raises:
            InputError: the shape of the scales fits neither the weight nor the configuration's
                block size.
        """
        shape = self._stored[name].shape
        grid = _without_ones(self._stored[scale].shape, self._stored[name].shape)
        blocks, is_sure = self._block_sizes(scale)
        if blocks is not None and len(shape) >= 2:
            sizes = (*(1,) * (len(shape) - 2), *blocks)
            expected = tuple(-(-n // size) for n, size in zip(shape, sizes))
            if grid == expected or math.prod(grid) == math.prod(expected) == 1:
                return sizes
            if is_sure:
                raise self._refusal(
                    name, f"is {list(shape)}, and its scales are {list(grid)}", blocks
                )
        if math.prod(grid) == 1:
            return tuple(max(n, 1) for n in shape)
        aligned = self._aligned(shape, grid)
        if aligned is None:
            raise self._refusal(name, f"is {list(shape)}, and its scales are {list(grid)}", blocks)
        return aligned

    def _aligned(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the sizes of the blocks that follow from the shapes of a weight and of its scales;
        None if none do."""
        missing = len(shape) - len(grid)
        if missing < 0:
            return None
        # A missing dimension is the last one: (rows,) are channels, (experts,) or (experts, rows)
        # those of stacked weights.
        is_first = len(grid) < 2 or grid[0] == shape[0]
        sizes = []
        for n, count in zip(
            shape, (*grid, *(1,) * missing) if is_first else (*(1,) * missing, *grid)
        ):
            candidates = {1: (n,), n: (1,)}.get(count, (self._group_size(), BLOCK, GROUP))
            size = next((each for each in candidates if each and -(-n // each) == count), 0)
            if not size:
                return None
            sizes.append(size)
        return tuple(sizes)

    def _block_sizes(self, scale: str) -> tuple[tuple[int, int] | None, bool]:
        """Return (rows, columns) of the blocks that share a scale, or None, and whether that holds
        for all weights.

        Raises:
            InputError: the configuration says what cannot be.
        """
        found = self._table.get("weight_block_size")
        is_of_all_weights = found is not None
        if found is None:
            of_groups = (each.get("block_structure") for each in self._groups())
            found = next(filter(None, of_groups), None)
        if found is None:
            is_fp8 = self._table.get("quant_method", "fp8") == "fp8"
            is_unsaid = is_fp8 and "weight_block_size" not in self._table
            usual = (BLOCK, BLOCK) if is_unsaid and scale.endswith("_inv") else None
            return usual, False
        are_sizes = isinstance(found, list) and all(
            type(size) is int and size > 0 for size in found
        )
        if not are_sizes or len(found) != 2:
            raise InputError(
                f"{self._folder / 'config.json'}: quantization_config.weight_block_size is not two "
                "numbers above 0, such as [128, 128]: restore the file"
            )
        rows, columns = found
        return (rows, columns), is_of_all_weights

    def _group_size(self) -> int:
        """Return how many columns share a scale, as the configuration says; 0 if it does not."""
        sizes = [
            self._table.get("group_size"),
            *(each.get("group_size") for each in self._groups()),
        ]
        return next((size for size in sizes if type(size) is int and size > 0), 0)

    def _groups(self) -> list[dict[str, Any]]:
        """Return what `config_groups` of compressed-tensors say of weights."""
        groups = self._table.get("config_groups")
        tables = (
            [each.get("weights") for each in groups.values() if isinstance(each, dict)]
            if isinstance(groups, dict)
            else []
        )
        return [each for each in tables if isinstance(each, dict)]

    def _scales_something(self, name: str) -> bool:
        """Return whether a tensor in fp8 holds scales of another tensor."""
        return any(
            name.endswith(suffix) and name.removesuffix(suffix) in self._stored
            for suffix in OF_WEIGHT
        )

    def _others(self) -> list[str]:
        """Return the names of tensors that no value of a weight depends on.

        Raises:
            InputError: a zero point is not zero.
        """
        modules = {
            name[:end] for name in self._weights for end, letter in enumerate(name) if letter == "."
        }
        found = [
            name
            for name in self._stored
            if OTHERS.fullmatch(name.rpartition(".")[2]) and name.rpartition(".")[0] in modules
        ]
        for name in found:
            zero = self._stored[name]
            if name.endswith("weight_zero_point") and zero.read(full_region(zero.shape)).any():
                raise self._refusal(name, "is not zero")
        return found

    def _refusal(self, name: str, what: str, blocks: tuple[int, int] | None = None) -> InputError:
        scales = f"scales of {list(blocks)} blocks" if blocks else "scales that fit it"
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


def _without_ones(grid: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of scales without the ones that Model Optimizer puts after the last two
    dimensions."""
    if len(grid) == len(shape) + 2 and grid[-3] == grid[-1] == 1:
        return (*grid[:-4], grid[-4], grid[-2])
    return grid


def _product(
    weight: Stored, scales: Stored, grid: tuple[int, ...], sizes: tuple[int, ...], at: Region
) -> Tensor:
    """Return a region of a weight's values; each of `grid` blocks of `sizes` elements has a
    scale."""
    whole = ranges(at)
    values = torch.from_numpy(weight.read(whole)).view(weight.dtype).float()
    bits = torch.from_numpy(scales.read(full_region(scales.shape)))
    kind = torch.float8_e8m0fnu if scales.dtype == torch.uint8 else scales.dtype
    of_blocks = bits.reshape(-1).view(kind).float().view(grid)
    for dim, (rows, size) in enumerate(zip(whole, sizes)):
        of_blocks = of_blocks.index_select(dim, torch.tensor(list(rows)) // size)
    return (values * of_blocks).bfloat16().view([len(dim) for dim in at if isinstance(dim, range)])
