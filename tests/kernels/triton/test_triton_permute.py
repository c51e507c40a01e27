"""Sums of tokens' rows against float64: with weights, unsent copies and varying numbers of rows per
token."""

from __future__ import annotations

import pytest
import torch

from helpers import pairwise
from moesaic.kernels.triton.rows.permute import sum_tokens

SIZES = [(0, 2, 8), (1, 1, 1), (5, 2, 40), (3, 3, 1030)]
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def by_token_of(
    num_tokens: int, top_k: int, *, varying: bool, dropped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each copy, token after token, and each token's first copy."""
    counts = (
        torch.randint(0, top_k + 1, (num_tokens,)) if varying else torch.full((num_tokens,), top_k)
    )
    by_token = torch.randperm(int(counts.sum()))
    if dropped:
        by_token[torch.rand(len(by_token)) < 0.4] = -1
    return by_token, counts.cumsum(0) - counts


@pytest.mark.parametrize(
    ("size", "dtype", "form", "copies"),
    pairwise(
        SIZES,
        DTYPES,
        ("plain", "weighted"),
        ("all", "some dropped", "varying"),
        empty=lambda size, *_: size[0] == 0,
    ),
    ids=str,
)
def test_each_token_gets_the_sum_of_its_rows(size, dtype, form, copies, device):
    num_tokens, top_k, dim = size
    weighted = form == "weighted"
    varying = copies == "varying"
    dropped = copies == "some dropped"
    by_token, starts = by_token_of(num_tokens, top_k, varying=varying, dropped=dropped)
    rows = torch.randn(len(by_token), dim).to(dtype)
    # rows of unsent copies must not be read
    rows[~torch.isin(torch.arange(len(rows)), by_token)] = torch.nan
    weights = torch.rand(len(by_token)) if weighted else None
    expected = torch.zeros(num_tokens, dim, dtype=torch.float64)
    ends = [*starts[1:].tolist(), len(by_token)][:num_tokens]
    for token, (first, last) in enumerate(zip(starts.tolist(), ends)):
        for row in by_token[first:last].tolist():
            if row >= 0:
                expected[token] += rows[row].double() * (
                    1.0 if weights is None else weights[row].double()
                )
    arguments = [
        each if each is None else each.to(device) for each in (rows, by_token, starts, weights)
    ]
    actual = sum_tokens(*arguments, 0 if varying else top_k, dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double().cpu(), expected, atol=DTYPES[dtype] * top_k, rtol=DTYPES[dtype]
    )


def test_the_operator_holds_what_it_promises(device):
    by_token, starts = (each.to(device) for each in by_token_of(6, 2, varying=False, dropped=False))
    rows = torch.randn(12, 10, device=device)
    weights = torch.rand(12, device=device)
    torch.library.opcheck(sum_tokens.overload, (rows, by_token, starts, weights, 2, torch.float32))
