"""`moesaic bench trace`: makes synthetic routing traces, reads those of published systems, picks
steps. Runs without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from moesaic.cli.arguments import parse
from moesaic.cli.trace import print_loads
from moesaic.errors import InputError
from moesaic.traces.load import layer_loads
from moesaic.traces.trace import Trace, TraceSegment, steps_in_words, write_segment
from moesaic_lab.traces.published import read_laer, read_smartmoe
from moesaic_lab.traces.synthetic import SyntheticRouting, make_segment

USAGE = """usage: moesaic bench trace make FILE.npz [options]
       moesaic bench trace laer FILE --out FILE.npz [--method METHOD] [--model MODEL]
       moesaic bench trace smartmoe FOLDER --out FILE.npz --top-k K
       moesaic bench trace pick FILE --out FILE.npz --steps STEP [STEP ...]

  make      generate a trace with a given skew or MaxVio, drift and locality
  laer      read the tokens that each rank computed, as LAER-MoE's artifact recorded them
  smartmoe  read the gate tables that SmartMoE's artifact recorded
  pick      keep some steps of a trace, in one file"""


@dataclass(frozen=True, kw_only=True)
class MakeOptions(SyntheticRouting):
    """Options of `moesaic bench trace make`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The .npz file to write."""


@dataclass(frozen=True, kw_only=True)
class LaerOptions:
    """Options of `moesaic bench trace laer`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The CSV."""
    out: str
    """The .npz file to write."""
    method: str | None = None
    """The recorded system to read, if the file has several."""
    model: str | None = None
    """The recorded model to read, if the file has several."""


@dataclass(frozen=True, kw_only=True)
class SmartMoEOptions:
    """Options of `moesaic bench trace smartmoe`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder with the gate tables."""
    out: str
    """The .npz file to write."""
    top_k: int
    """Experts per token."""


@dataclass(frozen=True, kw_only=True)
class PickOptions:
    """Options of `moesaic bench trace pick`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A trace, or the folder of a run that recorded one."""
    out: str
    """The .npz file to write."""
    steps: tuple[int, ...]
    """The steps to keep."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    words = {"make": _make, "laer": _laer, "smartmoe": _smartmoe, "pick": _pick}
    if arguments[0] not in words:
        raise InputError(f"unknown word {arguments[0]}: write {', '.join(words)}")
    return words[arguments[0]](arguments[1:])


def _make(arguments: Sequence[str]) -> int:
    """Make a synthetic trace."""
    options = parse(
        MakeOptions,
        arguments,
        prog="moesaic bench trace make",
        description="Generate a synthetic routing trace.",
    )
    names = [field.name for field in fields(SyntheticRouting)]
    config = SyntheticRouting(**{name: getattr(options, name) for name in names})
    return _write(Path(options.file), lambda: make_segment(config))


def _laer(arguments: Sequence[str]) -> int:
    """Read a recording of LAER-MoE."""
    options = parse(
        LaerOptions,
        arguments,
        prog="moesaic bench trace laer",
        description="Read LAER-MoE's counts.",
    )
    return _write(
        Path(options.out),
        lambda: read_laer(Path(options.file), method=options.method, model=options.model),
    )


def _smartmoe(arguments: Sequence[str]) -> int:
    """Read a recording of SmartMoE."""
    options = parse(
        SmartMoEOptions,
        arguments,
        prog="moesaic bench trace smartmoe",
        description="Read SmartMoE's gate tables.",
    )
    if options.top_k < 1:
        raise InputError(f"--top-k {options.top_k}: must be at least 1")
    return _write(Path(options.out), lambda: read_smartmoe(Path(options.file), top_k=options.top_k))


def _pick(arguments: Sequence[str]) -> int:
    """Keep some steps of a trace."""
    options = parse(
        PickOptions,
        arguments,
        prog="moesaic bench trace pick",
        description="Keep some steps of a trace.",
    )
    return _write(Path(options.out), lambda: picked(Trace.open(Path(options.file)), options.steps))


def picked(trace: Trace, steps: Sequence[int]) -> TraceSegment:
    """Return some steps of a trace as one segment.

    Raises:
        InputError: the trace lacks one of them.
    """
    missing = sorted({*steps} - {*trace.steps})
    if missing:
        raise InputError(
            f"--steps {missing[0]}: {trace.name} has {steps_in_words(trace.steps)}: choose of these"
        )
    parts = list(trace.segments())
    tables = []
    kept_steps = []
    for part in parts:
        is_chosen = np.isin(part.steps, steps)
        tables.append(part.table[is_chosen])
        kept_steps.append(part.steps[is_chosen])
    return TraceSegment(
        trace.shape,
        trace.holds,
        np.concatenate(kept_steps),
        np.concatenate(tables),
        parts[0].groups,
    )


def _write(path: Path, make: Callable[[], TraceSegment]) -> int:
    """Write a trace and print its loads."""
    if path.suffix != ".npz":
        raise InputError(f"trace {path}: choose a name that ends in .npz")
    segment = make()
    write_segment(segment, path, typed=True)
    trace = Trace.of(segment, str(path))
    print_loads(trace, layer_loads(trace))
    return 0
