"""Programs, notebooks and configuration files that people start from, run as they would run them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forked import Forked
from moesaic.planner.cluster import read_cluster
from moesaic.planner.presets import read_job

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BY_TRL = {"sft": (), "dpo": (), "grpo": (), "lora": ("peft",), "qlora": ("peft",)}
"""Scripts that train by TRL, and what else they need."""
FAMILIES = ("qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs in a folder of their own, where they write."""
    monkeypatch.chdir(tmp_path)


def losses(script: str) -> list[float]:
    """Run a script of examples/hf; return the loss of each step."""
    command = Forked([str(EXAMPLES / "hf" / f"{script}.py")], {}, ["transformers"])
    out, err = command.communicate(timeout=500)
    assert command.returncode == 0, err[-3000:]
    return [float(found) for found in re.findall(r"^loss ([\d.]+)$", out, re.MULTILINE)]


@pytest.mark.random
@pytest.mark.parametrize("script", BY_TRL)
def test_a_script_trains_by_trl(script: str) -> None:
    for package in ("trl", "datasets", *BY_TRL[script]):
        pytest.importorskip(package)
    found = losses(script)
    assert len(found) == (3 if script == "grpo" else 6)
    if script in ("sft", "dpo"):
        assert found[-1] < found[0]


@pytest.mark.random
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains(family: str) -> None:
    pytest.importorskip("transformers")
    found = losses(family)
    assert len(found) == 12
    assert found[-1] < 0.9 * found[0]


def test_every_script_is_run() -> None:
    assert {path.stem for path in (EXAMPLES / "hf").glob("*.py")} == {*BY_TRL, *FAMILIES, "small"}


@pytest.mark.parametrize("notebook", sorted((EXAMPLES / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    """Its cells run in order, as one file; no output is stored that could be out of date."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    (tmp_path / "cells.py").write_text("\n\n".join("".join(cell["source"]) for cell in code), encoding="utf-8")
    command = Forked([str(tmp_path / "cells.py")], {})
    _, err = command.communicate(timeout=300)
    assert command.returncode == 0, err


def test_configuration_files_are_read() -> None:
    cluster = read_cluster(str(EXAMPLES / "configs" / "cluster.toml"))
    assert [link.name for link in cluster.links] == ["pcie", "nic"]
    for name, layers in {"gpt": 12, "small": 4}.items():
        job = read_job(str(EXAMPLES / "configs" / f"{name}.toml"), world=32)
        assert job.model.num_layers == layers
