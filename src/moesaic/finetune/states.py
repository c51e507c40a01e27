"""The file of a checkpoint that holds what a rank needs to go on with the same bits: optimizer,
schedule, random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.errors import InputError
from moesaic.resuming import DamagedError
from moesaic.storage.nested import read_nested, write_nested

PATTERN = "states-*-of-*.safetensors"
"""Names of such files in a checkpoint."""


def states_name(rank: int, world: int) -> str:
    """Return the name of a rank's file."""
    return f"states-{rank}-of-{world}.safetensors"


def write_states(path: Path, states: dict[str, Any]) -> None:
    """Write a rank's states: nested dicts and lists of numbers, texts and tensors."""
    write_nested(path, states)


def read_states(path: Path) -> dict[str, Any]:
    """Return a rank's states, on the CPU.

    Raises:
        DamagedError: the file cannot be read as such.
    """
    try:
        states = read_nested(path)
    except InputError as error:
        raise DamagedError(f"{path.name} is damaged") from error
    if not (isinstance(states, dict) and states.keys() >= {"optimizer", "schedule", "random"}):
        raise DamagedError(f"{path.name} is damaged")
    return states
