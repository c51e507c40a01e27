"""No call of a layer on a mesh of GPUs makes the host wait but for its counts, under every plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from helpers import from_file, thinned
from host_waits import WaitCase, cases, count_waits
from moesaic.comm import loopback
from moesaic.kernels import pick
from stand_in import DEVICE, StandIn, pretending

CASES = {case.name: case for case in cases()}
FIRST = (
    "linear.dropless",
    "s2.padded",
    "multicast.capacity",
    "optsche.padded",
    "spill.capacity",
    "int8.dropless",
)
"""What `make test` runs of them: each way to move rows, each capacity."""
TOLERANCE = 0.05
"""Of bfloat16 results, which are added in another order than on a CPU, and coded ones among
them."""
STEP_OF_FP8 = 0.125
"""A sum in another order may round to the next number of float8_e4m3, an eighth away."""


def check(case: WaitCase) -> None:
    found = count_waits(case)
    if found is None:
        assert case.capacity == "padded", (
            "plans clash with sizes that are known beforehand, and with nothing else"
        )
        return
    assert (found.forward, found.backward) <= case.most, found.lines
    assert found.backward <= case.most[1], found.lines
    assert found.uploads <= case.most_uploads, "no graph can be captured with an upload"
    assert found.unordered == (), "a GPU gives the same bits in every run"
    assert found.error < (STEP_OF_FP8 if case.plan.codec == "fp8" else TOLERANCE)


@pytest.mark.parametrize("name", thinned(FIRST, every=2, start=1))
def test_the_first_plans_wait_for_counts_alone(name: str) -> None:
    check(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FIRST])
def test_every_plan_waits_for_counts_alone(name: str) -> None:
    check(CASES[name])


def seen(function) -> list[str]:
    with pretending(), StandIn() as stand_in:
        x = torch.arange(6.0, device=DEVICE)
        stand_in.record.clear()
        function(x)
        return stand_in.record.waits


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 3).any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 3],
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.bincount(x.long()),
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.full((2,), 3, device=x.device)),
        lambda x: torch.as_tensor([1.0, 2.0], device=x.device),
        lambda x: torch.ones(2).to(x.device),
        lambda x: x.copy_(torch.ones(6)),
        lambda x: torch.ones(6).copy_(x),
    ],
)
def test_the_stand_in_sees_what_waits(function) -> None:
    assert len(seen(function)) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).sum(),
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int32, device=x.device)),
        lambda x: x.repeat_interleave(x.long(), output_size=15),
        lambda x: torch.ones(6).pin_memory().to(x.device, non_blocking=True),
        lambda x: x.index_put_((x > 3,), x.new_zeros(())),
        lambda x: x.to(x.device),
    ],
)
def test_the_stand_in_sees_no_wait_where_there_is_none(function) -> None:
    assert seen(function) == []


@pytest.mark.parametrize(
    ("places", "dtype", "count"),
    [([0, 2, 0], torch.float32, 1), ([0, 2, 1], torch.float32, 0), ([0, 2, 0], torch.int64, 0)],
    ids=["floats to one place", "floats to a place each", "integers"],
)
def test_the_stand_in_sees_sums_in_any_order(
    places: list[int], dtype: torch.dtype, count: int
) -> None:
    with pretending(), StandIn() as stand_in:
        x = torch.ones(3, 2, dtype=dtype, device=DEVICE)
        index = torch.tensor(places, device=DEVICE)
        torch.zeros_like(x).index_add_(0, index, x)
        x.scatter_add(0, index[:, None].expand(3, 2), x)
        assert len(stand_in.record.unordered) == 2 * count


def test_only_files_of_the_packages_are_named_wherever_the_environment_lies() -> None:
    torchs = from_file(
        "/clones/moesaic/.venv/lib/python3.11/site-packages/torch/_ops.py",
        "lambda x: x.sum().item()",
    )
    assert seen(torchs) == ["a number brought to the host: nowhere in Moesaic"]
    called = from_file(pick.__file__, "lambda function, x: function(x)")
    assert seen(partial(called, torchs)) == [
        f"a number brought to the host: {Path(pick.__file__).name}:1 <lambda>"
    ]
    assert (
        seen(partial(from_file(loopback.__file__, "lambda function, x: function(x)"), torchs)) == []
    )


def test_the_stand_in_refuses_tensors_of_two_devices() -> None:
    with (
        pretending(),
        StandIn(),
        pytest.raises(AssertionError, match="tensors of cuda:0 and of the CPU"),
    ):
        torch.ones(2, device=DEVICE) + torch.ones(2)
