"""Routing traces: the experts that the tokens of a run chose, per layer and step. Uses numpy only,
so planning needs no torch.

A trace is recorded by `moesaic train --record-routing counts`. It is a folder of `.npz` segments.
Each segment is complete by itself, so a run that is killed loses the last one at most. A segment
holds some steps of a run: a header (JSON: format, version, sizes, source), the numbers of the
steps, and one table in the smallest integer dtype that fits:

    counts   samples  (steps, accumulation, layers, sequences, num_experts)      copies, by expert
    tokens   experts  (steps, accumulation, layers, sequences * seq_len, top_k)  experts, best first

Experts give samples, and samples give counts per rank, since ranks have whole sequences. A choice
that the router decided not to send (GShard's second expert) is stored as -1 - expert: it is not
computed, but a replay needs it. A copy is a token on its way to one of its experts: a token has
top_k of them. A group is a data-parallel group of ranks; accumulation is the number of a step's
micro-batches.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moesaic.errors import InputError
from moesaic.files import entries, folder_below, write
from moesaic.traces.arrays import DAMAGED, read_arrays

FOLDER = "routing"
"""The subfolder of a run folder that holds the run's trace."""
PATTERN = "steps-*.npz"
"""The file names of segments."""


def segment_name(first_step: int) -> str:
    """Return the file name of the segment that starts with this step."""
    return f"steps-{first_step:08d}.npz"


class Trace:
    """The expert choices of a run. Of a trace on disk, only the table that was read last is in
    memory.

    Args:
        parts: the segments of one run in the order of their steps; a segment on disk is given by
            its header.
        name: what error messages call the trace.
    """

    def __init__(self, parts: Sequence[TraceSegment | Header], name: str) -> None:
        self.shape = parts[0].shape
        self.holds = parts[0].holds  # "counts" or "tokens", as in the module docstring
        self.name = name
        self._parts = parts
        self._place: dict[int, tuple[int, int]] = {}  # step -> (segment, its row there)
        for number, part in enumerate(parts):
            for row, step in enumerate(part.steps):
                self._place[int(step)] = (number, row)
        self._last: tuple[int, np.ndarray] | None = None
        """Number and table of the segment that was read last."""

    @classmethod
    def of(cls, segment: TraceSegment, name: str = "in memory") -> Trace:
        """Return a trace of one segment."""
        return cls([segment], name)

    @classmethod
    def open(cls, path: Path) -> Trace:
        """Open a trace.

        Args:
            path: a segment, a folder of segments, or the folder of a run that recorded a trace.

        Raises:
            InputError: there is no trace, a segment is damaged, two segments hold the same step, or
                segments differ in their sizes.
        """
        headers = [read_header(segment) for segment in segments_of(path)]
        for header in headers[1:]:
            _require_same(headers[0], header)
        headers.sort(key=lambda header: int(header.steps[0]))
        for previous, following in pairwise(headers):
            if previous.steps[-1] >= following.steps[0]:
                names = f"{previous.path.name} and {following.path.name}"
                raise InputError(
                    f"trace {path}: {names} both hold step {int(following.steps[0])}: remove one"
                )
        return cls(headers, str(path))

    @property
    def steps(self) -> list[int]:
        """The recorded optimizer steps, each by the number of steps taken before it."""
        return list(self._place)

    def samples(self, layer: int, step: int, micro: int = 0) -> np.ndarray:
        """Return the number of copies that each sequence has for each expert, (sequences,
        num_experts) int64.

        Args:
            layer: number of the MoE layer, from 0.
            step: one of `steps`.
            micro: number of the micro-batch in the step, from 0.
        """
        table = self._table(layer, step, micro)
        return table.astype(np.int64) if self.holds == "counts" else samples_of(table, self.shape)

    def counts(
        self, layer: int, step: int, micro: int = 0, *, groups: int | None = None
    ) -> np.ndarray:
        """Return the number of copies that each data-parallel group has for each expert, (groups,
        num_experts) int64.

        These are the counts that the simulator reads. Without tensor parallelism each rank is a
        group.

        Args:
            layer: number of the MoE layer, from 0.
            step: one of `steps`.
            micro: number of the micro-batch in the step, from 0.
            groups: the number of groups; each gets equally many consecutive sequences. None for the
                groups of the run.

        Raises:
            InputError: the number of groups does not divide the number of sequences.
        """
        num_groups = groups
        if num_groups is None:
            segment, _ = self._find(step)
            num_groups = self._parts[segment].groups
        if num_groups < 1 or self.shape.sequences % num_groups:
            raise InputError(
                f"trace {self.name}: {self.shape.sequences} sequences do not split into "
                f"{num_groups} groups: choose a divisor"
            )
        samples = self.samples(layer, step, micro)
        return samples.reshape(num_groups, -1, self.shape.num_experts).sum(axis=1)

    def experts(self, layer: int, step: int, micro: int = 0) -> np.ndarray:
        """Return every token's experts, best first, (sequences * seq_len, top_k); -1 - expert for
        choices that were not sent.

        Raises:
            InputError: the trace holds counts only.
        """
        if self.holds != "tokens":
            raise InputError(
                f"trace {self.name}: holds counts only, not the tokens' experts: record it "
                "with --record-routing tokens"
            )
        return self._table(layer, step, micro)

    def loads(self) -> np.ndarray:
        """Return the number of copies for each expert, (steps, layers, num_experts) int64,
        micro-batches added up."""
        shape = self.shape
        loads = np.zeros((len(self.steps), shape.num_layers, shape.num_experts), dtype=np.int64)
        for row, step in enumerate(self.steps):
            for layer in range(shape.num_layers):
                for micro in range(shape.accumulation):
                    loads[row, layer] += self.samples(layer, step, micro).sum(axis=0)
        return loads

    def segments(self, source: dict[str, object] | None = None) -> Iterator[TraceSegment]:
        """Yield the segments with their tables; each gets `source` in place of its own."""
        for number, part in enumerate(self._parts):
            yield TraceSegment(
                self.shape,
                self.holds,
                part.steps,
                table=self._read_segment(number),
                groups=part.groups,
                source=source or {},
            )

    def _table(self, layer: int, step: int, micro: int) -> np.ndarray:
        """Return what is recorded of a layer in a micro-batch of a step: counts, (sequences,
        num_experts), or experts, (tokens, top_k)."""
        for noun, index, size in (
            ("layer", layer, self.shape.num_layers),
            ("micro-batch", micro, self.shape.accumulation),
        ):
            if not 0 <= index < size:
                raise InputError(
                    f"trace {self.name}: has no {noun} {index}: choose 0 to {size - 1}"
                )
        number, row = self._find(step)
        table: np.ndarray = self._read_segment(number)[row, micro, layer]
        return table

    def _find(self, step: int) -> tuple[int, int]:
        """Return the number of the segment that holds a step, and the step's row in it."""
        if step not in self._place:
            raise InputError(
                f"trace {self.name}: has no step {step}, only {steps_in_words(self.steps)}"
            )
        return self._place[step]

    def _read_segment(self, number: int) -> np.ndarray:
        """Return the table of a segment, given its number; the last one that was read is kept."""
        if self._last is not None:
            last_number, last_table = self._last
            if last_number == number:
                return last_table
        part = self._parts[number]
        table = read_table(part) if isinstance(part, Header) else part.table
        self._last = (number, table)
        return table


def segments_of(path: Path) -> list[Path]:
    """Return the segment files of a trace, sorted by name.

    Raises:
        InputError: the folder holds no segments.
    """
    if not path.is_dir():
        return [path]
    for folder in (path / FOLDER, path):
        segments = entries(folder, PATTERN, typed=folder == path)
        if segments:
            return segments
    raise InputError(
        f"trace {path}: holds no {PATTERN}: name a trace, or the folder of a run that recorded one "
        "(moesaic train --record-routing counts)"
    )


def samples_of(experts: np.ndarray, shape: TraceShape) -> np.ndarray:
    """Count the copies of each sequence for each expert: (tokens, top_k) experts -> (sequences,
    num_experts) int64."""
    sequence_of_token = np.arange(shape.tokens) // shape.seq_len
    # the cell of each copy in the flat result; what was not sent, below 0, is not counted
    cell = sequence_of_token[:, None] * shape.num_experts + experts.astype(np.int64)
    counts = np.bincount(cell[experts >= 0], minlength=shape.sequences * shape.num_experts)
    return counts.reshape(shape.sequences, shape.num_experts)


def steps_in_words(steps: Sequence[int]) -> str:
    """Return steps as text: "0 to 49 and 60 to 99", or the number of steps and their range if there
    are many runs."""
    runs: list[list[int]] = []  # consecutive steps
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    words = []
    for run in runs:
        words.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    if len(words) > 4:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return " and ".join(words)


def differences(shape: TraceShape, other: TraceShape) -> list[str]:
    """Return the sizes in which a trace differs from another trace or a model, each as
    "num_experts=16 (not 64)"."""
    sizes = asdict(shape)
    other_sizes = asdict(other)
    return [
        f"{name}={size} (not {other_sizes[name]})"
        for name, size in sizes.items()
        if size != other_sizes[name]
    ]


def _require_same(first: Header, header: Header) -> None:
    """Refuse segments of different models or runs."""
    differing = differences(header.shape, first.shape)
    if header.holds != first.holds:
        differing.append(f"holds={header.holds} (not {first.holds})")
    if differing:
        raise InputError(
            f"trace {header.path}: is of another model or run than {first.path.name}, "
            f"{', '.join(differing)}: keep the files of one run in a folder"
        )


FORMAT = "moesaic routing trace"
VERSION = 1
"""The version of the segment format; newer files are refused."""
Holds = Literal["counts", "tokens"]
TABLES: dict[Holds, str] = {"counts": "samples", "tokens": "experts"}
"""The name of the table in a segment file."""


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """The sizes of a trace. All its segments have the same sizes, and so must a model that replays
    the trace."""

    num_layers: int
    """Number of MoE layers."""
    num_experts: int
    """Experts per layer."""
    top_k: int
    """Experts per token."""
    sequences: int
    """Sequences per micro-batch, over all ranks."""
    seq_len: int
    """Tokens per sequence."""
    accumulation: int = 1
    """Micro-batches per step."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"trace: {name}={value!r}: must be a whole number of at least 1")
        if self.top_k > self.num_experts:
            raise InputError(
                f"trace: top_k={self.top_k}: choose at most num_experts={self.num_experts}"
            )

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch, over all ranks."""
        return self.sequences * self.seq_len

    def table(self, holds: Holds) -> tuple[int, ...]:
        """Return the shape of a step's table."""
        if holds == "counts":
            return (self.accumulation, self.num_layers, self.sequences, self.num_experts)
        return (self.accumulation, self.num_layers, self.tokens, self.top_k)

    def dtype(self, holds: Holds) -> np.dtype[Any]:
        """Return the smallest integer dtype of a table; a sequence has at most `seq_len` copies for
        an expert, and a choice that was not sent is -1 - expert, at least -num_experts."""
        return np.min_scalar_type(self.seq_len if holds == "counts" else -self.num_experts)

    def bytes_per_step(self, holds: Holds) -> int:
        """Return the bytes of a step's table before compression."""
        return int(np.prod(self.table(holds))) * self.dtype(holds).itemsize


@dataclass(frozen=True)
class TraceSegment:
    """Some steps of a trace."""

    shape: TraceShape
    holds: Holds
    steps: np.ndarray
    """(steps,) int64, ascending: each step by the number of optimizer steps taken before it."""
    table: np.ndarray
    """(steps, *shape.table(holds))."""
    groups: int = 1
    """Data-parallel groups of the run; each had equally many consecutive sequences."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the trace, such as the mesh and the router; for information only."""

    def before(self, step: int) -> TraceSegment:
        """Return the steps before `step`."""
        count = int(np.searchsorted(self.steps, step))
        return TraceSegment(
            self.shape,
            self.holds,
            steps=self.steps[:count],
            table=self.table[:count],
            groups=self.groups,
            source=self.source,
        )


@dataclass(frozen=True)
class Header:
    """A segment on disk without its table; see `TraceSegment` for the fields."""

    path: Path
    shape: TraceShape
    holds: Holds
    steps: np.ndarray
    """(steps,) int64."""
    groups: int
    source: Mapping[str, Any]


def write_segment(segment: TraceSegment, path: Path, *, typed: bool = False) -> None:
    """Write a segment, whole or not at all; `typed` says that a user typed the path, which may then
    be a link.

    Raises:
        InputError: the file cannot be written; an earlier file at `path` is kept.
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        "shape": asdict(segment.shape),
        "holds": segment.holds,
        "groups": segment.groups,
        "source": dict(segment.source),
    }
    table = {TABLES[segment.holds]: segment.table.astype(segment.shape.dtype(segment.holds))}
    data = io.BytesIO()
    np.savez_compressed(
        data, allow_pickle=False, header=np.array(json.dumps(header)), steps=segment.steps, **table
    )
    try:
        if typed:
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            folder_below(path.parent)  # made, and refused if it is a link
        write(path, data.getvalue(), typed=typed)
    except OSError as error:
        raise InputError(
            f"trace {path}: cannot be written ({error.strerror}): free space or choose "
            "another place"
        ) from error


def read_header(path: Path) -> Header:
    """Read the header of a segment, without its table.

    Raises:
        InputError: the file is missing, damaged, not a trace, or of a newer version.
    """
    arrays = _read_arrays(path, ("header", "steps"))
    try:
        header = json.loads(str(arrays["header"]))
        is_trace = (
            isinstance(header, dict)
            and header.get("format") == FORMAT
            and type(header.get("version")) is int
        )
    except (ValueError, RecursionError):
        is_trace = False
    if not is_trace:
        raise InputError(
            f"trace {path}: is not a routing trace: make one with moesaic train "
            "--record-routing counts"
        )
    if header["version"] > VERSION:
        raise InputError(
            f"trace {path}: has version {header['version']}, this Moesaic reads up to "
            f"{VERSION}: upgrade it"
        )
    try:
        shape = TraceShape(**header["shape"])
        segment = Header(
            path,
            shape,
            holds=header["holds"],
            steps=arrays["steps"],
            groups=int(header["groups"]),
            source=header["source"],
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"trace {path}: its header is damaged ({error}): record it again"
        ) from error
    holds_table = isinstance(segment.holds, str) and segment.holds in TABLES
    if not holds_table or not _are_ascending(segment.steps):
        raise InputError(
            f"trace {path}: its header is damaged (holds {segment.holds}, steps not "
            "ascending): record it again"
        )
    return segment


def _are_ascending(steps: np.ndarray) -> bool:
    """Return whether an array of any form has steps in ascending order, at least one."""
    if steps.dtype.kind not in "iu" or steps.ndim != 1 or not len(steps):
        return False
    return not (np.diff(steps) <= 0).any()


def read_table(header: Header) -> np.ndarray:
    """Read a segment's table, (steps, *shape.table(holds)).

    Raises:
        InputError: the file is damaged, or the table does not fit the header.
    """
    path = header.path
    shape = header.shape
    name = TABLES[header.holds]
    table = _read_arrays(path, (name,))[name]
    expected = (len(header.steps), *shape.table(header.holds))
    if table.shape != expected:
        raise InputError(
            f"trace {path}: its table has shape {table.shape}, its header says {expected}: "
            "record it again"
        )
    if header.holds == "counts":
        low = 0
        high = shape.seq_len
    else:
        low = -shape.num_experts  # -1 - expert for the last expert
        high = shape.num_experts - 1
    if table.dtype.kind not in "iu" or (table < low).any() or (table > high).any():
        raise InputError(
            f"trace {path}: its table holds other values than whole numbers from {low} to "
            f"{high}: record it again"
        )
    return table


def _read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read the named arrays of an `.npz` file."""
    try:
        return read_arrays(path, names)
    except FileNotFoundError as error:
        raise InputError(
            f"trace {path}: no such file: name a trace, or the folder of a run that recorded one"
        ) from error
    except DAMAGED as error:
        raise InputError(
            f"trace {path}: is damaged or cut short: remove the file and use the other steps, "
            "or record it again"
        ) from error
    except KeyError as error:  # another .npz
        raise InputError(
            f"trace {path}: is not a routing trace: make one with moesaic train "
            "--record-routing counts"
        ) from error
