"""Every pass of a pipeline schedule runs once, and bubbles and activations match the papers."""

from __future__ import annotations

from collections import Counter

import pytest

from moesaic.errors import InputError
from moesaic.planner.pipeline import SCHEDULES, PassSeconds, Pipeline, lay_out


def seconds(forward: float, inputs: float, weights: float, together: float = 0.0, hop: float = 0.0) -> PassSeconds:
    whole = together or forward + inputs + weights
    return PassSeconds(forward=forward, inputs=inputs, weights=weights, together=whole, hop=hop)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 9])
@pytest.mark.parametrize(
    ("name", "runs"), [("1f1b", 1), ("1f1b", 3), ("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2), ("dualpipev", 2)]
)
def test_every_rank_runs_every_pass_once(name: str, runs: int, ranks: int, rounds: int) -> None:
    count, order = rounds * ranks, SCHEDULES[name].order
    for rank in range(ranks):
        passes = Counter(each for step in order(rank, ranks, runs, count) for each in step)
        assert set(passes.values()) == {1}
        for kinds in ("F", "IB", "WB"):
            stages = Counter(each.stage for each in passes if each.kind in kinds)
            assert sorted(stages.values()) == [count] * runs


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5, 12])
def test_bubbles_and_activations_of_1f1b_are_those_of_megatron(ranks: int, rounds: int) -> None:
    """The bubble is (p - 1)(F + B), divided by the runs per rank. p micro-batches are alive, and (p - 1) / v more with
    v runs (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3)."""
    pass_seconds = seconds(1.0, 1.3, 0.7)
    plain = Pipeline(ranks=ranks).laid_out(rounds * ranks, pass_seconds)
    assert plain.idle == pytest.approx((ranks - 1) * 3.0)
    assert plain.alive == tuple(range(ranks, 0, -1))
    runs = Pipeline(ranks=ranks, runs=3).laid_out(rounds * ranks, seconds(1 / 3, 1.3 / 3, 0.7 / 3))
    assert runs.idle == pytest.approx((ranks - 1) * 3.0 / 3)
    assert max(runs.alive) == min(3 * ranks + ranks - 1, 3 * rounds * ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 5, 12])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (1.0, 1.0, 0.8), (1.0, 0.9, 0.6)])
def test_zb_h1_waits_as_published_and_keeps_what_1f1b_keeps(ranks: int, rounds: int, times: tuple[float, ...]) -> None:
    """The bubble is (p - 1)(F + I - W), with no more activations than on the first rank of 1F1B (Qi et al. 2023,
    table 2)."""
    forward, inputs, weights = times
    laid_out = Pipeline(schedule="zb-h1", ranks=ranks).laid_out(rounds * ranks, seconds(*times))
    assert laid_out.idle == pytest.approx((ranks - 1) * (forward + inputs - weights))
    assert max(laid_out.alive) == ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zb_v_has_only_its_initial_bubbles_if_passes_are_equally_long(ranks: int) -> None:
    """There are no bubbles if F = I = W: the last rank starts p - 1 passes late, and no rank waits after that. p whole
    micro-batches are alive on every rank, two halves each (Qi et al. 2023, section 6)."""
    laid_out = Pipeline(schedule="zb-v", ranks=ranks).laid_out(4 * ranks, seconds(1.0, 1.0, 1.0))
    assert laid_out.idle == pytest.approx(ranks - 1)
    assert laid_out.alive == (2 * ranks,) * ranks


@pytest.mark.parametrize("stages", [4, 8, 16])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("together", [3.0, 2.5, 2.2])
def test_dualpipe_and_its_half_wait_as_published(stages: int, rounds: int, together: float) -> None:
    """The bubble is (PP / 2 - 1)(F&B + B - 3W), and PP + 1 passes are alive, with PP stages, two per rank (DeepSeek-V3,
    table 2)."""
    pass_seconds = seconds(1.0, 1.0, 1.0, together)
    bubble = (stages / 2 - 1) * (together + 2.0 - 3.0)
    half = Pipeline(schedule="dualpipev", ranks=stages // 2).laid_out(rounds * stages, pass_seconds)
    whole = Pipeline(schedule="dualpipe", ranks=stages).laid_out(2 * rounds * stages, pass_seconds)
    assert half.idle == pytest.approx(bubble)
    assert (whole.seconds, whole.idle) == (half.seconds, half.idle)
    assert max(half.alive) == max(whole.alive) == stages + 1
    assert len(whole.alive) == stages
    assert Pipeline(schedule="dualpipe", ranks=stages).copies == 2


@pytest.mark.parametrize(
    ("name", "ranks", "runs"),
    [("1f1b", 4, 1), ("1f1b", 4, 2), ("zb-h1", 4, 1), ("zb-v", 3, 1), ("dualpipev", 3, 1), ("dualpipe", 4, 1)],
)
def test_extrapolated_layouts_equal_full_layouts(name: str, ranks: int, runs: int) -> None:
    """The shortened layout agrees with the layout of all micro-batches."""
    pipeline, pass_seconds = Pipeline(schedule=name, ranks=ranks, runs=runs), seconds(1.0, 1.1, 0.8, 2.6, hop=0.05)
    how, half = SCHEDULES[name], ranks // 2 if name == "dualpipe" else ranks
    count = 38 * ranks // (2 if name == "dualpipe" else 1)
    orders = [list(how.order(rank, half, how.runs or runs, count)) for rank in range(half)]
    place = {
        stage: 2 * half - 1 - stage if how.folds and stage >= half else stage % half
        for stage in range(half * (how.runs or runs))
    }
    assert lay_out(orders, place, pass_seconds).seconds == pytest.approx(
        pipeline.laid_out(38 * ranks, pass_seconds).seconds
    )


def test_a_hop_between_stages_delays_the_first_and_the_last_passes() -> None:
    """1F1B has p - 1 hops to the last rank and p - 1 back, also with one micro-batch."""
    one = Pipeline(ranks=4).laid_out(1, seconds(1.0, 1.0, 1.0, hop=0.25))
    assert one.seconds == pytest.approx(4 * 3.0 + 6 * 0.25)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pipeline(schedule="zb", ranks=2), "schedule='zb': choose one of 1f1b, zb-h1, zb-v, dualpipev, dualpipe"),
        (lambda: Pipeline(schedule="zb-v", ranks=2, runs=3), "has 2 runs of layers per rank, not 3"),
        (lambda: Pipeline(schedule="dualpipe", ranks=3), "needs an even number of stages, not 3"),
        (lambda: Pipeline(ranks=0), "both must be at least 1"),
        (lambda: Pipeline(schedule="dualpipe", ranks=4).laid_out(9, seconds(1, 1, 1)), "even number of micro-batches, not 9"),
        (lambda: Pipeline(schedule="dualpipev", ranks=4).laid_out(7, seconds(1, 1, 1)), "choose at least 8"),
        (lambda: Pipeline(ranks=4, runs=2).laid_out(9, seconds(1, 1, 1)), "do not make 2 equal rounds"),
    ],
)  # fmt: skip
def test_invalid_pipelines_are_refused_in_one_line(make, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        make()
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
