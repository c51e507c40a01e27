"""Deferred initialisation: a layer created on the meta device has no undefined state, in whichever
way it gets its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import TOP_K, ids_for
from moesaic import ModuleExperts, MoE, PlainExperts, balance_on_step
from moesaic.routing.routers import ON_MESH, ROUTERS

NAMES = sorted({**ROUTERS, **ON_MESH})


@pytest.fixture(autouse=True)
def _dirty_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `to_empty` and similar functions return memory with visible garbage."""
    original = torch.empty_like

    def used(*args: Any, **options: Any) -> Tensor:
        tensor = original(*args, **options).detach()
        return (
            tensor if tensor.is_meta else tensor.fill_(True if tensor.dtype == torch.bool else 77)
        )

    monkeypatch.setattr(torch, "empty_like", used)


def build(router: str = "softmax", **options: object) -> MoE:
    return MoE(8, 8, 4, TOP_K.get(router, 2), router=router, **options)


def on_meta(router: str = "softmax", **options: object) -> MoE:
    with torch.device("meta"):
        layer = build(router, **options)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    return layer


def trained(layer: MoE, steps: int = 2) -> list[Tensor]:
    """Return the results of some steps, and the state after them."""
    layer = copy.deepcopy(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1) if list(layer.parameters()) else None
    balance_on_step(optimizer, layer)
    torch.manual_seed(4)
    found = []
    for _ in range(steps):
        x = torch.randn(2, 6, 8)
        y = layer(x, token_ids=ids_for(x) if layer.router.needs_token_ids else None)
        y.square().sum().backward()
        found += [
            y.detach(),
            layer.step_counts.clone(),
            *(p.grad.clone() for p in layer.parameters()),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *layer.state_dict().values()]


def by_to_empty(layer: MoE, state: dict[str, Tensor]) -> None:
    layer.to_empty(device="cpu")
    layer.load_state_dict(state, strict=True)


def by_assignment(layer: MoE, state: dict[str, Tensor]) -> None:
    layer.load_state_dict(state, strict=True, assign=True)


def by_transformers(layer: MoE, state: dict[str, Tensor]) -> None:
    """Do what `from_pretrained` does: set parameters and persistent buffers one by one, other
    buffers to undefined memory."""
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        module = layer.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(value) if leaf in module._parameters else value)
    for name, buffer in list(layer.named_buffers()):
        if name not in state:
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, torch.empty_like(buffer, device="cpu"))


LOADS = {"copied": by_to_empty, "assigned": by_assignment, "transformers": by_transformers}


@pytest.mark.parametrize("router", NAMES)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_loaded_layer_trains_as_the_one_that_was_saved(
    load: Callable[..., None], router: str
) -> None:
    torch.manual_seed(0)
    saved = build(router, shared_hidden=4)
    layer = on_meta(router, shared_hidden=4)
    load(layer, copy.deepcopy(saved.state_dict()))
    for one, other in zip(trained(layer), trained(saved), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("router", NAMES)
def test_reset_parameters_makes_a_new_layer(router: str) -> None:
    new = {}
    for name, make in (("meta", partial(on_meta, router)), ("used", partial(build, router))):
        layer = make(shared_hidden=4).to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
        new[name] = trained(layer)
        for value in layer.state_dict().values():
            assert not (value == 77).any() or value.dtype == torch.int32
    torch.manual_seed(0)
    built = build(router, shared_hidden=4)
    for one, other in zip(new["meta"], new["used"], strict=True):
        assert torch.equal(one, other)
    for name, value in built.state_dict().items():
        assert layer.state_dict()[name].shape == value.shape
        if "weight" not in name and "." in name and value.dim() <= 1:
            torch.testing.assert_close(layer.state_dict()[name], value, msg=name)
    bound = 8**-0.5
    assert float(layer.experts.w1.detach().abs().max()) <= bound


@pytest.mark.parametrize("router", NAMES)
def test_init_normal_leaves_nothing_undefined(router: str) -> None:
    layer = on_meta(router).to_empty(device="cpu")
    layer.init_normal(0.02, 0.01)
    assert all(torch.isfinite(value).all() for value in layer.state_dict().values())
    new = build(router).state_dict()
    for name, value in layer.router.state_dict().items():
        if value.dim() <= 1:
            torch.testing.assert_close(value, new[f"router.{name}"])
        assert value.dtype == torch.int32 or float(value.abs().max()) < 3


def test_reset_parameters_forgets_what_was_counted() -> None:
    layer = build("sigmoid")
    layer(torch.randn(6, 8))
    layer.router.bias.fill_(1.0)
    layer.reset_parameters()
    assert not layer.step_counts.any()
    assert not layer.router.bias.any()


@pytest.mark.parametrize(
    "experts", [partial(PlainExperts, bias=True), lambda d, h, n: ModuleExperts(own, d, n)]
)
def test_reset_parameters_reaches_all_experts(experts: Callable) -> None:
    layer = MoE(8, 8, 4, 2, experts=experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(77)
    layer.reset_parameters()
    assert all(float(parameter.abs().max()) < 1 for parameter in layer.parameters())


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
