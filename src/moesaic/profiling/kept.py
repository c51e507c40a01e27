"""What was timed of a machine as a file, so that another fit can be made of the same times."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from moesaic.configfile import override, read_table
from moesaic.cost.profile import ClusterProfile
from moesaic.errors import InputError
from moesaic.profiling.host import CalibrationStep, calibrations
from moesaic.profiling.links import TimedMovements
from moesaic.profiling.profile import MeasuredMachine


def write_measured(measured: MeasuredMachine, path: Path) -> None:
    """Write all times; of the calibration layers their names, by which this version knows what they are."""
    table = {
        "world": measured.world,
        "ranks_per_node": measured.ranks_per_node,
        "sharing": measured.sharing,
        "links": {name: asdict(each) for name, each in measured.links.items()},
        "rest": asdict(measured.rest),
        "steps": {each.name: asdict(step) for each, step in measured.steps},
    }
    path.write_text(json.dumps(table) + "\n", encoding="utf-8")


def read_measured(path: Path) -> MeasuredMachine:
    """Read what `write_measured` wrote.

    Raises:
        InputError: if the file is none, or has other calibration layers than this version.
    """
    table = read_table(path)
    if "steps" not in table or "world" not in table:
        raise InputError(f"{path}: holds no times of a machine: take them anew")
    found = list(calibrations(table["world"], table["ranks_per_node"]))
    if [each.name for each in found] != list(table["steps"]):
        raise InputError(f"{path}: has other calibration layers than this version: measure again")
    steps = [tuple(map(tuple, (each["processor"], each["wall"]))) for each in table["steps"].values()]
    return MeasuredMachine(
        ranks_per_node=table["ranks_per_node"],
        world=table["world"],
        steps=[(each, CalibrationStep(*times)) for each, times in zip(found, steps)],
        sharing=tuple(table["sharing"]),
        links={
            name: TimedMovements(tuple(each["num_bytes"]), tuple(map(tuple, each["seconds"])), each["messages"])
            for name, each in table["links"].items()
        },
        rest=override(ClusterProfile(), table["rest"], source=str(path)),
    )
