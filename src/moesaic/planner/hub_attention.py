"""What attention costs in the model of a Hugging Face configuration: parameters, kept values and
scores.

All numbers are of one block, per token where they count values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.errors import InputError

LOW_RANKS = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}
QUERY_RANK = {"q_lora_rank": 1536}
"""Sizes of low-rank (latent) attention, with those of DeepSeek-V3 as examples for messages; queries
may have whole rank."""
LINEAR = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
"""Sizes of linear attention (gated delta nets), with those of Qwen3-Next."""
INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
"""Sizes of the indexer that chooses the keys of a query, with those of DeepSeek-V3.2."""


class Attention(Protocol):
    """The costs of one block's attention over the whole context."""

    @property
    def dim(self) -> int:
        """Width of a token."""

    @property
    def parameters(self) -> float:
        """Parameters of all products."""

    @property
    def up_parameters(self) -> float:
        """Of `parameters`: the up-projections of low-rank attention."""

    @property
    def query_width(self) -> int:
        """Values per token from which an indexer computes its queries."""

    @property
    def score_width(self) -> float:
        """Columns of queries and of values over all heads."""

    @property
    def kept(self) -> float:
        """Values per token that backward keeps, input included."""

    @property
    def up_kept(self) -> float:
        """Of `kept`: results of the up-projections."""

    @property
    def key_values(self) -> float:
        """Values per token of keys and values."""

    @property
    def copied(self) -> float:
        """Values per token that norms, rotations and joins read and write."""

    @property
    def normed(self) -> float:
        """Values per token that norms inside attention read."""

    @property
    def head_dim(self) -> int:
        """Width of a head's queries."""

    @property
    def result(self) -> float:
        """Values per token of the result, before the last product."""


@dataclass(frozen=True, kw_only=True)
class LowRankAttention:
    """Latent attention (DeepSeek-V2, section 2.1): keys and values, and often queries, come from
    two low ranks."""

    dim: int
    heads: int
    nope: int
    """Width of a head's queries and keys that are not rotated."""
    rope: int
    """Width of a head's queries and keys that are rotated."""
    value: int
    """Width of a head's values."""
    rank: int
    """Width of the low rank of keys and values."""
    query_rank: int
    """Width of the low rank of queries; 0 if they have none."""

    @property
    def up_parameters(self) -> float:
        """Parameters of the products that leave the low ranks."""
        of_queries = self.heads * self.head_dim * self.query_rank
        return of_queries + self.rank * self.heads * (self.nope + self.value)

    @property
    def parameters(self) -> float:
        """Parameters into the low ranks, out of them, and of the last product."""
        # into their low rank, or whole if they have none
        queries = self.dim * self.query_rank or self.heads * self.head_dim * self.dim
        keys_and_values = self.dim * (self.rank + self.rope)
        return self.up_parameters + queries + keys_and_values + self.heads * self.value * self.dim

    @property
    def query_width(self) -> int:
        """The low rank of queries, or a token's width."""
        return self.query_rank or self.dim

    @property
    def score_width(self) -> float:
        """Columns of queries and of values over all heads."""
        return float(self.heads * (self.head_dim + self.value))

    @property
    def up_kept(self) -> float:
        """Queries and keys, which both have the parts nope and rope, and values."""
        return float(self.heads * (2 * self.head_dim + self.value))

    @property
    def kept(self) -> float:
        """The input, both low ranks before and after their norms, the rotated key, heads,
        result."""
        low_ranks = 2 * self.query_rank + 2 * self.rank + self.rope
        return self.dim + low_ranks + self.up_kept + self.result

    @property
    def key_values(self) -> float:
        """Values per token of keys and values."""
        return float(self.heads * (self.head_dim + self.value))

    @property
    def copied(self) -> float:
        """All heads, read and written."""
        return 2 * self.up_kept

    @property
    def normed(self) -> float:
        """Both low ranks."""
        return self.query_rank + self.rank

    @property
    def head_dim(self) -> int:
        """Width of a head's queries."""
        return self.nope + self.rope

    @property
    def result(self) -> float:
        """Values of all heads."""
        return self.heads * self.value


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Attention whose heads share keys and values in groups; multi-head attention has a group per
    head."""

    dim: int
    heads: int
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    is_gated: bool
    """Whether a gate as wide as the queries multiplies the result."""
    norms_heads: bool
    """Whether queries and keys have norms of their own."""

    @property
    def gates(self) -> int:
        """Products as wide as the queries, besides the last one: of queries, and of gates."""
        return 2 if self.is_gated else 1

    @property
    def parameters(self) -> float:
        """Parameters of queries, gates, keys, values, and of the last product."""
        queries = (1 + self.gates) * self.dim * self.heads * self.head_dim
        return queries + 2 * self.dim * self.kv_heads * self.head_dim

    @property
    def up_parameters(self) -> float:
        """There is no low rank."""
        return 0.0

    @property
    def query_width(self) -> int:
        """A token's width."""
        return self.dim

    @property
    def score_width(self) -> float:
        """Columns of queries and of values over all heads."""
        return 2.0 * self.heads * self.head_dim

    @property
    def kept(self) -> float:
        """The input; queries and keys, before their norms too; values; gates and result."""
        values = self.kv_heads * self.head_dim
        return self.dim + self._times_kept * self.rotated + values + self.gates * self.result

    @property
    def up_kept(self) -> float:
        """There is no low rank."""
        return 0.0

    @property
    def key_values(self) -> float:
        """Values per token of keys and values."""
        return 2.0 * self.kv_heads * self.head_dim

    @property
    def copied(self) -> float:
        """Queries and keys, read and written by rotations, and by norms if they have any."""
        return 2.0 * self._times_kept * self.rotated

    @property
    def normed(self) -> float:
        """Queries and keys, if they have norms."""
        return self.rotated if self.norms_heads else 0

    @property
    def rotated(self) -> float:
        """Queries and keys."""
        return (self.heads + self.kv_heads) * self.head_dim

    @property
    def result(self) -> float:
        """Values of all heads."""
        return self.heads * self.head_dim

    @property
    def _times_kept(self) -> int:
        """How often queries and keys are kept: after rotation, and before their norms."""
        return 2 if self.norms_heads else 1


def attention_of(table: Mapping[str, Any], sizes: Mapping[str, int]) -> Attention:
    """Return the attention of a configuration's blocks; raises InputError if a size is missing or
    invalid."""
    dim = sizes["dim"]
    heads = sizes["num_heads"]
    if table.get("kv_lora_rank") is not None:
        nope, rope, value, rank = needed(table, "low-rank attention", LOW_RANKS)
        query_rank = 0
        if table.get("q_lora_rank"):
            (query_rank,) = needed(table, "low-rank attention", QUERY_RANK)
        return LowRankAttention(
            dim=dim,
            heads=heads,
            nope=nope,
            rope=rope,
            value=value,
            rank=rank,
            query_rank=query_rank,
        )
    return GroupedAttention(
        dim=dim,
        heads=heads,
        kv_heads=sizes.get("kv_heads", heads),
        head_dim=sizes.get("head_dim", dim // heads),
        is_gated=bool(table.get("attn_output_gate")),
        norms_heads=bool(table.get("use_qk_norm")),
    )


def attention_fields(
    table: Mapping[str, Any], sizes: Mapping[str, int], kinds: Mapping[str, list[Any]], seq_len: int
) -> dict[str, Any]:
    """Return the fields `attention` and `score_width` of `HubShape`, means over blocks, and
    `attention_sizes`."""
    attention = attention_of(table, sizes)
    parameters, widths = _over_layers(attention, table, kinds, seq_len)
    layers = sizes["num_layers"]
    fields = {
        "attention_parameters": parameters / layers,
        "attention_kept": attention.kept,
        "key_values": attention.key_values,
        "attention_up_kept": attention.up_kept,
        "attention_up": attention.up_parameters,
        "attention_copied": attention.copied,
        "head_dim": attention.head_dim,
        "attention_normed": attention.normed,
        "attention_result": attention.result,
    }
    return {"attention": fields, "attention_sizes": attention, "score_width": widths / layers}


def _over_layers(
    attention: Attention, table: Mapping[str, Any], kinds: Mapping[str, list[Any]], seq_len: int
) -> tuple[float, float]:
    """Return the parameters and the score width of the attention of all layers together.

    Args:
        attention: the costs of one layer whose queries see the whole context.
        table: the configuration.
        kinds: by a field of the configuration, its value for each layer.
        seq_len: tokens of the context.
    """
    layer_types = kinds["layer_types"]
    num_linear = layer_types.count("linear_attention")
    num_indexed = layer_types.count("indexed_attention")
    num_sliding = layer_types.count("sliding_attention") + layer_types.count("chunked_attention")
    num_whole = len(layer_types) - num_linear - num_indexed - num_sliding
    window = int(table.get("sliding_window") or table.get("attention_chunk_size") or seq_len)
    # scores cost as much as those of so many layers over the whole context
    whole_contexts = num_whole + num_sliding * _visible_share(window, seq_len)
    parameters = (len(layer_types) - num_linear) * attention.parameters
    score_width = whole_contexts * attention.score_width
    if num_linear:  # the cost of its scores is negligible in comparison
        parameters += num_linear * attention.dim * _linear_columns(table)
    if num_indexed:
        heads, head_dim, top_k = needed(table, "an indexer", INDEXER)
        # "shared": a layer that takes the keys of an earlier layer's indexer, and has none
        num_indexers = num_indexed - kinds.get("indexer_types", []).count("shared")
        # an indexer has queries of several heads, one key, and a weight of each head
        query_parameters = attention.query_width * heads * head_dim
        key_and_weight_parameters = attention.dim * (head_dim + heads)
        parameters += num_indexers * (query_parameters + key_and_weight_parameters)
        # attention scores the chosen keys, and an indexer all keys, with its own heads
        chosen = num_indexed * _visible_share(top_k, seq_len) * attention.score_width
        score_width += chosen + num_indexers * heads * head_dim
    return parameters, score_width


def _linear_columns(table: Mapping[str, Any]) -> int:
    """Return the columns of all products of linear attention, which have a token's width as
    rows."""
    key_heads, key_dim, value_heads, value_dim = needed(table, "linear attention", LINEAR)
    queries_and_keys = 2 * key_heads * key_dim
    values_gates_and_last_product = 3 * value_heads * value_dim
    numbers_of_heads = 2 * value_heads
    return queries_and_keys + values_gates_and_last_product + numbers_of_heads


def _visible_share(window: int, seq_len: int) -> float:
    """Return how many keys of a window a query sees, over how many it sees of the whole context,
    means over queries; the first queries see fewer keys than the window has."""
    window = min(window, seq_len)
    # the first `window` queries see half a window on average, the others a whole one
    mean_keys = window - window**2 / (2 * seq_len)
    return mean_keys / (seq_len / 2)


def needed(table: Mapping[str, Any], what: str, examples: Mapping[str, int]) -> list[int]:
    """Return the sizes of a kind of attention that `examples` names; raises InputError if one is
    missing or invalid."""
    for name, example in examples.items():
        value = table.get(name)
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"{name}={value!r}: {what} needs a whole number of at least 1: add it, for "
                f"example {example}"
            )
    return [table[name] for name in examples]
