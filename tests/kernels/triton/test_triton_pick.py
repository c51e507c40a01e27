"""The library end to end with the Triton kernels, as `kernels/pick.py` chooses them on a GPU,
against the CPU's kernels."""

from __future__ import annotations

import copy
import importlib
import itertools
import math

import pytest
import torch

from helpers import TOP_K, ids_for, make_router, thinned
from moesaic import Capacity, GatedExperts, MoE, PlainExperts
from moesaic.kernels import pick
from moesaic.kernels.codecs import codec_named
from moesaic.kernels.permute import permute, sort_by_expert, sum_rows, unpermute
from moesaic.kernels.triton import expert_stage, quantise
from moesaic.routing.routers import ROUTERS

USERS = ("kernels.pick", "kernels.permute", "kernels.choice")
"""The modules that call `kind_of`."""
EXPERTS = {
    "swiglu": GatedExperts,
    "swiglu with biases": lambda d, h, n: GatedExperts(d, h, n, bias=True),
    "gelu": PlainExperts,
}


@pytest.fixture
def picked(monkeypatch, interpreted):
    """Make the library treat CPU tensors, on which the interpreter runs, like GPU tensors; on a GPU
    nothing is changed."""
    if interpreted:
        for user in USERS:
            module = importlib.import_module(f"moesaic.{user}")
            monkeypatch.setattr(module, "kind_of", lambda device: "triton")


def run(layer, x, **options):
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    y, routing = layer(x, token_ids=ids_for(x).to(x.device), return_routing=True, **options)
    (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return [y, x.grad, routing.counts, routing.nonfinite, *grads.values()]


def check(layer, x, device, request, *, tolerance=2e-5, equal_nan=False, **options):
    expected = run(copy.deepcopy(layer), x, **options)
    request.getfixturevalue("picked")
    masks = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    actual = run(copy.deepcopy(layer).to(device), x.to(device), **masks)
    for mine, true in zip(actual, expected, strict=True):
        assert (mine is None) == (true is None)
        if mine is not None:
            torch.testing.assert_close(
                mine.cpu(), true, atol=tolerance, rtol=tolerance, equal_nan=equal_nan
            )


def layer_of(router="softmax", experts="swiglu", **options):
    torch.manual_seed(0)
    top_k = TOP_K.get(router, 2)
    return MoE(
        16,
        24,
        4,
        top_k,
        router=lambda d, n: make_router(router, d, n),
        experts=EXPERTS[experts],
        **options,
    )


@pytest.mark.parametrize("router", thinned(ROUTERS, every=2))
def test_every_router_gives_what_it_gives_on_a_cpu(router, device, request):
    # random draws differ between devices
    layer = layer_of(router).train(router not in ("noisy", "gshard"))
    check(layer, torch.randn(13, 16), device, request)


@pytest.mark.parametrize(
    ("experts", "capacity"),
    list(zip(EXPERTS, (Capacity.fixed(0.5), None, Capacity.fixed(0.75, order="score")))),
    ids=str,
)
def test_every_form_of_expert_and_capacity(experts, capacity, device, request):
    layer = layer_of(experts=experts, capacity=capacity, shared_hidden=8)
    mask = torch.rand(2, 7) < 0.8
    check(layer, torch.randn(2, 7, 16), device, request, mask=mask)


@pytest.mark.parametrize(("weight", "tokens"), [("before", 19), ("after", 0), ("after", 1)])
def test_weights_on_either_side_and_few_tokens(weight, tokens, device, request):
    check(layer_of(apply_weight=weight), torch.randn(tokens, 16), device, request)


@pytest.mark.parametrize("odd", [-math.nan, math.inf])
def test_an_odd_token_spoils_its_own_result_alone(odd, device, picked):
    layer = layer_of().to(device)
    x = torch.randn(13, 16, device=device)
    x[4] = odd
    y, routing = layer(x, return_routing=True)
    assert (~y.isfinite().all(1)).nonzero().flatten().tolist() == [4]
    assert int(routing.counts.sum()) == 26
    assert int(routing.nonfinite) == 2


def test_the_kernels_are_those_of_triton(device, picked):
    kernel = pick.expert_kernel(torch.device(device))
    assert (kernel.forward, kernel.backward) == (expert_stage.forward, expert_stage.backward)


@pytest.mark.parametrize(
    ("size", "weighted", "dtype"),
    [
        ((0, 2, 5), False, torch.float32),
        ((5, 3, 1100), True, torch.bfloat16),
        ((9, None, 40), True, torch.float32),
        ((7, 2, 40), False, torch.float64),
        ((6, None, 3), False, torch.float16),
    ],
    ids=str,
)
def test_order_and_sums_equal_the_cpus(size, weighted, dtype, device, request):
    """With equal and with different numbers of rows per token, including tokens without rows."""
    tokens, per_token, dim = size
    token = torch.arange(tokens).repeat_interleave(per_token or 2)
    expert = torch.randint(0, 4, (len(token),))
    if per_token is None:
        sent = torch.rand(len(token)) < 0.5
        token = token[sent]
        expert = expert[sent]
    counts = torch.bincount(expert, minlength=5)
    rows = torch.randn(len(token), dim).to(dtype)
    weights = torch.rand(len(token)) if weighted else None
    x = torch.randn(tokens, dim).to(dtype)
    plain = sort_by_expert(token, expert, counts, tokens, per_token)
    results = [
        sum_rows(rows, plain.dispatch, weights=weights, dtype=dtype),
        permute(x, plain),
        unpermute(rows, plain),
    ]
    request.getfixturevalue("picked")
    there = [each.to(device) for each in (token, expert, counts)]
    order = sort_by_expert(*there, tokens, per_token)
    assert order.order.dtype == torch.int32
    assert torch.equal(order.order.cpu().long(), plain.order)
    for name in ("token", "by_token", "starts"):
        actual = getattr(order.dispatch, name)
        assert torch.equal(actual.cpu().long(), getattr(plain.dispatch, name)), name
    there_weights = None if weights is None else weights.to(device)
    actual = [
        sum_rows(rows.to(device), order.dispatch, weights=there_weights, dtype=dtype),
        permute(x.to(device), order),
        unpermute(rows.to(device), order),
    ]
    for mine, true in zip(actual, results, strict=True):
        assert mine.dtype == true.dtype
        tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}.get(dtype, 2e-2)
        torch.testing.assert_close(mine.cpu(), true, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "dtype"),
    thinned(
        itertools.product(("int8", "fp8"), (torch.float32, torch.bfloat16, torch.float64)), every=2
    ),
    ids=str,
)
def test_codecs_write_and_read_the_same_bytes(name, dtype, device, request, monkeypatch):
    """Through the codecs' methods, with rows in any layout and messages at any address; float64 is
    left to torch."""
    codec = codec_named(name)
    rows = (torch.randn(7, 40) * 10.0 ** torch.linspace(-9, 3, 7)[:, None]).to(dtype).t()
    rows[3, 2] = math.nan
    rows[5, 4] = -math.inf
    message = codec.encode(rows)
    decoded = codec.decode(message, *rows.shape, dtype)
    request.getfixturevalue("picked")
    calls = []
    for part in (f"{name}_encode", "decode"):
        kernel = getattr(quantise, part)
        monkeypatch.setattr(
            quantise, part, lambda *given, kernel=kernel: calls.append(1) or kernel(*given)
        )
    actual = codec.encode(rows.to(device))
    assert torch.equal(actual.cpu(), message)
    apart = torch.cat([actual.new_zeros(3), actual])[3:]
    torch.testing.assert_close(
        codec.decode(apart, *rows.shape, dtype).cpu(), decoded, atol=0, rtol=0, equal_nan=True
    )
    assert len(calls) == (0 if dtype == torch.float64 else 2)
