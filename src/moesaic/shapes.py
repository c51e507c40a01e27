"""The fields of a language model that determine the time and the memory of a step. Needs no torch.

The configuration from which models are built (`models/config.py`) inherits these fields and adds
those that change neither. Names, defaults and checks are thus written once, and one file serves
planning and training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from moesaic.errors import InputError

LARGEST = 2**31 - 1
"""Largest value of any size."""
HASH_BUCKETS = 65_536
"""Rows of a hash router's table, unless its options say otherwise."""


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The MoE layers of a model."""

    num_experts: int = 16
    """Experts per layer."""
    top_k: int = 2
    """Experts per token."""
    hidden: int = 256
    """Inner width of one expert."""
    shared_hidden: int = 0
    """Inner width of a shared expert that every token passes; 0 for no shared expert."""
    experts: Literal["swiglu", "gelu", "relu"] = "swiglu"
    """Activation of the experts and of dense feed-forward layers: SwiGLU (three matrices), GELU or
    ReLU (two matrices)."""
    capacity: Literal["dropless", "fixed", "fitted", "padded"] = "dropless"
    """Capacity of an expert. dropless: every copy is computed. fixed: copies above capacity_factor
    times the mean load are dropped. fitted: as much capacity as a call needs, but at most that
    factor. padded: fixed per rank, and each rank always sends the same number of padded rows, so
    that no size depends on counts."""
    capacity_factor: float = 1.25
    """Capacity over the mean load of an expert; unused by dropless."""
    capacity_scope: Literal["mesh", "rank"] = "mesh"
    """Whose copies the capacity limits: those of all ranks together, or those of each rank. padded
    always takes rank."""
    capacity_order: Literal["position", "score"] = "position"
    """Which tokens are accepted first: earlier ones, or those with larger routing weights."""
    router: str = "softmax"
    """The router: softmax, switch, sigmoid, noisy, cosine, group_limited, gshard, base,
    expert_choice, hash or topology (docs/layer.md)."""
    router_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of the router, each a name and a value: bias_rate 0.01 (sigmoid), num_groups 8
    top_groups 4 (group_limited)."""

    def __post_init__(self) -> None:
        if not 0 < self.capacity_factor < math.inf:
            raise InputError(
                f"model.moe.capacity_factor={self.capacity_factor}: must be a finite number above "
                "0; to drop nothing write capacity=dropless"
            )
        for name in ("num_experts", "top_k", "hidden"):
            check_at_least("model.moe", self, name, 1)
        check_at_least("model.moe", self, "shared_hidden", 0)

    @property
    def table_bytes(self) -> float:
        """Bytes of a router's table, which every rank has whole: a hash router's."""
        if self.router != "hash":
            return 0.0
        return 4 * float(self.router_options.get("buckets", HASH_BUCKETS)) * self.num_experts

    @property
    def limits_each_rank(self) -> bool:
        """Whether the copies of each rank have a capacity of their own."""
        return self.capacity == "padded" or (
            self.capacity != "dropless" and self.capacity_scope == "rank"
        )


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The transformer blocks of a model."""

    kind: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """decoder: predicts the next token (GPT), the only kind that moesaic train trains. encoder:
    predicts masked tokens (BERT). encoder_decoder: the first half of the blocks encodes the first
    half of a sequence, the other blocks predict the second half (translation)."""
    kv_heads: int | None = None
    """Heads of keys and values, each shared by equally many query heads (grouped-query attention);
    None for one per query head."""
    head_dim: int | None = None
    """Width of an attention head; None for model.dim / model.num_heads."""
    qk_norm: bool = False
    """The queries and keys of each head pass an RMSNorm, as in Qwen3."""
    tied: bool = True
    """Use the embedding matrix as the output matrix too."""
    norm: Literal["rms", "layer", "post_layer"] = "rms"
    """rms or layer: RMSNorm or LayerNorm before each layer; post_layer: LayerNorm after the
    residual addition, as in BERT and the first Transformer."""
    norm_eps: float | None = None
    """Number that norms add to the variance; None: torch's, 1e-5 for LayerNorm and the smallest
    step from 1 for RMSNorm."""
    positions: Literal["rotary", "learned"] = "rotary"
    """rotary: queries and keys are rotated by position. learned: a vector per position is added to
    the embedding."""
    rope_theta: float = 10_000.0
    """Base of the frequencies of rotary positions."""
    rope_factor: float = 1.0
    """Factor by which rotary positions are divided (linear scaling)."""
    bias: bool = False
    """Use biases in attention and in dense feed-forward layers; experts have none."""
    dropout: float = 0.0
    """Dropout of the embedding, of attention weights and of layer outputs. The random draws depend
    on the mesh."""

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_at_least("model.block", self, name, 1)
        for name in ("rope_theta", "rope_factor", "norm_eps"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"model.block.{name}={getattr(self, name)}: must be above 0 and finite"
                )
        if not 0 <= self.dropout < 1:
            raise InputError(
                f"model.block.dropout={self.dropout}: choose a share from 0 to below 1"
            )


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a transformer."""

    ffn: Literal["moe", "dense"] = "moe"
    """Feed-forward layers. moe: MoE layers, in the blocks that moe_every names; dense: none."""
    moe_every: int = 1
    """1: an MoE layer in every block; 2: in every second block, counted from the last, and dense
    layers in the others."""
    dense_hidden: int | None = None
    """Inner width of dense layers; None for the active width of an MoE layer, top_k * hidden +
    shared_hidden, which gives equally many active parameters."""
    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of transformer blocks."""
    num_heads: int = 4
    """Number of attention heads; must divide dim into heads of even width."""
    seq_len: int = 256
    """Tokens per training sequence, and the longest context."""
    conv_width: int = 4
    """Width of the short convolution in front of each block, in positions up to the current one; 1
    for no convolution."""
    block: BlockConfig = field(default_factory=BlockConfig)
    """The transformer blocks."""
    moe: MoEShape = field(default_factory=MoEShape)
    """The MoE layers."""
    checkpoint_activations: bool = False
    """Recompute each block in backward instead of keeping its activations; routing is replayed."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "seq_len", "moe_every"):
            check_at_least("model", self, name, 1)
        if self.ffn not in ("moe", "dense"):
            raise InputError(
                f"model.ffn={self.ffn!r} is unknown: choose moe or dense; dense_hidden is a "
                "field of its own"
            )
        if self.dense_hidden is not None:
            check_at_least("model", self, "dense_hidden", 1)
        self.check_heads()
        if not self.is_dense and not 1 <= self.moe.top_k <= self.moe.num_experts:
            raise InputError(
                f"model.moe.top_k={self.moe.top_k} does not fit "
                f"model.moe.num_experts={self.moe.num_experts}: choose 1 <= top_k <= "
                f"{self.moe.num_experts}"
            )

    def check_heads(self) -> None:
        """Raise InputError if the width does not split into the heads, or an encoder_decoder does
        not split into halves."""
        if self.num_heads % self.kv_heads:
            raise InputError(
                f"model.block.kv_heads={self.kv_heads} does not divide "
                f"model.num_heads={self.num_heads}: choose a divisor of it"
            )
        if self.block.kind == "encoder_decoder" and (self.num_layers % 2 or self.seq_len % 2):
            raise InputError(
                f"model.num_layers={self.num_layers} and model.seq_len={self.seq_len}: an "
                "encoder_decoder splits both in halves: choose even numbers"
            )
        if self.block.head_dim is not None:
            if self.block.head_dim % 2:
                raise InputError(
                    f"model.block.head_dim={self.block.head_dim}: choose an even width"
                )
        elif self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise InputError(
                f"model.dim={self.dim} does not split into model.num_heads={self.num_heads} heads "
                f"of even width: choose dim as a multiple of {2 * self.num_heads}"
            )

    @property
    def around(self) -> dict[str, float]:
        """Fields of `StepModel` about the parts of a step outside MoE layers, if they differ from
        its defaults."""
        # queries and the output, keys and values: two projections of each width
        width = self.head_dim * (self.num_heads + self.kv_heads)
        # every second block attends twice
        attentions_per_block = 1.5 if self.block.kind == "encoder_decoder" else 1.0
        attention_parameters = attentions_per_block * 2 * self.dim * width
        # the default: 4 square matrices, with heads that are together as wide as a token
        is_square = attention_parameters == 4 * self.dim * self.dim
        if is_square and self.num_heads * self.head_dim == self.dim:
            return {}
        step_fields: dict[str, float] = {"attention_parameters": attention_parameters}
        if self.block.head_dim is not None:
            # a query with half of the keys on average, then their weights with the values, each
            # a product and a sum
            step_fields["score_operations"] = 2 * self.seq_len * self.num_heads * self.head_dim
        return step_fields

    def kept_values(self, *, on_cpu: bool) -> float:
        """Return the values per token that a block keeps outside its feed-forward layer, less the
        inputs of its two norms.

        On a CPU an RMSNorm also keeps what it multiplies by its weight, and attention keeps its
        result in two orders. Values are kept with the projection that made them, of which they are
        a view.
        """
        block = self.block
        queries = self.num_heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        is_split = self.kv_heads != self.num_heads  # queries come from a projection of their own
        per_norm = 2 if on_cpu and block.norm == "rms" else 1  # values kept per value of a norm
        beside_attention = 2 * per_norm * self.dim  # of the block's two norms
        if self.conv_width > 1:
            beside_attention += self.dim

        # the results of the projections, which attention or what lies between reads: keys, values
        # and, if one projection makes all three, queries
        projected = 2 * keys if is_split else 2 * keys + queries
        if block.qk_norm:
            # on a CPU, what an RMSNorm multiplies by its weight
            projected += (queries + keys) * (per_norm - 1)
            if is_split:  # the input of the queries' norm
                projected += queries
        if block.positions == "rotary" or block.qk_norm:  # rotated, or as the norms return them
            projected += queries + keys
        elif is_split:  # the queries that attention reads
            projected += queries

        results = 2 * queries if on_cpu else queries
        return beside_attention + projected + results

    @property
    def tied(self) -> bool:
        """Whether one matrix is both the embedding and the output."""
        return self.block.tied

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.block.head_dim or self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.block.kv_heads or self.num_heads

    def is_decoder(self, layer: int) -> bool:
        """Return whether block `layer`, counted from 0, has causal attention."""
        kind = self.block.kind
        return kind == "decoder" or (kind == "encoder_decoder" and layer >= self.num_layers // 2)

    @property
    def routing(self) -> dict[str, int]:
        """Fields of `Workload` about groups of experts, if they differ from its defaults. Shapes of
        published models, which know their groups, override it."""
        return {}

    @property
    def active_hidden(self) -> int:
        """Inner width of a dense feed-forward layer; by default the active width of an MoE
        layer."""
        return self.dense_hidden or self.moe.top_k * self.moe.hidden + self.moe.shared_hidden

    @property
    def is_dense(self) -> bool:
        """Whether no block has an MoE layer."""
        return self.ffn == "dense"

    def is_sparse(self, layer: int) -> bool:
        """Return whether block `layer`, counted from 0, has an MoE layer."""
        return not self.is_dense and (self.num_layers - 1 - layer) % self.moe_every == 0


MOST = {"num_layers": 10_000}
"""Largest values of sizes over which Python loops."""


def check_at_least(section: str, config: object, name: str, least: int) -> None:
    """Raise InputError if a field is below `least`, infinite, or above the largest value of a
    size."""
    value = getattr(config, name)
    if not least <= value < math.inf:
        finite = " and finite" if isinstance(value, float) else ""
        raise InputError(f"{section}.{name}={value}: must be at least {least}{finite}")
    most = MOST.get(name, LARGEST)
    if value > most:
        raise InputError(f"{section}.{name}={value}: must be at most {most}")
