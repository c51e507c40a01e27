"""Exports a run of `moesaic train` as a checkpoint for the Hugging Face hub: Mixtral or, with QK
norm, Qwen3-MoE.

Without its short convolutions, our transformer block equals theirs: RMSNorm before each layer,
rotary positions, grouped-query attention, SwiGLU experts, and a softmax over the chosen experts.
Options that these models lack are refused by name. Capacities and losses are dropped, since they
matter in training only; the hub's models are dropless.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

from moesaic.errors import InputError, to_install
from moesaic.experts import FourBitExperts
from moesaic.files import write
from moesaic.layer import MoE
from moesaic.models.attention import Attention
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT, TransformerBlock
from moesaic.routing.capacity import Dropless
from moesaic.train.state import Trained, load_trained
from moesaic.train.tokenizer import AbstractTokenizer
from moesaic.weights.card import CARD, card
from moesaic.weights.layout import first_names
from moesaic.weights.logits import compare, compares_logits, fixed_text
from moesaic.weights.tensor_files import filling, require_room

EPS = torch.finfo(torch.float32).eps
"""Epsilon of our RMSNorm in float32."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run of `moesaic train`."""
    return (folder / "checkpoints").is_dir() and (folder / "config.json").exists()


def export_run(folder: Path, out: Path, *, logits: bool | None = None) -> dict[str, Any]:
    """Write a run's newest checkpoint in the format of the hub.

    Args:
        out: the folder to write; must not exist or be empty.
        logits: whether to compare the logits of the run's model with those of the written one, as
            transformers loads it; None to do so for models of at most 2 GiB.

    Returns:
        "model" (its class in transformers), "parameters" (their number), "tokenizer" (whether the
        run has one, which was written), "logits" (as in a receipt; None if they were not compared).

    Raises:
        InputError: there is no run, its model has no equivalent in transformers, or logits differ
            by more than rounding.
    """
    require_room(out)
    trained = load_trained(folder, "cpu")
    model = to_hub(trained)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with filling(out):
        model.save_pretrained(out)
        if trained.text is not None:  # the run's tokenizer
            write_tokenizer(trained.text, out)
        summary = {
            "model": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "tokenizer": trained.text is not None,
            "logits": _compared(trained, out) if compares_logits(size, logits) else None,
        }
        write(out / CARD, card(model.config.model_type, summary))
    return summary


def write_tokenizer(tokenizer: AbstractTokenizer, out: Path) -> None:
    """Write a run's tokenizer so that transformers' AutoTokenizer encodes as it does; separators
    become ends of text.

    Text is text to a run, where transformers would find special tokens in it or add some around it.
    """
    theirs = tokenizers.Tokenizer.from_str(tokenizer.text)
    theirs.post_processor = None  # which adds tokens around a text
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": theirs.id_to_token(tokenizer.separator),
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    write(out / "tokenizer.json", theirs.to_str(pretty=True))
    write(out / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")


@torch.no_grad()
def _compared(trained: Trained, out: Path) -> dict[str, Any]:
    """Compare the logits of a run's model, without capacities, with those of the model that
    transformers loads."""
    for module in trained.model.modules():
        if isinstance(module, MoE):
            module.eval_capacity = Dropless()
    tokens = fixed_text(trained.model.vocab_size)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, local_files_only=True
    )
    return compare(trained.model.eval()(tokens).logits, theirs.eval()(input_ids=tokens).logits, out)


def to_hub(trained: Trained) -> Any:
    """Return a run's model as a transformers model in float32, with adapters merged into its
    experts.

    Raises:
        InputError: the model has no equivalent in transformers. The message names the option.
    """
    config = hub_config(trained.config.model, trained.model.vocab_size, str(trained.folder))
    # `text` is the run's tokenizer; None if it was trained on .bin files that name none
    config.eos_token_id = None if trained.text is None else trained.text.separator
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in [module for module in trained.model.modules() if isinstance(module, MoE)]:
        if isinstance(layer.experts, FourBitExperts):
            layer.experts = layer.experts.merged()
    values = hub_values(trained.model)
    # The values are views of our tensors: one without a view has no place.
    placed = {value.untyped_storage().data_ptr() for value in values.values()}
    lost = [
        name
        for name, tensor in trained.model.state_dict().items()
        if tensor.untyped_storage().data_ptr() not in placed
    ]
    if lost:
        raise InputError(f"{trained.folder}: the hub's model has no place for {first_names(lost)}")
    missing, unknown = model.load_state_dict(values, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    not_loaded = [name for name in missing if name not in tied]
    if not_loaded or unknown:
        raise InputError(
            f"{trained.folder}: transformers {transformers.__version__} has other names for the "
            f"tensors, such as {(not_loaded + unknown)[0]}: {to_install('.[transformers]')}, "
            "which brings the right version"
        )
    return model


def hub_config(shape: ModelConfig, vocab_size: int, where: str) -> Any:
    """Return the transformers configuration that is equivalent to a model configuration of ours.

    Args:
        vocab_size: number of token ids.
        where: the run, for messages.

    Raises:
        InputError: neither Mixtral nor Qwen3-MoE is equivalent.
    """
    _refuse_without_equivalent(shape, where)
    moe = shape.moe
    common = _common_config(shape, vocab_size)
    if not shape.block.qk_norm:
        return transformers.MixtralConfig(
            **common,
            intermediate_size=moe.hidden,
            num_local_experts=moe.num_experts,
            sliding_window=None,
        )
    return transformers.Qwen3MoeConfig(
        **common,
        intermediate_size=shape.active_hidden,  # of the layers without experts
        moe_intermediate_size=moe.hidden,
        num_experts=moe.num_experts,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[layer for layer in range(shape.num_layers) if not shape.is_sparse(layer)],
    )


def _refuse_without_equivalent(shape: ModelConfig, where: str) -> None:
    """Raise InputError if neither Mixtral nor Qwen3-MoE is equivalent to a configuration."""
    block = shape.block
    moe = shape.moe
    is_sparse = all(shape.is_sparse(layer) for layer in range(shape.num_layers))
    reasons = (
        (block.kind != "decoder", f"model.block.kind={block.kind}"),
        (block.norm != "rms", f"model.block.norm={block.norm}"),
        (block.positions == "learned", f"model.block.positions={block.positions}"),
        (block.bias, "model.block.bias=true"),
        (
            shape.conv_width > 1,
            f"model.conv_width={shape.conv_width}, the short convolutions: train with "
            "--model.conv-width 1",
        ),
        (shape.is_dense, f"model.ffn={shape.ffn}"),
        (moe.experts != "swiglu", f"model.moe.experts={moe.experts}"),
        (moe.router != "softmax", f"model.moe.router={moe.router}"),
        (moe.shared_hidden > 0, f"model.moe.shared_hidden={moe.shared_hidden}"),
        (
            not is_sparse and not block.qk_norm,
            f"model.moe_every={shape.moe_every} without model.block.qk_norm",
        ),
    )
    for holds, what in reasons:
        if holds:
            raise InputError(f"{where}: Mixtral and Qwen3-MoE do not support {what}")


def _common_config(shape: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the fields that have the same names in Mixtral's and Qwen3-MoE's configurations."""
    block = shape.block
    factor = block.rope_factor
    rope: dict[str, Any] = {
        "rope_type": "default" if factor == 1 else "linear",
        "rope_theta": block.rope_theta,
    }
    return {
        "vocab_size": vocab_size,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.seq_len,
        "rms_norm_eps": block.norm_eps or EPS,
        "tie_word_embeddings": block.tied,
        "rope_parameters": rope if factor == 1 else {**rope, "factor": factor},
        "num_experts_per_tok": shape.moe.top_k,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def hub_values(model: GPT) -> dict[str, Tensor]:
    """Return the weights of a model by the names that they have in transformers' Mixtral and
    Qwen3-MoE. The tensors are views of the model's own."""
    values: dict[str, Any] = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": (model.unembedding or model.embedding).weight,
    }
    for number, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        of_block = {
            "input_layernorm.weight": block.attention_norm.weight,
            "post_attention_layernorm.weight": block.ffn_norm.weight,
            **_attention(block.attention),
            **_feed_forward(block.ffn),
        }
        for name, value in of_block.items():
            values[f"model.layers.{number}.{name}"] = value
    detached: dict[str, Tensor] = {name: value.detach() for name, value in values.items()}
    return detached


def _feed_forward(ffn: Any) -> dict[str, Any]:
    """Return the weights of a feed-forward layer by their names in a layer of transformers."""
    if isinstance(ffn, MoE):
        w13 = ffn.experts.get_parameter("w13")  # (experts, 2, hidden, dim)
        return {
            "mlp.gate.weight": ffn.router.get_parameter("weight"),
            "mlp.experts.gate_up_proj": w13.flatten(1, 2),
            "mlp.experts.down_proj": ffn.experts.get_parameter("w2"),
        }
    dense = ffn.expert  # a dense layer is one expert, whose weights are (1, out, in)
    return {
        "mlp.gate_proj.weight": dense.w1[0],
        "mlp.up_proj.weight": dense.w3[0],
        "mlp.down_proj.weight": dense.w2[0],
    }


def _attention(attention: Attention) -> dict[str, Tensor]:
    """Return the weights of an attention layer by their names in a layer of transformers."""
    # Projections of the same input are one weight, (projections, out, in).
    if attention.qkv is not None:
        q, k, v = attention.qkv.weight
    else:
        assert attention.q is not None
        assert attention.kv is not None
        (q,) = attention.q.weight
        k, v = attention.kv.weight
    weights = {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": attention.out.weight,
    }
    if attention.q_norm is not None:
        weights["self_attn.q_norm.weight"] = attention.q_norm.weight
    if attention.k_norm is not None:
        weights["self_attn.k_norm.weight"] = attention.k_norm.weight
    return weights
