"""Slow ranks, late ranks and slow links are distinguished by the ranks' compute times and waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from moesaic.comm import process_groups
from moesaic.report.summary import stragglers, summarise
from moesaic.runtime import executor
from runs import lines, tiny
from train.worlds import train_on

WORLD = 4


def times(**changes: object) -> list[dict]:
    """Return metrics of four equal ranks that wait a little for each other, with the given
    changes."""
    table = {
        "seconds": [1.0] * WORLD,
        "compute": [0.5] * WORLD,
        "waited": (0.02 * (1 - np.eye(WORLD))).tolist(),
    }
    return [{"ranks": {**table, **changes}}] * 3


def waiting(*entries: tuple[int, int, float]) -> list[list[float]]:
    """Return waits of which some are long, given as (waiting rank, awaited rank, seconds)."""
    waited = 0.02 * (1 - np.eye(WORLD))
    for rank, peer, seconds in entries:
        waited[rank, peer] = seconds
    return waited.tolist()


def test_even_ranks_hold_nobody_up():
    assert stragglers(times()) == []
    assert stragglers([{"loss": 1.0}]) == []


def test_a_rank_that_works_longer_is_slow_and_those_that_wait_for_it_are_not():
    late = [(rank, 2, 0.4) for rank in (0, 1, 3)]
    (phrase,) = stragglers(times(compute=[0.5, 0.5, 0.9, 0.5], waited=waiting(*late)))
    assert phrase.startswith(
        "rank 2 is slow: its programs work 1.8 times as long as those of other ranks"
    )


def test_a_rank_for_which_all_wait_though_it_works_no_longer_comes_late():
    (phrase,) = stragglers(times(waited=waiting(*((rank, 1, 0.3) for rank in (0, 2, 3)))))
    assert phrase.startswith("rank 1 comes late: all others wait for it for 30% of the steps")


def test_a_rank_that_one_other_waits_for_stands_behind_a_slow_link():
    (phrase,) = stragglers(times(waited=waiting((3, 0, 0.4), (0, 3, 0.3))))
    assert phrase == (
        "the link from rank 0 to rank 3 is slow: rank 3 waits for its messages for 40% of the steps"
    )


@pytest.mark.parametrize(
    "ranks",
    [
        None,
        3,
        {},
        {"seconds": [1], "compute": [1, 2], "waited": []},
        {"seconds": "x", "compute": [], "waited": [[]]},
    ],
)
def test_times_that_are_none_are_passed_over(ranks):
    assert stragglers([{"ranks": ranks}, {}]) == []


def ticks(seconds: float, seconds_of_rank_1: float) -> Iterator[float]:
    """Yield the readings of a clock that advances with every reading."""
    for look in itertools.count():
        yield look * (seconds_of_rank_1 if dist.get_rank() == 1 else seconds)


def slow_on_rank_1() -> None:
    """Fake clocks on which all tasks take three times as long on the second rank, for which the
    first one waits."""
    executor.perf_counter = ticks(10.0, 30.0).__next__
    process_groups.time = SimpleNamespace(perf_counter=ticks(20.0, 1.0).__next__)


def test_a_slow_rank_of_a_run_is_named_in_its_report(tmp_path):
    (outcomes,) = train_on(
        2, [tiny(tmp_path, steps=2, batch_size=4, mesh={"ep": 2})], slow_on_rank_1
    )
    assert [each.refusal for each in outcomes] == ["", ""]
    ranks = lines(tmp_path / "run", "train")[-1]["ranks"]
    assert ranks["compute"][1] > ranks["compute"][0]
    assert ranks["waited"][0][1] > ranks["waited"][1][0]
    assert ranks["waited"][0][0] == ranks["waited"][1][1] == 0
    (phrase,) = summarise(tmp_path / "run", "run").stragglers
    assert phrase.startswith(
        "rank 1 is slow: its programs work 3.0 times as long as those of other ranks"
    )
