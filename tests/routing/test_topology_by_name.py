"""Tests of `router="topology"`, which limits nothing before the layer is on a mesh, and follows its
limits on a mesh."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from helpers import refused
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.planner.cluster import read_cluster
from moesaic.planner.policy_rates import levels_of
from moesaic.program.grid import Grid, LinkLevel
from moesaic.program.plan import Plan
from moesaic.routing.routers import (
    ON_MESH,
    ROUTERS,
    SigmoidTopK,
    SoftmaxTopK,
    TopologyRouter,
    node_level,
    topology_gate,
)
from moesaic.routing.routers.topology import NODE_SHARE

DIM = 8
EXPERTS = 16
TOKENS = 50
GRID = Grid(world=4, ep=4, ranks_per_node=2)


def make(router: object = "topology", top_k: int = 2) -> MoE:
    torch.manual_seed(0)
    return MoE(DIM, 8, EXPERTS, top_k, router=router, losses=())  # type: ignore[arg-type]


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(rank))


def on_mesh(whole: MoE, grid: Grid, *, training: bool = True) -> list[torch.Tensor]:
    """Return the experts of each rank's tokens, (tokens, top_k) each."""

    def rank(transport: AbstractTransport) -> torch.Tensor:
        layer = copy.deepcopy(whole).train(training)
        layer.parallelize(Mesh(grid, transport), Plan())
        routing = layer(tokens_of(transport.rank), return_routing=True)[1]
        return routing.expert.view(TOKENS, -1)

    return run_ranks(grid.world, rank)


def leaving(experts: torch.Tensor, rank: int) -> int:
    """Return how many of a rank's copies go to the other node."""
    return int((experts // (EXPERTS // 4) // 2 != rank // 2).sum())


def test_it_has_a_name_apart_from_those_that_no_mesh_changes() -> None:
    assert "topology" not in ROUTERS
    assert isinstance(make().router, TopologyRouter)
    assert list(ON_MESH) == ["topology"]
    with pytest.raises(
        InputError,
        match=r"router='nearest' is unknown: choose one of softmax, .*, topology, or pass",
    ):
        make("nearest")


def test_one_process_routes_as_the_inner_router() -> None:
    gate = make().train()
    plain = make("softmax").train()
    plain.load_state_dict(
        {name.replace("inner.", ""): value for name, value in gate.state_dict().items()}
    )
    x = tokens_of(0)
    assert torch.equal(gate(x), plain(x))
    gate.router.check(EXPERTS)
    assert not gate.router.is_placed  # type: ignore[union-attr]


def test_on_a_mesh_it_is_the_gate_that_was_given_all_of_it() -> None:
    named = on_mesh(make(), GRID)
    levels = (LinkLevel(name="node", group=(0, 0, 1, 1), share=NODE_SHARE),)
    for rank, experts in enumerate(named):
        assert leaving(experts, rank) == int(NODE_SHARE * 2 * TOKENS)
        gate = TopologyRouter(
            SoftmaxTopK(DIM, EXPERTS), grid=GRID, levels=levels, origin=rank
        ).train()
        gate.inner.weight = make().router.inner.weight  # type: ignore[union-attr]
        scores = gate.scores(tokens_of(rank), None, None)
        assert torch.equal(gate.choose(scores, 2, None, None).expert.view(TOKENS, 2), experts)


def test_evaluation_and_a_single_node_are_not_limited() -> None:
    for grid, training in ((GRID, False), (Grid(world=4, ep=4, ranks_per_node=4), True)):
        free = on_mesh(make("softmax"), grid, training=training)
        found = on_mesh(make(), grid, training=training)
        assert all(leaving(experts, rank) > 30 for rank, experts in enumerate(found))
        assert all(torch.equal(a, b) for a, b in zip(free, found))
    assert node_level(Grid(world=4, ep=4, ranks_per_node=4)) == ()


def test_a_factory_takes_share_router_and_cluster() -> None:
    half = on_mesh(make(partial(topology_gate, share=0.3, inner=SigmoidTopK)), GRID)
    assert [leaving(experts, rank) for rank, experts in enumerate(half)] == [30] * 4
    cluster = read_cluster("fastermoe-johnny")
    grid = Grid(world=16, ep=16, ranks_per_node=8)
    gate = topology_gate(DIM, 64, levels=partial(levels_of, cluster))
    gate.place(grid, 3)
    assert gate.levels == levels_of(cluster, grid)
    assert len(gate.levels) == 2
    assert gate.inside.shape == (2, 1, 64)


def test_what_does_not_fit_is_said_when_the_mesh_is_known() -> None:
    with pytest.raises(
        InputError, match="top_k=9 exceeds the 8 experts inside a group of the topology gate"
    ):
        on_mesh(make(top_k=9), GRID)
    assert "share=2: choose 0 to 1" in refused(
        lambda: topology_gate(DIM, EXPERTS, share=2).place(GRID, 0)
    )
    assert "ep=4 does not divide num_experts=6" in refused(
        lambda: topology_gate(DIM, 6).place(GRID, 0)
    )


def test_a_gate_that_was_given_a_mesh_keeps_it() -> None:
    """The gate is in one process that stands for a cluster, and its layer is put on a mesh of one
    rank."""
    levels = node_level(GRID, 0.5)
    layer = make(
        lambda dim, count: TopologyRouter(SoftmaxTopK(dim, count), grid=GRID, levels=levels)
    )
    run_ranks(1, lambda transport: layer.parallelize(Mesh(Grid(world=1), transport), Plan()))
    assert layer.router.levels == levels
    assert layer.router.inside.shape == (1, 4, EXPERTS)
