"""The commands and files that pages print: of fenced blocks, of indented ones, also in numbered
lists, and between backquotes."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

PROGRAMS = ("moesaic", "torchrun", "python", "pip")
"""What the commands of a page begin with."""
TOLD = re.compile(r"^\w+:? (?:[a-z]+:|with )|\|")
"""Lines that begin like a command and are what a program prints, or a sum of several commands."""


@dataclass(frozen=True)
class Block:
    """A block of a page: what is printed in a fixed width, or between backquotes in a line."""

    language: str
    """python, toml, bash or "" of a fence; "indented", or "inline"."""
    text: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page in order, without indentation."""
    found = []
    lines = iter(page.splitlines())
    is_list = False
    above = ""
    taken: list[str] = []
    for line in [*lines, ""]:
        deep = len(line) - len(line.lstrip())
        least = 8 if is_list else 4
        if taken and taken[0].startswith("```"):
            if line.strip() == "```":
                found.append(Block(taken[0][3:].strip(), _left(taken[1:])))
                taken = []
            else:
                taken.append(line)
            continue
        if line.strip() and deep >= least and (taken or not above.strip()):
            taken.append(line)
        elif taken and not line.strip():
            taken.append("")
        else:
            if taken:
                found.append(Block("indented", _left(taken)))
            taken = [line.strip()] if line.lstrip().startswith("```") else []
            if re.match(r"(?:\d+\.|[-*]) ", line):
                is_list = True
            elif line.strip() and not deep:
                is_list = False
            found += [Block("inline", text) for text in re.findall(r"`([^`]+)`", line)]
        above = line
    if taken:
        found.append(Block("indented", _left(taken)))
    return found


def _left(lines: list[str]) -> str:
    """Return lines without their common indentation."""
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[least:] for line in lines).strip("\n")


def commands_in(block: Block) -> list[tuple[str, ...]]:
    """Return the commands of a block, each as words without comments; `...` stands for words that a
    reader adds."""
    if block.language in ("python", "toml"):
        return []
    return [
        tuple(shlex.split(line, comments=True))
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
        if line.split(" ")[0] in PROGRAMS and not TOLD.search(line)
    ]


def commands(page: str) -> list[tuple[str, ...]]:
    """Return the commands that a page prints."""
    return [words for block in blocks(page) for words in commands_in(block)]
