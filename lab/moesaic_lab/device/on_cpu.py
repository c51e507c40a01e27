"""Measures one MoE layer on a CPU, forward and backward, against its matrix products alone and the
layers of others.

Forward and backward with the input's gradient, one process, methods in turn. LB: the experts'
matrix products alone, per expert torch.mm(out=), and an in-place pass each for the activation and
its derivative; 'router's products' are its three products alone. Claims over LB: the whole layer,
with router, top-k and load-balance loss, over the experts' products, the worse of GELU and SwiGLU;
over_lb_with_router has the router's products below the line too. Zipf: logits -0.7 ln i plus unit
normal noise. layer_over: our layer's time over that peer's; a peer far from the fastest has fewer
repeats. growth_bytes: peak of tensors alive beyond those before the call, new gradients included.
kept_memory says whether the allocator was told to keep what is freed, for all methods alike. Peers
have SwiGLU experts. Layers get other tokens in each repeat, so that an expert's rows change as in
training; the bounds repeat the first.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.kernels.huge_pages import keep_freed_memory
from moesaic.kernels.products import multiplies
from moesaic.layer import MoE
from moesaic_lab.benchmark import Told, each_kept
from moesaic_lab.claims import Claim
from moesaic_lab.device.bound import Bound, RouterBound
from moesaic_lab.device.cases import DeviceCase, peak_growth_bytes, step
from moesaic_lab.device.cases import cases as all_cases
from moesaic_lab.device.peers import MAX_BATCHED_BYTES, peers
from moesaic_lab.measure import Ratio, Timing, in_turn, over_ranks, paired, spread

LB = "LB"
ROUTER = "router's products"
LAYER = "layer"
TARGETS = {"balanced": 1.10, "zipf": 1.15}
PEER_TARGET = 0.9
CASE = ("shape", "dtype", "activation", "routing", "kept_memory")
"""Keys of a row that identify its case."""
COLUMNS = (
    *CASE[:4],
    "method",
    "median_seconds",
    "over_lb",
    "over_lb_with_router",
    "layer_over",
    "growth_bytes",
)
Row = dict[str, Any]
"""The figures of one method in one case, or why a peer has none."""
WARM_UP = 8
"""Untimed rounds, in which libraries compile code for the first shapes."""
SLOW = 4.0
"""A peer that takes more than this many times as long as our layer in the warm-up is timed in two
repeats only."""
FEW = 5
"""Repeats of a peer that is not slow, but more than `NEAR_BEST` times as slow as the fastest
peer."""
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
        """Return the paired ratio of a method's time over that of another method, or over the sum
        of several."""
        pairs = min(len(self.seconds[name]) for name in (method, *over))
        # repeat by repeat, the sum over the methods in the denominator
        below = [sum(self.seconds[name][repeat] for name in over) for repeat in range(pairs)]
        return paired(self.seconds[method][:pairs], below)

    @property
    def peers(self) -> list[str]:
        """Names of the layers of others that ran."""
        return [name for name in self.seconds if name not in (LB, ROUTER, LAYER)]

    def rows(self) -> list[Row]:
        """Return a row per method, and one per peer that did not run."""
        shape = self.case.shape
        mean = sum(self.counts) / len(self.counts)
        head = {
            "shape": shape.name,
            "dtype": self.case.dtype,
            "activation": self.case.activation,
            "routing": self.case.routed,
            "max_over_mean": max(self.counts) / mean,
        }
        measured = [head | self._row(method) for method in self.seconds]
        missing = [head | {"method": name, "reason": why} for name, why in self.absent.items()]
        return measured + missing

    def _row(self, method: str) -> Row:
        """Return the row of a method."""
        row: Row = {
            "method": method,
            **Timing.of(self.seconds[method]).row(),
            **spread("over_lb", self.ratio(method, LB)),
            "over_lb_with_router": self.ratio(method, LB, ROUTER).median,
            "growth_bytes": self.growth_bytes.get(method),
        }
        if method in self.peers:
            row |= spread("layer_over", self.ratio(LAYER, method))
        return row


def measure(case: DeviceCase, repeats: int, with_peers: bool = True) -> DeviceCell:
    """Measure one case with torch's current number of threads.

    Args:
        case: the layer and its inputs.
        repeats: timed rounds of the bound, our layer and the fastest layers of others.
        with_peers: whether to measure the layers of others as well; they run only in cases with
            SwiGLU experts.
    """
    layer = case.layer()
    # one for each call: one that fills caches, one whose memory is watched, and the rounds
    inputs = [case.inputs(seed) for seed in range(2 + WARM_UP + repeats)]
    first_x, _ = inputs[0]
    layer.step_counts.zero_()
    layer(first_x)
    counts = tuple(layer.step_counts.tolist())
    peer_modules: dict[str, nn.Module] = {}
    absent: dict[str, str] = {}
    if with_peers and case.activation == "swiglu":
        peer_modules, absent = _peers(layer, case)

    modules: dict[str, nn.Module] = {LAYER: layer, **peer_modules}
    methods: dict[str, Callable[[], object]] = {LB: Bound(case, counts), ROUTER: RouterBound(case)}
    growth = {}
    call_seconds = {}
    for name, module in modules.items():
        methods[name] = partial(_next_step, module, itertools.cycle(inputs))
        methods[name]()  # fills caches
        for tensor in module.parameters():  # so that the call's growth includes new gradients
            tensor.grad = None
        start = time.monotonic()
        growth[name] = peak_growth_bytes(methods[name])
        call_seconds[name] = time.monotonic() - start
    slow = [name for name in peer_modules if call_seconds[name] > SLOW * call_seconds[LAYER]]
    other_peers = [name for name in peer_modules if name not in slow]
    seconds = _timed(methods, repeats, slow, other_peers)
    return DeviceCell(case=case, counts=counts, seconds=seconds, growth_bytes=growth, absent=absent)


def _next_step(module: nn.Module, inputs: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Run a step with the next input, and free the input's gradient, whose memory the next step
    would have to replace."""
    x, dy = next(inputs)
    step(module, x, dy)
    x.grad = None


def _timed(
    methods: dict[str, Callable[[], object]], repeats: int, slow: list[str], peers: list[str]
) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each repeat by method; peers far from the fastest one are dropped after
    a few repeats.

    Args:
        methods: the timed functions by name.
        repeats: number of repeats of methods that are not dropped.
        slow: names of peers that are run twice, after the others.
        peers: names of the other peers.
    """

    def run(names: list[str], rounds: int, warmup: int) -> dict[str, tuple[float, ...]]:
        chosen_methods = {name: methods[name] for name in names}
        spans = in_turn(chosen_methods, rounds, barrier=lambda: None, warmup=warmup)
        return over_ranks([spans])

    names = [name for name in methods if name not in slow]
    gc.collect()
    first = run(names, min(FEW, repeats), WARM_UP)

    best = min((median(first[name]) for name in peers), default=0.0)
    dropped = [name for name in peers if median(first[name]) > NEAR_BEST * best]
    kept = [name for name in names if name not in dropped]
    further = run(kept, max(repeats - FEW, 0), 0)
    seconds = {name: first[name] + further.get(name, ()) for name in names}
    return seconds | run(slow, 2, 0)


def _peers(layer: MoE, case: DeviceCase) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers of others that can run a case, and the reasons why the remaining peers
    cannot."""
    modules = {}
    absent = {}
    for name, make in peers().items():
        reason = make if isinstance(make, str) else _too_large(name, case)
        if reason is not None:
            absent[name] = reason
        elif not isinstance(make, str):
            modules[name] = make(layer)
    return modules, absent


def _too_large(name: str, case: DeviceCase) -> str | None:
    """Return the reason why a peer's memory does not suffice for a case; None if the peer can run
    it."""
    shape = case.shape
    copied_bytes = (
        shape.tokens * shape.top_k * 3 * shape.dim * shape.hidden * case.torch_dtype.itemsize
    )
    if name.endswith("batched_mm") and copied_bytes > MAX_BATCHED_BYTES:
        return (
            f"it would copy {copied_bytes / 2**30:.0f} GiB of weights, a row's expert's matrices "
            "for each row"
        )
    return None


def chosen(only: str | None) -> list[DeviceCase]:
    """Return the cases whose names have all words of one of the alternatives in `only`, which
    commas separate.

    Raises:
        InputError: no case has.
    """
    alternatives = [set(words.split()) for words in (only or "").split(",")]
    found = [
        case for case in all_cases() if any(words.issubset(_words(case)) for words in alternatives)
    ]
    if not found:
        raise InputError(
            f"--only {only!r} leaves no case: give words such as e8, e32, e64, float32, gelu, zipf"
        )
    return found


def measure_all(
    only: str | None,
    repeats: int,
    *,
    threads: int,
    peers: bool,
    keep_freed: bool,
    keep: str | None,
    told: Told,
) -> list[Row]:
    """Measure the chosen cases and return their rows. An interrupted run with a folder `keep` loses
    one case."""
    setting = {"threads": threads, "kept_memory": keep_freed and keep_freed_memory()}
    torch.set_num_threads(threads)
    runs: dict[str, Callable[[], Any]] = {}
    for case in chosen(only):
        if not multiplies(case.torch_dtype):
            told(f"{case.name}: left out, this CPU has no instructions for bfloat16")
            # without them the bound's and the others' products take up to 100 times as long
            continue
        words = (case.name.replace(" ", "-"), repeats, *setting.values())
        name = "-".join(str(word) for word in words)  # of the file in `keep`
        runs[name] = partial(_measured_rows, case, repeats, peers, setting)
    return [row for _, rows in each_kept(keep, runs, told) for row in rows]


def _measured_rows(
    case: DeviceCase, repeats: int, peers: bool, setting: dict[str, Any]
) -> list[Row]:
    """Measure a case and return its rows with the setting."""
    return [row | setting for row in measure(case, repeats, peers).rows()]


def _words(case: DeviceCase) -> set[str]:
    """Return the words by which `only` can choose a case."""
    return {*case.shape.name.split("_"), case.shape.name, case.dtype, case.activation, case.routed}


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims of the measured shapes. Claims measured with the system's default allocator
    have it in their name."""
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["kept_memory"]), []).append(row)

    all_claims: list[Claim] = []
    for (shape, is_kept), shape_rows in groups.items():
        head = f"cpu.{shape}" if is_kept else f"cpu.default_allocator.{shape}"
        all_claims += _over_bound(head, shape_rows)
        all_claims.append(_over_peers(head, shape_rows))
        all_claims.append(_memory(head, shape_rows))
    return all_claims


def _over_bound(head: str, rows: Sequence[Row]) -> list[Claim]:
    """Return the claims on the time of our layer over LB: for each dtype and routing, the worst
    activation."""
    ours = [row for row in rows if row["method"] == LAYER]
    all_claims = []
    for dtype in dict.fromkeys(row["dtype"] for row in ours):
        for routed, target in TARGETS.items():
            ratios = [
                row["over_lb"] for row in ours if row["dtype"] == dtype and row["routing"] == routed
            ]
            if ratios:
                name = f"{head}.{dtype}.{routed}_over_lb"
                all_claims.append(Claim(name=name, value=max(ratios), target=target))
    return all_claims


def _over_peers(head: str, rows: Sequence[Row]) -> Claim:
    """Return the claim on the time of our whole layer over that of the fastest peer, the worst of
    all cases with a peer."""
    name = f"{head}.over_best_peer"
    best = []  # the fastest peer's row of each case
    for peer_rows in _peer_rows(rows):
        best.append(min(peer_rows, key=lambda row: float(row["median_seconds"])))
    value = max((float(row["layer_over"]) for row in best), default=None)
    reason = "" if best else _why_absent(rows)
    return Claim(name=name, value=value, target=PEER_TARGET, reason=reason)


def _memory(head: str, rows: Sequence[Row]) -> Claim:
    """Return the claim on our layer's memory growth over the smallest growth of a peer, the worst
    of all cases."""
    name = f"{head}.memory_over_best_peer"
    ours = {_case(row): row["growth_bytes"] for row in rows if row["method"] == LAYER}
    ratios = []
    for peer_rows in _peer_rows(rows):
        case = _case(peer_rows[0])
        smallest = min(row["growth_bytes"] for row in peer_rows)
        ratios.append(ours[case] / smallest)
    reason = "" if ratios else _why_absent(rows)
    return Claim(name=name, value=max(ratios, default=None), target=1.0, reason=reason)


def _peer_rows(rows: Sequence[Row]) -> list[list[Row]]:
    """Return one list per case of the rows of the peers that ran."""
    by_case: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "layer_over" in row:  # a peer's row
            by_case.setdefault(_case(row), []).append(row)
    return list(by_case.values())


def _case(row: Row) -> tuple[Any, ...]:
    """Return what names the case of a row."""
    return tuple(row[key] for key in CASE)


def _why_absent(rows: Sequence[Row]) -> str:
    """Return the reasons why peers were not measured."""
    reasons = dict.fromkeys(row["reason"] for row in rows if "reason" in row)
    return "; ".join(reasons) or "peers were not asked for"
