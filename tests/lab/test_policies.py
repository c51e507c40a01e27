"""Replication policies of other systems: legal tables, limits that are kept, and figures by
hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.replications import Replications
from moesaic_lab.policies.laer import LAERLayout, layout
from moesaic_lab.policies.least_loaded import LeastLoaded
from moesaic_lab.policies.lplb import LPLB, least_busiest_flow
from replication_loads import by_place, check_table, computed, draw, flat


@pytest.mark.parametrize("kind", [LeastLoaded, LPLB, LAERLayout])
def test_what_is_replicated_is_there_and_never_at_home(kind: type):
    for seed in range(30):
        check_table(kind(), draw(seed))


@pytest.mark.parametrize("limit", [1.0, 1.3])
def test_least_loaded_holds_every_place_to_its_limit(limit: float):
    for seed in range(60):
        load = draw(seed)
        for origins, replicated in zip(
            load.replicas, by_place(load, LeastLoaded(limit).decide(load))
        ):
            copies = load.copies[origins].sum(1)
            computed = replicated.sum((0, 1)) + np.bincount(
                load.home, weights=(copies - replicated.sum(2)).sum(0), minlength=load.grid.ep
            )
            mean = -(-copies.sum() // load.grid.ep)
            assert computed.max() <= np.ceil(mean * limit)
            assert computed.sum() == copies.sum()


def test_a_budget_is_kept_where_it_can_be():
    load = CallLoad(Grid(world=4, ep=4), np.array([[40, 0, 0, 0]] * 4), 4, units=8, dim=8)
    replicated = LeastLoaded(budget=50).decide(load)
    assert 160 - replicated.sum() == 50
    assert replicated.sum((0, 1)).max() <= 50
    assert 160 - LeastLoaded(budget=10).decide(load).sum() == 40


def test_bad_limits_are_refused():
    with pytest.raises(
        InputError, match=r"replication limit=0\.5: the mean must fit: choose 1 or more"
    ):
        LeastLoaded(0.5)
    with pytest.raises(
        InputError, match=r"replication budget=0: choose at least one token copy per rank"
    ):
        LeastLoaded(budget=0)


def test_lplb_is_the_optimum_of_its_edges_by_hand():
    load = flat([200, 200, 0, 0, 0, 0, 0, 0], ep=4)
    table = LPLB().decide(load)
    # Place 1 holds its neighbour's heaviest expert, and place 2 the second one of place 0, so three
    # places have 400 / 3 each.
    assert table.sum(0)[:2].tolist() == [[0, 133, 0, 0], [0, 0, 133, 0]]
    assert computed(load, Replications.of(table)).max() == 134
    loads = np.array([10, 0, 2])
    source = np.array([0, 0])
    target = np.array([1, 2])
    assert least_busiest_flow(loads, source, target, np.array([3, 9])).tolist() == [3, 2]


@pytest.mark.parametrize("seed", range(12))
def test_lplb_flows_are_no_worse_than_any_search_finds(seed: int):
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 9, 3)
    source = np.array([0, 1, 2])
    target = np.array([1, 2, 0])
    most = np.minimum(loads, 5)
    flow = least_busiest_flow(loads, source, target, most)

    def top(flow: np.ndarray) -> float:
        return float((loads - flow + flow[[2, 0, 1]]).max())

    every = (np.array(each) for each in product(*(range(m + 1) for m in most)))
    assert top(flow) <= min(map(top, every)) + 1  # whole copies of a fractional optimum


def test_laer_computes_experts_anywhere_within_room_and_near_their_tokens():
    load = flat([800, 80, 80, 80, 400, 80, 80, 80], ep=4)
    holds = layout(load.copies.sum(0), load.home, 4, room=3)
    assert holds.sum(0).max() <= 3
    assert holds.any(1).all()
    assert holds.sum(1)[0] == 4
    table = LAERLayout().decide(load)
    assert computed(load, Replications.of(table)).max() <= 1.1 * load.copies.sum() / 4
    # expert 0 is on all places, so its copies never leave a node
    for origin, node in enumerate((0, 0, 1, 1)):
        assert table[origin, 0, [p for p in range(4) if p // 2 != node]].sum() == 0
