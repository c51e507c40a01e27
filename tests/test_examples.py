"""Programs, notebooks and configuration files that people start from, run as they would run
them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forked import Forked
from moesaic.planner.cluster import read_cluster
from moesaic.planner.presets import read_job

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BY_TRL = ("sft", "dpo", "grpo", "lora", "qlora")
"""Scripts that train by TRL."""
FAMILIES = ("qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs in a folder of their own, where they write."""
    monkeypatch.chdir(tmp_path)


ONE_AFTER_ANOTHER = """
import runpy, sys
folder, *scripts = sys.argv[1:]
sys.path.insert(0, folder)
for script in scripts:
    sys.argv = [f"{folder}/{script}.py"]
    print("script", script)
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Importing TRL and the models takes longer than the scripts train: one process runs them all."""


def losses(scripts: Sequence[str]) -> dict[str, list[float]]:
    """Run scripts of examples/hf; return the loss of each step of each."""
    Path("run_all.py").write_text(ONE_AFTER_ANOTHER)
    command = Forked(["run_all.py", str(EXAMPLES / "hf"), *scripts], {})
    out, err = command.communicate(timeout=500)
    assert command.returncode == 0, out[-200:] + err[-3000:]
    parts = re.split(r"^script (\w+)$", out, flags=re.MULTILINE)[1:]
    return {
        name: [float(each) for each in re.findall(r"^loss ([\d.]+)$", text, re.MULTILINE)]
        for name, text in zip(parts[::2], parts[1::2])
    }


@pytest.mark.random
def test_scripts_train_by_trl() -> None:
    for package in ("trl", "datasets", "peft"):
        pytest.importorskip(package)
    found = losses(BY_TRL)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(BY_TRL, 6) | {
        "grpo": 3
    }
    for name in ("sft", "dpo"):
        assert found[name][-1] < found[name][0], name


@pytest.mark.random
def test_families_train() -> None:
    pytest.importorskip("transformers")
    found = losses(FAMILIES)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(FAMILIES, 12)
    for name, each in found.items():
        assert each[-1] < 0.9 * each[0], name


def test_every_script_is_run() -> None:
    assert {path.stem for path in (EXAMPLES / "hf").glob("*.py")} == {
        *BY_TRL,
        *FAMILIES,
        "small",
        "stages",
    }


def test_a_script_of_at_most_60_lines_trains_stages_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    script = EXAMPLES / "hf" / "stages.py"
    assert len(script.read_text().splitlines()) <= 60
    words = ["--standalone", "--nproc-per-node", "2", str(script)]
    command = Forked(["-m", "torch.distributed.run", *words], {}, ("peft", "transformers"))
    out, err = command.communicate(timeout=300)
    assert command.returncode == 0, err[-3000:]
    found = [float(each) for each in re.findall(r"^loss ([\d.]+)$", out, re.MULTILINE)]
    assert len(found) == 6
    assert found[-1] < found[0] - 0.1
    names = load_file(tmp_path / "runs" / "stages" / "adapter_model.safetensors")
    assert {name.split(".layers.")[1][0] for name in names} == {"0", "1"}


@pytest.mark.parametrize(
    "notebook", sorted((EXAMPLES / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_notebook_runs_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    """Its cells run in order, as one file; no output is stored that could be out of date."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    (tmp_path / "cells.py").write_text(
        "\n\n".join("".join(cell["source"]) for cell in code), encoding="utf-8"
    )
    command = Forked([str(tmp_path / "cells.py")], {})
    _, err = command.communicate(timeout=300)
    assert command.returncode == 0, err


def test_configuration_files_are_read() -> None:
    cluster = read_cluster(str(EXAMPLES / "configs" / "cluster.toml"))
    assert [link.name for link in cluster.links] == ["pcie", "nic"]
    for name, layers in {"gpt": 12, "small": 4}.items():
        job = read_job(str(EXAMPLES / "configs" / f"{name}.toml"), world=32)
        assert job.model.num_layers == layers
