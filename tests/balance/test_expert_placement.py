"""Tests of expert placement: equal numbers per place, close to the optimum, only if the move pays,
the same on all ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import refused, seed_ranges
from moesaic.balance import EXPERT_PLACERS
from moesaic.balance.expert_placement import (
    Balanced,
    ExpertLoad,
    ExpertSeconds,
    SmartMoE,
    check_order,
    fewest_between_nodes,
    least_busiest,
    places_of,
    spread_by_load,
)
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates
from moesaic_lab.exact_placements import best_experts

FOUR = Grid(world=4, ep=4, ranks_per_node=2)
GRIDS = [
    FOUR,
    Grid(world=8, ep=4, innermost="ep", ranks_per_node=4),
    Grid(world=4, ep=2, etp=2, ranks_per_node=2),
    Grid(world=8, ep=2, etp=2, tp=2, innermost="ep", ranks_per_node=2),
    Grid(world=3, ep=3),
]
FREE = Rates(intra_gbps=1e9, inter_gbps=1e9, tflops=1e-3)
"""Rates with which only the busiest place costs time."""


def expert_gap(load: ExpertLoad) -> float:
    """Return by what share the busiest place under `Balanced` with free moves has more rows than
    the least possible number."""
    best = load.busiest(best_experts(load))
    busiest = load.busiest(Balanced().best(load))
    return busiest / best - 1 if best else float(busiest > 0)


def load_of(
    copies: object, grid: Grid = FOUR, order: object = None, **changes: object
) -> ExpertLoad:
    table = np.asarray(copies, dtype=np.float64)
    slots = np.arange(table.shape[1]) if order is None else np.asarray(order)
    sizes = {
        "dim": 64,
        "expert_parameters": 3 * 64 * 128,
        "expert_bytes": 3 * 64 * 128 * 14,
        "steps": 50,
        **changes,
    }
    return ExpertLoad(grid=grid, copies=table, order=slots, **sizes)  # type: ignore[arg-type]


def drawn(seed: int, grid: Grid, each: int, skew: float = 1.0, **changes: object) -> ExpertLoad:
    """Return a load by Zipf's law that differs slightly between ranks, with experts in a random
    order."""
    draw = np.random.default_rng(seed)
    num_experts = each * grid.ep
    share = 1 / np.arange(1, num_experts + 1) ** skew
    share = draw.permutation(share / share.sum())
    copies = [
        draw.multinomial(256, 0.7 * share + 0.3 * draw.permutation(share))
        for _ in range(grid.world)
    ]
    return load_of(copies, grid, draw.permutation(num_experts), **changes)


def evenly(place: np.ndarray, ep: int) -> bool:
    return bool((np.bincount(place, minlength=ep) == len(place) // ep).all())


def brute_busiest(load: ExpertLoad, order: np.ndarray) -> float:
    """Return the rows of the busiest place, counted one by one."""
    grid = load.grid
    per_place = len(order) // load.grid.ep
    rows = {}
    for origin in range(grid.world):
        for slot, expert in enumerate(order):
            key = (grid.coordinate(origin, "edp"), slot // per_place)
            rows[key] = rows.get(key, 0.0) + load.copies[origin, expert]
    return max(rows.values())


def brute_between(load: ExpertLoad, order: np.ndarray) -> float:
    grid = load.grid
    each = len(order) // load.grid.ep
    found = 0.0
    for origin in range(grid.world):
        for target in range(grid.world):
            if grid.coordinate(origin, "edp") != grid.coordinate(target, "edp"):
                continue
            place = grid.coordinate(target, "ep")
            rows = sum(
                load.copies[origin, order[slot]] for slot in range(place * each, (place + 1) * each)
            )
            found += rows * (grid.node_of(origin) != grid.node_of(target))
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_figures_of_an_order_are_those_of_counting_row_by_row(grid: Grid) -> None:
    load = drawn(0, grid, 3)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(load.order))
        place = places_of(order, grid.ep)
        assert load.busiest(place) == brute_busiest(load, order)
        assert load.between_nodes(place) == brute_between(load, order)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    grid=st.sampled_from(GRIDS),
    each=st.integers(1, 4),
    skew=st.floats(0, 2),
)
def test_every_policy_keeps_places_full_and_decides_the_same_again(seed, grid, each, skew):
    load = drawn(seed, grid, each, skew)
    for name, make in EXPERT_PLACERS.items():
        order = make(Rates()).decide(load)
        check_order(order, len(load.order))
        place = places_of(order, grid.ep)
        assert load.busiest(place) <= load.busiest(load.place) or name == "balanced"
        assert np.array_equal(make(Rates()).decide(replace(load)), order)
        stays = place == load.place
        slot = np.argsort(order)
        was = np.argsort(load.order)
        # experts that stay at a place keep their slots
        assert np.array_equal(slot[stays], was[stays])


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), grid=st.sampled_from(GRIDS), each=st.integers(2, 4))
def test_balanced_is_never_slower_than_to_stay_and_takes_the_best_of_what_it_looked_at(
    seed, grid, each
):
    load = drawn(seed, grid, each)
    for machine in (Rates(), Rates(tflops=0.01), Rates(inter_gbps=0.1)):
        rates = machine
        seconds = ExpertSeconds(load, rates)
        placer = Balanced(rates)
        found = places_of(placer.decide(load), grid.ep)
        for other in (load.place, placer.best(load)):
            assert seconds.in_all(found) <= seconds.in_all(other) * (1 + 1e-12)


def test_a_move_that_does_not_pay_is_not_made_and_pays_over_more_steps() -> None:
    copies = np.tile([60, 40, 1, 1, 1, 1, 1, 1], (4, 1))
    rates = Rates(intra_gbps=1e6, inter_gbps=1e6, tflops=1.0)
    load = load_of(copies)
    seconds = ExpertSeconds(load, rates)
    place = places_of(np.array([0, 2, 1, 3, 4, 5, 6, 7]), 4)
    gain = seconds.of_step(load.place) - seconds.of_step(place)
    assert gain > 0
    steps = 10
    expensive = seconds.of_move(place) / load.expert_bytes
    for bytes_, moves in (
        (0.5 * gain * steps / expensive, True),
        (2 * gain * steps / expensive, False),
    ):
        order = Balanced(rates).decide(load_of(copies, expert_bytes=int(bytes_), steps=steps))
        assert np.array_equal(order, load.order) != moves
    assert not np.array_equal(
        Balanced(rates).decide(
            load_of(copies, expert_bytes=int(2 * gain * steps / expensive), steps=4 * steps)
        ),
        load.order,
    )


def test_the_cost_of_a_move_is_that_of_the_busiest_rank() -> None:
    machine = Rates(intra_gbps=8, inter_gbps=0.8)
    load = load_of(np.ones((4, 8)), expert_bytes=10**6)
    seconds = ExpertSeconds(load, machine)
    for order, expected in (
        ([0, 1, 2, 3, 4, 5, 6, 7], 0.0),
        ([1, 0, 2, 3, 4, 5, 6, 7], 0.0),  # within a place
        ([2, 1, 0, 3, 4, 5, 6, 7], 1e-3),  # one each way within a node
        ([4, 1, 2, 3, 0, 5, 6, 7], 1e-2),  # between nodes
        ([4, 5, 2, 3, 0, 1, 6, 7], 2e-2),
        ([4, 2, 1, 3, 0, 5, 6, 7], 1.1e-2),
    ):
        assert seconds.of_move(places_of(np.array(order), 4)) == pytest.approx(expected)
    shards = load_of(
        np.ones((4, 8)), Grid(world=4, ep=2, etp=2, ranks_per_node=2), expert_bytes=10**6
    )
    moved = places_of(np.array([4, 1, 2, 3, 0, 5, 6, 7]), 2)
    assert ExpertSeconds(shards, machine).of_move(moved) == pytest.approx(1e-2)


def test_the_cost_of_a_step_is_rows_at_the_busiest_place_and_on_the_busiest_link() -> None:
    copies = np.zeros((4, 4))
    copies[0, 1] = 10
    copies[0, 2] = 5
    copies[3, 3] = 100
    load = load_of(copies, dim=1000, expert_parameters=10**6)
    machine = Rates(intra_gbps=8, inter_gbps=4, tflops=1.0)
    found = ExpertSeconds(load, machine).of_step(load.place)
    assert found == pytest.approx(100 * 6e6 / 1e12 + 4 * 2000 * (10 * 1e-9 + 5 * 2e-9))


@pytest.mark.parametrize(("grid", "skew"), [*zip(GRIDS, (0.3, 0.8, 1.2, 0.8))], ids=str)
@pytest.mark.parametrize("seeds", seed_ranges(4, 1))
def test_the_gap_to_the_optimum_is_small(grid: Grid, skew: float, seeds: range) -> None:
    gaps = []
    for seed in seeds:
        load = drawn(seed, grid, 12 // grid.ep, skew)
        best = best_experts(load)
        place = Balanced().best(load)
        assert evenly(best, grid.ep)
        assert load.busiest(best) <= load.busiest(place) * (1 + 1e-6)
        if load.busiest(place) <= load.busiest(best) * (1 + 1e-9):
            assert load.between_nodes(best) <= load.between_nodes(place) + 1e-6
        gaps.append(load.busiest(place) / load.busiest(best) - 1)
    assert expert_gap(load) == pytest.approx(gaps[-1])
    assert max(gaps) < 0.05
    assert np.mean(gaps) < 0.01


def test_the_optimum_is_that_of_trying_all() -> None:
    grid = Grid(world=2, ep=2, ranks_per_node=1)
    for seed in range(2):
        load = drawn(seed, grid, 3)
        all_places = {tuple(places_of(np.array(order), 2)) for order in permutations(range(6))}
        figures = [(load.busiest(np.array(p)), load.between_nodes(np.array(p))) for p in all_places]
        best = best_experts(load)
        assert (load.busiest(best), load.between_nodes(best)) == pytest.approx(min(figures))


def test_rows_between_nodes_are_saved_where_balance_is_equal() -> None:
    """The tokens of each node need the experts of the other; all loads are equal, so only transfers
    count."""
    copies = np.zeros((4, 8))
    copies[:2, 4:] = 10
    copies[2:, :4] = 10
    load = load_of(copies, steps=10**6)
    assert (load.between_nodes(load.place), load.busiest(load.place)) == (160, 40)
    order = Balanced(Rates(tflops=1e6)).decide(load)
    assert load.between_nodes(places_of(order, 4)) == 0
    assert load.busiest(places_of(order, 4)) == 40
    assert np.array_equal(SmartMoE().decide(load), load.order)  # the busiest place cannot improve


def test_groups_go_where_most_of_them_are() -> None:
    """The same groups of experts at permuted places go back to their present places, so nothing
    moves."""
    load = load_of(np.ones((4, 8)), Grid(world=4, ep=4))
    relabelled = (load.place + 1) % 4
    end = fewest_between_nodes(
        load.weight, load.crossing, relabelled, load.slowness, stay=load.place
    )[-1]
    assert np.array_equal(end, load.place)


def test_greedy_as_published() -> None:
    weight = np.array([[8, 7, 6, 5, 4, 3, 2, 1.0]])
    assert spread_by_load(weight, np.ones((1, 4))).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    before = [3, 2, 1, 0, 0, 1, 2, 3]
    assert spread_by_load(weight, np.ones((1, 4)), np.array(before)).tolist() == before
    equal = load_of(np.ones((4, 8)), order=np.random.default_rng(0).permutation(8))
    assert np.array_equal(SmartMoE().decide(equal), equal.order)
    one_each = load_of([[9, 1, 1, 1]] * 4)  # one expert per place: nothing helps
    assert np.array_equal(SmartMoE().decide(one_each), one_each.order)


def test_swaps_lower_the_busiest_place_all_the_way() -> None:
    weight = np.array([[9, 9, 1, 1, 1, 1, 1, 1.0]])
    steps = least_busiest(weight, np.arange(8) // 2, np.ones((len(weight), 4)))
    tops = [np.bincount(place, weights=weight[0]).max() for place in steps]
    assert (tops[0], tops[-1]) == (18, 10)
    assert tops == sorted(tops, reverse=True)
    assert all(evenly(place, 4) for place in steps)


def test_two_copies_of_the_experts_are_balanced_together() -> None:
    """A load that is even in the sum of both replicas is uneven in each of them; the placement
    balances both."""
    grid = Grid(world=4, ep=2)
    copies = np.zeros((4, 4))
    copies[:2] = [10, 0, 10, 0]
    copies[2:] = [0, 10, 10, 0]
    load = load_of(copies, grid, order=[0, 2, 1, 3])
    assert load.busiest(load.place) == 40
    place = Balanced().best(load)
    assert load.busiest(place) == load.busiest(best_experts(load)) == 20


def test_no_load_moves_nobody() -> None:
    load = load_of(np.zeros((4, 8)), order=np.random.default_rng(1).permutation(8))
    for make in EXPERT_PLACERS.values():
        assert np.array_equal(make(Rates()).decide(load), load.order)
    assert expert_gap(load) == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: load_of(np.ones((4, 6))), "6 experts on 4 ranks with mesh.ep=4"),
        (lambda: load_of(np.ones((3, 8))), r"shape \(3, 8\) does not fit"),
        (lambda: load_of(np.ones((4, 4)), order=[0, 1, 1, 3]), "must name each of 0 to 3 once"),
        (lambda: load_of(np.ones((4, 4)), steps=0), "steps=0: must be at least 1"),
        (lambda: Rates(element_bytes=-1), "rates.element_bytes=-1"),
    ],
)
def test_bad_input_is_refused_in_one_line(make, words) -> None:
    assert re.search(words, refused(make))


def test_a_slow_rank_gets_experts_that_it_computes_in_the_same_time() -> None:
    copies = np.tile([40.0, 35, 30, 25, 20, 15, 10, 5], (4, 1))
    alike, unlike = (load_of(copies, speeds=speeds) for speeds in ((), (1.0, 1.0, 1.0, 0.5)))
    places = {
        tuple(np.repeat(np.arange(4), 2)[np.argsort(order)]) for order in permutations(range(8))
    }
    least = min(unlike.busiest(np.array(place)) for place in places)
    found = Balanced(FREE).best(unlike)
    rows = np.bincount(found, weights=copies.sum(0), minlength=4)
    assert unlike.busiest(found) == pytest.approx((rows / [1, 1, 1, 0.5]).max())
    assert unlike.busiest(found) <= 1.02 * least < 0.9 * unlike.busiest(Balanced(FREE).best(alike))
    assert rows.argmin() == 3
    order = Balanced(FREE).decide(unlike)
    assert unlike.busiest(places_of(order, 4)) == pytest.approx(unlike.busiest(found))
