"""Plans as files: TOML or JSON with a version, so that a plan that was found once can be run again.

What a search found is such a file with a table `mesh` for `moesaic train`, and one that says where both come from, for people.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moesaic.configfile import override, read_table
from moesaic.cost.memory import GIB
from moesaic.errors import InputError
from moesaic.plan.plan import Plan
from moesaic.plan.search import Found

VERSION = 1
"""Of the file; a reader refuses newer ones."""
MESH = ("tp", "ep", "etp", "innermost")
"""Fields of a mesh that a search decides."""


def read_plan(path: Path) -> Plan:
    """Read a plan; raises InputError as `read_planned` does."""
    return read_planned(path)[1]


def read_planned(path: Path) -> tuple[dict[str, Any], Plan]:
    """Return the table of the mesh, empty where the file holds a plan alone, and the plan.

    Raises:
        InputError: if the file is missing, does not parse, was written by a newer version, or holds no plan, or if its mesh is
            no table of the four fields.
    """
    table = read_table(path)
    version = table.get("version")
    if not isinstance(version, int) or not isinstance(table.get("plan"), dict):
        raise InputError(
            f"plan {path}: needs version = {VERSION} and a table [plan]: write it with moesaic show --write"
        )
    if version > VERSION:
        raise InputError(f"plan {path}: has version {version}, this Moesaic reads up to {VERSION}: upgrade it")
    plan = override(Plan(), table["plan"], source=str(path), prefix="plan.")
    mesh = table.get("mesh", {})
    if not isinstance(mesh, dict) or not set(mesh) <= set(MESH):
        raise InputError(
            f"plan {path}: [mesh] must be a table of {', '.join(MESH)}: write it with moesaic plan --write"
        )
    return mesh, plan


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan.

    Args:
        plan: to write.
        path: ends in .toml or .json.

    Raises:
        InputError: if the file cannot be written, or has another ending.
    """
    _write({"version": VERSION, "plan": _fields_of(plan)}, path)


def write_planned(found: Found, path: Path, *, model: str, cluster: str) -> None:
    """Write a mesh and a plan.

    Args:
        found: both.
        path: ends in .toml or .json.
        model: what was planned for, for people.
        cluster: on what.

    Raises:
        InputError: if the file cannot be written, or has another ending.
    """
    table: dict[str, Any] = {
        "version": VERSION,
        "mesh": {name: getattr(found.grid, name) for name in MESH},
        "plan": _fields_of(found.plan),
        "found": {
            "model": model,
            "cluster": cluster,
            "ranks": found.grid.world,
            "simulated_step_seconds": found.seconds,
            "bottleneck": found.estimate.bottleneck,
            "memory_gib": round(found.memory.total / GIB, 3),
        },
    }
    _write(table, path)


def _fields_of(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that are set: TOML has no null."""
    return {name: value for name, value in asdict(plan).items() if value is not None}


def _write(table: dict[str, Any], path: Path) -> None:
    if path.suffix not in (".toml", ".json"):
        raise InputError(f"plan {path}: choose a name that ends in .toml or .json")
    text = json.dumps(table, indent=2) + "\n" if path.suffix == ".json" else _to_toml(table)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"plan {path}: cannot be written ({error.strerror}): choose another path") from error


def _to_toml(table: dict[str, Any]) -> str:
    """Write numbers, words and truth values in tables of depth one; their JSON is TOML too."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items() if not isinstance(value, dict)]
    for name, inner in table.items():
        if isinstance(inner, dict):
            lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in inner.items())]
    return "\n".join(lines) + "\n"
