"""The products of one expert's rows on a CPU, by the library that multiplies fastest there.

torch multiplies 16-bit matrices by oneDNN and float32 by MKL, which runs its code for AVX-512 on Intel's processors alone. On
AMD's from Zen 5 on, whose units are 512 bits wide, oneDNN takes half of MKL's time for float32 (docs/kernels.md). torch calls it
for float32 in one operator, which returns a tensor of its own: products that are large enough for the copy go there.

oneDNN compiles code for every shape, and keeps the last thousand. Rows of an expert are another number in each step, so it gets
the most that is a multiple of `STEP`, and MKL the rest.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

STEP = 16
"""Of rows that oneDNN gets."""
FEWEST = 2**22
"""Multiplications from which the copy is worth it; measured, docs/kernels.md."""
ZEN_5 = 26
"""The family of AMD's processors from which a unit multiplies 512 bits at once; Zen 4 takes two turns, as MKL does."""


def rows_product(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Write `rows @ matrix`.

    Args:
        rows: (R, K), each row contiguous.
        matrix: (K, N), contiguous or transposed.
        out: (R, N), written.
    """
    cut = _cut(rows, len(rows), matrix.numel())
    if not cut:
        torch.mm(rows, matrix, out=out)
        return
    out[:cut].copy_(_by_onednn(rows[:cut], matrix.t()))
    if cut < len(rows):
        torch.mm(rows[cut:], matrix, out=out[cut:])


def sum_product(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write `a.T @ b`, a sum over rows, or add it.

    Args:
        a: (R, M), each row contiguous.
        b: (R, N), each row contiguous.
        out: (M, N), written.
        adds: whether to add to what `out` holds.
    """
    cut = _cut(a, len(a), a.shape[1] * b.shape[1])
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
    if cut < len(a):
        out.addmm_(a[cut:].t(), b[cut:])


def _cut(like: Tensor, rows: int, per_row: int) -> int:
    """Return how many rows go to oneDNN."""
    if like.dtype != torch.float32 or rows * per_row < FEWEST or not _suits(like.device.type):
        return 0
    return rows - rows % STEP


def _suits(device: str) -> bool:
    return device == "cpu" and torch.backends.mkldnn.enabled and onednn_is_faster()  # type: ignore[attr-defined]


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
