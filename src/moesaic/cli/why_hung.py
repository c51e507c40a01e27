"""`moesaic why-hung RUN`: prints where every rank stood when a run was ended because a rank had
stopped moving."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, in_one_line


@dataclass(frozen=True, kw_only=True)
class WhyHungOptions:
    """Options of `moesaic why-hung`."""

    run: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help_behavior_hint="(required)")
    ] = ""
    """Folder of the run."""
    json: bool = False
    """Print the record as JSON."""


def run(arguments: Sequence[str]) -> int:
    """Print the recorded reason, then the call stack of every rank; returns the exit code."""
    options = parse(
        WhyHungOptions,
        arguments,
        prog="moesaic why-hung",
        description=(
            "Print where every rank stood when a run was ended because a rank had not moved for "
            "--patience seconds."
        ),
    )
    if not options.run:
        raise InputError("name the run folder: moesaic why-hung runs/gpt")
    from moesaic.train.watch import read_hang

    line, positions = read_hang(Path(options.run))
    if options.json:
        print(json.dumps({"line": line, "ranks": [asdict(position) for position in positions]}))
        return 0
    print(in_one_line(line))
    for position in positions:
        print("\n" + in_one_line(f"rank {position.rank} ({position.process}): {position.at}"))
        for call in position.stack:
            print(f"  {in_one_line(call)}")
    return 0
