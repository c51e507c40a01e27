"""`moesaic bench device --part operations`: each operation of a layer, beside plain PyTorch code
and the roofline.

Each operation in turn with the plain way to write it (fast encode and decode: GShard's einsum;
experts: one after the other by autograd), caches flushed before each call. Bound: arithmetic over
the rate of a large matrix product or bytes over the rate of a large copy, the longer one; of_bound:
the bound over the measured time. error: distance from the plain way in float64, relative. growth:
peak of tensors alive beyond those before.

The roofline (Williams, Waterman and Patterson, CACM 2009) is a lower bound on an operation's time.
It is the larger of two times: its FLOPs over the rate of a large matrix product, and its bytes over
the rate of a large copy. Both rates are measured first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moesaic_lab.claims import Claim
from moesaic_lab.device.cases import DTYPES, SHAPES, DeviceShape, peak_growth_bytes
from moesaic_lab.device.ops import KernelOp, ops
from moesaic_lab.measure import Timing, in_turn, over_ranks, paired, spread
from moesaic_lab.pictures import Panel, PlottedSeries

Row = dict[str, Any]
"""The figures of one operation and dtype."""
OURS = "ours"
PLAIN = "plain"
COLUMNS = (
    "dtype",
    "op",
    "median_seconds",
    "over_plain",
    "of_bound",
    "error",
    "growth_bytes",
    "plain_growth_bytes",
)
CACHE_BYTES = 2**26
"""Bytes written between two timed calls, to evict their inputs from the cache."""


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The peak rates of this device."""

    flops: float
    """FLOP/s of a large matrix product."""
    bandwidth: float
    """Bytes per second of a large copy, with reads and writes both counted."""

    @classmethod
    def measured(cls, dtype: torch.dtype) -> Roof:
        """Measure both rates."""
        a = torch.ones(1024, 1024).to(dtype)
        out = torch.empty(1024, 1024, dtype=dtype)
        source = torch.ones(2**25)
        target = torch.empty(2**25)
        product = _best(lambda: torch.mm(a, a, out=out), 10)
        copy = _best(lambda: target.copy_(source), 5)
        return cls(flops=2 * 1024**3 / product, bandwidth=2 * source.nbytes / copy)

    def bound(self, op: KernelOp) -> float:
        """Return the least seconds that an operation can take."""
        return max(op.flops / self.flops, op.num_bytes / self.bandwidth)


def measure(
    repeats: int,
    shape: DeviceShape = SHAPES[0],
    dtypes: Sequence[str] = tuple(DTYPES),
    threads: int | None = None,
) -> list[Row]:
    """Measure all operations and return a row per operation and dtype.

    Args:
        repeats: timed calls of our operation and of the plain code.
        shape: sizes of the layer.
        dtypes: names of dtypes, keys of `DTYPES`.
        threads: number of torch's threads; None to leave it unchanged.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    rows = []
    junk = torch.zeros(CACHE_BYTES // 4)  # float32; each change of it evicts the caches
    for dtype in dtypes:
        roof = Roof.measured(DTYPES[dtype])
        for op in ops(shape, DTYPES[dtype]):
            methods = {OURS: partial(op.run, *op.inputs), PLAIN: partial(op.plain, *op.inputs)}
            growth = {name: peak_growth_bytes(call) for name, call in methods.items()}
            seconds = over_ranks([in_turn(methods, repeats, barrier=lambda: junk.add_(1.0))])
            rows.append({"shape": shape.name, "dtype": dtype, **_row(op, roof, seconds, growth)})
    return rows


def _row(
    op: KernelOp, roof: Roof, seconds: dict[str, tuple[float, ...]], growth: dict[str, int]
) -> Row:
    """Return the row of an operation.

    Args:
        op: the operation.
        roof: the device's rates.
        seconds: seconds of each call, by method (`OURS`, `PLAIN`).
        growth: peak growth of memory in bytes, by method.
    """
    timing = Timing.of(seconds[OURS])
    bound = roof.bound(op)
    return {
        "op": op.name,
        **timing.row(),
        **spread("over_plain", paired(seconds[OURS], seconds[PLAIN])),
        "flops": op.flops,
        "bytes": op.num_bytes,
        "bound_seconds": bound,
        "of_bound": bound / timing.median,
        "peak_flops": roof.flops,
        "bandwidth": roof.bandwidth,
        "error": op.error(),
        "growth_bytes": growth[OURS],
        "plain_growth_bytes": growth[PLAIN],
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return claims per operation and dtype: its share of the bound; for encode and decode, time
    and memory over the einsum."""
    all_claims = []
    for row in rows:
        if "op" not in row:  # a row of another part
            continue
        name = f"kernels.{row['op'].replace(', ', '_').replace(' ', '_')}.{row['dtype']}"
        all_claims.append(Claim(name=f"{name}.of_bound", value=row["of_bound"], op=">="))
        if row["op"].startswith("fast"):
            memory = row["growth_bytes"] / row["plain_growth_bytes"]
            all_claims.append(
                Claim(name=f"{name}.over_einsum", value=row["over_plain"], target=1.0)
            )
            all_claims.append(Claim(name=f"{name}.memory_over_einsum", value=memory, target=1.0))
    return all_claims


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Return a panel per dtype: the time of each operation over that of the plain code."""
    rows_by_dtype: dict[str, list[Row]] = {}
    for row in rows:
        if "op" in row:  # else a row of another part
            rows_by_dtype.setdefault(row["dtype"], []).append(row)

    all_panels = []
    for dtype, dtype_rows in rows_by_dtype.items():
        ratios = PlottedSeries(
            name="ours over plain",
            x=tuple(float(index) for index in range(len(dtype_rows))),
            y=tuple(row["over_plain"] for row in dtype_rows),
            low=tuple(row["over_plain_low"] for row in dtype_rows),
            high=tuple(row["over_plain_high"] for row in dtype_rows),
        )
        names = tuple(row["op"] for row in dtype_rows)
        title = f"time over the plain way, {dtype}"
        all_panels.append(
            Panel(title=title, x_title="", y_title="ratio", series=(ratios,), categories=names)
        )
    return all_panels


def _best(call: Callable[[], object], times: int) -> float:
    """Return the seconds of the shortest of several calls, after one unmeasured call."""
    call()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
