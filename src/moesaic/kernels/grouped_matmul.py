"""Grouped matmul: each expert's rows times that expert's matrix, in one call.

Forward is `y = x @ w[e].T`; backward is `dx = dy @ w[e]` and `dw[e] = dy.T @ x`, all three grouped.
x and w are saved; the weights are never copied. There are three implementations, in order of
preference:

- `torch.nn.functional.grouped_mm`, if row strides are multiples of 16 bytes. On a GPU only for
  bfloat16 on Hopper and Blackwell of data centres, since elsewhere it loops over experts on the
  host; on a CPU only for float32, since others take up to 3 times as long as a loop
  (docs/kernels.md), and 100 times without instructions for them (docs/log.md).
- the Triton kernels, on GPUs that run them.
- a loop over experts, for the rest. On a GPU the host waits for the counts, and a warning says so.

The two products are custom ops with fake implementations, which compile without a graph break.
Torch's own shape function for `grouped_mm` rejects float32, which its CPU kernel supports, and the
loop over experts reads the row counts on the host.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.kernels.operator import operator
from moesaic.kernels.pick import kind_of, runs_grouped_mm, triton_products
from moesaic.kernels.products import rows_product, sum_product

SLOW = (
    "moesaic: experts in {} on this {} device run one after another, and the host waits for the "
    "device in each product: only NVIDIA GPUs from Ampere on, with Triton, run them at once"
)
"""The warning of a loop over experts on a device."""


def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply expert-ordered rows by their expert's matrix, differentiable in `x` and `w`.

    Args:
        x: (R, K) rows in expert order.
        w: (E, N, K), each matrix as `nn.Linear` stores it.
        ends: (E,) int32, one past the last row of each expert; `ends[-1] == R`.

    Returns:
        (R, N) in the dtype of `x`.
    """
    y: Tensor = _GroupedMatmul.apply(x, w, ends)
    return y


@operator("rows_times", refuses_gradient=True)
def rows_times(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: (R, K) x (E, K, N) -> (R, N); not differentiable
    by itself."""
    if len(x) and _is_supported(x, w) and _is_aligned(w):
        return F.grouped_mm(_packed(x), w, offs=ends)
    if _has_kernel(x):
        rows: Tensor = triton_products().rows_times_any(x, w, ends)
        return rows
    out = x.new_empty(len(x), w.shape[2])
    start = 0
    for expert, end in enumerate(_on_host(ends, x)):
        # the rows of later experts may be overwritten, as their products come later
        rows_product(x[start:end], w[expert], out[start:end], behind=len(x) - end)
        start = end
    return out


@torch.library.register_fake(rows_times.overload)
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@register_flop_formula(torch.ops.moesaic.rows_times)
def _(x, w, ends, **_) -> int:  # type: ignore[no-untyped-def]
    """Return the FLOPs of one product of all rows; the arguments are shapes."""
    return 2 * x[0] * x[1] * w[2]


@operator("outer_products", refuses_gradient=True)
def outer_products(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's `dy.T @ x` over its own rows: (R, N), (R, K) -> (E, N, K); zeros for an
    expert without rows."""
    if len(x) and _is_supported(dy, x):
        gradient: Tensor = F.grouped_mm(_packed(dy).t(), _packed(x), offs=ends)
        if dy.device.type != "cpu":
            gradient.masked_fill_(has_no_rows(ends), 0)
        return gradient
    if _has_kernel(x):
        products: Tensor = triton_products().outer_products_any(dy, x, ends)
        return products
    out = x.new_empty(len(ends), dy.shape[1], x.shape[1])
    start = 0
    for expert, end in enumerate(_on_host(ends, x)):
        sum_product(dy[start:end], x[start:end], out[expert])
        start = end
    return out


@torch.library.register_fake(outer_products.overload)
def _(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])


@register_flop_formula(torch.ops.moesaic.outer_products)
def _(dy, x, ends, **_) -> int:  # type: ignore[no-untyped-def]
    """Return the FLOPs of one product over all rows; the arguments are shapes."""
    return 2 * x[0] * x[1] * dy[1]


def _is_supported(*operands: Tensor) -> bool:
    """Return whether `F.grouped_mm` is used for operands of this dtype, device and row width."""
    dtype = operands[0].dtype
    if not runs_grouped_mm(operands[0].device, dtype):
        return False
    per_16_bytes = 16 // dtype.itemsize
    sizes = [size for operand in operands for size in operand.shape[1:]]
    return all(size % per_16_bytes == 0 for size in sizes)


def _on_host(ends: Tensor, rows: Tensor) -> list[int]:
    """Return the ends of the experts' rows for a loop over experts, and warn where that is slow;
    not of float64, for which no GPU has anything faster."""
    if rows.device.type != "cpu" and rows.dtype != torch.float64:
        warnings.warn(SLOW.format(rows.dtype, rows.device.type), stacklevel=2)
    stops: list[int] = ends.tolist()
    return stops


def _has_kernel(rows: Tensor) -> bool:
    """Return whether the Triton kernels multiply rows of this dtype on this device."""
    return rows.dtype != torch.float64 and kind_of(rows.device) == "triton"


def has_no_rows(ends: Tensor) -> Tensor:
    """Return which experts have no rows, (E, 1, 1) bool. On Blackwell `F.grouped_mm` leaves their
    products uninitialised."""
    return (ends.diff(prepend=ends.new_zeros(1)) == 0).view(-1, 1, 1)


def _is_aligned(w: Tensor) -> bool:
    """Return whether the address and the strides of matrices are multiples of 16 bytes.

    Views of gathered weights, cut out of wider rows, may not be aligned.
    """
    per_16_bytes = 16 // w.dtype.itemsize
    if w.storage_offset() % per_16_bytes:  # storages themselves are aligned
        return False
    return all(stride == 1 or stride % per_16_bytes == 0 for stride in w.stride())


def _packed(rows: Tensor) -> Tensor:
    """Return the rows with the strides that `F.grouped_mm` requires: one row after the other in
    memory.

    `contiguous()` is not enough: it keeps the stride of a single row, which is 0 after an `expand`.
    """
    if rows.stride() == (rows.shape[1], 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        return rows_times(x, w.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, ends = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = rows_times(grad, w, ends)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = outer_products(grad, x, ends)
        return dx, dw, None
