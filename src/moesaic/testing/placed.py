"""Cases in which samples change home, or experts their place: where they go, and how they come back to be compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from moesaic.balance.samples import AbstractPlacer, Given, Homes, TwoStage, Weighed
from moesaic.comm.mesh import Mesh
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.routing.routing import Routing
from moesaic.runtime.balance.experts import ExpertPlacement
from moesaic.runtime.balance.moving import MovingMoE
from moesaic.runtime.balance.samples.relocate import Following, Relocator
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.cases import Case


def relocator_of(case: Case, mesh: Mesh) -> Relocator | None:
    """Return what moves a case's samples; None where they stay."""
    if case.placement == "none":
        return None
    return Relocator(mesh, _placer(case), ends_home=False)


def call_placed(
    relocator: Relocator | None, layer: MoE, x: Any, *, recompute: bool = False, **options: Any
) -> tuple[Any, Routing]:
    """Return (y, routing) of a call, y of the samples of x wherever they went meanwhile.

    Args:
        relocator: moves samples; None for none.
        layer: the layer.
        x: (sequences, length, dim).
        recompute: keep no activations.
        **options: of the call.
    """
    module = layer if relocator is None else MovingMoE(layer)
    run = partial(checkpoint, module) if recompute else module
    if relocator is None:
        y, routing = run(x, return_routing=True, **options)
        return y, routing
    trip = relocator.start([Following(layer.router, layer.top_k)], *x.shape[:2])
    y, routing = run(x, move=trip.next(), return_routing=True, **options)
    return trip.take_home(y), routing


def expert_placement_of(layer: MoE, mesh: Mesh) -> ExpertPlacement:
    """Return what moves a layer's experts between steps; their weights and gradients are all that there is to move.

    Args:
        layer: on the mesh.
        mesh: with ep above 1.
    """
    return ExpertPlacement([layer], mesh, torch.optim.SGD(layer.experts.parameters(), lr=0.1), every=1)


def place_anew(case: Case, layer: MoE, mesh: Mesh) -> Callable[[], None]:
    """Put a case's experts into a random order, if they move in it; returns what takes them home, gradients with them.

    Args:
        case: the case.
        layer: its layer, on the mesh, before its first call.
        mesh: all ranks enter and leave together.
    """
    if not case.experts_move:
        return lambda: None
    placement, home = expert_placement_of(layer, mesh), np.arange(layer.num_experts)
    placement.place([np.random.default_rng(case.seed).permutation(layer.num_experts)])

    def take_home() -> None:
        placement.place([home])

    return take_home


def random_homes(grid: Grid, slots: int, rng: np.random.Generator) -> Homes:
    """Return a placement in which samples are anywhere within their copy of the experts."""
    rank = np.repeat(np.arange(grid.world), slots)
    for replica in {grid.group(each, ("ep", "etp")) for each in range(grid.world)}:
        members = np.flatnonzero(np.isin(rank, replica))
        rank[members] = rng.permutation(rank[members])
    return Homes.of_ranks(rank, grid.world)


def _placer(case: Case) -> AbstractPlacer:
    if case.placement == "solved":
        return Weighed(least_gain=0.0) if case.seed % 2 else TwoStage(least_gain=0.0)
    rng = np.random.default_rng(case.seed)
    slots = case.sequences // case.grid.tp
    return Given([random_homes(case.grid, slots, rng) for _ in case.lengths])
