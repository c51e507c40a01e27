"""Inject faults into training runs of a small demo model on 2 x 2 ranks, and check that they
recover.

The seed decides the instant of each fault. After the fault, the run is started again from its
folder. Ranks are processes on an emulated cluster of two nodes. Where such a cluster cannot be made
they are plain processes, and faults of links are left out. A fault counts as named if a surviving
rank prints a line with the failed rank or the cause, and no rank prints a traceback. Losses are
compared bit by bit with those of an undisturbed run. A run that is asked to stop, or that has
failed, must report the reason and exit within its patience of 5 s plus 30 s; otherwise it counts as
hung.

A course is one run of the training and the faults that are injected into it, one after another; the
stage is the process that plays courses.

moesaic chaos --json benchmarks/results/chaos.json
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moesaic.errors import InputError
from moesaic_lab.benchmark import (
    Benchmark,
    BenchmarkOptions,
    Shown,
    Told,
    keeping,
    kept,
    notes_of,
    words_of,
)
from moesaic_lab.chaos.schedule import INTERVAL, KINDS, Fault, draw_faults, kinds_of
from moesaic_lab.claims import Claim
from moesaic_testbed import Bed, Launcher, refusal

LEAST_FAULTS = 200
LEAST_STEPS = 24
TRANSPORTS = ("gloo", "sockets")
AT_ONCE = 20
"""Faults that strike at writes whose rows are kept together."""
PER_COURSE = 8
"""The most faults that are injected into one run."""

Play = Callable[[Any], list[dict[str, Any]]]
"""Plays a `Course` and returns its outcomes; see `stage.play`."""


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(BenchmarkOptions):
    """Which faults to inject. The defaults take about half an hour on two cores."""

    faults: int = LEAST_FAULTS
    """Number of faults."""
    seed: int = 0
    """Seed of the schedule of faults."""
    steps: int = 60
    """Steps of every run, at least 24. No fault begins in the last 20 steps; faults of the kind
    `startup` need 60."""
    kinds: str | None = None
    """Inject only these kinds of faults, separated by commas; an unknown kind is an error."""
    bed: bool = True
    """Use an emulated cluster if this machine can make one."""
    keep: str | None = None
    """Keep the results in this folder, run by run, so that a later call can continue; also keep
    folders of failed runs."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The faults to inject."""

    faults: Sequence[Fault]
    on_bed: bool
    """Whether the runs take place on an emulated cluster."""


def cases(options: ChaosOptions) -> Schedule:
    """Draw the schedule of faults from the seed."""
    if options.faults < 1:
        raise InputError(f"--faults {options.faults}: must be at least 1")
    if options.steps < LEAST_STEPS:
        raise InputError(f"--steps {options.steps}: must be at least {LEAST_STEPS}")
    on_bed = options.bed and refusal() is None
    kinds = kinds_of(words_of(options.kinds), on_bed)
    return Schedule(faults=draw_faults(options.faults, options.seed, kinds), on_bed=on_bed)


def measure(options: ChaosOptions, schedule: Schedule, told: Told) -> list[dict[str, Any]]:
    """Run the undisturbed reference, then runs with the scheduled faults, and return a row per
    fault."""
    of_writes = [fault for fault in schedule.faults if KINDS[fault.kind].is_of_writes]
    of_trainings = [fault for fault in schedule.faults if not KINDS[fault.kind].is_of_writes]
    rows = []
    with keeping(options.keep) as folder:
        if of_trainings:
            rows += _in_courses(options, replace(schedule, faults=of_trainings), told, folder)
        for begin in range(0, len(of_writes), AT_ONCE):
            at_once = of_writes[begin : begin + AT_ONCE]
            file = folder / f"writes-{begin}.json"
            rows += kept(file, partial(_struck, at_once, folder, told))
    return rows


def _struck(faults: Sequence[Fault], folder: Path, told: Told) -> list[dict[str, Any]]:
    """Return a row per fault that strikes at a write."""
    from moesaic_lab.chaos.struck import rows_of

    return rows_of(faults, folder, told)


def _in_courses(
    options: ChaosOptions, schedule: Schedule, told: Told, folder: Path
) -> list[dict[str, Any]]:
    """Return a row per fault of a training on four ranks."""
    from moesaic_lab.chaos.stage import Course

    rows: list[dict[str, Any]] = []
    with _stage(schedule.on_bed) as play, ThreadPoolExecutor(1) as pool:

        def played(course: Course) -> list[dict[str, Any]]:
            """Play a course in a thread, and show its progress meanwhile."""
            shutil.rmtree(course.folder, ignore_errors=True)
            future = pool.submit(play, course)
            while not future.done():
                told(_progress(course, len(rows), schedule))
                time.sleep(0.5)
            (folder / "told").unlink(missing_ok=True)
            return future.result()

        undisturbed = Course(
            folder=folder / "undisturbed",
            steps=options.steps,
            transport=TRANSPORTS[0],
            faults=(),
            told=folder / "told",
        )
        (reference,) = kept(folder / "undisturbed.json", lambda: played(undisturbed))
        numbers = itertools.count()
        # A course may end before all of its faults: those that are left go into the next one.
        while remaining := schedule.faults[len(rows) :]:
            number = next(numbers)
            # All pairs of a transport and of saving in the background, or not, come in turn.
            course = Course(
                folder=folder / f"course-{number}",
                steps=options.steps,
                transport=TRANSPORTS[number % len(TRANSPORTS)],
                in_background=number // len(TRANSPORTS) % 2 == 1,
                faults=tuple(remaining[:PER_COURSE]),
                reference=reference["losses"],
                told=folder / "told",
                keeps=options.keep is not None,
            )
            rows += kept(folder / f"course-{number}.json", partial(played, course))
    return rows


def _progress(course: Any, done: int, schedule: Schedule) -> str:
    """Return in words which fault the course is at.

    Args:
        done: faults of earlier courses.
    """
    if not course.faults:
        return "the undisturbed run"
    past = len(course.told.read_text().splitlines()) if course.told.exists() else 0
    fault = course.faults[min(past, len(course.faults) - 1)]  # the last one while the run ends
    return (
        f"fault {done + past + 1} of {len(schedule.faults)}: {fault.kind} {fault.way} of rank "
        f"{fault.rank}"
    )


@contextmanager
def _stage(on_bed: bool) -> Iterator[Play]:
    """Yield a function that plays courses, on an emulated cluster or in plain processes, and clean
    up afterwards."""
    if on_bed:
        with Launcher() as launcher, launcher.open(Bed()) as bed:
            yield lambda course: bed.run_inside(_play, course)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moesaic_lab.chaos.stage"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()

    def ask(course: Any) -> list[dict[str, Any]]:
        """Let the process play a course, and return its outcomes."""
        ours.send(course)
        answer = ours.recv()
        if isinstance(answer, BaseException):
            raise answer
        rows: list[dict[str, Any]] = answer
        return rows

    try:
        yield ask
    finally:
        ours.close()
        process.join()


def _play(wiring: Any, course: Any) -> list[dict[str, Any]]:
    """Play a course on this bed."""
    from moesaic_lab.chaos.stage import play

    return play(wiring, course)


def _serve(line: Connection) -> None:
    """Play the courses that arrive on `line` and send back their outcomes, until the other end is
    closed."""
    while True:
        try:
            course = line.recv()
        except EOFError:
            return
        try:
            line.send(_play(None, course))
        except Exception as error:
            line.send(error)


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return a claim per promise: faults and kinds covered, nothing lost beyond an interval, no
    hangs, and so on."""

    def none(name: str, count: int) -> Claim:
        """Return the claim that there is none of something."""
        return Claim(name=f"chaos.{name}", value=count, target=0)

    restarts = [row for row in rows if row["kind"] == "restart"]
    kinds = {row["kind"] for row in rows}
    of_trainings = [kind for kind in kinds if not KINDS[kind].is_of_writes]
    # those that any machine can play, without a bed and without watching writes
    least_kinds = 12 if of_trainings else 1
    lost_beyond = 0
    for row in rows:  # those of writes lose no steps, and do not say how many they may lose
        lost_beyond += max(row["lost"] - row.get("may_be_lost", INTERVAL), 0)
    return [
        Claim(name="chaos.faults", value=len(rows), target=LEAST_FAULTS, op=">="),
        Claim(name="chaos.kinds", value=len(kinds), target=least_kinds, op=">="),
        none("steps_lost_beyond_interval", lost_beyond),
        none("hangs", sum(row["hung"] for row in rows)),
        none("leftovers", sum(row["leftovers"] for row in rows)),
        none("unnamed", sum(not row["named"] for row in rows)),
        none("losses_that_differ", sum(not row["same"] for row in rows)),
        none("not_recovered", sum(not row["recovered"] for row in rows)),
        Claim(
            name="chaos.restarts_recovered",
            value=sum(row["recovered"] for row in restarts),
            target=len(restarts),
            op=">=",
        ),
    ]


def tables(rows: list[dict[str, Any]]) -> list[Any]:
    """Return a table with a line per kind and way of fault, and one with the faults that broke a
    promise."""
    summed = []
    order = list(KINDS)
    kinds_and_ways = {(row["kind"], row["way"]) for row in rows}
    for kind, way in sorted(kinds_and_ways, key=lambda pair: (order.index(pair[0]), pair[1])):
        matching = [row for row in rows if row["kind"] == kind and row["way"] == way]
        summed.append(
            {
                "fault": f"{kind} {way}".strip(),
                "count": len(matching),
                "lost_most": max(row["lost"] for row in matching),
                "seconds_most": max(row["seconds"] for row in matching),
                "recovered": sum(row["recovered"] for row in matching),
            }
        )
    wrong = [row for row in rows if row["is_wrong"]]
    columns = ("number", "kind", "way", "rank", "transport", "line")
    faults = Shown(title="Faults").of(summed)
    return faults + Shown(title="What was wrong", columns=columns).of(wrong)


BENCHMARK = Benchmark(
    name="chaos",
    description="Kill, stop, disconnect and damage runs by a seeded schedule, and check that they "
    "recover. Exit code 1 if a promise is broken.",
    options=ChaosOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    claims=claims,
    columns=tables,
    is_proof=True,
    is_command=True,
)
