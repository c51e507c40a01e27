"""`Trace`: which experts the tokens of a run chose, per layer and step. Numpy only: plans are tried on it without torch.

Recorded by `moesaic train --record-routing`, or made up by `synthetic.py`; the files are `trace_file.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.file import Header, Holds, Segment, TraceShape, read_header, read_table

FOLDER = "routing"
"""Of a run's trace, in the run folder."""
PATTERN = "steps-*.npz"
"""Names of segments in a folder."""


def segment_name(first_step: int) -> str:
    """Return the file name of the segment that starts with a step."""
    return f"steps-{first_step:08d}.npz"


@dataclass(frozen=True)
class _Part:
    """A segment whose table is read when it is asked for."""

    steps: np.ndarray
    groups: int
    read: Callable[[], np.ndarray]


class Trace:
    """The choices of a run. Tables stay on the disk but for the one that was read last.

    Args:
        shape: of what was recorded.
        holds: whether tokens' experts are known, or only counts.
        parts: segments in the order of their steps.
        name: for messages.
    """

    def __init__(self, shape: TraceShape, holds: Holds, parts: Sequence[_Part], name: str) -> None:
        self.shape, self.holds, self.name = shape, holds, name
        self._parts = list(parts)
        self._place = {
            int(step): (number, row) for number, part in enumerate(parts) for row, step in enumerate(part.steps)
        }
        self._last: tuple[int, np.ndarray] | None = None

    @classmethod
    def of(cls, segment: Segment, name: str = "in memory") -> Trace:
        """Return the trace of one segment."""
        return cls(segment.shape, segment.holds, [_Part(segment.steps, segment.groups, lambda: segment.table)], name)

    @classmethod
    def open(cls, path: Path) -> Trace:
        """Open a trace: a file, a folder of segments, or the folder of a run that recorded one.

        Raises:
            InputError: if there is none, a segment is damaged, or segments are of different models.
        """
        headers = [read_header(segment) for segment in segments_of(path)]
        first = headers[0]
        for header in headers[1:]:
            _require_same(first, header)
        headers.sort(key=lambda header: int(header.steps[0]))
        for one, other in pairwise(headers):
            if one.steps[-1] >= other.steps[0]:
                raise InputError(
                    f"trace {path}: {one.path.name} and {other.path.name} both hold step {int(other.steps[0])}: remove one"
                )
        parts = [_Part(header.steps, header.groups, partial(read_table, header)) for header in headers]
        return cls(first.shape, first.holds, parts, str(path))

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
                f"trace {self.name}: holds counts only, not the tokens' experts: record it with --record-routing tokens"
            )
        return self._table(layer, step, micro)

    def loads(self) -> np.ndarray:
        """Return the copies for each expert, (steps, layers, num_experts) int64, micro-batches added up."""
        return np.array([self._load(step) for step in self.steps])

    def segments(self, source: dict[str, object] | None = None) -> Iterator[Segment]:
        """Yield the trace piece by piece, with its tables."""
        for number, part in enumerate(self._parts):
            yield Segment(self.shape, self.holds, part.steps, self._read(number), part.groups, source or {})

    def _load(self, step: int) -> np.ndarray:
        shape = self.shape
        micros = range(shape.accumulation)
        layers = range(shape.num_layers)
        return np.array([sum(self.samples(layer, step, micro).sum(0) for micro in micros) for layer in layers])

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
            self._last = (number, self._parts[number].read())
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
        "(moesaic train --record-routing counts)"
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
    names = [each.name for each in fields(shape)]
    return [
        f"{name}={getattr(shape, name)} (not {getattr(other, name)})"
        for name in names
        if getattr(shape, name) != getattr(other, name)
    ]


def _require_same(first: Header, header: Header) -> None:
    found = differences(header.shape, first.shape)
    if header.holds != first.holds:
        found.append(f"holds={header.holds} (not {first.holds})")
    if found:
        raise InputError(
            f"trace {header.path}: is of another model or run than {first.path.name}, {', '.join(found)}: "
            "keep the files of one run in a folder"
        )
