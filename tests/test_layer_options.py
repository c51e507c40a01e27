"""Options of the layer that models of the field have: a gate on the shared expert, a router's options by name, its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import agree
from moesaic import MoE
from moesaic.errors import InputError
from moesaic.experts import EXPERTS

X = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("experts", list(EXPERTS))
def test_every_kind_of_experts_with_a_gated_shared_expert_equals_the_reference(experts: str) -> None:
    layer = MoE(8, 6, 4, experts=experts, shared_hidden=5, shared_gate=True).double()
    agree(layer, X)
    layer.zero_grad()
    layer(X).sum().backward()
    assert layer.shared_gate is not None
    assert layer.shared_gate.weight.grad is not None
    assert layer.shared_gate.weight.grad.any()


def test_the_gate_scales_what_the_shared_expert_adds() -> None:
    layer = MoE(8, 6, 4, shared_hidden=5, shared_gate=True, losses=()).double()
    assert layer.shared_gate is not None
    assert layer.shared is not None
    with torch.no_grad():
        layer.shared_gate.weight.zero_()
    halved = layer(X)
    gate, layer.shared_gate = layer.shared_gate, None
    whole = layer(X)
    layer.shared = None
    torch.testing.assert_close(halved - layer(X), (whole - layer(X)) / 2)
    assert gate.weight.shape == (1, 8)


def test_a_gate_without_a_shared_expert_is_refused() -> None:
    with pytest.raises(InputError, match="shared_gate=True needs a shared expert"):
        MoE(8, 6, 4, shared_gate=True)


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ("softmax", {"bias": True}),
        ("softmax", {"bias": True, "scale": 2.5}),
        ("switch", {"scale": 16.0}),
        ("sigmoid", {"scale": 2.5, "normalize": False}),
        ("group_limited", {"scale": 2.5, "normalize": False, "num_groups": 2, "top_groups": 1}),
    ],
    ids=str,
)
def test_a_named_router_takes_options(router: str, options: dict[str, Any]) -> None:
    layer = MoE(8, 6, 4, router=router, router_options=options).double()
    for name, parameter in layer.router.named_parameters():
        if name == "bias":
            parameter.data.normal_()
    agree(layer, X)
    scale = options.get("scale", 1.0)
    plain = MoE(8, 6, 4, router=router, router_options={**options, "scale": 1.0}, losses=()).double()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(X), scale * plain(X))


def test_a_routers_bias_is_trained_and_starts_anew() -> None:
    layer = MoE(8, 6, 4, router_options={"bias": True})
    layer(X.float()).square().sum().backward()
    bias = layer.router.get_parameter("bias")
    assert bias.grad is not None
    assert bias.grad.any()
    bias.data.fill_(1.0)
    layer.reset_parameters()
    assert not bias.any()


def test_options_that_a_router_does_not_have_are_refused() -> None:
    with pytest.raises(InputError, match="scale is no option of router='hash': choose one of buckets, seed"):
        MoE(8, 6, 4, router="hash", router_options={"scale": 2.0})
    with pytest.raises(InputError, match="router_options is for routers that are named"):
        MoE(8, 6, 4, router=lambda dim, n: None, router_options={"scale": 2.0})  # type: ignore[arg-type, return-value]


def test_the_routing_holds_the_routers_logits() -> None:
    layer = MoE(8, 6, 4, losses=()).double()
    _, routing = layer(X, return_routing=True)
    assert routing.logits is not None
    torch.testing.assert_close(routing.logits, X.flatten(0, 1) @ layer.router.get_parameter("weight").T)
    routing.logits.logsumexp(1).square().mean().backward()
    gradient = layer.router.get_parameter("weight").grad
    assert gradient is not None
    assert gradient.any()
