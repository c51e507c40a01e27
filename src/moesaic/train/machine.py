"""Properties of the machine: device, precision, threads and the matmul rate that MFU is measured
against."""

from __future__ import annotations

import time

import torch

from moesaic.errors import InputError
from moesaic.kernels.products import rows_product

BFLOAT16_PAYS_FROM = 1.5
"""bfloat16 is chosen if its matmul is this many times as fast as float32's. Casts and norms use up
part of the gain."""


def pick_device(name: str) -> torch.device:
    """Return the device that a configuration names; "auto" is CUDA if available.

    Raises:
        InputError: if the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device={name!r} is unknown: write auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise InputError(
            f"device={name!r} is not supported: write auto, cpu or cuda (threads sets the CPU "
            "threads per rank)"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices: "
            "write cpu or auto"
        )
    return device


def matmul_flops_per_second(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int] | None = None
) -> float:
    """Return the measured rate of a matmul of `shape`, (rows, width, columns), in FLOP/s; the
    median of several after a warm-up.

    By default it is square: 1024 rows on a CPU, 8192 on a GPU.
    """
    if shape is None:
        side = 8192 if device.type == "cuda" else 1024
        shape = (side, side, side)
    rows, width, columns = shape
    generator = torch.Generator(device).manual_seed(0)  # the global generator belongs to the run
    a = torch.randn(rows, width, device=device, generator=generator).to(dtype)
    b = torch.randn(columns, width, device=device, generator=generator).to(dtype)
    out = a.new_empty(rows, columns)
    seconds = []
    for _ in range(24):
        start = time.perf_counter()
        rows_product(a, b.t(), out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds[4:])[10]  # of twenty: the first four warm up
    return 2 * rows * width * columns / median


def pick_precision(name: str, device: torch.device, shape: tuple[int, int, int]) -> torch.dtype:
    """Return the forward pass's dtype. "auto" measures a matmul of `shape`, (rows, width, columns),
    on a CPU, and asks the driver on a GPU."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    bfloat16_rate = matmul_flops_per_second(device, torch.bfloat16, shape)
    float32_rate = matmul_flops_per_second(device, torch.float32, shape)
    pays = bfloat16_rate >= BFLOAT16_PAYS_FROM * float32_rate
    return torch.bfloat16 if pays else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the autocast context of a forward pass in `dtype`; float32 and float64 turn autocast
    off."""
    on = dtype not in (torch.float32, torch.float64)
    autocast_dtype = dtype if on else torch.bfloat16  # not used while it is off
    return torch.autocast(device.type, autocast_dtype, enabled=on)
