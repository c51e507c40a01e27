"""However a bed ends, nothing of it stays: no process, no namespace, no link, no file, no mount.

Each way is a script of its own, whose processes are known by a word in their environment. Other
beds may run meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from helpers import thinned

TOKEN = "MOESAIC_TEST_TOKEN"
KINDS = ("net", "pid", "mnt", "user")
SCRIPT = """
    import os, subprocess, sys, time
    from moesaic_testbed import Bed, Launcher

    def stay():
        subprocess.Popen(["sleep", "1000"], start_new_session=True)  # no process group reaches it
        os.write(1, b"up\\n")
        time.sleep(1000)

    if __name__ == "__main__":
        with Launcher({torch}) as launcher, launcher.open(Bed()) as bed:
            {body}
"""
WAYS = {
    "a function runs": "bed.run(stay)",
    "a command runs": 'bed.command(["sh", "-c", "setsid sleep 1000 & echo up; sleep 1000"])',
    "nothing runs": 'print("up\\n" * 4, end="", flush=True); time.sleep(1000)',
}
ENDINGS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGKILL of its child")


def processes(token: str) -> dict[int, dict[str, str]]:
    """Return the namespaces of every process that has a word in its environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = {kind: os.readlink(entry / "ns" / kind) for kind in KINDS}
        except OSError:  # it ended just now, or is a zombie
            continue
    return found


def child_of(parent: int, running: Iterable[int]) -> int:
    """Return the one process among some that another one started. (Numbers wrap, so the smallest
    need not be the first.)"""
    (child,) = (
        pid
        for pid in running
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent
    )
    return child


def inhabitants() -> dict[tuple[str, str], set[str]]:
    """Return the namespaces of all processes of this machine, by number and beginning: numbers are
    given again."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                began = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[19]
                found[entry.name, began] = {os.readlink(entry / "ns" / kind) for kind in KINDS}
        except OSError:
            continue
    return found


def outside() -> tuple[str, ...]:
    """Return what a bed could leave on the machine itself."""
    words = (["ip", "-o", "link"], ["ip", "netns", "list"], ["tc", "qdisc", "show"])
    shown = [subprocess.run(w, capture_output=True, text=True, check=True).stdout for w in words]
    mounts = [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if "hosts" in line
    ]
    return (*shown, *mounts, Path("/etc/hosts").read_text())


def wait_until_gone(token: str) -> dict[int, dict[str, str]]:
    """Wait for processes to end; returns those that do not."""
    end = time.monotonic() + 300
    while (left := processes(token)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


@pytest.fixture
def token(cluster_launcher) -> Iterator[str]:  # skips where there are no beds
    token = uuid.uuid4().hex
    yield token
    for pid in processes(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def attend() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore it


def start(body: str, token: str, folder: Path) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(SCRIPT).replace("{body}", body).replace("{torch}", str("bed.run" in body))
    )
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, TOKEN: token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=attend,
    )


def await_ranks(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(4)] == ["up\n"] * 4


def assert_nothing_is_left(
    token: str, used: set[str], running: dict[tuple[str, str], set[str]], before: tuple[str, ...]
) -> None:
    """Check that no process of a bed is there, nor one that was in its namespaces while it ran.

    The system gives the numbers of namespaces that are gone to new ones, of other beds too,
    whenever these make them.
    """
    assert wait_until_gone(token) == {}
    stayed = {
        who for who, spaces in inhabitants().items() if spaces & used & running.get(who, set())
    }
    assert stayed == set()
    assert outside() == before


@pytest.mark.parametrize(("what", "ending"), thinned(itertools.product(WAYS, ENDINGS), every=5))
def test_nothing_is_left(what, ending, token, tmp_path):
    before = outside()
    mine = {os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}
    process = start(WAYS[what], token, tmp_path)
    await_ranks(process)
    # parent, launcher, two around the bed, store, ranks
    least = 12 if what != "nothing runs" else 4
    end = time.monotonic() + 300
    # what begins has no environment yet
    while len(running := processes(token)) < least and time.monotonic() < end:
        time.sleep(0.05)
    assert len(running) >= least
    everybody = inhabitants()
    used = {namespace for of_one in running.values() for namespace in of_one.values()} - mine
    assert len([namespace for namespace in used if namespace.startswith("pid")]) == 1
    if ending == "SIGKILL of its child":
        os.kill(child_of(process.pid, running), signal.SIGKILL)
    else:
        process.send_signal(getattr(signal, ending))
    if ending == "SIGKILL of its child" and what == "nothing runs":
        process.kill()  # nobody has told it
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert_nothing_is_left(token, used, everybody, before)


@pytest.mark.parametrize(
    ("body", "said"), [("1 / 0", "ZeroDivisionError: division by zero"), ("pass", "")]
)
def test_nothing_is_left_after_an_exception_or_a_normal_end(body, said, token, tmp_path):
    before = outside()
    show = 'print(bed.command(["readlink", "/proc/self/ns/net"]), flush=True)'
    process = start(f"{show}; sys.stdin.readline(); {body}", token, tmp_path)
    assert process.stdout is not None
    *shown, codes = [process.stdout.readline().strip() for _ in range(5)]
    used = set(shown)
    everybody = inhabitants()
    assert (len(used), codes) == (2, "[0, 0, 0, 0]")
    out, err = process.communicate("\n", timeout=300)
    assert out == ""
    assert err.strip().endswith(said)
    assert bool(err) == bool(said)
    assert_nothing_is_left(token, used, everybody, before)


def test_a_bed_ends_with_its_parent_though_a_fork_of_it_lives_on(token, tmp_path):
    """The fork has the sockets to the bed too: that they are closed is not what ends it."""
    body = (
        'pid = os.fork(); print("up\\n" * (4 if pid else 0), end="", flush=True); time.sleep(1000)'
    )
    process = start(body, token, tmp_path)
    await_ranks(process)
    before = set(processes(token))
    process.kill()
    process.wait()
    end = time.monotonic() + 300
    while len(left := processes(token)) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    (fork,) = left
    assert fork in before - {process.pid}
    assert left[fork]["pid"] == os.readlink("/proc/self/ns/pid")
    os.kill(fork, signal.SIGKILL)
    process.communicate(timeout=300)
