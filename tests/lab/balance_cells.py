"""Cells of the balance benchmark without a cluster, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moesaic_lab.balance.cells import BalanceCell
from moesaic_lab.balance.config import BalancePlace, SkewedCase
from moesaic_lab.balance.loads import Routes
from moesaic_lab.balance.methods import methods
from moesaic_lab.balance.ranks import BalanceJob, Decided
from moesaic_lab.bounds import Limit
from moesaic_lab.measure import Timing

ROUTES = Routes(
    experts=np.zeros((1, 16, 32, 2), dtype=np.int64), history=np.ones(16, dtype=np.int64)
)


def cell(
    load: float | None,
    seconds: Mapping[str, float | Sequence[float]],
    *,
    place: BalancePlace | None = None,
    near: Mapping[str, Sequence[float]] | None = None,
    peak: Mapping[str, int] | None = None,
    decided: Mapping[str, Sequence[float]] | None = None,
    replicated: int = 3,
) -> BalanceCell:
    """A cell whose methods took the given seconds, 8 times where only one is given."""
    place = place or BalancePlace()
    every = methods(place.grid, place.tokens_per_rank * place.top_k)
    job = BalanceJob(
        case=SkewedCase(place=place, label=f"case {load}", max_vio=load, routes=ROUTES),
        methods={name: every[name] for name in seconds},
    )
    times = {
        n: tuple(s) if isinstance(s, Sequence) else (float(s),) * 8 for n, s in seconds.items()
    }
    return BalanceCell(
        job=job,
        max_vio=(load or 0.0,),
        timings={name: Timing.of(each) for name, each in times.items()},
        near={name: tuple(each) for name, each in (near or {}).items()},
        peak_bytes={name: (peak or {}).get(name, 1000) for name in times},
        error=dict.fromkeys(times, 1e-7),
        limits=dict.fromkeys(times, (Limit(seconds=0.3, link="node 0 out"),)),
        across=dict.fromkeys(times, (5000, 8)),
        charged=dict.fromkeys(times, 0.6),
        decided={
            name: Decided(
                seconds=tuple(each),
                options=("shadow",),
                replicated_experts=(replicated,),
                replicated_copies=(7,),
            )
            for name, each in (decided or {}).items()
        },
    )
