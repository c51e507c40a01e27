"""Models of the Hugging Face hub as planning sees them: a `config.json` read by a table of field names, not family by family.

A family whose configuration uses the usual names needs no code here. What changes neither time nor memory is passed over;
norms, biases and layers for multi-token prediction are not counted.
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
"""What planning reads, and the names that configurations have for it; the first one that is there counts."""
NEEDED = {
    "dim": 4096, "num_layers": 32, "num_heads": 32, "num_experts": 8, "top_k": 2, "hidden": 14336, "vocab": 32000,
}  # fmt: skip
"""Sizes that every model has, and what could stand in for one that is missing: those of Mixtral 8x7B."""
POSITIVE = (*NEEDED, "kv_heads", "head_dim")
"""Sizes that are at least 1 where they are there; the others may be 0."""
IMPLIED: dict[str, dict[str, Any]] = {
    "llama4_text": {"n_shared_experts": 1}, "qwen3_next": {"attn_output_gate": True, "use_qk_norm": True},
    "qwen3_moe": {"use_qk_norm": True},
}  # fmt: skip
"""What families have without a field for it."""
RECURRENT = ("mamba_d_state", "ssm_state_size", "mamba_d_ssm", "hybrid_override_pattern", "linear_attn_config")
"""Fields of layers whose time planning does not know."""
LOW_RANKS = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
}
"""Sizes of low-rank attention in DeepSeek-V3, which could stand in for one that is missing."""
PLAIN = {"relu2": "relu", "gelu": "gelu"}
"""Activations of experts of two matrices, and ours of the same work, where a configuration says that nothing gates them."""


@dataclass(frozen=True, kw_only=True)
class HubShape(ModelShape):
    """A model of the hub; `num_heads` only says over how many tensor-parallel ranks attention splits."""

    dense_layers: tuple[int, ...] = ()
    """Blocks without an MoE layer."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Of a block, the mean over blocks, by the names of `StepModel`; what the length of a sequence decides is not among it."""
    score_width: float = 0.0
    """Columns of queries and of values that meet the keys of a context, over all heads, times the context's length over half
    the sequence; the mean over blocks."""
    tied: bool = False
    """One matrix is the embedding and the output."""
    groups: int = 1
    """Groups of experts, of which a token uses `top_groups`."""
    top_groups: int = 1
    """As of `groups`."""
    vocab: int = 1
    """Tokens that the model tells apart."""

    def check_heads(self) -> None:
        """Let heads be of any width."""

    def is_sparse(self, layer: int) -> bool:
        """Whether a block has an MoE layer."""
        return layer not in self.dense_layers

    @property
    def around(self) -> dict[str, float]:
        """What a step has around MoE layers, by the names of `StepModel`."""
        scores = 2 * self.score_width * self.seq_len / 2
        return {**self.attention, "score_operations": scores, "embeddings": 1 if self.tied else 2}

    @property
    def routing(self) -> dict[str, int]:
        """How tokens choose experts, by the names of `Workload`."""
        return {"groups": self.groups, "top_groups": self.top_groups}

    def parameters(self, experts: int | None = None) -> float:
        """Return the parameters of the model.

        Args:
            experts: count so many of a layer's experts: `moe.top_k` gives the active ones; None counts them all.
        """
        moe, sparse = self.moe, self.num_layers - len(self.dense_layers)
        matrices = 3 if moe.experts == "swiglu" else 2
        each = (moe.num_experts if experts is None else experts) * moe.hidden + moe.shared_hidden
        layer = matrices * self.dim * each + self.dim * moe.num_experts
        dense = len(self.dense_layers) * matrices * self.dim * self.active_hidden
        return (
            self.num_layers * self.attention["attention_parameters"]
            + sparse * layer
            + dense
            + (1 if self.tied else 2) * self.vocab * self.dim
        )


def is_hub_config(table: Mapping[str, Any]) -> bool:
    """Whether a table is a model's `config.json` of the hub."""
    return "model_type" in table or "architectures" in table


def read_shape(table: Mapping[str, Any], source: str, *, seq_len: int) -> HubShape:
    """Return the model of a `config.json`.

    Args:
        table: as the file has it; of a model with images or sound, the text model in it counts.
        source: where it comes from, for messages.
        seq_len: tokens of a training sequence.

    Raises:
        InputError: if the model has no experts, lacks a size, or has layers that planning does not know.
    """
    table = next((table[name] for name in ("text_config", "llm_config") if isinstance(table.get(name), dict)), table)
    table = {**IMPLIED.get(str(table.get("model_type")), {}), **table}
    found = _sizes(table, source)
    for name in RECURRENT:
        if table.get(name):
            raise InputError(
                f"{source}: {name} means layers that planning does not know: write the sizes as [model] yourself"
            )
    hidden, activation = found["hidden"], str(table.get("mlp_hidden_act", ""))
    shared = found.get("shared_hidden", found.get("shared_experts", 0) * hidden)
    try:
        return HubShape(
            dim=found["dim"], num_layers=found["num_layers"], num_heads=found["num_heads"], seq_len=seq_len,
            ffn=f"moe:1:{found['dense_hidden']}" if "dense_hidden" in found else "moe",
            dense_layers=_dense_layers(table, found),
            **_attention(table, found, seq_len), tied=bool(table.get("tie_word_embeddings", False)),
            vocab=found["vocab"], groups=found.get("groups", 1), top_groups=found.get("top_groups", 1),
            moe=MoEShape(
                num_experts=found["num_experts"], top_k=found["top_k"], hidden=hidden, shared_hidden=shared,
                experts=PLAIN.get(activation, "swiglu"),  # type: ignore[arg-type]
            ),
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{source}: a field is of another kind than configurations have it ({error}), so it is of an unknown architecture: "
            "correct it, or write the sizes as [model] and [model.moe] of a training configuration"
        ) from error
    except OverflowError as error:
        raise InputError(f"{source}: a size is larger than that of any model: correct it") from error


def _sizes(table: Mapping[str, Any], source: str) -> dict[str, int]:
    """Return the whole numbers of a configuration by our names; lists and null are left to others."""
    found: dict[str, int] = {}
    for ours, theirs in NAMES.items():
        name = next((name for name in theirs if isinstance(table.get(name), int)), None)
        if name is None or isinstance(table[name], bool):
            continue
        found[ours], least, most = table[name], int(ours in POSITIVE), MOST.get(ours, math.inf)
        if not least <= found[ours] <= most:
            bound = f"at least {least}" if found[ours] < least else f"at most {most}"
            raise InputError(f"{source}: {name}={found[ours]}: must be {bound}")
    for ours in NEEDED:
        if ours not in found:
            what = (
                "the model has no experts to plan for" if ours == "num_experts" else "it is of an unknown architecture"
            )
            raise InputError(
                f"{source}: none of {', '.join(NAMES[ours])} is there, so {what}: add one, {NAMES[ours][0]} = {NEEDED[ours]} "
                "as in Mixtral 8x7B say, or write the sizes as [model] and [model.moe] of a training configuration"
            )
    return found


def _dense_layers(table: Mapping[str, Any], found: Mapping[str, int]) -> tuple[int, ...]:
    """Return the blocks without an MoE layer.

    Raises:
        InputError: if all are.
    """
    dense = _dense_by_fields(table, found)
    if len(dense) == found["num_layers"]:
        raise InputError(
            "no block has an MoE layer, so there is nothing to plan: correct the fields that say which have one"
        )
    return dense


def _dense_by_fields(table: Mapping[str, Any], found: Mapping[str, int]) -> tuple[int, ...]:
    """Return the blocks without an MoE layer, by lists where the configuration has them, else by the usual numbers."""
    blocks = range(found["num_layers"])
    if isinstance(table.get("moe_layers"), list):
        return tuple(sorted({*blocks} - {*table["moe_layers"]}))
    if isinstance(table.get("moe_layer_freq"), list):
        return tuple(block for block, sparse in zip(blocks, table["moe_layer_freq"]) if not sparse)
    if isinstance(table.get("mlp_layer_types"), list):
        return tuple(block for block, kind in zip(blocks, table["mlp_layer_types"]) if kind == "dense")
    listed, first, every = (
        table.get("mlp_only_layers") or (),
        found.get("first_dense", 0),
        max(found.get("every", 1), 1),
    )
    return tuple(block for block in blocks if block in listed or block < first or (block + 1) % every)


def _attention(table: Mapping[str, Any], found: Mapping[str, int], seq_len: int) -> dict[str, Any]:
    """Return what `HubShape` has of a block's attention."""
    dim, heads, layers = found["dim"], found["num_heads"], found["num_layers"]
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
        # Each of the two low ranks before its norm and after it; keys and queries alike have both parts.
        up_kept = float(heads * (2 * (nope + rope) + value))
        kept = dim + 2 * query + 2 * rank + rope + up_kept + heads * value
        key_values = float(heads * (nope + rope + value))
        copied = 2 * up_kept
        head_dim, normed, rotated, result = nope + rope, query + rank, (heads + 1) * rope, heads * value
    else:
        each, kv = found.get("head_dim", dim // heads), found.get("kv_heads", heads)
        gates, normed = 2 if table.get("attn_output_gate") else 1, 2 if table.get("use_qk_norm") else 1
        full, width = (1 + gates) * dim * heads * each + 2 * dim * kv * each, 2.0 * heads * each
        kept = dim + normed * (heads + kv) * each + kv * each + gates * heads * each
        key_values = 2.0 * kv * each
        copied = 2.0 * normed * (heads + kv) * each
        head_dim, rotated, result = each, (heads + kv) * each, heads * each
        normed = (normed - 1) * rotated
    kinds = (table.get("layer_types") or ())[:layers]
    interval = found.get("full_every", 0)
    linear = (
        sum(kind == "linear_attention" for kind in kinds) if kinds else layers - layers // interval if interval else 0
    )
    sliding = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    # A window of w keys is as far as a query sees once w tokens came before it.
    window = min(int(table.get("sliding_window") or table.get("attention_chunk_size") or seq_len), seq_len)
    seen = (window - window**2 / (2 * seq_len)) / (seq_len / 2)
    attention = {
        "attention_parameters": ((layers - linear) * full + linear * _linear_attention(table, dim)) / layers,
        "attention_kept": kept, "key_values": key_values, "attention_up_kept": up_kept, "attention_up": up,
        "attention_copied": copied, "head_dim": head_dim, "attention_normed": normed, "attention_rotated": rotated,
        "attention_result": result,
    }  # fmt: skip
    return {"attention": attention, "score_width": (layers - linear - sliding * (1 - seen)) * width / layers}


def _of_low_ranks(table: Mapping[str, Any], name: str) -> int:
    """Return a size of low-rank attention; raises InputError where it is none."""
    value = table.get(name)
    if not isinstance(value, int) or value < 1:
        raise InputError(
            f"{name}={value!r}: low-rank attention needs a whole number of at least 1: add it, {LOW_RANKS[name]} in DeepSeek-V3"
        )
    return value


def _linear_attention(table: Mapping[str, Any], dim: int) -> int:
    """Return the parameters of a gated delta net, whose scores take next to nothing beside them."""
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    keys, key_dim, values, value_dim = (int(table.get(name, 0)) for name in names)
    return dim * (2 * keys * key_dim + 3 * values * value_dim + 2 * values)
