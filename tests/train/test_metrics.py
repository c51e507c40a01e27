"""Metrics: one JSON object per line, each step once, and TensorBoard events."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import refused
from moesaic.errors import InputError
from moesaic.train.metrics import Metrics, read_metrics
from runs import lines, losses, run_quietly, tiny


def write(folder: Path, *steps: int, start_step: int = 0) -> None:
    metrics = Metrics(folder, start_step=start_step)
    for step in steps:
        metrics.write("train", step, {"loss": step / 4})
    metrics.close()


def test_lines_come_back_in_order_while_they_are_written_too_and_of_a_resumed_run_each_step_once(
    tmp_path,
):
    metrics = Metrics(tmp_path, start_step=0)
    metrics.write("eval", 1, {"val_loss": 2.0})
    assert read_metrics(tmp_path) == [{"kind": "eval", "step": 1, "val_loss": 2.0}]
    metrics.close()
    write(tmp_path, 1, 2, 3)  # a new run starts empty
    write(tmp_path, 3, 4, start_step=2)
    assert read_metrics(tmp_path) == [
        {"kind": "train", "step": step, "loss": step / 4} for step in (1, 2, 3, 4)
    ]


def test_a_last_line_cut_short_is_left_out(tmp_path):
    write(tmp_path, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    write(tmp_path, 2, start_step=1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_no_metrics_is_an_error(tmp_path):
    assert "no metrics there: name the folder of a run" in refused(read_metrics, tmp_path)


def test_a_full_disk_on_resuming_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write(tmp_path, 1, 2, 3)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fill(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(
        InputError, match=r"metrics.jsonl could not be written, the disk is full: free space"
    ):
        Metrics(tmp_path, start_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def test_tensorboard_holds_the_scalars_of_a_run(tmp_path):
    run_quietly(tiny(tmp_path, tensorboard=True, evaluate={"every": 2, "sequences": 4}))
    found = events(tmp_path / "run")
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4]
    for event, (step, loss) in zip(found.Scalars("train/loss"), losses(tmp_path / "run")):
        assert (event.step, event.value) == (step, pytest.approx(loss))
    assert [event.step for event in found.Scalars("eval/val_nats_per_byte")] == [2, 4]
    first = lines(tmp_path / "run", "train")[0]["layers"][1]["entropy"]
    assert found.Scalars("train/layers/layer1/entropy")[0].value == pytest.approx(first)


def test_tensorboard_of_a_resumed_run_has_every_step_once_and_can_be_turned_off(ran):
    assert not (ran / "run" / "tensorboard").exists()
    for start in (0, 2):
        metrics = Metrics(ran / "run", start, tensorboard=True)
        for step in range(start + 1, start + 4):
            metrics.write("train", step, {"loss": step})
        metrics.close()
    assert [event.step for event in events(ran / "run").Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_a_line_is_not_written_twice(tmp_path):
    metrics = Metrics(tmp_path, start_step=0)
    for kind, step in (("eval", 2), ("train", 3), ("eval", 4)):
        metrics.write(kind, step, {})
    metrics.close()
    again = Metrics(tmp_path, start_step=3)
    for kind, step in (("eval", 2), ("train", 3), ("eval", 3)):
        again.write(kind, step, {})
    again.close()
    assert [(line["kind"], line["step"]) for line in read_metrics(tmp_path)] == [
        ("eval", 2),
        ("train", 3),
        ("eval", 3),
    ]


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "tr',
        b"{}",
        b"[1]",
        b"null",
        b'{"kind": "train", "step": "1"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_none_of_ours_is_named(tmp_path, line):
    good = b'{"kind": "train", "step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n" + good)
    with pytest.raises(
        InputError,
        match=r"metrics.jsonl: line 2 is (damaged .*|not one of a run's metrics): remove it",
    ) as caught:
        read_metrics(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_disk_that_is_full_is_one_error_and_the_file_still_closes(tmp_path):
    metrics = Metrics(tmp_path, start_step=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        metrics.write("train", 1, {"loss": 4.0})
        assert "File too large" in refused(metrics.write, "train", 2, {"loss": "x" * 100})
        metrics.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
