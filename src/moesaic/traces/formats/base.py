"""The interface of foreign trace formats: a reader that returns one segment of a `Trace`, and a writer."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.trace import Trace, TraceSegment, TraceShape

DAMAGED = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError,
    TokenError, BadZipFile, csv.Error, zlib.error,
)  # fmt: skip
"""The exceptions of json, csv, numpy and gzip for files that are damaged or have unexpected contents."""


MOST_EXPERTS = 1 << 20
"""The most experts of a layer that are believed; a file with more is damaged."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Facts that a foreign file does not contain, and which of its recordings to read."""

    num_experts: int | None = None
    """Experts per layer; None for the largest number in the file, plus one."""
    top_k: int | None = None
    """Experts per token, for files that do not tell tokens apart."""
    method: str | None = None
    """The recorded system to read, if a LAER file has several."""
    model: str | None = None
    """The recorded model to read, if a LAER file has several."""


@dataclass(frozen=True, kw_only=True)
class TraceFormat:
    """A trace format of other software."""

    about: str
    """One line of help: the software, a colon, and the contents of a file or folder."""
    reader: Callable[[Path, ReadOptions], TraceSegment]
    """Reads a file or folder. Exceptions in `DAMAGED` are turned into an `InputError` by `read`."""
    write: Callable[[Trace, Path], None]
    """Writes a trace; raises `InputError` for a trace of counts if the format needs tokens' experts."""

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
            software = self.about.partition(":")[0]
            raise InputError(
                f"trace {path}: is damaged, or not from {software} ({error!r:.200}): name a file that it wrote"
            ) from error


def counts_segment(table: np.ndarray, *, steps: Sequence[int], top_k: int, source: Mapping[str, Any]) -> TraceSegment:
    """Make a segment of counts.

    Args:
        table: (steps, accumulation, layers, sequences, num_experts) copies; all copies of a rank count as one sequence.
        steps: the numbers of the steps.
        top_k: experts per token.
        source: origin of the trace.

    Raises:
        InputError: the copies of the longest sequence are not a multiple of `top_k`, or an expert has more copies than tokens.
    """
    _, accumulation, layers, sequences, num_experts = table.shape
    longest = int(table.sum(-1).max(initial=0))
    if longest % top_k:
        raise InputError(f"trace: {longest} copies are not a multiple of top_k={top_k}: give the right --top-k")
    shape = TraceShape(
        num_layers=layers, num_experts=num_experts, top_k=top_k, sequences=sequences, seq_len=max(longest // top_k, 1),
        accumulation=accumulation,
    )  # fmt: skip
    if table.max(initial=0) > shape.seq_len:
        raise InputError(
            f"trace: an expert has more copies than there are tokens with top_k={top_k}: give a smaller --top-k"
        )
    return TraceSegment(shape, "counts", np.array(steps, dtype=np.int64), table, sequences, source)


def tokens_segment(
    table: np.ndarray, *, steps: Sequence[int], sequences: int, num_experts: int | None, source: Mapping[str, Any]
) -> TraceSegment:
    """Make a segment of tokens' experts.

    Args:
        table: (steps, accumulation, layers, tokens, top_k) experts.
        steps: the numbers of the steps.
        sequences: the number of equally long sequences in the tokens; each becomes a data-parallel group.
        num_experts: experts per layer; None for the largest number in the table plus one.
        source: origin of the trace.

    Raises:
        InputError: an expert's number is negative or not below `num_experts`.
    """
    _, accumulation, layers, tokens, top_k = table.shape
    least_experts = int(table.max(initial=0)) + 1
    experts = max(least_experts, top_k) if num_experts is None else num_experts
    check_experts(experts)
    if experts < least_experts or table.min(initial=0) < 0:
        raise InputError(
            f"trace: its experts are numbered {table.min()} to {least_experts - 1}: give --num-experts {least_experts} or more"
        )
    shape = TraceShape(
        num_layers=layers, num_experts=experts, top_k=top_k, sequences=sequences, seq_len=tokens // sequences,
        accumulation=accumulation,
    )  # fmt: skip
    return TraceSegment(shape, "tokens", np.array(steps, dtype=np.int64), table, sequences, source)


def check_experts(number: int) -> None:
    """Raise InputError for an implausible number of experts, before tables of that size are allocated."""
    if number > MOST_EXPERTS:
        raise InputError(
            f"trace: {number:,} experts in a layer are not possible, at most {MOST_EXPERTS:,} are: correct the file"
        )


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain or .gz, without line ends.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from (line.rstrip("\n") for line in file)
    except DAMAGED as error:
        raise InputError(f"trace {path}: cannot be read ({error}): name the file that was recorded") from error


def files_by_number(path: Path, pattern: str) -> dict[tuple[int, ...], Path]:
    """Return the files with names that match a pattern, by the numbers in their names, ascending.

    Args:
        path: a folder, or one file.
        pattern: a regular expression of the whole name, with a group for each number.

    Raises:
        InputError: no file matches.
    """
    candidates = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    files = {}
    for file in candidates:
        match = re.fullmatch(pattern, file.name)
        if match:
            files[tuple(map(int, match.groups()))] = file
    if not files:
        raise InputError(f"trace {path}: holds no file named like {pattern}: name the folder that was recorded")
    return dict(sorted(files.items()))


def require_tokens(trace: Trace, name: str) -> None:
    """Check that a trace holds tokens' experts, which the format `name` needs.

    Raises:
        InputError: the trace holds counts.
    """
    if trace.holds != "tokens":
        raise InputError(
            f"trace {trace.name}: holds counts only, and {name} holds tokens' experts: convert to laer or smartmoe"
        )


def sent(experts: np.ndarray) -> np.ndarray:
    """Return the plain numbers of experts, including unsent choices, which no foreign format can mark."""
    return np.where(experts < 0, -1 - experts, experts)
