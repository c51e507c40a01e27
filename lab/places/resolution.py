"""Resolution: whether every extra and every set-up has a solution for each Python on each system.
Nothing is downloaded.

A question is a list of requirements; uv, a resolver, answers it for one Python and one system with
a version of each package, or says why there is no solution. An extra is a name of optional
requirements, as in "moesaic[train]".
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from places.ground import Ground

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SYSTEMS = ("linux", "macos", "windows")
TARGETS = ("setup", "demo")
"""Targets of the Makefile whose set-up is resolved with its constraints."""
REFUSED = (
    *(
        ("3.10", system, f"moesaic{extra}", "transformers")
        for system in SYSTEMS
        for extra in ("[transformers]", "[finetune]")
    ),
    *(("3.10", system, "moesaic-lab[fuzz]", "transformers") for system in SYSTEMS),
    *(
        (python, system, "moesaic-lab[peers]", "deepspeed")
        for python in PYTHONS
        for system in SYSTEMS
    ),
    *(
        (python, system, "moesaic[gpu]", "triton")
        for python in PYTHONS
        for system in ("macos", "windows")
    ),
)
"""What has no solution, and may not: Python, system, requirements, the package that is to blame.

transformers 5.23 needs Python 3.11; DeepSpeed has no wheels, and Triton has them for Linux alone. A
solution that appears is an error too: its line here is old.
"""
MACOS = "14.0"
"""The macOS for which wheels are taken: the lowest that torch 2.13 has them for."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Requirements to resolve.

    Args:
        name: what a table calls them.
        requirements: lines of a requirements file.
        constraints: a file of constraints, relative to the clone; None for none.
    """

    name: str
    requirements: tuple[str, ...]
    constraints: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the resolver said for a Python and a system; `wrong` is empty where that is as
    expected."""

    question: Question
    python: str
    system: str
    wrong: str
    torch: str


def extras(project: str) -> list[str]:
    """Return the names of the extras in the text of a pyproject.toml; Python 3.10 has no reader of
    TOML."""
    _, after_title = project.split("\n[project.optional-dependencies]\n", 1)
    section, *_ = after_title.split("\n[", 1)
    return re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)


def extras_of(clone: Path) -> list[Question]:
    """Return the questions for the library and the laboratory, each alone and with each of their
    extras."""
    questions = []
    # name, folder, and what is installed along with it
    for name, folder, along in (("moesaic", ".", ()), ("moesaic-lab", "./lab", ("-e .",))):
        text = (clone / folder / "pyproject.toml").read_text(encoding="utf-8")
        suffixes = ["", *(f"[{extra}]" for extra in extras(text))]
        for suffix in suffixes:
            requirements = (*along, f"-e {folder}{suffix}")
            questions.append(Question(name=f"{name}{suffix}", requirements=requirements))
    return questions


def set_up_line(printed: str) -> tuple[tuple[str, ...], str]:
    """Return the requirements and the constraints of the set-up that `make --dry-run` prints."""
    for line in printed.splitlines():
        if "pip install" in line and " -c " in line:
            words = shlex.split(line)
            constraints = words[words.index("-c") + 1]
            editable = [words[at + 1] for at, word in enumerate(words) if word == "-e"]
            return tuple(f"-e {name}" for name in editable), constraints
    raise ValueError("make --dry-run prints no line with `pip install` and `-c`")


def set_ups(clone: Path, python: str) -> list[Question]:
    """Return the questions for the Makefile's set-ups under a Python, which need not be on this
    machine."""
    found = []
    for target in TARGETS:
        words = (
            "make",
            "--dry-run",
            "--always-make",
            target,
            f"VERSION={python}",
            f"PYTHON={sys.executable}",
        )
        printed = subprocess.run(
            words, cwd=clone, capture_output=True, text=True, check=True
        ).stdout
        requirements, constraints = set_up_line(printed)
        found.append(
            Question(name=f"make {target}", requirements=requirements, constraints=constraints)
        )
    return found


def resolver(ground: Ground) -> tuple[str, ...]:
    """Return the words that start uv: the one on PATH if it runs in an empty environment, else one
    from the index."""
    found = shutil.which("uv")
    if found is not None:
        tried = subprocess.run(
            [found, "--version"], env=ground.whole_environment(), capture_output=True
        )
        if tried.returncode == 0:
            return (found,)
    environment = ground.here("uv")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    pip = (str(programs / "python"), "-m", "pip", "install", "--quiet", "uv")
    subprocess.run(pip, env=ground.whole_environment(), check=True)
    return (str(programs / "uv"),)


def verdict(question: Question, python: str, system: str, code: int, said: str) -> str:
    """Return what is wrong with an answer, in a line; empty where it is as expected. `code` is the
    resolver's exit code, `said` its standard error."""
    blamed = []
    for refused_python, refused_system, name, package in REFUSED:
        if (refused_python, refused_system, name) == (python, system, question.name):
            blamed.append(package)
    if code == 0 and not blamed:
        return ""
    if code == 0:
        return f"has a solution now: take it out of REFUSED ({', '.join(blamed)})"
    if any(re.search(rf"\b{package}\b", said) for package in blamed):
        return ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " ".join(lines)[:400] or f"exit code {code}"


def ask(uv: Sequence[str], ground: Ground, question: Question, python: str, system: str) -> Answer:
    """Resolve one question, in an environment without settings and from the default index alone."""
    constraints = () if question.constraints is None else ("-c", question.constraints)
    words = (
        *uv,
        "pip",
        "compile",
        "-",
        "--no-config",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--only-binary=:all:",
        f"--cache-dir={ground.inside('cache')}",
        f"--python={sys.executable}",
        f"--python-version={python}",
        f"--python-platform={system}",
        *constraints,
    )
    done = subprocess.run(
        words,
        input="\n".join(question.requirements),
        cwd=ground.here("moesaic"),
        env={**ground.whole_environment(), "MACOSX_DEPLOYMENT_TARGET": MACOS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    torch = re.search(r"^torch==(\S+)", done.stdout, re.MULTILINE)
    return Answer(
        question=question,
        python=python,
        system=system,
        wrong=verdict(question, python, system, done.returncode, done.stderr),
        torch=torch[1] if torch else "-",
    )


def ask_all(uv: Sequence[str], ground: Ground, python: str) -> list[Answer]:
    """Resolve every question for a Python on every system."""
    clone = ground.here("moesaic")
    questions = [*extras_of(clone), *set_ups(clone, python)]

    def answer(pair: tuple[Question, str]) -> Answer:
        question, system = pair
        return ask(uv, ground, question, python, system)

    pairs = [(question, system) for question in questions for system in SYSTEMS]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(answer, pairs))


def summary(answers: Sequence[Answer]) -> tuple[str, str]:
    """Return what a row says of a Python's answers, and the torch of the library's `train` on each
    system."""
    torches = ", ".join(
        f"{each.system} {each.torch}" for each in answers if each.question.name == "moesaic[train]"
    )
    wrong = [f"{each.question.name} on {each.system}" for each in answers if each.wrong]
    if wrong:
        more = " ..." if len(wrong) > 3 else ""
        return ", ".join(wrong[:3]) + more, torches
    refused = {(python, system, name) for python, system, name, _ in REFUSED}
    expected = sum((each.python, each.system, each.question.name) in refused for each in answers)
    return f"{len(answers) - expected} resolve, {expected} refused as they must be", torches


def details(answers: Sequence[Answer]) -> str:
    """Return a line for each answer."""
    return "".join(
        (
            f"{each.python} {each.system:8} {each.question.name:24} torch {each.torch:8} "
            f"{each.wrong or 'as expected'}\n"
        )
        for each in answers
    )
