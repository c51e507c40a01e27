"""Ranks of a fine-tuning run that differ are refused before anything is trained."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

from finetuned import write_model, write_text

from moesaic.finetune import recipe
from moesaic.finetune.options import FinetuneOptions
from moesaic.train import ranks
from worlds import on_ranks, refusal

BOXES = ("boxa", "boxb")


def options_in(place: Path, **changes: Any) -> FinetuneOptions:
    """Return options of a short run of two ranks."""
    options = FinetuneOptions(
        model=str(place / "model"),
        data=str(place / "text.txt"),
        out=str(place / "shared" / "run"),
        length=16,
        batch=4,
        steps=2,
        method="lora",
        rank=4,
        dtype="float32",
        device="cpu",
    )
    return replace(options, **changes)


def cases(place: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Return by name what the second rank has in place of the first one's options, and how the
    refusal begins."""
    out = place / "shared" / "run"
    return {
        "seed": (
            {"seed": 1},
            "InputError: --seed differs: 0 on rank 0 (boxa), 1 on rank 1 (boxb): start every rank "
            "with the same settings",
        ),
        "learning rate": (
            {"learning_rate": 0.02},
            "InputError: --learning-rate differs: 0.0002 on rank 0 (boxa), 0.02 on rank 1 (boxb)",
        ),
        "batch": ({"batch": 8}, "InputError: --batch differs: 4 on rank 0 (boxa), 8 on rank 1"),
        "steps": ({"steps": 3}, "InputError: --steps differs: 2 on rank 0 (boxa), 3 on rank 1"),
        "merge": ({"merge": True}, "InputError: --merge differs: False on rank 0 (boxa), True on"),
        "resume": ({"resume": True}, "InputError: --resume differs: False on rank 0 (boxa), True"),
        "stages": ({"pp": 2}, "InputError: --pp differs: 1 on rank 0 (boxa), 2 on rank 1 (boxb)"),
        "other data": (
            {"data": str(place / "other.txt")},
            "InputError: what DATA holds differs: 32 sequences with hash ",
        ),
        "other model": (
            {"model": str(place / "other model")},
            "InputError: the model in MODEL differs: hash ",
        ),
        "no data": (
            {"data": str(place / "missing.txt")},
            f"InputError: {place / 'missing.txt'}: no such file: name a text, a .jsonl or .json "
            "file, or a dataset (on rank 1 (boxb))",
        ),
        "another folder": (
            {"out": str(place / "own" / "run")},
            f"InputError: --out {out}: rank 1 (boxb) does not see what rank 0 (boxa) writes there: "
            "--out must lie in a file system that all machines share",
        ),
    }


def refused_on(place: Path) -> dict[str, str]:
    """Return how this rank refuses each case, by name."""
    rank = dist.get_rank()
    found = {}
    with patch.object(socket, "gethostname", lambda: BOXES[rank]):
        for name, (changes, _) in cases(place).items():
            options = options_in(place, **(changes if rank else {}))
            with patch("moesaic.train.shared_folder.PATIENCE", 0.5):
                found[name] = refusal(recipe.finetune, options, 2)
        with patch.object(ranks, "_version", lambda name: f"{name} {rank}"):
            found["versions"] = refusal(recipe.finetune, options_in(place), 2)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two small models, two texts, and two folders for runs."""
    path = tmp_path_factory.mktemp("agree")
    write_model(path / "model")
    write_model(path / "other model", rms_norm_eps=0.1)
    write_text(path / "text.txt")
    write_text(path / "other.txt", seed=2)
    (path / "shared").mkdir()
    (path / "own").mkdir()
    return path


def test_ranks_that_differ_are_refused_with_their_hosts_and_values(place):
    first, second = on_ranks(2, refused_on, place)
    for name, (_, expected) in cases(place).items():
        assert first[name].startswith(expected), name
        shown = second[name].replace(str(place / "own"), str(place / "shared"))
        assert shown == first[name], name
    assert first["versions"] == (
        "InputError: the version of moesaic differs: moesaic 0 on rank 0 (boxa), moesaic 1 on rank "
        "1 (boxb): install the same version on every machine"
    )
    assert sorted(path.name for path in place.glob("*/*") if "run" in path.name) == []
    assert list(place.glob("*/.writing-*")) == []


def trained_on(place: Path) -> str:
    """Fine-tune with a model, data and paths of other names on the second rank."""
    changes = {"model": str(place / "moved"), "data": str(place / "same.txt"), "memory_gib": 64.0}
    return refusal(recipe.finetune, options_in(place, **(changes if dist.get_rank() else {})), 2)


@pytest.mark.random
def test_the_same_contents_under_other_names_train(place):
    shutil.copytree(place / "model", place / "moved")
    shutil.copy(place / "text.txt", place / "same.txt")
    assert on_ranks(2, trained_on, place) == ["", ""]
    assert (place / "shared" / "run" / "adapter_model.safetensors").exists()
