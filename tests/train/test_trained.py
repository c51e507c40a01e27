"""A trained run as a model of the hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from helpers import refused
from moesaic.cli.main import main
from moesaic.errors import InputError
from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.models.gpt import GPT
from moesaic.shapes import BlockConfig
from moesaic.train.config import TrainConfig
from moesaic.train.state import Trained
from moesaic.train.tokenizer import ByteTokenizer, HubTokenizer
from moesaic.weights import run as runs
from moesaic.weights.run import export_run, to_hub, write_tokenizer
from runs import train_tokenizer

MIXTRAL = BlockConfig(kv_heads=2, tied=False)
QWEN3 = BlockConfig(kv_heads=2, head_dim=12, qk_norm=True, rope_theta=500.0, rope_factor=2.0)


def trained(block: BlockConfig, **changes: Any) -> Trained:
    moe = MoEConfig(num_experts=4, top_k=2, hidden=24, **changes.pop("moe", {}))
    shape = ModelConfig(
        **{
            "dim": 32,
            "num_layers": 2,
            "num_heads": 4,
            "seq_len": 16,
            "conv_width": 1,
            "block": block,
            "moe": moe,
            **changes,
        }
    )
    torch.manual_seed(0)
    model = GPT(shape, 256).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return Trained(Path("run"), TrainConfig(model=shape), model, ByteTokenizer())


@pytest.mark.parametrize(
    ("block", "changes", "name"),
    [
        (MIXTRAL, {}, "MixtralForCausalLM"),
        (BlockConfig(), {}, "MixtralForCausalLM"),
        (QWEN3, {}, "Qwen3MoeForCausalLM"),
        (QWEN3, {"num_layers": 4, "moe_every": 2}, "Qwen3MoeForCausalLM"),
    ],
    ids=["mixtral", "tied", "qwen3", "every other layer dense"],
)
def test_a_run_on_the_hub_gives_the_same_logits(block, changes, name, tmp_path):
    run = trained(block, **changes)
    to_hub(run).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == name
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(tokens).logits, run.model(tokens).logits, rtol=2e-4, atol=2e-4
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_width": 4}, r"do not support model\.conv_width=4, the short convolutions"),
        ({"moe": {"shared_hidden": 8}}, r"do not support model\.moe\.shared_hidden=8"),
        ({"moe": {"router": "sigmoid"}}, r"do not support model\.moe\.router=sigmoid"),
        ({"moe_every": 2}, r"do not support model\.moe_every=2 without model\.block\.qk_norm"),
        ({"ffn": "dense"}, r"do not support model\.ffn=dense"),
    ],
)
def test_what_the_hub_has_no_model_for_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        to_hub(trained(MIXTRAL, **changes))
    assert "\n" not in str(refusal.value)


def test_one_command_makes_a_model_of_the_hub_of_a_run(tmp_path, capsys, monkeypatch):
    text = tmp_path / "text.txt"
    run = tmp_path / "run"
    out = tmp_path / "hub"
    text.write_text("one and two and three. " * 400)
    flags = (
        f"--preset gpt-tiny --out {run} --steps 2 --data.path {text} --model.conv-width 1 "
        "--device cpu --no-tensorboard"
    )
    assert main(["train", *flags.split()]) == 0
    assert main(["convert", str(run), str(out), "--to", "hf"]) == 0
    said = capsys.readouterr().out
    assert "MixtralForCausalLM" in said
    assert "; with its tokenizer\n" in said
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("né")["input_ids"] == [110, 195, 169]
    assert re.search(r"^largest difference of logits: \d\S*$", said, re.MULTILINE)
    assert json.loads((out / "config.json").read_text())["model_type"] == "mixtral"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).logits.isfinite().all()
    assert "| parameters | " in (out / "README.md").read_text()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    assert "is not empty" in refused(export_run, run, out)
    right = runs.hub_values
    monkeypatch.setattr(
        runs,
        "hub_values",
        lambda model: right(model) | {"model.norm.weight": 2 * model.norm.weight.detach()},
    )
    assert "the hub's model has no place for norm.weight" in refused(
        export_run, run, tmp_path / "lost"
    )
    monkeypatch.setattr(runs, "hub_values", right)
    monkeypatch.setattr(runs, "EPS", 0.1)
    assert main(["convert", str(run), str(tmp_path / "other"), "--to", "hf"]) == 2
    assert re.search(
        r"other: its logits differ from those of the source by .*\n$", capsys.readouterr().err
    )
    assert not (tmp_path / "lost").exists()
    assert not (tmp_path / "other").exists()


def wrapping() -> tokenizers.Tokenizer:
    """Return a BPE that puts special tokens around a text."""
    tokenizer = train_tokenizer(TEXT, 320)
    around = [("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=around
    )
    return tokenizer


TEXT = (
    "naïve 狐\0 🦊 \u0300\ufffd\u00a0Ā\r\n\t  don't </s><|endoftext|> the quick brown fox"
    + "".join(chr(number) for number in range(0x3000))
)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), HubTokenizer(train_tokenizer(TEXT, 320)), HubTokenizer(wrapping())],
    ids=["bytes", "bpe", "wrapping"],
)
def test_transformers_encodes_and_decodes_like_the_tokenizer_of_the_run(
    family, tokenizer, tmp_path
):
    transformers.AutoConfig.for_model(family).save_pretrained(tmp_path)
    write_tokenizer(tokenizer, tmp_path)
    for again in (None, tmp_path / "again"):
        theirs = transformers.AutoTokenizer.from_pretrained(again or tmp_path)
        ids = tokenizer.encode(TEXT.encode()).tolist()
        assert theirs(TEXT)["input_ids"] == ids
        assert theirs.decode(ids) == TEXT == tokenizer.decode(ids)
        assert (theirs.eos_token_id, len(theirs)) == (tokenizer.separator, tokenizer.vocab_size)
        theirs.save_pretrained(tmp_path / "again")


def test_a_run_of_tokens_without_a_named_tokenizer_gets_none_on_the_hub(tmp_path, capsys):
    tokens = tmp_path / "tokens.bin"
    run = tmp_path / "run"
    out = tmp_path / "hub"
    torch.randint(0, 256, (4000,)).to(torch.uint16).numpy().tofile(tokens)
    flags = (
        f"--preset gpt-tiny --out {run} --steps 1 --data.path {tokens} --model.conv-width 1 "
        "--device cpu --no-tensorboard"
    )
    assert main(["train", *flags.split()]) == 0
    assert main(["convert", str(run), str(out), "--to", "hf"]) == 0
    assert "without a tokenizer, since the run's .bin files name none\n" in capsys.readouterr().out
    assert not list(out.glob("tokenizer*"))
