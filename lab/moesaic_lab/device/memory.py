"""How far memory grows in one call, by the profiler's count of every tensor's bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_growth_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once during a call, beyond those before it.

    What libraries take without torch's allocator, such as a product's packed operands, is not counted, for nobody.

    Args:
        call: what is watched; what it returns stays alive until it is done.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    del kept
    results = profiler.profiler
    assert results is not None
    memory = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        if event.device_type() == torch._C._autograd.DeviceType.CPU:
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak
