"""The errors that a person can cause; commands print them as one line. Our own invariants are
`assert`ed instead."""

from __future__ import annotations

import difflib
from textwrap import shorten


class InputError(ValueError):
    """Bad input. The message says what is wrong, where, and what to write instead. Commands leave
    with exit code 2."""


class TrainingError(RuntimeError):
    """Training cannot go on, for example because the loss is not finite. Commands leave with exit
    code 1."""


def to_install(what: str) -> str:
    """Return how to install `what`: a folder of the repository with extras in brackets, such as
    ".[train]"."""
    return f'in a clone of the repository, pip install "{what}"'


def in_one_line(text: str) -> str:
    """Return `text` with line breaks and control characters as escapes: names of files and values
    in them come from others, and a terminal would obey them."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def suggestion(word: str, known: list[str]) -> str:
    """Return ': did you mean X?' for the known word that holds this one or is closest; if none is
    close, a list."""
    near = []
    if len(word) > 2:
        near = [each for each in known if word in each]
    if not near:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f": did you mean {near[0]}?"
    return f": choose one of {shorten(', '.join(known), 300, placeholder=' ...')}"
