"""Options of the layer that published models need: a gate on the shared expert, router options by
name, router logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import TOP_K, agree, refused
from moesaic import MoE
from moesaic.errors import InputError
from moesaic.experts import EXPERTS
from moesaic.kernels.grouped_matmul import grouped_matmul
from moesaic.routing.routers import ON_MESH, ROUTERS

X = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("experts", list(EXPERTS))
def test_every_kind_of_experts_with_a_gated_shared_expert_equals_the_reference(
    experts: str,
) -> None:
    layer = MoE(8, 6, 4, experts=experts, shared_hidden=5, shared_gate=True).double()
    agree(layer, X)
    layer.zero_grad()
    layer(X).sum().backward()
    assert layer.shared_gate.weight.grad.any()


def test_the_gate_scales_what_the_shared_expert_adds() -> None:
    layer = MoE(8, 6, 4, shared_hidden=5, shared_gate=True, losses=()).double()
    assert layer.shared is not None
    with torch.no_grad():
        layer.shared_gate.weight.zero_()
    halved = layer(X)
    gate = layer.shared_gate
    layer.shared_gate = None
    whole = layer(X)
    layer.shared = None
    torch.testing.assert_close(halved - layer(X), (whole - layer(X)) / 2)
    assert gate.weight.shape == (1, 8)


def test_a_gate_without_a_shared_expert_is_refused() -> None:
    assert "shared_gate=True needs a shared expert" in refused(MoE, 8, 6, 4, shared_gate=True)


EVERY = list(ROUTERS | ON_MESH)
SIZES = {"group_limited": {"num_groups": 2, "top_groups": 1}}
IDS = torch.arange(X.numel() // X.shape[-1]).view(X.shape[:-1])


def two_layers(router: str, options: dict[str, Any], changed: dict[str, Any]) -> tuple[MoE, MoE]:
    """Return two layers with the same weights, in evaluation mode; the second has changed
    options."""
    top_k = TOP_K.get(router, 2)
    made = [
        MoE(8, 6, 4, top_k, router=router, router_options=SIZES.get(router, {}) | each, losses=())
        .double()
        .eval()
        for each in (options, options | changed)
    ]
    made[1].load_state_dict(made[0].state_dict(), strict=False)
    return made[0], made[1]


@pytest.mark.parametrize("router", EVERY)
def test_every_named_router_takes_a_scale(router: str) -> None:
    layer, scaled = two_layers(router, {}, {"scale": 2.5})
    torch.testing.assert_close(scaled(X, token_ids=IDS), 2.5 * layer(X, token_ids=IDS))


@pytest.mark.parametrize("router", [name for name in EVERY if name != "hash"])
def test_every_named_router_that_has_logits_takes_a_trained_bias(router: str) -> None:
    layer, biased = two_layers(router, {}, {"bias": True})
    torch.testing.assert_close(biased(X), layer(X), msg="a bias starts at zero")
    ((name, bias),) = [
        each for each in biased.router.named_parameters() if each[0].endswith("logit_bias")
    ]
    bias.data.normal_(generator=torch.Generator().manual_seed(3))
    (_, of_layer) = layer(X, return_routing=True)
    (y, of_biased) = biased(X, return_routing=True)
    torch.testing.assert_close(of_biased.logits, of_layer.logits + bias)
    y.square().sum().backward()
    assert bias.grad.any()
    assert bias is dict(biased.router.named_parameters())[name]
    biased.reset_parameters()
    assert not bias.any(), "it starts anew"


@pytest.mark.parametrize(
    ("router", "sums_to_one", "keeps"),
    [
        ("softmax", "after", "before"),
        ("noisy", "after", "before"),
        ("cosine", "after", "before"),
        ("topology", "after", "before"),
        ("sigmoid", True, False),
        ("group_limited", True, False),
        ("gshard", True, False),
    ],
)
def test_named_routers_normalise_or_keep_their_scores(
    router: str, sums_to_one: object, keeps: object
) -> None:
    ones, kept = two_layers(router, {"normalize": sums_to_one}, {"normalize": keeps})
    (_, a) = ones(X, return_routing=True)
    (_, b) = kept(X, return_routing=True)
    assert a.expert.tolist() == b.expert.tolist()
    of_score = (
        torch.sigmoid(b.logits) if keeps is False and router != "gshard" else b.logits.softmax(-1)
    )
    torch.testing.assert_close(b.weight, of_score[b.token, b.expert])
    total = torch.zeros(len(of_score), dtype=torch.float64).index_add(0, b.token, b.weight)
    torch.testing.assert_close(a.weight, b.weight / total[b.token])


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ("softmax", {"bias": True}),
        ("softmax", {"bias": True, "scale": 2.5}),
        ("switch", {"scale": 16.0}),
        ("sigmoid", {"scale": 2.5, "normalize": False, "bias": True}),
        ("group_limited", {"scale": 2.5, "normalize": False, "num_groups": 2, "top_groups": 1}),
    ],
    ids=str,
)
def test_options_of_a_router_agree_with_the_reference(router: str, options: dict[str, Any]) -> None:
    layer = MoE(8, 6, 4, router=router, router_options=options).double()
    for name, parameter in layer.router.named_parameters():
        if name == "logit_bias":
            parameter.data.normal_()
    agree(layer, X)


def test_options_that_a_router_does_not_have_are_refused() -> None:
    with pytest.raises(
        InputError,
        match="bias is not an option of router='hash': choose one of buckets, seed, scale",
    ):
        MoE(8, 6, 4, router="hash", router_options={"bias": True})
    with pytest.raises(
        InputError, match="normalize='both' is unknown: write normalize=\"before\" or"
    ):
        MoE(8, 6, 4, router="cosine", router_options={"normalize": "both"})
    with pytest.raises(InputError, match="router_options is only for a router given by name"):
        MoE(8, 6, 4, router=lambda dim, n: None, router_options={"scale": 2.0})  # type: ignore[arg-type, return-value]


def test_the_routing_holds_the_routers_logits() -> None:
    layer = MoE(8, 6, 4, losses=()).double()
    _, routing = layer(X, return_routing=True)
    torch.testing.assert_close(
        routing.logits, X.flatten(0, 1) @ layer.router.get_parameter("weight").T
    )
    routing.logits.logsumexp(1).square().mean().backward()
    gradient = layer.router.get_parameter("weight").grad
    assert gradient.any()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda layer, x: torch.vmap(layer)(x),
        lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
        lambda layer, x: torch.func.grad(
            lambda values: torch.func.functional_call(layer, values, (x,)).sum()
        )({name: value.detach() for name, value in layer.named_parameters()}),
    ],
    ids=["vmap", "grad", "jvp", "grad of weights"],
)
def test_transforms_of_torch_func_are_refused_in_one_line(
    transformed: Callable[[MoE, Tensor], object],
) -> None:
    with pytest.raises(
        InputError,
        match=r"^MoE was called under vmap or another transform of torch\.func, .*autograd$",
    ):
        transformed(MoE(8, 16, 4, 2), torch.randn(3, 5, 8))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: MoE(8, 16, 4, 2)(x),
        lambda x: grouped_matmul(
            x, torch.ones(2, 16, 8, requires_grad=True), torch.tensor([2, 5], dtype=torch.int32)
        ),
    ],
    ids=["layer", "grouped matmul"],
)
def test_second_derivatives_are_refused_in_one_line(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(5, 8, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    with pytest.raises(InputError, match=r"^a MoE layer has no second derivatives: .*"):
        first.sum().backward()
