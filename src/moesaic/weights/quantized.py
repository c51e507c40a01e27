"""Dequantizes the hub's quantized weights as they are read: fp8 in blocks (DeepSeek-V3), mxfp4 (gpt-oss), `four_bit.py`'s NF4.

The values are those that transformers computes on loading: an element times the scale of its block, in bfloat16. For mxfp4
that is exact; for fp8 the product is rounded once, from float32, whatever the scale's dtype. Only the region that is read is
computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.files import read_text
from moesaic.weights import four_bit
from moesaic.weights.files import Stored
from moesaic.weights.layout import Computed, Readable, Region, full_region, ranges

FP8_SCALE = "_scale_inv"
"""Suffix of the tensor with the scales of an fp8 matrix, one per block."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the tensors of an mxfp4 weight: 16 bytes for each 32 values, and the power of two that scales these."""
HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor([*HALF, *(-value for value in HALF)])
"""Value of each four-bit code (Open Compute Project, Microscaling Formats, E2M1)."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
"""Dtypes that the scales of fp8 blocks may have; e8m0 is a power of two."""
METHODS = ("fp8", "mxfp4")
"""Values of a configuration's `quant_method` whose weights can be converted."""
LOADED = (*METHODS, "bitsandbytes")
"""Values of a configuration's `quant_method` whose weights can be loaded."""


def dequantized(stored: Mapping[str, Stored], folder: Path) -> dict[str, Readable]:
    """Return a checkpoint's tensors with quantized ones replaced by their values, in bfloat16 or, of NF4, in float32.

    Args:
        stored: the stored tensors, by the hub's names.
        folder: the checkpoint's folder; its config.json gives the block size of fp8.

    Raises:
        InputError: scales are missing, or do not fit the block size or the weights.
    """
    tensors: dict[str, Readable] = dict(stored)
    sizes = block_size(folder) if any(tensor.dtype in FP8 for tensor in stored.values()) else (1, 1)
    for name, tensor in stored.items():
        if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in stored:
            weight = name.removesuffix(BLOCKS)
            scales = stored[weight + SCALES]
            if (tensor.dtype, scales.dtype, tensor.shape) != (
                torch.uint8,
                torch.uint8,
                (*scales.shape[:3], 16),
            ):
                raise InputError(
                    f"{folder}: {name} and {weight + SCALES} are not mxfp4 of one shape: fetch them again"
                )
            experts, rows, groups = scales.shape
            make = partial(_from_mxfp4, tensor, scales)
            tensors[weight] = Computed(torch.bfloat16, (experts, 32 * groups, rows), make)
            del tensors[name], tensors[weight + SCALES]
        elif tensor.dtype in FP8:
            found = stored.get(name + FP8_SCALE)
            fits = found is not None and found.shape == tuple(
                -(-n // size) for n, size in zip(tensor.shape, sizes)
            )
            if found is None or not fits or len(tensor.shape) != 2 or found.dtype not in FP8_SCALES:
                raise InputError(
                    f"{folder}: {name} is fp8 without scales of {list(sizes)} blocks in {_names(FP8_SCALES)}: "
                    "correct quantization_config.weight_block_size, or convert the checkpoint that it was quantized from"
                )
            tensors[name] = Computed(
                torch.bfloat16, tensor.shape, partial(_from_fp8, tensor, found, sizes)
            )
            del tensors[name + FP8_SCALE]
        elif name.endswith(four_bit.STATE):
            weight = name.removesuffix(four_bit.STATE)
            tensors[weight] = four_bit.of_linear(stored, weight, folder)
            for part in four_bit.PARTS:
                tensors.pop(weight + part, None)
        elif (
            tensor.dtype == torch.uint8
            and (absmax := name.removesuffix("_proj") + "_absmax") in stored
        ):
            hidden = _table(folder / "config.json").get("hidden_size")
            width = hidden if type(hidden) is int else 0
            tensors[name] = four_bit.of_experts(tensor, stored[absmax], name, width, folder)
            del tensors[absmax]
    return tensors


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def quantization(path: Path) -> dict[str, Any]:
    """Return `quantization_config` of a config.json; empty if there is none.

    Raises:
        InputError: it is no table, or the file is damaged.
    """
    table = _table(path).get("quantization_config")
    if table is None or isinstance(table, dict):
        return table or {}
    raise InputError(f"{path}: quantization_config is not a table of settings: restore the file")


def _table(path: Path) -> dict[str, Any]:
    """Return the entries of a config.json; empty if there is none, and one that is no configuration if it is damaged."""
    try:
        table = json.loads(read_text(path)) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        table = None
    return table if isinstance(table, dict) else {"quantization_config": "damaged"}


def block_size(folder: Path) -> tuple[int, int]:
    """Return (rows, columns) of the fp8 blocks that share a scale."""
    path = folder / "config.json"
    sizes = quantization(path).get("weight_block_size") or [128, 128]
    if (
        isinstance(sizes, list)
        and len(sizes) == 2
        and all(type(size) is int and size > 0 for size in sizes)
    ):
        return sizes[0], sizes[1]
    raise InputError(
        f"{path}: quantization_config.weight_block_size is not two numbers above 0, such as [128, 128]: restore the file"
    )


def _sizes(at: Region) -> list[int]:
    return [len(dim) for dim in at if isinstance(dim, range)]


def _from_fp8(tensor: Stored, scales: Stored, sizes: tuple[int, ...], at: Region) -> Tensor:
    whole = ranges(at)
    values = torch.from_numpy(tensor.read(whole)).view(tensor.dtype).float()
    of_blocks = torch.from_numpy(scales.read(full_region(scales.shape))).view(scales.dtype).float()
    rows, columns = (torch.tensor(list(dim)) // size for dim, size in zip(whole, sizes))
    return (values * of_blocks[rows][:, columns]).bfloat16().view(_sizes(at))


def _from_mxfp4(blocks: Stored, scales: Stored, at: Region) -> Tensor:
    experts, columns, rows = ranges(at)
    groups = range(columns[0] // 32, columns[-1] // 32 + 1)
    packed = torch.from_numpy(blocks.read((experts, rows, groups, range(16)))).view(torch.uint8)
    powers = torch.from_numpy(scales.read((experts, rows, groups))).view(torch.uint8).int() - 127
    pairs = torch.stack([FP4[(packed & 15).long()], FP4[(packed >> 4).long()]], -1)
    values = torch.ldexp(pairs.flatten(-2), powers.unsqueeze(-1)).bfloat16().flatten(-2)
    picked = values[..., torch.tensor(list(columns)) - 32 * groups[0]]
    return picked.transpose(1, 2).reshape(_sizes(at))
