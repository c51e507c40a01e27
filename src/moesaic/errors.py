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


def broken_package(error: BaseException) -> str | None:
    """Return a line about an installed package whose import raised an error, or led to it; None if
    no import did. Libraries that import others late say no more than that it failed."""
    chain: BaseException | None = error
    name = ""
    while chain is not None:
        # the innermost module that was being imported where this error was raised
        place = chain.__traceback__
        found = ""
        while place is not None:
            if place.tb_frame.f_code.co_name == "<module>":
                found = str(place.tb_frame.f_globals.get("__name__", ""))
            place = place.tb_next
        if found:  # replaces the module of the error to which this one led
            name = found
            reason = str(chain)
        chain = chain.__cause__ or chain.__context__
    package = name.partition(".")[0]
    if package in ("", "__main__", "moesaic", "moesaic_lab"):
        return None
    return (
        f"the package {package} is installed and cannot be imported ({in_one_line(reason):.200}): "
        "install it anew, or take it away"
    )


def in_one_line(text: str) -> str:
    """Return `text` with line breaks and control characters as escapes: names of files and values
    in them come from others, and a terminal would obey them."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 node`, `2 nodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def suggestion(word: str, known: list[str]) -> str:
    """Return ': did you mean X?' for the known word that holds this one or is closest; if none is
    close, a list."""
    near = []
    if len(word) > 2:  # one or two letters are in many words
        near = [each for each in known if word in each]
    if not near:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f": did you mean {near[0]}?"
    return f": choose one of {shorten(', '.join(known), 300, placeholder=' ...')}"
