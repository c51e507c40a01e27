"""`moesaic bench`: measured comparisons, each with a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from moesaic.errors import InputError

BENCHES = {
    "balance": "answers to skewed routing on an emulated cluster, with virtual compute, and simulated on larger ones",
    "comm": "all-to-alls on an emulated cluster, beside the limit of its links",
    "device": "one layer on one device, beside its matrix products alone and other people's layers",
    "kernels": "each operation of a layer beside the plain way to write it and beside the roofline; a layer's memory",
    "layer": "schedules, adaptive r, pipelining, codecs and orders on an emulated cluster, with virtual compute",
    "model": "predicted times of layers beside measured ones, on an emulated cluster",
    "train": "the demo model end to end on an emulated cluster, beside plain expert parallelism and DeepSpeed",
}
"""Benchmarks; each lives in `moesaic_lab.cli.<name>` and has `run(arguments) -> exit code`."""


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark; returns its exit code."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<8} {summary}" for name, summary in BENCHES.items()]
        print(
            "\n".join(
                ["usage: moesaic bench WHAT ...", "", *lines, "", "moesaic bench WHAT --help tells what it takes."]
            )
        )
        return 0
    if words[0] not in BENCHES:
        raise InputError(f"unknown benchmark {words[0]}: choose one of {', '.join(BENCHES)}")
    code: int = import_module(f"moesaic_lab.cli.{words[0]}").run(words[1:])
    return code
