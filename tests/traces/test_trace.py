"""Traces are read as they were written; damaged, mixed and other files are refused in one line."""

from __future__ import annotations

import json
import re
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.traces.arrays import read_array
from moesaic.traces.load import drift, layer_loads, locality, max_violation
from moesaic.traces.trace import (
    Trace,
    TraceSegment,
    TraceShape,
    differences,
    read_header,
    samples_of,
    segment_name,
    steps_in_words,
    write_segment,
)

SHAPE = TraceShape(num_layers=2, num_experts=5, top_k=2, sequences=4, seq_len=3, accumulation=2)


def tokens(
    steps: list[int], shape: TraceShape = SHAPE, seed: int = 0, groups: int = 2
) -> TraceSegment:
    """Return random choices, distinct within a token; some second choices are marked as not
    sent."""
    random = np.random.default_rng(seed)
    rows = random.random((len(steps), *shape.table("tokens")[:-1], shape.num_experts)).argsort(-1)[
        ..., : shape.top_k
    ]
    rows[..., -1] = np.where(
        random.random(rows.shape[:-1]) < 0.2, -1 - rows[..., -1], rows[..., -1]
    )
    return TraceSegment(shape, "tokens", np.array(steps), rows, groups, {"router": "gshard"})


def counted(segment: TraceSegment) -> np.ndarray:
    """Count the copies of each sequence for each expert, in a loop over tokens."""
    shape = segment.shape
    copies = np.zeros((len(segment.steps), *shape.table("counts")), dtype=np.int64)
    for place in np.ndindex(*segment.table.shape):
        if segment.table[place] >= 0:
            copies[(*place[:3], place[3] // shape.seq_len, segment.table[place])] += 1
    return copies


@pytest.mark.parametrize("experts", [5, 128, 129, 300])
def test_a_trace_comes_back_as_it_was_written(tmp_path, experts):
    shape = TraceShape(
        num_layers=2, num_experts=experts, top_k=2, sequences=4, seq_len=3, accumulation=2
    )
    segment = tokens([3, 4, 7], shape)
    segment.table[0, 0, 0, 0] = [experts - 1, -experts]
    write_segment(segment, tmp_path / "a.npz")
    trace = Trace.open(tmp_path / "a.npz")
    assert (trace.shape, trace.holds, trace.steps) == (shape, "tokens", [3, 4, 7])
    expected = counted(segment)
    for place, step in enumerate(trace.steps):
        for micro in range(2):
            for layer in range(2):
                assert (
                    trace.experts(layer, step, micro) == segment.table[place, micro, layer]
                ).all()
                assert (trace.samples(layer, step, micro) == expected[place, micro, layer]).all()
                by_group = expected[place, micro, layer].reshape(2, 2, experts).sum(1)
                assert (trace.counts(layer, step, micro) == by_group).all()
                assert (
                    trace.counts(layer, step, micro, groups=4) == expected[place, micro, layer]
                ).all()
    assert (trace.loads() == expected.sum((1, 3))).all()
    assert dict(read_header(tmp_path / "a.npz").source) == {"router": "gshard"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_counts_come_back(tmp_path):
    segment = tokens([0, 1])
    write_segment(
        TraceSegment(SHAPE, "counts", segment.steps, counted(segment), 4), tmp_path / "a.npz"
    )
    trace = Trace.open(tmp_path / "a.npz")
    assert (trace.samples(1, 1, 0) == counted(segment)[1, 0, 1]).all()
    assert trace.counts(0, 0).shape == (4, 5)
    with pytest.raises(
        InputError,
        match="holds counts only, not the tokens' experts: record it with --record-routing tokens",
    ):
        trace.experts(0, 0)


@pytest.mark.parametrize(
    ("holds", "seq_len", "experts", "expected"),
    [
        ("counts", 255, 64, 3 * 2 * 4 * 64),
        ("counts", 256, 64, 3 * 2 * 4 * 64 * 2),
        ("tokens", 256, 128, 3 * 2 * 4 * 256 * 2),
        ("tokens", 256, 129, 3 * 2 * 4 * 256 * 2 * 2),
    ],
)
def test_sizes_are_what_the_pages_say(tmp_path, holds, seq_len, experts, expected):
    shape = TraceShape(
        num_layers=2, num_experts=experts, top_k=2, sequences=4, seq_len=seq_len, accumulation=3
    )
    assert shape.bytes_per_step(holds) == expected
    random = np.random.default_rng(0)
    table = random.integers(0, experts, (5, *shape.table(holds)))
    write_segment(TraceSegment(shape, holds, np.arange(5), table), tmp_path / "a.npz")
    assert 0.4 * 5 * expected < (tmp_path / "a.npz").stat().st_size < 1.02 * 5 * expected + 2000


def test_segments_in_a_folder_are_one_trace(tmp_path):
    parts = [tokens([0, 1], seed=1), tokens([2, 3, 4], seed=2, groups=4), tokens([9], seed=3)]
    for part in parts:
        write_segment(part, tmp_path / "run" / "routing" / segment_name(int(part.steps[0])))
    for path in (tmp_path / "run", tmp_path / "run" / "routing"):
        trace = Trace.open(path)
        assert trace.steps == [0, 1, 2, 3, 4, 9]
        assert (trace.experts(1, 4, 1) == parts[1].table[2, 1, 1]).all()
        assert (trace.experts(0, 9) == parts[2].table[0, 0, 0]).all()
        assert (trace.experts(0, 0) == parts[0].table[0, 0, 0]).all()
        assert [trace.counts(0, step).shape[0] for step in trace.steps] == [2, 2, 4, 4, 4, 2]
    again = list(trace.segments())
    assert [part.steps.tolist() for part in again] == [[0, 1], [2, 3, 4], [9]]


def test_a_segment_is_cut_before_a_step():
    for step in (0, 1, 2, 5):
        cut = tokens([1, 2, 4]).before(step)
        assert cut.steps.tolist() == [s for s in (1, 2, 4) if s < step]
        assert len(cut.table) == len(cut.steps)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) * 2 // 3],
        lambda data: (
            data[: len(data) // 2]
            + bytes([data[len(data) // 2] ^ 0x55])
            + data[len(data) // 2 + 1 :]
        ),
        lambda data: b"",
    ],
    ids=["cut short", "flipped", "empty"],
)
def test_damaged_files_are_refused(tmp_path, damage):
    path = tmp_path / "routing" / segment_name(0)
    write_segment(tokens(list(range(40))), path)
    path.write_bytes(damage(path.read_bytes()))
    line = (
        f"trace {path}: is damaged or cut short: remove the file and use the other steps, or "
        "record it again"
    )
    with pytest.raises(InputError, match=re.escape(line)):
        Trace.open(tmp_path).loads()


HEADER = {
    "format": "moesaic routing trace",
    "version": 1,
    "shape": {},
    "holds": "counts",
    "groups": 1,
    "source": {},
}


def write_header(path: Path, **changes: object) -> None:
    np.savez(path, header=np.array(json.dumps(HEADER | changes)), steps=np.arange(2))


def write_parts(folder: Path, *parts: TraceSegment) -> None:
    for part in parts:
        write_segment(part, folder / segment_name(int(part.steps[0])))


def write_large(path: Path) -> None:
    large = tokens([0])
    large.table[0, 0, 0, 0, 0] = 5
    write_segment(large, path)


OTHERS = {
    "other.npz": (
        lambda path: np.savez(path, weights=np.zeros(3)),
        "is not a routing trace: make one with moesaic train",
    ),
    "plain.npz": (
        lambda path: np.save(path.open("wb"), np.zeros(3)),
        "is not a routing trace: make one with moesaic",
    ),
    "newer.npz": (
        lambda path: write_header(path, version=2),
        "has version 2, this Moesaic reads up to 1: upgrade it",
    ),
    "torn.npz": (write_header, "its header is damaged"),
    "mixed": (
        lambda path: write_parts(path, tokens([0]), tokens([1], replace(SHAPE, num_experts=6))),
        "is of another model or run than steps-00000000.npz, num_experts=6 (not 5): keep",
    ),
    "twice": (
        lambda path: write_parts(path, tokens([0, 1, 2]), tokens([2, 3])),
        "steps-00000000.npz and steps-00000002.npz both hold step 2: remove one",
    ),
    "back.npz": (
        lambda path: write_segment(tokens([1, 0]), path),
        "its header is damaged (holds tokens, steps not ascending): record it again",
    ),
    "large.npz": (
        write_large,
        "its table holds other values than whole numbers from -5 to 4: record it again",
    ),
    "nothing": (
        Path.mkdir,
        "holds no steps-*.npz: name a trace, or the folder of a run that recorded one",
    ),
    "absent.npz": (lambda path: None, "no such file: name a trace"),
}
"""Files and folders that are not a trace of one run: how to write each, and the message."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_refused(tmp_path, name):
    write, message = OTHERS[name]
    write(tmp_path / name)
    caught = refused(lambda: Trace.open(tmp_path / name).loads())
    assert message in caught
    assert caught.startswith(f"trace {tmp_path / name}")


def test_wrong_questions_are_refused():
    trace = Trace.of(tokens([3, 4]))
    for ask, message in (
        (lambda: trace.samples(2, 3), "has no layer 2: choose 0 to 1"),
        (lambda: trace.samples(0, 3, 2), "has no micro-batch 2: choose 0 to 1"),
        (lambda: trace.samples(0, 5), "has no step 5, only 3 to 4"),
        (
            lambda: trace.counts(0, 3, groups=3),
            "4 sequences do not split into 3 groups: choose a divisor",
        ),
    ):
        with pytest.raises(InputError, match=message):
            ask()


def test_an_unwritable_place_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in refused(
        lambda: write_segment(tokens([0]), tmp_path / "file" / "a.npz")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_steps_and_differences_in_words():
    assert steps_in_words([0, 1, 2, 5, 7, 8]) == "0 to 2 and 5 and 7 to 8"
    assert steps_in_words([4]) == "4"
    assert steps_in_words(range(0, 100, 10)) == "10 steps from 0 to 90"
    assert differences(SHAPE, SHAPE) == []


def test_max_violation_is_the_definition():
    assert max_violation(
        np.array([[4, 4, 4, 4], [16, 0, 0, 0], [6, 2, 4, 4], [0, 0, 0, 0]])
    ).tolist() == [0, 3, 0.5, 0]


def test_drift_is_the_share_of_copies_that_change():
    assert drift(np.array([[4, 4], [8, 0], [8, 0]])) == pytest.approx(0.25)
    assert drift(np.array([[4, 4]])) == 0.0


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_locality_compares_pairs_of_copies(top_k):
    shape = TraceShape(num_layers=1, num_experts=6, top_k=top_k, sequences=3, seq_len=5)
    experts = np.random.default_rng(top_k).random((15, 6)).argsort(1)[:, :top_k]
    token = np.repeat(np.arange(15), top_k)
    expert = experts.reshape(-1)
    other = token[:, None] != token
    alike = token[:, None] // 5 == token // 5
    within, between = (
        (expert[:, None] == expert)[other & where].mean() for where in (alike, ~alike)
    )
    assert locality(samples_of(experts, shape), top_k) == pytest.approx(
        (within - between) / (1 / top_k - between)
    )


def test_locality_goes_from_none_to_all():
    alike = np.tile([4, 4, 4, 4], (4, 1))
    apart = 8 * np.eye(4, dtype=int)
    assert locality(apart, 1) == 1.0
    assert locality(np.repeat(apart, 2, axis=1)[:, :8], 2) == pytest.approx(1.0)
    assert -0.15 < locality(alike, 1) < 0.0
    assert locality(np.array([[3, 3]]), 1) == 0.0


def test_a_layers_figures_are_over_all_micro_batches():
    segment = tokens([0, 1, 2])
    rows = layer_loads(Trace.of(segment))
    loads = counted(segment).sum((1, 3))
    for layer, row in enumerate(rows):
        assert row.layer == layer
        assert row.max_violation == pytest.approx(max_violation(loads[:, layer]).tolist())
        assert row.busiest == tuple(loads[:, layer].argmax(1))
        assert row.drift == pytest.approx(drift(loads[:, layer]))
        assert row.shares == pytest.approx(loads[:, layer] / loads[:, layer].sum(1, keepdims=True))
        each = [
            locality(counted(segment)[step, micro, layer], 2)
            for step in range(3)
            for micro in range(2)
        ]
        assert row.locality == pytest.approx(np.mean(each))
        assert row.dead_experts == 0


def test_arrays_are_not_inflated_beyond_what_their_bytes_can_hold(tmp_path):
    """100 kB of zeros would become 96 MB: the header is read first."""
    with zipfile.ZipFile(
        tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1
    ) as archive:
        with archive.open("header.npy", "w") as file:
            np.lib.format.write_array(file, np.array(json.dumps(HEADER)))
        with archive.open("steps.npy", "w") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<i8", "fortran_order": False, "shape": (12 << 20,)}
            )
            for _ in range(12):
                file.write(bytes(8 << 20))
    tracemalloc.start()
    assert "is damaged or cut short" in refused(Trace.open, tmp_path / "bomb.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_an_array_that_says_more_than_its_file_holds_is_refused_before_memory_is_asked_for(
    tmp_path,
):
    with (tmp_path / "counts.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<i8", "fortran_order": False, "shape": (1 << 40,)}
        )
    with pytest.raises(ValueError, match="its header says 8,796,093,022,208 bytes"):
        read_array(tmp_path / "counts.npy")


def test_arrays_are_read_as_numpy_reads_them(tmp_path):
    for array in (
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3),
    ):
        np.save(tmp_path / "a.npy", array)
        read = read_array(tmp_path / "a.npy")
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert np.array_equal(read, array)


def test_a_trace_is_not_listed_through_a_link_below_the_typed_path(tmp_path):
    write_segment(tokens([0]), tmp_path / "other" / segment_name(0))
    run = tmp_path / "run"
    run.mkdir()
    (run / "routing").symlink_to(tmp_path / "other")
    assert "routing': is a symbolic link" in refused(Trace.open, run)
    with pytest.raises(InputError, match="routing': is a symbolic link"):
        write_segment(tokens([0]), run / "routing" / segment_name(0))
    (tmp_path / "typed").symlink_to(tmp_path / "other")
    assert Trace.open(tmp_path / "typed").steps == [0]
