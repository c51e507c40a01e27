"""A small model and a text to fine-tune it on, and what a finished run wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_ranks import SIZES
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic.cli.main import main

FLAGS = (
    *("--length", "16", "--batch", "4", "--steps", "4", "--save-every", "2", "--dtype", "float32"),
    *("--learning-rate", "0.01", "--device", "cpu", "--method", "lora", "--rank", "4"),
)
RESULT = "adapter_model.safetensors"


def words_tokenizer() -> Any:
    """Return a tokenizer that knows the words w0 to w63."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers")
    model = tokenizers.models.WordLevel(
        {f"w{number}": number for number in range(64)}, unk_token="w3"
    )
    of_words = tokenizers.Tokenizer(model)
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="w0", eos_token="w2")


def write_model(folder: Path, **fields: Any) -> Path:
    """Write a small Qwen3-MoE with a tokenizer; return its folder."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **(SIZES | fields), intermediate_size=64, moe_intermediate_size=64, num_experts=4
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


def write_text(path: Path, seed: int = 1) -> Path:
    """Write a text of 500 words; return its path."""
    draws = torch.randint(4, 12, (500,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text(" ".join(f"w{number}" for number in draws))
    return path


def finetune(
    place: Path, out: Path, *flags: str, model: str = "model", text: str = "text.txt"
) -> int:
    """Run the command in this process; return its exit code."""
    return main(
        ["finetune", str(place / model), str(place / text), "--out", str(out), *FLAGS, *flags]
    )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
