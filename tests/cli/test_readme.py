"""README's commands run with what its install line installs, `torch ".[train]"`, and nothing
else."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moesaic.configfile import read_table
from planner.hub_configs import MIXTRAL
from runs import write_text

ROOT = Path(__file__).resolve().parents[2]
NARROW = [
    "--tp",
    "1",
    "--ep",
    "8",
    "--schedules",
    "s1",
    "--all-to-alls",
    "linear",
    "--chunks",
    "1",
    "--orders",
    "fifo",
    "--page",
    "plan.html",
]
SHORT = {
    "train": [
        "--steps",
        "1",
        "--batch-size",
        "2",
        "--data.path",
        "corpus.bin",
        "--out",
        "run",
        "--model.dim",
        "16",
        "--model.num-heads",
        "2",
        "--model.seq-len",
        "16",
        "--model.moe.hidden",
        "16",
    ],
    "tokenize": [],
    "plan": NARROW,
    "show": [],
    "check": ["--cases", "2", "--no-gloo", "--workers", "1"],
    "report": [],
}
"""What makes each command take seconds."""
FURTHER = """
    moesaic tokenize corpus --out corpus.bin
    moesaic plan --model config.json --cluster dgx-h100 --gpus 64
    moesaic show --plan.chunks 4 --gantt gantt.html
    moesaic check
    moesaic report run
"""
"""Commands that README names without arguments."""
MAIN = """import json, sys
from importlib.machinery import PathFinder
blocked, commands = map(json.loads, sys.argv[1:])
class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, *where):
        return None if name.split('.')[0] in blocked else PathFinder.find_spec(name, *where)
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
from moesaic.cli.main import main
for words in commands:
    assert main(words) == 0, words
"""


def installed(extra: str) -> set[str]:
    """Return the packages that an extra of ours brings, with all that they require in turn."""
    project = read_table(ROOT / "pyproject.toml")["project"]
    found = {"moesaic"}
    waiting = [*project["dependencies"], *project["optional-dependencies"][extra]]
    while waiting:
        needed = Requirement(waiting.pop())
        name = canonicalize_name(needed.name)
        if name == "moesaic":
            waiting += [
                line for extra in needed.extras for line in project["optional-dependencies"][extra]
            ]
        elif name not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            found.add(name)
            try:
                waiting += requires(name) or []
            except PackageNotFoundError:  # a requirement of another machine
                continue
    return found


def test_the_commands_run_after_the_install_line(tmp_path: Path) -> None:
    block = (ROOT / "README.md").read_text("utf-8").split("\n## Commands\n")[1].split("\n## ")[0]
    lines = re.findall(r"^    (moesaic .*)", block + FURTHER, re.MULTILINE)
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    commands.sort(
        key=lambda words: (
            ["tokenize", "train"].index(words[0]) if words[0] in ("tokenize", "train") else 2
        )
    )
    commands = [[*words, *SHORT[words[0]]] for words in commands]
    assert {words[0] for words in commands} == set(SHORT)
    (tmp_path / "corpus").mkdir()
    write_text(tmp_path / "corpus" / "text.txt")
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    brought = installed("train")
    blocked = [
        name
        for name, of in packages_distributions().items()
        if not brought & set(map(canonicalize_name, of))
    ]
    assert {"transformers", "tokenizers"} <= set(blocked)  # some builds of torch bring Triton
    done = subprocess.run(
        [sys.executable, "-c", MAIN, json.dumps(blocked), json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} >= {"gantt.html", "plan.html", "corpus.bin"}
    assert (tmp_path / "run" / "report.html").exists()
