"""Checkpoints of earlier versions, and sharded ones, are read by one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moesaic.train.checkpoint import FORMAT, SUMS, list_checkpoints
from moesaic.train.durable import checksum
from runs import assert_same, losses, parameters, run_quietly, tiny


def as_version_2(folder: Path, change: Callable[[dict], object] = lambda state: None) -> None:
    """Rewrite a checkpoint as the second version wrote it: the checksums of the tensors stand in its description."""
    (folder / SUMS).unlink()
    state = json.loads((folder / "state.json").read_text())
    assert state["format"] == FORMAT == 3
    sums = {
        path.relative_to(folder).as_posix(): checksum(path)
        for path in folder.rglob("*")
        if path.is_file() and path.name != "state.json"
    }
    state |= {"format": 2, "sha256": sums}
    change(state)
    (folder / "state.json").write_text(json.dumps(state))


def as_version_1(folder: Path) -> None:
    """Rewrite a checkpoint as the first version wrote it: queries, keys and values as one flat matrix besides."""
    changed = 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors = load_file(folder / name)
        for key, tensor in tensors.items():
            if "qkv" in key and tensor.dim():
                tensors[key] = tensor.flatten(0, 1)
                changed += 1
        save_file(tensors, folder / name)
    assert changed == 2 * 3  # two layers; the weight and two moments
    as_version_2(folder, lambda state: state.update(format=1))


def with_options_beside(folder: Path) -> None:
    """Rewrite a checkpoint as versions wrote it that had every router's options beside the other fields."""

    def change(state: dict) -> None:
        moe = state["model_config"]["moe"]
        moe |= {"router": "sigmoid", "num_groups": 4, "top_groups": 2, "bias_rate": 0.02}

    as_version_2(folder, change)


@pytest.mark.parametrize("rewrite", [as_version_1, as_version_2, with_options_beside])
def test_a_run_of_an_earlier_version_goes_on(tmp_path, rewrite):
    moe = {"router": "sigmoid:bias_rate=0.02"}
    config = tiny(tmp_path, steps=4, save="2", model={"moe": moe})
    run_quietly(config)
    whole = parameters(tmp_path / "run")
    expected = losses(tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    (last / "state.json").unlink()
    rewrite(first)
    run_quietly(replace(config, existing="resume"))
    assert losses(tmp_path / "run") == expected
    assert_same(parameters(tmp_path / "run"), whole)
