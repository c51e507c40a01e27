"""`moesaic why-hung RUN`: where every rank of a run stood when the run was given up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moesaic.cli.arguments import parse
from moesaic.errors import InputError


@dataclass(frozen=True, kw_only=True)
class WhyHungOptions:
    """Which run."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """The run folder."""
    json: bool = False
    """Print what was written down as JSON."""


def run(arguments: Sequence[str]) -> int:
    """Print the line, then every rank's calls; returns the exit code."""
    options = parse(
        WhyHungOptions,
        arguments,
        prog="moesaic why-hung",
        description="Tell where every rank of a run stood when it was given up, since one had not moved for --patience.",
    )
    if not options.run:
        raise InputError("name the run folder: moesaic why-hung runs/gpt")
    from moesaic.train.watch import read_hang

    line, positions = read_hang(Path(options.run))
    if options.json:
        print(json.dumps({"line": line, "ranks": [asdict(position) for position in positions]}))
        return 0
    print(line)
    for position in positions:
        print(f"\nrank {position.rank} ({position.process}): {position.at}")
        for call in position.stack:
            print(f"  {call}")
    return 0
