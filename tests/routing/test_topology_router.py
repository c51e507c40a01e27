"""Tests of the topology gate: it equals a slow oracle, its limits hold, and a mesh routes like one
process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import refused
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.planner.cluster import read_cluster
from moesaic.planner.policy_rates import levels_of
from moesaic.program.grid import Grid, LinkLevel
from moesaic.program.plan import Plan
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import (
    ROUTERS,
    BalancedAssignment,
    NoisyTopK,
    SigmoidTopK,
    SoftmaxTopK,
    TopologyRouter,
)
from moesaic.routing.routers.topology import experts_inside
from moesaic.routing.routing import Scores

DIM = 8
EXPERTS = 16
GRID = Grid(world=8, ep=8, ranks_per_node=2)
INNER: dict[str, Callable[[int, int], AbstractRouter]] = {
    "softmax": SoftmaxTopK,
    "switch": partial(SoftmaxTopK, normalize="before"),
    "sigmoid": SigmoidTopK,
    "noisy": NoisyTopK,
}


def levels(
    *shares: float, grid: Grid = GRID, sizes: tuple[int, ...] = (4, 2)
) -> tuple[LinkLevel, ...]:
    """Return levels of consecutive ranks, of four (a leaf switch) and of two (a node)."""
    return tuple(
        LinkLevel(
            name=f"of {size}", group=tuple(rank // size for rank in range(grid.world)), share=share
        )
        for size, share in zip(sizes, shares)
    )


def make(
    name: str = "softmax", *shares: float, origin: int | None = None, seed: int = 0
) -> TopologyRouter:
    torch.manual_seed(seed)
    return TopologyRouter(
        INNER[name](DIM, EXPERTS), grid=GRID, levels=levels(*shares), origin=origin
    )


def oracle(gate: TopologyRouter, scores: Scores, top_k: int, valid: list[bool]) -> list[set[int]]:
    """Return the experts of each token, chosen token by token by the gate's definition."""
    rank_by = scores.rank_by.tolist()
    gates = scores.gates.tolist()
    tokens = len(rank_by)
    origins = gate.inside.shape[1]
    inside = gate.inside.tolist()
    best_first = [sorted(range(EXPERTS), key=lambda e: (-rank_by[t][e], e)) for t in range(tokens)]
    chosen = [order[:top_k] for order in best_first]
    for number, level in enumerate(gate.levels):
        for origin in range(origins):
            mine = [t for t in range(tokens) if t * origins // tokens == origin]
            limit = int(level.share * top_k * sum(valid[t] for t in mine) + 1e-9)
            leaving = [
                (-gates[t][e], t, place)
                for t in mine
                if valid[t]
                for place, e in enumerate(chosen[t])
                if not inside[number][origin][e]
            ]
            for _, t, place in sorted(leaving)[limit:]:
                chosen[t][place] = -1
            for t in mine:
                kept = [e for e in chosen[t] if e >= 0]
                near = [e for e in best_first[t] if inside[number][origin][e] and e not in kept]
                refilled = kept + near[: top_k - len(kept)]
                chosen[t] = sorted(refilled, key=best_first[t].index)
    return [set(row) for row in chosen]


@given(
    st.sampled_from(list(INNER)),
    st.integers(1, 4),
    st.integers(1, 40),
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0]), min_size=1, max_size=2),
    st.sampled_from([None, 0, 3, 7]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_it_chooses_as_the_definition_says(name, top_k, tokens, shares, origin, padded, ties, seed):
    gate = make(name, *shares, origin=origin, seed=seed).train()
    if name == "sigmoid":
        gate.inner.bias += torch.randn(EXPERTS) * 0.3
    x = torch.randn(tokens, DIM)
    noise = gate.draw(tokens, x.device)
    scores = gate.scores(x, noise, None)
    if ties:
        scores = scores._replace(
            rank_by=(scores.rank_by * 2).round(),
            gates=(scores.gates.detach() * 8).round(),
            probs=scores.probs,
        )
    valid = torch.rand(tokens) < 0.7 if padded else None
    choice = gate.choose(scores, top_k, valid, noise)
    found = [set(row) for row in choice.expert.view(tokens, top_k).tolist()]
    told = [True] * tokens if valid is None else valid.tolist()
    expected = oracle(gate, scores, top_k, told)
    assert [found[t] for t in range(tokens) if told[t]] == [
        expected[t] for t in range(tokens) if told[t]
    ]
    assert all(len(row) == top_k for row in found)


def test_a_limit_of_all_changes_nothing_and_evaluation_is_never_limited():
    x = torch.randn(64, DIM)
    for gate in (make("softmax", 1.0, 1.0).train(), make("softmax", 0.0, 0.0).eval()):
        scores = gate.scores(x, None, None)
        found = gate.choose(scores, 2, None, None)
        plain = gate.inner.choose(scores, 2, None, None)
        assert (found.expert == plain.expert).all()


@pytest.mark.parametrize("ep", [2, 4])
def test_a_layer_on_a_mesh_computes_what_one_process_does(ep):
    grid = Grid(world=4, ep=ep, etp=4 // ep, ranks_per_node=2)
    limits = levels(0.25, grid=grid, sizes=(2,))

    def build(origin: int | None) -> MoE:
        torch.manual_seed(0)

        def router(dim: int, count: int) -> TopologyRouter:
            return TopologyRouter(SoftmaxTopK(dim, count), grid=grid, levels=limits, origin=origin)

        return MoE(DIM, 8, 8, 2, router=router).double().train()

    x = torch.randn(24, DIM, dtype=torch.float64)
    alone = build(None)
    whole = x.clone().requires_grad_()
    y, routing = alone(whole, return_routing=True)
    (y.sin().sum() / 4).backward()  # ranks average over data-parallel groups
    plain = SoftmaxTopK.choose(
        alone.router.inner, alone.router.scores(x, None, None), 2, None, None
    )
    assert (plain.expert != routing.expert).any()

    def rank(transport: AbstractTransport) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = build(transport.rank)
        own = x[transport.rank * 6 : transport.rank * 6 + 6].clone().requires_grad_()
        layer.parallelize(Mesh(grid, transport), Plan())
        out, found = layer(own, return_routing=True)
        out.sin().sum().backward()
        return out.detach(), own.grad, layer.router.inner.weight.grad, found.requested

    found = run_ranks(4, rank)
    torch.testing.assert_close(torch.cat([each[0] for each in found]), y.detach())
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([each[1] for each in found]) / 4, whole.grad)
    torch.testing.assert_close(
        torch.stack([each[2] for each in found]).mean(0), alone.router.inner.weight.grad
    )
    assert all((each[3] == routing.requested).all() for each in found)


def test_experts_are_inside_where_their_ranks_are():
    node = levels(0.5, sizes=(2,))
    table = experts_inside(GRID, node, 16)[0]
    assert [row.nonzero()[0].tolist() for row in table[:3]] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    # With several replicas of the experts, each group uses its own replica.
    replicas = Grid(world=8, ep=4, ranks_per_node=2)
    assert experts_inside(replicas, levels(0.5, grid=replicas, sizes=(2,)), 4)[0][7].tolist() == [
        False,
        False,
        True,
        True,
    ]
    # An expert with shards on two nodes is inside neither, and a tensor group over two nodes has no
    # experts inside.
    shards = Grid(world=8, ep=2, etp=4, ranks_per_node=2)
    assert not experts_inside(shards, levels(0.5, grid=shards, sizes=(2,)), 4).any()
    tensor = Grid(world=8, ep=8, tp=4, ranks_per_node=2)
    assert experts_inside(tensor, levels(0.5, grid=tensor, sizes=(2,)), 8).shape == (1, 2, 8)
    assert not experts_inside(tensor, levels(0.5, grid=tensor, sizes=(2,)), 8).any()
    assert experts_inside(tensor, levels(0.5, grid=tensor, sizes=(4,)), 8)[0, 1].nonzero()[
        0
    ].tolist() == [4, 5, 6, 7]


def test_limits_follow_from_the_clusters_links():
    """FasterMoE's cluster johnny has NICs of 50, links between sockets of 180, PCIe of 88 Gb/s
    (from its artifact)."""
    johnny = read_cluster("fastermoe-johnny")
    node, socket = levels_of(johnny, Grid(world=16, ep=16, ranks_per_node=8))
    assert (node.name, node.share, node.group) == (
        "nic",
        pytest.approx(50 / (8 * 88)),
        (0,) * 8 + (1,) * 8,
    )
    assert (socket.name, socket.share) == ("qpi", pytest.approx(180 / (4 * 88)))
    assert socket.group == tuple(rank // 4 for rank in range(16))
    (only,) = levels_of(johnny, Grid(world=8, ep=8, ranks_per_node=8))
    assert only.name == "qpi"
    h100 = read_cluster("dgx-h100", nodes=2)
    (port,) = levels_of(h100, Grid(world=16, ep=16, ranks_per_node=8))
    own, outside = (
        next(link.slowest(h100.nodes) for link in h100.links if link.carries == kind)
        for kind in ("inside", "outside")
    )
    assert port.share == pytest.approx(outside / own)
    assert port.group == (0,) * 8 + (1,) * 8


def test_it_learns_adapts_and_starts_as_its_inner_router():
    gate = make("sigmoid", 0.2, 0.4)
    layer = MoE(DIM, 8, EXPERTS, 2, router=lambda *_: gate).train()
    y = layer(torch.randn(64, DIM))
    y.square().sum().backward()
    assert gate.inner.weight.grad.abs().max() > 0
    gate.update(torch.arange(EXPERTS))
    assert gate.inner.bias.abs().max() > 0
    layer.init_normal(10.0, 0.02)
    assert gate.inner.weight.std() > 5
    assert sorted(gate.state_dict()) == ["inner.bias", "inner.weight"]
    assert copy.deepcopy(gate).double().inside.dtype == torch.bool
    empty = gate.train().choose(gate.scores(torch.randn(0, DIM), None, None), 2, None, None)
    assert empty.expert.shape == (0,)
    assert "topology" not in ROUTERS


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: TopologyRouter(BalancedAssignment(DIM, EXPERTS), grid=GRID, levels=levels(0.5)),
            "TopologyRouter cannot wrap BalancedAssignment: give it a router that ranks by scores",
        ),
        (
            lambda: TopologyRouter(SoftmaxTopK(DIM, 12), grid=GRID, levels=levels(0.5)),
            "mesh.ep=8 does not divide num_experts=12",
        ),
        (
            lambda: TopologyRouter(SoftmaxTopK(DIM, 16), grid=GRID, levels=()),
            "no level of links to limit: give at least one",
        ),
        (lambda: make("softmax", 0.5, origin=8), "origin=8: choose 0 to 7, or None for all"),
        (lambda: levels(1.5), "topology level of 4: share=1.5: choose 0 to 1"),
        (
            lambda: make("softmax", 0.5, 0.5).check(5),
            "top_k=5 exceeds the 4 experts inside a group of the topology gate",
        ),
        (
            lambda: TopologyRouter(
                SoftmaxTopK(DIM, 16), grid=GRID, levels=levels(0.5, 0.5, sizes=(2, 4))
            ),
            "level of 4 has groups across those of the level before: nest them",
        ),
        (
            lambda: TopologyRouter(
                SoftmaxTopK(DIM, 16),
                grid=GRID,
                levels=[LinkLevel(name="node", group=(0, 0, 1), share=0.5)],
            ),
            "topology level node: gives the group of 3 ranks: give one for each of 8",
        ),
        (
            lambda: levels_of(
                read_cluster("fastermoe-johnny"), Grid(world=8, ep=8, ranks_per_node=4)
            ),
            "on nodes of 4 ranks does not give the rate of a rank's own link",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ask, message):
    assert message in refused(ask)
