"""Balancing outside the loss: one update per optimizer step, from training tokens only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers import make_layer
from moesaic import MoE, balance_on_step, checkpoint, finish_step
from moesaic.errors import InputError
from moesaic.parallel import parameter_groups
from moesaic.routing.routers import SigmoidTopK


def sigmoid_layer() -> MoE:
    return MoE(8, 8, 4, 2, router=lambda d, n: SigmoidTopK(d, n, bias_rate=0.5))


def expected_bias(load: Tensor) -> list[float]:
    mean = load.double().mean()
    return [0.5 * float(torch.sign(mean - count)) for count in load]


def train_on(layer: nn.Module, x: Tensor) -> None:
    layer(x).sum().backward()


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_no_optimizer_or_no_model_is_refused(swapped: bool) -> None:
    layer = sigmoid_layer()
    optimizer = torch.optim.SGD(parameter_groups(layer.parameters(), lr=0.1))
    with pytest.raises(
        InputError, match=r"takes an optimizer, then the model: got (MoE and SGD|SGD and list)$"
    ):
        balance_on_step(*((layer, optimizer) if swapped else (optimizer, list(layer.parameters()))))


def test_one_step_updates_once_by_the_sum_of_its_micro_batches() -> None:
    layer = sigmoid_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    balance_on_step(optimizer, layer)
    load = torch.zeros(4, dtype=torch.int64)
    for _ in range(3):
        y, routing = layer(torch.randn(5, 8), return_routing=True)
        load += routing.requested
        y.sum().backward()
        assert not layer.router.bias.any(), "nothing moves before the step"
    optimizer.step()
    assert layer.router.bias.tolist() == expected_bias(load)
    assert not layer.step_counts.any()
    optimizer.step()
    assert layer.router.bias.tolist() == expected_bias(load), "a step without tokens moves nothing"


def test_evaluation_is_not_counted() -> None:
    layer = sigmoid_layer().eval()
    layer(torch.randn(9, 8))
    assert not layer.step_counts.any()
    layer.train()
    with torch.no_grad():
        layer(torch.randn(9, 8))
    assert not layer.step_counts.any()


def test_padding_is_not_counted() -> None:
    layer = sigmoid_layer()
    mask = torch.tensor([True, True, False, True, False, False])
    layer(torch.randn(6, 8), mask=mask)
    assert int(layer.step_counts.sum()) == 3 * 2


def test_recomputation_is_not_counted() -> None:
    layer = sigmoid_layer()
    block = nn.Sequential(nn.Tanh(), layer, nn.Tanh())
    train_on(lambda x: checkpoint(block, x), torch.randn(6, 8))
    assert int(layer.step_counts.sum()) == 6 * 2


def test_dropped_copies_are_counted() -> None:
    from moesaic import Capacity

    layer = sigmoid_layer()
    routing = layer(torch.randn(16, 8), capacity=Capacity.fixed(0.25), return_routing=True)[1]
    assert int(routing.dropped) > 0
    assert int(layer.step_counts.sum()) == 32


def test_the_hook_can_be_removed() -> None:
    layer = sigmoid_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = balance_on_step(optimizer, layer)
    handle.remove()
    train_on(layer, torch.randn(6, 8))
    optimizer.step()
    assert not layer.router.bias.any()


def test_a_skipped_step_moves_nothing() -> None:
    layer = sigmoid_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    balance_on_step(optimizer, layer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(layer(torch.randn(6, 8)).sum()).backward()
    layer.router.weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    assert not layer.router.bias.any()


def test_tokens_of_a_skipped_step_count_towards_the_next() -> None:
    layer = sigmoid_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    balance_on_step(optimizer, layer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    load = torch.zeros(4, dtype=torch.int64)
    for overflow in (float("inf"), 0.0):
        y, routing = layer(torch.randn(6, 8), return_routing=True)
        load += routing.requested
        scaler.scale(y.sum()).backward()
        layer.router.weight.grad[0, 0] = overflow
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert layer.step_counts.any() == bool(overflow)
    assert layer.router.bias.tolist() == expected_bias(load)


def test_every_layer_of_the_model_is_updated() -> None:
    model = nn.Sequential(sigmoid_layer(), nn.Sequential(sigmoid_layer()))
    train_on(model, torch.randn(7, 8))
    finish_step(model)
    assert model[0].router.bias.any()
    assert model[1][0].router.bias.any()


def test_repeated_updates_balance_the_load() -> None:
    layer = MoE(8, 8, 4, 2, router=lambda d, n: SigmoidTopK(d, n, bias_rate=0.02), losses=())
    x = torch.randn(128, 8) + 1
    before = layer(x, return_routing=True)[1].requested.max()
    for _ in range(60):
        finish_step(layer)
        after = layer(x, return_routing=True)[1].requested.max()
    assert before > 90
    assert after < 75


@pytest.mark.parametrize("name", ["softmax", "noisy"])
def test_routers_without_a_bias_take_the_hook(name: str) -> None:
    layer = make_layer(name)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    balance_on_step(optimizer, layer)
    train_on(layer, torch.randn(6, 8))
    optimizer.step()
    assert not layer.step_counts.any()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_bias_of_a_16_bit_model_keeps_its_small_steps(low: torch.dtype) -> None:
    layer = MoE(8, 8, 4, 2, router="sigmoid")
    layer.router.bias.fill_(0.7)
    layer = layer.to(low)
    layer.router.update(torch.tensor([0, 5, 5, 5]))
    torch.testing.assert_close(layer.router.bias, torch.tensor([0.701, 0.699, 0.699, 0.699]))
    assert layer(torch.randn(3, 8, dtype=low)).dtype == low
    assert layer.to("meta").router.bias.is_meta
    assert not layer.to_empty(device="cpu").router.bias.is_meta
