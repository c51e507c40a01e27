"""Reads the sizes that planning needs from the `config.json` of a Hugging Face model, by a table of common field names.

A model family with the usual names needs no code here. Fields that change neither time nor memory are ignored. Norms, biases
and layers for multi-token prediction are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.errors import InputError
from moesaic.plan.model_shape import MOST, ModelShape, MoEShape

NAMES: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size", "d_model", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_heads"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    ),
    "hidden": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size"),
    "dense_hidden": ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "shared_hidden": ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "first_dense": ("first_k_dense_replace", "moe_layer_start_index", "moe_first_k_dense_replace"),
    "every": ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "moe_layer_interval"),
    "full_every": ("full_attention_interval",),
    "groups": ("n_group", "num_expert_group"),
    "top_groups": ("topk_group", "topk_groups", "num_limited_groups"),
}  # fmt: skip
"""Names in configurations for each size that planning reads; the first name that a configuration has counts."""
NEEDED = {
    "dim": 4096, "num_layers": 32, "num_heads": 32, "num_experts": 8, "top_k": 2, "hidden": 14336, "vocab": 32000,
}  # fmt: skip
"""Required sizes, with those of Mixtral 8x7B as examples for messages."""
POSITIVE = (*NEEDED, "kv_heads", "head_dim")
"""Sizes that must be at least 1 if given; the others may be 0."""
IMPLIED: dict[str, dict[str, Any]] = {
    "llama4_text": {"n_shared_experts": 1}, "qwen3_next": {"attn_output_gate": True, "use_qk_norm": True},
    "qwen3_moe": {"use_qk_norm": True},
}  # fmt: skip
"""Properties of model families that their configurations have no field for."""
RECURRENT = ("mamba_d_state", "ssm_state_size", "mamba_d_ssm", "hybrid_override_pattern", "linear_attn_config")
"""Fields that belong to kinds of layers that planning cannot predict."""
LOW_RANKS = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
}
"""Sizes of low-rank (latent) attention, with those of DeepSeek-V3 as examples for messages."""
PLAIN = {"relu2": "relu", "gelu": "gelu"}
"""Values of `mlp_hidden_act` of experts with two matrices (no gate), and our activations with equal cost."""


@dataclass(frozen=True, kw_only=True)
class HubShape(ModelShape):
    """The sizes of a Hugging Face model; `num_heads` only limits the size of tp."""

    dense_layers: tuple[int, ...] = ()
    """Numbers of the blocks without an MoE layer."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Fields of `StepModel` about attention that do not depend on the sequence length; means over blocks."""
    score_width: float = 0.0
    """Columns of queries and of values over all heads, times the mean context length over half the sequence length; the mean
    over blocks."""
    tied: bool = False
    """Whether one matrix is both the embedding and the output."""
    groups: int = 1
    """Number of groups of experts, of which a token uses `top_groups`."""
    top_groups: int = 1
    """Number of groups of experts that a token uses."""
    vocab: int = 1
    """Size of the vocabulary."""

    def check_heads(self) -> None:
        """Accept heads of any width."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether block `layer`, counted from 0, has an MoE layer."""
        return layer not in self.dense_layers

    @property
    def around(self) -> dict[str, float]:
        """Fields of `StepModel` about the parts of a step outside MoE layers."""
        scores = 2 * self.score_width * self.seq_len / 2
        return {**self.attention, "score_operations": scores, "embeddings": 1 if self.tied else 2}

    @property
    def routing(self) -> dict[str, int]:
        """Fields of `Workload` about groups of experts."""
        return {"groups": self.groups, "top_groups": self.top_groups}

    def parameters(self, experts: int | None = None) -> float:
        """Return the number of parameters of the model.

        Args:
            experts: number of experts per layer that are counted: `moe.top_k` for the active parameters, None for all.
        """
        moe, sparse = self.moe, self.num_layers - len(self.dense_layers)
        matrices = 3 if moe.experts == "swiglu" else 2
        width = (moe.num_experts if experts is None else experts) * moe.hidden + moe.shared_hidden
        layer = matrices * self.dim * width + self.dim * moe.num_experts
        dense = len(self.dense_layers) * matrices * self.dim * self.active_hidden
        return (
            self.num_layers * self.attention["attention_parameters"]
            + sparse * layer
            + dense
            + (1 if self.tied else 2) * self.vocab * self.dim
        )


def is_hub_config(table: Mapping[str, Any]) -> bool:
    """Return whether a table is the `config.json` of a Hugging Face model."""
    return "model_type" in table or "architectures" in table


def read_shape(table: Mapping[str, Any], source: str, *, seq_len: int) -> HubShape:
    """Return the sizes of the model in a `config.json`.

    Args:
        table: content of the file; of a multimodal model only its text model is read.
        source: origin of the table, for messages.
        seq_len: tokens per training sequence.

    Raises:
        InputError: if the model has no experts, lacks a size, or has layers that planning cannot predict.
    """
    table = next((table[name] for name in ("text_config", "llm_config") if isinstance(table.get(name), dict)), table)
    table = {**IMPLIED.get(str(table.get("model_type")), {}), **table}
    sizes = _sizes(table, source)
    for name in RECURRENT:
        if table.get(name):
            raise InputError(
                f"{source}: {name} belongs to layers that planning cannot predict: write the sizes as [model] yourself"
            )
    hidden, activation = sizes["hidden"], str(table.get("mlp_hidden_act", ""))
    shared = sizes.get("shared_hidden", sizes.get("shared_experts", 0) * hidden)
    try:
        return HubShape(
            dim=sizes["dim"], num_layers=sizes["num_layers"], num_heads=sizes["num_heads"], seq_len=seq_len,
            ffn=f"moe:1:{sizes['dense_hidden']}" if "dense_hidden" in sizes else "moe",
            dense_layers=_dense_layers(table, sizes),
            **_attention(table, sizes, seq_len), tied=bool(table.get("tie_word_embeddings", False)),
            vocab=sizes["vocab"], groups=sizes.get("groups", 1), top_groups=sizes.get("top_groups", 1),
            moe=MoEShape(
                num_experts=sizes["num_experts"], top_k=sizes["top_k"], hidden=hidden, shared_hidden=shared,
                experts=PLAIN.get(activation, "swiglu"),  # type: ignore[arg-type]
            ),
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{source}: a field has an unexpected type ({error}), so the model is of an unknown architecture: correct it, "
            "or write the sizes as [model] and [model.moe] of a training configuration"
        ) from error
    except OverflowError as error:
        raise InputError(f"{source}: a size is larger than that of any model: correct it") from error


def _sizes(table: Mapping[str, Any], source: str) -> dict[str, int]:
    """Return the integer sizes of a configuration by our names; lists and null are skipped."""
    sizes: dict[str, int] = {}
    for ours, theirs in NAMES.items():
        name = next((name for name in theirs if isinstance(table.get(name), int)), None)
        if name is None or isinstance(table[name], bool):
            continue
        sizes[ours], least, most = table[name], int(ours in POSITIVE), MOST.get(ours, math.inf)
        if not least <= sizes[ours] <= most:
            bound = f"at least {least}" if sizes[ours] < least else f"at most {most}"
            raise InputError(f"{source}: {name}={sizes[ours]}: must be {bound}")
    for ours in NEEDED:
        if ours not in sizes:
            what = (
                "the model has no experts to plan for"
                if ours == "num_experts"
                else "the model is of an unknown architecture"
            )
            raise InputError(
                f"{source}: has none of {', '.join(NAMES[ours])}, so {what}: add one, for example {NAMES[ours][0]} = "
                f"{NEEDED[ours]} as in Mixtral 8x7B, or write the sizes as [model] and [model.moe] of a training configuration"
            )
    return sizes


def _dense_layers(table: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the numbers of the blocks without an MoE layer.

    Raises:
        InputError: if no block has an MoE layer.
    """
    dense = _dense_by_fields(table, sizes)
    if len(dense) == sizes["num_layers"]:
        raise InputError(
            "no block has an MoE layer, so there is nothing to plan: correct the fields that say which have one"
        )
    return dense


def _dense_by_fields(table: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the blocks without an MoE layer: from lists if the configuration has any, else from `first_dense` and `every`."""
    blocks = range(sizes["num_layers"])
    if isinstance(table.get("moe_layers"), list):
        return tuple(sorted({*blocks} - {*table["moe_layers"]}))
    if isinstance(table.get("moe_layer_freq"), list):
        return tuple(block for block, sparse in zip(blocks, table["moe_layer_freq"]) if not sparse)
    if isinstance(table.get("mlp_layer_types"), list):
        return tuple(block for block, kind in zip(blocks, table["mlp_layer_types"]) if kind == "dense")
    listed, first, every = (
        table.get("mlp_only_layers") or (),
        sizes.get("first_dense", 0),
        max(sizes.get("every", 1), 1),
    )
    return tuple(block for block in blocks if block in listed or block < first or (block + 1) % every)


def _attention(table: Mapping[str, Any], sizes: Mapping[str, int], seq_len: int) -> dict[str, Any]:
    """Return the fields `attention` and `score_width` of `HubShape`."""
    dim, heads, layers = sizes["dim"], sizes["num_heads"], sizes["num_layers"]
    up = up_kept = 0.0
    if isinstance(table.get("kv_lora_rank"), int):
        nope, rope, value, rank = (
            _of_low_ranks(table, name)
            for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        query = _of_low_ranks(table, "q_lora_rank") if table.get("q_lora_rank") else 0
        up = heads * (nope + rope) * query + rank * heads * (nope + value)
        full = up + (dim * query or heads * (nope + rope) * dim) + dim * (rank + rope) + heads * value * dim
        width = float(heads * (nope + rope + value))
        # Each of the two low ranks counts before and after its norm; queries and keys both have the parts nope and rope.
        up_kept = float(heads * (2 * (nope + rope) + value))
        kept = dim + 2 * query + 2 * rank + rope + up_kept + heads * value
        key_values = float(heads * (nope + rope + value))
        copied = 2 * up_kept
        head_dim, normed, rotated, result = nope + rope, query + rank, (heads + 1) * rope, heads * value
    else:
        head_dim, kv_heads = sizes.get("head_dim", dim // heads), sizes.get("kv_heads", heads)
        gates, normed = 2 if table.get("attn_output_gate") else 1, 2 if table.get("use_qk_norm") else 1
        full = (1 + gates) * dim * heads * head_dim + 2 * dim * kv_heads * head_dim
        width = 2.0 * heads * head_dim
        kept = dim + normed * (heads + kv_heads) * head_dim + kv_heads * head_dim + gates * heads * head_dim
        key_values = 2.0 * kv_heads * head_dim
        copied = 2.0 * normed * (heads + kv_heads) * head_dim
        rotated, result = (heads + kv_heads) * head_dim, heads * head_dim
        normed = (normed - 1) * rotated
    kinds = (table.get("layer_types") or ())[:layers]
    interval = sizes.get("full_every", 0)
    linear = (
        sum(kind == "linear_attention" for kind in kinds) if kinds else layers - layers // interval if interval else 0
    )
    sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    # Within a window of w keys, the first w queries of a sequence see fewer than w keys.
    window = min(int(table.get("sliding_window") or table.get("attention_chunk_size") or seq_len), seq_len)
    visible = (window - window**2 / (2 * seq_len)) / (seq_len / 2)
    attention = {
        "attention_parameters": ((layers - linear) * full + linear * _linear_attention(table, dim)) / layers,
        "attention_kept": kept, "key_values": key_values, "attention_up_kept": up_kept, "attention_up": up,
        "attention_copied": copied, "head_dim": head_dim, "attention_normed": normed, "attention_rotated": rotated,
        "attention_result": result,
    }  # fmt: skip
    return {"attention": attention, "score_width": (layers - linear - sliding * (1 - visible)) * width / layers}


def _of_low_ranks(table: Mapping[str, Any], name: str) -> int:
    """Return a size of low-rank attention; raises InputError if it is missing or invalid."""
    value = table.get(name)
    if not isinstance(value, int) or value < 1:
        raise InputError(
            f"{name}={value!r}: low-rank attention needs a whole number of at least 1: add it, {LOW_RANKS[name]} in DeepSeek-V3"
        )
    return value


def _linear_attention(table: Mapping[str, Any], dim: int) -> int:
    """Return the number of parameters of a gated delta net; the cost of its scores is negligible in comparison."""
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    keys, key_dim, values, value_dim = (int(table.get(name, 0)) for name in names)
    return dim * (2 * keys * key_dim + 3 * values * value_dim + 2 * values)
