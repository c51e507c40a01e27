"""The Triton expert stage against the implementation that runs on any device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import pairwise
from moesaic.kernels import whole_batch
from moesaic.kernels.activation import ACTIVATIONS
from moesaic.kernels.permute import sort_by_expert
from moesaic.kernels.triton import expert_stage
from moesaic.kernels.work import ExpertWork, Wanted

TOKENS, TOP_K, EXPERTS, DIM, HIDDEN = 13, 2, 4, 40, 24
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The largest error in each dtype, relative to the norm in float64."""


def work_of(
    device: str, *, gated: bool = True, dispatch: str = "even", dtype: torch.dtype = torch.float32
) -> ExpertWork:
    expert = torch.rand(TOKENS, EXPERTS - 1).argsort(1)[:, :TOP_K].reshape(-1)  # the last expert gets no rows
    token = torch.arange(TOKENS).repeat_interleave(TOP_K)
    if dispatch == "varying":
        sent = torch.rand(len(token)) < 0.7
        expert, token = expert[sent], token[sent]
    expert, token = expert.to(device), token.to(device)
    counts = torch.bincount(expert, minlength=EXPERTS)
    per_token = None if dispatch == "varying" else TOP_K
    permutation = sort_by_expert(token, expert, counts, TOKENS, per_token)
    made = {"device": device, "dtype": dtype}
    return ExpertWork(
        x=torch.randn(TOKENS if dispatch != "rows" else len(token), DIM, **made),
        dispatch=None if dispatch == "rows" else permutation.dispatch,
        gates=torch.rand(len(token), device=device),
        gates_first=False,
        ends=permutation.ends,
        up=torch.randn(EXPERTS, 2 if gated else 1, HIDDEN, DIM, **made) / DIM**0.5,
        up_bias=None,
        down=torch.randn(EXPERTS, DIM, HIDDEN, **made) / HIDDEN**0.5,
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
        torch.testing.assert_close(actual, true, atol=tolerance * max(1.0, float(true.abs().max())), rtol=0)


@pytest.mark.parametrize(
    ("dispatch", "form", "dtype"),
    pairwise(("even", "varying", "rows"), ("swiglu", "gelu"), (torch.float32, torch.bfloat16)),
    ids=str,
)
def test_the_same_results_and_gradients(dispatch, form, dtype, device):
    tolerance = 3e-6 if dtype == torch.float32 else 3e-2
    check(work_of(device, gated=form == "swiglu", dispatch=dispatch, dtype=dtype), Wanted(), tolerance)


@pytest.mark.parametrize(
    ("activation", "dtype", "gated", "bias"),
    pairwise(ACTIVATIONS, (torch.float32, torch.bfloat16, torch.float16), (False, True), (False, True)),
    ids=str,
)
def test_every_activation_stays_near_float64_in_every_dtype(activation, dtype, gated, bias, device):
    """What has no kernel here, such as biases, runs as the whole batch does."""
    work = replace(work_of(device, gated=gated, dtype=dtype), activation=activation)
    if bias:
        wide, narrow = (torch.randn(shape, device=device, dtype=dtype) for shape in (work.up.shape[:3], (EXPERTS, DIM)))
        work = replace(work, up_bias=wide, down_bias=narrow)
    doubles = {name: each.double() for name, each in vars(work).items() if isinstance(each, Tensor) and name != "ends"}
    exact_work = replace(work, **doubles)
    y, pre = expert_stage.forward(work, dtype)
    exact_y, exact_pre = whole_batch.forward(exact_work, torch.float64)
    dy = torch.randn_like(y)
    mine = [y, *flat(expert_stage.backward(work, pre, dy, Wanted()))]
    exact = [exact_y, *flat(whole_batch.backward(exact_work, exact_pre, dy.double(), Wanted()))]
    for actual, true in zip(mine, exact, strict=True):
        assert (actual.double() - true).norm() <= NEAR[dtype] * true.norm()


@pytest.mark.parametrize("wanted", [Wanted(x=False), Wanted(gates=False), Wanted(weights=False)], ids=str)
def test_only_the_gradients_that_are_wanted(wanted, device):
    check(work_of(device), wanted, 3e-6)


def test_weights_of_one(device):
    check(replace(work_of(device), gates=None), Wanted(), 3e-6)


@pytest.mark.parametrize("dispatch", ["even", "varying"])
def test_the_result_in_another_dtype(dispatch, device):
    work = work_of(device, dispatch=dispatch, dtype=torch.bfloat16)
    y, _ = expert_stage.forward(work, torch.float32)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, whole_batch.forward(work, torch.float32)[0], atol=3e-2, rtol=0)


def test_what_has_no_kernel_runs_as_the_whole_batch_does(device):
    work = work_of(device)
    for other in (
        replace(work, gates_first=True),
        replace(work, up_bias=torch.randn(EXPERTS, 2, HIDDEN, device=device)),
        replace(work, down_bias=torch.randn(EXPERTS, DIM, device=device)),
        work_of(device, dtype=torch.float64),
    ):
        assert not expert_stage.supports(other)
        assert torch.equal(expert_stage.forward(other, other.x.dtype)[0], whole_batch.forward(other, other.x.dtype)[0])
    assert expert_stage.supports(work)
