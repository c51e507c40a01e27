"""`moesaic finetune` on CPU ranks from one command: losses, resuming, merging, and what it refuses
before it loads anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='pip install ".[transformers]"')
pytest.importorskip("peft", reason="pip install peft")

import peft
import quantized_models
from lora_ranks import FAMILIES, SIZES
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forked import Forked
from helpers import kinds_of_files
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.finetune import merge, recipe
from moesaic.finetune.data import sequences
from moesaic.finetune.loss import loss_in_parts
from moesaic.finetune.merge import write_merged
from moesaic.finetune.options import FinetuneOptions
from moesaic.resuming import COMPLETE
from moesaic.transformers import FourBitExpertsConfig
from moesaic.weights.load import load_model

FLAGS = (
    "--length",
    "16",
    "--batch",
    "4",
    "--steps",
    "4",
    "--save-every",
    "2",
    "--dtype",
    "float32",
    "--learning-rate",
    "0.01",
    "--device",
    "cpu",
)
IMPORTS = ("transformers", "moesaic.finetune.recipe")


def words_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    model = tokenizers.models.WordLevel(
        {f"w{number}": number for number in range(64)}, unk_token="w3"
    )
    of_words = tokenizers.Tokenizer(model)
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="w0", eos_token="w2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, its tokenizer, and a text."""
    path = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, intermediate_size=64, moe_intermediate_size=64, num_experts=4)
    Qwen3MoeForCausalLM(config).save_pretrained(path / "model")
    words_tokenizer().save_pretrained(path / "model")
    draws = torch.randint(4, 12, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    (path / "text.txt").write_text(" ".join(f"w{number}" for number in draws))
    return path


def on_ranks(place: Path, out: str, ranks: int, *flags: str) -> list[float]:
    """Run the command on several ranks; return the losses."""
    words = [
        str(place / "model"),
        str(place / "text.txt"),
        "--out",
        str(place / out),
        "--ranks",
        str(ranks),
    ]
    command = Forked(["-m", "moesaic", "finetune", *words, *FLAGS, *flags], {}, IMPORTS)
    said, errors = command.communicate(timeout=500)
    assert command.returncode == 0, errors
    assert "fine-tuning: step 4, loss" in said
    return losses(place / out)


def losses(out: Path) -> list[float]:
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def loss(model: Any) -> float:
    ids = torch.randint(4, 12, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids).loss)


def adapted(place: Path, out: str, of: str = "model") -> Any:
    base = AutoModelForCausalLM.from_pretrained(
        place / of,
        dtype=torch.float32,
        quantization_config=FourBitExpertsConfig(),
        experts_implementation="moesaic",
    )
    return peft.PeftModel.from_pretrained(base, place / out)


@pytest.fixture(scope="module")
def finished(place: Path) -> list[float]:
    """The losses of a run on two ranks, whose merged model is in two/merged."""
    return on_ranks(place, "two", 2, "--merge")


def test_two_ranks_train_like_one_process(place, finished):
    words = [str(place / "model"), str(place / "text.txt"), "--out", str(place / "one"), *FLAGS]
    assert main(["finetune", *words]) == 0
    assert losses(place / "one") == pytest.approx(finished, abs=1e-6)
    assert finished[-1] < finished[0] - 0.1
    assert loss(adapted(place, "one")) == pytest.approx(loss(adapted(place, "two")), abs=1e-5)


def test_no_file_of_a_run_is_a_pickle(place, finished):
    kinds = kinds_of_files(place / "two")
    states = {
        f"checkpoint-{step}/states-{rank}-of-2.safetensors" for step in (2, 4) for rank in (0, 1)
    }
    assert {name for name in kinds if "states-" in name} == states
    assert set(kinds.values()) == {"text", "safetensors"}


def test_the_merged_model_has_the_losses_of_the_adapters(place, finished):
    model = adapted(place, "two")
    expected = loss(model)
    assert loss(AutoModelForCausalLM.from_pretrained(place / "two" / "merged")) == pytest.approx(
        expected, abs=1e-6
    )
    with model.disable_adapter():
        assert loss(model) > expected + 0.1


def test_a_killed_run_goes_on_from_its_newest_complete_checkpoint_with_the_same_bits(
    place, finished
):
    shutil.copytree(place / "two", place / "killed")
    shutil.rmtree(place / "killed" / "merged")
    (place / "killed" / "checkpoint-4" / COMPLETE).unlink()  # killed while it was written
    assert on_ranks(place, "killed", 2, "--resume") == finished
    one, two = (adapted(place, name).state_dict() for name in ("two", "killed"))
    assert all(torch.equal(two[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("family", "method", "dtype"),
    [("gpt_oss", "qlora-double", "float32"), ("qwen3", "lora", "bfloat16")],
)
def test_families_and_methods_merge_into_what_they_computed(
    tmp_path, family, method, dtype, monkeypatch
):
    monkeypatch.setattr(merge, "SHARD_BYTES", 0)  # every weight fills a file, also the last
    torch.manual_seed(0)
    FAMILIES[family]().save_pretrained(tmp_path / "model")
    options = FinetuneOptions(
        model=str(tmp_path / "model"), data="", method=method, rank=4, dtype=dtype
    )
    base = AutoModelForCausalLM.from_pretrained(options.model, **recipe.loading(options, 1, "cpu"))
    model = recipe.adapt(base, options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    write_merged(
        model, options.model, tmp_path / "merged", getattr(torch, dtype), words_tokenizer()
    )
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "merged").glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == getattr(torch, dtype)
    assert loss(merged) == pytest.approx(loss(model), abs=1e-6 if dtype == "float32" else 0.005)
    with model.disable_adapter():
        assert abs(loss(model) - loss(merged)) > 0.01


def test_a_quantized_checkpoint_is_fine_tuned_as_the_numbers_it_means(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    plain = quantized_models.write(tmp_path, "fp8", model)
    (tmp_path / "fp8").rename(tmp_path / "model")
    quantized_models.save(model, tmp_path / "plain", plain, 1)
    for folder in ("model", "plain"):
        words_tokenizer().save_pretrained(tmp_path / folder)
    text = str(shutil.copy(place / "text.txt", tmp_path))
    found = on_ranks(tmp_path, "out", 2, "--merge")
    assert (
        main(["finetune", str(tmp_path / "plain"), text, "--out", str(tmp_path / "alone"), *FLAGS])
        == 0
    )
    assert losses(tmp_path / "alone") == pytest.approx(found, abs=1e-6)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert not hasattr(merged.config, "quantization_config")
    assert loss(merged) == pytest.approx(loss(adapted(tmp_path, "out", "plain")), abs=1e-6)


def test_the_loss_in_parts_and_its_gradients_are_those_of_transformers():
    ids = torch.randint(4, 12, (2, 16), generator=torch.Generator().manual_seed(3))
    labels = ids.masked_fill(ids == 5, -100)
    found = []
    for tokens in (None, 7):
        torch.manual_seed(0)
        model = FAMILIES["qwen3"]()
        assert tokens is None or loss_in_parts(model, ids[:1], tokens)
        for options in ({}, {"num_items_in_batch": 11}):
            value = model(input_ids=ids, labels=labels, **options).loss
            value.backward()
            found.append(
                (
                    value.detach(),
                    {name: each.grad.clone() for name, each in model.named_parameters()},
                )
            )
    for (loss, gradients), (other, others) in zip(found[:2], found[2:]):
        torch.testing.assert_close(other, loss)
        torch.testing.assert_close(others, gradients)


def test_a_family_that_caps_its_logits_keeps_its_loss():
    torch.manual_seed(0)
    model = FAMILIES["qwen3"]()
    ids = torch.arange(4, 20).unsqueeze(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    model.lm_head.register_forward_hook(lambda head, inputs, logits: 5 * torch.tanh(logits / 5))
    expected = model(input_ids=ids, labels=ids).loss
    assert not loss_in_parts(model, ids)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_a_run_of_moesaic_train_is_fine_tuned_with_its_own_tokenizer(tmp_path):
    text = tmp_path / "text.txt"
    run = tmp_path / "run"
    hub = tmp_path / "model"
    text.write_text("eins, zwö, trois 狐 ")
    text.write_text(text.read_text() * 300)
    sizes = "--model.conv-width 1 --model.dim 64 --model.moe.hidden 64"
    flags = (
        f"--preset gpt-tiny --out {run} --steps 4 --data.path {text} {sizes} --device cpu "
        "--no-tensorboard"
    )
    assert main(["train", *flags.split()]) == 0
    assert main(["convert", str(run), str(hub), "--to", "hf"]) == 0
    found = on_ranks(tmp_path, "out", 2, "--merge")
    assert found[-1] < found[0] - 0.05
    model = adapted(tmp_path, "out")
    merged = tmp_path / "out" / "merged"
    expected = loss(model)
    assert loss(AutoModelForCausalLM.from_pretrained(merged)) == pytest.approx(expected, abs=1e-6)
    with model.disable_adapter():
        assert abs(loss(model) - expected) > 0.01
    for folder in (hub, merged):
        assert AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"] == list(
            text.read_bytes()
        )


@pytest.mark.random
def test_four_ranks_train_and_merge_like_two(place, finished):
    assert on_ranks(place, "four", 4, "--merge") == pytest.approx(finished, abs=1e-6)
    merged = (
        loss(AutoModelForCausalLM.from_pretrained(place / name / "merged"))
        for name in ("two", "four")
    )
    assert next(merged) == pytest.approx(next(merged), abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--ranks", "3", "--batch", "3"], "3 ranks do not divide its 4 experts"),
        (
            ["--batch", "3", "--ranks", "2"],
            "--batch 3 is no multiple of 2 ranks times --micro-batch 1",
        ),
        (["--ranks", "4", "--pp", "3"], "3 stages do not divide 4 ranks"),
        (["--ranks", "4", "--pp", "4"], "has 2 layers: choose at most as many stages"),
        (["--micro-batches-in-flight", "2"], "--micro-batch is 1: choose an even one"),
        (["--memory-gib", "1"], "ranks would need"),
        (["--memory-gib", "1", "--ranks", "2", "--pp", "2"], "each of 2 ranks would need"),
        (["--resume"], "is missing or damaged: start anew"),
        (["--rank", "0"], "--rank 0: must be at least 1"),
        (["--length", "4000"], "fewer than one sequence: choose a --length of at most 501"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_leaves_nothing(place, capsys, flags, line):
    words = [
        str(place / "model"),
        str(place / "text.txt"),
        "--out",
        str(place / "none"),
        *FLAGS,
        *flags,
    ]
    assert main(["finetune", *words]) == 2
    (said,) = [
        each
        for each in capsys.readouterr().err.splitlines()
        if each.startswith("moesaic finetune:")
    ]
    assert line in said
    assert not (place / "none").exists()


def test_models_and_data_that_cannot_be_used_are_refused_in_one_line(place, capsys, tmp_path):
    dense = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    quantized = {**dense, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    for name, table in (("dense", dense), ("gptq", quantized), ("\x1b]52;model", None)):
        (tmp_path / name).mkdir()
        if table:
            (tmp_path / name / "config.json").write_text(json.dumps(table))
    shutil.copytree(place / "model", tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").write_text("{")
    shutil.copytree(place / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    shutil.copytree(place / "model", tmp_path / "greedy")
    table = json.loads((tmp_path / "greedy" / "config.json").read_text())
    greedy = json.dumps(table | {"num_experts_per_tok": 9})
    (tmp_path / "greedy" / "config.json").write_text(greedy)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("mine")
    model = str(place / "model")
    text = str(place / "text.txt")
    for words, line in (
        ([str(tmp_path / "dense"), text], "llama has no experts"),
        (
            [str(tmp_path / "gptq"), text],
            "the weights are quantized (gptq), and only fp8, mxfp4 and bitsandbytes are read: name",
        ),
        ([str(tmp_path / "\x1b]52;model"), text], "\\x1b]52;model: is neither a folder nor a name"),
        ([str(tmp_path / "mute"), text], "mute: has no tokenizer that transformers can load"),
        ([str(tmp_path / "bare"), text], "bare: has no tokenizer that transformers can load"),
        ([str(tmp_path / "greedy"), text], "num_experts_per_tok=9, but the model has 4 experts"),
        ([model, str(tmp_path / "no.txt")], "no.txt: no such file"),
        ([model, str(tmp_path / "empty.txt")], "empty.txt: is empty"),
        (
            [model, text, "--out", str(tmp_path / "used")],
            "is in use: choose another folder, or --resume",
        ),
    ):
        assert main(["finetune", *words, *FLAGS]) == 2
        said = capsys.readouterr().err
        assert "\x1b" not in said
        assert line in said
    assert (tmp_path / "used" / "mine.txt").read_text() == "mine"


def test_a_run_is_resumed_with_its_own_options_only(place, finished, capsys):
    words = [
        str(place / "model"),
        str(place / "text.txt"),
        "--out",
        str(place / "two"),
        *FLAGS,
        "--resume",
    ]
    assert main(["finetune", *words, "--rank", "4"]) == 2
    assert "has --rank 16: give the same" in capsys.readouterr().err


def test_data_may_be_lines_of_json_with_texts_or_messages(tmp_path):
    tokenizer = words_tokenizer()
    lines = [{"text": "w5 w6 w7"}, {"messages": [{"role": "user", "content": "w8 w9"}]}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    with pytest.raises(InputError, match="the model's tokenizer no chat template"):
        sequences(str(tmp_path / "data.jsonl"), tokenizer, 3, 1)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} w1{% endfor %}"
    rows = sequences(str(tmp_path / "data.jsonl"), tokenizer, 3, 2)
    assert rows.tolist() == [[5, 6, 7], [2, 8, 9]]
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    datasets.Dataset.from_dict({"text": ["w5 w6", "", "w7"]}).save_to_disk(tmp_path / "dataset")
    assert sequences(str(tmp_path / "dataset"), tokenizer, 5, 1).tolist() == [[5, 6, 2, 7, 2]]
    (tmp_path / "data.jsonl").write_text('{"text": "w5 \\ud83e w6"}\n')
    assert sequences(str(tmp_path / "data.jsonl"), tokenizer, 4, 1).tolist() == [[5, 3, 6, 2]]
    (tmp_path / "data.jsonl").write_text('{"prompt": "w5"}\n')
    with pytest.raises(InputError, match='neither "text" nor "messages"'):
        sequences(str(tmp_path / "data.jsonl"), tokenizer, 3, 1)
    (tmp_path / "data.jsonl").write_text("not JSON\n")
    with pytest.raises(InputError, match="line 1: cannot be read as JSON lines"):
        sequences(str(tmp_path / "data.jsonl"), tokenizer, 3, 1)


@pytest.mark.random
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_head_that_differs_from_the_embedding_is_merged(place, tmp_path, method):
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "model")
    words_tokenizer().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
    words = [
        str(tmp_path / "model"),
        str(place / "text.txt"),
        "--out",
        str(tmp_path / "out"),
        "--method",
        method,
    ]
    assert main(["finetune", *words, *FLAGS, "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert merged.config.tie_word_embeddings is False
    assert torch.equal(merged.lm_head.weight, head)
    if method == "qlora":
        assert loss(merged) == pytest.approx(loss(adapted(tmp_path, "out")), abs=1e-6)


def test_a_merged_model_that_computes_something_else_is_not_kept(
    place, tmp_path, monkeypatch, capsys
):
    right = merge._merged

    def wrong(module: Any, name: str, tensor: Any, wrapper: Any, *others: Any) -> Any:
        return right(module, name, tensor, None if name == "down_proj" else wrapper, *others)

    monkeypatch.setattr(merge, "_merged", wrong)
    words = [
        str(place / "model"),
        str(place / "text.txt"),
        "--out",
        str(tmp_path / "out"),
        "--method",
        "lora",
    ]
    assert main(["finetune", *words, *FLAGS, "--learning-rate", "0.5", "--merge"]) == 2
    assert (
        "the logits of the merged model differ from those of the adapted one by"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out" / "merged").exists()
    assert not list((tmp_path / "out").glob(".writing-*"))
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_tensor_without_a_place_in_the_merged_model_is_an_error(place, tmp_path):
    options = FinetuneOptions(
        model=str(place / "model"), data="", method="lora", rank=4, dtype="float32"
    )
    model = recipe.adapt(load_model(options.model, **recipe.loading(options, 1, "cpu")), options)
    model.get_base_model().model.layers[0].mlp.register_parameter(
        "extra", torch.nn.Parameter(torch.ones(2))
    )
    with pytest.raises(InputError, match=r"has no place for model\.layers\.0\.mlp\.extra"):
        write_merged(model, options.model, tmp_path / "merged", torch.float32, words_tokenizer())
    assert not (tmp_path / "merged").exists()


@pytest.mark.random
def test_a_model_under_present_names_is_fine_tuned_and_merged(place, tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=4)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model", save_original_format=False)
    words_tokenizer().save_pretrained(tmp_path / "model")
    words = [
        str(tmp_path / "model"),
        str(place / "text.txt"),
        "--out",
        str(tmp_path / "out"),
        "--method",
        "lora",
    ]
    assert main(["finetune", *words, *FLAGS, "--merge"]) == 0
    assert any(
        "w1.weight" in name
        for name in load_file(next((tmp_path / "out/merged").glob("model*.safetensors")))
    )
