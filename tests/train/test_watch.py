"""Error lines of a run on several ranks when one rank stops, dies, or is at another place than the
others."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from contextlib import nullcontext
from types import FrameType

import pytest
import torch.distributed as dist
from torch import nn

from helpers import refused
from moesaic.cli.main import main
from moesaic.errors import TrainingError
from moesaic.train import watch as of_watch
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.launch import Roll, handle_ends, naming_dead_ranks
from moesaic.train.run_folder import FLIGHT, HANG, RunFolder
from moesaic.train.watch import Position, Watch, describe_hang, read_hang
from runs import tiny
from train.disturbed import disturbing, failed, finished, ours, start


def say(folder, what, where="loop.Trainer._accumulate", **changes):
    """Return what two ranks say of which the second is disturbed in its third step, and the run's
    folder."""
    run = folder / "run"
    script = disturbing(
        folder, where, f"if rank == 1 and steps_logged({str(run / 'metrics.jsonl')!r}) == 2: {what}"
    )
    config = tiny(
        folder,
        steps=1_000_000,
        batch_size=4,
        save={"every": 1},
        start_patience=300,
        patience=8,
        mesh={"ep": 2},
        **changes,
    )
    return failed(start(config, folder, script=script)), run


@pytest.mark.parametrize(
    "direction", ["forward", pytest.param("backward", marks=pytest.mark.random)]
)
def test_a_rank_that_is_stopped_is_named_by_the_one_that_waits_for_it(tmp_path, capsys, direction):
    plan, place = (
        ({"chunks": 2}, "executor.RunProgram.forward")
        if direction == "forward"
        else ({}, "executor.run_backward")
    )
    err, run = say(tmp_path, "stop()", place, plan=plan)
    (said,) = ours(err)
    assert said.startswith(
        "moesaic train: step 3 has stood still for 8 s: rank 1 is stopped (process "
    )
    layer, task = (
        ("blocks.0.ffn", r"\S+, chunk 0") if direction == "forward" else ("blocks.1.ffn", r"\S+")
    )
    assert re.search(
        (
            rf"rank 0 is in {direction} of layer {layer}, task \d+ \({task}\) of its program, "
            r"waiting for"
        ),
        said,
    )
    assert "bytes of rank 1" in said
    kept = list_checkpoints(run / "checkpoints")[-1]
    assert (
        f"the checkpoint {kept} is intact: go on with torchrun --nproc-per-node 2 -m moesaic train"
        in said
    )
    assert err.partition("FAILED")[0].count("Traceback") <= 1  # torchrun's own
    assert main(["why-hung", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == said.removeprefix("moesaic train: ")
    assert re.search(rf"^rank 0 \(process \d+ on .*\): in {direction} of layer", told, re.MULTILINE)
    assert re.search(r"^  .*executor\.py:\d+ in drive", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("strike", "where", "late"),
    [
        ("stop", "open_run", 0),
        ("kill", "train", 0),
        # torchrun's SIGTERM comes before the first rank misses the second
        pytest.param("kill", "open_run", 60, marks=pytest.mark.random),
    ],
)
def test_a_rank_that_stops_or_dies_before_its_first_step_is_named(tmp_path, strike, where, late):
    script = disturbing(
        tmp_path, f"loop.{where}", f"{strike}() if rank == 1 else time.sleep({late})"
    )
    patience = 10 if strike == "stop" else 120
    config = tiny(tmp_path, batch_size=4, start_patience=patience, patience=600, mesh={"ep": 2})
    (said,) = ours(failed(start(config, tmp_path, script=script)))
    if strike == "stop":
        assert said.startswith(
            "moesaic train: the start has stood still for 10 s: rank 1 is stopped (process "
        )
        at = (
            r"; rank 0 is at comm/process_groups\.py:\d+ in wait, waiting for \d+ bytes of rank "
            r"1; start the run again$"
        )
        assert re.search(at, said)
    else:
        died = (
            r"moesaic train: rank 1 died( by SIGKILL)? \(process \d+\), in the start; start the "
            r"run again"
        )
        assert re.match(died, said)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_is_busy_elsewhere_is_named_with_its_place(tmp_path):
    err, run = say(tmp_path, "time.sleep(1000)")
    (said,) = ours(err)
    assert re.search(r"rank 1 is at \S*loop\.py:\d+ in _step", said)
    assert "rank 0 is in all_gather" in said  # of the parameters
    assert said.removeprefix("moesaic train: ") in err.partition("FAILED")[2], err
    positions = read_hang(run)[1]
    assert [position.rank for position in positions] == [0, 1]
    assert any("in disturbed" in call for call in positions[1].stack)
    for rank in (0, 1):  # PyTorch's flight recorder
        assert "gloo:all_reduce" in {
            each["profiling_name"]
            for each in json.loads((run / FLIGHT.format(library="gloo", rank=rank)).read_text())[
                "entries"
            ]
        }


def test_a_rank_that_died_is_named_with_its_signal_and_what_to_type(tmp_path):
    err, run = say(tmp_path, "kill()")
    (said,) = ours(err)
    assert re.match(
        r"moesaic train: rank 1 died( by SIGKILL)? \(process \d+\), in step 3; the checkpoint ",
        said,
    )
    assert f"--config {shlex.quote(str(run / 'config.json'))} --existing resume" in said
    assert err.partition("FAILED")[0].count("Traceback") <= 1  # torchrun's own
    assert not (run / HANG).exists()


def test_connections_that_break_between_ranks_that_live_are_one_line(tmp_path):
    err, run = say(tmp_path, "break_connections()")
    (said,) = ours(err)
    assert re.match(
        (
            r"moesaic train: rank [01] lost a connection to other ranks, whose processes are "
            r"alive \(.*gloo"
        ),
        said,
    )
    kept = list_checkpoints(run / "checkpoints")[-1]
    assert (
        f", in step 3; the checkpoint {kept} is intact: go on with torchrun --nproc-per-node 2"
        in said
    )
    assert said.endswith("look at the links between their nodes")
    assert err.partition("FAILED")[0].count("Traceback") <= 1  # torchrun's own


@pytest.mark.parametrize("counts_on", [False, True])
def test_of_ranks_on_other_nodes_only_those_that_count_no_more_are_gone(monkeypatch, counts_on):
    store = dist.HashStore()
    store.set("roll/process/1", "process 1 on elsewhere")
    Roll(store, 1, 2).beat(3)
    monkeypatch.setattr(time, "sleep", lambda _: Roll(store, 1, 2).beat(4) if counts_on else None)
    gone = (
        {}
        if counts_on
        else {1: "does not answer (process 1 on elsewhere): it died, or its node is cut off"}
    )
    assert Roll(store, 0, 2).dead() == gone


def test_who_says_why_it_ends_is_not_ended_by_its_launcher_before(monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    store = dist.HashStore()
    Roll(store, 1, 2).sign()
    try:
        with (
            pytest.raises(RuntimeError, match="connection reset"),
            naming_dead_ranks(Roll(store, 0, 2), "in step 3"),
        ):
            raise RuntimeError("connection reset")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("dead", [{}, {1: "died by SIGKILL (process 7)"}])
def test_the_launchers_sigterm_names_the_dead_and_has_its_usual_effect_without_any(
    monkeypatch, dead
):
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(Roll, "dead", lambda self: dead)
    monkeypatch.setattr(os, "kill", lambda *sending: sent.append(sending))
    before = handle_ends(Roll(dist.HashStore(), 0, 2), lambda: "in step 3")
    try:
        handler = signal.getsignal(signal.SIGTERM)
        if dead:
            with pytest.raises(
                TrainingError, match=r"^rank 1 died by SIGKILL \(process 7\), in step 3$"
            ):
                handler(signal.SIGTERM, None)
            assert (sent, signal.getsignal(signal.SIGTERM)) == ([], signal.SIG_IGN)
        else:
            handler(signal.SIGTERM, None)
            assert (sent, signal.getsignal(signal.SIGTERM)) == (
                [(os.getpid(), signal.SIGTERM)],
                signal.SIG_DFL,
            )
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class Looks:
    """Replaces the clock and the timer of a watch: gives the seconds between its rounds."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)
        self._now = 0.0

    def wait(self, _: float) -> bool:
        passed = next(self._seconds, None)
        self._now += passed or 0.0
        return passed is None

    def monotonic(self) -> float:
        return self._now


def test_a_watch_holds_no_frame_between_its_looks(monkeypatch):
    """A frame would keep the tensors of the layer alive that it runs."""
    held = []

    class Looking(Looks):
        def wait(self, pause: float) -> bool:
            values = sys._getframe(1).f_locals.values()
            held.extend(value for value in values if isinstance(value, FrameType))
            return super().wait(pause)

    monkeypatch.setattr(sys.modules[__name__], "Looks", Looking)
    assert not is_given_up(monkeypatch, [1.0] * 3)
    assert held == []


def is_given_up(monkeypatch, seconds, step=lambda: "step 1", is_long=False):
    """Return whether a watch gives the run up if its rounds are that many seconds apart, with a
    patience of 10 seconds."""
    looks = Looks(seconds)
    given_up = []
    watch = Watch(nn.Linear(1, 1), None, 10.0, step, lambda: "")
    monkeypatch.setattr(of_watch, "time", looks)
    watch._stopped, watch._store, watch._rank = looks, dist.HashStore(), 0
    watch._roll = Roll(watch._store, 0, 2)
    watch._give_up = lambda: given_up.append(True)
    with watch.long() if is_long else nullcontext():
        watch._run()
    return bool(given_up)


def test_a_run_is_given_up_when_its_patience_is_over_and_not_before(monkeypatch):
    assert not is_given_up(monkeypatch, [1.0] * 11)  # the first look finds out where it stands
    assert is_given_up(monkeypatch, [1.0] * 12)


def test_seconds_in_which_a_process_was_stopped_are_not_counted(monkeypatch):
    assert not is_given_up(monkeypatch, [1.0, 3600.0, 1.0, 1.0])


def test_a_run_whose_steps_go_on_is_not_given_up_wherever_it_is_found(monkeypatch):
    """The place stays the same, as in a run that waits for a GPU in every step."""
    looks = iter(range(100))
    assert not is_given_up(monkeypatch, [1.0] * 60, step=lambda: f"step {next(looks) // 8}")


@pytest.mark.parametrize(("is_long", "moves"), [(True, True), (True, False), (False, True)])
def test_a_rank_that_reads_and_writes_is_waited_for_where_that_may_take_long(
    monkeypatch, is_long, moves
):
    numbers = iter(range(100))
    monkeypatch.setattr(of_watch, "_moved_bytes", lambda: next(numbers) if moves else 0)
    assert is_given_up(monkeypatch, [1.0] * 60, is_long=is_long) == (not (is_long and moves))


WRITES = """
    if rank == 1 and options["step"] == 2:
        with open(os.devnull, "w", buffering=1) as disk:
            for _ in range(40):
                disk.write("x" * 1000 + chr(10))
                time.sleep(0.2)
"""
"""Needs longer than the patience to write, and does write."""


@pytest.mark.random
def test_a_rank_that_writes_for_longer_than_its_patience_is_waited_for(tmp_path):
    script = disturbing(tmp_path, "loop.save_checkpoint", WRITES)
    config = tiny(
        tmp_path,
        steps=3,
        batch_size=4,
        save={"every": 2},
        start_patience=300,
        patience=5,
        mesh={"ep": 2},
    )
    process = start(config, tmp_path, script=script)
    _, err = finished(process)
    assert process.returncode == 0, err
    assert not (tmp_path / "run" / HANG).exists()


def test_who_stands_elsewhere_comes_before_those_who_wait():
    wait = "in forward of layer blocks.0.ffn, task 3 (dispatch) of its program"
    found = [
        Position(0, "process 1 on a", wait, {"1": 8, "2": 8, "3": 8}),
        Position(1, "process 2 on a", wait, {"0": 8, "2": 8, "3": 8}),
        Position(3, "process 4 on b", "at train/data.py:7 in get"),
    ]
    assert describe_hang("step 3", 600, found, {2: "is stopped (process 3)"}) == (
        "step 3 has stood still for 600 s: rank 2 is stopped (process 3); rank 3 is at "
        f"train/data.py:7 in get; ranks 0, 1 are {wait}, waiting for 16 bytes of rank 2, 16 bytes "
        "of rank 3"
    )


def test_ranks_that_all_wait_for_each_other_are_told_with_their_links():
    found = [
        Position(0, "process 1 on a", "in x", {"1": 1000}),
        Position(1, "process 2 on b", "in x", {"0": 2000}),
    ]
    assert describe_hang("step 3", 600, found, {}) == (
        "step 3 has stood still for 600 s: ranks 0, 1 are in x, waiting for 2,000 bytes of rank "
        "0, 1,000 bytes of rank 1: all are there, so look at the links between their nodes"
    )


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"line": 1, "ranks": [{"a": 1}]}', "\udcff", "[" * 100_000]
)
def test_a_damaged_record_is_refused_in_one_line(tmp_path, text):
    RunFolder(tmp_path).write(HANG, text.encode("utf-8", "surrogateescape"))
    assert "cannot be read" in refused(read_hang, tmp_path)


def test_a_run_that_never_hung_says_so(tmp_path, capsys):
    assert main(["why-hung", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
    assert main(["why-hung"]) == 2


def test_what_was_written_down_is_told_without_escape_sequences(tmp_path, capsys):
    where = {
        "rank": 0,
        "process": "1 on \x1b]52;c;x\x07",
        "at": "\x1b[2J",
        "waits_for": {},
        "stack": ["\x1b[31m"],
    }
    table = {"line": "it hung\x1b[2J", "ranks": [where]}
    RunFolder(tmp_path).write(HANG, json.dumps(table))
    assert main(["why-hung", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "it hung\\x1b[2J" in said
    assert "\x1b" not in said
    assert main(["why-hung", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == table
