"""`moesaic finetune --pp`: layers in stages over ranks, equal to one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

import torch
from finetuned import FLAGS, RESULT, finetune, write_model, write_text
from safetensors.torch import load_file

from forked import Forked

IMPORTS = ("transformers", "moesaic.finetune.recipe")
METHOD = ("--method", "qlora", "--micro-batch", "2", "--batch", "8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of three layers, a text, and a finished run of one process."""
    path = tmp_path_factory.mktemp("stages")
    write_model(path / "model", num_hidden_layers=3)
    write_text(path / "text.txt")
    assert finetune(path, path / "one", "--merge", *METHOD) == 0
    return path


def started(place: Path, out: str, ranks: int, *flags: str) -> Forked:
    words = [str(place / "model"), str(place / "text.txt"), "--out", str(place / out)]
    words += [*FLAGS, *METHOD, "--ranks", str(ranks)]
    return Forked(["-m", "moesaic", "finetune", *words, *flags], {}, IMPORTS)


def on_ranks(place: Path, out: str, ranks: int, *flags: str) -> str:
    """Run the command on several ranks; return what it printed."""
    command = started(place, out, ranks, *flags)
    said, errors = command.communicate(timeout=500)
    assert command.returncode == 0, errors
    return said


def logged(out: Path, name: str = "loss") -> list[float]:
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] if name in entry]


def require_equal(one: Path, other: Path, tolerance: float = 1e-4) -> None:
    """Compare losses, norms of gradients, adapters and merged models of two runs."""
    for name in ("loss", "grad_norm"):
        assert logged(other, name) == pytest.approx(logged(one, name), abs=1e-6)
    for name in (RESULT, "merged/model-00001.safetensors"):
        expected, found = (load_file(each / name) for each in (one, other))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=tolerance)


def test_two_stages_train_and_merge_like_one_process_and_go_on_as_another_split(place):
    on_ranks(place, "two", 2, "--pp", "2", "--merge")
    require_equal(place / "one", place / "two")
    # the norm over all stages clips
    assert max(logged(place / "two", "grad_norm")) > 0
    shutil.copytree(place / "two", place / "again")
    shutil.rmtree(place / "again" / "checkpoint-4")
    shutil.rmtree(place / "again" / "merged")
    assert finetune(place, place / "again", "--merge", *METHOD, "--resume") == 0
    require_equal(place / "one", place / "again")


@pytest.mark.random
def test_four_ranks_share_experts_in_stages_and_go_on_as_another_split(place):
    on_ranks(place, "four", 4, "--pp", "2", "--merge")
    require_equal(place / "one", place / "four")
    shutil.copytree(place / "four", place / "spread")
    shutil.rmtree(place / "spread" / "checkpoint-4")
    shutil.rmtree(place / "spread" / "merged")
    on_ranks(place, "spread", 2, "--resume", "--merge")
    require_equal(place / "one", place / "spread")


@pytest.mark.parametrize("stages", [1, 2])
def test_halves_of_a_micro_batch_in_flight_train_the_same(place, stages):
    out = f"flying {stages}"
    flags = ("--pp", str(stages), "--micro-batches-in-flight", "2", "--merge")
    on_ranks(place, out, 2 * stages, *flags)
    require_equal(place / "one", place / out)
