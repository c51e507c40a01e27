"""The configuration of a language model: what its builder reads and a checkpoint is compared against.

What decides a step's time and memory is `plan/model_shape.py`; routing is added here. Nothing here imports torch before a
capacity or a loss is made, so that `moesaic train --help` needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesaic.configfile import read_number
from moesaic.errors import InputError
from moesaic.plan.model_shape import ModelShape, MoEShape, check_at_least
from moesaic.routing.routers import ON_MESH, ROUTERS

if TYPE_CHECKING:
    from moesaic.routing.capacity import AbstractCapacity
    from moesaic.routing.losses import AbstractLoss

LOSSES: dict[str, tuple[str, dict[str, str]]] = {
    "load_balance": ("LoadBalance", {}),
    "load_balance_sequence": ("LoadBalance", {"level": "sequence"}),
    "load_balance_global_batch": ("LoadBalance", {"level": "global_batch"}),
    "importance": ("Importance", {}),
    "z_loss": ("ZLoss", {}),
}
"""The auxiliary losses by their `name`: a class of `routing/losses.py` and its options."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig(MoEShape):
    """The MoE layers of a model; sizes, activation and capacity as of `MoEShape`."""

    router: str = "softmax"
    """Who chooses the experts: softmax, switch, sigmoid, noisy, cosine, group_limited, gshard, base, expert_choice, hash or
    topology (docs/layer.md). Its options stand behind it by their names: sigmoid:bias_rate=0.01,
    group_limited:num_groups=8:top_groups=4."""
    losses: tuple[str, ...] = ("load_balance:0.01",)
    """The auxiliary losses, each by its name in the metrics with its coefficient. load_balance is taken over a micro-batch,
    load_balance_sequence over each sequence, load_balance_global_batch over all ranks and micro-batches of a step; importance;
    z_loss:0.001 keeps the router's logits small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coefficients()
        if self.router_name not in ROUTERS | ON_MESH:
            raise InputError(
                f"model.moe.router={self.router_name!r} is unknown: choose one of {', '.join(ROUTERS | ON_MESH)}"
            )
        words = self.router.split(":")[1:]
        if not all("=" in word for word in words) or len(self.router_options) < len(words):
            raise InputError(
                f"model.moe.router={self.router!r}: write each option once as name=value behind a colon, such as "
                "sigmoid:bias_rate=0.01"
            )

    @property
    def router_name(self) -> str:
        """The router without its options."""
        return self.router.partition(":")[0]

    @property
    def router_options(self) -> dict[str, int | float | bool | str]:
        """Options of the router by its argument names."""
        pairs = (word.partition("=") for word in self.router.split(":")[1:])
        return {name: _value(text) for name, _, text in pairs}

    def make_capacity(self) -> AbstractCapacity:
        """Return the capacity rule that the fields describe."""
        from moesaic.routing.capacity import Capacity, Dropless

        rule = self.capacity_rule
        if rule.kind == "dropless":
            return Dropless()
        return Capacity(
            factor=rule.factor,
            fit=rule.kind == "fitted",
            order="score" if rule.by_score else "position",
            scope="rank" if rule.by_rank else "mesh",
            padded=rule.kind == "padded",
        )

    def make_losses(self) -> tuple[AbstractLoss, ...]:
        """Return the auxiliary losses whose coefficient is not 0."""
        from moesaic.routing import losses

        made = []
        for name, coefficient in self.coefficients().items():
            kind, options = LOSSES[name]
            if coefficient:
                made.append(getattr(losses, kind)(coefficient, **options))
        return tuple(made)

    def coefficients(self) -> dict[str, float]:
        """Return the coefficient of each loss that `losses` names.

        Raises:
            InputError: for what names no loss, one twice, or a coefficient that cannot be.
        """
        found = {}
        for text in self.losses:
            name, _, number = text.partition(":")
            coefficient = read_number(number)
            if name not in LOSSES or name in found or not 0 <= coefficient < math.inf:
                raise InputError(
                    f"model.moe.losses: {text!r}: write each of {', '.join(LOSSES)} once at most, with a coefficient of at "
                    "least 0 behind a colon, such as z_loss:0.001"
                )
            found[name] = coefficient
        return found


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


def _value(text: str) -> int | float | bool | str:
    """Return what an option's text says: true or false, a number, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
