"""`moesaic bench trace`: makes synthetic routing traces, and reads those of published systems. Runs without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from moesaic.cli.arguments import parse
from moesaic.cli.trace import print_loads
from moesaic.errors import InputError
from moesaic.traces.load import layer_loads
from moesaic.traces.trace import Trace, TraceSegment, write_segment
from moesaic_lab.traces.published import read_laer, read_smartmoe
from moesaic_lab.traces.synthetic import SyntheticRouting, make_segment

USAGE = """usage: moesaic bench trace make FILE.npz [options]
       moesaic bench trace laer FILE --out FILE.npz [--method METHOD] [--model MODEL]
       moesaic bench trace smartmoe FOLDER --out FILE.npz --top-k K

  make      generate a trace with a given skew or MaxVio, drift and locality
  laer      read the tokens that each rank computed, as LAER-MoE's artifact recorded them
  smartmoe  read the gate tables that SmartMoE's artifact recorded"""


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


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    words = {"make": _make, "laer": _laer, "smartmoe": _smartmoe}
    if arguments[0] not in words:
        raise InputError(f"unknown word {arguments[0]}: write {', '.join(words)}")
    return words[arguments[0]](arguments[1:])


def _make(arguments: Sequence[str]) -> int:
    """Make a synthetic trace."""
    options = parse(
        MakeOptions, arguments, prog="moesaic bench trace make", description="Generate a synthetic routing trace."
    )
    config = SyntheticRouting(**{each.name: getattr(options, each.name) for each in fields(SyntheticRouting)})
    return _write(Path(options.file), lambda: make_segment(config))


def _laer(arguments: Sequence[str]) -> int:
    """Read a recording of LAER-MoE."""
    options = parse(LaerOptions, arguments, prog="moesaic bench trace laer", description="Read LAER-MoE's counts.")
    return _write(Path(options.out), lambda: read_laer(Path(options.file), method=options.method, model=options.model))


def _smartmoe(arguments: Sequence[str]) -> int:
    """Read a recording of SmartMoE."""
    options = parse(
        SmartMoEOptions, arguments, prog="moesaic bench trace smartmoe", description="Read SmartMoE's gate tables."
    )
    if options.top_k < 1:
        raise InputError(f"--top-k {options.top_k}: must be at least 1")
    return _write(Path(options.out), lambda: read_smartmoe(Path(options.file), top_k=options.top_k))


def _write(path: Path, make: Callable[[], TraceSegment]) -> int:
    """Write a trace and print its loads."""
    if path.suffix != ".npz":
        raise InputError(f"trace {path}: choose a name that ends in .npz")
    segment = make()
    write_segment(segment, path, typed=True)
    trace = Trace.of(segment, str(path))
    print_loads(trace, layer_loads(trace))
    return 0
