"""The interface of foreign trace formats: a reader that returns one segment of a `Trace`, and a
writer.

A format records either each token's experts, or counts of copies; `moesaic.traces.trace` says what
a segment, its table and its sizes are. Foreign files do not say which tokens are a sequence: the
tokens of a rank, or of a request, become one. `typed` says that a user typed a path, which may then
be a link.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import InputError
from moesaic.files import entries, open_file
from moesaic.traces import arrays
from moesaic.traces.trace import Trace, TraceSegment, TraceShape

DAMAGED = (
    *arrays.DAMAGED,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""The exceptions of json and numpy for files that are damaged or have unexpected contents."""
MOST_EXPERTS = 1 << 20
"""The most experts of a layer that are believed; a file with more is damaged."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Facts that a foreign file does not contain."""

    num_experts: int | None = None
    """Experts per layer; None for the largest number in the file, plus one."""
    top_k: int | None = None
    """Experts per token, for tables of counts and for responses of SGLang without their shape."""


@dataclass(frozen=True, kw_only=True)
class TraceFormat:
    """A trace format of other software."""

    software: str
    """The name of the software."""
    reader: Callable[[Path, ReadOptions], TraceSegment]
    """Reads a file or folder. Exceptions in `DAMAGED` are turned into an `InputError` by `read`."""
    write: Callable[[Trace, Path], None]
    """Writes a trace; raises `InputError` for a trace of counts if the format needs tokens'
    experts."""

    def read(self, path: Path, options: ReadOptions) -> TraceSegment:
        """Read a file or folder.

        Raises:
            InputError: the file is damaged or of another format.
        """
        try:
            return self.reader(path, options)
        except InputError:
            raise
        except DAMAGED as error:
            raise InputError(
                f"trace {path}: is damaged, or not from {self.software} ({error!r:.200}): "
                "name a file that it wrote"
            ) from error


def tokens_segment(
    table: np.ndarray,
    *,
    steps: Sequence[int],
    sequences: int,
    num_experts: int | None,
    source: Mapping[str, Any],
) -> TraceSegment:
    """Make a segment of tokens' experts.

    Args:
        table: (steps, accumulation, layers, tokens, top_k) experts.
        steps: the numbers of the steps.
        sequences: the number of equally long sequences in the tokens; each becomes a data-parallel
            group.
        num_experts: experts per layer; None for the largest number in the table plus one.
        source: origin of the trace.

    Raises:
        InputError: an expert's number is negative or not below `num_experts`, or a token has one
            twice.
    """
    _, accumulation, layers, tokens, top_k = table.shape
    if num_experts is None:
        num_experts = max(int(table.max(initial=0)) + 1, top_k)  # a token has top_k different ones
    if num_experts > MOST_EXPERTS:
        raise InputError(
            f"trace: {num_experts:,} experts in a layer are not possible, at most "
            f"{MOST_EXPERTS:,} are: correct the file"
        )
    _check_experts(table, num_experts)
    shape = TraceShape(
        num_layers=layers,
        num_experts=num_experts,
        top_k=top_k,
        sequences=sequences,
        seq_len=tokens // sequences,
        accumulation=accumulation,
    )
    return TraceSegment(
        shape,
        holds="tokens",
        steps=np.array(steps, dtype=np.int64),
        table=table,
        groups=sequences,
        source=source,
    )


def _check_experts(table: np.ndarray, num_experts: int) -> None:
    """Raise InputError, as `tokens_segment` does, for experts that do not exist or come twice."""
    if table.min(initial=0) < 0:
        raise InputError(
            f"trace: it has expert {table.min()}, as recorders write for padding and for dropped "
            "copies, which have no expert: record tokens without padding, or leave those tokens "
            "out"
        )
    least_experts = int(table.max(initial=0)) + 1
    if num_experts < least_experts:
        raise InputError(
            f"trace: its experts are numbered up to {least_experts - 1}: give --num-experts "
            f"{least_experts} or more"
        )
    if (np.diff(np.sort(table, axis=-1)) == 0).any():
        raise InputError(
            "trace: a token has an expert twice, as padding has, of 0 or of -1 without a sign: "
            "record tokens without padding, or leave those tokens out"
        )


def counts_segment(
    path: Path, table: np.ndarray, steps: Sequence[int], top_k: int, source: Mapping[str, Any]
) -> TraceSegment:
    """Make a segment of counts, in which the copies of a rank are one sequence.

    Args:
        path: the file, for errors.
        table: (steps, accumulation, layers, ranks, num_experts) copies.
        steps: the numbers of the steps.
        top_k: experts per token.
        source: origin of the trace.

    Raises:
        InputError: the copies do not fit `top_k`.
    """
    try:
        table = table.astype(np.int64)
        numbers = np.array(steps, dtype=np.int64)
    except OverflowError as error:
        raise InputError(
            f"trace {path}: has a number that no run reaches ({error}): correct it"
        ) from error
    _, accumulation, layers, sequences, num_experts = table.shape
    # A rank's tokens have top_k copies each, so the longest sequence tells the number of tokens.
    most_copies = int(table.sum(-1).max(initial=0))
    if most_copies % top_k:
        raise InputError(
            f"trace {path}: {most_copies} copies are not a multiple of top_k={top_k}: give the "
            "right --top-k"
        )
    shape = TraceShape(
        num_layers=layers,
        num_experts=num_experts,
        top_k=top_k,
        sequences=sequences,
        seq_len=max(most_copies // top_k, 1),
        accumulation=accumulation,
    )
    if table.max(initial=0) > shape.seq_len:
        raise InputError(
            f"trace {path}: an expert has more copies than there are tokens with "
            f"top_k={top_k}: give a smaller --top-k"
        )
    return TraceSegment(
        shape, holds="counts", steps=numbers, table=table, groups=sequences, source=source
    )


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, without line ends.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open_file(path) as file:
            yield from (line.decode().rstrip("\r\n") for line in file)
    except DAMAGED as error:
        raise InputError(
            f"trace {path}: cannot be read ({error}): name the file that was recorded"
        ) from error


def files_by_number(path: Path, pattern: str) -> dict[tuple[int, ...], Path]:
    """Return the files with names that match a pattern, by the numbers in their names, ascending.

    Args:
        pattern: a regular expression of the whole name, with a group for each number.

    Raises:
        InputError: no file matches.
    """
    candidates = [path] if path.is_file() else []
    if path.is_dir():
        candidates = entries(path, typed=True)
    files = {}
    for file in candidates:
        match = re.fullmatch(pattern, file.name)
        if match:
            numbers = tuple(int(number) for number in match.groups())
            files[numbers] = file
    if not files:
        raise InputError(
            f"trace {path}: holds no file named like {pattern}: name the folder that was recorded"
        )
    return dict(sorted(files.items()))


def require_tokens(trace: Trace, name: str) -> None:
    """Check that a trace holds tokens' experts, which the format `name` needs.

    Raises:
        InputError: the trace holds counts.
    """
    if trace.holds != "tokens":
        raise InputError(
            f"trace {trace.name}: holds counts only, and {name} holds tokens' experts: record "
            "it with --record-routing tokens"
        )


def sent(experts: np.ndarray) -> np.ndarray:
    """Return the plain numbers of experts, including unsent choices, which no foreign format can
    mark."""
    return np.where(experts < 0, -1 - experts, experts)
