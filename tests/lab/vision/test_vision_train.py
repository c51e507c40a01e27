"""`moesaic vision`: digits are learnt, on ranks as alone; weights go on; layers freeze; folders of
pictures; probe."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file
from torch.distributed import FileStore

from moesaic.cli.arguments import parse
from moesaic.errors import InputError
from moesaic.testing.runner import leave
from moesaic_lab.vision.train import VisionOptions, run, train
from worlds import start


def options(folder: Path, **changes) -> VisionOptions:
    return VisionOptions(**{"out": str(folder), "steps": 3, "batch_size": 16, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def on_rank(rank: int, world: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=200)
    )
    for name in names:
        train(options(Path(folder) / name, **MESHES[name]), say=lambda _: None)
    leave()


MESHES: dict[str, dict[str, Any]] = {
    "ep": {"ep": 2},
    "etp, no FSDP": {"etp": 2, "schedule": "s2", "fsdp": False},
    "dense": {"ffn": "dense"},
}
"""What is trained, by name."""


@pytest.mark.parametrize(
    ("world", "names"),
    [(2, list(MESHES)), pytest.param(4, ["ep"], marks=pytest.mark.random)],
    ids=["2", "4"],
)
def test_ranks_train_as_one_and_write_the_same_weights(
    tmp_path: Path, world: int, names: list[str]
) -> None:
    start(world, on_rank, world, str(tmp_path), names)
    ones: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}
    for name in names:
        ffn = MESHES[name].get("ffn", "preset")
        if ffn not in ones:
            ones[ffn] = (
                train(options(tmp_path / "one", ffn=ffn), say=lambda _: None),
                weights(tmp_path / "one"),
            )
        alone, one = ones[ffn]
        together = json.loads((tmp_path / name / "results.json").read_text())
        several = weights(tmp_path / name)
        # pixels of a part round otherwise
        assert together["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
        assert one.keys() == several.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(several[key], tensor, rtol=1e-3, atol=1e-4)


def test_weights_go_on_and_moe_layers_stay_where_they_are_frozen(tmp_path: Path, capsys) -> None:
    words = ["--out", str(tmp_path / "a"), "--steps", "60", "--shots", "5", "--throughput"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["accuracy"] > 0.5
    assert found["probe"] > 0.5
    assert found["train_images_per_second"] > 0
    again = train(options(tmp_path / "b", init=str(tmp_path / "a" / "model.safetensors"), steps=0))
    assert again["accuracy"] == found["accuracy"]
    tight = train(
        options(
            tmp_path / "b",
            init=str(tmp_path / "a" / "model.safetensors"),
            steps=0,
            eval_capacity_factor=0.1,
        )
    )
    assert tight["accuracy"] != found["accuracy"]
    train(options(tmp_path / "c", init=str(tmp_path / "a" / "model.safetensors"), freeze_moe=True))
    before = weights(tmp_path / "a")
    after = weights(tmp_path / "c")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    frozen = {name for name in before if ".experts." in name or ".router." in name}
    assert frozen
    assert not moved & frozen
    assert "head.weight" in moved


def test_a_folder_of_pictures_is_learnt(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for label, colour in (("dark", 30), ("light", 220)):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(60):
            pixels = np.clip(draw.normal(colour, 20, (9, 12, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / label / f"{number}.png")
    found = train(options(tmp_path / "run", images=str(tmp_path / "pictures"), steps=20))
    assert found["accuracy"] == 1.0
    assert weights(tmp_path / "run")["head.weight"].shape[0] == 2
    digits = train(
        options(tmp_path / "other", init=str(tmp_path / "run" / "model.safetensors"), steps=0)
    )
    assert digits["accuracy"] < 0.5  # whose head is new


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--preset", "swin-huge"], "choose one of swinv2-s"),
        (["--ep", "2"], "this is one process"),
        (["--init", "no.safetensors"], "no such file"),
        (["--images", "no"], "a folder of .png"),
        (["--steps", "-1"], "at least 0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], text: str) -> None:
    with pytest.raises(InputError, match=text):
        train(parse(VisionOptions, [*words, "--out", str(tmp_path)], prog="vision", description=""))
