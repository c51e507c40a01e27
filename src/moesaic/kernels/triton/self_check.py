"""Compares a product with torch's before the kernels first run on a GPU whose compiler has been
wrong.

Triton 3.6 to 3.8 miscompile two products into one accumulator in one iteration for B200 and B300
(triton issue 10821): results are wrong, and nothing says so. No kernel here has that pattern;
`tests/kernels/triton/test_triton_compiled.py` looks for it in what the compiler gets. The nearest
is `outer.py`, which adds a product after its loop. On such a GPU the first call compares both
products of 300 rows, and keeps the result, as tiles are kept, by device and Triton.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.triton.grouped import rows_times
from moesaic.kernels.triton.outer import outer_products
from moesaic.kernels.triton.rows.launch import device_of
from moesaic.kernels.triton.rows.tiles import Shape, TileDevice, default_tile

CHECKED = (10,)
"""The major compute capabilities of these GPUs."""
ROWS = 300
WIDTH = 256
TOLERANCE = 0.02
"""Largest error, relative to the root mean square; bfloat16 rounds to 2**-9."""


def check_products(device: torch.device) -> None:
    """Raise InputError if the kernels multiply wrongly on a device.

    A call inside a graph's capture is not checked: the calls before the capture were.
    """
    described = device_of(device)
    major, _ = described.capability
    if major not in CHECKED or torch.cuda.is_current_stream_capturing():
        return
    error = _error(device, described, triton.__version__)
    if not error < TOLERANCE:  # also if the error is NaN
        raise InputError(
            f"Triton {triton.__version__} multiplies wrongly on {described.name} (error "
            f'{error:.3g}): install another Triton, or write MoE(kernel="grouped_mm")'
        )


@lru_cache(maxsize=32)
def _error(device: torch.device, described: TileDevice, version: str) -> float:
    """Return the largest error of the products on a device, for a version of Triton, which is a
    part of the cache's key alone."""
    generator = torch.Generator(device).manual_seed(0)

    def random(size: int) -> Tensor:
        """Return a random matrix, (size, WIDTH) bfloat16."""
        return torch.randn(size, WIDTH, device=device, generator=generator).bfloat16()

    rows = random(ROWS)
    gradients = random(ROWS)
    matrix = random(WIDTH)
    ends = torch.full((1,), ROWS, dtype=torch.int32, device=device)
    shape = Shape(product="down", rows=ROWS, num_experts=1, columns=WIDTH, depth=WIDTH, itemsize=2)
    tile = default_tile(shape, described)
    product = rows_times(rows, matrix.unsqueeze(0), ends, tile, transposed=False)
    (outer_product,) = outer_products(gradients, rows, ends, tile)
    error = _relative(product, rows.float() @ matrix.float())
    outer_error = _relative(outer_product, gradients.float().t() @ rows.float())
    return max(error, outer_error)


def _relative(result: Tensor, exact: Tensor) -> float:
    """Return the root mean square of an error over that of the exact values."""
    return float((result.float() - exact).norm() / exact.norm())
