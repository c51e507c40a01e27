"""Frozen matrices in NF4, and grouped products with them: four bits for each number, a float32
scale for each 64 of a row.

A matrix (N, K) of numbers is stored as codes, indices into the 16 `VALUES`, in (N, K / 2) bytes,
and (N, K / 64) scales, one for each block of 64 neighbours in a row.

A byte holds two neighbours of a row, the first in its upper half. Codes and scales are bit for bit
those of bitsandbytes. A number is its code's value times the scale of its block, rounded once, from
float32. Scales may be stored in eight bits (double quantization); products need them in float32.

CPUs dequantize a block of a matrix at a time, the Triton kernel a tile; no dequantized matrix
outlives its product. Source: Dettmers et al., "QLoRA" (2023), section 3.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.errors import InputError
from moesaic.kernels import grouped_matmul
from moesaic.kernels.operator import operator
from moesaic.kernels.pick import kind_of
from moesaic.kernels.products import rows_product

BLOCK = 64
"""Neighbours of a row that share a scale."""
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The value of each code: quantiles of the normal distribution (QLoRA, appendix E)."""
GROUP = 256
"""Scales that share a scale themselves, if they are quantized too."""
SMALLEST = 1e-38
"""Blocks are divided by at least this number, so that zeros stay zeros."""
SCRATCH = 2**20
"""The most numbers that a CPU dequantizes at a time, unless a single row or block has more."""


@cache
def code_values(device: torch.device) -> Tensor:
    """Return the values of the codes, (16,) float32."""
    return torch.tensor(VALUES, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte, (256, 2) float32."""
    byte = torch.arange(256, device=device)
    codes = torch.stack([byte >> 4, byte & 15], 1)
    return code_values(device)[codes]


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize matrices.

    Args:
        weight: (..., K), K a multiple of 64.

    Returns:
        Codes, (..., K / 2) uint8, and scales, (..., K / 64) float32.

    Raises:
        InputError: K is no multiple of 64.
    """
    if weight.shape[-1] % BLOCK:
        raise InputError(
            f"NF4 needs input widths that are multiples of {BLOCK}, got {weight.shape[-1]}: "
            "leave these experts in 16 bits"
        )
    values = code_values(weight.device)
    blocks = weight.float().contiguous().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    reciprocals = 1.0 / scales.clamp(min=SMALLEST)
    scaled = (blocks * reciprocals.unsqueeze(-1)).clamp_(-1, 1)
    codes = _nearest(scaled, values).flatten(-2)
    first = codes[..., ::2]
    second = codes[..., 1::2]
    return first << 4 | second, scales


def _nearest(numbers: Tensor, values: Tensor) -> Tensor:
    """Return the index of the value nearest to each number, uint8; values are in rising order."""
    between = (values[:-1] + values[1:]) / 2
    return torch.bucketize(numbers, between, out_int32=True).to(torch.uint8)


def requantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales from which `numbers`, in float32, were dequantized, bit for bit.

    `quantize` finds them unless a block's scale is below zero, as double quantization can make it;
    such a block is quantized with its sign turned, and its scale negated. Other numbers are
    quantized as `quantize` does.
    """
    codes, scales = quantize(numbers)
    negated_codes, _ = quantize(-numbers)
    is_negated = _restores(negated_codes, -scales, numbers) & ~_restores(codes, scales, numbers)
    is_negated_byte = is_negated.repeat_interleave(BLOCK // 2, -1)  # two codes in a byte
    codes = torch.where(is_negated_byte, negated_codes, codes)
    return codes, torch.where(is_negated, -scales, scales)


def _restores(codes: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    """Return whether each block is dequantized to its numbers exactly, (..., K / 64) bool."""
    is_equal = dequantize(codes, scales, numbers.dtype) == numbers
    return is_equal.unflatten(-1, (-1, BLOCK)).all(-1)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers, (..., K), of codes, (..., K / 2), and scales, (..., K / 64)."""
    pairs = _pairs(codes.device).index_select(0, codes.reshape(-1).int())
    blocks = pairs.view(-1, BLOCK) * scales.reshape(-1, 1)
    return blocks.to(dtype).view(*codes.shape[:-1], 2 * codes.shape[-1])


@cache
def scale_values(device: torch.device) -> Tensor:
    """Return the values of scales in eight bits, (256,) float32: bitsandbytes' dynamic map
    (Dettmers 2015, section 2.2).

    There are 1, 2, 4, ... and 64 values in the decades up to 1e-6, 1e-5, ... and 1, in the middle
    of equal intervals, each with both signs, and 0 and 1.
    """
    decades = []
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2
        decades.append(middles * 10.0 ** (power - 6))
    positive = torch.cat(decades)
    zero_and_one = torch.tensor([0.0, 1.0], device="cpu")
    values = torch.cat([-positive, positive, zero_and_one]).sort().values
    return values.to(device)


@torch.no_grad()
def compress(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the scales of one matrix, as bitsandbytes' `compress_statistics` does.

    Args:
        scales: float32, of any shape.

    Returns:
        Codes, uint8 of the same shape; and (1 + groups,) float32: the mean of the scales, and of
        each 256 of them, in row-major order, the largest difference from it.
    """
    values = scale_values(scales.device)
    mean = scales.mean()
    num_scales = scales.numel()
    # padded to whole groups
    groups = F.pad((scales - mean).flatten(), (0, -num_scales % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(1)
    reciprocals = 1.0 / largest.clamp(min=SMALLEST)
    scaled = (groups * reciprocals.unsqueeze(1)).clamp_(-1, 1)
    codes = _nearest(scaled, values).flatten()[:num_scales]  # without the padding's
    return codes.view(scales.shape), torch.cat([mean.view(1), largest])


def expand(codes: Tensor, groups: Tensor) -> Tensor:
    """Return the scales of matrices, (E, ...) float32, from `compress`: codes, (E, ...), and (E,
    1 + groups)."""
    differences = scale_values(codes.device)[codes.flatten(1).int()]
    mean = groups[:, :1]
    largest = groups[:, 1:].repeat_interleave(GROUP, 1)[:, : differences.shape[1]]
    return differences.mul_(largest).add_(mean).view(codes.shape)


@operator("nf4_rows_times")
def rows_times(x: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Multiply each expert's rows by its matrix; not differentiable by itself.

    Args:
        x: (R, K) rows in expert order, or (R, N) if not `transposed`.
        codes: (E, N, K / 2) uint8.
        scales: (E, N, K / 64) float32.
        ends: (E,) int32, one past the last row of each expert.
        transposed: multiply by the transpose, as `nn.Linear` does; else by the matrix, as the
            gradient of its input.

    Returns:
        (R, N), or (R, K) if not `transposed`, in the dtype of `x`; rows from `ends[-1]` on are
        undefined.
    """
    kind = kind_of(x.device)
    if kind == "triton" and x.dtype != torch.float64:
        from moesaic.kernels.triton.nf4 import rows_times_by_triton

        return rows_times_by_triton(
            x, codes, scales, code_values(x.device), ends, transposed=transposed
        )
    if kind != "cpu":
        matrices = dequantize(codes, scales, x.dtype)
        if transposed:
            matrices = matrices.transpose(1, 2)
        return grouped_matmul.rows_times(x, matrices, ends)
    return _by_blocks(x, codes, scales, ends, transposed=transposed)


@torch.library.register_fake(rows_times.overload)
def _(x: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1] if transposed else 2 * codes.shape[2])


@register_flop_formula(torch.ops.moesaic.nf4_rows_times)
def _(x, codes, scales, ends, transposed, **_) -> int:  # type: ignore[no-untyped-def]
    """Return the FLOPs of one product of all rows, 2 R N K; the arguments are shapes."""
    num_inputs = 2 * codes[2]  # two codes in a byte
    return int(2 * x[0] * codes[1] * num_inputs)


def _by_blocks(
    x: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, *, transposed: bool
) -> Tensor:
    """Return `rows_times` on a CPU: expert by expert, each in blocks of columns of the result.

    A block has as many columns as `SCRATCH` allows, at least one, or one block of scales. It needs
    rows of the stored matrix if `transposed`, else columns of it.
    """
    height = codes.shape[1]
    width = 2 * codes.shape[2]
    if transposed:
        num_columns = height
        per_block = max(1, SCRATCH // width)
    else:
        num_columns = width
        per_block = max(1, SCRATCH // height // BLOCK) * BLOCK  # whole scales

    out = x.new_empty(len(x), num_columns)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        rows = x[start:end]
        if end == start:
            continue
        for first in range(0, num_columns, per_block):
            stop = min(first + per_block, num_columns)
            if transposed:
                part = slice(first, stop)
                matrix = dequantize(codes[expert, part], scales[expert, part], x.dtype).t()
            else:
                code_part = slice(first // 2, stop // 2)  # two codes in a byte
                scale_part = slice(first // BLOCK, stop // BLOCK)
                matrix = dequantize(
                    codes[expert, :, code_part], scales[expert, :, scale_part], x.dtype
                )
            # the rows of later experts may be overwritten, as their products come later
            rows_product(rows, matrix, out[start:end, first:stop], behind=len(x) - end)
        start = end
    return out
