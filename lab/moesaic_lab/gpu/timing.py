"""Times and memory on a GPU: methods in turn, by the GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

GIB = 2.0**30
HEAD_START_CYCLES = 4_000_000
"""For which the GPU waits before each timed thing, about 2 ms: so long the host may take to launch kernels, as in training,
where it runs ahead. Without it small layers would be timed by their launches."""


def in_turn(methods: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3) -> dict[str, list[float]]:
    """Run methods in turn and return their seconds, one per repeat; the order rotates.

    Args:
        methods: name to what is timed; what it returns is freed after its time.
        repeats: that count.
        warmup: rounds before them.
    """
    if not torch.cuda.is_available():  # a dry run, where a kernel takes a second
        repeats, warmup = min(repeats, 2), 0
    names = list(methods)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-warmup, repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            taken = _seconds(methods[name])
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one run by the GPU's clock; without a GPU, in a dry run, by the host's."""
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
    """Return the median seconds of one thing, after two rounds of warming up."""
    ordered = sorted(in_turn({"it": run}, repeats, warmup=2)["it"])
    return ordered[len(ordered) // 2]


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """GiB of the GPU that a layer's call takes beyond weights and inputs."""

    kept: float
    """Held between forward and backward, the input included, the result and the weights not."""
    forward_peak: float
    """The most during forward, beyond what was there before."""
    backward_peak: float
    """The most during backward, beyond what was there before forward, gradients included."""


def memory_of(run: Callable[[], Tensor], x: Tensor, leaves: tuple[Tensor, ...], dy: Tensor) -> GpuMemory:
    """Return what a forward and a backward pass take, zeros without a GPU; run once before, so that what is cached is there."""
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
    return GpuMemory(kept=kept / GIB, forward_peak=forward_peak / GIB, backward_peak=backward_peak / GIB)


def dense_tflops(size: int, dtype: torch.dtype, device: str = "cuda") -> float:
    """Return the card's rate on a product of two square matrices of random numbers."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, repeats=20) / 1e12
