"""Rows of tokens: places, sums in the order of rows, and the order of rows by expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.runtime.indexed import Indexed, stable_order


@pytest.mark.parametrize("most", [1, 5, 2**15 + 3, 2**16 - 1, 2**16, 2**20])
def test_equal_numbers_keep_their_order(most: int) -> None:
    values = torch.randint(0, most, (999,), generator=torch.Generator().manual_seed(most))
    values[3], values[700] = most, most
    assert torch.equal(stable_order(values), values.argsort(stable=True))
    assert stable_order(values[:0]).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_tokens_rows_are_summed_and_tokens_without_rows_are_zero(dtype: torch.dtype) -> None:
    index = torch.tensor([3, 0, 3, 1, 0, 3]).unsqueeze(1)
    rows = torch.tensor([1.0, 2, 4, 8, 16, 32], dtype=dtype).unsqueeze(1).expand(6, 3).contiguous()
    at = Indexed.of(index, np.zeros(6, dtype=np.int64), 5, has_empty=False)
    assert at.sum(rows)[:, 1].tolist() == [18.0, 8.0, 0.0, 37.0, 0.0]
    assert at.sum(rows).dtype == dtype


def test_rows_are_added_in_their_order() -> None:
    """In float32 the sum of 1, 1e8 and -1e8 depends on it."""
    at = Indexed.of(torch.zeros(3, 1, dtype=torch.int64), np.zeros(3, dtype=np.int64), 1, has_empty=False)
    assert float(at.sum(torch.tensor([[1.0], [1e8], [-1e8]]))) == 0.0
    assert float(at.sum(torch.tensor([[1e8], [-1e8], [1.0]]))) == 1.0


def test_an_index_counts_from_where_its_origins_tokens_start() -> None:
    index = torch.tensor([1, 0, 1, -1]).unsqueeze(1)
    at = Indexed.of(index, np.array([0, 2, 2, 0]), 4, has_empty=True)
    assert at.places.tolist() == [1, 2, 3, 0]
    assert at.is_full is not None
    assert at.is_full.flatten().tolist() == [True, True, True, False]
    assert Indexed.of(index[:3], np.zeros(3, dtype=np.int64), 2, has_empty=False).is_full is None


@pytest.mark.parametrize(("rows", "tokens"), [(0, 3), (0, 0)])
def test_no_rows_and_no_tokens(rows: int, tokens: int) -> None:
    at = Indexed.of(torch.zeros(rows, 1, dtype=torch.int64), np.zeros(rows, dtype=np.int64), tokens, has_empty=False)
    assert torch.equal(at.sum(torch.ones(rows, 4)), torch.zeros(tokens, 4))
