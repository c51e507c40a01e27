"""The configuration of a language model: what its builder reads and a checkpoint is compared against.

What decides a step's time and memory is `plan/model_shape.py`; routing is added here. Nothing here imports torch before a
capacity or a loss is made, so that `moesaic train --help` needs none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from moesaic.errors import InputError
from moesaic.plan.model_shape import ModelShape, MoEShape, check_at_least
from moesaic.routing.routers import ON_MESH, ROUTERS

if TYPE_CHECKING:
    from moesaic.routing.capacity import AbstractCapacity
    from moesaic.routing.losses import AbstractLoss

    RouterName: TypeAlias = str
else:
    RouterName = Literal[tuple(ROUTERS | ON_MESH)]
"""A name of the registries; a command line lists them as choices."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig(MoEShape):
    """The MoE layers of a model; sizes, activation and capacity as of `MoEShape`."""

    router: RouterName = "softmax"
    """Who chooses the experts; docs/layer.md describes each."""
    router_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of that router by its argument names: bias_rate of sigmoid, num_groups and top_groups of group_limited."""
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
        super().__post_init__()
        for name in ("balance_loss", "importance_loss", "z_loss"):
            check_at_least("model.moe", self, name, 0)
        if self.router not in ROUTERS | ON_MESH:
            raise InputError(
                f"model.moe.router={self.router!r} is unknown: choose one of {', '.join(ROUTERS | ON_MESH)}"
            )

    def make_capacity(self) -> AbstractCapacity:
        """Return the capacity rule that the fields describe."""
        from moesaic.routing.capacity import Capacity, Dropless

        if self.capacity == "fixed":
            return Capacity.fixed(self.capacity_factor, order=self.admit_by, scope=self.capacity_scope)
        if self.capacity == "fitted":
            return Capacity.fitted(at_most=self.capacity_factor, order=self.admit_by, scope=self.capacity_scope)
        if self.capacity == "padded":
            return Capacity.fixed(self.capacity_factor, order=self.admit_by, scope="rank", padded=True)
        return Dropless()

    def make_losses(self) -> tuple[AbstractLoss, ...]:
        """Return the auxiliary losses whose coefficient is not 0."""
        from moesaic.routing.losses import Importance, LoadBalance, ZLoss

        losses = (
            LoadBalance(self.balance_loss, level=self.balance_level),
            Importance(self.importance_loss),
            ZLoss(self.z_loss),
        )
        return tuple(loss for loss in losses if loss.coefficient != 0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A transformer; sizes as of `ModelShape`."""

    conv_width: int = 4
    """Positions that the short convolution in front of each block sees, its own included: in a decoder those before it, in an
    encoder those around it; 1 for none."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The sparse layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model", self, "conv_width", 1)
