"""Checkpoints of earlier versions, and sharded ones, are read by one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from moesaic.train.checkpoint import FORMAT, list_checkpoints
from moesaic.train.durable import checksum
from runs import assert_same, losses, parameters, run_quietly, tiny


def as_version_1(folder: Path) -> None:
    """Rewrite a checkpoint as the first version wrote it: queries, keys and values as one flat matrix."""
    state = json.loads((folder / "state.json").read_text())
    assert state["format"] == FORMAT == 2
    changed = 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors = load_file(folder / name)
        for key, tensor in tensors.items():
            if "qkv" in key and tensor.dim():
                tensors[key] = tensor.flatten(0, 1)
                changed += 1
        save_file(tensors, folder / name)
        state["sha256"][name] = checksum(folder / name)
    assert changed == 2 * 3  # two layers; the weight and two moments
    (folder / "state.json").write_text(json.dumps(state | {"format": 1}))


def test_a_run_of_the_first_version_goes_on(tmp_path):
    config = tiny(tmp_path, steps=4, save_every=2)
    run_quietly(config)
    whole = parameters(tmp_path / "run")
    expected = losses(tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    (last / "state.json").unlink()
    as_version_1(first)
    run_quietly(replace(config, existing="resume"))
    assert losses(tmp_path / "run") == expected
    assert_same(parameters(tmp_path / "run"), whole)
