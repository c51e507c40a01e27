"""Why experts cannot be moved, with one message on every rank; and what moves with them besides
weights and moments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from meshes import make_layer, on_mesh
from test_place_experts import TWO, adamw, step

from helpers import refused
from moesaic.balance.run.expert_moves import ExpertPlacement
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import ModuleExperts
from moesaic.program.grid import Grid, LinkLevel
from moesaic.program.plan import Plan
from moesaic.routing.routers import SoftmaxTopK, TopologyRouter


def test_refusals_are_one_line_and_move_nothing() -> None:
    whole = make_layer()

    def rank(transport: AbstractTransport) -> list[str]:
        layer = on_mesh(whole, TWO, transport, Plan())
        said = []
        optimizer = adamw(layer.parameters())
        mesh = Mesh(TWO, transport)
        placement = ExpertPlacement([layer], mesh, optimizer, every=1)
        wrong = [
            [np.array([0, 0, 1, 2])],
            [],
            [np.array([1, 0, 2, 3] if transport.rank else [0, 1, 3, 2])],
        ]
        for orders in wrong:
            said.append(refusal(lambda orders=orders: placement.place(orders)))
        step(layer, mesh, optimizer, 0)
        w1 = layer.experts.get_parameter("w13")
        before = w1.detach().clone()
        state = optimizer.state[w1]
        for strange in (torch.zeros(7), [torch.zeros(2)]):
            optimizer.state[w1] = {**state, "odd": strange}
            said.append(refusal(lambda: placement.place([np.array([1, 0, 3, 2])])))
        optimizer.state[w1] = (
            {**state, "rank": torch.zeros(2 + transport.rank, 4)} if transport.rank else state
        )
        said.append(refusal(lambda: placement.place([np.array([1, 0, 3, 2])])))
        assert torch.equal(w1, before)
        assert placement.orders[0].tolist() == [0, 1, 2, 3]
        return said

    one, two = run_ranks(2, rank)
    assert one == two
    expected = [
        "must name each of 0 to 3 once, got",
        "0 orders for 1 layers: give one each",
        "layer 0 order differs",
        "the optimizer's weight.odd of w13, (7,), cannot be cut by expert",
        "keeps a list as its odd",
        "differs",
    ]
    for text, words in zip(one, expected, strict=True):
        assert words in text
        assert "\n" not in text


def refusal(what: Callable[[], object]) -> str:
    return refused(what)


def test_layers_and_meshes_that_cannot_are_refused() -> None:
    plain = make_layer()
    optimizer = adamw(plain.parameters())
    alone = Grid(world=2, etp=2)
    level = LinkLevel(name="node", group=(0, 1), share=0.5)
    gated = make_layer(
        router=lambda dim, count: TopologyRouter(SoftmaxTopK(dim, count), grid=TWO, levels=[level])
    )

    def rank(transport: AbstractTransport) -> None:
        layer = on_mesh(plain, TWO, transport, Plan())
        for make, words in (
            (
                lambda: ExpertPlacement([plain], Mesh(TWO, transport), optimizer, every=1),
                "a layer is on no mesh",
            ),
            (
                lambda: ExpertPlacement([layer], Mesh(alone, transport), optimizer, every=1),
                "with mesh.ep=1 every rank has all",
            ),
            (
                lambda: ExpertPlacement(
                    [on_mesh(gated, TWO, transport, Plan())],
                    Mesh(TWO, transport),
                    optimizer,
                    every=1,
                ),
                "TopologyRouter",
            ),
            (
                lambda: ExpertPlacement([layer], Mesh(TWO, transport), optimizer, every=0),
                "every=0: must be at least 1 step",
            ),
        ):
            assert words in refusal(make)

    run_ranks(2, rank)


@pytest.mark.parametrize("kind", ["swiglu", "modules"])
def test_gradients_master_copies_and_buffers_move_too(kind: str) -> None:
    whole = make_layer(kind)
    order = np.array([2, 1, 3, 0])

    def rank(transport: AbstractTransport) -> list[float]:
        layer = on_mesh(whole, TWO, transport, Plan())
        masters = {
            parameter: parameter.detach().clone().float()
            for parameter in layer.experts.parameters()
        }
        optimizer = adamw(masters.values())
        if isinstance(layer.experts, ModuleExperts):
            for module in layer.experts.experts.children():
                module.register_buffer(
                    "number", next(module.parameters()).detach().flatten()[:1].clone()
                )
        for parameter, master in masters.items():
            parameter.grad, master.grad = parameter.detach() * 3, master * 2
        optimizer.step()
        tied = [*zip(masters, masters.values())]
        placement = ExpertPlacement(
            [layer], Mesh(TWO, transport), optimizer, every=1, masters=masters
        )
        placement.place([order])
        wrong = []
        for parameter, master in tied:
            wrong.append(float((parameter.grad - parameter.detach() * 3).abs().max()))
            wrong.append(float((master.grad - parameter.detach().float() * 2).abs().max()))
            wrong.append(
                float((optimizer.state[master]["exp_avg"] - 0.1 * master.grad).abs().max())
            )
        if isinstance(layer.experts, ModuleExperts):
            for module in layer.experts.experts.children():
                wrong.append(
                    float((module.number - next(module.parameters()).detach().flatten()[0]).abs())
                )
        return wrong

    for wrong in run_ranks(2, rank):
        assert max(wrong) < 1e-6
