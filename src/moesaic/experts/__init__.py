"""Expert feed-forward networks. They hold weights and compute products; they never communicate or route."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moesaic.experts.experts import AbstractExperts, BorrowedExperts, GatedExperts, PlainExperts
from moesaic.experts.four_bit import FourBitExperts
from moesaic.experts.modules import ModuleExperts
from moesaic.kernels.activation import Clamp

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
