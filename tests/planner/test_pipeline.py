"""The simulated pipeline against torch's own schedules and the published formulas."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import (
    _ComputationType,
    _get_1f1b_rank_ops,
    _get_warmup_ops,
)

from moesaic.planner.pipeline import order_of, simulate_pipeline


@pytest.mark.parametrize(("pp", "parts", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 10), (4, 2, 3)])
def test_interleaved_orders_are_torchs(pp: int, parts: int, count: int) -> None:
    per_round = count // max(1, count // pp)
    for rank in range(pp):
        ahead = _get_warmup_ops(rank, parts, per_round, pp, count, multiply_factor=2)

        def forward_part(step: int, rank: int = rank) -> int:
            return step // per_round % parts * pp + rank

        def backward_part(step: int, rank: int = rank, ahead: int = ahead) -> int:
            return (parts - 1 - (step - ahead) // per_round % parts) * pp + rank

        between = parts * count - ahead
        actions = _get_1f1b_rank_ops(
            parts, pp, ahead, between, ahead, rank, forward_part, backward_part
        )
        expected = [
            (
                action.stage_index,
                action.microbatch_index,
                action.computation_type != _ComputationType.FORWARD,
            )
            for action in actions
            if action is not None
        ]
        ours = [
            (each.part, each.micro_batch, each.is_backward)
            for each in order_of(rank, pp, parts, count)
        ]
        assert ours == expected


def test_one_forward_one_backward_after_a_warm_up_of_a_pass_per_later_stage() -> None:
    words = [
        "".join("FB"[each.is_backward] + str(each.micro_batch) for each in order_of(rank, 2, 1, 3))
        for rank in range(2)
    ]
    assert words == ["F0F1B0F2B1B2", "F0B0F1B1F2B2"]


def test_gpipe_runs_all_forward_passes_first() -> None:
    order = order_of(3, 4, 1, 2)
    assert [each.is_backward for each in order] == [False, False, True, True]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("count", [8, 32, 200])
def test_even_stages_without_messages_take_the_published_time(pp: int, count: int) -> None:
    """(m + p - 1)(F + B), Narayanan et al. 2021, section 2.2."""
    timed = simulate_pipeline(pp, count, [1.0] * pp, [2.0] * pp, [0.0] * pp, blocks_sender=False)
    assert timed.seconds == pytest.approx((count + pp - 1) * 3.0)
    assert timed.busy == pytest.approx([count * 3.0] * pp)
    assert timed.alive == tuple(min(pp - rank, count) for rank in range(pp))


@pytest.mark.parametrize(("pp", "count"), [(33, 65), (33, 80), (64, 128), (48, 1024)])
def test_more_stages_than_are_simulated_twice_take_the_published_time(pp: int, count: int) -> None:
    timed = simulate_pipeline(pp, count, [1.0] * pp, [2.0] * pp, [0.0] * pp, blocks_sender=False)
    assert timed.seconds == pytest.approx((count + pp - 1) * 3.0)


def test_interleaving_divides_the_bubble_by_the_parts() -> None:
    """m (F + B) + (p - 1)(F + B) / v, Narayanan et al. 2021, section 2.2."""
    pp, parts, count = 4, 2, 8
    half = [0.5] * (pp * parts)
    timed = simulate_pipeline(pp, count, half, [1.0] * 8, [0.0] * 8, blocks_sender=False)
    assert timed.seconds == pytest.approx(count * 3.0 + (pp - 1) * 3.0 / parts)


def test_the_slowest_stage_sets_the_pace() -> None:
    timed = simulate_pipeline(2, 50, [1.0, 3.0], [1.0, 3.0], [0.0, 0.0], blocks_sender=False)
    assert timed.seconds == pytest.approx(1.0 + 50 * 6.0 + 1.0)


@pytest.mark.parametrize(("blocks_sender", "seconds"), [(False, 6.4), (True, 6.6)])
def test_messages_follow_each_other_on_a_slow_way(blocks_sender: bool, seconds: float) -> None:
    timed = simulate_pipeline(2, 2, [0.1, 0.1], [0.1, 0.1], [2.0, 0.0], blocks_sender=blocks_sender)
    assert timed.seconds == pytest.approx(seconds)


def test_a_message_delays_what_waits_for_it() -> None:
    timed = simulate_pipeline(2, 1, [1.0, 2.0], [3.0, 4.0], [0.5, 9.0], blocks_sender=False)
    assert timed.seconds == pytest.approx(1.0 + 0.5 + 2.0 + 4.0 + 0.5 + 3.0)
