"""Tests of tokens with NaN or infinite logits: they get valid experts, are counted, and only their
results are NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from helpers import ODD_LOGITS, TOP_K, ids_for, make_router, pairwise, ranked
from moesaic import Capacity, LoadBalance, Mesh, MoE, Plan
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.kernels.top_k import top_k_indices, top_k_indices_reference
from moesaic.program.grid import Grid
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import (
    ON_MESH,
    ROUTERS,
    GroupLimited,
    GShardTop2,
    SigmoidTopK,
    SoftmaxTopK,
    TopologyRouter,
)
from moesaic.routing.routers.topology import node_level
from moesaic.routing.routing import Scores

DIM = 8
EXPERTS = 4
TOKENS = 12
ODD = 5
NODES = Grid(world=4, ep=4, ranks_per_node=2)
ODD_TOKENS = {
    "NaN": math.nan,
    "NaN with the sign bit": -math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
}
READS_NO_LOGITS = ("hash",)
"""Routers whose weights do not depend on the activations of the token."""
LOOKS_AT_OTHERS = ("base", "expert_choice", "topology")
"""Routers in which the choice for one token depends on other tokens."""


def build(name: str) -> AbstractRouter:
    if name == "topology":
        inner = SoftmaxTopK(DIM, EXPERTS)
        return TopologyRouter(inner, grid=NODES, levels=partial(node_level, share=0.3))
    return make_router(name, DIM, EXPERTS)


def layer_of(name: str, capacity: Capacity | None = None) -> MoE:
    torch.manual_seed(0)
    router = build(name)
    return MoE(
        DIM, 8, EXPERTS, TOP_K.get(name, 2), router=lambda *_: router, losses=(), capacity=capacity
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", ODD_LOGITS)
def test_nan_ranks_above_every_number_whatever_its_sign(row: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([ODD_LOGITS[row]], dtype=dtype)
    assert top_k_indices(logits, 5).tolist() == [ranked(ODD_LOGITS[row])]
    assert top_k_indices_reference(logits, 5).tolist() == [ranked(ODD_LOGITS[row])]


OF_FIVE: dict[str, Callable[[], AbstractRouter]] = {
    "softmax": lambda: SoftmaxTopK(1, 5),
    "sigmoid": lambda: SigmoidTopK(1, 5),
    "gshard": lambda: GShardTop2(1, 5),
    "gshard random_dispatch": lambda: GShardTop2(1, 5, second="random_dispatch"),
    "group_limited": lambda: GroupLimited(SoftmaxTopK(1, 5), num_groups=1, top_groups=1),
}


@pytest.mark.parametrize(("name", "train", "row"), pairwise(OF_FIVE, (True, False), ODD_LOGITS))
def test_a_token_goes_to_different_experts_whatever_its_logits(
    name: str, train: bool, row: str
) -> None:
    router = OF_FIVE[name]()
    logits = torch.tensor([ODD_LOGITS[row]])
    scores = Scores(logits, logits.softmax(1), logits.sigmoid(), logits)
    router.train(train)
    expert = router.choose(scores, 2, None, router.draw(1, logits.device)).expert.tolist()
    assert len(set(expert)) == 2
    assert 0 <= min(expert) <= max(expert) < 5


@pytest.mark.parametrize(
    ("name", "train", "odd"), pairwise((*ROUTERS, *ON_MESH), (True, False), ODD_TOKENS)
)
def test_an_odd_token_spoils_its_own_result_alone(name: str, train: bool, odd: str) -> None:
    layer = layer_of(name).train(train)
    x = torch.randn(TOKENS, DIM)
    torch.manual_seed(1)
    usual = layer(x, token_ids=ids_for(x))
    x[ODD] = ODD_TOKENS[odd]
    torch.manual_seed(1)
    y, routing = layer(x, token_ids=ids_for(x), return_routing=True)
    others = torch.arange(TOKENS) != ODD
    assert not y[ODD].isfinite().any()
    assert y[others].isfinite().all()
    if name not in LOOKS_AT_OTHERS:
        torch.testing.assert_close(y[others], usual[others])
    assert torch.equal(routing.counts, torch.bincount(routing.expert, minlength=EXPERTS))
    pairs = list(zip(routing.token.tolist(), routing.expert.tolist()))
    assert len(set(pairs)) == len(pairs)
    of_odd = int((routing.token == ODD).sum())
    assert of_odd > 0
    assert int(routing.nonfinite) == (0 if name in READS_NO_LOGITS else of_odd)


@pytest.mark.parametrize("name", ROUTERS)
def test_nothing_is_counted_where_all_is_finite_or_padding(name: str) -> None:
    x = torch.randn(TOKENS, DIM)
    x[ODD] = math.nan
    mask = torch.arange(TOKENS) != ODD
    y, routing = layer_of(name)(x, mask=mask, token_ids=ids_for(x), return_routing=True)
    assert int(routing.nonfinite) == 0
    assert y.isfinite().all()


@pytest.mark.parametrize(
    "capacity", [Capacity.fixed(0.5), Capacity.fixed(0.5, order="score"), Capacity.fitted()]
)
def test_copies_are_counted_before_the_capacity_drops_them(capacity: Capacity) -> None:
    x = torch.randn(TOKENS, DIM)
    x[ODD] = math.nan
    _, routing = layer_of("softmax", capacity)(x, return_routing=True)
    assert int(routing.nonfinite) == 2
    assert int(routing.requested.sum()) == 2 * TOKENS


@pytest.mark.parametrize("plan", [Plan(), Plan(schedule="s2"), Plan(all_to_all="multicast")])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_count_is_of_all_ranks_and_other_tokens_stay_finite(plan: Plan, tp: int) -> None:
    grid = Grid(world=4, tp=tp, ep=4, ranks_per_node=2)

    def work(transport: AbstractTransport) -> tuple[int, list[int]]:
        torch.manual_seed(0)
        layer = MoE(DIM, 8, EXPERTS, 2, losses=(LoadBalance(0.1),))
        layer.parallelize(Mesh(grid, transport), plan)
        x = torch.randn(4, TOKENS, DIM)[transport.rank // tp]
        if transport.rank // tp == 1:
            x[ODD] = math.nan
        y, routing = layer(x, return_routing=True)
        return int(routing.nonfinite), (~y.isfinite().all(1)).nonzero().flatten().tolist()

    found = run_ranks(4, work)
    assert [count for count, _ in found] == [2] * 4
    assert [wrong for _, wrong in found] == [[ODD] if rank // tp == 1 else [] for rank in range(4)]
