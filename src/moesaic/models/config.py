"""The configuration of a language model, from which it is built and with which its checkpoints are
compared.

`shapes.py` has the fields that decide the time and memory of a step; this module adds those of
routing. Torch is only imported when a capacity or a loss is made, so `moesaic train --help` does
not need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moesaic.errors import InputError
from moesaic.routing.routers import ON_MESH, ROUTERS
from moesaic.shapes import ModelShape, MoEShape

if TYPE_CHECKING:
    from moesaic.routing.capacity import AbstractCapacity
    from moesaic.routing.losses import AbstractLoss


@dataclass(frozen=True, kw_only=True)
class MoEConfig(MoEShape):
    """The MoE layers of a model; `MoEShape` has their sizes, activation and capacity."""

    load_balance: float = 0.01
    """Coefficient of the load-balancing loss; 0 for none."""
    load_balance_level: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    """What the load-balancing loss is computed over: a micro-batch, each sequence, or all ranks and
    micro-batches of a step."""
    importance: float = 0.0
    """Coefficient of the importance loss; 0 for none."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, which keeps the router's logits small, such as 0.001; 0 for
    none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router not in ROUTERS | ON_MESH:
            raise InputError(
                f"model.moe.router={self.router!r} is unknown: choose one of "
                f"{', '.join(ROUTERS | ON_MESH)}; options are given by router_options"
            )
        for name in ("load_balance", "importance", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"model.moe.{name}={getattr(self, name)}: must be 0 or more and finite"
                )

    def make_capacity(self) -> AbstractCapacity:
        """Make the capacity rule that the fields describe."""
        from moesaic.routing.capacity import Capacity, Dropless

        if self.capacity == "dropless":
            return Dropless()
        return Capacity(
            factor=self.capacity_factor,
            fit=self.capacity == "fitted",
            order=self.capacity_order,
            scope="rank" if self.limits_each_rank else "mesh",
            padded=self.capacity == "padded",
        )

    def make_losses(self) -> tuple[AbstractLoss, ...]:
        """Make the auxiliary losses, except those with a coefficient of 0."""
        from moesaic.routing.losses import Importance, LoadBalance, ZLoss

        losses = (
            LoadBalance(self.load_balance, level=self.load_balance_level),
            Importance(self.importance),
            ZLoss(self.z_loss),
        )
        return tuple(loss for loss in losses if loss.coefficient)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A transformer; `ModelShape` has its sizes."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """The MoE layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
