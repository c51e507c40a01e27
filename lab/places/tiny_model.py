"""Write a tiny Qwen3-MoE with random weights, and a tokenizer of bytes, for `moesaic finetune`:
`python tiny_model.py FOLDER`.

It is made of a configuration, so nothing is downloaded. Needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import sys
from pathlib import Path

END = "<|endoftext|>"


def write(folder: Path) -> None:
    """Write the model and its tokenizer into a folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    letters = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))  # without merges: a token is a byte
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        eos_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=END, eos_token=END
    ).save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
