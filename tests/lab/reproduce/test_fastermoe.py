"""FasterMoE's equations, printed and corrected, its choice of shadows, and its layers as
programs."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic_lab.reproduce.fastermoe import (
    GPT,
    GPT_S,
    PLAIN,
    FasterMoEBed,
    gains,
    predictor_r2,
    recorded_tables,
    tree_seconds,
)
from moesaic_lab.reproduce.fastermoe_model import (
    FasterMoEMachine,
    ideal,
    ratio,
    semi_ideal,
    shadowed_seconds,
    shadows,
    stay_home,
    throughput,
    unshadowed_seconds,
)

MACHINE = FasterMoEMachine(flops=1e12, bandwidth=1e9, dim=64)


def skewed(workers: int, hot: tuple[int, ...], each: int, cold: int = 10) -> np.ndarray:
    """Return counts in which every worker sends many copies to the hot experts."""
    counts = np.full((workers, workers), cold)
    counts[:, list(hot)] = each
    return counts


def test_shadowed_copies_are_computed_where_they_come_from() -> None:
    counts = np.arange(16).reshape(4, 4)
    kept = stay_home(counts, [2])
    assert (kept.sum(1) == counts.sum(1)).all()
    assert kept[:, 2].tolist() == [0, 0, counts[2, 2], 0]
    assert kept[0, 0] == counts[0, 0] + counts[0, 2]
    assert counts[0, 2] == 2  # the argument stays


def test_the_corrected_cost_counts_remote_copies_in_bytes() -> None:
    """Eq. 7 on two workers: 3 passes of 4 B alpha D^2 / P, 4 all-to-alls of remote copies times D
    times 4 bytes."""
    counts = np.array([[5, 20], [7, 1]])
    compute = 3 * 4 * 21 * 2 * 64**2 / 1e12
    move = 4 * 20 * 64 * 4 / 1e9
    assert unshadowed_seconds(MACHINE, counts, "corrected") == pytest.approx(compute + move)
    assert unshadowed_seconds(MACHINE, counts, "printed") == pytest.approx(
        compute + 4 * 21 * 64 * 4 / 1e9
    )
    weights = 2 * (2 * 2 * 64 * 64 * 4) / 1e9
    home = shadowed_seconds(MACHINE, counts, [1], "corrected")
    assert home == pytest.approx(3 * 4 * 32 * 2 * 64**2 / 1e12 + 4 * 7 * 64 * 4 / 1e9 + weights)
    assert home - shadowed_seconds(MACHINE, counts, [1], "printed") == pytest.approx(
        4 * 7 * 64 * 4 / 1e9
    )


def test_two_equally_hot_experts_block_the_printed_algorithm() -> None:
    counts = skewed(8, (1, 5), 4000)
    machine = FasterMoEMachine(flops=1e12, bandwidth=1e12, dim=256)
    assert shadows(machine, counts, "printed") == []
    assert sorted(shadows(machine, counts, "corrected")[:2]) == [1, 5]


def test_the_corrected_choice_is_never_worse_than_none_by_its_own_cost() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        counts = random.integers(0, 3000, (8, 8)) * (random.random(8) < 0.4)
        chosen = shadows(MACHINE, counts, "corrected")
        plain = unshadowed_seconds(MACHINE, counts, "corrected")
        assert (
            shadowed_seconds(MACHINE, counts, chosen, "corrected")
            <= plain + 2 * len(chosen) * 1e-12
        )
        assert bool(chosen) == any(
            shadowed_seconds(
                MACHINE, counts, np.argsort(-counts.sum(0), kind="stable")[:n].tolist(), "corrected"
            )
            < plain
            for n in range(1, 9)
        )


def test_the_roofline_of_totals_is_exact_and_the_printed_one_is_not() -> None:
    compute = 0.03
    move = 0.02
    workers = 4
    rows = 1000.0
    machine = FasterMoEMachine(
        flops=4 * (rows / workers) * 2 * 64**2 / compute, bandwidth=1e9, dim=64
    )
    reached = throughput(machine, rows, workers, compute, move)
    assert semi_ideal(machine.flops, ratio(compute, move)) == pytest.approx(reached)
    assert semi_ideal(machine.flops, compute / move, "printed") == pytest.approx(reached)
    assert semi_ideal(machine.flops, ratio(compute, move), "printed") < reached
    assert ideal(machine.flops, 0.5) == 0.5 * machine.flops
    assert ideal(machine.flops, 3.0) == machine.flops


def test_even_loads_need_no_shadow_and_hot_ones_gain() -> None:
    bed = FasterMoEBed(GPT_S)
    even = bed.counts(0.0, 1)
    hot = bed.counts(1.6, 1)
    assert bed.chosen(even) == []
    slow = bed.run(PLAIN, hot)
    fast = bed.run(PLAIN, even)
    assert slow.seconds > 2 * fast.seconds
    assert bed.shadowed(PLAIN, hot, bed.chosen(hot)) < slow.seconds
    assert bed.run(bed.smart, hot).seconds < slow.seconds
    assert slow.limit <= slow.seconds


def test_a_tree_starts_up_once_per_level_and_one_rank_alone_sends_nothing() -> None:
    assert tree_seconds(8, 4000, 1e-5, 1e-9) == pytest.approx(3e-5 + 4e-6)
    assert tree_seconds(1, 4000, 1e-5, 1e-9) == 0


def test_zero_gathers_once_more_in_stage_3_than_it_reduces_in_stage_2() -> None:
    bed = FasterMoEBed(GPT_S)
    two = bed.zero_seconds(2)
    three = bed.zero_seconds(3)
    assert three > two
    nbytes = 16 * 2 * 1024 * 2048 * 4
    assert three - two > 0.5 * nbytes / bed.nic


def test_equations_1_and_2_are_the_busiest_gpu_and_the_busiest_directed_link() -> None:
    bed = FasterMoEBed(GPT_S)
    counts = np.zeros((16, 16), dtype=np.int64)
    # two cross to the other node, one stays where it is
    counts[0, 8] = 100
    counts[1, 9] = 100
    counts[2, 2] = 500
    computing, moving = bed.predicted(counts)
    assert computing == pytest.approx(3 * bed.machine.compute_seconds(500))
    assert moving == pytest.approx(4 * 200 * 1024 * 4 / bed.nic)


def test_the_predictor_explains_what_the_simulator_finds() -> None:
    assert 0.9 < predictor_r2([FasterMoEBed(GPT_S), FasterMoEBed(GPT)], (0.0, 1.2)) <= 1


def test_recorded_loads_have_the_layer_s_copies_and_gains_follow_their_skew() -> None:
    bed = FasterMoEBed(GPT)
    tables = recorded_tables(bed)
    assert len(tables) == 5
    for of_layers in tables.values():
        assert len(of_layers) >= 3
        assert all((counts.sum(1) == bed.model.layer.copies).all() for counts in of_layers)
    even = np.full((16, 16), 128)
    hot = skewed(16, (3,), 1024, cold=68)
    assert gains(bed, [even]).shadow == 1
    assert gains(bed, [even]).experts == 0
    assert gains(bed, [hot]).shadow > 1.5
    assert gains(bed, [even, hot]).shadow == pytest.approx((1 + gains(bed, [hot]).shadow) / 2)
