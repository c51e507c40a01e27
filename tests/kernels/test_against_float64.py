"""The comparison of operators with float64 names planted faults, the GELU of torch that wrote
nothing, and nothing of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from against_float64 import AgainstFloat64, Case, cases, compare
from helpers import thinned

A = torch.linspace(-2, 3, 12).view(3, 4)
B = torch.linspace(1, 2, 12).view(3, 4)


def is_low(x: Tensor) -> bool:
    return x.dtype != torch.float64


def half_written(x: Tensor, out: Tensor) -> None:
    out[: 1 if is_low(x) else len(x)] = x[: 1 if is_low(x) else len(x)]


def wrong_in_place(x: Tensor) -> None:
    x.mul_(1.001 if is_low(x) else 1.0)


def coarse(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype) if is_low(x) else x.clone()


def wrong_places(x: Tensor) -> Tensor:
    return x.argsort(1, descending=is_low(x))


@pytest.fixture(scope="module")
def planted() -> Iterator[dict[str, Callable[..., object]]]:
    """Operators that are wrong in every dtype but float64."""
    made = {
        "half_written": (half_written, "(Tensor x, Tensor(a!) out) -> ()"),
        "wrong_in_place": (wrong_in_place, "(Tensor(a!) x) -> ()"),
        "coarse": (coarse, "(Tensor x) -> Tensor"),
        "wrong_places": (wrong_places, "(Tensor x) -> Tensor"),
    }
    library = torch.library.Library("planted", "DEF")
    for name, (function, schema) in made.items():
        library.define(name + schema)
        library.impl(name, function, "CPU")
    yield {name: getattr(torch.ops.planted, name) for name in made}
    library._destroy()


PASSES: dict[str, Callable[[Callable[..., object]], object]] = {
    "half_written": lambda run: run(A, torch.empty(3, 8)[:, 4:]),
    "wrong_in_place": lambda run: run(A.clone()),
    "coarse": lambda run: run(A),
    "wrong_places": lambda run: run(A),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_wrong_operator_is_named_and_no_other(
    name: str, planted: dict[str, Callable[..., object]]
) -> None:
    with AgainstFloat64() as mode:
        PASSES[name](planted[name])
        torch.mm(A, B.t())
        torch.softmax(A, 1)
    assert [each.operator for each in mode.found.differences.values()] == [
        f"planted.{name}.default"
    ]
    assert {"aten.mm.default", "aten._softmax.default", f"planted.{name}.default"} <= set(
        mode.found.compared
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_gelu_is_named_where_it_writes_nothing_to_a_strided_result(
    dtype: torch.dtype,
) -> None:
    """torch 2.13 has the fault, in float32 with any oneDNN; versions without it are not accused."""
    x = torch.randn(4, 8).to(dtype)
    memory = torch.full((4, 16), 77.0, dtype=dtype)
    torch.ops.aten.gelu.out(x, out=memory[:, 8:])
    is_wrong = bool((memory[:, 8:] == 77.0).any())
    with AgainstFloat64() as mode:
        torch.ops.aten.gelu.out(x, out=torch.full((4, 16), 77.0, dtype=dtype)[:, 8:])
        torch.ops.aten.gelu.out(x, out=torch.empty(4, 16, dtype=dtype)[:, 8:])
        torch.ops.aten.gelu.out(x, out=torch.empty(4, 8, dtype=dtype))
    found = [(each.operator, each.times) for each in mode.found.differences.values()]
    assert found == ([("aten.gelu.out", 2)] if is_wrong else [])


def test_roundings_and_cancellations_are_no_faults() -> None:
    x = torch.randn(64, 64)
    with AgainstFloat64() as mode:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            low = x.to(dtype)
            (low @ low).softmax(1).sum(1)
            (low - low.mean(1, keepdim=True)).sum(1)
            (low * 1e4).exp_()
            low.to(torch.float8_e4m3fn).to(dtype)
    assert not mode.found.differences
    assert mode.found.compared["aten.mm.default"] == 3


@pytest.mark.parametrize("case", thinned(cases(), every=7), ids=lambda case: case.name)
def test_layers_routers_and_codecs_have_no_wrong_operator(case: Case) -> None:
    found = compare(case)
    assert found.compared.total() >= 5  # the codec none runs no more
    assert not found.skipped
    assert list(found.differences.values()) == []
