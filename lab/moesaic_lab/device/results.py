"""The rows that the steps on a GPU have measured so far, in one file to which each step adds its
own."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from moesaic_lab.claims import write_whole

Row = dict[str, Any]
"""What a step has measured, by name of the figure."""


class StepRows:
    """The rows in `rows.json` of a folder. Rows of another GPU or torch version are discarded.

    Args:
        dry: whether the steps run without a GPU.
    """

    def __init__(self, folder: Path, *, dry: bool) -> None:
        self.path = folder / "rows.json"
        self.device = "cpu" if dry else "cuda"
        self.key = (
            f"{'none: a dry run' if dry else torch.cuda.get_device_name()}, torch "
            f"{torch.__version__}"
        )
        self.rows: dict[str, Row] = {}
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.rows = content["rows"] if content.get("key") == self.key else {}

    def is_done(self, name: str) -> bool:
        """Return whether a row was measured without an error."""
        return name in self.rows and "error" not in self.rows[name]

    def write(self, name: str, row: Row) -> None:
        """Add a row and rewrite the file."""
        self.rows[name] = {"name": name} | row
        write_whole(self.path, json.dumps({"key": self.key, "rows": self.rows}, indent=1))

    def attempt(self, name: str, measure: Callable[[], Row]) -> bool:
        """Measure a row unless it is done. If that raises, the row gets the reason; return whether
        there is a result."""
        if self.is_done(name):
            return True
        try:
            self.write(name, measure())
        except Exception as error:  # one that fails must not cost the other figures
            self.write(name, {"error": reason(error)})
        say(f"{name}: {self.rows[name].get('error', 'done')}")
        gc.collect()
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # after a persistent CUDA error, which the row already has
                torch.cuda.empty_cache()
        return self.is_done(name)


def reason(error: Exception) -> str:
    """Return an exception in one line."""
    lines = str(error).splitlines()
    first_line = lines[0] if lines else ""
    return f"{type(error).__name__}: {first_line[:200]}"


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
