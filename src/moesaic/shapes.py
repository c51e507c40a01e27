"""The fields of a language model that determine the time and the memory of a step. Needs no torch.

The configuration from which models are built (`models/config.py`) inherits these fields and adds those that change neither.
Names, defaults and checks are thus written once, and one file serves planning and training.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from moesaic.configfile import read_number
from moesaic.errors import InputError

LIMITED = ("fixed", "fitted", "padded")
"""Kinds of capacity that have a factor."""
PREFERENCES = ("rank", "score")
"""Options that may follow the factor of a capacity."""
ROTARY, ROPE = "rotary", (10_000.0, 1.0)
"""Name of rotary positions, and their default base and factor."""
PLAIN = "plain"
"""Name of the only kind of attention."""
LARGEST = 2**31 - 1
"""Largest value of any size."""


@dataclass(frozen=True, kw_only=True)
class CapacityRule:
    """A parsed `MoEShape.capacity`: how many copies an expert accepts, and which ones."""

    kind: str
    """dropless, or one of `LIMITED`."""
    factor: float = 1.0
    """Capacity over the mean load of an expert."""
    by_rank: bool = False
    """Whether the capacity applies to the copies of each rank, instead of to those of all ranks together."""
    by_score: bool = False
    """Whether tokens with larger routing weights are accepted first, instead of earlier tokens."""


def read_capacity(text: str) -> CapacityRule:
    """Parse the text of `MoEShape.capacity`.

    Raises:
        InputError: if the text is invalid.
    """
    kind, *words = text.split(":")
    if kind == "dropless" and not words:
        return CapacityRule(kind=kind)
    factor = 1.25
    try:
        if words and words[0] not in PREFERENCES:
            factor = float(words.pop(0))
        if kind not in LIMITED or len(words) > len(set(words)) or set(words) - set(PREFERENCES):
            raise ValueError(text)
    except ValueError as error:
        raise InputError(
            f"model.moe.capacity={text!r}: write dropless, or {', '.join(LIMITED)} with a factor, such as fixed:1.25, "
            "optionally followed by :rank or :score"
        ) from error
    if not 0 < factor < math.inf:
        raise InputError(
            f"model.moe.capacity={text}: the factor must be a finite number above 0; to drop nothing write dropless"
        )
    return CapacityRule(
        kind=kind, factor=factor, by_rank="rank" in words or kind == "padded", by_score="score" in words
    )


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """A parsed `BlockConfig.attention`: the heads of attention."""

    kv_heads: int | None = None
    """Heads of keys and values, each shared by equally many query heads (grouped-query attention); None for one per query
    head."""
    head_dim: int | None = None
    """Width of a head; None for model.dim / model.num_heads."""
    qk_norm: bool = False
    """Whether the queries and keys of each head pass an RMSNorm, as in Qwen3."""


def read_attention(text: str) -> AttentionRule:
    """Parse the text of `BlockConfig.attention`.

    Raises:
        InputError: if the text is invalid.
    """
    options: dict[str, Any] = {}
    kind, *words = text.split(":")
    for word in words:
        name, equals, number = word.partition("=")
        options[name] = True if name == "qk_norm" and not equals else int(number) if number.isdecimal() else 0
    sizes = [value for name, value in options.items() if name != "qk_norm"]
    known = {each.name for each in fields(AttentionRule)}
    if kind != PLAIN or len(options) < len(words) or options.keys() - known or options.get("qk_norm", True) is not True:
        raise InputError(
            f"model.block.attention={text!r}: write {PLAIN}, and behind it each once, where you want them, "
            ":kv_heads=4, :head_dim=128 and :qk_norm"
        )
    if not all(1 <= size <= LARGEST for size in sizes):
        raise InputError(f"model.block.attention={text!r}: kv_heads and head_dim must be numbers from 1 to {LARGEST}")
    return AttentionRule(**options)


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
    """Activation of the experts and of dense feed-forward layers: SwiGLU (three matrices), GELU or ReLU (two matrices)."""
    capacity: str = "dropless"
    """Capacity of an expert. dropless: every copy is computed. fixed:1.25: copies above 1.25 times the mean load are dropped.
    fitted:1.25: as much capacity as a call needs, but at most this factor. padded:1.25: fixed per rank, and each rank always
    sends the same number of padded rows, so that no size depends on counts. Append :rank to apply the capacity to the copies
    of each rank instead of all ranks, and :score to accept tokens with larger routing weights first instead of earlier
    tokens."""

    def __post_init__(self) -> None:
        read_capacity(self.capacity)
        for name in ("num_experts", "top_k", "hidden"):
            check_at_least("model.moe", self, name, 1)
        check_at_least("model.moe", self, "shared_hidden", 0)

    @property
    def capacity_rule(self) -> CapacityRule:
        """The parsed `capacity`."""
        return read_capacity(self.capacity)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The transformer blocks of a model."""

    kind: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """decoder: predicts the next token (GPT), the only kind that moesaic train trains. encoder: predicts masked tokens (BERT).
    encoder_decoder: the first half of the blocks encodes the first half of a sequence, the other blocks predict the second
    half (translation)."""
    attention: str = PLAIN
    """Attention heads. plain: as many heads of keys and values as of queries, together as wide as the model. Append
    :kv_heads=4 for four heads of keys and values, each shared by equally many query heads (grouped-query attention),
    :head_dim=128 for another width of a head, and :qk_norm for an RMSNorm over the queries and keys of each head (Qwen3)."""
    tied: bool = True
    """Use the embedding matrix as the output matrix too."""
    norm: Literal["rms", "layer", "post_layer"] = "rms"
    """rms or layer: RMSNorm or LayerNorm before each layer; post_layer: LayerNorm after the residual addition, as in BERT and
    the first Transformer."""
    positions: str = ROTARY
    """rotary: queries and keys are rotated by position. Append the base of the frequencies (default 10000) and the factor by
    which positions are divided (linear scaling): rotary:1000000:4. learned: a vector per position is added to the
    embedding."""
    bias: bool = False
    """Use biases in attention and in dense feed-forward layers; experts have none."""
    dropout: float = 0.0
    """Dropout of the embedding, of attention weights and of layer outputs. The random draws depend on the mesh."""

    def __post_init__(self) -> None:
        read_attention(self.attention)
        if self.rope is not None and not all(0 < number < math.inf for number in self.rope):
            raise InputError(
                f"model.block.positions={self.positions!r}: write learned, or rotary, optionally with a base and a factor "
                "above 0 and finite, such as rotary:10000:1"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"model.block.dropout={self.dropout}: choose a share from 0 to below 1")

    @property
    def heads(self) -> AttentionRule:
        """The parsed `attention`."""
        return read_attention(self.attention)

    @property
    def rope(self) -> tuple[float, float] | None:
        """Base of the frequencies of rotary positions, and the factor by which positions are divided.

        None for learned positions; numbers that `positions` does not give correctly are NaN.
        """
        if self.positions == "learned":
            return None
        kind, *words = self.positions.split(":")
        if kind != ROTARY or len(words) > len(ROPE):
            return math.nan, math.nan
        base, factor = (*map(read_number, words), *ROPE[len(words) :])
        return base, factor


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a transformer."""

    ffn: str = "moe"
    """Feed-forward layers. moe: an MoE layer in every block; moe:2: in every second block, counted from the last, and dense
    layers in the others; dense: no MoE layer. Append the inner width of dense layers: moe:2:512, dense:512. The default width
    is the active width of an MoE layer, top_k * hidden + shared_hidden, which gives equally many active parameters."""
    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of transformer blocks."""
    num_heads: int = 4
    """Number of attention heads; must divide dim into heads of even width."""
    seq_len: int = 256
    """Tokens per training sequence, and the longest context."""
    block: BlockConfig = field(default_factory=BlockConfig)
    """The transformer blocks."""
    moe: MoEShape = field(default_factory=MoEShape)
    """The MoE layers."""
    checkpoint_activations: bool = False
    """Recompute each block in backward instead of keeping its activations; routing is replayed."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "seq_len"):
            check_at_least("model", self, name, 1)
        self.check_heads()
        if (
            not re.fullmatch("(dense|moe(:[1-9][0-9]{0,9})?)(:[1-9][0-9]{0,9})?", self.ffn)
            or self.active_hidden > LARGEST
        ):
            raise InputError(
                f"model.ffn={self.ffn!r}: write moe or moe:2, for an MoE layer in each second block, or dense, optionally "
                f"followed by the inner width of dense layers, at most {LARGEST}, such as moe:2:512 or dense:512"
            )
        if not self.is_dense and not 1 <= self.moe.top_k <= self.moe.num_experts:
            raise InputError(
                f"model.moe.top_k={self.moe.top_k} does not fit model.moe.num_experts={self.moe.num_experts}: "
                f"choose 1 <= top_k <= {self.moe.num_experts}"
            )

    def check_heads(self) -> None:
        """Raise InputError if the width does not split into the heads, or an encoder_decoder does not split into halves."""
        heads, asked = self.block.heads, f"model.block.attention={self.block.attention}"
        if self.num_heads % self.kv_heads:
            raise InputError(
                f"{asked}: kv_heads={self.kv_heads} does not divide model.num_heads={self.num_heads}: choose a divisor of it"
            )
        if self.block.kind == "encoder_decoder" and (self.num_layers % 2 or self.seq_len % 2):
            raise InputError(
                f"model.num_layers={self.num_layers} and model.seq_len={self.seq_len}: an encoder_decoder splits both in "
                "halves: choose even numbers"
            )
        if heads.head_dim is not None:
            if heads.head_dim % 2:
                raise InputError(f"{asked}: head_dim={heads.head_dim}: choose an even width")
        elif self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise InputError(
                f"model.dim={self.dim} does not split into model.num_heads={self.num_heads} heads of even width: "
                f"choose dim as a multiple of {2 * self.num_heads}"
            )

    @property
    def around(self) -> dict[str, float]:
        """Fields of `StepModel` about the parts of a step outside MoE layers, if they differ from its defaults."""
        block = self.block
        width = self.head_dim * (self.num_heads + self.kv_heads)
        crosses = 1.5 if block.kind == "encoder_decoder" else 1.0  # every second block attends twice
        step_fields: dict[str, float] = {"attention_parameters": crosses * 2 * self.dim * width}
        if block.heads.head_dim is not None:
            step_fields["score_operations"] = 2 * self.seq_len * self.num_heads * self.head_dim
        return step_fields if step_fields["attention_parameters"] != 4 * self.dim * self.dim else {}

    @property
    def tied(self) -> bool:
        """Whether one matrix is both the embedding and the output."""
        return self.block.tied

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.block.heads.head_dim or self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.block.heads.kv_heads or self.num_heads

    def is_decoder(self, layer: int) -> bool:
        """Return whether block `layer`, counted from 0, has causal attention."""
        kind = self.block.kind
        return kind == "decoder" or (kind == "encoder_decoder" and layer >= self.num_layers // 2)

    @property
    def routing(self) -> dict[str, int]:
        """Fields of `Workload` about groups of experts, if they differ from its defaults."""
        return {}

    @property
    def active_hidden(self) -> int:
        """Inner width of a dense feed-forward layer; by default the active width of an MoE layer."""
        kind, *numbers = self.ffn.split(":")
        dense_hidden = numbers[kind == "moe" :]
        return int(dense_hidden[0]) if dense_hidden else self.moe.top_k * self.moe.hidden + self.moe.shared_hidden

    @property
    def is_dense(self) -> bool:
        """Whether no block has an MoE layer."""
        return self.ffn.partition(":")[0] == "dense"

    @property
    def moe_every(self) -> int:
        """Distance between blocks with an MoE layer, counted from the last block; 1 for a dense model."""
        return int([*self.ffn.split(":"), "1"][1]) if not self.is_dense else 1

    def is_sparse(self, layer: int) -> bool:
        """Return whether block `layer`, counted from 0, has an MoE layer."""
        return not self.is_dense and (self.num_layers - 1 - layer) % self.moe_every == 0


MOST = {"num_layers": 10_000}
"""Largest values of sizes over which Python loops."""


def check_at_least(section: str, config: object, name: str, least: int) -> None:
    """Raise InputError if a field is below `least`, infinite, or above the largest value of a size."""
    value = getattr(config, name)
    if not least <= value < math.inf:
        finite = " and finite" if isinstance(value, float) else ""
        raise InputError(f"{section}.{name}={value}: must be at least {least}{finite}")
    most = MOST.get(name, LARGEST)
    if value > most:
        raise InputError(f"{section}.{name}={value}: must be at most {most}")
