"""What a stranger's configuration, tokenizer and generation settings may choose: no code, no
implementation, no other model."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

import transformers
from checkpoints import edit_json, save
from finetuned import FLAGS, words_tokenizer, write_model, write_text
from transformers import modeling_utils

import moesaic
from helpers import refused
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.weights.load import load_model
from moesaic.weights.source import companions, read_config, read_generation, read_tokenizer

EVIL = "kernels-community/evil@abc"
CHOICES: list[dict[str, Any]] = [
    {"output_attentions": True, "output_hidden_states": True},
    {"return_dict": False},
    {"attn_implementation": EVIL},
    {"_attn_implementation": EVIL},
    {"_attn_implementation_internal": EVIL},
    {"attn_implementation": {"": EVIL}},
    {"experts_implementation": EVIL, "_experts_implementation_internal": EVIL},
    {"attribute_map": {"innocent": "_attn_implementation_internal"}, "innocent": EVIL},
    {
        "auto_map": {
            "AutoConfig": "evil/repository--code.Config",
            "AutoModelForCausalLM": "code.Model",
        }
    },
    {"trust_remote_code": True, "auto_map": {"AutoModelForCausalLM": "code.Model"}},
    {
        "fusion_config": {"patch": True},
        "distributed_config": {"tp_size": 2},
        "transformers_weights": "/etc/passwd",
    },
]


class FetchedError(Exception):
    """Raised where code would be fetched."""


@pytest.fixture
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make whatever loads kernels or code of a repository raise."""

    def fetch(*given: Any, **named: Any) -> None:
        raise FetchedError(given)

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", fetch)
    monkeypatch.setattr(transformers.dynamic_module_utils, "get_cached_module_file", fetch)
    monkeypatch.setattr(
        transformers.models.auto.tokenization_auto, "get_class_from_dynamic_module", fetch
    )
    monkeypatch.setattr(
        transformers.models.auto.tokenization_auto, "resolve_trust_remote_code", fetch
    )


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: next(iter(choice)))
@pytest.mark.usefixtures("nothing_is_fetched")
def test_no_command_lets_a_configuration_choose_code(tmp_path, choice):
    model = write_model(tmp_path / "model")
    text = write_text(tmp_path / "text.txt")
    plain = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(choice | plain | {"innocent": [{"deep": choice}]})
    )
    words = [
        "finetune",
        str(model),
        str(text),
        "--out",
        str(tmp_path / "out"),
        *FLAGS,
        "--steps",
        "1",
        "--merge",
    ]
    assert main(words) == 0
    moesaic.convert(model, tmp_path / "converted", to="moesaic")
    loaded = load_model(model)
    assert (loaded.config._attn_implementation, loaded.config._experts_implementation) == (
        "sdpa",
        "grouped_mm",
    )
    for folder in ("out/merged", "converted"):
        written = (tmp_path / folder / "config.json").read_text()
        for name in {"auto_map", "attribute_map", *choice} - {"innocent"}:
            assert f'"{name}"' not in written


def test_a_nested_configuration_chooses_no_code(tmp_path):
    config = transformers.Qwen3VLMoeConfig()
    config.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    edit_json(
        tmp_path / "config.json",
        text_config=CHOICES[0] | CHOICES[4] | CHOICES[6] | table["text_config"],
    )
    found = read_config(tmp_path)
    assert type(found.text_config) is type(config.text_config)
    assert found.text_config._attn_implementation is None
    assert found.text_config._experts_implementation is None
    assert "evil" not in found.to_json_string(use_diff=False)


@pytest.mark.parametrize(
    "names",
    [
        ("to_dict", "save_pretrained"),
        ("get_text_config",),
        ("update", "validate"),
        ("__class__",),
        ("sub_configs",),
    ],
)
def test_an_entry_replaces_no_method_of_a_configuration(tmp_path, names):
    folder = save("Mixtral", tmp_path / "hub")
    edit_json(folder / "config.json", **dict.fromkeys(names, "x"))
    assert read_config(folder).to_dict()["model_type"] == "mixtral"


@pytest.mark.usefixtures("nothing_is_fetched")
def test_a_tokenizer_is_made_by_a_class_of_transformers(tmp_path):
    folder = write_model(tmp_path / "model")
    edit_json(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil/repository--code.Slow", "code.Fast"]},
        tokenizer_class="EvilTokenizer",
        tokenizer_file="/etc/passwd",
        trust_remote_code=True,
        _commit_hash="abc",
    )
    tokenizer = read_tokenizer(folder, "name")
    assert type(tokenizer).__module__.startswith("transformers.")
    assert tokenizer("w5 w6")["input_ids"] == [5, 6]
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert saved.keys().isdisjoint(
        {"auto_map", "tokenizer_file", "trust_remote_code", "_commit_hash"}
    )


def test_a_tokenizer_whose_files_are_missing_is_not_looked_for_elsewhere(tmp_path):
    folder = write_model(tmp_path / "model")
    other = tmp_path / "other"
    words_tokenizer().save_pretrained(other)
    (folder / "tokenizer.json").unlink()
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_file=str(other / "tokenizer.json"),
        name_or_path=str(other),
    )
    assert "has no tokenizer that transformers can load" in refused(read_tokenizer, folder, "model")


def test_a_tokenizer_is_not_read_through_a_link_out_of_the_folder(tmp_path):
    folder = write_model(tmp_path / "model")
    shutil.move(folder / "tokenizer.json", tmp_path / "secret.json")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    assert "is a link to a file outside the checkpoint" in refused(read_tokenizer, folder, "model")


def test_an_adapter_beside_the_weights_loads_no_other_model(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    text = write_text(tmp_path / "text.txt")
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "evil/model", "peft_type": "LORA"})
    )
    line = "adapter_config.json: an adapter lies beside the weights"
    assert line in refused(load_model, folder)
    assert line in refused(moesaic.convert, folder, tmp_path / "out", to="hf")
    assert main(["finetune", str(folder), str(text), "--out", str(tmp_path / "out"), *FLAGS]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_generation_settings_choose_no_code(tmp_path):
    folder = save("Mixtral", tmp_path / "hub")
    table = {
        "temperature": 0.5,
        "to_dict": 1,
        "custom_generate": "evil/repository",
        "auto_map": {"a": "b"},
    }
    (folder / "generation_config.json").write_text(json.dumps(table))
    settings = read_generation(folder)
    assert settings.temperature == 0.5
    assert settings.to_dict().keys().isdisjoint({"custom_generate", "auto_map"})
    assert json.loads(companions(folder)["generation_config.json"]) == {"temperature": 0.5}
    (folder / "generation_config.json").write_text("[1]")
    assert "are no settings that transformers knows" in refused(read_generation, folder)


def test_a_broken_package_is_named_in_place_of_the_configuration(tmp_path, monkeypatch):
    folder = save("Mixtral", tmp_path / "hub")
    (tmp_path / "broken_pkg.py").write_text('raise RuntimeError("no such symbol")')
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("AutoModelForCausalLM.from_config", "AutoConfig.for_model"):
        with monkeypatch.context() as during:
            during.setattr(f"transformers.{name}", lambda *a, **b: import_module("broken_pkg"))
            line = refused(moesaic.convert, folder, tmp_path / "out", to="moesaic")
            assert line.startswith("the package broken_pkg is installed and cannot be imported")


def test_further_chat_templates_are_copied(tmp_path):
    folder = save("Mixtral", tmp_path / "hub")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    moesaic.convert(folder, tmp_path / "out", to="hf", logits=False)
    copied = tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "{{ tools }}"
    outside = shutil.move(folder / "additional_chat_templates", tmp_path / "outside")
    (folder / "additional_chat_templates").symlink_to(outside)
    line = "tool_use.jinja': is a link to a file outside the checkpoint"
    assert line in refused(moesaic.convert, folder, tmp_path / "other", to="hf")


def test_files_without_choices_are_copied_byte_by_byte(tmp_path):
    folder = save("Mixtral", tmp_path / "hub")
    text = '{ "temperature": 0.5,\n"x": {"__float__": "Infinity"}}'
    (folder / "generation_config.json").write_text(text)
    assert companions(folder)["generation_config.json"] == text.encode()


@pytest.mark.parametrize("dtype", ["load", "nn", 7])
def test_a_dtype_that_is_none_is_refused(tmp_path, dtype):
    folder = save("Mixtral", tmp_path / "hub")
    edit_json(folder / "config.json", dtype=dtype)
    with pytest.raises(InputError, match="is not a configuration that transformers"):
        read_config(folder)
