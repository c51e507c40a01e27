"""The places: what each is for, when it is missing, and how its commands are set up. A later trap
becomes a row of `PLACES`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from places import ground

DISTRIBUTIONS_PYTHON = "/usr/bin/python3"
TEMPORARY = "moesaic-places-"
"""Begins the names of folders among temporary files."""


class Kind(Enum):
    """What runs in a place."""

    RESOLUTION = "resolution of every extra and set-up"
    README = "README's install line, then the whole smoke test"
    MAKE = "make setup, then the whole smoke test"
    SMALL = "the planner, then the layer"
    WALKS = "README's install line, then the walk-throughs of pages as printed"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place where the smoke test runs.

    Args:
        name: on the command line, in the table, and of its folder.
        about: what a stranger has there that we might not.
        kind: what runs.
        python: returns the interpreter, None where there is none.
        why_missing: returns why the place does not exist here, beside a missing interpreter; empty
            where it does.
        make_ground: makes an empty folder and says how commands run there, from the place's folder
            in `build/places`.
        may_be_missing: whether a table without it is right.
        torch: a version to install; None for what pip chooses.
        without_transformers: whether the Python is too old for them.
    """

    name: str
    about: str
    kind: Kind
    python: Callable[[], str | None]
    why_missing: Callable[[], str] = lambda: ""
    make_ground: Callable[[Path], ground.Ground] = ground.plain
    may_be_missing: bool = False
    torch: str | None = None
    without_transformers: bool = False

    def missing(self) -> str:
        """Return why the place does not exist here; empty where it does."""
        return self.why_missing() or ("" if self.python() else "no such Python on PATH or in pyenv")


def interpreter(version: str) -> str | None:
    """Return the CPython of a version on PATH or in pyenv, by the path of the program itself."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for candidate in (f"python{version}", *map(str, of_pyenv)):
        words = (
            candidate,
            "-c",
            "import sys, venv; print(sys.executable, '%d.%d' % sys.version_info[:2])",
        )
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0:
            program, found_version = done.stdout.rsplit(maxsplit=1)
            if found_version == version:
                return program
    return None


def distributions_python() -> str | None:
    """Return the interpreter that the distribution itself brings."""
    return DISTRIBUTIONS_PYTHON if Path(DISTRIBUTIONS_PYTHON).exists() else None


def no_debian_12(release: Path = Path("/etc/os-release")) -> str:
    """Return what this machine is, if it is no Debian 12."""
    text = release.read_text(encoding="utf-8") if release.exists() else ""
    said = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    is_it = (said.get("ID"), said.get("VERSION_ID")) == ("debian", "12")
    return "" if is_it else f"this is {said.get('PRETTY_NAME', sys.platform)}"


def no_debootstrap() -> str:
    """Return what is missing to make a bare Debian."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "making it needs root on Linux"
    return "" if shutil.which("debootstrap") else "debootstrap is not installed"


def no_user_without_rights() -> str:
    """Return why commands cannot run as a user who is not root."""
    if os.name == "nt":
        return "users of Windows are another matter"
    return "" if os.geteuid() != 0 or shutil.which("setpriv") else "setpriv is not installed"


def no_gpu() -> str:
    """Return a line if there is no GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return "no GPU"
    return "" if "GPU 0" in done.stdout else "no GPU"


def odd_folder(folder: Path) -> ground.Ground:
    """Return a ground for a user without rights in a folder with a space and a letter beyond ASCII.

    It lies among temporary files, since such a user cannot read where a checkout may be; the
    place's folder links to it.
    """
    temporary = "/var/tmp" if os.path.isdir("/var/tmp") else None
    target = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=temporary))
    target.chmod(0o755)
    folder.symlink_to(target)
    return ground.without_rights(target / "été sans droits")


def of_python(version: str, *, may_be_missing: bool) -> Place:
    """Return the place of a CPython with the torch that pip chooses for it."""
    return Place(
        name=f"python{version}",
        about=f"CPython {version} and the newest torch",
        kind=Kind.README,
        python=lambda: interpreter(version),
        may_be_missing=may_be_missing,
    )


PLACES = (
    Place(
        name="resolution",
        about="what the public index alone gives to five Pythons on three systems",
        kind=Kind.RESOLUTION,
        python=lambda: sys.executable,
    ),
    Place(
        name="debian12",
        about="Debian 12's own Python and the newest torch",
        kind=Kind.README,
        python=distributions_python,
        why_missing=no_debian_12,
    ),
    Place(
        name="python3.10",
        about="the lowest Python and torch, without transformers",
        kind=Kind.README,
        python=lambda: interpreter("3.10"),
        torch="2.10.0",
        without_transformers=True,
    ),
    of_python("3.12", may_be_missing=False),
    of_python("3.13", may_be_missing=False),
    of_python("3.14", may_be_missing=True),
    Place(
        name="stranger",
        about="no root, no HOME, LANG=C, a folder with a space and a letter beyond ASCII",
        kind=Kind.README,
        python=lambda: distributions_python() or sys.executable,
        why_missing=no_user_without_rights,
        make_ground=odd_folder,
    ),
    Place(
        name="debian13",
        about="a bare Debian 13 with make and git, its own Python, a user without root",
        kind=Kind.MAKE,
        python=lambda: DISTRIBUTIONS_PYTHON,
        why_missing=no_debootstrap,
        make_ground=lambda folder: ground.debian(folder / "root", "trixie"),
    ),
    Place(
        name="walks",
        about="the walk-throughs of five pages, as printed, with the newest torch",
        kind=Kind.WALKS,
        python=lambda: interpreter("3.12"),
    ),
    Place(
        name="macos",
        about="the planner and the layer on macOS",
        kind=Kind.SMALL,
        python=lambda: sys.executable,
        why_missing=lambda: "" if sys.platform == "darwin" else "not macOS",
        may_be_missing=True,
    ),
    Place(
        name="windows",
        about="the planner and the layer on Windows",
        kind=Kind.SMALL,
        python=lambda: sys.executable,
        why_missing=lambda: "" if sys.platform == "win32" else "not Windows",
        may_be_missing=True,
    ),
    Place(
        name="gpu",
        about="one GPU of NVIDIA",
        kind=Kind.README,
        python=lambda: sys.executable,
        why_missing=no_gpu,
        may_be_missing=True,
    ),
)
