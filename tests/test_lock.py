"""The versions that the Makefile installs: complete for every supported Python and system, and what
`make` does with them."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from moesaic.configfile import read_table
from moesaic.train.example_text import PACKAGE, VERSION

ROOT = Path(__file__).resolve().parent.parent
LISTS = {"3.10": "constraints-3.10.txt"} | {
    f"3.{minor}": "constraints.txt" for minor in (11, 12, 13, 14)
}
"""The list for each supported Python."""
SYSTEMS = {
    "linux": ("Linux", "posix", "x86_64"),
    "darwin": ("Darwin", "posix", "arm64"),
    "win32": ("Windows", "nt", "AMD64"),
}
"""platform_system, os_name and platform_machine by sys_platform."""
OURS = {"moesaic", "moesaic-lab"}
LATER = {"moesaic": {"transformers", "finetune"}, "moesaic-lab": {"fuzz", "peers"}}
"""Extras that need Python 3.11."""
SET_UP = ["-e", ".[dev]", "-e", "./lab[measure,vision]"]


def lines(name: str) -> list[str]:
    """Return the lines of a list."""
    return (ROOT / name).read_text("utf-8").splitlines()


@functools.cache
def requirements(name: str) -> tuple[Requirement, ...]:
    """Return what the lines of a list ask for."""
    return tuple(map(Requirement, lines(name)))


def environment(python: str, system: str) -> dict[str, str]:
    """Return what markers ask for, on a Python and a system."""
    of_system = dict(
        zip(("platform_system", "os_name", "platform_machine"), SYSTEMS[system], strict=True)
    )
    of_python = {
        "python_version": python,
        "python_full_version": f"{python}.2",
        "implementation_version": f"{python}.2",
    }
    return {**default_environment(), **of_python, **of_system, "sys_platform": system, "extra": ""}


def pinned(name: str, place: dict[str, str]) -> dict[str, Version]:
    """Return the version of each package that a list gives in an environment."""
    return {
        each.name: Version(next(iter(each.specifier)).version)
        for each in requirements(name)
        if each.marker is None or each.marker.evaluate(place)
    }


def applying(
    needed: Iterable[Requirement], place: dict[str, str], extras: Iterable[str] = ()
) -> list[Requirement]:
    """Return the requirements whose markers hold in an environment, without an extra or with one of
    `extras`."""
    places = [place, *({**place, "extra": extra} for extra in extras)]
    return [
        each
        for each in needed
        if each.marker is None or any(each.marker.evaluate(of) for of in places)
    ]


def asked(python: str) -> list[Requirement]:
    """Return what our two packages ask for on a Python, with every extra that it supports."""
    found = []
    for file, name in (("pyproject.toml", "moesaic"), ("lab/pyproject.toml", "moesaic-lab")):
        project = read_table(ROOT / file)["project"]
        left_out = LATER[name] if python == "3.10" else set()
        extras = [
            each
            for extra, each in project["optional-dependencies"].items()
            if extra not in left_out
        ]
        found += [Requirement(line) for line in itertools.chain(project["dependencies"], *extras)]
    return [each for each in found if each.name not in OURS]


@functools.cache
def required_by(name: str, version: Version) -> list[Requirement]:
    """Return what a package requires in turn, if that version is installed here."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return []
    is_this = Version(found.version).public == version.public
    return [Requirement(line) for line in found.requires or []] if is_this else []


@pytest.mark.parametrize("name", sorted(set(LISTS.values())))
def test_a_list_names_each_package_once_by_its_version_and_nothing_of_a_machine(name):
    for line in lines(name):
        needed = Requirement(line)
        (specifier,) = needed.specifier
        assert specifier.operator == "==", line
        assert needed.url is None, line
        assert not needed.extras, line
        assert needed.name == canonicalize_name(needed.name), line
        assert needed.name not in OURS, line
    names = [Requirement(line).name for line in lines(name)]
    assert names == sorted(set(names))
    assert len(names) > 140


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", LISTS)
def test_a_list_has_all_that_is_asked_for(python, system):
    place = environment(python, system)
    versions = pinned(LISTS[python], place)
    waiting = applying(asked(python), place)
    seen = set()
    while waiting:
        needed = waiting.pop()
        if str(needed) in seen:
            continue
        seen.add(str(needed))
        name = canonicalize_name(needed.name)
        assert name in versions, f"{needed} is asked for"
        found = versions[name]
        assert needed.specifier.contains(found, prereleases=True), (
            f"{needed} is asked for, not {found}"
        )
        waiting += applying(required_by(name, found), place, needed.extras)
    assert len({Requirement(line).name for line in seen}) > (80 if python == "3.10" else 120)


def test_python_3_10_lacks_transformers_and_has_the_same_torch():
    place = environment("3.10", "linux")
    old, new = (
        pinned(LISTS[python], place | {"python_full_version": f"{python}.2"})
        for python in ("3.10", "3.11")
    )
    assert not {"transformers", "trl", "peft", "accelerate"} & set(old)
    assert {old[name] for name in ("torch", "triton", PACKAGE)} == {
        new[name] for name in ("torch", "triton", PACKAGE)
    }
    assert not pinned(LISTS["3.10"], environment("3.11", "linux"))


def test_the_lists_pin_the_text_of_a_run_that_names_none():
    assert f"{PACKAGE}=={VERSION}" in lines("constraints.txt")


# What make does with them


def make(*words: str, more: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make quietly, with more rules than the Makefile's, and without the settings of a make
    around it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    given = [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(
        ["make", "-s", "-f", "-", *words, *given],
        cwd=ROOT,
        env=clean,
        input=f"include Makefile\n{more}\n",
        capture_output=True,
        text=True,
    )


def test_the_tritons_follow_the_list():
    (triton,) = (
        line.partition("==")[2] for line in lines("constraints.txt") if line.startswith("triton==")
    )
    said = make("tritons", more="tritons: ; @echo $(TRITONS)").stdout.split()
    assert said[0] == triton
    assert set(said) == {triton, "3.6.0", "3.7.1", "3.9.0"}
    (torch,) = (line for line in lines("constraints.txt") if line.startswith("torch=="))
    assert make("pinned", more="pinned: ; @echo torch==$(TORCH)").stdout.split() == [torch]


def fake_environment(folder: Path, version: str) -> tuple[Path, Path]:
    """Make a virtual environment whose Python says a version and writes down what pip is told;
    return it and the notes."""
    notes = folder / "notes"
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True)
    script = f'#!/bin/sh\ncase "$1" in -c) echo {version} ;; *) echo "$@" >> "{notes}" ;; esac\n'
    for name in ("python", "moesaic"):
        (venv / "bin" / name).write_text(script, encoding="utf-8")
        (venv / "bin" / name).chmod(0o755)
    return venv, notes


def installs(notes: Path) -> list[str]:
    """Return what pip was told to install, without itself, and forget it."""
    told = notes.read_text("utf-8").splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    return [
        line.partition("--disable-pip-version-check ")[2]
        for line in told
        if " -c constraints" in line
    ]


@pytest.mark.parametrize(("version", "name"), LISTS.items())
def test_the_demo_installs_only_what_it_runs_and_the_tests_add_the_rest(tmp_path, version, name):
    venv, notes = fake_environment(tmp_path, version)
    everything = f"-c {name} {' '.join(SET_UP)}"
    for target, installed in (
        ("demo", [f"-c {name} -e .[train]"]),
        ("demo", []),
        ("setup", [everything]),
        ("demo", []),
    ):
        assert make(target, VENV=str(venv)).returncode == 0
        assert installs(notes) == installed
    for stamp in (".demo", ".current"):
        (venv / stamp).unlink()
    assert make("setup", VENV=str(venv)).returncode == 0
    assert installs(notes) == [everything]
    assert make("demo", VENV=str(venv)).returncode == 0
    assert installs(notes) == []


@pytest.mark.parametrize("target", ["setup", "demo", "test"])
@pytest.mark.parametrize("version", ["2.7", "3.9", "3.15"])
def test_make_says_in_one_line_which_python_it_needs(tmp_path, version, target):
    venv, notes = fake_environment(tmp_path, version)
    done = make(target, VENV=str(venv))
    (line,) = done.stdout.splitlines()
    assert f"is Python {version}, and Moesaic needs 3.11 to 3.14" in line
    assert "PYTHON=python3.12 make setup" in line
    assert (done.returncode, installs(notes)) == (2, [])


def test_make_says_in_one_line_that_a_python_does_not_run(tmp_path):
    done = make("setup", VENV=str(tmp_path / "venv"), PYTHON="no-python")
    (line,) = done.stdout.splitlines()
    assert "no-python does not run" in line
    assert done.returncode == 2


def test_make_says_what_python_3_10_is_without(tmp_path):
    venv, notes = fake_environment(tmp_path, "3.10")
    for target in ("test", "test-random", "test-all"):
        done = make(target, VENV=str(venv))
        (line,) = done.stdout.splitlines()
        assert "the tests need 3.11" in line
        assert (done.returncode, installs(notes)) == (2, [])
    (line,) = make("setup", VENV=str(venv)).stdout.splitlines()
    assert "without transformers" in line or "transformers and what needs it are left out" in line


def test_make_lock_takes_no_setting_of_this_machine(tmp_path):
    tool = tmp_path / "uv"
    tool.write_text(
        '#!/bin/sh\ncat > /dev/null\nenv | grep -E "^(PIP|UV)_" >> "$HOME/seen"\necho "$@" >> '
        '"$HOME/called"\n'
    )
    tool.chmod(0o755)
    given = {"PIP_FIND_LINKS": "wheels", "UV_INDEX_URL": "index", "HOME": str(tmp_path)}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["make", "-s", "lock"], cwd=ROOT, env={**os.environ, **given, "PATH": path}, check=True
    )
    assert (tmp_path / "seen").read_text() == ""
    called = (tmp_path / "called").read_text().splitlines()
    assert [re.findall("--output-file (\\S+)", line) for line in called] == [
        ["constraints.txt"],
        ["constraints-3.10.txt"],
    ]
    assert all("--no-config" in line and "--universal" in line for line in called)


def test_the_newest_is_what_a_stranger_gets(tmp_path):
    """Environments of other torches, and what is published, are installed without a setting of this
    machine, which may cap a version or offer another build."""
    settings = {"PIP_CONSTRAINT": "capped.txt", "PIP_INDEX_URL": "index", "PYTHONPATH": "x"}
    given = {**os.environ, **settings, "REQUESTS_CA_BUNDLE": "certificates.pem"}
    rule = "outside: ; @$(OUTSIDE) env"
    done = subprocess.run(
        ["make", "-s", "-f", "-", "outside"],
        cwd=ROOT,
        env=given,
        input=f"include Makefile\n{rule}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert not set(settings) & set(seen)
    assert seen["PIP_CONFIG_FILE"] == os.devnull
    assert seen["REQUESTS_CA_BUNDLE"] == "certificates.pem"
    for target in ("build/torch/newest-3.12/.current", "dist"):
        words = ("make", "--dry-run", "--always-make", target)
        printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
        lines = [line for line in printed.splitlines() if "-m pip install" in line]
        assert lines
        assert all(line.startswith("env -i ") for line in lines)


@pytest.mark.slow  # the network and two minutes
@pytest.mark.parametrize("whose", ["this machine's", "a stranger's"])
def test_pip_solves_the_set_up(tmp_path, whose):
    """With this machine's settings, which may offer a build of torch for CPUs, and with the public
    index alone."""
    settings = dict(os.environ)
    if whose == "a stranger's":
        kept = ("HOME", "PATH", "SSL_CERT_FILE", "PIP_CERT")
        settings = {name: os.environ[name] for name in kept if name in os.environ} | {
            "PIP_CONFIG_FILE": os.devnull
        }
    name = LISTS[f"3.{sys.version_info.minor}"]
    report = tmp_path / "report.json"
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        str(report),
    ]
    done = subprocess.run(
        [*words, "-c", name, *SET_UP], cwd=ROOT, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    installed = [each["metadata"] for each in json.loads(report.read_text("utf-8"))["install"]]
    found = {canonicalize_name(each["name"]): Version(each["version"]) for each in installed}
    versions = pinned(name, default_environment() | {"extra": ""})
    assert set(found) - set(versions) == OURS
    others = {each: Version(version.public) for each, version in found.items() if each not in OURS}
    assert others == {each: versions[each] for each in others}
    assert {"torch", "triton", "mypy", "transformers", PACKAGE} <= set(others)
    if whose == "a stranger's":
        assert found["torch"].local is None
