"""Steps of gradient scalers that divide losses which no scaler has multiplied.

A scaler multiplies the caller's loss, and its step divides all gradients by the same factor, those
of injected losses too. A layer cannot see the factor in its backward pass: it lies in the graph
above. But a scaler steps the optimizer itself, so whose step it is can be read from the call: a
hook on torch's optimizers looks for a scaler among the callers, and for the layer's parameters in
the optimizer. Float16, which is always scaled, is refused before (`injection.py`). Optimizers that
are not torch's, or that step copies of the parameters, are not seen.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

SCALED = (
    "moesaic: a GradScaler steps the optimizer and divides all gradients by its scale, also those "
    "of auxiliary losses, which MoE layers have injected without it: add collect_losses(model) to "
    "your loss before scaler.scale, or call set_loss_scale(model, scaler.get_scale() / n) before "
    "each backward, n the number of micro-batches"
)
"""The warning, once for each layer, if a scaler divides losses that were injected."""
MOST_FRAMES = 16
"""A scaler is looked for among so many callers of an optimizer's step."""


class Injects(Protocol):
    """What has injected losses by a weight of its own."""

    def trained(self) -> Iterable[nn.Parameter]:
        """Return the parameters that an optimizer steps."""


_warned: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of which a warning was given."""
_injecting: weakref.WeakSet[Any] = weakref.WeakSet()
"""All others that have injected losses which nobody scaled. Both are of the process, as torch's
hooks on all optimizers are."""


def note_unscaled(each: Injects) -> None:
    """Note that a loss is injected that no scaler has multiplied."""
    if each in _warned:
        return
    _injecting.add(each)
    _register()


@cache
def _register() -> None:
    """Register the hook on all torch optimizers, once."""
    register_optimizer_step_pre_hook(_warn_if_scaled)


def _warn_if_scaled(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Warn if a scaler takes this step, and its optimizer has parameters of a layer that has
    injected losses."""
    if torch.compiler.is_compiling() or not len(_injecting):
        return
    scaler = _calling_scaler()
    if scaler is None:
        return
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    divided = [
        each
        for each in list(_injecting)
        if any(id(parameter) in stepped for parameter in each.trained())
    ]
    if divided and scaler.get_scale() != 1:
        for each in divided:
            _injecting.discard(each)
            _warned.add(each)
        warnings.warn(SCALED, stacklevel=3)


def _calling_scaler() -> torch.amp.GradScaler | None:
    """Return the gradient scaler whose step calls an optimizer's; None if none does."""
    frame = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(caller, torch.amp.GradScaler):
            return caller if caller.is_enabled() else None
    return None
