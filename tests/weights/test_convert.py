"""Conversion: the receipt, optimizer states, refused inputs, and verification of the output."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import kinds_of_files, refused

pytest.importorskip("transformers", reason='pip install ".[transformers]"')

import huggingface_hub
from checkpoints import assert_bitwise, build, edit_json, save, tensors_of
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_saver
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.train.distributed_checkpoint import SHARDS, restore
from moesaic.weights.card import card
from moesaic.weights.convert import RECEIPT, verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Save a Mixtral in three safetensors files."""
    folder = save("Mixtral", tmp_path / "hub", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


def save_shards(folder: Path, tensors: dict[str, Any]) -> None:
    state_dict_saver.save(tensors, checkpoint_id=folder, no_dist=True)


def refusal(*arguments: Any, **options: Any) -> str:
    return refused(moesaic.convert, *arguments, **{"logits": False, **options})


def test_the_receipt_says_what_was_done_with_the_same_hashes_in_every_format(
    hub: Path, tmp_path: Path
) -> None:
    (hub / "tokenizer.json").write_text("{}")
    receipt = moesaic.convert(hub, tmp_path / "hf", to="hf")
    tensors = tensors_of(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / RECEIPT).read_text()) == json.loads(json.dumps(receipt))
    assert receipt["tensors"] == len(tensors) == len(tensors_of(hub))
    assert receipt["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert (receipt["moments"], receipt["left_behind"]) == ({}, [])
    experts = receipt["sha256"]["weights"]["model.layers.0.mlp.experts"]
    assert len(experts) == len(set(experts)) == 4
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    for to in ("moesaic", "torchtitan", "megatron"):
        assert (
            moesaic.convert(hub, tmp_path / to, to=to, logits=False)["sha256"] == receipt["sha256"]
        )


def test_the_card_is_the_hubs_and_keeps_the_license(tmp_path: Path) -> None:
    hub = save("Mixtral", tmp_path / "hub")
    (hub / "README.md").write_text(
        "---\nlicense: apache-2.0\nbase_model: a/b\ndatasets:\n- c\n---\n# The source's words\n"
    )
    receipt = moesaic.convert(hub, tmp_path / "titan", to="torchtitan")
    assert not (tmp_path / "titan" / "README.md").exists()
    receipt = moesaic.convert(hub, tmp_path / "hf", to="hf")
    written = huggingface_hub.ModelCard.load(tmp_path / "hf" / "README.md")
    assert written.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["moe", "moesaic"],
        "license": "apache-2.0",
    }
    assert f"| tensors, bytes | {receipt['tensors']:,}, {receipt['bytes']:,} |" in written.text
    assert "| largest difference of logits to the source | 0.0 |" in written.text
    assert "from a checkpoint in the format hf |" in written.text
    assert "source's words" not in written.text
    assert "not converted" not in written.text
    some = card(
        "mixtral",
        receipt | {"left_behind": ["step of a", "step of b"], "upcycled": {"num_experts": 8}},
    )
    assert "| not converted | step of a" in some
    assert "| made sparse | num_experts 8 |" in some


@pytest.mark.parametrize("to", ["hf", "moesaic"])
def test_verify_finds_a_flipped_bit_and_names_the_expert(
    hub: Path, tmp_path: Path, to: str, capsys: Any
) -> None:
    out = tmp_path / "out"
    moesaic.convert(hub, out, to=to, logits=False)
    assert main(["convert", "verify", str(out)]) == 0
    assert "8 experts are what the receipt says" in capsys.readouterr().out
    needle = load_file(hub / "model-00001-of-00003.safetensors")[
        "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    ]
    needle = needle.view(torch.int16).numpy().tobytes()
    (path,) = [path for path in out.rglob("*") if path.is_file() and needle in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(needle) + 11] ^= 1
    path.write_bytes(data)
    assert main(["convert", "verify", str(out)]) == 2
    err = capsys.readouterr().err
    line = (
        "expert 2 of model.layers.0.mlp.experts (weights) is not what the receipt says: convert "
        "or fetch it again"
    )
    assert err == f"moesaic convert: {out}: {line}\n"


def test_a_receipt_of_fewer_experts_is_not_that_of_the_output_and_none_is_refused(
    hub: Path, tmp_path: Path
) -> None:
    assert "receipt.json is missing: no conversion finished here" in refused(verify, hub)
    receipt = moesaic.convert(hub, tmp_path / "out", to="hf", logits=False)
    receipt["sha256"]["weights"]["model.layers.0.mlp.experts"].pop()
    (tmp_path / "out" / RECEIPT).write_text(json.dumps(receipt))
    lost = r"expert 3 of model\.layers\.0\.mlp\.experts \(weights\) is not what the receipt"
    with pytest.raises(InputError, match=lost):
        verify(tmp_path / "out")


def test_a_list_that_places_a_part_where_none_begins_is_refused(hub: Path, tmp_path: Path) -> None:
    moesaic.convert(hub, tmp_path / "a", to="torchtitan", logits=False)
    listed = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(listed.read_bytes())
    index = next(index for index in metadata.storage_data if index.offset)
    metadata.storage_data[replace(index, offset=torch.Size(each + 1 for each in index.offset))] = (
        metadata.storage_data.pop(index)
    )
    listed.write_bytes(pickle.dumps(metadata))
    assert "the list of tensors is damaged" in refusal(tmp_path / "a", tmp_path / "o", to="hf")


def test_shards_that_are_missing_cut_off_or_mixed_up(hub: Path, tmp_path: Path) -> None:
    second = hub / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-10])
    assert f"{second}: has {len(whole) - 10:,} bytes and needs {len(whole):,} for" in refusal(
        hub, tmp_path / "o", to="moesaic"
    )
    second.write_bytes(b"x" * 100)
    assert "is not a safetensors file" in refusal(hub, tmp_path / "o", to="moesaic")
    second.write_bytes((hub / "model-00003-of-00003.safetensors").read_bytes())
    assert "two checkpoints are mixed" in refusal(hub, tmp_path / "o", to="moesaic")
    second.unlink()
    assert f"{second} is missing: the index lists 3 files, fetch this one" in refusal(
        hub, tmp_path / "o", to="moesaic"
    )
    second.write_bytes(whole)
    (hub / "model.safetensors.index.json").unlink()
    assert "index.json is missing, and there are 3 safetensors files" in refusal(
        hub, tmp_path / "o", to="moesaic"
    )
    assert not (tmp_path / "o").exists()


def changed(folder: Path, **changes: Tensor | None) -> Path:
    """Save a Mixtral in one file, with tensors removed, added or replaced."""
    save("Mixtral", folder)
    tensors: dict[str, Any] = load_file(folder / "model.safetensors") | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / "model.safetensors",
    )
    return folder


def test_hidden_files_beside_the_weights_are_nobody_s_tensors(tmp_path: Path) -> None:
    """macOS leaves `._model.safetensors` on other file systems, an interrupted save its own."""
    folder = changed(tmp_path / "hub")
    for name in ("._model.safetensors", ".writing-1-model.safetensors"):
        (folder / name).write_bytes(b"no tensors")
    moesaic.convert(folder, tmp_path / "out", to="moesaic", logits=False)
    moesaic.convert(tmp_path / "out", tmp_path / "again", to="hf", logits=False)
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_keys_that_are_missing_or_unknown_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    source = changed(tmp_path / "a", **{name: None, "model.norm.weight": None})
    assert f"2 tensors of the model are missing: {name}, model.norm.weight" in refusal(
        source, tmp_path / "o", to="moesaic"
    )
    source = changed(tmp_path / "b", extra=torch.zeros(1))
    assert "1 tensors are unknown to the model: extra" in refusal(
        source, tmp_path / "o", to="moesaic"
    )
    source = changed(tmp_path / "c", **{"model.norm.weight": torch.zeros(7)})
    assert "model.norm.weight is [7], and the configuration makes it [32]" in refusal(
        source, tmp_path / "o", to="moesaic"
    )
    source = changed(tmp_path / "d", **{name: torch.zeros(32, 48)})
    assert "torch.float32" in refusal(source, tmp_path / "o", to="moesaic")


def test_what_is_asked_for_must_make_sense(hub: Path, tmp_path: Path) -> None:
    assert "choose one of hf, moesaic, torchtitan, megatron" in refusal(
        hub, tmp_path / "o", to="gguf"
    )
    assert "is not empty" in refusal(hub, hub, to="moesaic")
    assert "exists and is not a folder" in refusal(hub, hub / "config.json", to="moesaic")
    assert "config.json: exists and is not a folder" in refusal(
        hub, hub / "config.json" / "below", to="moesaic"
    )
    assert "no folder there" in refusal(tmp_path / "none", tmp_path / "o", to="moesaic")
    (tmp_path / "empty").mkdir()
    assert "no checkpoint of hf, moesaic" in refusal(
        tmp_path / "empty", tmp_path / "o", to="moesaic"
    )
    config = (hub / "config.json").read_text()
    (hub / "config.json").unlink()
    assert "no configuration there: name the model's transformers config.json" in refusal(
        hub, tmp_path / "o", to="moesaic"
    )
    (tmp_path / "config.json").write_text(config)
    moesaic.convert(
        hub, tmp_path / "o", to="moesaic", config=tmp_path / "config.json", logits=False
    )
    (hub / "config.json").write_text(json.dumps(json.loads(config) | {"model_type": "of_tomorrow"}))
    assert re.search(
        (
            r"not a configuration that transformers .* knows \(.*of_tomorrow.*\): update "
            r"transformers, or name .* --config$"
        ),
        refusal(hub, tmp_path / "p", to="moesaic"),
    )
    table = json.loads(config) | {"quantization_config": {"quant_method": "gptq"}}
    (hub / "config.json").write_text(json.dumps(table))
    assert "the weights are quantized" in refusal(hub, tmp_path / "p", to="moesaic")


def test_the_command_line(hub: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["convert", str(hub), str(tmp_path / "a"), "--to", "moesaic"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mixtral: hf to moesaic, 21 tensors, ")
    assert "largest difference of logits: 0\n" in out
    assert (
        main(
            [
                "convert",
                str(tmp_path / "a"),
                str(tmp_path / "b"),
                "--to",
                "hf",
                "--logits",
                "no",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["target"] == {"format": "hf"}
    assert main(["convert", "verify", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == 8
    assert main(["convert", str(hub), str(tmp_path / "c")]) == 2
    assert main(["convert", str(hub), str(tmp_path / "c"), "--to", "hf", "--top-k", "4"]) == 2
    assert "are of --experts" in capsys.readouterr().err


def trained(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """Train a tiny model for two steps and return it with its optimizer."""
    model = build("Qwen3Moe").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        ids = torch.arange(12)[None] + step
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {
            f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()
        }
    save_shards(folder / SHARDS, tensors)
    model.config.save_pretrained(folder)
    return model, optimizer


def test_an_optimizers_moments_go_along_and_come_back(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "a")
    receipt = moesaic.convert(tmp_path / "a", tmp_path / "b", to="torchtitan", logits=False)
    tensors = tensors_of(tmp_path / "b")
    state = optimizer.state[model.model.layers[1].mlp.experts.gate_up_proj]
    name = "optimizer.state.layers.1.moe.routed_experts.inner_experts.w3_EFD"
    assert torch.equal(tensors[f"{name}.exp_avg_sq"], state["exp_avg_sq"][:, 24:])
    assert float(tensors[f"{name}.step"]) == 2
    assert (
        receipt["moments"]["exp_avg"]["placed"]
        == receipt["moments"]["exp_avg"]["in the source"]
        > 20
    )
    moesaic.convert(tmp_path / "b", tmp_path / "c", to="moesaic", logits=False)
    assert_bitwise(tensors_of(tmp_path / "c"), tensors_of(tmp_path / "a"))
    assert verify(tmp_path / "c")["states"] == ["weights", "exp_avg", "exp_avg_sq", "step"]
    again = build("Qwen3Moe").float()
    fresh = torch.optim.AdamW(again.parameters(), lr=1e-3)
    restore(tmp_path / "c", again, fresh)
    assert_bitwise(again.state_dict(), model.state_dict())
    for parameter, other in zip(again.parameters(), model.parameters()):
        assert_bitwise(fresh.state[parameter], optimizer.state[other])


def test_moments_in_megatron_and_what_has_no_place_there(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "a")
    receipt = moesaic.convert(tmp_path / "a", tmp_path / "b", to="megatron", logits=False)
    assert sum(name.startswith("step of ") for name in receipt["left_behind"]) == 12
    down = tensors_of(tmp_path / "b")[
        "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc2.weight"
    ]
    assert torch.equal(
        down[1], optimizer.state[model.model.layers[1].mlp.experts.down_proj]["exp_avg"]
    )
    moesaic.convert(tmp_path / "b", tmp_path / "c", to="moesaic", logits=False)
    kept = {
        name: tensor
        for name, tensor in tensors_of(tmp_path / "a").items()
        if not name.endswith(".step")
    }
    assert_bitwise(tensors_of(tmp_path / "c"), kept)
    receipt = moesaic.convert(tmp_path / "b", tmp_path / "d", to="hf", logits=False)
    assert receipt["moments"]["exp_avg"]["placed"] == 0
    assert any(
        name.startswith("exp_avg of model.layers.0.mlp.experts.0")
        for name in receipt["left_behind"]
    )


def test_counters_that_differ_cannot_become_one(tmp_path: Path) -> None:
    trained(tmp_path / "a")
    moesaic.convert(tmp_path / "a", tmp_path / "b", to="torchtitan", logits=False)
    tensors = tensors_of(tmp_path / "b")
    tensors["optimizer.state.layers.1.moe.routed_experts.inner_experts.w3_EFD.step"] += 1
    save_shards(tmp_path / "odd", tensors)
    assert "step is not the same for all of" in refusal(
        tmp_path / "odd", tmp_path / "o", to="moesaic", config=tmp_path / "a"
    )


def test_what_megatron_adds_is_left_behind(hub: Path, tmp_path: Path) -> None:
    moesaic.convert(hub, tmp_path / "a", to="megatron", logits=False)
    tensors: dict[str, Any] = tensors_of(tmp_path / "a")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[name] = torch.cat([tensors[name], torch.ones(64, 32, dtype=torch.bfloat16)])
    tensors["decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0_2"] = [1, 2]
    save_shards(tmp_path / "b" / "iter_0000007", tensors)
    (tmp_path / "b" / "latest_checkpointed_iteration.txt").write_text("7")
    receipt = moesaic.convert(tmp_path / "b", tmp_path / "c", to="hf", config=hub, logits=False)
    assert receipt["left_behind"] == [
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0_2",
        "embedding.word_embeddings.weight: rows 64 to 127, which pad the vocabulary",
        "output_layer.weight: rows 64 to 127, which pad the vocabulary",
    ]
    assert_bitwise(tensors_of(tmp_path / "c"), tensors_of(hub))


def test_what_transformers_ignores_is_left_behind(tmp_path: Path) -> None:
    build("DeepseekV3").save_pretrained(tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    more = {
        "model.layers.61.enorm.weight": torch.zeros(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    save_file(tensors | more, tmp_path / "hub" / "model.safetensors")
    receipt = moesaic.convert(tmp_path / "hub", tmp_path / "a", to="moesaic", logits=False)
    assert receipt["left_behind"] == sorted(more)


class Payload:
    """Runs a command if a plain unpickler reads it."""

    def __reduce__(self) -> Any:
        return os.system, ("touch planted",)


def test_nothing_that_a_sharded_checkpoint_names_is_run(
    hub: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    moesaic.convert(hub, tmp_path / "a", to="torchtitan", logits=False)
    listed = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(listed.read_bytes())
    metadata.planner_data = Payload()
    listed.write_bytes(pickle.dumps(metadata))
    assert "it names posix.system" in refusal(tmp_path / "a", tmp_path / "o", to="hf")
    assert not Path("planted").exists()


def test_files_of_a_sharded_checkpoint_that_are_damaged_cut_off_or_missing(
    hub: Path, tmp_path: Path
) -> None:
    moesaic.convert(hub, tmp_path / "a", to="torchtitan", logits=False)
    (path,) = (tmp_path / "a").glob("*.distcp")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"PK", b"KP").replace(b"_rebuild", b"_rabuild"))
    assert f"{path}: byte 0: is damaged" in refusal(tmp_path / "a", tmp_path / "o", to="hf")
    path.write_bytes(whole[:-1000])
    assert "it is cut off or of another checkpoint" in refusal(
        tmp_path / "a", tmp_path / "o", to="hf"
    )
    path.unlink()
    assert f"{path} is missing" in refusal(tmp_path / "a", tmp_path / "o", to="hf")


def test_files_of_our_sharded_checkpoint_that_are_damaged_cut_off_missing_or_mixed(
    hub: Path, tmp_path: Path
) -> None:
    moesaic.convert(hub, tmp_path / "a", to="moesaic", logits=False)
    assert set(kinds_of_files(tmp_path / "a" / SHARDS).values()) == {"text", "safetensors"}
    (path,) = (tmp_path / "a" / SHARDS).glob("*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(b"\xff" + whole[1:])
    assert "is not a safetensors file, or its header is damaged" in refusal(
        tmp_path / "a", tmp_path / "o", to="hf"
    )
    path.write_bytes(whole[:-1000])
    assert "fetch it again" in refusal(tmp_path / "a", tmp_path / "o", to="hf")
    path.write_bytes(whole.replace(b"model.lm_head", b"model.lm_hand", 1))
    assert "does not hold the part of model.lm_head" in refusal(
        tmp_path / "a", tmp_path / "o", to="hf"
    )
    path.unlink()
    assert f"{path} is missing" in refusal(tmp_path / "a", tmp_path / "o", to="hf")
    (tmp_path / "a" / SHARDS / "index.json").write_text("{}")
    assert "is not the list of a checkpoint's tensors" in refusal(
        tmp_path / "a", tmp_path / "o", to="hf"
    )


def test_a_sharded_checkpoint_of_an_earlier_version_is_converted(hub: Path, tmp_path: Path) -> None:
    moesaic.convert(hub, tmp_path / "a", to="moesaic", logits=False)
    tensors = tensors_of(tmp_path / "a")
    save_shards(tmp_path / "before" / SHARDS, tensors)
    moesaic.convert(tmp_path / "before", tmp_path / "b", to="hf", config=hub, logits=False)
    assert_bitwise(tensors_of(tmp_path / "b"), tensors_of(hub))


def test_an_iteration_of_megatron_that_is_not_there_is_refused(hub: Path, tmp_path: Path) -> None:
    moesaic.convert(hub, tmp_path / "a", to="megatron", logits=False)
    (tmp_path / "a" / "release").rename(tmp_path / "a" / "elsewhere")
    for mark in (b"1", b"7" * 300, b"\xff\xfe", "\u00b2".encode()):
        (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_bytes(mark)
        assert ".metadata: cannot be read" in refused(verify, tmp_path / "a")


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    model = build("Qwen3Moe", tie_word_embeddings=True)
    model.tie_weights()
    model.save_pretrained(tmp_path / "hub")
    receipt = moesaic.convert(tmp_path / "hub", tmp_path / "a", to="megatron")
    assert receipt["logits"]["largest_difference"] == 0
    assert "output_layer.weight" not in tensors_of(tmp_path / "a")
    moesaic.convert(tmp_path / "a", tmp_path / "b", to="hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert_bitwise(
        again.state_dict(),
        AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype="auto").state_dict(),
    )


def test_the_page_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "convert.md"
    block, _ = re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert capsys.readouterr().out == "0.0\n"
    assert "layers.1.moe.routed_experts.inner_experts.w2_EDF" in tensors_of(tmp_path / "tiny-titan")


def test_what_a_link_shows_outside_a_checkpoint_is_not_copied(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("secret")
    (hub / "tokenizer_notes.txt").symlink_to(tmp_path / "credentials")
    assert refusal(hub, tmp_path / "out", to="hf") == (
        f"{str(hub / 'tokenizer_notes.txt')!r}: is a link to a file outside the checkpoint: take "
        "it away, or put that file in its place"
    )
    assert not (tmp_path / "out").exists()


def test_links_within_a_checkpoint_and_a_hubs_cache_are_copied_as_files(
    hub: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--me--mixtral"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    (cache / "blobs" / "a1").write_text("template")
    commit = hub.rename(cache / "snapshots" / "c0ffee")
    (commit / "chat_template.jinja").symlink_to("../../blobs/a1")
    (commit / "vocab.txt").symlink_to("chat_template.jinja")
    moesaic.convert(commit, tmp_path / "out", to="hf", logits=False)
    for name in ("chat_template.jinja", "vocab.txt"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_text() == "template"


@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a device"])
def test_what_is_not_a_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        hub = save("Mixtral", tmp_path / name)
        (hub / name).unlink(missing_ok=True)
        if kind == "a named pipe":
            os.mkfifo(hub / name)
        elif kind == "a folder":
            (hub / name).mkdir()
        else:
            (hub / name).symlink_to("/dev/zero")
        message = refusal(hub, tmp_path / "out", to="hf")
        is_outside = kind == "a device" and name == "tokenizer.json"
        assert (
            "is a link to a file outside" if is_outside else f"it is {kind}, not a file"
        ) in message
        assert not (tmp_path / "out").exists()


def test_a_configuration_chooses_no_code(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers fetches the kernels of a repository that is named as an implementation."""
    asked: list[str] = []
    monkeypatch.setitem(
        sys.modules, "kernels", SimpleNamespace(get_kernel=lambda name, **_: asked.append(name))
    )
    keys = ("attn_implementation", "_attn_implementation", "experts_implementation")
    edit_json(hub / "config.json", **dict.fromkeys(keys, "somebody/kernel@rev"))
    moesaic.convert(hub, tmp_path / "out", to="hf")
    assert asked == []
    assert "somebody/kernel" not in (tmp_path / "out" / "config.json").read_text()


def test_a_header_that_says_more_than_a_header_has_is_not_read(hub: Path, tmp_path: Path) -> None:
    first = min(hub.glob("*.safetensors"))
    with first.open("wb") as file:
        file.write((60 << 30).to_bytes(8, "little"))
        file.truncate(61 << 30)  # sparse
    assert "is not a safetensors file" in refusal(hub, tmp_path / "out", to="hf")


def test_an_output_that_another_process_writes_is_left_alone(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "writing").touch()
    assert "another process writes there" in refusal(hub, tmp_path / "out", to="hf")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["writing"]


def test_a_link_to_nothing_is_no_output(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    assert "exists and is not a folder" in refusal(hub, tmp_path / "out", to="hf")
    assert not (tmp_path / "nowhere").exists()


def test_all_files_of_an_output_have_the_mode_that_the_umask_gives(
    hub: Path, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        moesaic.convert(hub, tmp_path / "out", to="hf", logits=False)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
