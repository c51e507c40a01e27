"""Faults that strike at a chosen write: where they strike, and a sample of them."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from moesaic.errors import InputError
from moesaic_lab.chaos import schedule, struck
from moesaic_lab.chaos.schedule import Fault, draw_faults, kinds_of
from moesaic_lab.fuzz.writes import Ended, in_new_process
from moesaic_lab.system_calls import STREAMS, Watched, Write, can_watch


def fault(kind: str, way: str, chance: float = 0.0) -> Fault:
    return Fault(number=0, kind=kind, way=way, rank=1, after=1, chance=chance)


def test_a_signal_strikes_at_the_nth_write_of_a_save_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    strike = struck.Strike(fault("finetune", "SIGKILL"), 2)
    paths = ["/out/finetune.json", "/out/.writing-0-checkpoint/a", STREAMS[1], "/out/checkpoint-2"]
    writes = [Write(number, "write", path, os.getpid()) for number, path in enumerate(paths, 1)]
    assert [strike(write) for write in (*writes, writes[1])] == [0] * 5
    assert sent == [(os.getpid(), signal.SIGKILL)]
    assert strike.write == writes[3]


@pytest.mark.parametrize(
    ("way", "number"), [("reader gone", errno.EPIPE), ("disk full", errno.ENOSPC)]
)
def test_a_lost_output_stays_lost_and_files_do_not(way: str, number: int) -> None:
    strike = struck.Strike(fault("output", f"train, {way}"), 2)
    paths = [STREAMS[1], STREAMS[1], "/out/file", STREAMS[2], STREAMS[1]]
    found = [strike(Write(place, "write", path, 1)) for place, path in enumerate(paths, 1)]
    assert found == [0, number, 0, 0, number]


def test_a_rank_that_is_left_must_say_what_happened() -> None:
    silent = Ended(watched=Watched(137, ()), out="", err="")
    line = Ended(watched=Watched(137, ()), out="", err="moesaic finetune: rank 0 died\n")
    killed = fault("finetune", "SIGKILL")
    assert not struck._is_named(killed, 2, silent)
    assert struck._is_named(killed, 2, line)
    assert struck._is_named(killed, 1, silent)
    assert not struck._is_named(fault("finetune", "SIGTERM"), 1, silent)


def test_without_a_watching_kernel_these_faults_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise InputError("needs Linux 5.5")

    monkeypatch.setattr(schedule, "can_watch", lambda: False)
    monkeypatch.setattr(schedule, "require_watching", refuse)
    assert not {"finetune", "output"} & set(kinds_of((), on_bed=True))
    with pytest.raises(InputError, match=r"needs Linux 5\.5"):
        kinds_of(("finetune",), on_bed=True)


@pytest.mark.random
@pytest.mark.skipif(not can_watch(), reason="the kernel does not tell of writes")
def test_struck_commands_go_on_with_the_same_bytes(tmp_path: Path) -> None:
    rows = struck.rows_of(draw_faults(12, 5, ["finetune", "output"]), tmp_path, str)
    assert len(rows) == 12
    assert {row["ranks"] for row in rows} == {1, 2}
    assert [row for row in rows if row["is_wrong"]] == []


@pytest.mark.random
def test_the_first_threads_of_a_forked_rank_do_not_race_for_a_new_pool() -> None:
    assert in_new_process(_ranks_that_failed, str) == 0


def _ranks_that_failed(told: Callable[[str], object]) -> int:
    """Fork 20 ranks whose first tensors are several threads', and return how many failed."""
    torch.ones(4).nonzero()  # the parent has a pool
    processes = []
    for _ in range(20):
        processes.append(os.fork())
        if processes[-1] == 0:
            try:
                struck._become_rank(["threads"], {}, _race)
            finally:
                os._exit(1)
    return sum(os.waitpid(process, 0)[1] != 0 for process in processes)


def _race(words: Sequence[str]) -> int:
    """Let four threads use a tensor at the same time, and return how many failed."""
    starts = threading.Barrier(4)
    failed = []

    def use() -> None:
        starts.wait()
        try:
            torch.ones(4).nonzero()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(failed)
