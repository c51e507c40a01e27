"""The grouped product and its two gradients against a loop, over odd shapes, dtypes and memory
layouts."""

from __future__ import annotations

import pytest
import torch
from kernel_references import grouped_matmul_reference

from moesaic.kernels.grouped_matmul import grouped_matmul

SHAPES = [
    ([0], 4, 8),
    ([0, 0, 0], 8, 8),
    ([5], 8, 4),
    ([1], 8, 8),
    ([1, 0], 8, 8),
    ([3, 0, 2], 8, 8),
    ([0, 4, 0, 0], 16, 8),
    ([2, 3], 5, 7),
    ([2, 3], 8, 6),
    ([1, 2, 3], 1, 1),
    ([7, 0, 1, 9], 32, 24),
]
"""(rows per expert, inner width, outer width)."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def compare(x: torch.Tensor, w: torch.Tensor, counts: list[int]) -> None:
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = x.detach().requires_grad_()
    w = w.detach().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    w64 = w.detach().double().requires_grad_()
    y = grouped_matmul(x, w, ends)
    expected = grouped_matmul_reference(x64, w64, ends)
    upstream = torch.randn(y.shape).to(y.dtype)
    y.backward(upstream)
    expected.backward(upstream.double())
    assert y.dtype == x.dtype
    for actual, exact in ((y, expected), (x.grad, x64.grad), (w.grad, w64.grad)):
        assert actual.shape == exact.shape
        torch.testing.assert_close(
            actual.double(), exact, rtol=TOLERANCE[x.dtype], atol=4 * TOLERANCE[x.dtype]
        )
    for e, rows in enumerate(counts):
        assert rows or not w.grad[e].any(), "an expert without rows has a zero gradient"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("counts", "inner", "outer"), SHAPES)
def test_product_and_gradients_equal_the_loop(
    counts: list[int], inner: int, outer: int, dtype: torch.dtype
) -> None:
    compare(
        torch.randn(sum(counts), inner).to(dtype),
        torch.randn(len(counts), outer, inner).to(dtype),
        counts,
    )


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("layout", ["transposed", "expanded", "every_other", "offset"])
def test_the_layout_of_the_rows_in_memory_does_not_matter(layout: str, rows: int) -> None:
    x = {
        "transposed": lambda: torch.randn(8, rows).t(),
        "expanded": lambda: torch.randn(1, 8).expand(rows, 8),
        "every_other": lambda: torch.randn(rows, 16)[:, ::2],
        "offset": lambda: torch.randn(rows, 9)[:, 1:],
    }[layout]()
    compare(x, torch.randn(2, 8, 8), [rows - rows // 2, rows // 2])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_layout_of_the_gradient_in_memory_does_not_matter(rows: int) -> None:
    x = torch.randn(rows, 8)
    w = torch.randn(2, 4, 8, requires_grad=True)
    ends = torch.tensor([rows // 2, rows], dtype=torch.int32)
    # the gradient of a sum is expanded, with strides of 0
    grouped_matmul(x, w, ends).sum().backward()
    expected = torch.stack([part.sum(0).expand(4, 8) for part in (x[: rows // 2], x[rows // 2 :])])
    torch.testing.assert_close(w.grad, expected)
