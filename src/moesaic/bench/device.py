"""`moesaic bench device` on a CPU: one MoE layer, forward and backward, against its matrix products alone and against others.

Methods run in turn in one process on the same inputs: the bound (`device_bound.py`), the whole layer with its router and
load-balance loss, the layer's experts with the routing given, and the layers of others (`device_peers.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.bench.device_bound import Bound
from moesaic.bench.device_cases import Case, step
from moesaic.bench.device_memory import peak_growth_bytes
from moesaic.bench.device_peers import MAX_BATCHED_BYTES, peers
from moesaic.bench.measure import Ratio, Timing, in_turn, over_ranks, paired
from moesaic.kernels.permute import sort_by_expert
from moesaic.layer import MoE

LB, LB_ROUTER, LAYER, EXPERTS = "LB", "LB with router", "layer", "experts"
SLOW = 4.0
"""A peer that takes this many times our layer in the warm-up is timed in three repeats only."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was measured of one case."""

    case: Case
    counts: tuple[int, ...]
    """Rows of each expert."""
    seconds: dict[str, tuple[float, ...]]
    """Per method and repeat."""
    growth_bytes: dict[str, int]
    """Peak growth of memory per method."""
    absent: dict[str, str]
    """Peers that did not run, and why."""

    def ratio(self, method: str, over: str) -> Ratio:
        """Return a paired ratio of two methods."""
        pairs = min(len(self.seconds[method]), len(self.seconds[over]))
        return paired(self.seconds[method][:pairs], self.seconds[over][:pairs])

    @property
    def peers(self) -> list[str]:
        """The layers of others that ran."""
        return [name for name in self.seconds if name not in (LB, LB_ROUTER, LAYER, EXPERTS)]

    @property
    def best_peer(self) -> str | None:
        """The fastest of them; None if none ran."""
        return min(self.peers, key=lambda name: Timing.of(self.seconds[name]).median, default=None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows."""
        shape, mean = self.case.shape, sum(self.counts) / len(self.counts)
        head = {
            "shape": shape.name, "dtype": self.case.dtype, "activation": self.case.activation,
            "routing": self.case.routed, "max_over_mean": max(self.counts) / mean,
        }  # fmt: skip
        found = []
        for method, seconds in self.seconds.items():
            timing, over = Timing.of(seconds), self.ratio(method, LB)
            found.append(
                head | {
                    "method": method, "repeats": len(seconds), "median_seconds": timing.median,
                    "low_seconds": timing.low, "high_seconds": timing.high, "over_lb": over.median,
                    "over_lb_low": over.low, "over_lb_high": over.high,
                    "over_lb_with_router": self.ratio(method, LB_ROUTER).median,
                    "growth_bytes": self.growth_bytes.get(method),
                }
            )  # fmt: skip
        return found + [head | {"method": name, "reason": why} for name, why in self.absent.items()]


class GivenRouting(nn.Module):
    """A layer's experts, the routing given: dispatch, products, combine; what transformers calls an experts implementation.

    Args:
        layer: ours.
        x: (tokens, dim).
    """

    def __init__(self, layer: MoE, x: Tensor) -> None:
        super().__init__()
        self.experts = layer.experts
        with torch.no_grad():
            _, self.routing = layer(x, return_routing=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run the experts: (tokens, dim) -> (tokens, dim)."""
        routing = self.routing
        permutation = sort_by_expert(
            routing.token, routing.expert, routing.counts, routing.num_tokens, routing.rows_per_token
        )
        sharded, common = self.experts.weights()
        return self.experts.compute_tokens(sharded, common, x, routing.weight.detach(), permutation)


def measure(case: Case, repeats: int, with_peers: bool = True) -> Cell:
    """Measure one case with as many threads as torch has.

    Args:
        case: the layer and its inputs.
        repeats: timed rounds of all methods.
        with_peers: also the layers of others; they have SwiGLU experts.
    """
    layer, (x, dy) = case.layer(), case.inputs()
    layer.step_counts.zero_()
    layer(x)
    counts = tuple(layer.step_counts.tolist())
    modules: dict[str, nn.Module] = {LAYER: layer, EXPERTS: GivenRouting(layer, x)}
    absent: dict[str, str] = {}
    if with_peers and case.activation == "swiglu":
        for name, make in peers().items():
            reason = make if isinstance(make, str) else _too_large(name, case)
            if reason is None and not isinstance(make, str):
                modules[name] = make(layer)
            elif reason is not None:
                absent[name] = reason
    methods: dict[str, Callable[[], object]] = {LB: Bound(case, counts), LB_ROUTER: Bound(case, counts, router=True)}
    growth = {}
    for name, module in modules.items():
        methods[name] = partial(step, module, x, dy)
        methods[name]()
        _clear(module, x)
        growth[name] = peak_growth_bytes(methods[name])
    quick = over_ranks([in_turn(methods, 1, barrier=gc.collect, warmup=1)])
    slow = {name for name, taken in quick.items() if taken[0] > SLOW * quick[LAYER][0] and name in modules}
    seconds = over_ranks([in_turn({k: m for k, m in methods.items() if k not in slow}, repeats, barrier=_nothing)])
    if slow:
        seconds |= over_ranks([in_turn({k: methods[k] for k in slow}, 3, barrier=_nothing, warmup=0)])
    return Cell(case=case, counts=counts, seconds=seconds, growth_bytes=growth, absent=absent)


def _too_large(name: str, case: Case) -> str | None:
    """Return why a peer cannot run a case; None if it can."""
    shape = case.shape
    copied = shape.tokens * shape.top_k * 3 * shape.dim * shape.hidden * case.torch_dtype.itemsize
    if name.endswith("batched_mm") and copied > MAX_BATCHED_BYTES:
        return f"it would copy {copied / 2**30:.0f} GiB of weights, a row's expert's matrices for each row"
    return None


def _clear(module: nn.Module, x: Tensor) -> None:
    """Drop the gradients, so that a call's growth includes new ones."""
    for tensor in (x, *module.parameters()):
        tensor.grad = None


def _nothing() -> None:
    """No barrier: there is one process."""
