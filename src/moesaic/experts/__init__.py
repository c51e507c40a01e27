"""Expert feed-forward networks. They hold weights and compute products; they never communicate or
route.

Experts in four bits and experts of your own modules are imported on first use: most layers have
neither.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moesaic.experts.experts import AbstractExperts, BorrowedExperts, GatedExperts, PlainExperts
from moesaic.kernels.activation import Clamp

if TYPE_CHECKING:
    from moesaic.experts.four_bit import FourBitExperts
    from moesaic.experts.modules import ModuleExperts

ExpertsFactory = Callable[[int, int, int], AbstractExperts]
"""Builds experts from (dim, hidden, num_experts)."""

GPT_OSS = Clamp(limit=7.0, alpha=1.702, offset=1.0)
"""The constants of clamped SwiGLU in gpt-oss."""

EXPERTS: dict[str, ExpertsFactory] = {
    "swiglu": GatedExperts,
    "clamped_swiglu": partial(GatedExperts, clamp=GPT_OSS),
    "geglu": partial(GatedExperts, activation="gelu"),
    "gelu": PlainExperts,
    "relu": partial(PlainExperts, activation="relu"),
    "relu2": partial(PlainExperts, activation="relu2"),
}

__all__ = [
    "EXPERTS",
    "AbstractExperts",
    "BorrowedExperts",
    "Clamp",
    "ExpertsFactory",
    "FourBitExperts",
    "GatedExperts",
    "ModuleExperts",
    "PlainExperts",
]

_HOMES = {"FourBitExperts": "four_bit", "ModuleExperts": "modules"}


def __getattr__(name: str) -> Any:
    """Import experts that most layers do not use from the module that defines them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
