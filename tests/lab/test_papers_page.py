"""docs/papers.md: every row of its tables has a command that there is, with options that the command has."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from moesaic.cli.main import COMMANDS, LABORATORY, main
from moesaic.planner.cluster import presets
from moesaic.planner.presets import CONFIGS
from moesaic.planner.presets import PRESETS as PLANNED
from moesaic.train.presets import PRESETS as TRAINED
from moesaic_lab.bench import BENCHMARKS, OTHERS
from moesaic_lab.reproduce.records import PAPERS
from moesaic_lab.vision.config import PRESETS as VISION

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SYSTEMS = ("Parm", "ScheMoE", "Tutel", "FasterMoE", "NetMoE")
NAMES = {
    "bench": (*BENCHMARKS, *OTHERS), "reproduce": (*PAPERS, "all"), "trace": ("show",),
}  # fmt: skip
"""What the first word behind a command may be."""
VALUES = {
    ("train", "preset"): TRAINED, ("plan", "model"): [*PLANNED, *CONFIGS], ("vision", "preset"): VISION,
    ("plan", "cluster"): presets(), ("train", "planner.cluster"): presets(),
}  # fmt: skip
"""What an option may be."""


def rows() -> list[tuple[str, list[str]]]:
    """Return the paper and the cells of every row that says where a part of a paper is."""
    found = []
    for system in SYSTEMS:
        section = TEXT.split(f"\n## {system}\n")[1].split("\n## ")[0]
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        assert lines[0] == "| part | code | command | result | difference |"
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
        found += [(system, each) for each in cells]
    return found


def commands(text: str) -> list[list[str]]:
    """Return the commands in a text, each as its words."""
    return [shlex.split(each)[1:] for each in re.findall(r"`(moesaic [^`]+)`", text)]


@cache
def options_of(*command: str) -> set[str]:
    """Return the options that a command's help names."""
    import contextlib
    import io

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main([*command, "--help"]) == 0
    return set(re.findall(r"--([\w.-]+)", shown.getvalue()))


@pytest.mark.parametrize(("system", "cells"), rows(), ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_row_has_a_command_that_runs(system: str, cells: list[str]) -> None:
    assert len(cells) == 5
    found = commands(cells[2])
    assert found, f"{system}, {cells[0]}: no command"
    for name, *words in found:
        assert name in {*COMMANDS, *LABORATORY}
        head = [name]
        if name in NAMES:
            assert words[0] in NAMES[name]
            head.append(words.pop(0))
        known = options_of(*head) if head[0] != "reproduce" else options_of("reproduce")
        for place, word in enumerate(words):
            if not word.startswith("--"):
                continue
            option = word.removeprefix("--").replace("_", "-")
            assert option in {each.replace("_", "-") for each in known} | {"plan", "preset"}, f"{head}: no --{option}"
            allowed = VALUES.get((name, option))
            assert allowed is None or words[place + 1] in allowed


def test_every_command_that_the_page_names_is_one() -> None:
    for name, *words in commands(TEXT):
        assert name in {*COMMANDS, *LABORATORY}
        if name == "bench" and words:
            assert words[0] in NAMES["bench"]


def test_presets_that_the_page_names_are_all_there_are() -> None:
    section = TEXT.split("\n## Models\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w-]+)`", section))
    stem = {name for name in named if name.startswith("-")}
    short = {name for name in (*PLANNED, *CONFIGS) if name not in named and not any(name.endswith(end) for end in stem)}
    assert short <= {"demo", "gpt-small"}
