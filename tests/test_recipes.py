"""The recipes in examples/recipes, run with the command in their first line: they train with the
losses of one process."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Forked
from moesaic import LoadBalance, balance_on_step, clip_grad_norm_

FOLDER = Path(__file__).parent.parent / "examples" / "recipes"
sys.path.append(str(FOLDER))

from tiny import Tiny, batches  # noqa: E402

EQUAL = {
    "loop": (2, ()),
    "ddp": (2, ()),
    "fsdp2": (2, ()),
    "with_accelerate": (2, ("accelerate",)),
    "with_fabric": (2, ("lightning_fabric",)),
    "with_ray": (1, ("ray",)),
}
"""Recipes that train the tiny model as one process does: number of processes, and packages that
they need."""
OTHERS = {
    "hf_trainer": (2, ("transformers", "accelerate")),
    "lora": (1, ("peft",)),
    "pipeline": (4, ()),
    "with_torchtitan": (2, ("torchtitan",)),
}
"""Recipes that train something else: processes and packages. In a pipeline, balance losses are per
micro-batch."""
BY_TESTS = {"export", "with_deepspeed"}
"""Recipes that have a test of their own."""


def run(name: str, processes: int, packages: tuple[str, ...], *words: str) -> str:
    for package in packages:
        pytest.importorskip(package)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = (*(launch if processes > 1 else ()), str(FOLDER / f"{name}.py"), *words)
    # Ray needs a short path for its sockets
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:
        command = Forked(list(words), {"TMPDIR": short}, imports=packages)
        out, err = command.communicate(timeout=400)
    assert command.returncode == 0, err[-3000:]
    return out


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"^loss ([\d.]+)$", text, re.M)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses_alone(Tiny())


def losses_alone(model: Tiny) -> list[float]:
    """Train in this process; return the loss of each step."""
    found = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    balance_on_step(optimizer, model)
    for tokens in batches():
        loss = model(tokens)
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def with_packages(recipes: dict[str, tuple[int, tuple[str, ...]]]) -> list[Any]:
    """Return names of recipes: `make test` runs those that need only PyTorch, `make test-random`
    the others too."""
    return [
        pytest.param(name, marks=pytest.mark.random if packages else ())
        for name, (_, packages) in recipes.items()
    ]


@pytest.mark.parametrize("name", with_packages(EQUAL))
def test_a_recipe_trains_as_one_process_does(name, alone):
    assert losses(run(name, *EQUAL[name])) == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize("name", with_packages(OTHERS))
def test_a_recipe_trains(name, alone):
    found = losses(run(name, *OTHERS[name]))
    assert len(found) == 8
    assert found[-1] < 0.95 * found[0]
    if name == "pipeline":
        assert found == pytest.approx(alone, rel=0.02)


@pytest.mark.random
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_trains_as_one_process_does(stage):
    model = Tiny()
    for block in model.blocks:
        block.moe.losses = (LoadBalance(0.01, level="sequence"),)
    found = losses(run("with_deepspeed", 2, ("deepspeed",), str(stage)))
    assert found == pytest.approx(losses_alone(model), abs=2e-5)


def test_an_exported_layer_computes_what_the_layer_does():
    difference = re.search(r"largest difference (\S+)", run("export", 1, ()))
    assert float(difference[1]) < 1e-6


def test_the_page_shows_lines_of_every_recipe():
    parts = (
        (FOLDER.parent.parent / "docs" / "recipes.md")
        .read_text(encoding="utf-8")
        .split("\n## ")[1:]
    )
    shown = {
        re.search(r"recipes/(\w+)\.py", part)[1]: re.findall(r"^    (\S.*)$", part, re.M)
        for part in parts
    }
    assert set(shown) == {*EQUAL, *OTHERS, *BY_TESTS}
    for name, lines in shown.items():
        written = {
            line.strip()
            for line in (FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()
        }
        assert lines
        assert set(lines) <= written, name


def test_every_recipe_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*EQUAL, *OTHERS, *BY_TESTS, "tiny"}
