"""Which kernels run on a device: the one place that decides.

Operations that have several implementations ask here and import what they are told, so that Triton is imported where it runs
and nowhere else: the expert stage (`expert_kernel`), the order of rows and their sums (`permute.py`), the choice of experts
(`routing/router.py`), and the codecs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels.work import ExpertWork, Gradients, Wanted

AMPERE = (8, 0)
"""The compute capability from which the Triton kernels are compiled and checked."""


def kind_of(device: torch.device) -> str:
    """Return which entry of `KERNELS` a device runs.

    triton: on CUDA from Ampere on, where the package is installed. Else the type of the device, where `KERNELS` has it; other:
    torch's operations, none of which waits for the host.
    """
    if device.type == "cuda" and _runs_triton(device):
        return "triton"
    return device.type if device.type in KERNELS else "other"


def codes_by_triton(rows_on: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels encode and decode rows there: 16-bit ones and float32."""
    return dtype != torch.float64 and kind_of(rows_on) == "triton"


@lru_cache(maxsize=64)
def _runs_triton(device: torch.device) -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= AMPERE


@dataclass(frozen=True, kw_only=True)
class ExpertKernel:
    """One implementation of the expert stage."""

    forward: Callable[[ExpertWork, torch.dtype], tuple[Tensor, Tensor]]
    """(work, dtype of the result) -> (T, D), or (R, D) without dispatch, and the pre-activations, what `up` gives: (R, C H),
    whose numbers lie as its own backward reads them."""
    backward: Callable[[ExpertWork, Tensor, Tensor, Wanted], Gradients]
    """(work, pre-activations, gradient of the result in the dtype of `work.x`, what is wanted) -> gradients."""


KERNELS: dict[str, str] = {"cpu": "by_expert", "triton": "triton.expert_stage", "other": "whole_batch"}
"""The modules of the expert stage's implementations, by what `kind_of` says of a device; they compute the same."""


TIERS: dict[str, str] = {"grouped_mm": "whole_batch", "quack": "quack", "fp8": "fp8_rowwise", "mxfp8": "mxfp8"}
"""The modules of implementations that nobody gets unasked: `MoE(kernel=...)` names one. Some round more."""
AUTO = "auto"
"""In place of a name in `TIERS`: what `KERNELS` has for the device."""


def check_tier(name: str) -> str:
    """Return the name of an implementation, if there is one of this name.

    Raises:
        InputError: there is none.
    """
    if name != AUTO and name not in TIERS:
        raise InputError(f"kernel={name!r} is unknown: choose one of {', '.join((AUTO, *TIERS))}")
    return name


def expert_kernel(device: torch.device, name: str = AUTO) -> ExpertKernel:
    """Return the implementation of the expert stage for a device, or the one that is named.

    Raises:
        InputError: the one that is named does not import.
    """
    if name == AUTO:
        return _expert_kernel(KERNELS[kind_of(device)])
    try:
        return _expert_kernel(TIERS[name])
    except ImportError as error:
        raise InputError(
            f"kernel={name!r} does not import here ({error}): install what it needs, or write auto"
        ) from None


def require(work: ExpertWork, name: str, majors: tuple[int, ...], multiple: int) -> None:
    """Refuse a call that a tier cannot compute.

    Args:
        name: of the tier.
        majors: first numbers of the compute capabilities that it runs on.
        multiple: what the widths of tokens and experts have to be multiples of.

    Raises:
        InputError: in one line.
    """
    device, instead = work.x.device, f"; kernel={AUTO!r} runs here"
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if major not in majors:
        wanted = " or ".join(f"{each}.x" for each in majors)
        raise InputError(f"kernel={name!r} needs a GPU of compute capability {wanted}, got {device}{instead}")
    if work.x.dtype != torch.bfloat16:
        raise InputError(f"kernel={name!r} multiplies bfloat16, got {work.x.dtype}: use autocast{instead}")
    if work.x.shape[1] % multiple or work.hidden % multiple:
        sizes = f"dim {work.x.shape[1]} and hidden {work.hidden}"
        raise InputError(f"kernel={name!r} needs multiples of {multiple} as widths, got {sizes}{instead}")


def triton_products() -> Any:
    """Return the module whose `rows_times_any` and `outer_products_any` multiply rows where `kind_of` says triton."""
    return importlib.import_module(f"moesaic.kernels.{KERNELS['triton']}")


@lru_cache(maxsize=8)
def _expert_kernel(name: str) -> ExpertKernel:
    module = importlib.import_module(f"moesaic.kernels.{name}")
    return ExpertKernel(forward=module.forward, backward=module.backward)
