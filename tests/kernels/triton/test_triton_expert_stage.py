"""The Triton expert stage against the implementation that runs on any device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.kernels import whole_batch
from moesaic.kernels.activation import ACTIVATIONS, Clamp
from moesaic.kernels.permute import sort_by_expert
from moesaic.kernels.triton import expert_stage
from moesaic.kernels.work import ExpertWork, Places, Wanted

TOKENS = 13
TOP_K = 2
EXPERTS = 3
DIM = 40
HIDDEN = 24
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The largest error in each dtype, relative to the norm in float64."""


def work_of(
    device: str,
    *,
    gated: bool = True,
    dispatch: str = "even",
    dtype: torch.dtype = torch.float32,
    tokens: int = TOKENS,
    dim: int = DIM,
) -> ExpertWork:
    # the last expert gets no rows
    expert = torch.rand(tokens, EXPERTS - 1).argsort(1)[:, :TOP_K].reshape(-1)
    token = torch.arange(tokens).repeat_interleave(TOP_K)
    if dispatch == "varying":
        sent = torch.rand(len(token)) < 0.7
        expert = expert[sent]
        token = token[sent]
    expert = expert.to(device)
    token = token.to(device)
    counts = torch.bincount(expert, minlength=EXPERTS)
    per_token = None if dispatch == "varying" else TOP_K
    permutation = sort_by_expert(token, expert, counts, tokens, per_token)
    made = {"device": device, "dtype": dtype}
    return ExpertWork(
        x=torch.randn(tokens if dispatch != "rows" else len(token), dim, **made),
        dispatch=None if dispatch == "rows" else permutation.dispatch,
        gates=torch.rand(len(token), device=device),
        gates_first=False,
        ends=permutation.ends,
        up=torch.randn(EXPERTS, 2 if gated else 1, HIDDEN, dim, **made) / dim**0.5,
        up_bias=None,
        down=torch.randn(EXPERTS, dim, HIDDEN, **made) / HIDDEN**0.5,
        down_bias=None,
        activation="gelu",
    )


def flat(actual: object) -> list[Tensor]:
    gradients = [actual.x, actual.gates, actual.up, actual.up_bias, actual.down, actual.down_bias]  # type: ignore[attr-defined]
    return [each for each in gradients if each is not None]


def check(work: ExpertWork, wanted: Wanted, tolerance: float) -> None:
    y, pre = expert_stage.forward(work, work.x.dtype)
    expected, exact_pre = whole_batch.forward(work, work.x.dtype)
    dy = torch.randn_like(y)
    mine = flat(expert_stage.backward(work, pre, dy, wanted))
    exact = flat(whole_batch.backward(work, exact_pre, dy, wanted))
    for actual, true in zip([y, pre, *mine], [expected, exact_pre, *exact], strict=True):
        assert (actual.shape, actual.dtype) == (true.shape, true.dtype)
        torch.testing.assert_close(
            actual, true, atol=tolerance * max(1.0, float(true.abs().max())), rtol=0
        )


def with_biases(work: ExpertWork) -> ExpertWork:
    made = {"device": work.x.device, "dtype": work.x.dtype}
    up_bias = torch.randn(work.up.shape[:3], **made)
    down_bias = torch.randn(len(work.down), work.x.shape[1], **made)
    return replace(work, up_bias=up_bias, down_bias=down_bias)


CLAMP = Clamp(limit=0.75, alpha=1.702, offset=1.0)
FORMS = (
    ("silu", True, CLAMP),
    *((name, gated, None) for name in ACTIVATIONS for gated in (False, True)),
)
"""(activation, whether there is a gate, clamp). A tight clamp cuts off many pre-activations on
either side."""


def in_turn(*axes: Iterable[object]) -> list[tuple[object, ...]]:
    """Return every form of expert once, with the values of the other axes in turn."""
    return list(zip(FORMS, *map(itertools.cycle, axes)))


CASES = in_turn(NEAR, (False, True), ("even", "varying", "rows"))
OTHERS = in_turn([*NEAR][::-1], (True, False), ("varying", "rows"))


@pytest.mark.parametrize(
    ("form", "dtype", "bias", "dispatch"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.random) for case in OTHERS)],
    ids=str,
)
def test_every_form_of_expert_stays_near_float64_in_every_dtype(
    form, dtype, bias, dispatch, device
):
    activation, gated, clamp = form
    work = replace(
        work_of(device, gated=gated, dispatch=dispatch, dtype=dtype),
        activation=activation,
        clamp=clamp,
    )
    check_near_float64(with_biases(work) if bias else work, dtype)


@pytest.mark.parametrize(("tokens", "dtype"), list(zip((0, 40, 1), NEAR)), ids=str)
def test_what_gpt_oss_runs_with_no_row_one_and_many(tokens, dtype, device):
    """Biases and clamped SwiGLU, with experts without rows, and rows in several tiles of widths
    that no tile divides."""
    work = with_biases(
        replace(work_of(device, dtype=dtype, tokens=tokens, dim=72), activation="silu", clamp=CLAMP)
    )
    assert expert_stage.supports(work)
    check_near_float64(work, dtype)


def check_near_float64(work: ExpertWork, dtype: torch.dtype) -> None:
    doubles = {
        name: each.double()
        for name, each in vars(work).items()
        if isinstance(each, Tensor) and name != "ends"
    }
    exact_work = replace(work, **doubles)
    y, pre = expert_stage.forward(work, dtype)
    exact_y, exact_pre = whole_batch.forward(exact_work, torch.float64)
    dy = torch.randn_like(y)
    mine = [y, *flat(expert_stage.backward(work, pre, dy, Wanted()))]
    exact = [exact_y, *flat(whole_batch.backward(exact_work, exact_pre, dy.double(), Wanted()))]
    for number, (actual, true) in enumerate(zip(mine, exact, strict=True)):
        assert (actual.shape, actual.dtype) == (
            true.shape,
            torch.float32 if actual.shape == work.gates.shape else dtype,
        )
        assert (actual.double() - true).norm() <= NEAR[dtype] * true.norm(), number


@pytest.mark.parametrize(
    "wanted", [Wanted(x=False), Wanted(gates=False), Wanted(weights=False)], ids=str
)
def test_only_the_gradients_that_are_wanted(wanted, device):
    check(with_biases(work_of(device)), wanted, 3e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_one(bias, device):
    work = replace(work_of(device), gates=None)
    check(with_biases(work) if bias else work, Wanted(), 3e-6)


def test_biases_may_be_views_of_packed_weights(device):
    work = with_biases(work_of(device))
    views = (
        torch.cat([each, each], -1)[..., : each.shape[-1]]
        for each in (work.up_bias, work.down_bias)
    )
    check(replace(work, **dict(zip(("up_bias", "down_bias"), views))), Wanted(), 3e-6)


def test_rows_are_read_and_written_where_they_lie(device):
    """As on a mesh: in the order in which they arrived, or as rows of a longer buffer."""
    work = with_biases(work_of(device, dispatch="rows"))
    first, second = (torch.randperm(len(work.x), device=device) for _ in range(2))
    check(replace(work, places=Places(x=first, y=second, d_x=first)), Wanted(), 3e-6)
    check(replace(work, x=torch.cat([work.x, work.x]), places=Places(x=first + 3)), Wanted(), 3e-6)


@pytest.mark.parametrize("dispatch", ["even", "varying"])
def test_the_result_in_another_dtype(dispatch, device):
    work = work_of(device, dispatch=dispatch, dtype=torch.bfloat16)
    y, _ = expert_stage.forward(work, torch.float32)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, whole_batch.forward(work, torch.float32)[0], atol=3e-2, rtol=0)


def test_what_has_no_kernel_runs_as_the_whole_batch_does(device):
    work = work_of(device)
    for other in (replace(work, gates_first=True), work_of(device, dtype=torch.float64)):
        assert not expert_stage.supports(other)
        assert torch.equal(
            expert_stage.forward(other, other.x.dtype)[0],
            whole_batch.forward(other, other.x.dtype)[0],
        )
    assert expert_stage.supports(work)
