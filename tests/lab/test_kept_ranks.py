"""What ranks return is kept, and taken from the folder when the benchmark runs again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic_lab import auto, small
from moesaic_lab.beds import Timed
from moesaic_lab.benchmark import on_beds, told_of_files
from moesaic_lab.comm import ranks as comm
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.layer import ranks as layer
from moesaic_lab.train import ranks as train
from moesaic_testbed.bed import Bed

SPANS = {"a": [(0.1, 0.30000000000000004), (1.0, float("inf"))], "b": []}
SENT = {"a": [[(0, 1, 20)], []]}
TIMED: dict[str, Any] = {"spans": SPANS, "pairs": {}, "sent": SENT}
SWITCH = layer.Switch(
    first_seconds=0.1, first_call_seconds=0.2, again_seconds=0.3, messages=4, allocated_bytes=5
)
SYSTEM = train.MeasuredSystem(
    name="ours",
    kind="ours",
    exchange="linear",
    is_lossless=True,
    errors={"loss": 1e-7},
    sent=[(0, 1, 20)],
    spans=[(0.0, 1.0)],
    trial_seconds=None,
    phases={"forward": [0.5]},
)
FOUND = {
    small.on_rank: (SPANS, SPANS),
    comm.measure: Timed(**TIMED),
    layer.measure: layer.LayerFound(
        **TIMED, best="a", trial={"a": 0.5}, charged={}, switches={"a": SWITCH}
    ),
    train.measure: train.TrainFound(
        systems=[SYSTEM], best="ours", most_over_mean_load=1.5, items=64
    ),
    auto.on_rank: auto.AutoResult(chosen="a", said=["a", "b"], races=2, spans=SPANS),
}


class Beds:
    """A launcher whose beds return what they are told, and count."""

    def __init__(self, found: object) -> None:
        self.found = found
        self.opened = 0
        self.ran = 0
        self.open_now = 0

    def open(self, bed: Bed) -> Beds:
        self.opened += 1
        self.open_now += 1
        return self

    def run(self, function: object, *args: object) -> list[object]:
        self.ran += 1
        return [self.found, self.found]

    def close(self) -> None:
        self.open_now -= 1


@pytest.mark.parametrize("function", FOUND, ids=lambda each: each.__module__)
def test_what_each_benchmark_measures_is_taken_from_the_folder(function, tmp_path: Path) -> None:
    beds = Beds(FOUND[function])
    for _ in range(2):
        ranks = KeptRanks(beds, Bed(), tmp_path)  # type: ignore[arg-type]
        ranks.label = "2x2, 4 KiB"
        assert ranks.run(function, 3, Bed()) == [FOUND[function]] * 2
        ranks.close()
    assert (beds.opened, beds.ran, beds.open_now) == (1, 1, 0)
    assert [path.name[:10] for path in tmp_path.iterdir()] == ["2x2-4-KiB-"]
    ranks.run(function, 4, Bed())
    assert beds.ran == 2, "other arguments are measured"


def test_numbers_of_numpy_are_kept_and_without_a_folder_nothing_is(tmp_path: Path) -> None:
    spans = {"a": [(np.float64(0.1), np.float32(0.5))], "b": [(np.int64(3), 1.0)]}
    beds = Beds((spans, spans))
    kept = KeptRanks(beds, Bed(), tmp_path).run(small.on_rank)  # type: ignore[arg-type]
    assert kept == [beds.found] * 2
    assert type(kept[0][1]["b"][0][0]) is int
    again = KeptRanks(beds, Bed(), None)  # type: ignore[arg-type]
    assert again.run(small.on_rank)[0] is beds.found
    assert len(list(tmp_path.iterdir())) == 1


def test_jobs_go_on_from_the_first_that_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Launched(Beds):
        def __init__(self) -> None:
            super().__init__(FOUND[small.on_rank])

        def __enter__(self) -> Launched:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def run(self, function: object, *args: object) -> list[object]:
            if args == (stops_at,):
                raise KeyboardInterrupt
            measured.append(args)
            return super().run(function, *args)

    monkeypatch.setattr("moesaic_lab.benchmark.Launcher", Launched)
    measured: list[object] = []

    def run() -> list[int]:
        return on_beds(
            range(4),
            lambda job: Bed(nodes=2 + job // 2),
            str,
            lambda ranks, job: len(ranks.run(small.on_rank, job)),
            told=str,
            keep=tmp_path,
        )

    stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        run()
    stops_at = -1
    assert run() == [2] * 4
    assert measured == [(0,), (1,), (2,), (3,)]


def test_a_file_that_is_still_written_is_not_told_as_measured(tmp_path: Path) -> None:
    lines: list[str] = []
    with told_of_files(tmp_path, lines.append):
        (tmp_path / ".writing-1-half.json").write_text("{")
        (tmp_path / "whole.json").write_text("{}")
    assert lines == ["whole is measured"]
