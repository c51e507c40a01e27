"""The layer benchmark as small multiples: schedules per mesh, r over capacity factors, the rest as bars."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from moesaic_lab.layer.config import AdaptiveR
from moesaic_lab.layer.job import BEST
from moesaic_lab.layer.run import LayerCell
from moesaic_lab.pictures import Panel, PlottedSeries

VIRTUAL = "ms, virtual compute"
"""What stands beside every axis of time."""


def panels(cells: Sequence[LayerCell]) -> list[Panel]:
    """Return a panel per kind of mesh, per size of weights, and per job of the other parts."""
    made = []
    schedules = sorted((c for c in cells if c.job.section == "schedules"), key=_mesh)
    for (etp, innermost), group in itertools.groupby(schedules, key=_mesh):
        where = f", {innermost} inside nodes" if etp > 1 else ""
        found = list(group)
        made.append(_bars(f"schedules, etp {etp}{where}", found, tuple(f"tp {c.job.grid.tp}" for c in found)))
    adaptive = [c for c in cells if c.job.section == "adaptive_r"]
    for name, group in itertools.groupby(adaptive, key=_name):
        made.append(_over_factors(f"adaptive r, {name}", list(group)))
    titles = {"pipelining": "chunks", "orders": "orders", "codecs": "codecs", "ablation": "ScheMoE's steps"}
    for section, title in titles.items():
        found = [c for c in cells if c.job.section == section]
        if found:
            made.append(_bars(title, found, tuple(c.job.label for c in found)))
    return made


def _mesh(cell: LayerCell) -> tuple[int, str]:
    return cell.job.grid.etp, cell.job.grid.innermost


def _name(cell: LayerCell) -> str:
    assert isinstance(cell.job.place, AdaptiveR)
    return cell.job.place.name


def _bars(title: str, cells: Sequence[LayerCell], categories: tuple[str, ...]) -> Panel:
    """Draw methods side by side; the plan that a search found stands last."""
    names = list(dict.fromkeys(name for cell in cells for name in (*cell.job.methods, *cell.job.same)))
    found = [(name, [(n, c, name) for n, c in enumerate(cells) if _has(c, name)]) for name in names]
    if any(cell.best for cell in cells):
        found.append((BEST, [(n, c, c.best) for n, c in enumerate(cells) if c.best]))
    series = tuple(_series(name, points) for name, points in found)
    return Panel(title=title, x_title="", y_title=VIRTUAL, series=series, categories=categories)


def _over_factors(title: str, cells: Sequence[LayerCell]) -> Panel:
    names = list(cells[0].timings)
    series = tuple(_series(name, [(c.job.factor or 0.0, c, name) for c in cells]) for name in names)
    ticks = tuple((c.job.factor or 0.0, f"{c.job.factor:g}") for c in cells)
    return Panel(
        title=title, x_title="capacity factor", y_title=VIRTUAL, series=series, x_ticks=ticks, log_x=True, log_y=True
    )


def _has(cell: LayerCell, name: str) -> bool:
    return name in cell.timings or name in cell.job.same


def _series(name: str, points: Sequence[tuple[float, LayerCell, str]]) -> PlottedSeries:
    found = [(x, cell, cell.job.same.get(method, method)) for x, cell, method in points]
    return PlottedSeries.of(name, [(x, cell.timings[method], cell.bound(method)) for x, cell, method in found])
