"""Which implementation of the expert stage runs: the one place that decides, by device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels import by_expert, whole_batch
from moesaic.kernels.work import ExpertWork, Gradients, Wanted


@dataclass(frozen=True, kw_only=True)
class ExpertKernel:
    """One implementation of the expert stage."""

    forward: Callable[[ExpertWork, torch.dtype], tuple[Tensor, list[Tensor]]]
    """(work, dtype of the result) -> (T, D), or (R, D) without dispatch, and the pre-activations: (R, H) per `ups`."""
    backward: Callable[[ExpertWork, Sequence[Tensor], Tensor, Wanted], Gradients]
    """(work, pre-activations, gradient of the result in the dtype of `work.x`, what is wanted) -> gradients."""


KERNELS = {
    "by_expert": ExpertKernel(forward=by_expert.forward, backward=by_expert.backward),
    "whole_batch": ExpertKernel(forward=whole_batch.forward, backward=whole_batch.backward),
}
"""All implementations; they compute the same."""
BY_DEVICE = {"cpu": "by_expert"}
"""Which one a device type uses; others use "whole_batch", which waits for no host."""


def expert_kernel(device: torch.device) -> ExpertKernel:
    """Return the implementation for a device."""
    return KERNELS[BY_DEVICE.get(device.type, "whole_batch")]
