"""Reads and writes plan files: TOML or JSON with a version.

A file with the result of a search also has a table `mesh` for `moesaic train`, and a table `found`
about the search, for people and for `moesaic show`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moesaic.configfile import build, override, read_table, to_toml
from moesaic.errors import InputError
from moesaic.files import write
from moesaic.planner.rank_memory import GIB
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.split import WHOLE
from moesaic.planner.workload import Workload
from moesaic.program.plan import Plan

VERSION = 1
"""Version of the file format; readers refuse newer ones."""
MESH = ("tp", "ep", "etp", "innermost")
"""Fields of the table `mesh`, as of a layout."""
SPLIT = {"pp": "pp", "parts_per_stage": "parts", "shard": "shard", "hold": "hold"}
"""Further fields of the table `mesh`, and the fields of a split that they have."""
FINER = "micro_batches_cut_in"
"""Field that says into how many each micro-batch of the run is cut."""
IN_FLIGHT = "micro_batches_in_flight"
"""Field that says how many micro-batches are in flight."""

RECOMPUTES = "recomputes_blocks"
"""Field that says whether blocks are recomputed in backward."""


@dataclass(frozen=True, kw_only=True)
class FoundFor:
    """What a search found its plan for."""

    model: str
    """The model, as the command line names it."""
    cluster: str
    """The cluster, as the command line names it."""
    nodes: int
    """Number of nodes."""
    devices_per_node: int
    """Devices of a node that are used."""
    layer: Workload
    """An MoE layer of the model on the mesh that was found."""

    @property
    def ranks(self) -> int:
        """Number of ranks, those of all pipeline stages."""
        return self.nodes * self.devices_per_node


def mesh_table(planned: PlannedStep) -> dict[str, Any]:
    """Return the trainer's table `mesh` of a planned step; without the split if none was chosen."""
    table = {name: getattr(planned.grid, name) for name in MESH}
    if planned.split != WHOLE:
        for name, split_field in SPLIT.items():
            table[name] = getattr(planned.split, split_field)
    return table


def read_planned(path: Path) -> tuple[dict[str, Any], Plan]:
    """Return the mesh table and the plan in a file; the mesh table is empty if the file has only a
    plan.

    Raises:
        InputError: if the file is missing, does not parse, has a newer version, has no plan, or if
            its mesh is not a table of fields of `MESH`.
    """
    table = read_table(path, "plan")
    version = table.get("version")
    if not isinstance(version, int) or not isinstance(table.get("plan"), dict):
        raise InputError(
            f"plan {path}: needs version = {VERSION} and a table [plan]: write it with "
            "moesaic show --write"
        )
    if version > VERSION:
        raise InputError(
            f"plan {path}: has version {version}, this Moesaic reads up to {VERSION}: upgrade it"
        )
    plan = override(Plan(), table["plan"], source=str(path), prefix="plan.")
    mesh = table.get("mesh", {})
    if not isinstance(mesh, dict) or not set(mesh) <= {*MESH, *SPLIT}:
        raise InputError(
            f"plan {path}: [mesh] must be a table of {', '.join((*MESH, *SPLIT))}: write it "
            "with moesaic plan --write"
        )
    return mesh, plan


def read_step(path: Path) -> tuple[int, int, bool]:
    """Return into how many the micro-batches of a run are cut by the plan in a file, which
    `read_planned` takes, how many are in flight, 1 where it does not say, and whether blocks are
    recomputed.

    Raises:
        InputError: if a number is none.
    """
    table = read_table(path)
    finer = _whole_number(table.get(FINER, 1), FINER, path)
    in_flight = _whole_number(table.get(IN_FLIGHT, 1), IN_FLIGHT, path)
    return finer, in_flight, table.get(RECOMPUTES) is True


def _whole_number(value: Any, name: str, path: Path) -> int:
    """Return a value of a plan file, or refuse it unless it is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise InputError(f"plan {path}: {name}={value!r}: must be a whole number of at least 1")
    return value


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan to a file.

    Args:
        plan: the plan.
        path: the file, with the suffix .toml or .json.

    Raises:
        InputError: if the file has another suffix or cannot be written.
    """
    _write({"version": VERSION, "plan": _fields_of(plan)}, path)


def read_found(path: Path) -> FoundFor | None:
    """Return what the plan in a file, which `read_planned` takes, was found for; None if it does
    not say.

    Raises:
        InputError: if it says something else than `write_planned` writes.
    """
    table = read_table(path).get("found")
    if not isinstance(table, dict) or "layer" not in table:
        return None
    names = {field.name for field in fields(FoundFor)}
    given = {name: value for name, value in table.items() if name in names}
    source = f"plan {path}"
    found = build(FoundFor, given, source=source, prefix="found.")
    for name in ("nodes", "devices_per_node"):
        _whole_number(getattr(found, name), f"found.{name}", path)
    return found


def write_planned(
    planned: PlannedStep, path: Path, found: FoundFor, *, recomputes: bool = False
) -> None:
    """Write the mesh and the plan of a search result to a file.

    Args:
        planned: the search result.
        path: the file, with the suffix .toml or .json.
        found: what it was found for.
        recomputes: whether it recomputes blocks.

    Raises:
        InputError: if the file has another suffix or cannot be written.
    """
    table: dict[str, Any] = {"version": VERSION}
    for name, number in ((FINER, planned.split.finer), (IN_FLIGHT, planned.split.in_flight)):
        if number > 1:  # 1 is what readers take where the file does not say
            table[name] = number
    if recomputes:
        table[RECOMPUTES] = True
    table["mesh"] = mesh_table(planned)
    table["plan"] = _fields_of(planned.plan)
    table["found"] = _found_table(planned, found)
    _write(table, path)


def _found_table(planned: PlannedStep, found: FoundFor) -> dict[str, Any]:
    """Return the table `found`: the fields of `FoundFor`, and for people what was predicted."""
    changed_fields = {}  # of the layer: those that differ from their defaults
    for field in fields(Workload):
        value = getattr(found.layer, field.name)
        if value != field.default:
            changed_fields[field.name] = value
    return {
        "model": found.model,
        "cluster": found.cluster,
        "nodes": found.nodes,
        "devices_per_node": found.devices_per_node,
        "simulated_step_seconds": planned.seconds,
        "bottleneck": planned.estimate.bottleneck,
        "memory_gib": round(planned.memory.total / GIB, 3),
        "layer": changed_fields,
    }


def _fields_of(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that are not None, since TOML has no null."""
    return {name: value for name, value in asdict(plan).items() if value is not None}


def _write(table: dict[str, Any], path: Path) -> None:
    """Write a plan's table as TOML or JSON, by the name of the file."""
    if path.suffix not in (".toml", ".json"):
        raise InputError(f"plan {path}: choose a name that ends in .toml or .json")
    text = json.dumps(table, indent=2) if path.suffix == ".json" else to_toml(table)
    try:
        write(path, text + "\n", typed=True)
    except OSError as error:
        raise InputError(
            f"plan {path}: cannot be written ({error.strerror}): choose another path"
        ) from error
