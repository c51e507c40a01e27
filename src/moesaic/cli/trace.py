"""`moesaic trace`: shows, checks and converts routing traces, and extracts counts. Runs without
torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.errors import InputError, in_one_line, suggestion
from moesaic.files import require_writable, writing
from moesaic.traces.formats import FORMATS, ReadOptions, TraceFormat
from moesaic.traces.load import LayerLoad, faults, layer_loads
from moesaic.traces.trace import Trace, TraceSegment, steps_in_words, write_segment

NARROWEST = 100
"""Columns that the table of loads needs."""
USAGE = """usage: moesaic trace show FILE [--picture FILE.html] [--json]
       moesaic trace counts FILE --out FILE.csv [options]
       moesaic trace check FILE [--from FORMAT] [options]
       moesaic trace convert FILE --out FILE (--from FORMAT | --to FORMAT) [options]

  show    print the imbalance of a trace, its drift over steps and its locality in sequences
  counts  write the copies per rank and expert of one call, a row per rank, for the simulator
  check   print the faults of a trace (sums, top-k, layers, gaps); exit code 1 if there are any
  convert convert a trace from or to the format of Megatron-Core, vLLM or SGLang, or a table
          of counts

FILE is a trace, or the folder of a run of moesaic train --record-routing counts (or tokens).
moesaic trace show --help lists the options of show, and so on."""


@dataclass(frozen=True, kw_only=True)
class TraceShowOptions:
    """Options of `moesaic trace show`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A trace, or the folder of a run that recorded one."""
    picture: str | None = None
    """Plot load and MaxVio over the steps into this HTML file."""
    json: bool = False
    """Print the figures of every step as JSON."""


@dataclass(frozen=True, kw_only=True)
class CountsOptions:
    """Options of `moesaic trace counts`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A trace, or the folder of a run that recorded one."""
    out: str
    """The .csv or .npy file to write."""
    layer: int = 0
    """Number of the MoE layer, from 0."""
    step: int | None = None
    """Number of the step, from 0; None for the last step of the trace."""
    micro: int = 0
    """Number of the micro-batch in the step, from 0."""
    groups: int | None = None
    """Number of ranks (data-parallel groups) over which the sequences are split; None for that of
    the recorded run."""


@dataclass(frozen=True, kw_only=True)
class TraceCheckOptions(ReadOptions):
    """Options of `moesaic trace check`."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A trace, the folder of a run that recorded one, or, with --from, a recording of other
    software."""
    from_format: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Format of the file: megatron, vllm, sglang or counts; None for a trace of Moesaic."""


@dataclass(frozen=True, kw_only=True)
class TraceConvertOptions(TraceCheckOptions):
    """Options of `moesaic trace convert`."""

    out: str
    """Path to write: an .npz file, or, with --to, a file or folder of that format."""
    to: str | None = None
    """Format to write: megatron, vllm, sglang or counts; None for a trace of Moesaic."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    subcommands = {"show": _show, "counts": _counts, "check": _check, "convert": _convert}
    name = arguments[0]
    if name not in subcommands:
        raise InputError(f"unknown word {name}: write {', '.join(subcommands)}")
    return subcommands[name](arguments[1:])


def _show(arguments: Sequence[str]) -> int:
    """Run `moesaic trace show`."""
    description = "Print the imbalance, drift and locality of a routing trace, per layer."
    options = parse(TraceShowOptions, arguments, prog="moesaic trace show", description=description)
    trace = Trace.open(Path(options.file))
    loads = layer_loads(trace)
    if options.picture is not None:
        from moesaic.report.trace_page import write_trace_page

        write_trace_page(trace, loads, Path(options.picture))
    if options.json:
        print(json.dumps(as_data(trace, loads), indent=2))
        return 0
    print_loads(trace, loads)
    if options.picture is not None:
        print(in_one_line(options.picture))
    return 0


def _counts(arguments: Sequence[str]) -> int:
    """Run `moesaic trace counts`."""
    description = (
        "Write the copies per rank and expert of one call, a row per rank and a column per expert."
    )
    options = parse(CountsOptions, arguments, prog="moesaic trace counts", description=description)
    path = Path(options.out)
    if path.suffix not in (".csv", ".npy"):
        raise InputError(f"--out {path}: choose a name that ends in .csv or .npy")
    require_writable(path, "--out")

    trace = Trace.open(Path(options.file))
    step = trace.steps[-1] if options.step is None else options.step
    table = trace.counts(options.layer, step, options.micro, groups=options.groups)
    try:
        with writing(path, typed=True) as file:
            if path.suffix == ".npy":
                np.save(file, table)
            else:
                np.savetxt(file, table, fmt="%d", delimiter=",")
    except OSError as error:
        raise InputError(
            f"--out {path}: cannot be written ({error.strerror}): choose another place"
        ) from error

    size = f"{table.shape[0]} ranks x {table.shape[1]} experts"
    print(in_one_line(f"{path}: layer {options.layer}, step {step}, {size}"))
    return 0


def _check(arguments: Sequence[str]) -> int:
    """Run `moesaic trace check`; return 1 if the trace has faults."""
    options = parse(
        TraceCheckOptions,
        arguments,
        prog="moesaic trace check",
        description="Print the faults of a routing trace.",
    )
    trace = _open(options)
    problems = faults(trace)
    shape = trace.shape
    for line in problems:
        print(in_one_line(line))
    print(
        f"{in_one_line(trace.name)}: {len(problems) or 'no'} faults; {trace.holds}, steps "
        f"{steps_in_words(trace.steps)}, {shape.num_layers} layers, {shape.num_experts} experts, "
        f"top {shape.top_k}, {shape.accumulation} x {shape.sequences} sequences of {shape.seq_len}"
    )
    return 1 if problems else 0


def _convert(arguments: Sequence[str]) -> int:
    """Run `moesaic trace convert`."""
    description = "Convert a routing trace from or to the format of other software."
    options = parse(
        TraceConvertOptions, arguments, prog="moesaic trace convert", description=description
    )
    out = Path(options.out)
    require_writable(out, "--out")
    if options.to is not None:
        write = _format(options.to).write
        try:
            write(_open(options), out)
        except OSError as error:
            raise InputError(
                f"--out {out}: cannot be written ({error.strerror}): choose another place"
            ) from error
    elif options.from_format is None:
        raise InputError("trace convert: give --from, --to or both: there is nothing to convert")
    elif out.suffix != ".npz":
        raise InputError(f"--out {out}: choose a name that ends in .npz")
    else:
        write_segment(_read(options), out, typed=True)
    print(in_one_line(str(out)))
    return 0


def _open(options: TraceCheckOptions) -> Trace:
    """Open a trace of Moesaic, or a recording of other software."""
    if options.from_format is None:
        return Trace.open(Path(options.file))
    return Trace.of(_read(options), options.file)


def _read(options: TraceCheckOptions) -> TraceSegment:
    """Read a recording of other software."""
    assert options.from_format is not None
    return _format(options.from_format).read(Path(options.file), options)


def _format(name: str) -> TraceFormat:
    """Return the format of a name of --from or --to."""
    if name not in FORMATS:
        raise InputError(f"format {name}: is unknown{suggestion(name, list(FORMATS))}")
    return FORMATS[name]


def as_data(trace: Trace, loads: Sequence[LayerLoad]) -> dict[str, Any]:
    """Return the figures of a trace as plain data."""
    return {
        "trace": trace.name,
        "holds": trace.holds,
        "shape": asdict(trace.shape),
        "bytes_per_step": trace.shape.bytes_per_step(trace.holds),
        "steps": trace.steps,
        "layers": [
            {
                "layer": load.layer,
                "max_violation": list(load.max_violation),
                "busiest": list(load.busiest),
                "dead_experts": load.dead_experts,
                "drift": load.drift,
                "locality": load.locality,
                "shares": load.shares.mean(axis=0).tolist(),
            }
            for load in loads
        ],
    }


def print_loads(trace: Trace, loads: Sequence[LayerLoad]) -> None:
    """Print the figures of a trace as a table, on standard error."""
    shape = trace.shape
    content = "every token's experts" if trace.holds == "tokens" else "counts"
    table = Table(
        title=f"{trace.name}: {content}, steps {steps_in_words(trace.steps)}",
        caption=f"{shape.num_experts} experts, {shape.top_k} per token; {shape.accumulation} x "
        f"{shape.sequences} sequences of {shape.seq_len} tokens a step; "
        f"{shape.bytes_per_step(trace.holds):,} bytes a step before compression",
    )
    for name in (
        "layer",
        "MaxVio first",
        "mean",
        "largest",
        "last",
        "busiest",
        "dead",
        "drift",
        "locality",
    ):
        table.add_column(name, justify="right", no_wrap=True)

    for load in loads:
        violations = load.max_violation  # by step
        first_mean_largest_last = [
            violations[0],
            float(np.mean(violations)),
            max(violations),
            violations[-1],
        ]
        table.add_row(
            str(load.layer),
            *(f"{value:.2f}" for value in first_mean_largest_last),
            str(load.busiest[-1]),
            str(load.dead_experts),
            f"{load.drift:.3f}",
            f"{load.locality:.3f}",
        )
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.width = max(console.width, NARROWEST)
    console.print(table)
