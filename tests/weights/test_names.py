"""Checkpoints under the names that transformers has in memory, and layers for multi-token
prediction at any depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

from checkpoints import assert_bitwise, build, edit_json, tensors_of
from safetensors.torch import load_file, save_file

import moesaic
from helpers import refused
from moesaic.weights.load import load_model

FILE = "model.safetensors"
FAMILIES = (
    "Mixtral",
    "MiniMaxM2",
    "GraniteMoe",
    "NemotronH",
    "Ernie4_5_Moe",
    "MiniMax",
    "GraniteMoeHybrid",
    "GraniteMoeShared",
    "ExaoneMoe",
    "Qwen3Moe",
    "DeepseekV3",
    "GptOss",
    "BailingHybrid",
    "KimiLinear",
)
MIXED = ("BailingHybrid", "KimiLinear")
"""Families whose weights transformers computes from the hub's, so that only it reads those."""


@pytest.mark.parametrize("family", FAMILIES)
def test_files_under_present_names_are_read(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "present", save_original_format=False)
    expected = model.state_dict()
    for name in ("hub", "present"):
        found = load_model(tmp_path / name, dtype="auto").state_dict()
        assert all(torch.equal(found[each], tensor) for each, tensor in expected.items())
    if family not in MIXED:
        receipt = moesaic.convert(tmp_path / "present", tmp_path / "out", to="hf")
        assert_bitwise(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hub"))
        assert (receipt["logits"]["largest_difference"], receipt["left_behind"]) == (0, [])


@pytest.mark.parametrize("family", MIXED)
def test_of_families_that_only_transformers_reads_nothing_is_missing(
    family: str, tmp_path: Path
) -> None:
    build(family).save_pretrained(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / FILE)
    (lost, *_) = (name for name in tensors if name.endswith("input_layernorm.weight"))
    kept = {name: tensor for name, tensor in tensors.items() if name != lost}
    for changed, line in (
        (kept, f"are missing: {lost}"),
        (tensors | {"model.more": torch.ones(1)}, "unknown: model.more"),
    ):
        save_file(changed, tmp_path / "hub" / FILE, {"format": "pt"})
        assert line in refused(load_model, tmp_path / "hub")


def with_more(folder: Path, family: str, layers: int, more: int, **said: Any) -> Path:
    """Write a tiny model of a depth, with `more` layers after the last one, as for multi-token
    prediction."""
    build(family, num_hidden_layers=layers).save_pretrained(folder)
    tensors = load_file(folder / FILE)
    last = f"model.layers.{layers - 1}."
    for number in range(layers, layers + more):
        copies = {
            name.replace(last, f"model.layers.{number}."): t.clone()
            for name, t in tensors.items()
            if last in name
        }
        tensors |= copies | {
            f"model.layers.{number}.eh_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16)
        }
    save_file(tensors, folder / FILE, {"format": "pt"})
    edit_json(folder / "config.json", **said)
    return folder


@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3"])
@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("more", [1, 3])
def test_layers_for_more_tokens_are_left_behind_at_any_depth(family, layers, more, tmp_path):
    source = with_more(tmp_path / "in", family, layers, more, num_nextn_predict_layers=more)
    extra = {
        name
        for name in load_file(source / FILE)
        if any(f".layers.{layers + i}." in name for i in range(more))
    }
    receipt = moesaic.convert(source, tmp_path / "out", to="hf")
    assert set(receipt["left_behind"]) == extra
    assert load_file(tmp_path / "out" / FILE).keys() == load_file(source / FILE).keys() - extra
    assert load_model(source).config.num_hidden_layers == layers


@pytest.mark.parametrize("said", [1, 0, "3", 10**9])
def test_no_more_layers_are_left_behind_than_the_configuration_says(said, tmp_path):
    source = with_more(tmp_path / "in", "Glm4Moe", 2, 3, num_nextn_predict_layers=said)
    line = refused(moesaic.convert, source, tmp_path / "out", to="hf")
    first = 3 if said == 1 else 2
    assert f"model.layers.{first}." in line or "is not a configuration" in line


@pytest.mark.parametrize("original", [True, False], ids=["hub's names", "present names"])
def test_files_of_the_model_without_its_output_are_read_if_the_output_is_tied(
    tmp_path: Path, original: bool
) -> None:
    """As `Qwen3MoeModel` saves them: without the prefix of the model below the output."""
    whole = build("Qwen3Moe", tie_word_embeddings=True)
    whole.tie_weights()
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "below", save_original_format=original)
    for name in ("whole", "below"):
        moesaic.convert(tmp_path / name, tmp_path / f"{name}-out", to="moesaic")
    assert_bitwise(tensors_of(tmp_path / "below-out"), tensors_of(tmp_path / "whole-out"))


def test_files_of_the_model_without_its_output_lack_an_output_of_its_own(tmp_path: Path) -> None:
    build("Qwen3Moe", tie_word_embeddings=False).model.save_pretrained(tmp_path / "below")
    line = refused(moesaic.convert, tmp_path / "below", tmp_path / "out", to="moesaic")
    assert line.endswith("1 tensors of the model are missing: lm_head.weight")
