"""A visit to a place: make its ground, run its steps, and say what came of it in rows of the
table.

`root` is the checkout that is tried, at the commit `commit`; `folder` is the place's own in
`build/places`, with its log and, below `work`, its ground. What is wrong with a step is told as a
line, empty where nothing is.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from places import resolution, smoke
from places.ground import Ground
from places.place import TEMPORARY, Kind, Place
from places.steps import Step, run
from places.table import Judged, Outcome, Row

VERSIONS = """import json, platform
from importlib.metadata import PackageNotFoundError, version
try:
    torch = version("torch")
except PackageNotFoundError:
    torch = "-"
print(json.dumps([platform.python_version(), torch]))
"""


def visit(place: Place, root: Path, commit: str, out: Path, *, keep: bool) -> list[Judged]:
    """Run the smoke test in a place, if it is there; return its rows."""
    missing = place.missing()
    if missing:
        allowed = "" if place.may_be_missing else ", and it must be here"
        say(f"{place.name}: missing: {missing}{allowed}")
        row = Row(place=place.name, result=f"missing: {missing}{allowed}")
        return [Judged(row=row, outcome=Outcome.MISSING, may_be_missing=place.may_be_missing)]
    say(f"{place.name}: {place.about}")
    folder = out / place.name
    clear(folder)
    folder.mkdir(parents=True)
    work = folder / "work"
    try:
        ground = place.make_ground(work)
    except (OSError, subprocess.SubprocessError) as error:
        return [failed(place, "the place itself", str(error))]
    judged = (
        resolve(place, root, commit, ground, folder)
        if place.kind is Kind.RESOLUTION
        else [try_out(place, root, commit, ground, folder)]
    )
    if not keep and all(each.outcome is Outcome.OK for each in judged):
        clear_work(folder)
    return judged


def clear(folder: Path) -> None:
    """Delete a place's folder."""
    clear_work(folder)
    shutil.rmtree(folder, ignore_errors=True)


def clear_work(folder: Path) -> None:
    """Delete the gigabytes of a place, which may be elsewhere, behind a link (`place.odd_folder`);
    leave its log.

    Raises:
        OSError: something is mounted below it, and would be deleted with it.
    """
    work = folder / "work"
    for mount in mounts():
        if folder.resolve() in mount.parents:
            raise OSError(f"{mount} is mounted: unmount it, since {folder} is to be deleted")
    if work.is_symlink():
        target = work.resolve()
        if target.name.startswith(TEMPORARY):
            shutil.rmtree(target, ignore_errors=True)
        work.unlink()
    shutil.rmtree(work, ignore_errors=True)


def mounts() -> list[Path]:
    """Return where file systems are mounted; nothing where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [Path(line.split()[1]) for line in lines]


def try_out(place: Place, root: Path, commit: str, ground: Ground, folder: Path) -> Judged:
    """Run the steps of a place up to the first that fails; return its row."""
    log = folder / "log.txt"
    start = time.monotonic()
    cloning = smoke.clone(root, commit, ground)
    wrong = take(cloning, outside(ground), place, log)
    if not wrong:
        steps = steps_of(place, ground)
        ground.give()
        wrong = take(steps, ground, place, log)
    python, torch = versions(ground)
    packages = folder / "packages.txt"
    listed = ask(ground, f"{ground.programs}/python", "-m", "pip", "list")
    packages.write_text(listed, encoding="utf-8")
    row = Row(
        place=place.name,
        result=f"failed at {wrong}" if wrong else "ok",
        date=today(),
        processor=processor(),
        python=python,
        torch=torch,
        seconds=f"{time.monotonic() - start:.0f}",
        packages=from_root(packages, folder),
    )
    return Judged(row=row, outcome=Outcome.FAILED if wrong else Outcome.OK)


def from_root(file: Path, folder: Path) -> str:
    """Return a file in a place's folder, `build/places/NAME`, relative to the checkout."""
    return file.relative_to(folder.parent.parent.parent).as_posix()


def steps_of(place: Place, ground: Ground) -> list[Step]:
    """Return the steps of a place after its clone."""
    python = place.python() or sys.executable
    if place.kind is Kind.SMALL:
        return smoke.planner_and_layer(ground, python)
    if place.kind is Kind.MAKE:
        set_up = smoke.set_up_from_make()
        return smoke.whole(ground, set_up, without_transformers=False, has_finetune=True)
    if place.kind is Kind.WALKS:
        return smoke.walks(ground, python)
    without = place.without_transformers
    set_up = smoke.set_up_from_readme(
        ground, python, without_transformers=without, torch=place.torch
    )
    return smoke.whole(ground, set_up, without_transformers=without, has_finetune=False)


def take(steps: Iterable[Step], ground: Ground, place: Place, log: Path) -> str:
    """Run steps up to the first that fails, a line for each; return that step and what is wrong, or
    nothing."""
    for step in steps:
        start = time.monotonic()
        say(f"{place.name}: {step.name} ... ", end="")
        wrong = run(step, ground, log)
        say(f"{wrong or 'ok'}, {time.monotonic() - start:.0f} s")
        if wrong:
            return f"{step.name}: {wrong}"
    return ""


def resolve(place: Place, root: Path, commit: str, ground: Ground, folder: Path) -> list[Judged]:
    """Resolve for every Python and system; return a row for each Python."""
    cloning = smoke.clone(root, commit, ground)
    wrong = take(cloning, outside(ground), place, folder / "log.txt")
    if wrong:
        step, reason = wrong.split(": ", 1)
        return [failed(place, step, reason)]
    judged = []
    file = folder / "answers.txt"
    try:
        uv = resolution.resolver(ground)
        for python in resolution.PYTHONS:
            start = time.monotonic()
            answers = resolution.ask_all(uv, ground, python)
            with file.open("a", encoding="utf-8") as opened:
                opened.write(resolution.details(answers))
            said, torch = resolution.summary(answers)
            is_wrong = any(answer.wrong for answer in answers)
            row = Row(
                place=f"{place.name} {python}",
                result=f"failed at {said}" if is_wrong else f"ok: {said}",
                date=today(),
                processor=processor(),
                python=python,
                torch=torch,
                seconds=f"{time.monotonic() - start:.0f}",
                packages=from_root(file, folder),
            )
            say(f"{row.place}: {row.result}, {row.seconds} s")
            judged.append(Judged(row=row, outcome=Outcome.FAILED if is_wrong else Outcome.OK))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        judged.append(failed(place, "resolution", str(error)))
    return judged


def failed(place: Place, step: str, reason: str) -> Judged:
    """Return the row of a place that could not even be entered."""
    row = Row(
        place=place.name, result=f"failed at {step}: {reason}", date=today(), processor=processor()
    )
    return Judged(row=row, outcome=Outcome.FAILED)


def outside(ground: Ground) -> Ground:
    """Return the same folder for a command of this machine and its user."""
    return Ground(folder=str(ground.here()), variables=dict(os.environ))


def ask(ground: Ground, *words: str) -> str:
    """Return what a command of a place prints; nothing where it fails."""
    try:
        done = subprocess.run(
            ground.words(words, "."),
            cwd=ground.here(),
            env=ground.whole_environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def versions(ground: Ground) -> tuple[str, str]:
    """Return the versions of Python and torch in a place's environment."""
    printed = ask(ground, f"{ground.programs}/python", "-c", VERSIONS)
    if not printed:
        return "-", "-"
    python, torch = json.loads(printed)
    return python, torch


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def today() -> str:
    """Return the date."""
    return datetime.date.today().isoformat()


def say(line: str, *, end: str = "\n") -> None:
    """Print progress at once."""
    print(line, end=end, flush=True)
