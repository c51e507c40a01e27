"""The one output shape of every benchmark: machine, versions, date, rows, claims.

A claim that was not measured is listed with `value: null` and the reason, never left out.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

from moesaic_lab.measure import MANY, NEAR, Ratio

T = TypeVar("T")
OPERATORS = {">=": lambda value, target: value >= target, "<=": lambda value, target: value <= target}
"""How a value is held against its target."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One figure and what it should be."""

    name: str
    """Dotted, as the documentation names it."""
    value: float | None
    """What was measured; None if it was not."""
    unit: str
    """Of value and target; "1" for a ratio."""
    target: float | None = None
    """What it should reach; None for a figure that is only reported."""
    op: Literal[">=", "<="]
    """How value must compare to target."""
    reason: str = ""
    """Why there is no value."""

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached; None without a value or a target."""
        if self.value is None or self.target is None:
            return None
        return bool(OPERATORS[self.op](self.value, self.target))

    def as_dict(self) -> dict[str, Any]:
        """Return the claim as plain data."""
        data: dict[str, Any] = {
            "name": self.name, "value": self.value, "unit": self.unit, "target": self.target, "op": self.op,
            "holds": self.holds,
        }  # fmt: skip
        return data | ({"reason": self.reason} if self.reason else {})


class NotMeasuredError(Exception):
    """There is nothing that a claim could rest on, or too few pairs; says why."""


def claimed(
    name: str, value: Callable[[], float], target: float | None, op: Literal[">=", "<="] = "<=", unit: str = "1"
) -> Claim:
    """Return a claim; where its value raises `NotMeasuredError`, one without a value that tells the reason."""
    try:
        return Claim(name=name, value=value(), unit=unit, target=target, op=op)
    except NotMeasuredError as reason:
        return Claim(name=name, value=None, unit=unit, target=target, op=op, reason=str(reason))


def figures(rows: Sequence[Mapping[str, Any]], key: str, **wanted: object) -> list[float]:
    """Return a figure of all rows that have it, and `wanted` at other keys.

    Raises:
        NotMeasuredError: if no row has.
    """
    found = [row[key] for row in rows if row.get(key) is not None and all(row.get(k) == v for k, v in wanted.items())]
    if not found:
        raise NotMeasuredError("not run")
    return found


def some(found: list[T], what: str) -> list[T]:
    """Return what was found.

    Raises:
        NotMeasuredError: if nothing was.
    """
    if not found:
        raise NotMeasuredError(f"no case {what} was run")
    return found


def enough(ratio: Ratio, label: str = "") -> Ratio:
    """Return a ratio that rests on enough pairs.

    Raises:
        NotMeasuredError: for a ratio near 1 that rests on too few.
    """
    if ratio.is_near and ratio.repeats < MANY:
        where = f"{label}: " if label else ""
        raise NotMeasuredError(f"{where}{ratio.repeats} repeats, a ratio under {NEAR:.2f} needs {MANY}")
    return ratio


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a benchmark found."""

    rows: list[dict[str, Any]]
    """The table, a dict per row."""
    claims: Sequence[Claim]
    """The figures that documentation and issues quote."""
    notes: str = ""
    """What a reader must know to judge the figures."""
    packages: tuple[str, ...] = ("torch", "numpy")
    """Whose versions matter."""
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    """Where it ran."""

    def as_dict(self) -> dict[str, Any]:
        """Return machine, versions, date, rows and claims as plain data."""
        return {
            "machine": self.machine,
            "versions": versions(*self.packages),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "notes": self.notes,
            "rows": self.rows,
            "claims": [claim.as_dict() for claim in self.claims],
        }

    def write(self, target: str) -> None:
        """Write JSON to a file, whole or not at all, or to standard output for "-"."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        if target == "-":
            sys.stdout.write(text)
            return
        write_whole(Path(target), text)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.writing")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of Python, Moesaic and `packages`; "absent" for those that are not there."""
    found = {"python": platform.python_version()}
    for package in ("moesaic", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def describe_machine() -> dict[str, Any]:
    """Return the processor's name, the number of cores and the system."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {"cpu": name, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}", "gpu": None}
