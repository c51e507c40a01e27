"""Summaries: exact numbers from hand-written metrics, names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.report.summary import Series, distinct_names, mean_over_layers, read_runs, summarise
from report.folders import dense_run, eval_line, layer, sparse_run, train_line, write_run


def test_headline_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    folder = sparse_run(tmp_path / "moe")
    assert summarise(folder, "moe").headline() == {
        "name": "moe",
        "folder": str(folder),
        "steps": 30,
        "tokens": 30 * 4 * 2 * 8,
        "training_seconds": 15.0,
        "last_train_loss": 1.5,
        "last_val_nats_per_byte": 2.75,
        "best_val_nats_per_byte": 2.5,
        "tokens_per_second_median": 200.0,
        "mfu_median": 0.2,
        "max_violation_per_layer": [0.5, 0.9],
        "max_violation_mean": pytest.approx(0.7),
        "dead_experts": 1,
        "dropped_copies": 3,
        "dropped_share": 3 / 72,
    }


def test_series_follow_the_lines_of_their_kind(tmp_path: Path) -> None:
    run = summarise(sparse_run(tmp_path / "moe"), "moe")
    assert run.over_steps("loss") == Series((10, 20, 30), (3.0, 2.0, 1.5))
    assert run.over_steps("val_loss") == Series((10, 30), (2.5, 2.75))
    assert run.over_steps("val_seconds") == Series((10, 30), (5.0, 15.0))
    assert run.over_steps("nothing") == Series()
    assert run.auxiliary == ["load_balance"]
    assert run.over_steps("load_balance") == Series((10, 20), (1.5, 1.25))
    assert run.layers[0].over_steps("dropped_share") == Series((10, 20, 30), (0.0, 0.25, 0.0))
    assert run.layers[1].loads[2] == (6, 0, 3, 3)


def test_a_dense_run_has_no_expert_numbers(tmp_path: Path) -> None:
    numbers = summarise(dense_run(tmp_path / "dense"), "dense").headline()
    assert numbers["max_violation_per_layer"] == []
    assert [
        numbers[key]
        for key in ("max_violation_mean", "dead_experts", "dropped_copies", "dropped_share")
    ] == [None] * 4


def test_a_run_without_evaluation_has_no_validation_loss(tmp_path: Path) -> None:
    numbers = summarise(write_run(tmp_path / "a", [train_line(5, 4.0, 9.0, [])]), "a").headline()
    assert (numbers["last_val_nats_per_byte"], numbers["best_val_nats_per_byte"]) == (None, None)
    assert numbers["last_train_loss"] == 4.0


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    run = summarise(write_run(tmp_path / "a", [train_line(5, float("nan"), 9.0, [])]), "a")
    assert json.dumps(run.headline(), allow_nan=False)
    assert run.headline()["last_train_loss"] is None


def test_whole_numbers_that_no_float_holds_are_left_out(tmp_path: Path) -> None:
    folder = sparse_run(tmp_path / "moe")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    loss = [line.replace('"loss": 3.0', f'"loss": {10**400}') for line in lines]
    assert loss != lines
    (folder / "metrics.jsonl").write_text("\n".join(loss))
    assert summarise(folder, "moe").over_steps("loss") == Series((20, 30), (2.0, 1.5))


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    folder = sparse_run(tmp_path / "moe")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "ste')
    assert summarise(folder, "moe").steps == 30


def test_mean_over_layers_keeps_the_steps_all_layers_have() -> None:
    assert mean_over_layers([Series((1, 2), (1.0, 3.0)), Series((2, 3), (5.0, 7.0))]) == Series(
        (2,), (4.0,)
    )
    assert mean_over_layers([]) == Series()


def test_a_config_without_shapes_gives_no_token_count(tmp_path: Path) -> None:
    assert (
        summarise(write_run(tmp_path / "a", [eval_line(5, 1.0)], model={}), "a").headline()[
            "tokens"
        ]
        is None
    )


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/moe", "/r/dense"], ["moe", "dense"]),
        (["/r/a/moe", "/r/b/moe", "/r/dense"], ["a/moe", "b/moe", "dense"]),
        (["/x/a/moe", "/y/a/moe"], ["x/a/moe", "y/a/moe"]),
        (["/a/moe", "/moe"], ["a/moe", "moe"]),
    ],
)
def test_names_tell_runs_apart(paths: list[str], names: list[str]) -> None:
    found = distinct_names([Path(path) for path in paths])
    assert [name.lstrip("/") for name in found] == names
    assert len(set(found)) == len(found)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    good = sparse_run(tmp_path / "good")
    with pytest.raises(
        InputError, match=r"missing: no such folder: name the folder that moesaic train wrote"
    ):
        read_runs([tmp_path / "missing"])
    assert "good: given twice: name each run once" in refused(
        read_runs, [good, tmp_path / "x" / ".." / "good"]
    )
    (good / "metrics.jsonl").write_text("")
    assert "holds no line yet" in refused(read_runs, [good])
    (good / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"loss": 3}\n')
    assert "line 2 is not one of a run's metrics: remove it" in refused(read_runs, [good])
    (good / "metrics.jsonl").unlink()
    assert "metrics.jsonl: no metrics there" in refused(read_runs, [good])
    (good / "config.json").write_text("{")
    assert "config.json: does not parse" in refused(read_runs, [good])
    (good / "config.json").write_text("[]")
    assert "must hold a table of fields, holds a list" in refused(read_runs, [good])
    (good / "config.json").unlink()
    assert "no run there (config.json is missing)" in refused(read_runs, [good])


def test_layers_that_appear_with_fewer_entries_are_kept(tmp_path: Path) -> None:
    lines = [
        train_line(1, 1.0, 1.0, [layer([1, 1], 0.0)]),
        train_line(2, 1.0, 1.0, [layer([1, 1], 0.0)] * 2),
    ]
    run = summarise(write_run(tmp_path / "a", lines), "a")
    assert [len(one.loads) for one in run.layers] == [2, 1]
