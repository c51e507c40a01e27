"""The folder in which a command of the examples is tried: new copies of what it gets, and which
paths it may write."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from moesaic_lab.fuzz.examples import Example
from moesaic_lab.system_calls import Write

PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "transformers",
    "safetensors.torch",
    "moesaic.cli.train",
    "moesaic.cli.sample",
    "moesaic.cli.plan",
    "moesaic.cli.show",
    "moesaic.cli.trace",
    "moesaic.cli.finetune",
    "moesaic.finetune.recipe",
    "moesaic.train.loop",
    "moesaic.weights.convert",
    "moesaic.weights.run",
    "moesaic.report.page",
    "moesaic.traces.load",
)
"""Imported once, by the process from which all others are forked."""


PROBE = re.compile("[a-z0-9_]{8}")
"""The names of the files by which tempfile tries a folder."""


class Place:
    """A folder that is made anew for each try.

    Args:
        bases: a folder that `readers.make_bases` has filled.
        example: the command that is tried.
    """

    def __init__(self, bases: Path, example: Example) -> None:
        self._bases = bases
        self.example = example
        self._made = Path(os.path.realpath(tempfile.mkdtemp(prefix="moesaic-place-")))
        self.folder = self._made / "given"
        """What the command gets; it runs there."""

    def made(self) -> Path:
        """Make the folder anew, and return it."""
        shutil.rmtree(self._made)
        self.folder.mkdir(parents=True)
        for name in ("tmp", "home"):
            (self._made / name).mkdir()
        for name in self.example.folders:
            copied(self._bases / name, self.folder / name)
        return self.folder

    def _is_temporary(self, path: str) -> bool:
        """Return whether a path is of a temporary file. Where one cannot be written, tempfile looks
        for another place, at last in the current folder, by a file with a random name."""
        if path.startswith(f"{self._made}/"):
            is_in_folder = Path(path).parent == self.folder
            is_probe = is_in_folder and bool(PROBE.fullmatch(Path(path).name))
            return is_probe or path.startswith(f"{self._made}/tmp/")
        return path.startswith(("/tmp/", "/var/tmp/", "/usr/tmp/"))

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._made, ignore_errors=True)

    def is_given(self, path: str) -> bool:
        """Return whether the command may write a path: what it was given, unfinished files beside
        that, temporary files."""
        if self._is_temporary(path):
            return True
        for out in self.example.out:
            given = self.folder / out
            if path == str(given) or path.startswith(f"{given}/"):
                return True
            if Path(path).parent == given.parent and Path(path).name.startswith(".writing-"):
                return True
        return False

    def shown(self, write: Write | None) -> str:
        """Return a write in words, its path below the folder."""
        return str(write).replace(f"{self._made}/", "").replace("given/", "")


def copied(source: Path, target: Path) -> None:
    """Copy a file or a folder."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
