"""Measures times and memory on a GPU. Methods run in turn and are timed by the GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

GIB = 2.0**30
HEAD_START_CYCLES = 4_000_000
"""Cycles that the GPU sleeps before each timed call, about 2 ms. Meanwhile the host launches
kernels ahead of the GPU, as in training. Without the sleep, the time of small layers would be that
of their launches."""


def in_turn(
    methods: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Run methods in turn and return the seconds of each, one per repeat. The order rotates from
    repeat to repeat.

    Args:
        methods: the timed functions by name; their results are freed outside the measured time.
        repeats: measured rounds.
        warmup: unmeasured rounds before the measured ones.
    """
    if not torch.cuda.is_available():  # in a dry run a kernel takes a second
        repeats = min(repeats, 2)
        warmup = 0
    names = list(methods)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-warmup, repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            elapsed = _seconds(methods[name])
            if repeat >= 0:
                seconds[name].append(elapsed)
    return seconds


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one run by the GPU's clock, or by the host's clock in a dry run without
    a GPU."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    result = run()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end) / 1e3


def seconds_of(run: Callable[[], object], repeats: int = 8) -> float:
    """Return the median seconds of a function over several repeats, after two warm-up runs."""
    ordered = sorted(in_turn({"it": run}, repeats, warmup=2)["it"])
    return ordered[len(ordered) // 2]


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """GPU memory of a layer's call in GiB."""

    kept: float
    """Memory held between forward and backward, with the input but without the output and the
    weights."""
    forward_peak: float
    """Peak memory during forward, minus the memory allocated before forward."""
    backward_peak: float
    """Peak memory during backward, gradients included, minus the memory allocated before
    forward."""


def memory_of(
    run: Callable[[], Tensor], x: Tensor, leaves: tuple[Tensor, ...], dy: Tensor
) -> GpuMemory:
    """Return the memory of a forward and a backward pass, zeros without a GPU. Call `run` once
    before, to fill caches."""
    if not torch.cuda.is_available():
        torch.autograd.grad(run(), leaves, dy)
        return GpuMemory(kept=0.0, forward_peak=0.0, backward_peak=0.0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = run()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes
    forward_peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(y, leaves, dy)
    torch.cuda.synchronize()
    backward_peak = torch.cuda.max_memory_allocated() - before
    del grads, y
    return GpuMemory(
        kept=kept / GIB, forward_peak=forward_peak / GIB, backward_peak=backward_peak / GIB
    )


def dense_tflops(size: int, dtype: torch.dtype, device: str = "cuda") -> float:
    """Return the device's rate in TFLOP/s on a product of two random square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, repeats=20) / 1e12
