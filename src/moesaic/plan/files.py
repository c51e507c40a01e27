"""Plans as files: TOML or JSON with a version, so that a plan that was found once can be run again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from moesaic.configfile import override, read_table
from moesaic.errors import InputError
from moesaic.plan.plan import Plan

VERSION = 1
"""Of the file; a reader refuses newer ones."""


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        InputError: if the file is missing, does not parse, was written by a newer version, or holds no plan.
    """
    table = read_table(path)
    version = table.get("version")
    if not isinstance(version, int) or not isinstance(table.get("plan"), dict):
        raise InputError(
            f"plan {path}: needs version = {VERSION} and a table [plan]: write it with moesaic show --write"
        )
    if version > VERSION:
        raise InputError(f"plan {path}: has version {version}, this Moesaic reads up to {VERSION}: upgrade it")
    return override(Plan(), table["plan"], source=str(path), prefix="plan.")


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as JSON.

    Raises:
        InputError: if the file cannot be written, or is not to be called .json, by which it is read back.
    """
    if path.suffix != ".json":
        raise InputError(f"plan {path}: is written as JSON: choose a name that ends in .json")
    text = json.dumps({"version": VERSION, "plan": asdict(plan)}, indent=2)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"plan {path}: cannot be written ({error.strerror}): choose another path") from error
