"""Matrix products of rows on a CPU, for the experts and the router, by the fastest library for the processor.

torch uses oneDNN for 16-bit products and MKL for float32. MKL uses AVX-512 on Intel's processors only. On AMD's, from Zen 5
(full 512-bit units) on, oneDNN takes half of MKL's time for float32 (docs/kernels.md). torch exposes oneDNN's float32 products
in one operator only, which allocates its result. Products that are large enough to make up for the copy use that operator.

oneDNN compiles code for every shape and caches the last thousand shapes. An expert's number of rows changes in every step, so
oneDNN gets the largest multiple of `STEP` rows, and MKL the remaining rows.

float16 is multiplied as float32 and rounded once: torch's own float16 products are right, but take 3 to 126 times as long on
processors without float16 instructions, which are most (docs/kernels.md).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

STEP = 16
"""oneDNN gets a multiple of this number of rows."""
FEWEST = 2**22
"""The fewest multiplications for which oneDNN is worth the copy of its result; measured, see docs/kernels.md."""
NARROWEST = 32
"""The least height and width of a matrix for oneDNN."""
ZEN_5 = 26
"""The family number of AMD's Zen 5, the first with 512-bit multiplication units; Zen 4 takes two passes, as MKL does."""


def rows_product(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Write `rows @ matrix`.

    Args:
        rows: (R, K), each row contiguous.
        matrix: (K, N), with contiguous rows or contiguous columns.
        out: (R, N), written.
    """
    if _is_faster_as_float32(rows):
        out.copy_(rows.float() @ matrix.float())
        return
    num_onednn = _num_onednn_rows(rows, matrix.shape)
    if not num_onednn:
        torch.mm(rows, matrix, out=out)
        return
    out[:num_onednn].copy_(_by_onednn(rows[:num_onednn], matrix.t()))
    if num_onednn < rows.shape[0]:
        torch.mm(rows[num_onednn:], matrix, out=out[num_onednn:])


def sum_product(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write `a.T @ b`, a sum over rows, to `out` or add it to `out`.

    Args:
        a: (R, M), each row contiguous.
        b: (R, N), each row contiguous.
        out: (M, N), written.
        adds: add to `out` instead of overwriting it.
    """
    if _is_faster_as_float32(a):
        product = a.t().float() @ b.float()
        out.copy_(product.add_(out) if adds else product)
        return
    num_onednn = _num_onednn_rows(a, out.shape)
    if not num_onednn:
        if adds:
            out.addmm_(a.t(), b)
        else:
            torch.mm(a.t(), b, out=out)
        return
    product = _by_onednn(a[:num_onednn].t(), b[:num_onednn].t())
    if adds:
        out.add_(product)
    else:
        out.copy_(product)
    if num_onednn < a.shape[0]:
        out.addmm_(a[num_onednn:].t(), b[num_onednn:])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`; differentiable only once if oneDNN computes it, else the result of `F.linear`.

    Args:
        x: (R, K).
        weight: (N, K).
        bias: (N,), or None.
    """
    is_plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    if not is_plain or not x.is_contiguous() or not _num_onednn_rows(x, weight.shape):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight)
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0])
        rows_product(x, weight.t(), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad, d_x, d_weight = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(x)
            rows_product(grad, weight, d_x)
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            sum_product(grad, x, d_weight)
        return d_x, d_weight


def _is_faster_as_float32(rows: Tensor) -> bool:
    """Return whether the rows are multiplied faster as float32: float16 rows on a CPU."""
    return rows.dtype == torch.float16 and rows.device.type == "cpu"


def _num_onednn_rows(rows: Tensor, matrix: torch.Size) -> int:
    """Return how many of the rows oneDNN gets in a product with a matrix of this shape; 0 if oneDNN is not used."""
    is_large = rows.dtype == torch.float32 and rows.shape[0] * matrix.numel() >= FEWEST
    is_used = rows.device.type == "cpu" and torch.backends.mkldnn.enabled
    if not is_large or min(matrix) < NARROWEST or not is_used or not onednn_is_faster():
        return 0
    return rows.shape[0] - rows.shape[0] % STEP


def _by_onednn(rows: Tensor, transposed: Tensor) -> Tensor:
    """Return `rows @ transposed.T`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, transposed, None, "none", [], "")
    return product


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 faster than torch's default, MKL, on this machine."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512" or not _is_zen_5(Path("/proc/cpuinfo")):
        return False
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        return torch.equal(_by_onednn(a, b), a @ b.t())
    except (AttributeError, RuntimeError, TypeError):  # a private operator of torch, which may change
        return False


def _is_zen_5(cpuinfo: Path) -> bool:
    """Return whether a file in the format of /proc/cpuinfo describes an AMD processor of Zen 5 or later."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").split("\n\n", maxsplit=1)[0].splitlines()
    except OSError:
        return False
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    family = fields.get("cpu family", "")
    return fields.get("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= ZEN_5
