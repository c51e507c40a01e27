"""The Triton product with NF4 matrices against the products with the same matrices, dequantized."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import nf4
from moesaic.kernels.triton.nf4 import rows_times_by_triton

COUNTS = {"uneven": [3, 0, 21, 70], "all idle": [0, 0, 0, 0], "rows of no expert": [5, 2, 0, 1]}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("counts", COUNTS)
def test_it_equals_the_product_with_the_dequantized_matrices(device, counts, dtype, transposed):
    torch.manual_seed(0)
    sizes = COUNTS[counts]
    height = 40
    width = 192
    codes, scales = nf4.quantize(torch.randn(len(sizes), height, width, device=device))
    spare = 7 if counts == "rows of no expert" else 0
    x = torch.randn(sum(sizes) + spare, width if transposed else height, device=device).to(dtype)
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    found = rows_times_by_triton(
        x, codes, scales, nf4.code_values(x.device), ends, transposed=transposed
    )
    matrices = nf4.dequantize(codes, scales, dtype).double()
    assert found.dtype == dtype
    assert found.shape == (len(x), height if transposed else width)
    for matrix, start, end in zip(matrices, [0, *ends.tolist()], ends.tolist()):
        expected = x[start:end].double() @ (matrix.t() if transposed else matrix)
        bound = ROUNDING[dtype] * max(1.0, float(expected.abs().max()) if end > start else 0.0)
        torch.testing.assert_close(found[start:end].double(), expected, rtol=0, atol=bound)
