"""The layer against the dense float64 reference over random cases; accepted and refused arguments
of a call."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers import Scripted, agree, fitting_top_k, ids_for, make_layer, refused, run
from moesaic import (
    Capacity,
    Dropless,
    GatedExperts,
    Importance,
    LoadBalance,
    ModuleExperts,
    MoE,
    PlainExperts,
    ZLoss,
)
from moesaic.errors import InputError
from moesaic.routing.capacity import AbstractCapacity
from moesaic.routing.routers import ROUTERS

LOSSES = (LoadBalance(0.3), LoadBalance(0.2, level="sequence"), Importance(0.1), ZLoss(0.05))

CAPACITIES: list[AbstractCapacity | None] = [
    None,
    Capacity.fixed(0.5),
    Capacity.fixed(1.25, order="score"),
    Capacity.fitted(),
    Capacity.fitted(at_most=0.75, order="score"),
]

EXPERTS = {
    "swiglu": GatedExperts,
    "swiglu_bias": lambda d, h, n: GatedExperts(d, h, n, bias=True),
    "gelu": PlainExperts,
    "relu_bias": lambda d, h, n: PlainExperts(d, h, n, activation="relu", bias=True),
    "modules": lambda d, h, n: ModuleExperts(lambda: torch.nn.Linear(d, d), d, n),
}


FITTING = {
    (name, count): fitting_top_k(name, count) for name in ROUTERS for count in (1, 2, 4, 5, 8)
}
"""Experts per token with which a router is tested, by its name and the number of experts."""


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """Return a layer's sizes, options and input shape; odd sizes included."""
    router = draw(st.sampled_from(sorted(ROUTERS)))
    num_experts = draw(
        st.sampled_from([count for count in (1, 2, 4, 5, 8) if FITTING[router, count]])
    )
    top_k = draw(st.sampled_from(FITTING[router, num_experts]))
    return {
        "router": router,
        "num_experts": num_experts,
        "top_k": top_k,
        "dim": draw(st.sampled_from([3, 8])),
        "hidden": draw(st.sampled_from([1, 4, 6])),
        "shape": draw(st.sampled_from([(), (0,), (1,), (9,), (2, 3), (3, 0), (2, 2, 2)])),
        "experts": draw(st.sampled_from(sorted(EXPERTS))),
        "capacity": draw(st.sampled_from(CAPACITIES)),
        "shared_hidden": draw(st.sampled_from([0, 4])),
        "apply_weight": draw(st.sampled_from(["after", "before"])),
        "train": draw(st.booleans()),
        "masked": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def check(case: dict[str, object], dtype: torch.dtype) -> None:
    torch.manual_seed(case["seed"])
    layer = make_layer(
        case["router"],
        case["dim"],
        case["hidden"],
        case["num_experts"],
        top_k=case["top_k"],
        experts=EXPERTS[case["experts"]],
        capacity=case["capacity"],
        shared_hidden=case["shared_hidden"],
        apply_weight=case["apply_weight"],
        losses=LOSSES,
    )
    layer.to(dtype).train(case["train"])
    x = torch.randn(*case["shape"], 2 * case["dim"], dtype=dtype)
    x = x[..., ::2] if case["strided"] else x[..., : case["dim"]].contiguous()
    mask = torch.rand(case["shape"]) < 0.7 if case["masked"] else None
    agree(layer, x, seed=case["seed"], mask=mask, token_ids=ids_for(x))


@given(case=cases())
def test_float64_equals_the_reference(case: dict[str, object]) -> None:
    check(case, torch.float64)


@given(case=cases())
def test_float32_equals_the_reference(case: dict[str, object]) -> None:
    check(case, torch.float32)


@pytest.mark.parametrize("experts", sorted(EXPERTS))
def test_an_expert_without_a_token_gets_a_zero_gradient(experts: str) -> None:
    layer = MoE(4, 4, 4, 1, router=Scripted, experts=EXPERTS[experts], losses=()).double()
    x = torch.rand(5, 4, dtype=torch.float64)
    x[:, 2] -= 5
    result = agree(layer, x)
    assert result.routing.counts[2] == 0
    stacked = [
        grad[2] for key, grad in result.grads.items() if not key.startswith("experts.experts")
    ]
    modules = [grad for key, grad in result.grads.items() if key.startswith("experts.experts.2")]
    assert stacked or modules
    assert not any(grad.any() for grad in stacked + modules)


def test_autocast_keeps_the_dtype_and_comes_close_to_float32() -> None:
    layer = make_layer(dim=16, hidden=16, shared_hidden=16)
    x = torch.randn(12, 16)
    exact = run(layer, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = run(layer, x)
    assert low.y.dtype == torch.float32
    torch.testing.assert_close(low.y, exact.y, rtol=5e-2, atol=5e-2)
    for key, grad in low.grads.items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, exact.grads[key], rtol=0.1, atol=0.1)


def test_top_k_may_differ_per_call_and_in_evaluation() -> None:
    layer = make_layer(num_experts=6, top_k=2, eval_top_k=4)
    x = torch.randn(5, 8)

    def copies(**options: object) -> int:
        return int(layer(x, return_routing=True, **options)[1].requested.sum())

    assert (copies(), copies(top_k=6)) == (10, 30)
    layer.eval()
    assert (copies(), copies(top_k=3), copies(top_k=1)) == (20, 15, 5)
    assert make_layer(top_k=3).eval()(x, return_routing=True)[1].requested.sum() == 15


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_any_top_k_of_a_call_equals_the_reference(top_k: int) -> None:
    layer = make_layer(losses=LOSSES).double()
    agree(layer, torch.randn(7, 8, dtype=torch.float64), top_k=top_k)


def test_capacity_may_differ_per_call_and_in_evaluation() -> None:
    layer = make_layer(capacity=Capacity.fixed(0.5), eval_capacity=Capacity.fixed(1.0))
    x = torch.randn(8, 8)

    def limit(**options: object) -> int | None:
        rows = layer(x, return_routing=True, **options)[1].capacity
        return None if rows is None else int(rows)

    assert (limit(), limit(capacity=Capacity.fixed(2.0))) == (2, 8)
    layer.eval()
    assert (limit(), limit(capacity=Capacity.fixed(2.0))) == (4, 8)


def test_an_explicit_dropless_call_is_not_taken_for_no_capacity_given() -> None:
    layer = make_layer(capacity=Capacity.fixed(0.25), eval_capacity=Capacity.fixed(0.25))
    x = torch.randn(16, 8)
    for _ in range(2):
        assert int(layer(x, return_routing=True)[1].dropped) > 0
        routing = layer(x, capacity=Dropless(), return_routing=True)[1]
        assert routing.capacity is None
        assert int(routing.dropped) == 0
        layer.eval()


def test_evaluation_falls_back_to_the_layers_own_capacity() -> None:
    layer = make_layer(capacity=Capacity.fixed(0.5)).eval()
    assert int(layer(torch.randn(8, 8), return_routing=True)[1].capacity) == 2


@pytest.mark.parametrize("padding", [3.0, math.nan, math.inf])
@pytest.mark.parametrize("experts", ["swiglu", "gelu"])
def test_padding_holds_anything_and_gets_zero_with_a_shared_expert(
    padding: float, experts: str
) -> None:
    """Results and all gradients are those of the real tokens alone, even with NaN in the
    padding."""
    torch.manual_seed(0)
    layer = MoE(8, 8, 4, experts=experts, shared_hidden=8, losses=LOSSES)
    x = torch.randn(5, 8)
    x[[1, 4]] = padding
    mask = torch.tensor([True, False, True, True, False])
    found = run(layer, x, mask=mask)
    alone = run(layer, x[mask])
    assert found.y[~mask].abs().max() == found.dx[~mask].abs().max() == 0
    torch.testing.assert_close(found.y[mask], alone.y)
    torch.testing.assert_close(found.dx[mask], alone.dx)
    for name, grad in alone.grads.items():
        torch.testing.assert_close(
            found.grads[name], grad, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_without_return_routing_the_output_is_a_tensor() -> None:
    layer = make_layer().eval()
    x = torch.randn(2, 3, 8)
    assert torch.equal(layer(x), layer(x, return_routing=True)[0])


def test_state_round_trips_and_names_are_stable() -> None:
    layer = make_layer("sigmoid", shared_hidden=4)
    names = {"router.weight", "router.bias"} | {
        f"{part}.w{i}" for part in ("experts", "shared") for i in (13, 2)
    }
    assert set(layer.state_dict()) == names
    other = make_layer("sigmoid", shared_hidden=4)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = torch.randn(5, 8)
    assert torch.equal(layer(x), other(x))


def test_printing_names_the_sizes() -> None:
    assert "dim=8, hidden=8, num_experts=4, top_k=2" in repr(make_layer())


def test_sizes_may_be_numpys() -> None:
    eight = np.int64(8)
    two = np.int64(2)
    layer = MoE(eight, eight, np.int32(4), two, shared_hidden=eight, eval_top_k=two)
    assert repr(layer) == repr(MoE(8, 8, 4, 2, shared_hidden=8))
    assert layer(torch.randn(3, 8), top_k=two, return_routing=True)[1].rows_per_token == 2


def test_under_autocast_the_sum_of_copies_is_not_rounded_to_16_bit() -> None:
    layer = make_layer(num_experts=4, top_k=4, losses=())
    x = torch.randn(12, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.float32
    assert not torch.equal(y, y.bfloat16().float())


def test_init_normal_draws_router_experts_and_shared_expert() -> None:
    layer = MoE(64, 64, 8, 2, shared_hidden=64)
    layer.init_normal(0.02, 0.005)
    deviations = {
        name: float(parameter.detach().std()) for name, parameter in layer.named_parameters()
    }
    expected = {name: 0.005 if name.endswith("w2") else 0.02 for name in deviations}
    assert deviations == pytest.approx(expected, rel=0.1)


X = torch.zeros(2, 3, 8)

BAD_LAYERS = [
    ({"dim": 0}, "MoE: dim must be a whole number of at least 1, got 0"),
    ({"dim": True}, "MoE: dim must be a whole number of at least 1, got True"),
    (
        {"num_experts": np.float64(4)},
        "MoE: num_experts must be a whole number of at least 1, got .*4.0",
    ),
    ({"top_k": True}, "top_k=True does not fit num_experts=4"),
    (
        {"shared_hidden": 0.5},
        "shared_hidden=0.5: give the shared expert's inner width, or 0 for none",
    ),
    ({"losses": (ZLoss(0.1), ZLoss(0.2))}, "MoE: losses has 2 of the name z_loss: give it once"),
    ({"top_k": 0}, "top_k=0 does not fit num_experts=4: choose 1 <= top_k <= 4"),
    ({"top_k": 1.5}, "top_k=1.5 does not fit num_experts=4"),
    ({"eval_top_k": 0}, "top_k=0 does not fit num_experts=4"),
    ({"top_k": 1}, 'top_k=1 with normalize="after"'),
    ({"apply_weight": "around"}, 'apply_weight=\'around\' is unknown: write "after" or "before"'),
    (
        {"router": "topk"},
        "router='topk' is unknown: choose one of softmax, switch, .*, or pass a function",
    ),
    (
        {"experts": "reglu"},
        "experts='reglu' is unknown: choose one of swiglu, .*, or pass a function",
    ),
    (
        {"experts": nn.Linear(8, 8)},
        "experts is a module, Linear: pass a function that makes it from the sizes",
    ),
    (
        {"experts": nn.Linear},
        "experts: the function returned Linear: return an AbstractExperts, or ModuleExperts",
    ),
    ({"router": nn.Linear}, "router: the function returned Linear: return an AbstractRouter$"),
    ({"router_options": ["bias"]}, "router_options=.*: pass a dict of names and values"),
    ({"dtype": "bfloat16"}, "dtype='bfloat16': pass a floating-point torch.dtype"),
    ({"dtype": torch.int8}, "dtype=torch.int8: pass a floating-point torch.dtype"),
    ({"dim": 2**62}, "MoE: dim=4611686018427387904 x hidden=.* a tensor can hold"),
]

BAD_CALLS = [
    (
        "softmax",
        (torch.zeros(3, 7),),
        {},
        r"MoE\(dim=8\) was called with x of shape \(3, 7\): its last size must be dim",
    ),
    (
        "softmax",
        (X.long(),),
        {},
        "MoE was called with x of dtype torch.int64: pass activations, in a floating-point dtype",
    ),
    ("softmax", (torch.zeros(()),), {}, r"was called with x of shape \(\)"),
    (
        "softmax",
        (X,),
        {"mask": torch.ones(3, 2, dtype=torch.bool)},
        r"mask has shape \(3, 2\), .* must have shape \(2, 3\)",
    ),
    (
        "softmax",
        (X,),
        {"mask": torch.ones(2, 3)},
        "mask has dtype torch.float32: pass bool, True for real tokens",
    ),
    ("hash", (X,), {}, r"Hash routes by token ids: call the layer as moe\(x, token_ids=ids\)"),
    (
        "hash",
        (X,),
        {"token_ids": torch.zeros(6, dtype=torch.int64)},
        r"token_ids has shape \(6,\), x has \(2, 3, 8\)",
    ),
    (
        "hash",
        (X,),
        {"token_ids": torch.zeros(2, 3)},
        "token_ids have dtype torch.float32: pass whole numbers",
    ),
    ("softmax", (X,), {"top_k": 0}, "top_k=0 does not fit num_experts=4"),
    ("softmax", (X,), {"top_k": 5}, "top_k=5 does not fit num_experts=4"),
    ("gshard", (X,), {"top_k": 1}, "the GShard router chooses two experts per token, got top_k=1"),
    ("softmax", (None,), {}, "MoE: x is a NoneType: pass a torch.Tensor"),
    ("softmax", (X.numpy(),), {}, "MoE: x is a ndarray: pass a torch.Tensor"),
    ("softmax", (X,), {"mask": [True]}, "MoE: mask is a list: pass a torch.Tensor"),
    ("softmax", (X.to_sparse(),), {}, "MoE: x is a sparse tensor: pass a dense one"),
    (
        "softmax",
        (torch.nested.nested_tensor(list(X), layout=torch.jagged),),
        {},
        "MoE: x is a nested tensor: pass a dense one, padded with a mask",
    ),
    ("softmax", (X.to("meta"),), {}, "MoE: x is on the device meta, which holds no values"),
]


@pytest.mark.parametrize(("change", "message"), BAD_LAYERS)
def test_a_bad_size_or_name_is_refused_in_one_line(change: dict[str, object], message: str) -> None:
    assert re.search(
        message, refused(MoE, **{"dim": 8, "hidden": 8, "num_experts": 4, "top_k": 2, **change})
    )


@pytest.mark.parametrize(("router", "args", "options", "message"), BAD_CALLS)
def test_a_bad_call_is_refused_in_one_line(
    router: str, args: tuple, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make_layer(router)(*args, **options)
    assert "\n" not in str(caught.value)
