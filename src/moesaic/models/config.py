"""The shape of a language model: what the GPT builder reads and a checkpoint is compared against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from moesaic.errors import InputError
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.gates import ROUTERS
from moesaic.routing.losses import AbstractLoss, Importance, LoadBalance, ZLoss

RouterName = Literal[
    "softmax", "switch", "sigmoid", "noisy", "cosine", "group_limited", "gshard", "base", "expert_choice", "hash"
]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The MoE layers of a model."""

    num_experts: int = 16
    """Experts per layer."""
    top_k: int = 2
    """Experts per token."""
    hidden: int = 256
    """Inner width of one expert."""
    shared_hidden: int = 0
    """Inner width of a shared expert that every token passes; 0 for none."""
    every: int = 1
    """Each how-many-th block has an MoE layer, counted from the last block; the others are dense."""
    router: RouterName = "softmax"
    """Who chooses the experts; docs/layer.md describes each."""
    bias_rate: float = 1e-3
    """Step of the balancing bias, for the sigmoid and group_limited routers."""
    num_groups: int = 4
    """Groups of experts, for the group_limited router; must divide num_experts."""
    top_groups: int = 2
    """Groups a token may use, for the group_limited router."""
    experts: Literal["swiglu", "gelu", "relu"] = "swiglu"
    """Three-matrix SwiGLU, or two matrices with GELU or ReLU; the dense blocks use the same."""
    capacity: Literal["dropless", "fixed", "fitted", "padded"] = "dropless"
    """dropless serves every copy; fixed drops above capacity_factor; fitted takes what is needed, at most that; padded is
    fixed on each rank, which sends always as many rows, so that no size waits for counts."""
    capacity_factor: float = 1.25
    """Rows per expert over the mean load, for all but dropless."""
    capacity_scope: Literal["mesh", "rank"] = "mesh"
    """Whose copies fixed and fitted count: those of all ranks, or each rank its own."""
    admit_by: Literal["position", "score"] = "position"
    """Who gets in when an expert is full (never, when dropless): earlier tokens, or tokens with larger weights."""
    balance_loss: float = 0.01
    """Coefficient of the load-balance loss; 0 turns it off."""
    balance_level: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    """Over which tokens the load-balance loss is taken."""
    importance_loss: float = 0.0
    """Coefficient of the importance loss."""
    z_loss: float = 0.0
    """Coefficient of the z-loss on the router's logits; 0.001 is usual."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden", "every", "num_groups", "top_groups"):
            _check_at_least("model.moe", self, name, 1)
        for name in ("shared_hidden", "bias_rate", "balance_loss", "importance_loss", "z_loss"):
            _check_at_least("model.moe", self, name, 0)
        if not 0 < self.capacity_factor < math.inf:
            raise InputError(
                f"model.moe.capacity_factor={self.capacity_factor}: must be a finite number above 0; to drop nothing "
                'set model.moe.capacity="dropless"'
            )
        if self.router not in ROUTERS:
            raise InputError(f"model.moe.router={self.router!r} is unknown: choose one of {', '.join(ROUTERS)}")

    def make_capacity(self) -> AbstractCapacity:
        """Return the capacity rule that the fields describe."""
        if self.capacity == "fixed":
            return Capacity.fixed(self.capacity_factor, order=self.admit_by, scope=self.capacity_scope)
        if self.capacity == "fitted":
            return Capacity.fitted(at_most=self.capacity_factor, order=self.admit_by, scope=self.capacity_scope)
        if self.capacity == "padded":
            return Capacity.fixed(self.capacity_factor, order=self.admit_by, scope="rank", padded=True)
        return Dropless()

    def make_losses(self) -> tuple[AbstractLoss, ...]:
        """Return the auxiliary losses whose coefficient is not 0."""
        losses = (
            LoadBalance(self.balance_loss, level=self.balance_level),
            Importance(self.importance_loss),
            ZLoss(self.z_loss),
        )
        return tuple(loss for loss in losses if loss.coefficient != 0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer."""

    ffn: Literal["moe", "dense"] = "moe"
    """Feed-forward layers: sparse, or dense with the inner width `dense_hidden`."""
    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads; must divide dim into heads of even width."""
    seq_len: int = 256
    """Tokens per training sequence, and the longest context."""
    conv_width: int = 4
    """Positions that the short causal convolution in front of each block sees, its own included; 1 for none."""
    dense_hidden: int | None = None
    """Inner width of dense feed-forward layers; None gives the MoE layer's active width, top_k * hidden + shared_hidden,
    so that a dense model has the active parameters of the sparse one."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The sparse layers."""
    checkpoint_activations: bool = False
    """Recompute each block in backward instead of keeping its activations; routing is replayed."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "seq_len", "conv_width"):
            _check_at_least("model", self, name, 1)
        if self.dense_hidden is not None:
            _check_at_least("model", self, "dense_hidden", 1)
        if self.dim % self.num_heads or self.dim // self.num_heads % 2:
            raise InputError(
                f"model.dim={self.dim} does not split into model.num_heads={self.num_heads} heads of even width: "
                f"choose dim as a multiple of {2 * self.num_heads}"
            )
        if self.ffn == "moe" and not 1 <= self.moe.top_k <= self.moe.num_experts:
            raise InputError(
                f"model.moe.top_k={self.moe.top_k} does not fit model.moe.num_experts={self.moe.num_experts}: "
                f"choose 1 <= top_k <= {self.moe.num_experts}"
            )

    @property
    def active_hidden(self) -> int:
        """Inner width that a token passes in one feed-forward layer."""
        if self.dense_hidden is not None:
            return self.dense_hidden
        return self.moe.top_k * self.moe.hidden + self.moe.shared_hidden

    def is_sparse(self, layer: int) -> bool:
        """Whether block `layer`, counted from 0, has an MoE layer."""
        return self.ffn == "moe" and (self.num_layers - 1 - layer) % self.moe.every == 0


def _check_at_least(section: str, config: object, name: str, least: int) -> None:
    value = getattr(config, name)
    if not least <= value < math.inf:
        finite = " and finite" if isinstance(value, float) else ""
        raise InputError(f"{section}.{name}={value}: must be at least {least}{finite}")
