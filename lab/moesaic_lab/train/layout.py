"""Expert throughput over world sizes, with and without ordering the received rows by expert.

After the all-to-all a rank's rows are ordered by (source, expert). Without reordering, each expert
needs one product per source, and the products shrink as the world grows. Ordered by expert, each
expert needs a single product for any world. This is the "flexible all-to-all" of Hwang et al.,
"Tutel" (2023), section 4.3. It is measured with real compute in one process with one thread,
without links.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic_lab.measure import Timing, in_turn
from moesaic_lab.train.config import Layouts

BY_SOURCE = "by (source, expert)"
BY_EXPERT = "by expert"
ORDERED = "by expert, ordering included"
"""Names of the layouts; the time of the last one includes the reordering from (source, expert)."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Weights of this rank's experts: two matrices each, with a ReLU in between."""

    w1: Tensor
    """(num_experts, hidden, dim)."""
    w2: Tensor
    """(num_experts, dim, hidden)."""


def measure(layouts: Layouts) -> list[dict[str, Any]]:
    """Time every world with one torch thread, and return a row per world and layout.

    Raises:
        RuntimeError: two layouts compute different results.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for world in layouts.worlds for row in _rows(layouts, world)]
    finally:
        torch.set_num_threads(threads)


def by_source(rows: Tensor, experts: Experts, world: int) -> Tensor:
    """Run the experts over rows in the order of arrival, with one product per source and expert.

    Args:
        rows: (world * num_experts * rows, dim), ordered by (source, expert).
        experts: weights of this rank's experts.
        world: number of sources.

    Returns:
        Results with the shape and order of `rows`.
    """
    num_experts = len(experts.w1)
    out = torch.empty_like(rows)
    pieces = rows.chunk(world * num_experts)
    results = out.chunk(world * num_experts)
    for number, (piece, result) in enumerate(zip(pieces, results)):
        _expert(piece, experts, number % num_experts, result)
    return out


def by_expert(rows: Tensor, experts: Experts) -> Tensor:
    """Run the experts over rows ordered by expert, with one product per expert; shapes as for
    `by_source`."""
    num_experts = len(experts.w1)
    out = torch.empty_like(rows)
    pieces = rows.chunk(num_experts)
    results = out.chunk(num_experts)
    for number, (piece, result) in enumerate(zip(pieces, results)):
        _expert(piece, experts, number, result)
    return out


def ordered(rows: Tensor, num_experts: int, world: int) -> Tensor:
    """Reorder rows from (source, expert) to (expert, source)."""
    dim = rows.shape[1]
    from_sources = rows.view(world, num_experts, -1, dim)
    return from_sources.transpose(0, 1).reshape(-1, dim)


def _expert(rows: Tensor, experts: Experts, number: int, out: Tensor) -> None:
    """Run one expert on its rows."""
    inner = F.relu_(rows @ experts.w1[number].T)
    torch.mm(inner, experts.w2[number].T, out=out)


@torch.no_grad()
def _rows(layouts: Layouts, world: int) -> list[dict[str, Any]]:
    """Check and time the layouts of one world; return a row per layout."""
    generator = torch.Generator().manual_seed(world)
    num_experts = layouts.num_experts
    dim = layouts.dim
    hidden = layouts.hidden
    rows = torch.randn(num_experts * layouts.rows_per_expert, dim, generator=generator)
    experts = Experts(
        w1=torch.randn(num_experts, hidden, dim, generator=generator) / dim**0.5,
        w2=torch.randn(num_experts, dim, hidden, generator=generator) / hidden**0.5,
    )
    sorted_rows = ordered(rows, num_experts, world)
    expected = by_expert(sorted_rows, experts)
    found = ordered(by_source(rows, experts, world), num_experts, world)
    if not torch.allclose(found, expected, atol=1e-4):
        raise RuntimeError(f"layouts: the two orders compute different results for {world} ranks")
    runs: dict[str, Callable[[], object]] = {
        BY_SOURCE: lambda: by_source(rows, experts, world),
        BY_EXPERT: lambda: by_expert(sorted_rows, experts),
        ORDERED: lambda: by_expert(ordered(rows, num_experts, world), experts),
    }
    spans = in_turn(runs, layouts.repeats, barrier=lambda: time.sleep(0), warmup=2)
    timings = {
        name: Timing.of([end - start for start, end in of_layout])
        for name, of_layout in spans.items()
    }
    gflops = 4 * len(rows) * dim * hidden / 1e9  # two products, of 2 operations per weight
    return [
        {
            "what": "layout",
            "world": world,
            "layout": name,
            **timing.row(),
            "gflops_per_second": gflops / timing.median,
        }
        for name, timing in timings.items()
    ]
