"""What the scripts of this folder share: small random models of each family, a tokenizer, and
texts.

Every script takes a model's name on the hub, or trains a small random one of the family that it
names first.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import moesaic.transformers  # noqa: F401

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "eos_token_id": 257,
    "bos_token_id": 258,
}
"""Sizes that all families name alike; tokens are bytes and a few special ones."""
FAMILIES = {
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 96,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 128,
        "moe_intermediate_size": 96,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""The rest, by family."""
TEXTS = [
    f"{word} of {count} is {count * 2}. " * 8 for word in ("twice", "double") for count in range(32)
]


def config_of(family: str) -> PretrainedConfig:
    """Return the configuration of a small model of a family."""
    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))


def load(default: str = "olmoe") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer that the command line names: a family, a name on the hub,
    or the default family."""
    name = sys.argv[1] if len(sys.argv) > 1 else default
    if name not in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moesaic")
        return model, AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), experts_implementation="moesaic")
    return model, tokenizer_of_bytes()


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<pad>": 256, "<eos>": 257, "<bos>": 258, "<unk>": 259}
    vocabulary = {letter: number for number, letter in enumerate(letters)} | special
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )


def settings(folder: str, steps: int = 6) -> dict[str, object]:
    """Return the arguments that every trainer takes: a few steps, a line for each, and nothing
    saved."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def pretrain(family: str) -> None:
    """Train the model of the command line, or a small one of the family, on the texts by
    transformers' Trainer."""
    model, tokenizer = load(family)
    rows = [tokenizer(text, return_tensors="pt")["input_ids"][0][:96] for text in TEXTS]
    data = [{"input_ids": row, "labels": row} for row in rows if len(row) == 96]
    given = TrainingArguments(**settings(f"runs/{family}", steps=12))
    trainer = Trainer(model=model.train(), args=given, train_dataset=data)
    trainer.train()
    show(trainer.state.log_history)


def show(history: list[dict[str, float]]) -> None:
    """Print the loss of each step."""
    for entry in history:
        if "loss" in entry:
            print(f"loss {float(entry['loss']):.4f}")
