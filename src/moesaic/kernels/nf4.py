"""Frozen matrices in NF4, and grouped products with them: four bits for each number, a float32
scale for each 64 of a row.

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
    return code_values(device)[torch.stack([byte >> 4, byte & 15], 1)]


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
    scaled = (blocks * (1.0 / scales.clamp(min=SMALLEST)).unsqueeze(-1)).clamp_(-1, 1)
    codes = (
        torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True)
        .to(torch.uint8)
        .flatten(-2)
    )
    return codes[..., ::2] << 4 | codes[..., 1::2], scales


def requantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales from which `numbers`, in float32, were dequantized, bit for bit.

    `quantize` finds them unless a block's scale is below zero, as double quantization can make it;
    such a block is quantized with its sign turned, and its scale negated. Other numbers are
    quantized as `quantize` does.
    """
    codes, scales = quantize(numbers)
    is_right = dequantize(codes, scales, numbers.dtype) == numbers
    mirrored = quantize(-numbers)[0]
    turned = (
        (dequantize(mirrored, -scales, numbers.dtype) == numbers).unflatten(-1, (-1, BLOCK)).all(-1)
    )
    turned &= ~is_right.unflatten(-1, (-1, BLOCK)).all(-1)
    codes = torch.where(turned.repeat_interleave(BLOCK // 2, -1), mirrored, codes)
    return codes, torch.where(turned, -scales, scales)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers, (..., K), of codes, (..., K / 2), and scales, (..., K / 64)."""
    pairs = _pairs(codes.device).index_select(0, codes.reshape(-1).int())
    return (
        (pairs.view(-1, BLOCK) * scales.reshape(-1, 1))
        .to(dtype)
        .view(*codes.shape[:-1], 2 * codes.shape[-1])
    )


@cache
def scale_values(device: torch.device) -> Tensor:
    """Return the values of scales in eight bits, (256,) float32: bitsandbytes' dynamic map
    (Dettmers 2015, section 2.2)."""
    edges = (
        torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        for power in range(7)
    )
    means = torch.cat(
        [(each[:-1] + each[1:]) / 2 * 10.0 ** (power - 6) for power, each in enumerate(edges)]
    )
    ends = torch.tensor([0.0, 1.0], device="cpu")
    values = torch.cat([-means, means, ends]).sort().values
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
    groups = F.pad((scales - mean).flatten(), (0, -scales.numel() % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(1)
    scaled = (groups * (1.0 / largest.clamp(min=SMALLEST)).unsqueeze(1)).clamp_(-1, 1)
    between = (values[:-1] + values[1:]) / 2
    codes = torch.bucketize(scaled, between, out_int32=True).to(torch.uint8)
    own_codes = codes.flatten()[: scales.numel()]
    return own_codes.view(scales.shape), torch.cat([mean.view(1), largest])


def expand(codes: Tensor, groups: Tensor) -> Tensor:
    """Return the scales of matrices, (E, ...) float32, from `compress`: codes, (E, ...), and (E,
    1 + groups)."""
    found = scale_values(codes.device)[codes.flatten(1).int()]
    of_each = groups[:, 1:].repeat_interleave(GROUP, 1)[:, : found.shape[1]]
    return found.mul_(of_each).add_(groups[:, :1]).view(codes.shape)


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
        return grouped_matmul.rows_times(
            x, matrices.transpose(1, 2) if transposed else matrices, ends
        )
    return _by_blocks(x, codes, scales, ends, transposed=transposed)


@torch.library.register_fake(rows_times.overload)
def _(x: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1] if transposed else 2 * codes.shape[2])


@register_flop_formula(torch.ops.moesaic.nf4_rows_times)
def _(x, codes, scales, ends, transposed, **_) -> int:  # type: ignore[no-untyped-def]
    """Return the FLOPs of one product of all rows; the arguments are shapes."""
    return int(2 * x[0] * codes[1] * 2 * codes[2])


def _by_blocks(
    x: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, *, transposed: bool
) -> Tensor:
    """Return `rows_times` on a CPU: expert by expert, each in blocks of columns of the result."""
    height = codes.shape[1]
    width = 2 * codes.shape[2]
    out = x.new_empty(len(x), height if transposed else width)
    columns = max(1, SCRATCH // width) if transposed else max(1, SCRATCH // height // BLOCK) * BLOCK
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            for first in range(0, out.shape[1], columns):
                last = min(first + columns, out.shape[1])
                if transposed:
                    matrix = dequantize(
                        codes[expert, first:last], scales[expert, first:last], x.dtype
                    ).t()
                else:
                    of_codes = slice(first // 2, last // 2)
                    of_scales = slice(first // BLOCK, last // BLOCK)
                    matrix = dequantize(
                        codes[expert, :, of_codes], scales[expert, :, of_scales], x.dtype
                    )
                rows_product(x[start:end], matrix, out[start:end, first:last], len(x) - end)
        start = end
    return out
