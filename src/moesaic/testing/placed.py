"""Cases in which samples change home: which cases can, where samples go, and a call that brings its results back."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.comm.abstract_mesh import AbstractMesh
from moesaic.layer import MoE
from moesaic.plan.placement import AbstractPlacer, Given, Homes, TwoStage, Weighed
from moesaic.program.grid import Grid
from moesaic.routing.routing import Routing
from moesaic.runtime.relocate import Following, Relocator
from moesaic.testing.cases import Case


def relocator_of(case: Case, mesh: AbstractMesh) -> Relocator | None:
    """Return what moves a case's samples; None where they stay."""
    if case.placement == "none":
        return None
    return Relocator(mesh, _placer(case), ends_home=False)


def call_placed(relocator: Relocator | None, layer: MoE, run: Any, x: Any, **options: Any) -> tuple[Any, Routing]:
    """Return (y, routing) of a call, y of the samples of x wherever they went meanwhile.

    Args:
        relocator: moves samples; None for none.
        layer: the layer.
        run: it, or it under activation checkpointing.
        x: (sequences, length, dim).
        **options: of the call.
    """
    if relocator is None:
        y, routing = run(x, return_routing=True, **options)
        return y, routing
    trip = relocator.start([Following(layer.router, layer.top_k)], *x.shape[:2])
    y, routing = run(x, return_routing=True, move=trip.next(), **options)
    return trip.take_home(y), routing


def random_homes(grid: Grid, slots: int, rng: np.random.Generator) -> Homes:
    """Return a placement in which samples are anywhere within their copy of the experts."""
    rank = np.repeat(np.arange(grid.world), slots)
    for replica in {grid.group(each, ("ep", "etp")) for each in range(grid.world)}:
        members = np.flatnonzero(np.isin(rank, replica))
        rank[members] = rng.permutation(rank[members])
    return Homes.of_ranks(rank, grid.world)


def _placer(case: Case) -> AbstractPlacer:
    if case.placement == "solved":
        return Weighed() if case.seed % 2 else TwoStage()
    rng = np.random.default_rng(case.seed)
    return Given([random_homes(case.grid, case.sequences, rng) for _ in case.lengths])
