"""Chunk after chunk, as the program was built: what a layer does that was cut into chunks and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moesaic.program.task import Program


def fifo(
    program: Program, seconds: Callable[[], Mapping[str, float]] | None = None, *, host_runs_compute: bool = False
) -> Program:
    """Return the program as it is; `seconds` is not read."""
    return program
