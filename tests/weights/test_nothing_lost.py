"""No tensor of a checkpoint is dropped, invented or read in another way than transformers does,
without an error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import refused

pytest.importorskip("transformers", reason='pip install "moesaic[transformers]"')

import transformers
from checkpoints import FAMILIES, WITHOUT, assert_bitwise, build, save, tensors_of
from safetensors.torch import load_file, save_file
from test_upcycle import dense

import moesaic
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.weights import hub as hubs
from moesaic.weights import upcycle as upcycling
from moesaic.weights.checkpoint import FORMATS, Checkpoint, open_checkpoint
from moesaic.weights.layout import Layout, full_region
from moesaic.weights.logits import compare
from moesaic.weights.model_tensors import Architecture
from moesaic.weights.source import read_config
from moesaic.weights.tensor_files import read_safetensors
from moesaic.weights.upcycle import Upcycling
from moesaic_lab.families import families, models_of, shrunk

FILE = "model.safetensors"
BY_COST = [
    pytest.param(
        name,
        marks=()
        if name == "GptOss"
        else pytest.mark.random
        if name == "Qwen3Next"
        else pytest.mark.slow,
    )
    for name in FAMILIES
]
"""All families: one for `make test`, one for `make test-random`, the rest slow."""
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def outputs(
    checkpoint: Checkpoint, layouts: dict[str, Layout]
) -> dict[tuple[str, str], np.ndarray]:
    """Return what each format would store of a checkpoint, by format and name."""
    return {
        (format, name): FORMATS[format]
        .converted(name, tensor, to_model=False)
        .read(full_region(tensor.shape))
        for format, layout in layouts.items()
        for name, tensor in checkpoint.into(layout).items()
    }


@pytest.mark.parametrize("family", BY_COST)
def test_one_changed_element_of_any_tensor_changes_one_element_of_every_output(
    family: str, tmp_path: Path
) -> None:
    build(family, num_hidden_layers=1 if family == "GptOss" else 2).save_pretrained(tmp_path)
    model = Architecture(read_config(tmp_path, None))
    checkpoint = open_checkpoint(tmp_path, "hf", model)
    layouts = {
        name: Layout(format.blocks(model, ()), model.shapes, name)
        for name, format in FORMATS.items()
        if (family, name) not in WITHOUT
    }
    before = outputs(checkpoint, layouts)
    hashes = checkpoint.digests()
    whole = (tmp_path / FILE).read_bytes()
    for name, stored in read_safetensors(tmp_path).items():
        data = bytearray(whole)
        data[stored.parts[0].start + stored.dtype.itemsize * 3] ^= 1
        (tmp_path / FILE).write_bytes(data)
        after = outputs(checkpoint, layouts)
        for format in layouts:
            changed = {key: (after[key] != before[key]).sum() for key in before if key[0] == format}
            assert sum(changed.values()) == 1, (name, format)
        assert checkpoint.digests() != hashes, name
    (tmp_path / FILE).write_bytes(whole)


@pytest.mark.parametrize("family", BY_COST)
def test_a_tensor_that_lacks_or_is_too_much_is_refused(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    model = Architecture(read_config(tmp_path, None))
    kinds = {name.rpartition(".")[2] for name in tensors} | {
        "bias",
        "weight_scale",
        "weight_scale_inv",
        "input_scale",
    }

    def opened(table: dict[str, Any]) -> Checkpoint:
        save_file(table, tmp_path / FILE, {"format": "pt"})
        return open_checkpoint(tmp_path, "hf", model)

    for name, tensor in tensors.items():
        with pytest.raises(InputError, match="1 tensors of the model are missing: " + name):
            opened({other: each for other, each in tensors.items() if other != name})
        more = {f"{name.rpartition('.')[0]}.{kind}" for kind in kinds} - tensors.keys()
        with pytest.raises(InputError, match=f"{len(more)} tensors are unknown to the model: "):
            opened(tensors | {other: tensor[:1].clone() for other in more})
    expert = [name for name in tensors if ".experts.3." in name]
    if expert:
        with pytest.raises(InputError, match=f"{len(expert)} tensors are unknown to the model: "):
            opened(
                tensors
                | {
                    name.replace(".experts.3.", ".experts.4."): tensors[name].clone()
                    for name in expert
                }
            )


@pytest.mark.parametrize("family", BY_COST)
def test_every_dtype_stays_and_mixed_ones_are_refused(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / FILE)
    single = [
        name
        for name in tensors
        if "norm" in name or name.endswith(("gate.weight", "sinks", "embed_tokens.weight"))
    ]
    wide = tensors | {name: tensors[name].float() for name in single}
    save_file(wide, tmp_path / "in" / FILE, {"format": "pt"})
    for number, (source, to) in enumerate([("in", "moesaic"), ("0", "hf")]):
        receipt = moesaic.convert(tmp_path / source, tmp_path / str(number), to=to)
        assert receipt["logits"]["largest_difference"] == 0
    assert_bitwise(tensors_of(tmp_path / "1"), wide)


@pytest.mark.random
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_any_family_of_transformers_converts_or_is_refused_in_one_line(
    family: Any, tmp_path: Path
) -> None:
    config_classes = dict.fromkeys(cls.config_class for cls in models_of(family))
    for number, kind in enumerate(config_classes):
        try:
            config = shrunk(kind)
        except Exception:
            continue  # the laboratory cannot shrink it
        reason = None
        try:
            model = Architecture(config)
            Layout(FORMATS["hf"].blocks(model, ()), model.shapes, "hf")
        except InputError as error:
            reason = str(error)
        if reason is not None:
            assert "\n" not in reason
            continue
        torch.manual_seed(0)
        source = tmp_path / str(number)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(source)
        moesaic.convert(source, source / "a", to="moesaic", logits=False)
        moesaic.convert(source / "a", source / "b", to="hf", logits=False)
        assert_bitwise(tensors_of(source / "b"), load_file(source / FILE))


def test_what_transformers_loads_in_another_way_is_an_error_and_leaves_nothing(
    tmp_path, monkeypatch, capsys
):
    save("Qwen3Moe", tmp_path / "hub")
    right = hubs._unstacked

    def swapped(tensor: str, shape: tuple[int, ...], names: list[str]) -> Any:
        """Take up projections for gate projections; down projections stay."""
        half = len(names) // 2
        return right(
            tensor, shape, names if shape[0] == len(names) else names[half:] + names[:half]
        )

    monkeypatch.setattr(hubs, "_unstacked", swapped)
    for to in ("moesaic", "hf"):
        assert main(["convert", str(tmp_path / "hub"), str(tmp_path / "out"), "--to", to]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        line = err.splitlines()[-1]
        assert "hub: transformers loads model.layers.0.mlp.experts.gate_up_proj" in line
        assert line.endswith("with other values than this program")
        assert not (tmp_path / "out").exists()


def test_an_upcycled_model_that_computes_another_function_is_an_error(tmp_path, monkeypatch):
    source = dense(tmp_path, "llama")
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(upcycling, "_scaled", lambda tensor, factor: tensor)
    with pytest.raises(
        InputError,
        match=r"out: its logits differ from those of the source by [\d.]+, of [\d.]+ at most",
    ):
        moesaic.convert(
            source, out, to="hf", upcycle=Upcycling(num_experts=4, top_k=2, granularity=2)
        )
    assert list(out.iterdir()) == []


def test_a_failure_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path, tensors: Any) -> None:
        (folder / "half").mkdir()
        (folder / "half" / FILE).write_bytes(b"x")
        raise OSError(28, "No space left on device")

    save("Mixtral", tmp_path / "hub")
    monkeypatch.setattr(FORMATS["moesaic"], "write", fails)
    with pytest.raises(OSError, match="No space left"):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="moesaic")
    assert not (tmp_path / "out").exists()


def test_of_two_conversions_into_one_folder_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("Mixtral", tmp_path / "hub")
    right = FORMATS["hf"].write
    refused = []

    def write(folder: Path, tensors: Any) -> None:
        with pytest.raises(
            InputError, match=r"is not empty|another process writes there"
        ) as caught:
            moesaic.convert(tmp_path / "hub", folder, to="hf", logits=False)
        refused.append(caught)
        right(folder, tensors)

    monkeypatch.setattr(FORMATS["hf"], "write", write)
    moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf", logits=False)
    assert len(refused) == 1
    assert moesaic.weights.convert.verify(tmp_path / "out")["experts"] == 8


def test_logits_that_are_not_numbers_agree_only_with_their_like() -> None:
    nan = float("nan")
    inf = float("inf")
    old = torch.tensor([1.0, nan, inf, -4.0])
    found = compare(old, torch.tensor([1.0, nan, inf, -4.0001]), Path("out"))
    assert (found["not_finite"], found["largest"]) == (2, 4)
    assert 0 < found["largest_difference"] < 4e-4
    for place, value in ((0, nan), (0, inf), (1, 1.0), (2, -inf), (2, nan), (3, -4.001)):
        new = old.clone()
        new[place] = value
        assert "its logits differ" in refused(compare, old, new, Path("out"))


def test_weights_that_are_not_numbers_are_converted_and_said(tmp_path: Path, capsys: Any) -> None:
    model = build("Qwen3Moe", num_hidden_layers=1)
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path / "hub")
    assert main(["convert", str(tmp_path / "hub"), str(tmp_path / "out"), "--to", "hf"]) == 0
    assert (
        "1024 logits are not finite, neither before nor after: look for them in the source\n"
        in capsys.readouterr().out
    )
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["logits"] == {
        "tokens": 16,
        "largest_difference": 0.0,
        "largest": 0.0,
        "not_finite": 1024,
    }
    assert_bitwise(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hub"))


def test_the_files_beside_the_weights_go_along_but_an_adapter_is_not_left_out_unseen(
    tmp_path: Path,
) -> None:
    hub = save("Mixtral", tmp_path / "hub")
    names = {
        "tokenizer_config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "vocab.txt",
    }
    for name in names | {"quantize_config.json", "receipt.json"}:
        (hub / name).write_text("{}")
    moesaic.convert(hub, tmp_path / "out", to="moesaic", logits=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {
        "config.json",
        "receipt.json",
        "shards",
    }
    (hub / "adapter_config.json").write_text("{}")
    with pytest.raises(
        InputError,
        match="an adapter lies beside the weights: merge it with PEFT's merge_and_unload",
    ):
        moesaic.convert(hub, tmp_path / "more", to="moesaic")


@pytest.mark.parametrize("kind", ["twice", "overlap"])
def test_a_header_with_two_tensors_in_one_place_or_of_one_name_is_refused(
    kind: str, tmp_path: Path
) -> None:
    save("Mixtral", tmp_path / "hub")
    path = tmp_path / "hub" / FILE
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    one, other = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
    if kind == "overlap":
        header[one] = header[other]
        text = json.dumps(header)
    else:
        text = json.dumps(header)[:-1] + f', "{one}": {json.dumps(header[one])}}}'
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])
    with pytest.raises(InputError, match="is not a safetensors file, or its header is damaged"):
        moesaic.convert(tmp_path / "hub", tmp_path / "out", to="hf", logits=False)


def test_models_with_other_parts_than_the_language_model_are_refused_in_one_line(
    tmp_path: Path, capsys: Any
) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / FILE)
    for kind in ("qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe", "gemma4_vision"):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": kind, "architectures": ["X"]})
        )
        assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "moesaic"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"moesaic convert: {kind}")
        assert "such as vision" in line
        assert not (tmp_path / "out").exists()


IMPOSSIBLE: list[dict[str, Any]] = [
    {"num_local_experts": 9223372036854775808},
    {"num_hidden_layers": 100_000_000},
    {"num_hidden_layers": 0},
    {"num_attention_heads": 0},
    {"quantization_config": 7},
    {"quantization_config": ["fp8"]},
    {"quantization_config": {"quant_method": ["fp8"]}},
]


def test_a_configuration_that_cannot_be_is_refused_in_one_line(tmp_path: Path, capsys: Any) -> None:
    path = save("Mixtral", tmp_path / "hub") / "config.json"
    table = json.loads(path.read_text())
    for changes in IMPOSSIBLE:
        path.write_text(json.dumps(table | changes))
        capsys.readouterr()
        assert (
            main(["convert", str(tmp_path / "hub"), str(tmp_path / "out"), "--to", "moesaic"]) == 2
        ), changes
        (line,) = capsys.readouterr().err.splitlines()
        assert "Traceback" not in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_integers_in_place_of_weights_are_refused(kind: torch.dtype, tmp_path: Path) -> None:
    build("Mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"], dtype=kind)
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    said = refused(open_checkpoint, tmp_path, "hf", Architecture(read_config(tmp_path, None)))
    name = str(kind).removeprefix("torch.")
    assert f"model.norm.weight holds {name}, and no scales of a known form" in said


@pytest.mark.parametrize("name", [FILE, "model-00009-of-00009.safetensors"])
def test_a_file_of_the_model_that_the_index_lacks_is_refused(name: str, tmp_path: Path) -> None:
    """transformers would read the first in place of the index, and leave out the second."""
    build("Mixtral").save_pretrained(tmp_path, max_shard_size="20KB")
    tensors = read_safetensors(tmp_path)
    save_file({"consolidated": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert read_safetensors(tmp_path).keys() == tensors.keys()
    save_file({"model.norm.weight": torch.zeros(16)}, tmp_path / name)
    assert f"{name} is not in the index: two checkpoints are mixed" in refused(
        read_safetensors, tmp_path
    )


def test_a_configuration_of_a_model_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    build("Mixtral").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"num_local_experts": 10**9}))
    said = refused(open_checkpoint, tmp_path, "hf", Architecture(read_config(tmp_path, None)))
    assert "the configuration makes 9,280,000," in said
    assert "use the model's own configuration, or fetch all files" in said
