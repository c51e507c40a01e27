"""Each grouped product against float64: gathered or not, both storage orders, by pointers and by
descriptors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_references import (
    down_grad_reference,
    outer_products_reference,
    rows_times_reference,
    up_reference,
)

from helpers import pairwise
from moesaic.kernels.triton.down_grad import down_grad
from moesaic.kernels.triton.grouped import rows_times
from moesaic.kernels.triton.outer import longest_first, outer_products
from moesaic.kernels.triton.rows.tiles import Tile, num_column_splits
from moesaic.kernels.triton.up import up

SMALL = Tile(rows=16, columns=32, depth=16, warps=4, stages=2, group=2)
TILES = {
    "pointers": SMALL,
    "descriptors": replace(SMALL, descriptors=1),
    "persistent": replace(SMALL, programs=1, descriptors=1, group=3),
}
COUNTS = [[0], [5, 20, 0, 3]]


def has_no_rows(tile: str, counts: list[int], *_: object) -> bool:
    return not any(counts)


def ends_of(counts: list[int], device: str) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=tolerance * max(scale, 1.0), rtol=0
    )


@pytest.mark.parametrize(
    ("tile", "counts", "order", "size"),
    pairwise(TILES, COUNTS, ("(E, N, K)", "(E, K, N)"), ((40, 24), (17, 33)), empty=has_no_rows),
    ids=str,
)
def test_rows_times(tile, counts, order, size, device):
    ends = ends_of(counts, device)
    tile = TILES[tile]
    transposed = order == "(E, N, K)"
    (dim, width) = size
    x = torch.randn(sum(counts) + 3, dim, device=device)
    w = torch.randn(len(counts), width, dim, device=device)
    stored = w if transposed else w.transpose(1, 2).contiguous()
    actual = rows_times(x, stored, ends, tile, transposed=transposed)
    close(actual[: sum(counts)], rows_times_reference(x, w, ends))


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_rows_times_a_slice_of_wider_weights(tile, device):
    ends = ends_of([4, 0, 6], device)
    x = torch.randn(10, 24, device=device)
    wide = torch.randn(3, 40, 24, device=device)
    w = wide[:, 8:28]
    actual = rows_times(x, w, ends, tile, transposed=True)
    close(actual, rows_times_reference(x, w, ends))


@pytest.mark.parametrize(
    ("tile", "counts", "gathered"),
    pairwise(TILES, COUNTS, ("p", "q", None), empty=has_no_rows),
    ids=str,
)
def test_outer_products(tile, counts, gathered, device):
    ends = ends_of(counts, device)
    tile = TILES[tile]
    num_rows = sum(counts)
    token = torch.randint(0, max(1, num_rows), (num_rows,), device=device).to(torch.int32)
    p = torch.randn(num_rows, 40, device=device)
    q = torch.randn(num_rows, 24, device=device)
    actual = outer_products(
        p,
        q,
        ends,
        tile,
        p_token=token if gathered == "p" else None,
        q_token=token if gathered == "q" else None,
    )
    sides = {"p": p, "q": q}
    if gathered:
        sides[gathered] = sides[gathered][token.long()]
    close(actual, outer_products_reference(sides["p"], sides["q"], ends))


@pytest.mark.parametrize(("tile", "gathered"), list(zip(TILES.values(), ("p", "q", None))), ids=str)
def test_outer_products_see_the_rows_of_their_expert_alone(tile, gathered, device):
    """Infinite rows of one expert, and undefined rows after those of all experts, cause no NaN in
    another's gradient."""
    ends = ends_of([21, 3, 20], device)
    token = torch.arange(50, device=device).to(torch.int32)
    p = torch.randn(50, 40, device=device)
    q = torch.randn(50, 24, device=device)
    exact = outer_products_reference(p, q, ends)
    for side in (p, q):
        side[21:24], side[44:] = float("inf"), float("nan")
    actual = outer_products(
        p,
        q,
        ends,
        tile,
        p_token=token if gathered == "p" else None,
        q_token=token if gathered == "q" else None,
    )
    close(actual[[0, 2]], exact[[0, 2]])


@pytest.mark.parametrize(
    ("tile", "counts", "form"),
    pairwise(
        TILES,
        COUNTS,
        (("silu", True), ("gelu", False), ("relu", False), ("gelu", True)),
        empty=has_no_rows,
    ),
    ids=str,
)
def test_up_and_the_gradient_of_down(tile, counts, form, device):
    """Rows already in expert order, as in a distributed layer: no gather, one weight per row."""
    ends = ends_of(counts, device)
    num_rows = sum(counts)
    dim = 40
    width = 24
    tile = TILES[tile]
    (activation, gated) = form
    x = torch.randn(num_rows, dim, device=device)
    matrices = torch.randn(len(counts), 2 if gated else 1, width, dim, device=device) / dim**0.5
    options = {"activation": activation, "weight": torch.rand(num_rows, device=device)}
    pre, hidden = up(x, matrices, ends, tile, **options)
    expected = up_reference(x, matrices, ends, **options)
    for mine, exact in zip((pre, hidden), expected, strict=True):
        close(mine, exact)
    dy = torch.randn(num_rows, dim, device=device)
    down = torch.randn(len(counts), dim, width, device=device)
    d_pre, again, parts = down_grad(dy, down, pre, ends, tile, **options)
    expected = down_grad_reference(dy, down, pre, ends, **options)
    for mine, exact in zip((d_pre, again, parts.sum(1)), expected, strict=True):
        close(mine, exact)


def test_backward_makes_the_very_hidden_rows_of_forward(device):
    """Both compute them from the rounded pre-activations, so the gradient of `down` is that of the
    forward function."""
    ends = ends_of([20, 13], device)
    x = torch.randn(33, 40, device=device, dtype=torch.bfloat16)
    matrices, down = (
        torch.randn(2, *size, device=device, dtype=torch.bfloat16)
        for size in ((2, 24, 40), (40, 24))
    )
    options = {"activation": "silu", "weight": torch.rand(33, device=device)}
    pre, hidden = up(x, matrices, ends, SMALL, **options)
    again = down_grad(x, down, pre, ends, replace(SMALL, columns=16), **options)[1]
    torch.testing.assert_close(again, hidden, atol=0, rtol=2**-7)


def test_the_epilogue_in_splits_is_the_epilogue(device):
    ends = ends_of([70, 0, 50], device)
    dy = torch.randn(120, 24, device=device)
    down = torch.randn(3, 24, 96, device=device)
    pre = torch.randn(120, 192, device=device)
    weight = torch.rand(120, device=device)
    tile = Tile(rows=64, columns=128, depth=16, warps=4, stages=2)
    assert num_column_splits(tile) > 1
    d_pre, hidden, parts = down_grad(dy, down, pre, ends, tile, activation="silu", weight=weight)
    exact = down_grad_reference(dy, down, pre, ends, activation="silu", weight=weight)
    for mine, expected in zip((d_pre, hidden, parts.sum(1)), exact, strict=True):
        close(mine, expected)
    matrices = torch.randn(3, 2, 96, 24, device=device)
    pre, hidden = up(dy, matrices, ends, tile, activation="silu", weight=weight)
    exact = up_reference(dy, matrices, ends, activation="silu", weight=weight)
    for mine, expected in zip((pre, hidden), exact, strict=True):
        close(mine, expected)


def test_the_longest_expert_starts_first(device):
    ends = torch.tensor([3, 3, 10, 12, 15], dtype=torch.int32, device=device)
    assert longest_first(ends).tolist() == [2, 0, 4, 3, 1], "of equal ones the first"
