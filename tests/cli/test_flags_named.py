"""Flags that messages and docstrings name are flags of a command."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from pathlib import Path

import pytest

from moesaic.cli.main import COMMANDS, main

PACKAGE = Path(__file__).parents[2] / "src" / "moesaic"
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:[-.][a-z0-9]+)*)")
OTHER_SYSTEMS = {"planner/emit.py", "planner/harmless_flags.py"}
"""Files that read and write the flags of other systems."""
SUBCOMMANDS = (("plan", "emit"), ("plan", "explain"), ("plan", "finetune"), ("trace", "convert"))
OF_TORCHRUN = {
    "max-restarts",
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "shutdown-timeout",
    "standalone",
}
OF_PIP = {"force-reinstall", "no-deps"}
OF_OTHERS = {
    "global-batch-size",
    "moe-enable-deepep",
    "moe-routing-trace-path",
    "moe-token-dispatcher-type",
    "training.global-batch-size",
}
"""Of Megatron and torchtitan."""
EARLIER = {"adapter-rank", "emit", "explain", "finetune"}
"""Flags of earlier versions, which are answered with the new ones."""
OF_LABORATORY = {"ffn"}
"""Of `moesaic vision`."""
EXAMPLES = {"field.name", "flag", "name"}
"""Words that stand for any flag."""
GROUPS = {"layer", "mesh", "planner", "plan"}
"""Beginnings of flags with a dot, where the rest is put together."""


def named() -> dict[str, str]:
    """Return every flag that a text of the package names, with one place."""
    places = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name in OTHER_SYSTEMS:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for match in FLAG.finditer(node.value):
                    places[match[1]] = f"{name}:{node.lineno}"
    return places


def test_every_flag_that_a_text_names_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    known = (
        {"version"} | OF_TORCHRUN | OF_PIP | OF_OTHERS | EARLIER | OF_LABORATORY | EXAMPLES | GROUPS
    )
    for words in [(), *((command,) for command in COMMANDS), *SUBCOMMANDS]:
        for help_flag in ("--help", "--help-all"):
            with suppress(SystemExit):
                main([*words, help_flag])
            said = capsys.readouterr()
            known |= set(FLAG.findall(said.out + said.err))
    unknown = {flag: place for flag, place in named().items() if flag not in known}
    assert unknown == {}
