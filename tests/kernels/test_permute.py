"""Permute and unpermute against a loop, with fixed and with varying numbers of rows per token."""

from __future__ import annotations

import pytest
import torch
from kernel_references import unpermute_reference

from moesaic.kernels.permute import Permutation, permute, sort_by_expert, unpermute
from moesaic.routing.capacity import count

SHAPES = [(0, 4, 2), (1, 1, 1), (1, 4, 4), (5, 1, 1), (7, 3, 2), (13, 5, 5), (64, 8, 2)]
"""(tokens, experts, rows per token)."""


def uniform(tokens: int, experts: int, per_token: int) -> Permutation:
    """Route every token to `per_token` distinct experts; the last expert stays empty if
    possible."""
    usable = max(experts - 1, per_token)
    expert = torch.rand(tokens, usable).argsort(1)[:, :per_token].reshape(-1)
    token = torch.arange(tokens).repeat_interleave(per_token)
    return sort_by_expert(token, expert, count(expert, None, experts), tokens, per_token)


def ragged(tokens: int, experts: int, per_token: int) -> Permutation:
    """Route like `uniform`, but drop half of the rows: tokens have different numbers of rows, some
    have none."""
    full = uniform(tokens, experts, per_token)
    expert = torch.repeat_interleave(torch.arange(experts), full.counts)
    is_kept = torch.rand(len(expert)) < 0.5
    by_token = full.token[is_kept].argsort(stable=True)
    token = full.token[is_kept][by_token]
    expert = expert[is_kept][by_token]
    return sort_by_expert(token, expert, count(expert, None, experts), tokens, None)


BUILDERS = pytest.mark.parametrize("build", [uniform, ragged])


@BUILDERS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permute_gathers_and_its_gradient_sums(build, shape: tuple[int, int, int]) -> None:
    permutation = build(*shape)
    x = torch.randn(shape[0], 3, dtype=torch.float64, requires_grad=True)
    rows = permute(x, permutation)
    assert torch.equal(rows, x[permutation.token])
    upstream = torch.randn_like(rows)
    rows.backward(upstream)
    torch.testing.assert_close(x.grad, unpermute_reference(upstream, permutation))


@BUILDERS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpermute_sums_and_its_gradient_gathers(build, shape: tuple[int, int, int]) -> None:
    permutation = build(*shape)
    rows = torch.randn(len(permutation.token), 3, dtype=torch.float64, requires_grad=True)
    y = unpermute(rows, permutation)
    torch.testing.assert_close(y, unpermute_reference(rows.detach(), permutation))
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert torch.equal(rows.grad, upstream[permutation.token])


@BUILDERS
def test_the_order_is_by_expert_and_stable(build) -> None:
    permutation = build(13, 5, 3)
    starts = [0, *permutation.ends.tolist()[:-1]]
    for start, end in zip(starts, permutation.ends.tolist()):
        tokens = permutation.token[start:end].tolist()
        assert tokens == sorted(tokens)
    assert permutation.ends.dtype == torch.int32
    assert int(permutation.ends[-1]) == len(permutation.token)


@BUILDERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows_are_summed_in_float32(build, dtype: torch.dtype) -> None:
    permutation = build(6, 40, 40)
    rows = torch.rand(len(permutation.token), 4).to(dtype)
    y = unpermute(rows, permutation)
    assert y.dtype == dtype
    assert torch.equal(y, unpermute_reference(rows, permutation).float().to(dtype))


@BUILDERS
def test_16_bit_rows_are_rounded_once_to_the_dtype_asked_for(build) -> None:
    permutation = build(6, 40, 40)
    rows = torch.rand(len(permutation.token), 4).to(torch.bfloat16).requires_grad_()
    y = unpermute(rows, permutation, dtype=torch.float32)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, unpermute_reference(rows.detach(), permutation).float())
    assert not torch.equal(y, y.bfloat16().float())
    y.backward(torch.ones_like(y))
    assert rows.grad.dtype == torch.bfloat16


@BUILDERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_permute_has_the_dtype_of_its_input(build, dtype: torch.dtype) -> None:
    x = torch.randn(6, 4).to(dtype).requires_grad_()
    permute(x, build(6, 4, 2)).sum().backward()
    assert x.grad.dtype == dtype
