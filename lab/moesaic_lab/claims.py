"""The output format that all benchmarks share: machine, versions, date, rows, claims.

A claim that was not measured is never left out: it is listed with `value: null` and the reason.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

from moesaic.files import write
from moesaic_lab.measure import MANY, NEAR, Ratio

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OPERATORS = {
    ">=": lambda value, target: value >= target,
    "<=": lambda value, target: value <= target,
}
"""How a value is compared with its target, by operator."""

FAMILY = {"family": "cpu family", "model": "model"}
"""Words for the fields of /proc/cpuinfo that tell generations of processors apart."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A measured figure and the target that it should reach."""

    name: str
    """Dotted name, which the documentation uses too."""
    value: float | None
    """The measured figure; None if it was not measured."""
    unit: str = "1"
    """Unit of value and target; "1" for a ratio."""
    target: float | None = None
    """The figure to reach; None if the value is only reported."""
    op: Literal[">=", "<="] = "<="
    """How `value` must compare with `target`."""
    reason: str = ""
    """Why `value` is None."""
    interval: tuple[float, float] | None = None
    """The least and the most that the value may be; the benchmark's notes say how it is found."""
    case: str = ""
    """The case that the value is of, where it is the worst of several."""

    @property
    def holds(self) -> bool | None:
        """Whether the value reaches the target; None if either is missing."""
        if self.value is None or self.target is None:
            return None
        return bool(OPERATORS[self.op](self.value, self.target))

    def as_dict(self) -> dict[str, Any]:
        """Return the claim as plain data."""
        data: dict[str, Any] = {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": self.target,
            "op": self.op,
            "holds": self.holds,
        }
        data |= {} if self.interval is None else {"interval": list(self.interval)}
        data |= {"case": self.case} if self.case else {}
        return data | ({"reason": self.reason} if self.reason else {})


class NotMeasuredError(Exception):
    """No data for a claim, or too few repeats. The message is the claim's reason."""


def claimed(
    name: str,
    value: Callable[[], float],
    target: float | None,
    op: Literal[">=", "<="] = "<=",
    unit: str = "1",
) -> Claim:
    """Return a claim with the result of `value`. If `value` raises `NotMeasuredError`, the claim
    has its reason instead."""
    try:
        return Claim(name=name, value=value(), unit=unit, target=target, op=op)
    except NotMeasuredError as reason:
        return Claim(name=name, value=None, unit=unit, target=target, op=op, reason=str(reason))


def figures(rows: Sequence[Mapping[str, Any]], key: str, **others: object) -> list[float]:
    """Return the figure `key` of every row that has it and whose other keys have the values
    `others`.

    Raises:
        NotMeasuredError: if there is no such row.
    """
    values = [
        row[key]
        for row in rows
        if row.get(key) is not None and all(row.get(k) == v for k, v in others.items())
    ]
    if not values:
        raise NotMeasuredError("not run")
    return values


def some(entries: list[T], what: str) -> list[T]:
    """Return the list unchanged, if it has entries.

    Raises:
        NotMeasuredError: if the list is empty; `what` describes the missing cases.
    """
    if not entries:
        raise NotMeasuredError(f"no case {what} was run")
    return entries


def enough(ratio: Ratio, label: str = "") -> Ratio:
    """Return the ratio unchanged, if it was measured often enough.

    Raises:
        NotMeasuredError: for a ratio near 1 with fewer than `MANY` repeats.
    """
    if ratio.is_near and ratio.repeats < MANY:
        where = f"{label}: " if label else ""
        raise NotMeasuredError(
            f"{where}{ratio.repeats} repeats, a ratio under {NEAR:.2f} needs {MANY}"
        )
    return ratio


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results of a benchmark run."""

    rows: list[dict[str, Any]]
    """All measured cases, a dict each."""
    claims: Sequence[Claim]
    """The figures that documentation and issues quote."""
    notes: str = ""
    """What a reader must know to judge the figures."""
    packages: tuple[str, ...] = ("torch", "numpy")
    """Packages whose versions are recorded."""
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    """The machine of the run, from `describe_machine`."""
    seconds: float | None = None
    """How long the run took; None if it went on from kept results."""

    def as_dict(self) -> dict[str, Any]:
        """Return machine, versions, date, commit, notes, rows and claims as plain data."""
        took = {} if self.seconds is None else {"seconds": round(self.seconds)}
        return {
            "machine": self.machine,
            "versions": versions(*self.packages),
            "date": today(),
            "commit": commit(),
            **took,
            "notes": self.notes,
            "rows": self.rows,
            "claims": [claim.as_dict() for claim in self.claims],
        }

    def write(self, target: str) -> None:
        """Write JSON to a file atomically, or to standard output for "-"."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        if target == "-":
            sys.stdout.write(text)
            return
        write_whole(Path(target), text)


def commit() -> str | None:
    """Return the commit that is measured, with a "+" if files differ from it; None outside a
    clone."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def today() -> str:
    """Return the date in Greenwich, as results have it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, and create its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, text, typed=True)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, Moesaic and `packages`; "absent" for a package that is not
    installed."""
    installed = {"python": platform.python_version()}
    for package in ("moesaic", *packages):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "absent"
    return installed


def describe_machine() -> dict[str, Any]:
    """Return the processor's name, the number of cores, and the operating system with its
    architecture."""
    path = Path("/proc/cpuinfo")
    name = processor(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": None,
    }


def processor(cpuinfo: str) -> str:
    """Return the processor's name from the text of /proc/cpuinfo; "" if it has none.

    Virtual machines hide the model: "AMD EPYC" may be of any generation, so the numbers of family
    and model follow.
    """
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    if not fields.get("model name"):
        return ""
    numbers = ", ".join(f"{part} {fields[key]}" for part, key in FAMILY.items() if fields.get(key))
    return fields["model name"] + (f" ({numbers})" if numbers else "")
