"""Chunk after chunk, as the program was built: what a layer does that was cut into chunks and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from moesaic.program.task import Program


def fifo(program: Program, seconds: Mapping[str, float] | None = None) -> Program:
    """Return the program as it is; `seconds` is not read."""
    return program
