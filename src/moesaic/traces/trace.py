"""`Trace`: which experts the tokens of a run chose, per layer and step. Numpy only: plans are tried on it without torch.

A trace is recorded by `moesaic train --routing record:counts`, or made up by `synthetic.py`.

A trace is a folder of files: `.npz` segments, each whole by itself, so that a run that is killed loses the last one at most. A
segment holds some steps of a run: a header (JSON: format, version, the shape of what was recorded, how it was recorded), the
steps' numbers, and one table of the smallest integers that fit:

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np

from moesaic.errors import InputError

FOLDER = "routing"
"""Of a run's trace, in the run folder."""
PATTERN = "steps-*.npz"
"""Names of segments in a folder."""


def segment_name(first_step: int) -> str:
    """Return the file name of the segment that starts with a step."""
    return f"steps-{first_step:08d}.npz"


class Trace:
    """The choices of a run. Tables stay on the disk but for the one that was read last.

    Args:
        parts: segments of one run in the order of their steps; of one on the disk its header.
        name: for messages.
    """

    def __init__(self, parts: Sequence[TraceSegment | Header], name: str) -> None:
        self.shape, self.holds, self.name = parts[0].shape, parts[0].holds, name
        self._parts = parts
        self._place = {
            int(step): (number, row) for number, part in enumerate(parts) for row, step in enumerate(part.steps)
        }
        self._last: tuple[int, np.ndarray] | None = None

    @classmethod
    def of(cls, segment: TraceSegment, name: str = "in memory") -> Trace:
        """Return the trace of one segment."""
        return cls([segment], name)

    @classmethod
    def open(cls, path: Path) -> Trace:
        """Open a trace: a file, a folder of segments, or the folder of a run that recorded one.

        Raises:
            InputError: if there is none, a segment is damaged, or segments are of different models.
        """
        headers = [read_header(segment) for segment in segments_of(path)]
        for header in headers[1:]:
            _require_same(headers[0], header)
        headers.sort(key=lambda header: int(header.steps[0]))
        for one, other in pairwise(headers):
            if one.steps[-1] >= other.steps[0]:
                raise InputError(
                    f"trace {path}: {one.path.name} and {other.path.name} both hold step {int(other.steps[0])}: remove one"
                )
        return cls(headers, str(path))

    @property
    def steps(self) -> list[int]:
        """The optimizer steps that it holds, each named by how many were taken before it."""
        return list(self._place)

    def samples(self, layer: int, step: int, micro: int = 0) -> np.ndarray:
        """Return the copies that each sequence has for each expert, (sequences, num_experts) int64.

        Args:
            layer: MoE layer, from 0.
            step: one of `steps`.
            micro: micro-batch of the step.
        """
        table = self._table(layer, step, micro)
        return table.astype(np.int64) if self.holds == "counts" else samples_of(table, self.shape)

    def counts(self, layer: int, step: int, micro: int = 0, *, groups: int | None = None) -> np.ndarray:
        """Return the copies that each data-parallel group has for each expert, (groups, num_experts) int64.

        That is what the simulator takes as counts. Without tensor parallelism each rank is a group.

        Args:
            layer: MoE layer, from 0.
            step: one of `steps`.
            micro: micro-batch of the step.
            groups: into how many groups the sequences are dealt, in their order; None for as many as the run had.

        Raises:
            InputError: if the sequences do not split into so many groups.
        """
        wanted = self._parts[self._find(step)[0]].groups if groups is None else groups
        if wanted < 1 or self.shape.sequences % wanted:
            raise InputError(
                f"trace {self.name}: {self.shape.sequences} sequences do not split into {wanted} groups: choose a divisor"
            )
        return self.samples(layer, step, micro).reshape(wanted, -1, self.shape.num_experts).sum(axis=1)

    def experts(self, layer: int, step: int, micro: int = 0) -> np.ndarray:
        """Return every token's experts, best first, (sequences * seq_len, top_k); -1 - expert where it was not sent.

        Raises:
            InputError: if the trace holds counts only.
        """
        if self.holds != "tokens":
            raise InputError(
                f"trace {self.name}: holds counts only, not the tokens' experts: record it with --routing record:tokens"
            )
        return self._table(layer, step, micro)

    def loads(self) -> np.ndarray:
        """Return the copies for each expert, (steps, layers, num_experts) int64, micro-batches added up."""
        layers, micros = range(self.shape.num_layers), range(self.shape.accumulation)
        return np.array(
            [
                [sum(self.samples(layer, step, micro).sum(0) for micro in micros) for layer in layers]
                for step in self.steps
            ]
        )

    def segments(self, source: dict[str, object] | None = None) -> Iterator[TraceSegment]:
        """Yield the trace piece by piece, with its tables."""
        for number, part in enumerate(self._parts):
            yield TraceSegment(self.shape, self.holds, part.steps, self._read(number), part.groups, source or {})

    def _table(self, layer: int, step: int, micro: int) -> np.ndarray:
        for what, index, size in (
            ("layer", layer, self.shape.num_layers), ("micro-batch", micro, self.shape.accumulation)
        ):  # fmt: skip
            if not 0 <= index < size:
                raise InputError(f"trace {self.name}: has no {what} {index}: choose 0 to {size - 1}")
        number, row = self._find(step)
        table: np.ndarray = self._read(number)[row, micro, layer]
        return table

    def _find(self, step: int) -> tuple[int, int]:
        if step not in self._place:
            raise InputError(f"trace {self.name}: has no step {step}, only {steps_in_words(self.steps)}")
        return self._place[step]

    def _read(self, number: int) -> np.ndarray:
        if self._last is None or self._last[0] != number:
            part = self._parts[number]
            self._last = (number, read_table(part) if isinstance(part, Header) else part.table)
        return self._last[1]


def segments_of(path: Path) -> list[Path]:
    """Return the files of a trace, in their order.

    Raises:
        InputError: if a folder holds none.
    """
    if not path.is_dir():
        return [path]
    for folder in (path / FOLDER, path):
        found = sorted(folder.glob(PATTERN))
        if found:
            return found
    raise InputError(
        f"trace {path}: holds no {PATTERN}: name a trace, or the folder of a run that recorded one "
        "(moesaic train --routing record:counts)"
    )


def samples_of(experts: np.ndarray, shape: TraceShape) -> np.ndarray:
    """Count the copies that sequences have for experts, (sequences, num_experts) int64, from (tokens, top_k) experts."""
    sequence = np.arange(shape.tokens) // shape.seq_len
    cell = sequence[:, None] * shape.num_experts + experts.astype(np.int64)
    counted = np.bincount(cell[experts >= 0], minlength=shape.sequences * shape.num_experts)
    return counted.reshape(shape.sequences, shape.num_experts)


def steps_in_words(steps: Sequence[int]) -> str:
    """Return steps as runs, "0 to 49 and 60 to 99"."""
    cuts = [place for place in range(1, len(steps)) if steps[place] != steps[place - 1] + 1]
    runs = [(steps[a], steps[b - 1]) for a, b in zip([0, *cuts], [*cuts, len(steps)])]
    words = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    if len(words) > 4:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return " and ".join(words)


def differences(shape: TraceShape, other: TraceShape) -> list[str]:
    """Return in which sizes two traces, or a trace and a model, differ: "num_experts=16 (not 64)"."""
    pairs = zip(asdict(shape).items(), asdict(other).values())
    return [f"{name}={value} (not {others})" for (name, value), others in pairs if value != others]


def _require_same(first: Header, header: Header) -> None:
    found = differences(header.shape, first.shape)
    if header.holds != first.holds:
        found.append(f"holds={header.holds} (not {first.holds})")
    if found:
        raise InputError(
            f"trace {header.path}: is of another model or run than {first.path.name}, {', '.join(found)}: "
            "keep the files of one run in a folder"
        )


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
class TraceSegment:
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

    def before(self, step: int) -> TraceSegment:
        """Return the part before a step."""
        kept = int(np.searchsorted(self.steps, step))
        return TraceSegment(self.shape, self.holds, self.steps[:kept], self.table[:kept], self.groups, self.source)


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


def write_segment(segment: TraceSegment, path: Path) -> None:
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
        known = isinstance(header, dict) and header.get("format") == FORMAT and type(header.get("version")) is int
    except (ValueError, RecursionError):
        known = False
    if not known:
        raise InputError(f"trace {path}: is no routing trace: make one with moesaic train --routing record:counts")
    if header["version"] > VERSION:
        raise InputError(
            f"trace {path}: has version {header['version']}, this Moesaic reads up to {VERSION}: upgrade it"
        )
    try:
        shape = TraceShape(**header["shape"])
        found = Header(path, shape, header["holds"], arrays["steps"], int(header["groups"]), header["source"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"trace {path}: its header is damaged ({error}): record it again") from error
    steps = found.steps
    if (
        not isinstance(found.holds, str)
        or found.holds not in TABLES
        or steps.dtype.kind not in "iu"
        or steps.ndim != 1
        or not len(steps)
        or (np.diff(steps) <= 0).any()
    ):
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
            found = {name: file[name] for name in names}
            # A member that is no array comes as bytes.
            if not all(isinstance(array, np.ndarray) for array in found.values()):
                raise TypeError("a member is no array")
            return found
    except FileNotFoundError as error:
        raise InputError(
            f"trace {path}: no such file: name a trace, or the folder of a run that recorded one"
        ) from error
    except (
        OSError,
        EOFError,
        ValueError,
        MemoryError,
        TokenError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise InputError(
            f"trace {path}: is damaged or cut short: remove the file and use the other steps, or record it again"
        ) from error
    except (KeyError, AttributeError, TypeError) as error:  # another .npz, or an .npy
        raise InputError(
            f"trace {path}: is no routing trace: make one with moesaic train --routing record:counts"
        ) from error
