"""Measures one MoE layer on a CPU, forward and backward, against its matrix products alone and the layers of others.

Methods run in turn in one process on the same inputs: the bound (`bound.py`), the whole layer with its router and
load-balancing loss, the router's products alone, and the layers of others (`peers.py`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch import nn

from moesaic.layer import MoE
from moesaic_lab.device.bound import Bound, RouterBound
from moesaic_lab.device.cases import DeviceCase, peak_growth_bytes, step
from moesaic_lab.device.peers import MAX_BATCHED_BYTES, peers
from moesaic_lab.measure import Ratio, Timing, in_turn, over_ranks, paired

LB, ROUTER, LAYER = "LB", "router's products", "layer"
SLOW = 4.0
"""A peer that takes more than this many times as long as our layer in the warm-up is timed in two repeats only."""
FEW = 5
"""Repeats of a peer that is not slow, but more than `NEAR_BEST` times as slow as the fastest peer."""
NEAR_BEST = 1.1


@dataclass(frozen=True, kw_only=True)
class DeviceCell:
    """The measurements of one case."""

    case: DeviceCase
    counts: tuple[int, ...]
    """Rows of each expert."""
    seconds: dict[str, tuple[float, ...]]
    """Seconds of each repeat, by method."""
    growth_bytes: dict[str, int]
    """Peak growth of memory, by method."""
    absent: dict[str, str]
    """Reasons why peers did not run, by peer."""

    def ratio(self, method: str, *over: str) -> Ratio:
        """Return the paired ratio of a method's time over that of another method, or over the sum of several."""
        pairs = min(len(self.seconds[name]) for name in (method, *over))
        below = [sum(seconds) for seconds in zip(*(self.seconds[name][:pairs] for name in over))]
        return paired(self.seconds[method][:pairs], below)

    @property
    def peers(self) -> list[str]:
        """Names of the layers of others that ran."""
        return [name for name in self.seconds if name not in (LB, ROUTER, LAYER)]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per method, and one per peer that did not run."""
        shape, mean = self.case.shape, sum(self.counts) / len(self.counts)
        head = {
            "shape": shape.name, "dtype": self.case.dtype, "activation": self.case.activation,
            "routing": self.case.routed, "max_over_mean": max(self.counts) / mean,
        }  # fmt: skip
        return [head | self._row(method) for method in self.seconds] + [
            head | {"method": name, "reason": why} for name, why in self.absent.items()
        ]

    def _row(self, method: str) -> dict[str, Any]:
        timing, over = Timing.of(self.seconds[method]), self.ratio(method, LB)
        row: dict[str, Any] = {
            "method": method, **timing.row(), "over_lb": over.median, "over_lb_low": over.low, "over_lb_high": over.high,
            "over_lb_with_router": self.ratio(method, LB, ROUTER).median,
            "growth_bytes": self.growth_bytes.get(method),
        }  # fmt: skip
        if method in self.peers:
            ours = self.ratio(LAYER, method)
            row |= {"layer_over": ours.median, "layer_over_low": ours.low, "layer_over_high": ours.high}
        return row


def measure(case: DeviceCase, repeats: int, with_peers: bool = True) -> DeviceCell:
    """Measure one case with torch's current number of threads.

    Args:
        case: the layer and its inputs.
        repeats: timed rounds of the bound, our layer and the fastest layers of others.
        with_peers: whether to measure the layers of others as well; they run only in cases with SwiGLU experts.
    """
    layer, (x, dy) = case.layer(), case.inputs()
    layer.step_counts.zero_()
    layer(x)
    counts = tuple(layer.step_counts.tolist())
    modules: dict[str, nn.Module] = {LAYER: layer}
    peer_modules, absent = _peers(layer, case) if with_peers and case.activation == "swiglu" else ({}, {})
    modules |= peer_modules
    methods: dict[str, Callable[[], object]] = {LB: Bound(case, counts), ROUTER: RouterBound(case)}
    growth, call_seconds = {}, {}
    for name, module in modules.items():
        methods[name] = partial(step, module, x, dy)
        methods[name]()
        for tensor in (x, *module.parameters()):  # so that the call's growth includes new gradients
            tensor.grad = None
        start = time.monotonic()
        growth[name] = peak_growth_bytes(methods[name])
        call_seconds[name] = time.monotonic() - start
    slow = [name for name in peer_modules if call_seconds[name] > SLOW * call_seconds[LAYER]]
    seconds = _timed(methods, repeats, slow, [name for name in peer_modules if name not in slow])
    return DeviceCell(case=case, counts=counts, seconds=seconds, growth_bytes=growth, absent=absent)


def _timed(
    methods: dict[str, Callable[[], object]], repeats: int, slow: list[str], peers: list[str]
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each repeat by method; peers far from the fastest one are dropped after a few repeats."""

    def run(names: list[str], rounds: int, warmup: int) -> dict[str, tuple[float, ...]]:
        return over_ranks([in_turn({n: methods[n] for n in names}, rounds, barrier=lambda: None, warmup=warmup)])

    names = [name for name in methods if name not in slow]
    gc.collect()
    seconds = run(names, min(FEW, repeats), 1)
    best = min((median(seconds[name]) for name in peers), default=0.0)
    names = [name for name in names if name not in peers or median(seconds[name]) <= NEAR_BEST * best]
    further = run(names, max(repeats - FEW, 0), 0)
    return {name: (*seconds[name], *further.get(name, ())) for name in seconds} | run(slow, 2, 0)


def _peers(layer: MoE, case: DeviceCase) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers of others that can run a case, and the reasons why the remaining peers cannot."""
    modules, absent = {}, {}
    for name, make in peers().items():
        reason = make if isinstance(make, str) else _too_large(name, case)
        if reason is not None:
            absent[name] = reason
        elif not isinstance(make, str):
            modules[name] = make(layer)
    return modules, absent


def _too_large(name: str, case: DeviceCase) -> str | None:
    """Return the reason why a peer's memory does not suffice for a case; None if the peer can run it."""
    shape = case.shape
    copied_bytes = shape.tokens * shape.top_k * 3 * shape.dim * shape.hidden * case.torch_dtype.itemsize
    if name.endswith("batched_mm") and copied_bytes > MAX_BATCHED_BYTES:
        return f"it would copy {copied_bytes / 2**30:.0f} GiB of weights, a row's expert's matrices for each row"
    return None
