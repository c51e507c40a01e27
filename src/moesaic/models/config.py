"""The configuration of a language model, from which it is built and with which its checkpoints are compared.

`shapes.py` has the fields that decide the time and memory of a step; this module adds those of routing. Torch is only
imported when a capacity or a loss is made, so `moesaic train --help` does not need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesaic.configfile import read_number
from moesaic.errors import InputError
from moesaic.routing.routers import ON_MESH, ROUTERS
from moesaic.shapes import ModelShape, MoEShape, check_at_least

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
"""For the name of each auxiliary loss: its class in `routing/losses.py` and the options of that class."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig(MoEShape):
    """The MoE layers of a model; `MoEShape` has their sizes, activation and capacity."""

    router: str = "softmax"
    """The router: softmax, switch, sigmoid, noisy, cosine, group_limited, gshard, base, expert_choice, hash or topology
    (docs/layer.md). Options follow as name=value after colons: sigmoid:bias_rate=0.01 or
    group_limited:num_groups=8:top_groups=4."""
    losses: tuple[str, ...] = ("load_balance:0.01",)
    """The auxiliary losses, each as name:coefficient. load_balance is computed over a micro-batch, load_balance_sequence over
    each sequence, load_balance_global_batch over all ranks and micro-batches of a step. Others are importance, and z_loss,
    which keeps the router's logits small (z_loss:0.001)."""

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
        """The name of the router, without its options."""
        return self.router.partition(":")[0]

    @property
    def router_options(self) -> dict[str, int | float | bool | str]:
        """The options of the router, by the names of the router's arguments."""
        pairs = (word.partition("=") for word in self.router.split(":")[1:])
        return {name: _value(text) for name, _, text in pairs}

    def make_capacity(self) -> AbstractCapacity:
        """Make the capacity rule that the fields describe."""
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
        """Make the auxiliary losses, except those with a coefficient of 0."""
        from moesaic.routing import losses

        terms = []
        for name, coefficient in self.coefficients().items():
            class_name, options = LOSSES[name]
            if coefficient:
                terms.append(getattr(losses, class_name)(coefficient, **options))
        return tuple(terms)

    def coefficients(self) -> dict[str, float]:
        """Return the coefficient of each loss in `losses`, by name.

        Raises:
            InputError: a loss is unknown or given twice, or a coefficient is not a number of at least 0.
        """
        coefficients = {}
        for text in self.losses:
            name, _, number = text.partition(":")
            coefficient = read_number(number)
            if name not in LOSSES or name in coefficients or not 0 <= coefficient < math.inf:
                raise InputError(
                    f"model.moe.losses: {text!r}: write each of {', '.join(LOSSES)} once at most, with a coefficient of at "
                    "least 0 behind a colon, such as z_loss:0.001"
                )
            coefficients[name] = coefficient
        return coefficients


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A transformer; `ModelShape` has its sizes."""

    conv_width: int = 4
    """Width of the short convolution in front of each block, in positions up to the current one; 1 for no convolution."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """The MoE layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model", self, "conv_width", 1)


def _value(text: str) -> int | float | bool | str:
    """Parse the value of an option: true or false, a number, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
