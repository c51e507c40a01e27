"""Experts with the grouped products of QuACK (`quack-kernels`): SonicMoE's CuTe kernels for Hopper
and Blackwell.

Gathers and activations are those of `whole_batch`.
"""

from __future__ import annotations

import torch.nn.functional as F
from quack.gemm_interface import gemm
from torch import Tensor

from moesaic.kernels.grouped_matmul import has_no_rows
from moesaic.kernels.whole_batch import by_products


def rows_times(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: (R, K) x (E, K, N) -> (R, N)."""
    bounds = F.pad(ends, (1, 0))  # 0, then the ends
    # tuning would time kernels in a training step
    product: Tensor = gemm(x, w, cu_seqlens_m=bounds, tuned=False)
    return product


def outer_products(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's `dy.T @ x` over its own rows: (R, N), (R, K) -> (E, N, K); zeros for an
    expert without rows."""
    bounds = F.pad(ends, (1, 0))
    products: Tensor = gemm(dy.t(), x, cu_seqlens_k=bounds, tuned=False)
    return products.masked_fill_(has_no_rows(ends), 0)


forward, backward = by_products(
    "quack", majors=(9, 10), multiple=8, rows_times=rows_times, outer_products=outer_products
)
