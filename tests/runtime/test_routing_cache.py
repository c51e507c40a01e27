"""Activation checkpointing replays routing instead of recomputing it, and counts copies once."""

from __future__ import annotations

from contextvars import copy_context

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers import ids_for, make_layer
from moesaic import Capacity, LoadBalance, MoE, checkpoint, replay_contexts, set_loss_scale
from moesaic.comm.transport import TURN, AbstractTurn
from moesaic.routing.routers import ROUTERS
from moesaic.routing.routing import Routing


class Block(nn.Module):
    """A sequence of layers after an elementwise function, so that there is something to
    recompute."""

    def __init__(self, *layers: MoE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.seen: list[Routing] = []

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            y, routing = layer(x.sin(), token_ids=token_ids, return_routing=True)
            self.seen.append(routing)
            x = x + y.tanh()
        return x.cos()


class Inside(nn.Module):
    """A block that checkpoints an inner block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x.sin()).sin().cos()


def noisy(**options: object) -> MoE:
    return make_layer("noisy", num_experts=8, **options)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("name", list(ROUTERS))
def test_checkpointing_changes_neither_output_nor_gradient_nor_counts(name: str) -> None:
    losses = (LoadBalance(0.1), LoadBalance(0.1, level="global_batch"))
    block = Block(make_layer(name, capacity=Capacity.fixed(0.75), losses=losses))
    x = torch.randn(12, 8)
    results = []
    for call in (block, lambda *args: checkpoint(block, *args)):
        block.zero_grad()
        block.layers[0].step_counts.zero_()
        torch.manual_seed(2)
        y = call(x, ids_for(x))
        y.square().sum().backward()
        results.append((y.detach(), gradients(block), block.layers[0].step_counts.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])


def test_noise_is_not_drawn_anew_without_preserved_random_state() -> None:
    block = Block(noisy())
    x = torch.randn(32, 8)
    y = torch_checkpoint(
        block,
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: replay_contexts(block),
    )
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    first, again = block.seen
    assert torch.equal(first.expert, again.expert)
    assert torch.equal(first.weight, again.weight)


def test_a_bias_that_moved_in_between_changes_no_expert() -> None:
    block = Block(make_layer("sigmoid", capacity=Capacity.fixed(0.75)))
    x = torch.randn(32, 8)
    block(x).sum().backward()
    expected = gradients(block)
    block.zero_grad()
    y = checkpoint(block, x)
    block.layers[0].router.bias.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))
    y.sum().backward()
    assert_same(gradients(block), expected)
    assert len(block.seen) == 3
    assert torch.equal(block.seen[1].token, block.seen[2].token)
    assert torch.equal(block.seen[1].expert, block.seen[2].expert)


def test_a_tape_replays_for_each_of_two_backward_calls() -> None:
    block = Block(noisy(), noisy())
    x = torch.randn(16, 8)
    y = checkpoint(block, x)
    y.sum().backward(retain_graph=True)
    once = gradients(block)
    block.zero_grad()
    y.sum().backward()
    assert_same(gradients(block), once)
    routings = [block.seen[i::2] for i in range(2)]
    assert [len(each) for each in routings] == [3, 3]
    for each in routings:
        assert all(torch.equal(each[0].expert, other.expert) for other in each[1:])
    assert [int(layer.step_counts.sum()) for layer in block.layers] == [32, 32]


def test_one_layer_called_twice_replays_each_call() -> None:
    layer = noisy()
    block = Block(layer, layer)
    x = torch.randn(16, 8)
    checkpoint(block, x).sum().backward()
    first, second, first_again, second_again = block.seen
    assert not torch.equal(first.expert, second.expert)
    assert torch.equal(first.expert, first_again.expert)
    assert torch.equal(second.expert, second_again.expert)
    assert int(layer.step_counts.sum()) == 64


@pytest.mark.filterwarnings("ignore:moesaic. one backward pass went through several")
def test_two_graphs_alive_at_once_keep_their_tapes_apart() -> None:
    block = Block(noisy())
    x = torch.randn(16, 8)
    one = checkpoint(block, x)
    two = checkpoint(block, x)
    (one + two).sum().backward()
    first, second, *again = [routing.expert for routing in block.seen]
    assert not torch.equal(first, second)
    assert sorted(expert.tolist() for expert in again) == sorted([first.tolist(), second.tolist()])
    assert int(block.layers[0].step_counts.sum()) == 64


def test_accumulated_backward_passes_equal_those_without_checkpointing() -> None:
    block = Block(noisy(losses=(LoadBalance(0.5, level="global_batch"),)))
    batches = torch.randn(3, 8, 8)
    results = []
    for call in (block, lambda x: checkpoint(block, x)):
        block.zero_grad()
        block.layers[0].step_counts.zero_()
        torch.manual_seed(2)
        set_loss_scale(block, 1 / 3)
        for x in batches:
            (call(x).sum() / 3).backward()
        results.append((gradients(block), block.layers[0].step_counts.tolist()))
    assert_same(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


@pytest.mark.parametrize("backward_calls", [1, 2])
def test_a_checkpoint_inside_a_checkpoint_replays_too(backward_calls: int) -> None:
    block = Block(noisy())
    outer = Inside(block)
    x = torch.randn(16, 8, requires_grad=True)
    torch.manual_seed(2)
    plain = Inside(block)(x)
    plain.sum().backward()
    expected = gradients(block)
    block.layers[0].step_counts.zero_()
    block.seen.clear()
    torch.manual_seed(2)
    y = torch_checkpoint(
        outer,
        x,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: replay_contexts(outer),
    )
    for _ in range(backward_calls):
        block.zero_grad()
        y.sum().backward(retain_graph=True)
        assert_same(gradients(block), expected)
    assert len(block.seen) > 1
    assert all(torch.equal(block.seen[0].expert, routing.expert) for routing in block.seen)
    assert int(block.layers[0].step_counts.sum()) == 32


def test_no_tape_stays_behind() -> None:
    block = Block(noisy(), noisy())
    x = torch.randn(4, 8)
    y = checkpoint(block, x)
    assert [layer.routing_cache for layer in block.layers] == [None, None]
    y.sum().backward()
    assert [layer.routing_cache for layer in block.layers] == [None, None]
    with pytest.raises(ValueError, match="was called with x of shape"):
        checkpoint(block, torch.randn(4, 7))
    assert [layer.routing_cache for layer in block.layers] == [None, None]


def test_checkpoint_passes_keyword_arguments_and_several_results() -> None:
    layer = noisy()
    x = torch.randn(4, 8)
    y, routing = checkpoint(
        layer, x, return_routing=True, mask=torch.tensor([True, True, True, False])
    )
    assert y.shape == x.shape
    assert int(routing.num_valid) == 3


def test_what_draws_behind_a_noisy_router_draws_the_same_again() -> None:
    """A replay draws no noise, but dropout after it must find the generator in the state of the
    first pass."""
    torch.manual_seed(0)
    moe = MoE(8, 16, 4, 2, router="noisy").double()
    block = nn.Sequential(moe, nn.Dropout(0.5))
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    gradients = []
    for run in (block, lambda x: checkpoint(block, x)):
        block.zero_grad()
        torch.manual_seed(1)
        run(x).square().sum().backward()
        gradients.append(
            [
                parameter.grad.clone()
                for parameter in block.parameters()
                if parameter.grad is not None
            ]
        )
    assert len(gradients[0]) == len(gradients[1]) > 3
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


class PlainTurn(AbstractTurn):
    """A micro-batch in flight that nobody runs beside."""

    def hand_over(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_first_pass_that_is_left_later_leaves_its_micro_batch(is_suspended: bool) -> None:
    """Python 3.10 and 3.12 leave it when they free the generator of torch's checkpoint, outside of
    the micro-batch that was ended."""
    layer = make_layer()
    turn = PlainTurn(0)
    first_pass, _ = replay_contexts(layer)
    context = copy_context()
    context.run(TURN.set, turn)
    context.run(first_pass.__enter__)
    assert turn.contexts == [first_pass]
    assert layer.routing_cache is not None
    if is_suspended:
        turn.contexts[0].suspend()
    first_pass.__exit__(None, None, None)
    assert turn.contexts == []
    assert layer.routing_cache is None
