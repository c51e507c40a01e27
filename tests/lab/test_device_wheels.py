"""A machine with torch, Triton and the wheels of `lab/wheels.sh` imports what every step needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic_lab.device.__main__ import PARTS, ROWS

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "lab" / "wheels.sh"
BARE = """
import importlib.metadata, re, sys
from importlib.machinery import PathFinder
def normal(name):
    return re.sub("[-_.]+", "-", name).lower()
carried = {normal(name) for name in sys.argv[2].split()}
todo = ["torch", "triton"]
while todo:
    name = todo.pop()
    carried.add(normal(name))
    for line in importlib.metadata.requires(name) or []:
        needed = normal(re.split("[^A-Za-z0-9._-]", line)[0])
        if "extra" not in line and needed not in carried:
            try:
                importlib.metadata.version(needed)
            except importlib.metadata.PackageNotFoundError:
                continue
            todo.append(needed)
own = {"moesaic", "moesaic_lab", "_pytest"}
missing = {
    module
    for module, names in importlib.metadata.packages_distributions().items()
    if module not in own and not carried.intersection(map(normal, names))
}
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in missing else super().find_spec(name, path, target)
    @classmethod
    def find_distributions(cls, context=None):
        found = PathFinder.find_distributions(*([] if context is None else [context]))
        return (each for each in found if normal(each.name) in carried)
sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
exec(sys.argv[1])
"""
"""Imports, in a process that sees the carried packages, torch, Triton and what those need alone."""
IMPORTS = {
    "command": "import moesaic_lab.device.benchmark",
    "tests": "import pytest, xdist, pytest_timeout, hypothesis",
    "transformers": (
        "from transformers import Qwen3MoeForCausalLM, MixtralForCausalLM, GptOssForCausalLM\n"
        "import moesaic.transformers, moesaic_lab.hf"
    ),
    "finetune": "import peft, moesaic.finetune.recipe, moesaic.finetune.loss",
}
ROOMS = sorted({target.partition(":")[0] for target in (PARTS | ROWS).values()})


def carried() -> dict[str, list[str]]:
    """Return the packages that the script downloads, by purpose."""
    text = WHEELS.read_text().replace("\\\n", " ")
    lines = re.findall(r"^fetch (\w+) (.*)$", text, re.MULTILINE)
    return {
        purpose: [name.partition("==")[0] for name in names.split()] for purpose, names in lines
    }


def bare(code: str) -> subprocess.CompletedProcess[str]:
    names = " ".join(name for names in carried().values() for name in names)
    return subprocess.run(
        [sys.executable, "-c", BARE, code, names],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.random
def test_every_step_imports_what_is_carried() -> None:
    code = [*IMPORTS.values(), *(f"import moesaic_lab.device.{room}" for room in ROOMS)]
    done = bare("\n".join(code))
    assert done.returncode == 0, done.stderr[-500:]


def test_a_package_that_is_not_carried_is_not_there() -> None:
    done = bare("import scipy\nimport tensorboard")
    assert "No module named 'tensorboard'" in done.stderr


def test_the_wheels_are_of_the_locked_versions() -> None:
    locked = (ROOT / "constraints.txt").read_text()
    for purpose, names in carried().items():
        if purpose not in ("liger", "sonic"):
            assert [n for n in names if not re.search(f"^{n}==", locked, re.MULTILINE)] == []
