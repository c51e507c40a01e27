"""Tied weights of which a checkpoint holds two values: nothing is dropped, whatever the source and
the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import refused

pytest.importorskip("transformers", reason='pip install "moesaic[transformers]"')

import transformers
from checkpoints import assert_bitwise, build, edit_json, tensors_of
from safetensors.torch import load_file, save_file
from test_upcycle import dense

import moesaic
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.weights.checkpoint import FORMATS
from moesaic.weights.convert import RECEIPT, verify
from moesaic.weights.upcycle import Upcycling

FILE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def edit(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Replace, add or (None) remove tensors of a checkpoint of one file."""
    tensors: dict[str, Any] = load_file(folder / FILE) | changes
    save_file(
        {n: t.clone() for n, t in tensors.items() if t is not None}, folder / FILE, {"format": "pt"}
    )
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an untied model in every format, in folders of the formats' names."""
    root = tmp_path_factory.mktemp("untied")
    build("Qwen3Moe", num_hidden_layers=1).save_pretrained(root / "hf")
    for name in FORMATS.keys() - {"hf"}:
        moesaic.convert(root / "hf", root / name, to=name, logits=False)
    return root


def tied(folder: Path, untied: Path, name: str) -> Path:
    """Copy the untied model in a format, with a configuration that says it is tied."""
    moesaic.convert(untied / name, folder, to=name, logits=False)
    (folder / RECEIPT).unlink()
    edit_json(folder / "config.json", tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize(
    ("source", "to"), [(source, to) for source in FORMATS for to in FORMATS if "hf" in (source, to)]
)
def test_a_trained_head_stays(source: str, to: str, untied: Path, tmp_path: Path) -> None:
    receipt = moesaic.convert(tied(tmp_path / "in", untied, source), tmp_path / "out", to=to)
    assert_bitwise(tensors_of(tmp_path / "out"), tensors_of(untied / to))
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert receipt["left_behind"] == []
    assert receipt["logits"]["largest_difference"] == 0
    assert verify(tmp_path / "out")["states"] == ["weights"]
    if to == "hf":
        head = load_file(untied / "hf" / FILE)[HEAD]
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        assert torch.equal(model.lm_head.weight, head)
        assert not torch.equal(model.model.embed_tokens.weight, head)


def test_one_bit_is_a_difference(untied: Path, tmp_path: Path) -> None:
    source = tied(tmp_path / "in", untied, "hf")
    head = load_file(source / FILE)[EMBEDDING]
    head.view(torch.int16)[3, 5] ^= 1
    moesaic.convert(edit(source, **{HEAD: head}), tmp_path / "out", to="hf", logits=False)
    assert torch.equal(load_file(tmp_path / "out" / FILE)[HEAD], head)


@pytest.mark.parametrize("source", FORMATS)
def test_an_equal_copy_is_left_out_by_name(source: str, untied: Path, tmp_path: Path) -> None:
    hub = tied(tmp_path / "hub", untied, "hf")
    edit(hub, **{HEAD: load_file(hub / FILE)[EMBEDDING]})
    edit_json(hub / "config.json", tie_word_embeddings=False)
    moesaic.convert(hub, tmp_path / "in", to=source, logits=False)
    edit_json(tmp_path / "in" / "config.json", tie_word_embeddings=True)
    receipt = moesaic.convert(tmp_path / "in", tmp_path / "out", to="hf")
    (entry,) = receipt["left_behind"]
    assert ": equal to " in entry
    assert HEAD not in load_file(tmp_path / "out" / FILE)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert verify(tmp_path / "out")["states"] == ["weights"]


def test_a_head_without_the_embedding_stands_for_both_as_in_transformers(
    untied: Path, tmp_path: Path
) -> None:
    source = tied(tmp_path / "in", untied, "hf")
    head = load_file(source / FILE)[HEAD]
    receipt = moesaic.convert(edit(source, **{EMBEDDING: None}), tmp_path / "out", to="hf")
    assert torch.equal(load_file(tmp_path / "out" / FILE)[EMBEDDING], head)
    assert receipt["left_behind"] == []


def test_a_head_of_another_shape_is_refused(untied: Path, tmp_path: Path) -> None:
    source = edit(
        tied(tmp_path / "in", untied, "hf"), **{HEAD: torch.zeros(70, 32, dtype=torch.bfloat16)}
    )
    with pytest.raises(
        InputError,
        match=r"lm_head\.weight is \[70, 32\], and the configuration makes it \[64, 32\]",
    ):
        moesaic.convert(source, tmp_path / "out", to="hf", logits=False)
    assert not (tmp_path / "out").exists()


def test_an_upcycled_model_keeps_the_trained_head(tmp_path: Path) -> None:
    source = dense(tmp_path, "qwen3", tie_word_embeddings=True)
    head = load_file(source / FILE)[EMBEDDING] + 1
    receipt = moesaic.convert(
        edit(source, **{HEAD: head}), tmp_path / "out", to="hf", upcycle=Upcycling(num_experts=4)
    )
    assert torch.equal(load_file(tmp_path / "out" / FILE)[HEAD], head)
    assert receipt["logits"]["largest_difference"] < 1e-5 * receipt["logits"]["largest"]


def test_verify_refuses_an_output_that_lost_its_head(
    untied: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    source = tied(tmp_path / "in", untied, "hf")
    moesaic.convert(edit(source, **{HEAD: None}), out, to="hf", logits=False)
    assert main(["convert", "verify", str(out)]) == 0
    edit_json(out / RECEIPT, left_behind=[HEAD])
    assert main(["convert", "verify", str(out)]) == 2
    line = f"{out}: the conversion left lm_head.weight behind, a weight of the model: convert again"
    assert capsys.readouterr().err == f"moesaic convert: {line}\n"
    edit_json(
        out / RECEIPT,
        left_behind=[],
        logits={"tokens": 16, "largest_difference": 1.6, "largest": 8.0},
    )
    assert "its logits differ from those of the source by 1.6, of 8 at most" in refused(verify, out)


def test_verify_finds_a_head_that_was_added(untied: Path, tmp_path: Path) -> None:
    source = edit(tied(tmp_path / "in", untied, "hf"), **{HEAD: None})
    moesaic.convert(source, tmp_path / "out", to="hf", logits=False)
    edit(tmp_path / "out", **{HEAD: load_file(tmp_path / "out" / FILE)[EMBEDDING] + 1})
    assert "lm_head.weight (weights) is not what the receipt says" in refused(
        verify, tmp_path / "out"
    )
