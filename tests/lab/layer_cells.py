"""Cells of the layer benchmark without a cluster, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.bounds import Limit
from moesaic_lab.layer.benchmark import LayerCell
from moesaic_lab.layer.cells import LayerJob
from moesaic_lab.layer.config import AdaptiveR, LayerPlace
from moesaic_lab.layer.ranks import Switch
from moesaic_lab.measure import Timing

ANY = compile_plan(Plan(), Grid(world=4, ep=4, ranks_per_node=2))


def cell(
    section: str,
    seconds: Mapping[str, float | Sequence[float]],
    *,
    repeats: int = 8,
    near: Sequence[str] = (),
    pairs: int = 30,
    best: str = "",
    same: Mapping[str, str] | None = None,
    grid: Grid | None = None,
    place: LayerPlace | None = None,
    factor: float | None = None,
    label: str = "a cell",
    switches: Mapping[str, Switch] | None = None,
    compete: tuple[str, ...] = (),
) -> LayerCell:
    """A cell whose methods took the given seconds, every time; `near` ones in so many pairs."""
    place = place or (AdaptiveR() if section == "adaptive_r" else LayerPlace())
    job = LayerJob(
        section=section,
        label=label,
        place=place,
        grid=grid or Grid(world=16, ep=16, ranks_per_node=4),
        methods=dict.fromkeys(seconds, ANY),
        same=dict(same or {}),
        factor=factor,
        compete=compete,
    )
    times = {
        n: tuple(s) if isinstance(s, Sequence) else (float(s),) * repeats
        for n, s in seconds.items()
    }
    return LayerCell(
        job=job,
        timings={name: Timing.of(each) for name, each in times.items()},
        near={name: (times[name] * pairs)[:pairs] for name in near},
        best=best,
        trial={},
        limits={
            name: (Limit(seconds=0.25, link="node 0 out"), Limit(seconds=0.5, link="node 1 in"))
            for name in times
        },
        across=dict.fromkeys(times, (1000, 10)),
        charged=dict.fromkeys(times, 0.125),
        switches=switches or {},
    )
