"""Products of rows on a CPU, an expert's and the router's, by the library that multiplies fastest there.

torch multiplies 16-bit matrices by oneDNN and float32 by MKL, which runs its code for AVX-512 on Intel's processors alone.
On AMD's from Zen 5 on, whose units are 512 bits wide, oneDNN takes half of MKL's time for float32 (docs/kernels.md). torch
calls it for float32 in one operator, which returns a tensor of its own: products that are worth the copy go there.

oneDNN compiles code for every shape, and keeps the last thousand. Rows of an expert are another number in each step, so it gets
the most that is a multiple of `STEP`, and MKL the rest.

float16 is multiplied as float32 and rounded once. torch's own products of float16 take 4 to 13 times as long on a processor
without instructions for it (docs/kernels.md), and come from another library on one that has them.
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
"""Of rows that oneDNN gets."""
FEWEST = 2**22
"""Multiplications from which the copy is worth it; measured, docs/kernels.md."""
NARROWEST = 32
"""The least width that a matrix has to have on both sides."""
ZEN_5 = 26
"""The family of AMD's processors from which a unit multiplies 512 bits at once; Zen 4 takes two turns, as MKL does."""


def rows_product(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Write `rows @ matrix`.

    Args:
        rows: (R, K), each row contiguous.
        matrix: (K, N), its rows or its columns contiguous each.
        out: (R, N), written.
    """
    if _widens(rows):
        out.copy_(rows.float() @ matrix.float())
        return
    cut = _cut(rows, matrix.shape)
    if not cut:
        torch.mm(rows, matrix, out=out)
        return
    out[:cut].copy_(_by_onednn(rows[:cut], matrix.t()))
    if cut < rows.shape[0]:
        torch.mm(rows[cut:], matrix, out=out[cut:])


def sum_product(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write `a.T @ b`, a sum over rows, or add it.

    Args:
        a: (R, M), each row contiguous.
        b: (R, N), each row contiguous.
        out: (M, N), written.
        adds: whether to add to what `out` holds.
    """
    if _widens(a):
        found = a.t().float() @ b.float()
        out.copy_(found.add_(out) if adds else found)
        return
    cut = _cut(a, out.shape)
    if not cut:
        if adds:
            out.addmm_(a.t(), b)
        else:
            torch.mm(a.t(), b, out=out)
        return
    found = _by_onednn(a[:cut].t(), b[:cut].t())
    if adds:
        out.add_(found)
    else:
        out.copy_(found)
    if cut < a.shape[0]:
        out.addmm_(a[cut:].t(), b[cut:])


def vector_product(rows: Tensor, vector: Tensor) -> Tensor:
    """Return `rows @ vector`, (R,), of rows (R, K) and a vector (K,)."""
    return (rows.float() @ vector.float()).to(rows.dtype) if _widens(rows) else torch.mv(rows, vector)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, differentiable once; as `F.linear` wherever oneDNN has nothing to gain.

    Args:
        x: (R, K).
        weight: (N, K).
        bias: (N,), or None for none.
    """
    is_plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    if not is_plain or not x.is_contiguous() or not _cut(x, weight.shape):
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


def _widens(rows: Tensor) -> bool:
    """Whether the rows are multiplied as float32: float16 on a CPU."""
    return rows.dtype == torch.float16 and rows.device.type == "cpu"


def _cut(rows: Tensor, matrix: torch.Size) -> int:
    """Return how many of the rows go to oneDNN, each to be multiplied by as many numbers as a matrix has."""
    is_large = rows.dtype == torch.float32 and rows.shape[0] * matrix.numel() >= FEWEST
    if not is_large or min(matrix) < NARROWEST or not _suits(rows.device.type):
        return 0
    return rows.shape[0] - rows.shape[0] % STEP


def _suits(device: str) -> bool:
    return device == "cpu" and bool(torch.backends.mkldnn.enabled) and onednn_is_faster()


def _by_onednn(rows: Tensor, transposed: Tensor) -> Tensor:
    """Return `rows @ transposed.T`."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, transposed, None, "none", [], "")
    return found


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 faster than what torch takes for it, on this machine."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512" or not _is_zen_5(Path("/proc/cpuinfo")):
        return False
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        return torch.equal(_by_onednn(a, b), a @ b.t())
    except (AttributeError, RuntimeError, TypeError):  # an operator that torch keeps for itself, and may change
        return False


def _is_zen_5(described: Path) -> bool:
    """Whether a description of the processor, as Linux has it, is of AMD's Zen 5 or a later one."""
    try:
        lines = described.read_text(encoding="utf-8").split("\n\n", maxsplit=1)[0].splitlines()
    except OSError:
        return False
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    family = said.get("cpu family", "")
    return said.get("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= ZEN_5
