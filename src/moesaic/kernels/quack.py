"""Experts by QuACK's grouped products (`quack-kernels`), the CuTe kernels of Hopper and Blackwell that SonicMoE is made of.

The products alone: gathers and activations are `whole_batch`'s. Its fused projections want gate and up in one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from quack.gemm_interface import gemm
from torch import Tensor

from moesaic.kernels import whole_batch
from moesaic.kernels.grouped_matmul import has_no_rows
from moesaic.kernels.pick import require
from moesaic.kernels.work import ExpertWork, Gradients, Wanted

check = partial(require, name="quack", majors=(9, 10), multiple=8)


def forward(work: ExpertWork, out_dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Run the experts; see `ExpertKernel.forward`."""
    check(work)
    return whole_batch.forward(work, out_dtype, rows_times)


def backward(work: ExpertWork, pre: Sequence[Tensor], dy: Tensor, wanted: Wanted) -> Gradients:
    """Run the transpose; see `ExpertKernel.backward`."""
    return whole_batch.backward(work, pre, dy, wanted, rows_times, outer_products)


def rows_times(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: (R, K) x (E, K, N) -> (R, N)."""
    found: Tensor = gemm(x, w, cu_seqlens_m=F.pad(ends, (1, 0)), tuned=False)  # to tune would time kernels in the step
    return found


def outer_products(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows with each other: (R, N), (R, K) -> (E, N, K), zero for an expert without rows."""
    found: Tensor = gemm(dy.t(), x, cu_seqlens_k=F.pad(ends, (1, 0)), tuned=False)
    return found.masked_fill_(has_no_rows(ends), 0)
