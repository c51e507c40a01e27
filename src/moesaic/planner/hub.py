"""Reads the sizes that planning needs from the `config.json` of a Hugging Face model, by a table of
common field names.

A model family with the usual names needs no code here. A field is read, or listed as harmless, or
has a value that is no size, or the model is refused: wrong sizes would look as good as right ones.
Norms, biases, convolutions of linear attention and layers for multi-token prediction are not
counted.

A size is a number by our name, a key of `NAMES`. A kind is what a configuration says of one layer
in a list with an entry for each (`KINDS`). Most functions take a configuration that `_flattened`
has put on one level.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.errors import InputError
from moesaic.planner.hub_attention import (
    INDEXER,
    LINEAR,
    LOW_RANKS,
    QUERY_RANK,
    Attention,
    attention_fields,
)
from moesaic.shapes import MOST, ModelShape, MoEShape

NAMES: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size", "d_model", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads_per_layer", "num_attention_heads", "n_heads"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
    ),
    "hidden": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
        "intermediate_size",
        "ffn_hidden_size",
    ),
    "dense_hidden": (
        "intermediate_size_mlp",
        "dense_intermediate_size",
        "intermediate_size",
        "ffn_hidden_size",
    ),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "shared_hidden": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
    ),
    "shared_experts": (
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    "first_dense": (
        "first_k_dense_replace",
        "moe_layer_start_index",
        "moe_first_k_dense_replace",
        "num_dense_layers",
    ),
    "last_sparse": ("moe_layer_end_index",),
    "every": (
        "decoder_sparse_step",
        "moe_layer_freq",
        "interleave_moe_layer_step",
        "moe_layer_interval",
    ),
    "full_every": ("full_attention_interval",),
    "window_every": ("sliding_window_pattern", "global_attn_every_n_layers"),
    "groups": ("n_group", "num_expert_group"),
    "top_groups": ("topk_group", "topk_groups", "num_limited_groups"),
}
"""Names in configurations for each size that planning reads; the first name that a configuration
has counts."""
NEEDED = {
    "dim": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_experts": 8,
    "top_k": 2,
    "hidden": 14336,
    "vocab": 32000,
}
"""Required sizes, with those of Mixtral 8x7B as examples for messages."""
LEAST = {**dict.fromkeys((*NEEDED, "kv_heads", "head_dim"), 1), "last_sparse": -1}
"""Smallest values of sizes; 0 for others."""
YOURSELF = "write the sizes as [model] and [model.moe] of a training configuration"
"""What to do about a model that cannot be read."""
UNEXPECTED = (
    f"a field has an unexpected type ({{}}), so the model is of an unknown architecture: correct "
    f"it, or {YOURSELF}"
)
"""What is said of a field that has no value of its kind."""
GATED = {"attn_output_gate": True, "use_qk_norm": True}
"""Fields of a model whose attention has a gate as wide as its queries, and norms of queries and
keys."""
IMPLIED: dict[str, dict[str, Any]] = {
    "llama4_text": {"n_shared_experts": 1},
    "hunyuan_v1_moe": {"num_shared_expert": 1},
    "qwen3_moe": {"use_qk_norm": True},
    "minimax_m3_vl_text": {"use_qk_norm": True},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "afmoe", "beam"), GATED),
}
"""Properties of model families that their configurations have no field for."""
UNREADABLE = {
    "doge": "experts of one row each",
    "jetmoe": "experts in its attention",
    "minimax": "lightning attention",
    "longcat_flash": "two attentions and two dense layers in a block",
    "mimo_v2_flash": "other heads in its windows",
    "openai_privacy_filter": "attention in both directions",
}
"""Model families with layers that planning cannot predict and that no field tells of."""
NESTED = ("ffn_config", "attn_config")
"""Fields whose tables hold sizes of the model, as in DBRX."""
BLOCK_INDEXER = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""Fields of MiniMax-M3's `sparse_attention_config`, as published, and their names in
transformers."""
KINDS: dict[str, tuple[Any, ...]] = {
    "layer_types": (
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "indexed_attention",
        "linear_attention",
    ),
    "mlp_layer_types": ("sparse", "dense"),
    "moe_layer_freq": (1, 0),
    "indexer_types": ("full", "shared"),
    "is_moe_layer": (True, False),
    "attn_type_list": (1,),
}
"""Fields with an entry per layer, and the entries that planning can predict."""
READ = {
    "model_type",
    "tie_word_embeddings",
    "mlp_hidden_act",
    "moe_layers",
    "mlp_only_layers",
    "attn_output_gate",
    "use_qk_norm",
    "sliding_window",
    "attention_chunk_size",
    "kv_lora_rank",
    *LINEAR,
    "linear_conv_kernel_dim",
    *INDEXER,
    *KINDS,
    *(name for names in NAMES.values() for name in names),
}
"""Fields that are read, besides those of `LOW_RANKS`."""
HARMLESS = re.compile(
    # what the file is, and how it is stored and loaded
    "architectures|auto_map|.*name_or_path|.*_version|(.*_)?dtype|quantization.*|"
    "compression_config|_.*|attn_implementation|"
    "(vision|audio)_config|pretraining_tp|ep_size|tensor_parallel.*|fuse_.*|cache_.*|"
    "for_llm_compressor|"
    # tokens and generation
    ".*(token|image|video|audio|bos|eo[sd]|pad|start|end|sep|init|newline)_(ids?|index)|(id2label|"
    "label2id|problem_type|prefix)|"
    "task_specific_params|tokenizer_class|use_cache|return_dict.*|is_decoder|num_(beams|"
    "beam_groups|return_sequences)|top_k|"
    "output_(attentions|hidden_states|router_logits)|(org|unpadded)_vocab.*|num_(logits_to_keep|"
    "media_embeds)|pool_type|dense_list|"
    "chunk_size_feed_forward|(max|min)_.*|seq_length|model_max_length|"
    # positions
    "(original_max|initial)_.*|(rope|yarn)_(theta|scaling|parameters|type|factor|interleave)|"
    "rotary_(dim|pct|base|emb.*)|"
    ".*rope_interleave|no_rope_layer.*|layer_rope_theta|use_(rope|rotary).*|"
    "position_embedding_type|partial_rotary.*|qk_head_dim|"
    # norms, biases, activations and factors
    ".*act_fn|hidden_act(ivation)?|activation_function|moe_gate_act|.*_bias|norm_.*|.*_norm(_type)"
    "?|.*_(layer|rms)norm|"
    ".*_(scale|scaling|scalar|multiplier|softcap|softcapping|theta|eps|std|limit|dropout)|"
    "swiglu_.*|mup_enabled|gating=(True|per-head)|"
    ".*_(scaling|alpha|beta)_factor|attn_temperature.*|logits?_scal.*|clip_qkv|"
    "use_(sliding_window|attention_sinks|flash.*)|"
    # routing and its losses
    "score_func.*|scoring_func|expert_selection_fn|topk_method|seq_aux|.*_coeff?|.*_loss.*|"
    ".*jitter.*|moe_(renormalize|gate|capacity)|"
    "moe_router_(enable|use|score|topk|load|type|logit).*|moe_(drop|random|token_drop|apply|norm|"
    "use_aux).*|enable_moe_fp32_combine|"
    "moe_expert_interval=1|num_experts_per_group=1|normalization_function=(rms|layer)norm|"
    "use_mixed_mlp_moe|shared_expert_combination_strategy|shared_moe_mode|cla_share_factor|"
    # layers that predict further tokens, which are not counted
    "(use_|num_)?mtp(_.*)?|num_nextn_predict_layers"
)
"""Names of fields, or of fields with values, that change neither the number nor the sizes of
matrices."""
BLOCKS_CHOSEN = "minimax_m3_sparse"
"""The entry of `layer_types` for layers whose indexer chooses blocks of keys."""
SPELT_OUT = re.compile(
    ".*sliding_window_pattern|global_attn_every_n_layers|full_attention_interval|"
    "index_(block_size|topk_blocks|local_blocks)"
)
"""Names of fields that are ignored if `layer_types` is given, since it says the same."""
PLAIN = {"relu2": "relu", "gelu": "gelu"}
"""Values of `mlp_hidden_act` of experts with two matrices (no gate), and our activations with equal
cost."""


@dataclass(frozen=True, kw_only=True)
class HubShape(ModelShape):
    """The sizes of a Hugging Face model; `num_heads` only limits the size of tp."""

    dense_layers: tuple[int, ...] = ()
    """Numbers of the blocks without an MoE layer."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Fields of `StepModel` about attention that do not depend on the sequence length; means over
    blocks."""
    attention_sizes: Attention | None = None
    """The attention of a block, to compare its sizes with what others say of them."""
    score_width: float = 0.0
    """Columns of queries and of values over all heads, times the mean context length over half the
    sequence length; the mean over blocks."""
    tied: bool = False
    """Whether one matrix is both the embedding and the output."""
    groups: int = 1
    """Number of groups of experts, of which a token uses `top_groups`."""
    top_groups: int = 1
    """Number of groups of experts that a token uses."""
    vocab: int = 1
    """Size of the vocabulary."""
    positions: int | None = field(default=None, compare=False)
    """Tokens of the longest sequence that the model was made for; None if it does not say. It
    changes no size."""

    def check_heads(self) -> None:
        """Accept heads of any width: our own block, for which `ModelShape` checks them, is not
        built."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether block `layer`, counted from 0, has an MoE layer."""
        return layer not in self.dense_layers

    @property
    def around(self) -> dict[str, float]:
        """Fields of `StepModel` about the parts of a step outside MoE layers."""
        # a product and a sum for each column and key; `score_width` counts keys in halves of a
        # sequence
        scores = 2 * self.score_width * self.seq_len / 2
        return {**self.attention, "score_operations": scores, "embeddings": 1 if self.tied else 2}

    @property
    def routing(self) -> dict[str, int]:
        """Fields of `Workload` about groups of experts."""
        return {"groups": self.groups, "top_groups": self.top_groups}


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
        InputError: if the model has no experts, lacks a size, or has layers that planning cannot
            predict.
    """
    table = _flattened(table, source)
    _refuse_dense(table, source)
    _refuse_unread(table, source)
    sizes = _sizes(table, source)
    try:
        return _shape_of(table, sizes, seq_len)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: {UNEXPECTED.format(error)}") from error
    except OverflowError as error:
        raise InputError(
            f"{source}: a size is larger than that of any model: correct it"
        ) from error


def _flattened(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the text model's fields on one level, with what the kind of model implies, and
    schedules of layers written out."""
    text = table
    for name in ("llm_config", "text_config"):  # the second wins
        if isinstance(table.get(name), dict):
            text = table[name]
    flat = {**IMPLIED.get(str(text.get("model_type")), {}), **text}
    for name in NESTED:
        if isinstance(flat.get(name), dict):
            nested = flat.pop(name)
            flat = {**nested, **flat}  # fields outside the nested table win
    try:
        # as transformers reads published fields of sparse attention
        flat = _with_keys_of_blocks(_with_indexer_types(flat))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}: {UNEXPECTED.format(error)}") from error
    if flat.get("layer_types"):
        flat = {name: value for name, value in flat.items() if not SPELT_OUT.fullmatch(name)}
    return flat


def _shape_of(table: Mapping[str, Any], sizes: Mapping[str, int], seq_len: int) -> HubShape:
    """Return the model with the sizes of a configuration on one level."""
    kinds = _kinds(table, sizes)
    hidden = sizes["hidden"]
    positions = table.get("max_position_embeddings")
    activation = str(table.get("mlp_hidden_act", ""))
    return HubShape(
        dim=sizes["dim"],
        num_layers=sizes["num_layers"],
        num_heads=sizes["num_heads"],
        seq_len=seq_len,
        dense_hidden=sizes.get("dense_hidden"),
        dense_layers=_dense_layers(table, sizes, kinds),
        **attention_fields(table, sizes, kinds, seq_len),
        tied=bool(table.get("tie_word_embeddings", False)),
        vocab=sizes["vocab"],
        positions=positions if isinstance(positions, int) and positions > 0 else None,
        groups=sizes.get("groups", 1),
        top_groups=sizes.get("top_groups", 1),
        moe=MoEShape(
            num_experts=sizes["num_experts"],
            top_k=sizes["top_k"],
            hidden=hidden,
            shared_hidden=sizes.get("shared_hidden", sizes.get("shared_experts", 0) * hidden),
            experts=PLAIN.get(activation, "swiglu"),  # type: ignore[arg-type]
        ),
    )


def _with_indexer_types(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the schedule of GLM-5.2: the layers that run an indexer; the
    others reuse the keys that the last one chose."""
    # {"num_hidden_layers": 6, "index_topk_freq": 3, "index_skip_topk_offset": 2}, or
    # {"num_hidden_layers": 6, "index_topk_pattern": "FFSSFS"}, becomes
    # {"num_hidden_layers": 6,
    #  "indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}.
    table = dict(table)
    layers = table.get("num_hidden_layers")
    pattern = table.pop("index_topk_pattern", None)
    every = table.pop("index_topk_freq", None)
    offset = table.pop("index_skip_topk_offset", None)
    if table.get("indexer_types") or not isinstance(layers, int) or not (pattern or every):
        return table
    first = 2 if offset is None else int(offset)
    step = max(int(every or 1), 1)
    if pattern:
        runs_indexer = [letter in ("F", "full") for letter in pattern]
    else:  # the first layers, and then every `step`-th one
        runs_indexer = [max(layer - first + 1, 0) % step == 0 for layer in range(layers)]
    table["indexer_types"] = ["full" if runs else "shared" for runs in runs_indexer]
    return table


def _with_keys_of_blocks(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the indexers of MiniMax-M3, which choose blocks of keys, as
    indexers that choose as many keys."""
    # {"sparse_attention_config": {"sparse_block_size": 128, "sparse_topk_blocks": 16,
    #                              "sparse_attention_freq": [0, 1]}} becomes
    # {"index_block_size": 128, "index_topk_blocks": 16,
    #  "layer_types": ["full_attention", "indexed_attention"], "index_topk": 2048}.
    table = dict(table)
    published = table.pop("sparse_attention_config", None)
    if isinstance(published, dict):
        for theirs, ours in BLOCK_INDEXER.items():
            if theirs in published:
                table[ours] = published[theirs]
        has_indexer = published.get("sparse_attention_freq")
        if has_indexer and not table.get("layer_types"):
            table["layer_types"] = [
                BLOCKS_CHOSEN if each else "full_attention" for each in has_indexer
            ]
    layer_types = table.get("layer_types") or ()
    if BLOCKS_CHOSEN in layer_types:
        table["layer_types"] = [
            "indexed_attention" if kind == BLOCKS_CHOSEN else kind for kind in layer_types
        ]
        num_blocks = int(table.get("index_topk_blocks", 16))
        block_size = int(table.get("index_block_size", 128))
        table["index_topk"] = num_blocks * block_size
    return table


EXPERT = re.compile("expert|moe", re.IGNORECASE)
"""What names of fields about experts have in them."""


def _refuse_dense(table: Mapping[str, Any], source: str) -> None:
    """Raise InputError if a configuration has the sizes of a model, and no experts."""
    if str(table.get("model_type")) in UNREADABLE:  # `_refuse_unread` says why
        return
    is_sized = all(_has(table, size) for size in ("dim", "num_layers", "num_heads"))
    # another kind of model, with other names for its sizes, such as gpt2 or mamba
    is_another = bool(table.get("model_type")) and _gives_size(table, "vocab_size")
    mentions = any(value and EXPERT.search(name) for name, value in table.items())
    if not is_sized and (mentions or not is_another):  # `_sizes` says what is missing
        return
    if not _has(table, "num_experts"):
        raise InputError(
            f"{source}: is dense, with none of {', '.join(NAMES['num_experts'])}, so the model has "
            f"no experts to plan for: name a model with experts, or {YOURSELF}"
        )


def _has(table: Mapping[str, Any], size: str) -> bool:
    """Return whether a configuration gives a size, other than as 0, under any of its names."""
    return any(_gives_size(table, name) and table[name] != 0 for name in NAMES[size])


def _refuse_unread(table: Mapping[str, Any], source: str) -> None:
    """Raise InputError if a field that is not read may change sizes: a whole number, a word, a
    list, a table or true."""
    kind = str(table.get("model_type"))
    if kind in UNREADABLE:
        raise InputError(
            f"{source}: model_type {kind} has {UNREADABLE[kind]}, which planning cannot "
            f"predict: {YOURSELF}"
        )
    read = READ.union(LOW_RANKS, QUERY_RANK) if table.get("kv_lora_rank") else READ
    unread = []
    for name, value in table.items():
        # 0, false, null and empty values, and fractions, are no sizes
        if name in read or not value or isinstance(value, float):
            continue
        if HARMLESS.fullmatch(name) or HARMLESS.fullmatch(f"{name}={value}"):
            continue
        text = str(value)
        unread.append(f"{name}={text if len(text) < 40 else f'{text[:40]}...'}")
    if unread:
        more = f" and {len(unread) - 4} more" if len(unread) > 4 else ""
        raise InputError(
            f"{source}: planning does not read {', '.join(unread[:4])}{more}, which may change "
            f"the sizes of layers: delete fields that do not, or {YOURSELF}"
        )


def _sizes(table: Mapping[str, Any], source: str) -> dict[str, int]:
    """Return the integer sizes of a configuration by our names; lists of equal numbers count as
    one, null and false as none."""
    sizes: dict[str, int] = {}
    for ours, theirs in NAMES.items():
        given = [name for name in theirs if _gives_size(table, name)]
        if given:
            sizes[ours] = _size(table, given[0], ours, source)
    for ours in NEEDED:
        if ours not in sizes:
            raise InputError(
                f"{source}: has none of {', '.join(NAMES[ours])}, so the model is of an unknown "
                f"architecture: add one, for example {NAMES[ours][0]} = {NEEDED[ours]} as in "
                f"Mixtral 8x7B, or {YOURSELF}"
            )
    return sizes


def _size(table: Mapping[str, Any], name: str, ours: str, source: str) -> int:
    """Return the size of a configuration under its name, which is `ours` by our name; raises
    InputError if it is not a whole number of a possible size."""
    value = table[name]
    if isinstance(value, list) and all(each == value[0] for each in value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(
            f"{source}: {name}={value!r}: planning reads a whole number, the same for all "
            f"layers: correct it, or {YOURSELF}"
        )
    least = LEAST.get(ours, 0)
    most = MOST.get(ours, math.inf)
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise InputError(f"{source}: {name}={value}: must be {bound}")
    return value


def _gives_size(table: Mapping[str, Any], name: str) -> bool:
    """Return whether a configuration gives a size under a name.

    null, false and [] mean that it is absent. A list under a name of `KINDS` is a schedule with an
    entry per layer, which `_kinds` reads. 0 counts as given.
    """
    value = table.get(name)
    is_absent = value is None or value is False or value == []
    is_schedule = name in KINDS and isinstance(value, list)
    return not is_absent and not is_schedule


def _kinds(table: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return the entries per layer of the fields of `KINDS`, which are valid; `layer_types` is
    derived if it is not given."""
    layers = sizes["num_layers"]
    kinds: dict[str, list[Any]] = {"layer_types": _derived_layer_types(table, sizes)}
    for name, known in KINDS.items():
        given = table.get(name)
        # `moe_layer_freq` is a list of entries, or a number that `NAMES` reads
        is_size = name in NAMES["every"] and not isinstance(given, list)
        if not given or is_size:
            continue
        kinds[name] = given[:layers]
        for kind in kinds[name]:
            if kind not in known:
                raise InputError(
                    f"{name} has {kind!r}, but planning reads only "
                    f"{', '.join(map(str, known))}: {YOURSELF}"
                )
        if len(kinds[name]) < layers:
            raise InputError(
                f"{name} has {len(kinds[name])} entries for {layers} layers: give one for each"
            )
    return kinds


def _derived_layer_types(table: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """Return the kind of attention of each layer, if the configuration has no list of them: every
    n-th layer sees the whole context, and the others linear attention or a window."""
    layers = sizes["num_layers"]
    whole = "indexed_attention" if table.get("index_topk") else "full_attention"
    other = "linear_attention" if sizes.get("full_every") else "sliding_attention"
    every = sizes.get("full_every") or sizes.get("window_every")
    if not every or every > layers:
        return [whole] * layers
    return [whole if (layer + 1) % every == 0 else other for layer in range(layers)]


def _dense_layers(
    table: Mapping[str, Any], sizes: Mapping[str, int], kinds: Mapping[str, list[Any]]
) -> tuple[int, ...]:
    """Return the numbers of the blocks without an MoE layer.

    Raises:
        InputError: if no block has an MoE layer.
    """
    blocks = range(sizes["num_layers"])
    schedules = [
        kinds[name]
        for name in ("moe_layer_freq", "mlp_layer_types", "is_moe_layer")
        if name in kinds
    ]
    if isinstance(table.get("moe_layers"), list):
        dense = sorted({*blocks} - {*table["moe_layers"]})
    elif schedules:
        # 0 is also the False of `is_moe_layer`
        dense = [block for block in blocks if schedules[0][block] in (0, "dense")]
    else:
        dense = [block for block in blocks if _is_dense(block, table, sizes)]
    if len(dense) == len(blocks):
        raise InputError(
            "no block has an MoE layer, so there is nothing to plan: correct the fields that "
            "say which have one"
        )
    return tuple(dense)


def _is_dense(block: int, table: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Return whether a block has no MoE layer, if no field lists those that have one."""
    if block in (table.get("mlp_only_layers") or ()):
        return True
    last_sparse = sizes.get("last_sparse", -1)  # -1: there are MoE layers to the end
    is_after_last = 0 <= last_sparse < block
    # the last one of each `every` blocks has an MoE layer, from block `first_dense` on
    every = max(sizes.get("every", 1), 1)
    return block < sizes.get("first_dense", 0) or (block + 1) % every != 0 or is_after_last
