"""Reads weights that bitsandbytes has in NF4: of linear layers, and of stacked experts
(`Experts4bit`).

NF4 has a code of four bits for each number, and a scale for each block of `nf4.BLOCK` = 64
numbers. Scales may be quantized too ("nested"): to eight bits, with a scale for each group of them.
The numbers become float32, from which `nf4.requantize` gets the same bits again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels import nf4
from moesaic.weights.layout import Computed, Region, full_region, ranges
from moesaic.weights.tensor_files import Stored

STATE = ".quant_state.bitsandbytes__nf4"
"""Suffix of the tensor with the sizes of a linear layer's weight, as JSON."""
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE)
"""Suffixes of all tensors that belong to such a weight."""


@dataclass(frozen=True, kw_only=True)
class FourBit:
    """A weight in NF4, block after block in row-major order."""

    shape: tuple[int, ...]
    codes: Stored
    """(numbers / 2,) uint8."""
    scales: Stored
    """(numbers / 64,): float32, or uint8 that stand for `values`."""
    values: Stored | None = None
    """(256,) float32; None if scales are not quantized."""
    groups: Stored | None = None
    """(groups,) float32: the scale of each group of scales."""
    size: int = nf4.GROUP
    """Scales of a group."""
    offset: float = 0.0
    """The mean that was subtracted from the scales."""

    def fits(self) -> bool:
        """Return whether the tensors have the sizes and dtypes of such a weight."""
        blocks = self.scales.shape[0]
        scale_dtype = torch.float32
        if self.values is not None and self.groups is not None:  # the scales are quantized too
            scale_dtype = torch.uint8
            num_groups = -(-blocks // self.size)
            if self.values.shape != (256,) or self.groups.shape != (num_groups,):
                return False
        if self.codes.dtype != torch.uint8 or self.scales.dtype != scale_dtype:
            return False
        num_values = math.prod(self.shape)
        return (
            num_values == 2 * self.codes.shape[0]  # two codes a byte
            and num_values == nf4.BLOCK * blocks
            and min(self.shape) > 0
        )

    def read(self, at: Region) -> Tensor:
        """Return the numbers in a region, float32."""
        # Blocks run on over rows: whole blocks are read, then cut to the rows from first to last.
        rows, *others = ranges(at)
        row_size = math.prod(self.shape[1:])
        start = rows[0] * row_size
        end = (rows[-1] + 1) * row_size
        first_block = start // nf4.BLOCK
        end_block = -(-end // nf4.BLOCK)

        stored_scales = self.scales.read((range(first_block, end_block),))
        scales = torch.from_numpy(stored_scales).view(self.scales.dtype)
        if self.values is not None and self.groups is not None:
            # each scale is a byte: the number of one of `values`, which its group scales
            group_of_scale = torch.arange(first_block, end_block) // self.size
            group_scales = _whole(self.groups)[group_of_scale]
            scales = _whole(self.values)[scales.int()] * group_scales + self.offset

        block_bytes = nf4.BLOCK // 2  # two codes a byte
        code_bytes = range(first_block * block_bytes, end_block * block_bytes)
        codes = torch.from_numpy(self.codes.read((code_bytes,))).view(torch.uint8)

        numbers = nf4.dequantize(codes, scales, torch.float32)
        skipped = start - first_block * nf4.BLOCK
        of_rows = numbers[skipped : skipped + end - start].view(-1, *self.shape[1:])
        within_row = tuple(slice(dim.start, dim.stop, dim.step) for dim in others)
        picked = of_rows[(slice(None, None, rows.step), *within_row)]
        return picked.reshape([len(dim) for dim in at if isinstance(dim, range)])


def of_linear(stored: Mapping[str, Stored], weight: str, folder: Path) -> Computed:
    """Return a linear layer's weight by its name; InputError if its tensors do not belong
    together."""
    try:
        sizes = json.loads(_whole(stored[weight + STATE]).numpy().tobytes())
        is_nested = weight + ".nested_absmax" in stored
        found = FourBit(
            shape=tuple(sizes["shape"]),
            codes=_flat(stored[weight]),
            scales=_flat(stored[weight + ".absmax"]),
            values=stored.get(weight + ".nested_quant_map"),
            groups=stored.get(weight + ".nested_absmax"),
            size=int(sizes.get("nested_blocksize", nf4.GROUP)),
            offset=float(sizes["nested_offset"]) if is_nested else 0.0,
        )
        is_nf4 = sizes["quant_type"] == "nf4" and sizes["blocksize"] == nf4.BLOCK
        are_numbers = math.isfinite(found.offset) and all(type(size) is int for size in found.shape)
        if is_nf4 and are_numbers and found.fits():
            return Computed(torch.float32, found.shape, found.read)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError):
        pass  # damaged entries are refused as those that do not belong together
    raise _refusal(weight, folder)


def of_experts(codes: Stored, scales: Stored, name: str, hidden: int, folder: Path) -> Computed:
    """Return a weight of stacked experts of `Experts4bit`, which stores it flat; InputError if its
    sizes do not fit.

    Args:
        codes: (experts, bytes), two codes a byte.
        hidden: width of a token; 0 if it is unknown, which is refused.
    """
    experts = codes.shape[0]
    numbers_per_expert = 2 * math.prod(codes.shape[1:])
    other = numbers_per_expert // max(hidden, 1)  # the matrix's other dimension
    # Matrices are (out, in), and the down projection's output is a token.
    shape = (experts, hidden, other) if name.endswith("down_proj") else (experts, other, hidden)
    found = FourBit(shape=shape, codes=_flat(codes), scales=_flat(scales))
    if not found.fits():
        raise _refusal(name, folder)
    return Computed(torch.float32, shape, found.read)


def _flat(stored: Stored) -> Stored:
    """Return a tensor of a safetensors file as one row."""
    (part,) = stored.parts
    size = math.prod(stored.shape)
    return replace(stored, shape=(size,), parts=(replace(part, offsets=(0,), sizes=(size,)),))


def _whole(stored: Stored) -> Tensor:
    """Return all elements of a tensor."""
    return torch.from_numpy(stored.read(full_region(stored.shape))).view(stored.dtype)


def _refusal(name: str, folder: Path) -> InputError:
    """Return the error for a weight whose tensors do not belong together."""
    return InputError(
        f"{folder}: {name} is not in NF4 with blocks of {nf4.BLOCK}, as bitsandbytes saves it: "
        "fetch it again, or name the checkpoint that it was quantized from"
    )
