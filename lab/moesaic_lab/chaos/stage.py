"""Play faults: start ranks as torchrun's agent does, disturb them, and examine what they leave
behind.

This code runs inside the process namespace of an emulated cluster, where it can cut links, or in a
plain process. The process has imported everything that ranks need and has a single thread, so ranks
can be forked from it quickly.

An attempt is one start of all ranks of a run; a run takes several, since faults end them. The store
is the TCPStore at which ranks meet.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moesaic.configfile import as_json, override
from moesaic.errors import InputError
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.metrics import METRICS, read_metrics
from moesaic.train.presets import demo
from moesaic_lab.chaos.planted import become_rank
from moesaic_lab.chaos.schedule import INTERVAL, KINDS, RANKS_PER_NODE, WORLD, Fault
from moesaic_testbed.bed import Bed
from moesaic_testbed.kernel import adopt_orphans, die_with_parent, enter_net
from moesaic_testbed.rank import launcher_variables
from moesaic_testbed.wiring import Wiring, node_address

LAST_STEPS = 20
"""Number of steps at the end of a run in which no fault begins."""
PATIENCE = 5.0
SLACK = 30.0
"""Seconds after which a run without progress gives up, and seconds that its ranks then have to
agree on a message and exit."""
MEETING_SECONDS = 20.0
"""Seconds after which ranks stop waiting for a rank that was killed before it had joined them."""
START_SECONDS = 120.0
"""Seconds after which ranks that have taken no step count as hung."""
LASTS_SECONDS = 1.5
"""Duration of a temporary fault in seconds."""
SMALL: dict[str, Any] = {
    "batch_size": 4,
    "device": "cpu",
    "threads": 1,
    "precision": "float32",
    "log_every": 1,
    "tensorboard": False,
    "start_patience": MEETING_SECONDS,
    "patience": PATIENCE,
    "model": {
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "seq_len": 16,
        "moe": {"num_experts": 8, "hidden": 16},
    },
    "mesh": {"ep": 2, "etp": 2},
}
"""Settings that shrink the demo model."""
GONE = "rank {rank} (died|does not answer|is gone)"
SAYS = {
    "startup": f"{GONE}|rank {{rank}} did not answer|ranks? .*{{rank}}.* did not come|rank "
    "{rank}(, which .* store,)? (is stopped|does not answer)",
    "stop": "rank {rank} is stopped",
    "cut": (
        "rank [{others}] does not answer|links between their nodes|nothing answers where the "
        "ranks' store was"
    ),
    "disk": (
        "(by rank {rank}: .*|metrics .* could not be written, )(the disk is full|File too large)"
    ),
    "damage": "a checkpoint is damaged .*: taking step-",
}
"""By kind of fault, the pattern that the ranks' line about it must match; `GONE` for kinds that are
not listed."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One training run and the faults that are injected into it, one after another."""

    folder: Path
    """Folder for the run and the logs of its ranks; `play` creates it."""
    steps: int
    """Steps of the run."""
    transport: str
    """Transport of the MoE layers' messages."""
    in_background: bool = False
    """Whether threads write the checkpoints; the steps of one more interval may be lost then."""
    faults: Sequence[Fault]
    reference: Sequence[float] = ()
    """Losses of the undisturbed run, by step."""
    told: Path | None = None
    """File to which a line is appended after each fault."""
    keeps: bool = False
    """Whether to keep the folder if a promise was broken."""


@dataclass(kw_only=True)
class FaultOutcome:
    """What happened after a fault."""

    number: int
    kind: str
    way: str
    rank: int
    transport: str
    in_background: bool = False
    """Whether threads wrote the checkpoints."""
    seconds: float = 0.0
    """Seconds from the fault to the end of the last rank."""
    reached: int = 0
    """Last step that the metrics recorded before the attempt ended."""
    resumed: int | None = None
    """Step from which the next attempt continued; None if no later attempt has taken a step."""
    hung: bool = False
    """Whether the attempt did not react in time."""
    named: bool = True
    """Whether a line names the rank or the cause, and no rank printed a traceback."""
    same: bool = True
    """Whether all losses so far are bitwise those of the undisturbed run."""
    recovered: bool = False
    """Whether a later attempt has taken a step."""
    leftovers: int = 0
    """Number of processes that outlived the attempt, and at the end of the run of temporary files
    and locks left over."""
    line: str = ""
    """The line that names the rank or the cause, or the last output if there is none."""

    @property
    def lost(self) -> int:
        """Number of steps that had to be repeated."""
        return 0 if self.resumed is None else max(self.reached - self.resumed, 0)

    @property
    def may_be_lost(self) -> int:
        """The most steps that may be lost: an interval, or two if a thread writes checkpoints,
        which completes them later; none where the run is asked to save."""
        if self.kind == "hangup":
            return 0
        return 2 * INTERVAL if self.in_background else INTERVAL

    @property
    def is_wrong(self) -> bool:
        """Whether a promise was broken."""
        sound = self.named and self.same and self.recovered
        return not sound or self.hung or self.leftovers > 0 or self.lost > self.may_be_lost


def play(wiring: Wiring | None, course: Course) -> list[dict[str, Any]]:
    """Play a course.

    Returns:
        An outcome per fault that began before the last `LAST_STEPS` steps. For a course without
        faults, a row with its losses.
    """
    course.folder.mkdir(parents=True)
    stage = FaultedRun(wiring, course)
    if not course.faults:
        stage.finish()
        lines = [line for line in read_metrics(stage.run) if line["kind"] == "train"]
        return [{"losses": [float(line["loss"]) for line in lines]}]
    outcomes: list[FaultOutcome] = []
    for fault in course.faults:
        if stage.newest() > course.steps - LAST_STEPS:
            break
        outcomes.append(stage.meet(fault))
        if course.told is not None:
            with course.told.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    stage.finish()
    is_any_wrong = any(outcome.is_wrong for outcome in outcomes)
    if not (course.keeps and is_any_wrong):
        shutil.rmtree(course.folder, ignore_errors=True)
    rows = []
    for outcome in outcomes:
        row = asdict(outcome)
        row["lost"] = outcome.lost
        row["may_be_lost"] = outcome.may_be_lost
        row["is_wrong"] = outcome.is_wrong
        rows.append(row)
    return rows


class FaultedRun:
    """A run's folder and the attempts to complete the run.

    Args:
        wiring: links of the emulated cluster; None for plain processes.
    """

    def __init__(self, wiring: Wiring | None, course: Course) -> None:
        self.wiring = wiring
        self.course = course
        self.run = course.folder / "run"
        self._attempts = 0
        # outcomes of faults after which no attempt has taken a step yet
        self._pending: list[FaultOutcome] = []
        self._first_step = course.folder / "first"
        """The file into which the first rank of an attempt writes the number of its first step."""
        self._config_path = course.folder / "given.json"
        self._write_config()
        if wiring is None:
            adopt_orphans()

    def _write_config(self) -> None:
        """Write the configuration of the run, and a text of random words to train on."""
        draw = random.Random(0)
        words = []
        for _ in range(2000):
            length = draw.randint(1, 6)
            words.append("".join(draw.choices("abcdefgh", k=length)))
        text = self.course.folder / "text.txt"
        text.write_text(" ".join(words))

        config = replace(demo(), out=str(self.run), existing="resume")
        config = override(config, SMALL, source="chaos")
        changes = {
            "steps": self.course.steps,
            "evaluate": {"every": self.course.steps, "sequences": 4},
            "mesh": {"transport": self.course.transport},
            "save": {"every": INTERVAL, "background": self.course.in_background},
        }
        config = override(config, changes, source="chaos")
        config = replace(config, data=replace(config.data, path=(str(text),)))
        self._config_path.write_text(as_json(config))

    def newest(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none."""
        checkpoints = list_checkpoints(self.run / "checkpoints")
        return int(checkpoints[-1].name.split("-")[1]) if checkpoints else 0

    def meet(self, fault: Fault) -> FaultOutcome:
        """Start the run, inject the fault and return its outcome; also completes the outcomes of
        earlier faults."""
        if fault.kind == "damage":
            # An undisturbed attempt first, so that steps lost by earlier faults are not attributed
            # to the damage.
            if self._pending or len(list_checkpoints(self.run / "checkpoints")) < 2:
                self._undisturbed(until=self.newest() + INTERVAL * 2 + 1)
            _damage(list_checkpoints(self.run / "checkpoints")[-1], fault)
        outcome = FaultOutcome(
            number=fault.number,
            kind=fault.kind,
            way=fault.way,
            rank=fault.rank,
            transport=self.course.transport,
            in_background=self.course.in_background,
        )
        outcome.reached = self.newest()
        strikes_at = self.newest() + fault.after
        with self._store(fault.has_store) as port:
            attempt = self._start(port, fault, strikes_at)
            began_at = time.monotonic()
            try:
                began_at = self._inject(fault, attempt, strikes_at)
                self._await_end(fault, attempt, outcome, began_at)
                if fault.kind == "restart" and not outcome.hung:
                    # A second attempt on the same store, within this fault.
                    self._judge(fault, attempt, outcome)
                    attempt.end()
                    self._complete()
                    attempt = self._start(port, None, 0, restarts=1)
                    self._stop_gracefully(attempt, outcome, fault)
                    outcome.resumed = self._resumed_step()
                    outcome.recovered = outcome.resumed is not None
            except _HungError:
                outcome.hung = True
            finally:
                outcome.seconds = round(time.monotonic() - began_at, 2)
                attempt.end()
        outcome.leftovers = self._sweep()
        self._complete()
        if fault.kind != "restart":
            self._judge(fault, attempt, outcome)
            self._pending.append(outcome)
        return outcome

    def finish(self) -> None:
        """Complete the run without faults and pacing, with no checkpoint before its last step, and
        check what is left over."""
        pending = list(self._pending)
        self._undisturbed(until=None)
        leftovers = [
            *(self.run / "checkpoints").glob(".*"),
            *self.run.glob(".writing-*"),
            *self.run.glob(".lock"),
        ]
        for outcome in pending:
            outcome.same = outcome.same and self._is_same() and self._step() == self.course.steps
            outcome.leftovers += len(leftovers)

    def _is_same(self) -> bool:
        """Return whether the metrics hold each step so far exactly once, with the loss of the
        undisturbed run."""
        lines = read_metrics(self.run) if self._step() else []
        losses = [(line["step"], float(line["loss"])) for line in lines if line["kind"] == "train"]
        expected = list(enumerate(self.course.reference, 1))
        return losses == expected[: len(losses)]

    def _undisturbed(self, until: int | None) -> None:
        """Run without a fault, to the end or to a step."""
        with self._store() as port:
            attempt = self._start(port, None, 0, paced=until is not None)
            try:
                if until is not None:
                    attempt.wait(lambda: self._step() >= until, START_SECONDS)
                    attempt.signal(signal.SIGTERM)
                attempt.wait(lambda: False, START_SECONDS)
            except _HungError:  # the exit codes below show it
                pass
            finally:
                attempt.end()
        if set(attempt.codes.values()) == {0}:
            self._complete()
        elif self._pending:
            self._pending[-1].line += f" | afterwards: {attempt.messages()}"
        else:
            raise RuntimeError(f"an undisturbed attempt failed: {attempt.messages()}")
        self._sweep()

    def _complete(self) -> None:
        """Complete the pending outcomes with the step from which the newest attempt continued, if
        it has taken a step."""
        resumed = self._resumed_step()
        if resumed is not None:
            for outcome in self._pending:
                outcome.resumed = resumed
                outcome.recovered = True
            self._pending = []

    def _resumed_step(self) -> int | None:
        """Return the step from which the newest attempt continued; None if it has taken no step."""
        try:
            return int(self._first_step.read_text(encoding="utf-8")) - 1
        except (OSError, ValueError):
            return None

    def _step(self) -> int:
        """Return the last step in the metrics; 0 if there is none."""
        try:
            lines = (self.run / METRICS).read_text(encoding="utf-8").splitlines()
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError):
            return 0

    def _inject(self, fault: Fault, attempt: Attempt, strikes_at: int) -> float:
        """Inject a fault, or wait until its rank has injected it, and return the time at which it
        began."""
        if fault.kind == "startup":
            with suppress(_HungError):  # waits up to two seconds, or until all ranks have ended
                attempt.wait(lambda: False, 2 * fault.chance)
            attempt.signal(signal.SIGSTOP if fault.is_stop else signal.SIGKILL, fault.rank)
            return time.monotonic()
        if fault.kind == "strangers":
            self._send_strangers(fault, attempt)
        if fault.kind in ("forward", "backward", "optimizer", "save", "restart"):
            # `become_rank` has planted it
            attempt.wait(lambda: fault.rank in attempt.codes, START_SECONDS)
            return time.monotonic()
        if fault.kind == "disk":  # planted too; any rank may be the first that ends
            attempt.wait(lambda: bool(attempt.codes), START_SECONDS)
            return time.monotonic()
        attempt.wait(
            lambda: self._resumed_step() is not None and self._step() >= strikes_at, START_SECONDS
        )
        began_at = time.monotonic()
        if fault.kind == "stop":
            attempt.signal(signal.SIGSTOP, fault.rank)
            if not fault.is_fatal:
                time.sleep(LASTS_SECONDS)
                attempt.signal(signal.SIGCONT, fault.rank)
        elif KINDS[fault.kind].needs_bed:
            self._disturb_link(fault)
        return began_at

    def _disturb_link(self, fault: Fault) -> None:
        """Make a node's link slow, or cut it once or often."""
        assert self.wiring is not None
        if fault.kind == "slow":
            self.wiring.change(fault.node, "2mbit")
            time.sleep(LASTS_SECONDS)
            self.wiring.change(fault.node, None)
            return
        cuts = 1
        down_seconds = LASTS_SECONDS
        if fault.kind == "flap":
            cuts = 10
            down_seconds = LASTS_SECONDS / 20
        for _ in range(cuts):
            self.wiring.switch(fault.node, on=False)
            if fault.is_fatal:  # for good
                return
            time.sleep(down_seconds)
            self.wiring.switch(fault.node, on=True)
            time.sleep(LASTS_SECONDS / 20)

    def _await_end(
        self, fault: Fault, attempt: Attempt, outcome: FaultOutcome, began_at: float
    ) -> None:
        """Wait for the end of an attempt; after a fault that is not fatal, ask the attempt to
        stop."""
        try:
            if fault.is_fatal:
                # a stopped rank does not end by itself
                must_end = WORLD - 1 if fault.is_stop else WORLD
                patience = MEETING_SECONDS if fault.kind == "startup" else PATIENCE
                patience += SLACK - (time.monotonic() - began_at)
                attempt.wait(lambda: len(attempt.codes) >= must_end, patience)
                if fault.is_stop:
                    attempt.signal(signal.SIGKILL, fault.rank)
                    attempt.wait(lambda: False, SLACK)
            else:
                self._stop_gracefully(attempt, outcome, fault)
        finally:
            outcome.reached = max(outcome.reached, self._step())
            if fault.kind == "cut" and self.wiring is not None:
                self.wiring.switch(fault.node, on=True)

    def _stop_gracefully(self, attempt: Attempt, outcome: FaultOutcome, fault: Fault) -> None:
        """Let an attempt take `INTERVAL` more steps, then send SIGTERM or SIGHUP; all ranks must
        save and exit with code 0."""
        goal = self._step() + INTERVAL
        attempt.wait(lambda: self._step() >= goal, START_SECONDS)
        attempt.signal(
            signal.SIGHUP if fault.kind == "hangup" else signal.SIGTERM,
            fault.rank if fault.way == "one rank" else None,
        )
        attempt.wait(lambda: False, PATIENCE + SLACK)
        outcome.named = outcome.named and set(attempt.codes.values()) == {0}

    def _judge(self, fault: Fault, attempt: Attempt, outcome: FaultOutcome) -> None:
        """Check an attempt's losses and messages, and record the result in its outcome."""
        output = attempt.messages()
        outcome.same = self._is_same()
        if fault.is_fatal or fault.kind == "damage":
            # each side of a cut link reports ranks of the other
            others = "".join(str(rank) for rank in range(WORLD))
            pattern = SAYS.get(fault.kind, GONE).format(rank=fault.rank, others=others)
            lines = [line for line in output if re.search(pattern, line)]
            outcome.line = lines[0] if lines else " | ".join(output)[-2000:]
            outcome.named = outcome.named and bool(lines)
        elif not outcome.named:
            outcome.line = " | ".join(output)[-2000:]
        outcome.named = outcome.named and not any("Traceback" in line for line in output)

    def _start(
        self, port: int, fault: Fault | None, strikes_at: int, restarts: int = 0, paced: bool = True
    ) -> Attempt:
        """Start an attempt: the ranks of a run, in which a fault may be planted.

        Args:
            port: that of the store.
            fault: the fault. It is handed to the rank that it hits, to all ranks for "clock".
                `become_rank` does nothing with a kind that strikes from outside (signals, links,
                strangers), which is `_inject`'s part.
            strikes_at: the step in which it strikes.
            restarts: how often a launcher has started the ranks anew on the same store.
            paced: whether steps take some time; if not, no checkpoint is saved before the last
                step.
        """
        self._first_step.unlink(missing_ok=True)
        self._attempts += 1
        logs = self.course.folder / f"attempt-{self._attempts}"
        logs.mkdir()
        words = [
            "train",
            "--config",
            str(self._config_path),
            "--start-patience",
            str(MEETING_SECONDS),
        ]
        if not paced:
            words += ["--save.every", str(self.course.steps)]
        attempt = Attempt(logs)
        for rank in range(WORLD):
            environment = self._environment(rank, port, restarts)
            if fault is not None and not fault.has_store:
                # Without TORCHELASTIC_USE_AGENT_STORE rank 0 makes the store itself, as under a
                # launcher other than torchrun, which sets none of its variables.
                environment = {
                    name: text for name, text in environment.items() if "ELASTIC" not in name
                }
            planted = None
            # "clock" is of no single rank: the time jumps on all of them
            if fault is not None and (fault.rank == rank or fault.kind == "clock"):
                planted = fault

            def child(
                rank: int = rank, environment: Any = environment, planted: Fault | None = planted
            ) -> NoReturn:
                """Become the rank, on its node."""
                self._enter(rank // RANKS_PER_NODE)
                _redirect_output(logs / f"rank{rank}.txt")
                become_rank(words, environment, planted, strikes_at, self._first_step, paced)

            attempt.pids[rank] = _fork(child)
        return attempt

    def _environment(self, rank: int, port: int, restarts: int) -> dict[str, str]:
        """Return the variables that a launcher sets for a rank, whose store is at `port`."""
        environment = dict(launcher_variables(Bed(), rank, port))
        environment["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        if self.wiring is None:
            environment["MASTER_ADDR"] = "127.0.0.1"
            environment["GLOO_SOCKET_IFNAME"] = "lo"
            environment["TP_SOCKET_IFNAME"] = "lo"
        return environment

    def _enter(self, node: int) -> None:
        """Enter a node's network, if there is a bed."""
        if self.wiring is not None:
            enter_net(self.wiring.net(node))

    @contextmanager
    def _store(self, is_kept: bool = True) -> Iterator[int]:
        """Run the TCPStore that ranks rendezvous at, as torchrun's agent does, and yield its port;
        without it, a free port."""
        if not is_kept:
            with socket.socket() as free:
                free.bind(("", 0))
                _, free_port = free.getsockname()
            yield free_port
            return
        reading, writing = os.pipe()  # through which the store's process tells its port
        host = "127.0.0.1" if self.wiring is None else node_address(0)

        def child() -> None:
            """Keep a store until this process is killed."""
            self._enter(0)
            _redirect_output(self.course.folder / "store.txt")
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            while True:
                signal.pause()

        pid = _fork(child)
        os.close(writing)
        port = os.read(reading, 20)  # nothing if the process has ended
        os.close(reading)
        if not port:
            raise InputError("the store that ranks meet at did not start")
        try:
            yield int(port)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _send_strangers(self, fault: Fault, attempt: Attempt) -> None:
        """Connect strangers to every port that ranks open, from before they open the first until
        the attempt ends."""
        of_node = [
            pid for rank, pid in attempt.pids.items() if rank // RANKS_PER_NODE == fault.node
        ]

        def child() -> None:
            """Call the ranks of the node from within it."""
            self._enter(fault.node)
            _connect_strangers(fault, of_node)

        attempt.strangers.append(_fork(child))

    def _sweep(self) -> int:
        """Kill the processes that an attempt left behind and return their number."""
        killed = 0
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return killed
            if pid == 0:  # some are alive
                for child in _children():
                    killed += 1
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                time.sleep(0.05)


class _HungError(Exception):
    """Raised when a condition is not met in time."""


class Attempt:
    """The ranks of one start of the run.

    Args:
        logs: the folder with the ranks' output.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        """Exit codes of the ranks that have ended; for a killed rank, minus the signal's number."""
        self.strangers: list[int] = []

    def wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until `is_over()` or until all ranks have ended.

        Raises:
            _HungError: if neither happens within `seconds`.
        """
        end = time.monotonic() + seconds
        while True:
            self._reap()
            if is_over() or len(self.codes) == len(self.pids):
                return
            if time.monotonic() > end:
                raise _HungError
            time.sleep(0.02)

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to all ranks if `rank` is None, unless they have ended."""
        for own_rank, pid in self.pids.items():
            if own_rank not in self.codes and rank in (None, own_rank):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill the remaining ranks, as torchrun does after one has failed, and the strangers."""
        self.signal(signal.SIGKILL)
        for pid in self.strangers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.wait(lambda: False, 60)

    def messages(self) -> list[str]:
        """Return the lines that Moesaic printed on the ranks, and the first lines of tracebacks."""
        lines = [
            line
            for path in sorted(self._logs.iterdir())
            for line in path.read_text(errors="replace").splitlines()
        ]
        return [
            line
            for line in lines
            if line.startswith(("moesaic train:", "Traceback")) or "is damaged" in line
        ]

    def _reap(self) -> None:
        """Note the exit codes of ranks that have ended."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)


def _fork(child: Callable[[], None]) -> int:
    """Run a function in a forked process, and return its id."""
    pid = os.fork()
    if pid == 0:
        try:
            # else the first collection visits all objects of torch and copies their shared pages
            gc.freeze()
            die_with_parent()
            # what a new interpreter has, whatever this process does with signals
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            child()
        finally:
            os._exit(1)
    return pid


def _redirect_output(path: Path) -> None:
    """Append this process's output and errors to a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(handle, target)


def _children() -> list[int]:
    """Return the ids of this process's children."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "PID (NAME) STATE PARENT ...", in which the name may hold parentheses
            text = path.read_text(encoding="ascii", errors="replace")
            _, _, after_name = text.rpartition(")")
            _, parent, *_ = after_name.split()
            if int(parent) == os.getpid():
                pids.append(int(path.parent.name))
    return pids


def _damage(checkpoint: Path, fault: Fault) -> None:
    """Damage one file of a checkpoint, in the way that the fault says."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[int(fault.chance * len(files))]
    data = bytearray(path.read_bytes())
    draw = random.Random(fault.number)
    place = draw.randrange(len(data))
    if fault.way == "removed":
        path.unlink()
        return
    if fault.way == "bit":
        data[place] ^= 1 << draw.randrange(8)
    elif fault.way == "cut":
        del data[place:]
    elif fault.way == "zeros":
        filler = b"\0" if any(data[place:]) else b"\xff"  # where all is zero already
        data[place:] = filler * (len(data) - place)
    else:
        data += draw.randbytes(100)
    path.write_bytes(data)


def _connect_strangers(fault: Fault, pids: Sequence[int]) -> NoReturn:
    """Connect to every port on which the given processes listen, at most 20 times each; never
    returns."""
    draw = random.Random(fault.number)
    connections = list[socket.socket]()
    num_calls: dict[tuple[str, int], int] = {}  # by address
    while True:
        for address in _listening(pids):
            if num_calls.get(address, 0) >= 20:
                continue
            num_calls[address] = num_calls.get(address, 0) + 1
            with suppress(OSError):
                caller = socket.create_connection(address, timeout=0.2)
                connections.append(caller)
                if fault.way == "garbage":
                    caller.sendall(draw.randbytes(draw.randint(1, 2000)))
                elif fault.way == "hang up":
                    connections.pop().close()
        if fault.way == "trickle":
            for caller in connections:
                with suppress(OSError):
                    caller.send(draw.randbytes(1))
        time.sleep(0.05)


def _listening(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Return the addresses, (host, port), on which the given processes listen, in this network
    namespace."""
    files = set()  # what the processes have open; a socket is socket:[INODE]
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                files.add(os.readlink(link))
    addresses = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            _, *lines = Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()
            for line in lines:
                fields = line.split()
                local_address = fields[1]
                state = fields[3]
                inode = fields[9]
                if state == "0A" and f"socket:[{inode}]" in files:  # 0A: it listens
                    address, port = local_address.split(":")
                    addresses.append((_ipv4(address), int(port, 16)))
    return addresses


def _ipv4(address: str) -> str:
    """Return an address of /proc/net/tcp, in hexadecimal digits with the last byte first, as text;
    that of this machine for any address (0.0.0.0). Of IPv6 the last four bytes count."""
    last_bytes = bytes.fromhex(address[-8:])
    if not any(last_bytes):
        return "127.0.0.1"
    return ".".join(str(byte) for byte in reversed(last_bytes))
