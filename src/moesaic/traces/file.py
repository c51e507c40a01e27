"""Files of routing traces: `.npz` segments, each whole by itself, so that a run that is killed loses the last one at most.

A segment holds some steps of a run: a header (JSON: format, version, the shape of what was recorded, how it was recorded),
the steps' numbers, and one table of the smallest integers that fit:

    counts   samples  (steps, accumulation, layers, sequences, num_experts)      copies of a sequence for an expert
    tokens   experts  (steps, accumulation, layers, sequences * seq_len, top_k)  a token's experts, best first

Counts per rank follow from the first, since a rank has whole sequences, and the first follows from the second. A choice
that its router held back (GShard's second one) is written as -1 - expert: nobody computes it, and a replay needs it.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moesaic.errors import InputError

FORMAT = "moesaic routing trace"
VERSION = 1
"""Of the files; a reader refuses newer ones."""
Holds = Literal["counts", "tokens"]
TABLES: dict[Holds, str] = {"counts": "samples", "tokens": "experts"}
"""The name of the table in a segment."""


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """What decides the sizes of a trace. A model that replays it, and all its segments, have the same."""

    num_layers: int
    """MoE layers."""
    num_experts: int
    """Experts of a layer."""
    top_k: int
    """Experts per token."""
    sequences: int
    """Sequences of a micro-batch, over all ranks."""
    seq_len: int
    """Tokens of a sequence."""
    accumulation: int = 1
    """Micro-batches of a step."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"trace: {name}={value!r}: must be a whole number of at least 1")
        if self.top_k > self.num_experts:
            raise InputError(f"trace: top_k={self.top_k}: choose at most num_experts={self.num_experts}")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, over all ranks."""
        return self.sequences * self.seq_len

    def table(self, holds: Holds) -> tuple[int, ...]:
        """Return the shape of a step's table."""
        last = (self.sequences, self.num_experts) if holds == "counts" else (self.tokens, self.top_k)
        return (self.accumulation, self.num_layers, *last)

    def dtype(self, holds: Holds) -> np.dtype[Any]:
        """Return the integers of a table; a sequence has at most `seq_len` copies for an expert."""
        return np.min_scalar_type(self.seq_len if holds == "counts" else -self.num_experts)

    def bytes_per_step(self, holds: Holds) -> int:
        """Return the bytes of a step's table, before the file is compressed."""
        return int(np.prod(self.table(holds))) * self.dtype(holds).itemsize


@dataclass(frozen=True)
class Segment:
    """Some steps of a trace."""

    shape: TraceShape
    holds: Holds
    steps: np.ndarray
    """(steps,) int64: optimizer steps taken before each one, ascending."""
    table: np.ndarray
    """(steps, *shape.table(holds))."""
    groups: int = 1
    """Data-parallel groups of the run; each had as many consecutive sequences."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: the mesh, the router; for people."""

    def before(self, step: int) -> Segment:
        """Return the part before a step."""
        kept = int(np.searchsorted(self.steps, step))
        return Segment(self.shape, self.holds, self.steps[:kept], self.table[:kept], self.groups, self.source)


@dataclass(frozen=True)
class Header:
    """What is known of a segment before its table is read."""

    path: Path
    shape: TraceShape
    holds: Holds
    steps: np.ndarray
    """(steps,) int64."""
    groups: int
    source: Mapping[str, Any]


def write_segment(segment: Segment, path: Path) -> None:
    """Write a segment: aside, flushed to the disk, then renamed, so that a file with its name is whole.

    Raises:
        InputError: if it cannot be written; an earlier file of the name stays.
    """
    header = {
        "format": FORMAT, "version": VERSION, "shape": asdict(segment.shape), "holds": segment.holds,
        "groups": segment.groups, "source": dict(segment.source),
    }  # fmt: skip
    table = {TABLES[segment.holds]: segment.table.astype(segment.shape.dtype(segment.holds))}
    data = io.BytesIO()
    np.savez_compressed(data, allow_pickle=False, header=np.array(json.dumps(header)), steps=segment.steps, **table)
    aside = path.with_name(f".writing-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise InputError(
            f"trace {path}: cannot be written ({error.strerror}): free space or choose another place"
        ) from error


def read_header(path: Path) -> Header:
    """Read what a segment is, without its table.

    Raises:
        InputError: if it is missing, damaged, no trace, or of a newer version.
    """
    arrays = _read(path, ("header", "steps"))
    try:
        header = json.loads(str(arrays["header"]))
        known = isinstance(header, dict) and header["format"] == FORMAT
    except (ValueError, KeyError):
        known = False
    if not known:
        raise InputError(f"trace {path}: is no routing trace: make one with moesaic train --record-routing counts")
    if header["version"] > VERSION:
        raise InputError(
            f"trace {path}: has version {header['version']}, this Moesaic reads up to {VERSION}: upgrade it"
        )
    try:
        shape = TraceShape(**header["shape"])
        found = Header(path, shape, header["holds"], arrays["steps"], int(header["groups"]), header["source"])
    except (KeyError, TypeError) as error:
        raise InputError(f"trace {path}: its header is damaged ({error}): record it again") from error
    steps = found.steps
    if found.holds not in TABLES or steps.ndim != 1 or not len(steps) or (np.diff(steps) <= 0).any():
        raise InputError(
            f"trace {path}: its header is damaged (holds {found.holds}, steps not ascending): record it again"
        )
    return found


def read_table(header: Header) -> np.ndarray:
    """Read a segment's table, (steps, *shape.table(holds)).

    Raises:
        InputError: if it is damaged, or not what the header says.
    """
    path, shape, name = header.path, header.shape, TABLES[header.holds]
    table = _read(path, (name,))[name]
    wanted = (len(header.steps), *shape.table(header.holds))
    if table.shape != wanted:
        raise InputError(f"trace {path}: its table has shape {table.shape}, its header says {wanted}: record it again")
    low, high = (0, shape.seq_len) if header.holds == "counts" else (-shape.num_experts, shape.num_experts - 1)
    if table.dtype.kind not in "iu" or (table < low).any() or (table > high).any():
        raise InputError(f"trace {path}: its table holds more than whole numbers from {low} to {high}: record it again")
    return table


def _read(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read arrays of a file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except FileNotFoundError as error:
        raise InputError(
            f"trace {path}: no such file: name a trace, or the folder of a run that recorded one"
        ) from error
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"trace {path}: is damaged or cut short: remove the file and use the other steps, or record it again"
        ) from error
    except (KeyError, AttributeError, TypeError) as error:  # another .npz, or an .npy
        raise InputError(
            f"trace {path}: is no routing trace: make one with moesaic train --record-routing counts"
        ) from error
