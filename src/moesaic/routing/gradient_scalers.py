"""Steps of gradient scalers that divide losses which no scaler has multiplied.

A scaler multiplies the caller's loss, and its step divides all gradients by the same factor, those
of injected losses too. A layer cannot see the factor in its backward pass: it lies in the graph
above. But a scaler steps the optimizer itself, so whose step it is can be read from the call: a
hook on torch's optimizers waits for the first step of one that has the layer's parameters, and
looks for a scaler among its callers. Float16, which is always scaled, is refused before
(`injection.py`). Optimizers that are not torch's, or that step copies of the parameters, are not
seen.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

SCALED = (
    "moesaic: a GradScaler steps the optimizer and divides all gradients by its scale, also those "
    "of auxiliary losses, which MoE layers have injected without it: add collect_losses(model) to "
    "your loss before scaler.scale, or call set_loss_scale(model, scaler.get_scale() / n) before "
    "each backward, n the number of micro-batches"
)
"""The warning if a scaler divides losses that were injected."""
MOST_FRAMES = 16
"""A scaler is looked for among so many callers of an optimizer's step."""


class Injects(Protocol):
    """What has injected losses by a weight of its own."""

    def trained(self) -> Iterable[nn.Parameter]:
        """Return the parameters that an optimizer steps."""


class FirstStep:
    """Watches for the first step of an optimizer that trains a layer which injects losses, and
    warns if a gradient scaler takes it."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        """Of the hook on all torch optimizers, while it is registered."""
        self._was_seen = False

    def await_for(self, layer: Injects) -> None:
        """Watch from now on, unless the step was seen: then stop. Called when the layer injects
        losses, since torch's hooks cannot be removed while they run."""
        if self._was_seen:
            self._stop()
        elif self._handle is None:
            watch = weakref.ref(self)
            injects = weakref.ref(layer)

            def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if torch.compiler.is_compiling():
                    return
                first_step = watch()
                trained = injects()
                if first_step is not None and trained is not None:
                    first_step.see(optimizer, trained)

            self._handle = register_optimizer_step_pre_hook(look)

    def _stop(self) -> None:
        """Watch no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def see(self, optimizer: torch.optim.Optimizer, layer: Injects) -> None:
        """Look at a step of an optimizer that has any of the layer's parameters, once."""
        if self._was_seen:
            return
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if stepped.isdisjoint(map(id, layer.trained())):
            return
        self._was_seen = True
        scaler = _calling_scaler()
        if scaler is not None and scaler.get_scale() != 1:
            warnings.warn(SCALED, stacklevel=4)


def _calling_scaler() -> torch.amp.GradScaler | None:
    """Return the gradient scaler whose step calls an optimizer's; None if none does."""
    frame = sys._getframe(3)
    for _ in range(MOST_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(caller, torch.amp.GradScaler):
            return caller if caller.is_enabled() else None
    return None
