"""SIGTERM and SIGHUP: what they do outside of steps, under nohup, and when a terminal closes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.train import launch
from moesaic.train.launch import Roll, naming_dead_ranks, stop_requests
from moesaic.train.signals import say_ends

SAYS = """
import time
from moesaic.train.signals import say_ends
say_ends("moesaic train")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _not_under_nohup() -> Iterator[None]:
    """Let processes that a test starts be ended by SIGHUP, though pytest itself may run under
    nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP], ids=lambda kind: kind.name)
def test_a_signal_before_the_first_step_says_one_line_and_ends_the_process_by_itself(
    kind: signal.Signals,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAYS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(kind)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -kind
    assert said == (
        f"moesaic train: ended by {kind.name} without saving: checkpoints that were saved stay\n"
    )


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        say_ends("moesaic train")
        with stop_requests() as received:
            signal.raise_signal(signal.SIGHUP)
        assert received == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_hang_up_changes_nothing_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with stop_requests() as received:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert received == ["SIGHUP"]
    assert signal.getsignal(signal.SIGHUP) is before


def test_what_is_printed_after_a_terminal_has_closed_stops_nothing(tmp_path: Path) -> None:
    """The kernel refuses writes to a terminal that is gone, in the midst of saving."""
    code = f"""
import signal, time
from pathlib import Path
from moesaic.train.launch import stop_requests
with stop_requests() as received:
    print("ready", flush=True)
    while not received:
        time.sleep(0.01)
    time.sleep(0.5)
    print("saving", flush=True)
Path({str(tmp_path / "saved")!r}).write_text(received[0])
"""
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, "-c", code])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)  # the kernel sends SIGHUP
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_rank_0_waits_no_longer_for_a_rank_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_of_rank_0", lambda: True)
    store = launch.dist.HashStore()
    other = Roll(store, 1, 2)
    other.sign()
    other.fail()
    waits: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    monkeypatch.setattr(launch.time, "monotonic", lambda: float(len(waits)))
    Roll(store, 0, 2).outlast()
    assert len(waits) <= 1


def test_a_rank_that_is_stopped_is_named_instead_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the start, Gloo's own timeout may come before the watch has looked at the processes."""
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        store = launch.dist.HashStore()
        Roll(store, 0, 2).sign()
        store.set("roll/process/1", f"process {stopped.pid} on {launch.socket.gethostname()}")
        before = signal.getsignal(signal.SIGTERM)
        with (
            pytest.raises(Exception, match=rf"^rank 1 is stopped \(process {stopped.pid}: SIGSTOP"),
            naming_dead_ranks(Roll(store, 0, 2), "while the ranks met: start the run again"),
        ):
            raise RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv"
            )
        signal.signal(signal.SIGTERM, before)
    finally:
        stopped.kill()
        stopped.wait()
