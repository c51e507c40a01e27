"""The expert stage: results, gradients and saved tensors of each implementation against a float64
reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_references import expert_ffn_reference
from torch import Tensor

from helpers import pairwise
from moesaic.kernels import blocks, pick
from moesaic.kernels.activation import ACTIVATIONS, Clamp
from moesaic.kernels.expert_ffn import expert_ffn
from moesaic.kernels.permute import sort_by_expert
from moesaic.kernels.work import ExpertWork, Wanted
from moesaic.program import expert_sizes

SHAPES = [(0, 4, 8, 2, 2), (1, 4, 4, 1, 1), (7, 5, 6, 4, 2), (13, 8, 8, 5, 5), (9, 8, 4, 3, 1)]
"""(tokens, dim, hidden, experts, top_k). The last expert is never chosen, unless top_k needs it."""
WAYS = ((1, 2), (False, True), (None, "after", "before"), (True, False))
"""(number of up matrices, biases, where routing weights are applied, whether all tokens have
equally many rows)."""


def has_one_expert(shape: tuple[int, ...], *_: object) -> bool:
    """Return whether there is at most one token."""
    return shape[0] < 2


def make_work(
    shape: tuple[int, int, int, int, int],
    *,
    ups: int = 2,
    bias: bool = False,
    weigh: str | None = "after",
    dropless: bool = True,
    rows: bool = False,
    dtype: torch.dtype = torch.float64,
    activation: str = "gelu",
    clamp: Clamp | None = None,
) -> ExpertWork:
    tokens, dim, hidden, experts, top_k = shape
    expert = torch.rand(tokens, max(experts - 1, top_k)).argsort(1)[:, :top_k].reshape(-1)
    token = torch.arange(tokens).repeat_interleave(top_k)
    if not dropless:
        is_kept = torch.rand(len(expert)) < 0.6
        expert = expert[is_kept]
        token = token[is_kept]
    counts = torch.bincount(expert, minlength=experts)
    order = sort_by_expert(token, expert, counts, tokens, top_k if dropless else None)

    def leaf(*size: int) -> Tensor:
        return torch.randn(size).to(dtype).requires_grad_()

    return ExpertWork(
        x=leaf(len(expert) if rows else tokens, dim),
        dispatch=None if rows else order.dispatch,
        gates=None if weigh is None else torch.rand(len(expert)).to(dtype).requires_grad_(),
        gates_first=weigh == "before",
        ends=order.ends,
        up=leaf(experts, ups, hidden, dim),
        up_bias=leaf(experts, ups, hidden) if bias else None,
        down=leaf(experts, dim, hidden),
        down_bias=leaf(experts, dim) if bias else None,
        activation=activation,
        clamp=clamp,
    )


def leaves(work: ExpertWork) -> list[Tensor]:
    tensors = [work.x, work.gates, work.up, work.up_bias, work.down, work.down_bias]
    return [tensor for tensor in tensors if tensor is not None]


def compare(work: ExpertWork) -> None:
    y = expert_ffn(work)
    expected = expert_ffn_reference(work)
    torch.testing.assert_close(y, expected)
    if not expected.requires_grad:  # no rows
        return
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves(work), dy),
        torch.autograd.grad(expected, leaves(work), dy, materialize_grads=True),
    )


@pytest.fixture(params=[kind for kind in pick.KERNELS if kind != "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementation for CPUs and that for devices without their own;
    `triton/test_triton_pick.py` tests the third."""
    monkeypatch.setitem(pick.KERNELS, "cpu", pick.KERNELS[request.param])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("shape", "ups", "bias", "weigh", "dropless", "rows"),
    pairwise(SHAPES, *WAYS, (False, True), empty=has_one_expert),
    ids=str,
)
def test_values_and_gradients_equal_the_reference(shape, ups, bias, weigh, dropless, rows) -> None:
    compare(make_work(shape, ups=ups, bias=bias, weigh=weigh, dropless=dropless, rows=rows))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("clamp", [None, Clamp(0.5, 1.702, 1.0)], ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_equals_the_reference(activation: str, clamp: Clamp | None) -> None:
    for ups, bias in ((1, True), (2, False)):
        compare(make_work((7, 5, 6, 4, 2), ups=ups, bias=bias, activation=activation, clamp=clamp))


NEAR = {torch.float32: 2e-6, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The largest error of a result or gradient in each dtype that people train in, relative to its
norm in float64. Rounding moves pre-activations across the limits of a clamp, which costs more than
the arithmetic does."""


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_stays_near_float64_in_every_dtype(
    activation: str, dtype: torch.dtype
) -> None:
    clamped = [(2, True, Clamp(4.0, 1.702, 1.0))] if activation == "silu" else []
    for ups, bias, clamp in ((1, True, None), (2, False, None), *clamped):
        work = make_work(
            (17, 16, 24, 4, 2), ups=ups, bias=bias, dtype=dtype, activation=activation, clamp=clamp
        )
        y = expert_ffn(work)
        expected = expert_ffn_reference(work)
        dy = torch.randn_like(y)
        actual = [y, *torch.autograd.grad(y, leaves(work), dy)]
        exact = [expected, *torch.autograd.grad(expected, leaves(work), dy.double())]
        for number, (mine, true) in enumerate(zip(actual, exact, strict=True)):
            error = float(
                (mine.double() - true.double()).detach().norm() / true.detach().double().norm()
            )
            assert error <= NEAR[dtype], (
                f"{ups} matrices, bias {bias}, clamp {clamp}, tensor {number}: {error:.1e}"
            )


@pytest.mark.parametrize(
    ("shape", "ups", "bias", "weigh", "dropless", "limit"),
    pairwise(SHAPES, *WAYS, (0, 2**25), empty=has_one_expert),
    ids=str,
)
def test_cutting_experts_into_blocks_changes_nothing(
    shape, ups, bias, weigh, dropless, limit, monkeypatch
):
    """Results are added to tokens block by block, or kept until the end if they fit the limit."""
    monkeypatch.setattr(expert_sizes, "CACHE_BYTES", 0)
    monkeypatch.setattr(expert_sizes, "MIN_ROWS", 2)
    monkeypatch.setattr(blocks, "SIDE_BY_SIDE_BYTES", limit)
    compare(make_work(shape, ups=ups, bias=bias, weigh=weigh, dropless=dropless))


@pytest.mark.parametrize("smallest", [0.0, 1e-30, 1e-3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_too_small_to_divide_by_has_its_gradient(smallest: float, bias: bool) -> None:
    work = make_work((13, 8, 8, 5, 5), bias=bias)
    with torch.no_grad():
        work.gates[::3] = smallest
    compare(work)


def test_float16_has_no_room_for_a_weight_before_its_dot_product() -> None:
    work = make_work((13, 8, 8, 5, 5), dtype=torch.float16)
    with torch.no_grad():
        work.gates.fill_(1e-5)
        work.gates.data[0] = 1e-3
    dy = torch.full(work.x.shape, 1e-3, dtype=torch.float16)
    (actual,) = torch.autograd.grad(expert_ffn(work), work.gates, dy)
    (expected,) = torch.autograd.grad(expert_ffn_reference(work), work.gates, dy.double())
    assert (actual - expected).norm() < 0.02 * expected.norm()


def test_every_row_is_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_sizes, "CACHE_BYTES", 0)
    monkeypatch.setattr(expert_sizes, "MIN_ROWS", 3)
    work = replace(make_work((5, 4, 4, 4, 2)), ends=torch.tensor([1, 3, 10, 10], dtype=torch.int32))
    call_blocks = blocks.Blocks(work, 1, 1)
    segments = [
        [(s.expert, size, s.is_first) for s, size in zip(b.segments, b.sizes)]
        for b in call_blocks.all
    ]
    assert segments == [
        [(0, 1, True), (1, 2, True)],
        [(2, 3, True)],
        [(2, 3, False)],
        [(2, 1, False)],
    ]
    assert (call_blocks.most_rows, call_blocks.sizes) == (3, [1, 2, 3, 3, 1])


def test_scratch_memory_is_cut_as_each_block_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_sizes, "CACHE_BYTES", 0)
    monkeypatch.setattr(expert_sizes, "MIN_ROWS", 3)
    work = replace(
        make_work((5, 4, 4, 5, 2)), ends=torch.tensor([1, 3, 4, 7, 10], dtype=torch.int32)
    )
    call_blocks = blocks.Blocks(work, 1, 1)
    assert [block.sizes for block in call_blocks.all] == [(1, 2), (1,), (3,), (3,)]
    scratch = blocks.Scratch(call_blocks, 4, work.x)
    for block in call_blocks.all:
        part = scratch.of(block)
        assert (len(part.rows), tuple(map(len, part.segments))) == (block.rows, tuple(block.sizes))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "wanted", [Wanted(x=False), Wanted(gates=False), Wanted(weights=False)], ids=str
)
@pytest.mark.parametrize("weigh", ["after", "before"])
def test_what_needs_no_gradient_gets_none(weigh: str, wanted: Wanted) -> None:
    work = make_work((7, 5, 6, 4, 2), weigh=weigh, bias=True)
    full = torch.autograd.grad(expert_ffn(work).sum(), leaves(work))
    for leaf, wants in zip(leaves(work), [wanted.x, wanted.gates, *[wanted.weights] * 99]):
        leaf.requires_grad_(wants)
    expert_ffn(work).sum().backward()
    for leaf, expected in zip(leaves(work), full):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.usefixtures("kernel")
def test_bfloat16_stays_near_float64_and_the_result_has_the_dtype_asked_for() -> None:
    work = make_work((64, 16, 24, 4, 2), dtype=torch.bfloat16)
    y = expert_ffn(work, torch.float32)
    assert y.dtype == torch.float32
    exact = expert_ffn_reference(work)
    assert (y - exact).norm() < 0.01 * exact.norm()
    assert torch.equal(y, expert_ffn(work, torch.float32)), "the same bits again"


def test_backward_keeps_the_input_the_routing_and_the_pre_activations() -> None:
    tokens, dim, hidden, experts, top_k = shape = (64, 16, 24, 4, 2)
    for ups in (1, 2):
        work = make_work(shape, ups=ups, dtype=torch.float32)
        saved = {}

        def pack(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            expert_ffn(work)
        weights = {weight.data_ptr() for weight in (work.up, work.down)}
        num_bytes = sum(
            weight.nbytes for address, weight in saved.items() if address not in weights
        )
        copies = tokens * top_k
        indices = 8 * copies + 8 * copies + 8 * tokens + 4 * experts
        assert num_bytes == 4 * (tokens * dim + copies + ups * copies * hidden) + indices
