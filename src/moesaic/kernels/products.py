"""Matrix products of an expert's rows on a CPU, by the fastest library for the processor.

torch uses oneDNN for bfloat16 and MKL for float32. MKL uses AVX-512 on Intel's processors only. On
AMD's, from Zen 5 (full 512-bit units) on, oneDNN takes half of MKL's time for float32
(docs/kernels.md). torch exposes oneDNN's float32 products in one operator only, which allocates its
result. Products that are large enough to make up for the copy use that operator.

oneDNN compiles code for every shape and caches the last thousand shapes. An expert's number of rows
changes in every step, so oneDNN gets numbers of rows that come again: of float32 rows the largest
multiple of `STEP`, while MKL multiplies the others, and of bfloat16 rows all, with zeros behind
them.

oneDNN has no fast code for a float32 matrix whose rows lie apart in memory, such as one of the
three matrices that travel side by side: its reference code takes 2,000 times as long
(docs/kernels.md). It gets a packed copy of such a matrix if the copy is short beside the product;
otherwise MKL multiplies, which takes any strides.

float16 is multiplied as float32 and rounded once, and so is bfloat16 in small products and on
processors without instructions for it: torch's own products take up to 126 (float16) and 14 times
as long (docs/log.md).

Copies pay from `FEWEST` multiplications on. Small are products of fewer, with a matrix of at most
`WIDEST` numbers.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from moesaic.program.expert_sizes import FEWEST, STEP, WIDEST, Converts, missing_rows

SHORT = frozenset((torch.bfloat16, torch.float16))
NARROWEST = 32
"""The least height and width of a matrix for oneDNN."""
FEWEST_TO_COPY = 64
"""The fewest rows of a result for which a copy of the matrix pays: it takes MKL's time for 20 to 30
rows (docs/kernels.md)."""
ZEN_5 = 26
"""The family number of AMD's Zen 5, the first with 512-bit multiplication units; Zen 4 takes two
passes, as MKL does."""


def rows_product(rows: Tensor, matrix: Tensor, out: Tensor, behind: int = 0) -> None:
    """Write `rows @ matrix`.

    Args:
        rows: (R, K), each row contiguous.
        matrix: (K, N), with contiguous rows or contiguous columns.
        out: (R, N), written.
        behind: rows behind both `rows` and `out` in memory that may be read and overwritten,
            because their turn comes later.
    """
    num_rows = rows.shape[0]
    is_short = rows.dtype in SHORT and rows.is_cpu
    if is_short and _is_faster_as_float32(rows.dtype, num_rows, matrix.numel()):
        out.copy_(product_in_dtype(rows.float(), matrix.float()))
        return
    if is_short:
        _short_product(rows, matrix, out, behind)
        return
    num_onednn = _num_onednn_rows(rows, matrix.shape, second=matrix, height=num_rows)
    if not num_onednn:
        torch.mm(rows, matrix, out=out)
        return
    out[:num_onednn].copy_(product_by_onednn(rows[:num_onednn], matrix.t()))
    if num_onednn < num_rows:  # the last rows, fewer than `STEP`
        torch.mm(rows[num_onednn:], matrix, out=out[num_onednn:])


def _short_product(rows: Tensor, matrix: Tensor, out: Tensor, behind: int) -> None:
    """Write `rows @ matrix` of 16-bit rows, with a number of rows that comes again: more than
    there are if need be."""
    num_rows = rows.shape[0]
    missing = missing_rows(num_rows)
    if missing > behind:
        out.copy_(product_in_dtype(_padded(rows, missing), matrix)[:num_rows])
        return
    if missing:
        # the same memory, extended by the rows behind, which are read and written too
        rows = rows.as_strided((num_rows + missing, rows.shape[1]), rows.stride())
        out = out.as_strided((num_rows + missing, out.shape[1]), out.stride())
    torch.mm(rows, matrix, out=out)


def sum_product(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write `a.T @ b`, a sum over rows, to `out` or add it to `out`.

    Args:
        a: (R, M), each row contiguous.
        b: (R, N), each row contiguous.
        out: (M, N), written.
        adds: add to `out` instead of overwriting it.
    """
    is_short = a.dtype in SHORT and a.is_cpu
    num_rows = a.shape[0]
    if is_short and _is_faster_as_float32(a.dtype, num_rows, out.numel()):
        product = product_in_dtype(a.t().float(), b.float())
        out.copy_(product.add_(out) if adds else product)
        return

    num_onednn = _num_onednn_rows(a, out.shape, second=b, height=a.shape[1])
    if num_onednn:
        product = product_by_onednn(a[:num_onednn].t(), b[:num_onednn].t())
        if adds:
            out.add_(product)
        else:
            out.copy_(product)
        if num_onednn < num_rows:  # the last rows, fewer than `STEP`
            out.addmm_(a[num_onednn:].t(), b[num_onednn:])
        return

    missing = missing_rows(num_rows) if is_short else 0
    if missing:
        # rows of zeros add nothing
        a = _padded(a, missing)
        b = _padded(b, missing)
    out.addmm_(a.t(), b, beta=int(adds))  # beta: the factor of what `out` has


def converts(dtype: torch.dtype) -> Converts:
    """Return what products of a dtype copy on this processor, for the memory of a call: 16-bit
    operands to float32, of small products or of all, or float32 operands for oneDNN ("packed")."""
    if dtype in SHORT:
        return "small" if multiplies(dtype) else "all"
    if dtype == torch.float32 and onednn_is_faster():
        return "packed"
    return "nothing"


def product_in_dtype(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in their dtype. Autocast would choose another one, but not for a product that
    is written to a given result."""
    device = a.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == a.dtype:
        return torch.mm(a, b)
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def product_by_onednn(rows: Tensor, transposed: Tensor) -> Tensor:
    """Return `rows @ transposed.T` by oneDNN: (R, K), (N, K) -> (R, N), float32.

    The operator copies rows that lie apart in memory by itself, but not such a matrix.
    """
    if not _is_packed(transposed):
        transposed = transposed.clone()  # keeps which dimension is contiguous
    # without a bias, and with no function ("none", its scalars and its variant) of the product
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, transposed, None, "none", [], "")
    return product


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch's products of this dtype use instructions of this processor; of float16
    they are taken not to."""
    if dtype.itemsize > 2:
        return True
    if dtype != torch.bfloat16:
        return False
    return bool(torch.backends.mkldnn.enabled) and multiplies_bfloat16()


def _is_faster_as_float32(dtype: torch.dtype, num_rows: int, size: int) -> bool:
    """Return whether 16-bit rows and a matrix of `size` numbers are multiplied faster as
    float32."""
    is_small = size <= WIDEST and num_rows * size < FEWEST
    return is_small or not multiplies(dtype)


def _num_onednn_rows(rows: Tensor, shape: torch.Size, second: Tensor, height: int) -> int:
    """Return how many of the rows oneDNN gets in a float32 product with a matrix of a shape; 0
    if it is not used.

    Args:
        shape: that of the matrix, or of the result of a sum over rows.
        second: the product's second operand, which oneDNN gets packed.
        height: number of rows of the result.
    """
    if not onednn_is_faster() or not torch.backends.mkldnn.enabled:
        return 0
    if rows.dtype != torch.float32 or not rows.is_cpu:
        return 0
    num_rows = rows.shape[0]
    is_large = num_rows * shape.numel() >= FEWEST and min(shape) >= NARROWEST
    if not is_large:
        return 0
    # the result has too few rows for a copy of the operand to pay
    if height < FEWEST_TO_COPY and not _is_packed(second):
        return 0
    return num_rows // STEP * STEP  # the largest multiple, see the module's docstring


def _is_packed(matrix: Tensor) -> bool:
    """Return whether the rows or the columns of a matrix lie one after the other in memory, without
    gaps."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _padded(rows: Tensor, missing: int) -> Tensor:
    """Return the rows in front of `missing` rows of zeros."""
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16. Before torch 2.11, only those
    with AVX2 are known not to."""
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        if "avx512_bf16" in capabilities:
            return bool(capabilities["avx512_bf16"])
    return torch.backends.cpu.get_cpu_capability() != "AVX2"


@functools.cache
def has_onednn() -> bool:
    """Return whether torch has oneDNN's float32 product, a private operator, which may change."""
    if not torch.backends.mkldnn.is_available():
        return False
    a = torch.arange(6.0).view(2, 3)
    b = torch.arange(12.0).view(4, 3)
    try:
        return torch.equal(product_by_onednn(a, b), a @ b.t())
    except (AttributeError, RuntimeError, TypeError):
        return False


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies float32 faster than torch's default, MKL, on this
    machine."""
    has_mkl = torch.backends.mkl.is_available()
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_mkl and is_wide and _is_zen_5(Path("/proc/cpuinfo")) and has_onednn()


def _is_zen_5(cpuinfo: Path) -> bool:
    """Return whether a file in the format of /proc/cpuinfo describes an AMD processor of Zen 5 or
    later."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return False
    first_core, *_ = text.split("\n\n", maxsplit=1)
    fields = {}
    for line in first_core.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    family = fields.get("cpu family", "")
    is_amd = fields.get("vendor_id") == "AuthenticAMD"
    return is_amd and family.isdecimal() and int(family) >= ZEN_5
