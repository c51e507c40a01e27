"""Experts that move between steps: the model, its optimizer and its checkpoints equal those with
experts that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from meshes import compiled, every_rank, make_layer, on_mesh, part_of, tokens_of
from torch import Tensor

from helpers import GivenOrders, refused
from moesaic.balance.expert_placement import AbstractExpertPlacer, Balanced, ExpertLoad
from moesaic.balance.run.expert_moves import ExpertPlacement, Moved
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE, finish_step
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.routing.capacity import AbstractCapacity
from moesaic.routing.losses import LoadBalance
from moesaic.runtime.data_parallel import average_gradients
from moesaic.runtime.routing_cache import checkpoint
from moesaic_lab.recorder import Recorder

Optimizer = Callable[[Any], torch.optim.Optimizer]
STEPS = 4
EVERY = 2
ORDERS = [[2, 3, 0, 1], [3, 1, 0, 2]]
TWO = Grid(world=2, ep=2)
FOUR = Grid(world=4, ep=4, ranks_per_node=2)
FOLDED = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
COPIES = Grid(world=4, ep=2, innermost="ep", ranks_per_node=2)

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.05, weight_decay=0.1, amsgrad=True
    ),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](parameters)


def step(
    layer: MoE,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer,
    number: int,
    capacity: AbstractCapacity | None = None,
) -> list[Tensor]:
    """Run one training step; return the output and the input's gradient."""
    x = tokens_of(mesh.grid.coordinate(mesh.rank, "dp"), seed=number).requires_grad_()
    y = layer(x, capacity=capacity)
    (y * torch.linspace(-1, 1, y.shape[-1], dtype=torch.float64)).sin().mean().backward()
    average_gradients(layer, mesh)
    optimizer.step()
    optimizer.zero_grad()
    finish_step(layer)
    assert x.grad is not None
    return [y.detach(), x.grad]


def state_of(layer: MoE, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters and their optimizer state."""
    found = []
    for parameter in layer.parameters():
        found.append(parameter.detach().clone())
        found += [
            v.clone()
            for _, v in sorted(optimizer.state[parameter].items())
            if isinstance(v, Tensor)
        ]
    return found


def trained(
    whole: MoE,
    grid: Grid,
    transport: AbstractTransport,
    plans: list[Plan],
    make: Optimizer,
    placer: AbstractExpertPlacer | None,
    capacity: AbstractCapacity | None = None,
) -> tuple[list[Tensor], list[Moved]]:
    """Train a layer, with the plans in turn; return all results that a rank sees, and the moves."""
    kind = "biases" if whole.experts.names[1] else "swiglu"
    layer = on_mesh(whole, grid, transport, compiled(plans[0], grid, kind))
    mesh = Mesh(grid, transport)
    optimizer = make(layer.parameters())
    placement = (
        None
        if placer is None
        else ExpertPlacement([layer], mesh, optimizer, every=EVERY, placer=placer)
    )
    found = []
    moves = []
    for number in range(STEPS):
        if len(plans) > 1:
            layer.use_plan(plans[number % len(plans)])
        found += step(layer, mesh, optimizer, number, capacity)
        moved = None if placement is None else placement.after_step()
        moves += [moved] if moved else []
    found.append(layer.step_counts.double())
    if placement is None:
        return found + state_of(layer, optimizer), moves
    with placement.at_home():
        return found + state_of(layer, optimizer), moves


def assert_same_training(
    whole: MoE,
    grid: Grid,
    plans: list[Plan],
    make: Optimizer,
    capacity: AbstractCapacity | None = None,
) -> list[list[Moved]]:
    def rank(transport: AbstractTransport) -> tuple[list[Tensor], list[Tensor], list[Moved]]:
        placer = GivenOrders([np.array(order) for order in ORDERS])
        moving, moves = trained(whole, grid, transport, plans, make, placer, capacity)
        return moving, trained(whole, grid, transport, plans, make, None, capacity)[0], moves

    results = run_ranks(grid.world, rank)
    for moving, still, moves in results:
        assert len(moves) == STEPS // EVERY
        for a, b in zip(moving, still, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return [moves for *_, moves in results]


@pytest.mark.parametrize(
    ("grid", "kind", "optimizer"),
    [(TWO, "biases", "momentum"), (FOUR, "swiglu", "adamw"), (COPIES, "modules", "adamw")],
    ids=str,
)
def test_training_with_moving_experts_is_training_without(
    grid: Grid, kind: str, optimizer: str
) -> None:
    whole = make_layer(kind, losses=(LoadBalance(0.1),), router="sigmoid")
    assert_same_training(whole, grid, [Plan()], OPTIMIZERS[optimizer])


def test_what_moves_is_counted_and_nothing_else_is_sent() -> None:
    whole = make_layer()
    expert = sum(p[0].numel() for p in whole.experts.parameters()) * 8

    def rank(transport: AbstractTransport) -> tuple[list[Moved], int]:
        recorder = Recorder(transport)
        layer = on_mesh(whole, FOUR, recorder, Plan())
        optimizer = adamw(layer.parameters())
        step(layer, Mesh(FOUR, recorder), optimizer, 0)
        placement = ExpertPlacement([layer], Mesh(FOUR, recorder), optimizer, every=1)
        before = len(recorder.ranges)
        moves = [
            placement.place([np.array(order)])
            for order in ([0, 1, 2, 3], [1, 0, 2, 3], [1, 3, 2, 0])
        ]
        large = [
            m.num_bytes
            for each in recorder.ranges[before:]
            for m in each.messages
            if m.num_bytes >= expert / 8
        ]
        return moves, sum(large)

    results = run_ranks(4, rank)
    state = 4 * expert  # the weight and three moments of it
    for moves, _ in results:
        assert moves[0] == Moved(experts=0, num_bytes=0, inter_node_bytes=0)
        assert moves[1] == Moved(experts=2, num_bytes=2 * state, inter_node_bytes=0)
        assert moves[2] == Moved(experts=2, num_bytes=2 * state, inter_node_bytes=2 * state)
    assert [sent for _, sent in results] == [state, 2 * state, 0, state]


def test_weights_lie_where_the_order_says_and_come_home() -> None:
    whole = make_layer()
    order = np.array([2, 0, 3, 1])
    grid = FOLDED

    def rank(transport: AbstractTransport, _: Tensor) -> None:
        layer = on_mesh(whole, grid, transport, Plan(schedule="s2"))
        placement = ExpertPlacement(
            [layer], Mesh(grid, transport), adamw(layer.parameters()), every=1
        )
        placement.place([order])
        for name in ("w13", "w2"):
            source = whole.experts.get_parameter(name).detach()
            assert torch.equal(
                layer.experts.get_parameter(name),
                part_of(whole, source[order], name, grid, transport.rank),
            )
        with placement.at_home():
            assert placement.orders[0].tolist() == [0, 1, 2, 3]
            for name, value in layer.experts.state_dict().items():
                mine = part_of(
                    whole, whole.experts.get_parameter(name).detach(), name, grid, transport.rank
                )
                assert torch.equal(value, mine)
        assert placement.orders[0].tolist() == order.tolist()
        for what in (layer.state_dict, lambda: layer.load_state_dict({})):
            assert "save and load within `with placement.at_home():`" in refused(what)

    every_rank(grid, rank)


def test_decides_from_the_load_of_training_since_the_last_decision() -> None:
    seen: list[ExpertLoad] = []

    class Watching(AbstractExpertPlacer):
        def decide(self, load: ExpertLoad) -> np.ndarray:
            seen.append(load)
            return load.order[::-1]

    whole = make_layer(num_experts=8)

    def rank(transport: AbstractTransport) -> list[Moved]:
        layer = on_mesh(whole, FOUR, transport, Plan())
        optimizer = adamw(layer.parameters())
        mesh = Mesh(FOUR, transport)
        placement = ExpertPlacement([layer], mesh, optimizer, every=2, placer=Watching())
        moves = []
        counts = torch.zeros(8)
        for number in range(4):
            layer.train()
            x = tokens_of(transport.rank, seed=number).requires_grad_()
            y, routing = (
                (checkpoint(layer, x, return_routing=True))
                if number % 2
                else layer(x, return_routing=True)
            )
            counts += routing.requested
            y.sum().backward()  # a recomputation counts no token twice
            average_gradients(layer, mesh)
            optimizer.step()
            optimizer.zero_grad()
            layer.eval()
            layer(x.detach())  # nor does evaluation count
            moved = placement.after_step()
            if moved is not None:
                moves.append(moved)
                assert np.array_equal(seen[-1].copies.sum(0), counts.numpy() / 2)
                counts.zero_()
        return moves

    results = run_ranks(4, rank)
    assert all(moves == results[0] for moves in results)
    first, second = results[0]
    assert (first.experts, second.experts) == (8, 8)
    load = seen[0]
    assert (load.steps, load.dim, load.expert_parameters) == (2, 4, 3 * 4 * 8)
    assert load.expert_bytes == 4 * 8 * 3 * 4 * 8
    assert first.busiest_before == (load.busiest(load.place) / (load.copies.sum() / 4),)
    assert second.busiest_before[0] > 0


def test_hot_experts_are_moved_apart_once_and_stay() -> None:
    whole = MoE(4, 8, 8, 1, losses=(), router="switch").double()
    with torch.no_grad():
        whole.router.weight.zero_()
        # all tokens go to two experts of the first rank
        whole.router.weight[0, 0] = 9.0
        whole.router.weight[1, 0] = -9.0
    whole.router.weight.requires_grad_(False)
    slow = Rates(tflops=1e-9)  # computes so slowly that any move pays

    def rank(transport: AbstractTransport) -> tuple[list[Moved], list[int]]:
        layer = on_mesh(whole, FOUR, transport, Plan())
        mesh = Mesh(FOUR, transport)
        optimizer = adamw(layer.experts.parameters())
        placement = ExpertPlacement([layer], mesh, optimizer, every=1, placer=Balanced(slow))
        found = []
        for _ in range(3):
            step(layer, mesh, optimizer, 0)
            found.append(placement.after_step())
        return found, placement.orders[0].tolist()

    results = run_ranks(4, rank)
    assert all(result == results[0] for result in results)
    (first, *later), order = results[0]
    assert first.busiest_before == (4.0,)
    assert first.busiest_after[0] < 3.0
    assert order.index(0) // 2 != order.index(1) // 2
    assert first.experts == 2
    assert [moved.num_bytes for moved in later] == [0, 0]
    assert [moved.busiest_before for moved in later] == [first.busiest_after] * 2
