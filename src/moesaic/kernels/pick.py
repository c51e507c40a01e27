"""The one place that decides which kernels run on a device.

Every operation with several implementations asks this module which one to import: the expert stage
(`expert_kernel`), sorting and summing rows (`permute.py`), top-k routing (`routing/router.py`) and
the codecs. Triton is therefore only imported where it runs.
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
"""The lowest compute capability for which the Triton kernels are compiled and tested."""
GROUPED_MM = (9, 10)
"""The major compute capabilities for which torch's `grouped_mm` has a kernel."""
LIMITED = ("mps", "xpu")
"""The types of devices without float64 and without `segment_reduce`."""


def kind_of(device: torch.device) -> str:
    """Return the key of `KERNELS` that a device uses.

    "triton" for NVIDIA GPUs from Ampere on if Triton is installed; "cpu" for the CPU; "other" for
    everything else, AMD GPUs included, on which nobody has run the kernels. "other" uses torch's
    operations.
    """
    if device.type == "cuda" and _runs_triton(device):
        return "triton"
    return device.type if device.type in KERNELS else "other"


def codes_by_triton(rows_on: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels encode and decode rows of `dtype` on this device: 16-bit
    and float32 rows."""
    return dtype != torch.float64 and kind_of(rows_on) == "triton"


def _runs_triton(device: torch.device) -> bool:
    """Return whether a CUDA device runs the Triton kernels: a constant in compiled code, which
    cannot trace the probe."""
    return _can_run_triton(device)


# What `torch.compiler.assume_constant_result` does, but that imports the compiler, which takes
# seconds.
_runs_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _can_run_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and a CUDA device is new enough."""
    return importlib.util.find_spec("triton") is not None and capability_of(device) >= AMPERE


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    # AMD's GPUs are "cuda" devices too, of capabilities from 9 on
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def runs_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's `grouped_mm` is one kernel for a dtype on a device; elsewhere it loops
    over experts."""
    if device.type == "cpu":
        return dtype == torch.float32
    major, _ = capability_of(device)
    return dtype == torch.bfloat16 and major in GROUPED_MM


def is_limited(device: torch.device) -> bool:
    """Return whether a device has neither float64 nor `segment_reduce`."""
    return device.type in LIMITED


@dataclass(frozen=True, kw_only=True)
class ExpertKernel:
    """One implementation of the expert stage."""

    forward: Callable[[ExpertWork, torch.dtype], tuple[Tensor, Tensor]]
    """(work, dtype of the result) -> (result, pre-activations). The result is (T, D), or (R, D)
    without dispatch. The pre-activations are the output of `up`, (R, C H), in the memory layout
    that `backward` of the same kernel reads."""
    backward: Callable[[ExpertWork, Tensor, Tensor, Wanted], Gradients]
    """(work, pre-activations, gradient of the result in the dtype of `work.x`, which gradients to
    compute) -> gradients."""


KERNELS: dict[str, str] = {
    "cpu": "by_expert",
    "triton": "triton.expert_stage",
    "other": "whole_batch",
}
"""The default implementations of the expert stage: a module for each value of `kind_of`. All
compute the same."""


TIERS: dict[str, str] = {
    "grouped_mm": "whole_batch",
    "quack": "quack",
    "fp8": "fp8_rowwise",
    "mxfp8": "mxfp8",
}
"""Opt-in implementations, chosen by `MoE(kernel=...)`: a module for each name. Some of them round
more than the defaults."""
AUTO = "auto"
"""The value of `MoE(kernel=...)` that chooses the device's entry of `KERNELS`."""


def check_tier(name: str) -> str:
    """Return `name` if it is `AUTO` or a key of `TIERS`.

    Raises:
        InputError: the name is unknown.
    """
    if name != AUTO and name not in TIERS:
        raise InputError(f"kernel={name!r} is unknown: choose one of {', '.join((AUTO, *TIERS))}")
    return name


def expert_kernel(device: torch.device, name: str = AUTO) -> ExpertKernel:
    """Return the implementation of the expert stage: the one called `name` in `TIERS`, or the
    device's default.

    Raises:
        InputError: the named implementation cannot be imported.
    """
    if name == AUTO:
        return _expert_kernel(KERNELS[kind_of(device)])
    try:
        return _expert_kernel(TIERS[name])
    except ImportError as error:
        raise InputError(
            f"kernel={name!r} cannot be imported here ({error}): install what it needs, or "
            "choose auto"
        ) from None


def require(work: ExpertWork, name: str, majors: tuple[int, ...], multiple: int) -> None:
    """Check that a tier can compute a call.

    Args:
        work: the call.
        name: the tier's key in `TIERS`.
        majors: the major compute capabilities that the tier runs on.
        multiple: the token width and the expert width must be multiples of this number.

    Raises:
        InputError: the device, the dtype or a width is not supported.
    """
    device = work.x.device
    advice = f"; kernel={AUTO!r} runs here"
    major, _ = capability_of(device)
    if major not in majors:
        versions = " or ".join(f"{each}.x" for each in majors)
        raise InputError(
            f"kernel={name!r} needs a GPU of compute capability {versions}, got {device}{advice}"
        )
    if work.x.dtype != torch.bfloat16:
        raise InputError(
            f"kernel={name!r} multiplies bfloat16, got {work.x.dtype}: use autocast{advice}"
        )
    if work.x.shape[1] % multiple or work.hidden % multiple:
        sizes = f"dim {work.x.shape[1]} and hidden {work.hidden}"
        raise InputError(
            f"kernel={name!r} needs multiples of {multiple} as widths, got {sizes}{advice}"
        )


def triton_products() -> Any:
    """Return the Triton module with `rows_times_any` and `outer_products_any`; for devices of kind
    "triton" only."""
    return importlib.import_module(f"moesaic.kernels.{KERNELS['triton']}")


@lru_cache(maxsize=8)
def _expert_kernel(name: str) -> ExpertKernel:
    """Return the implementation in a module of this package."""
    module = importlib.import_module(f"moesaic.kernels.{name}")
    return ExpertKernel(forward=module.forward, backward=module.backward)
