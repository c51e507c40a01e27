"""Training with two micro-batches in flight is training with one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.errors import InputError
from runs import run_quietly, tiny
from train.test_on_two_ranks import BASE, MODELS
from train.worlds import assert_same_run, train_on

RUNS = {
    "everything": {"mesh": {"ep": 2, "hold": "parameters"}, "accumulation": 3},
    "gradients held": {"mesh": {"ep": 2, "hold": "gradients"}, "accumulation": 4},
    "nothing held": {"mesh": {"ep": 2, "hold": "nothing"}, "accumulation": 4},
    "no messages": {"mesh": {}, "accumulation": 4},
}


@pytest.mark.random
def test_two_in_flight_train_the_same(tmp_path: Path) -> None:
    pairs = []
    for name, changes in RUNS.items():
        config = tiny(
            tmp_path, **BASE | MODELS.get(name, {}) | changes, out=str(tmp_path / f"{name} 1")
        )
        both = replace(config, micro_batches_in_flight=2, out=str(tmp_path / f"{name} 2"))
        pairs.append((config, both))
    outcomes = train_on(2, [config for pair in pairs for config in pair])
    assert {outcome.refusal for of_run in outcomes for outcome in of_run} == {""}
    for one, two in pairs:
        assert_same_run(Path(one.out), Path(two.out))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"micro_batches_in_flight": 3, "accumulation": 6}, "choose 1 or 2"),
        ({"accumulation": 1}, "clashes with accumulation=1"),
        ({"mesh": {"pp": 2}, "accumulation": 4}, "clashes with mesh.pp=2"),
        ({"record_routing": "counts", "accumulation": 4}, "clashes with record_routing"),
    ],
)
def test_where_two_cannot_be_in_flight_one_line_says_so(
    tmp_path: Path, changes: dict[str, object], text: str
) -> None:
    with pytest.raises(InputError, match=text) as caught:
        tiny(tmp_path, **{"micro_batches_in_flight": 2, **changes})
    assert "\n" not in str(caught.value)


def test_one_process_trains_one_after_the_other(tmp_path: Path) -> None:
    config = tiny(tmp_path, **BASE, accumulation=3, out=str(tmp_path / "1"))
    both = replace(config, micro_batches_in_flight=2, out=str(tmp_path / "2"))
    for each in (config, both):
        run_quietly(each)
    assert_same_run(tmp_path / "1", tmp_path / "2")
