"""What a foreign format of routing traces is: a reader into one segment of a `Trace`, and a writer back."""

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
"""What json, csv, numpy and gzip raise for files that are damaged, or that hold something else than was thought."""


MOST_EXPERTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a foreign file does not say."""

    num_experts: int | None = None
    """Experts of a layer; None for the largest number in the file, plus one."""
    top_k: int | None = None
    """Experts per token, for files that do not tell tokens apart."""
    method: str | None = None
    """Which of several recorded systems (LAER)."""
    model: str | None = None
    """Which of several recorded models (LAER)."""


@dataclass(frozen=True, kw_only=True)
class TraceFormat:
    """A format that other software writes."""

    about: str
    """One line for people: whose, and what a file or folder holds."""
    reader: Callable[[Path, ReadOptions], TraceSegment]
    """Reads a file or folder; it may raise what is `DAMAGED` where it has no better words."""
    write: Callable[[Trace, Path], None]
    """Writes a trace; refuses one that lacks what the format holds."""

    def read(self, path: Path, options: ReadOptions) -> TraceSegment:
        """Read a file or folder.

        Raises:
            InputError: for one that is damaged or of another format; says what and where.
        """
        try:
            return self.reader(path, options)
        except InputError:
            raise
        except DAMAGED as error:
            whose = self.about.partition(":")[0]
            raise InputError(
                f"trace {path}: is damaged, or not of {whose} ({error!r:.200}): name what it wrote"
            ) from error


def counts_segment(table: np.ndarray, *, steps: Sequence[int], top_k: int, source: Mapping[str, Any]) -> TraceSegment:
    """Return a segment of counts.

    Args:
        table: (steps, accumulation, layers, sequences, num_experts) copies; a sequence is what one rank had.
        steps: their numbers.
        top_k: experts per token.
        source: where it comes from.

    Raises:
        InputError: if the largest sum is no multiple of `top_k`.
    """
    _, accumulation, layers, sequences, num_experts = table.shape
    most = int(table.sum(-1).max(initial=0))
    if most % top_k:
        raise InputError(f"trace: {most} copies are no multiple of top_k={top_k}: give the right --top-k")
    shape = TraceShape(
        num_layers=layers, num_experts=num_experts, top_k=top_k, sequences=sequences, seq_len=max(most // top_k, 1),
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
    """Return a segment of tokens' experts.

    Args:
        table: (steps, accumulation, layers, tokens, top_k) experts.
        steps: their numbers.
        sequences: equally long, of all tokens; each is a group of its own.
        num_experts: of a layer; None for the largest number plus one.
        source: where it comes from.

    Raises:
        InputError: for an expert that there is not.
    """
    _, accumulation, layers, tokens, top_k = table.shape
    least = int(table.max(initial=0)) + 1
    experts = max(least, top_k) if num_experts is None else num_experts
    check_experts(experts)
    if experts < least or table.min(initial=0) < 0:
        raise InputError(
            f"trace: its experts are numbered {table.min()} to {least - 1}: give --num-experts {least} or more"
        )
    shape = TraceShape(
        num_layers=layers, num_experts=experts, top_k=top_k, sequences=sequences, seq_len=tokens // sequences,
        accumulation=accumulation,
    )  # fmt: skip
    return TraceSegment(shape, "tokens", np.array(steps, dtype=np.int64), table, sequences, source)


def check_experts(number: int) -> None:
    """Raise InputError for more experts than any layer has, of which tables would be made."""
    if number > MOST_EXPERTS:
        raise InputError(
            f"trace: {number:,} experts in a layer cannot be, {MOST_EXPERTS:,} are the most: correct the file"
        )


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain or ending in .gz, without their ends.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from (line.rstrip("\n") for line in file)
    except DAMAGED as error:
        raise InputError(f"trace {path}: cannot be read ({error}): name the file that was recorded") from error


def files_by_number(path: Path, pattern: str) -> dict[tuple[int, ...], Path]:
    """Return the files of a folder whose whole names match, by the numbers in the match, ascending; or the one file itself.

    Raises:
        InputError: if there is none.
    """
    folder = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    found = {}
    for each in folder:
        match = re.fullmatch(pattern, each.name)
        if match:
            found[tuple(map(int, match.groups()))] = each
    if not found:
        raise InputError(f"trace {path}: holds no file named like {pattern}: name the folder that was recorded")
    return dict(sorted(found.items()))


def require_tokens(trace: Trace, name: str) -> None:
    """Refuse a trace of counts where a format holds tokens' experts.

    Raises:
        InputError: for counts.
    """
    if trace.holds != "tokens":
        raise InputError(
            f"trace {trace.name}: holds counts only, and {name} holds tokens' experts: convert to laer or smartmoe"
        )


def sent(experts: np.ndarray) -> np.ndarray:
    """Return experts by their plain numbers, those too that a router held back; no foreign format knows these."""
    return np.where(experts < 0, -1 - experts, experts)
