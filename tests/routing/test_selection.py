"""Tests of the deterministic top-k and of related functions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.kernels.choice import FEWEST_COLUMNS, normalized, softmax_rows
from moesaic.kernels.top_k import top_k_indices, top_k_indices_reference
from moesaic.routing.router import linear_scores

DTYPES = [torch.float32, torch.float64]
INF = math.inf


def test_neighbouring_floats_are_told_apart_beside_many_columns() -> None:
    one = torch.ones(1, dtype=torch.float32)
    scores = torch.full((1, 4096), -5.0)
    scores[0, 17], scores[0, 4000] = one, torch.nextafter(one, one + 1)
    assert top_k_indices(scores, 3).tolist() == [[4000, 17, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "top_k"),
    [(0, 4, 2), (3, 1, 1), (5, 7, 7), (4, 0, 0), (1, 300, 8), (6, 40, 20)],
)
def test_odd_shapes_equal_the_stable_sort(
    dtype: torch.dtype, rows: int, columns: int, top_k: int
) -> None:
    scores = torch.randint(-3, 3, (rows, columns)).to(dtype)
    indices = top_k_indices(scores, top_k)
    assert indices.shape == (rows, top_k)
    assert torch.equal(indices, top_k_indices_reference(scores, top_k))


def test_a_transposed_input_equals_its_copy() -> None:
    scores = torch.randn(6, 5).t()
    assert torch.equal(top_k_indices(scores, 3), top_k_indices(scores.contiguous(), 3))


floats = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, INF, -INF, 0.1, 0.5]
)


@given(values=st.lists(floats, min_size=1, max_size=9), data=st.data())
def test_any_row_equals_the_stable_sort(values: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(values)))
    for dtype in DTYPES:
        row = torch.tensor([values], dtype=dtype)
        numbers = row[0].tolist()
        expected = sorted(range(len(values)), key=lambda i: (-numbers[i], i))[:top_k]
        assert top_k_indices(row, top_k).tolist() == [expected]


def test_normalized_rows_sum_to_one_and_a_row_of_zeros_stays_zero() -> None:
    assert normalized(torch.tensor([[1.0, 3.0], [0.0, 0.0]])).tolist() == [0.25, 0.75, 0.0, 0.0]


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    gates = torch.zeros(1, 2, requires_grad=True)
    (normalized(gates) * 0).sum().backward()
    assert gates.grad.tolist() == [[0.0, 0.0]]


def test_the_router_matrix_starts_within_its_bound() -> None:
    matrix = linear_scores(16, 200).detach()
    assert matrix.shape == (200, 16)
    assert matrix.abs().max() <= 0.25
    assert matrix.abs().max() > 0.24
    assert abs(float(matrix.mean())) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, FEWEST_COLUMNS - 1, FEWEST_COLUMNS])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_the_softmax_of_narrow_rows_and_its_gradient(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(rows, columns, dtype=dtype).mul_(5).requires_grad_()
    upstream = torch.randn(rows, columns)
    probs = softmax_rows(logits)
    expected = logits.double().softmax(1)
    torch.testing.assert_close(probs, expected.to(dtype))
    found, exact = (
        torch.autograd.grad(each, logits, upstream.to(each.dtype))[0] for each in (probs, expected)
    )
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_a_row_of_nan_leaves_the_softmax_of_others() -> None:
    logits = torch.zeros(40, 4)
    logits[7, 1] = math.nan
    logits[21] = INF
    assert softmax_rows(logits).isnan().any(1).nonzero().flatten().tolist() == [7, 21]
