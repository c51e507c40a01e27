"""The commands and files that pages print: of fenced blocks, of indented ones, also in numbered
lists, and between backquotes.

A fence is a line that begins with three backquotes; a block stands between two of them. An indented
block has at least 4 spaces, or 8 in a list, and begins after an empty line.
"""

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
    is_list = False
    above = ""
    open_block: list[str] = []  # lines so far: a fence and what follows, or an indented block
    for line in [*page.splitlines(), ""]:
        indentation = len(line) - len(line.lstrip())
        least = 8 if is_list else 4
        if open_block and open_block[0].startswith("```"):
            if line.strip() == "```":
                fence, *text = open_block
                language = fence.removeprefix("```").strip()
                found.append(Block(language, _left(text)))
                open_block = []
            else:
                open_block.append(line)
            continue

        may_be_code = bool(open_block) or not above.strip()
        if line.strip() and indentation >= least and may_be_code:
            open_block.append(line)
        elif open_block and not line.strip():
            open_block.append("")
        else:
            if open_block:
                found.append(Block("indented", _left(open_block)))
            open_block = [line.strip()] if line.lstrip().startswith("```") else []
            if re.match(r"(?:\d+\.|[-*]) ", line):
                is_list = True
            elif line.strip() and not indentation:
                is_list = False
            found += [Block("inline", text) for text in re.findall(r"`([^`]+)`", line)]
        above = line
    if open_block:
        found.append(Block("indented", _left(open_block)))
    return found


def _left(lines: list[str]) -> str:
    """Return lines without their common indentation."""
    indentations = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    least = min(indentations, default=0)
    return "\n".join(line[least:] for line in lines).strip("\n")


def commands_in(block: Block) -> list[tuple[str, ...]]:
    """Return the commands of a block, each as words without comments; `...` stands for words that a
    reader adds."""
    if block.language in ("python", "toml"):
        return []
    joined = re.sub(r"\\\n\s*", "", block.text)  # a backslash continues a line
    found = []
    for line in joined.splitlines():
        program, *_ = line.split(" ")
        if program in PROGRAMS and not TOLD.search(line):
            found.append(tuple(shlex.split(line, comments=True)))
    return found


def commands(page: str) -> list[tuple[str, ...]]:
    """Return the commands that a page prints."""
    return [words for block in blocks(page) for words in commands_in(block)]
