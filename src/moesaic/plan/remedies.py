"""What to change where a model fits no layout: single changes of the run or the machine, and what a rank needs after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.memory import FRAGMENTED, GIB, usable_bytes
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.errors import InputError
from moesaic.plan.candidates import Pins, compile_on, layouts
from moesaic.plan.model import Job
from moesaic.plan.plan import Plan
from moesaic.plan.search import Settings

MOST_TIMES = 64
"""So many times as many devices are tried at most."""
Larger = Callable[[int], tuple[Job, ClusterSpec]]
"""The job and the cluster of so many devices."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change."""

    what: str
    """How it is asked for, in words."""
    num_bytes: float
    """Least that a rank then needs of any layout."""
    fits: bool


def remedies(job: Job, cluster: ClusterSpec, settings: Settings, larger: Larger | None = None) -> list[Remedy]:
    """Return changes, those first after which a layout fits.

    Args:
        job: what fits no layout.
        cluster: all of it.
        settings: of the search.
        larger: makes the job and a cluster of more devices, whole nodes; None where nobody can tell.
    """
    found = []
    for what, changed, on, how in _changes(job, cluster, settings):
        need = _least(changed, on, how)
        if need is not None:
            found.append(Remedy(what=what, num_bytes=need, fits=need <= usable_bytes(on, how.reserve_gib)))
    found += _more_devices(cluster, settings, larger) if larger is not None else []
    need = _least(_recomputed(job), cluster, settings)
    if need is not None:
        gib = math.ceil(need * FRAGMENTED / GIB + settings.reserve_gib)
        found.append(Remedy(what=f"devices of {gib} GiB, blocks recomputed", num_bytes=need, fits=True))
    return sorted(found, key=lambda each: not each.fits)


def in_words(found: list[Remedy]) -> str:
    """Return changes as a clause."""
    told = [f"{each.what} ({each.num_bytes / GIB:.1f} GiB)" for each in found if each.fits]
    short = [f"{each.what} ({each.num_bytes / GIB:.1f})" for each in found if not each.fits]
    words = f"what fits: {'; '.join(told)}" if told else "no single change that was tried makes it fit"
    return words + f"; not enough alone: {'; '.join(short)}" * bool(short)


def _changes(job: Job, cluster: ClusterSpec, settings: Settings) -> Iterator[tuple[str, Job, ClusterSpec, Settings]]:
    """Yield what to change, and the job, the cluster and the settings after it."""
    model = job.model
    if settings.pins != Pins():
        yield "sizes of axes left free", job, cluster, replace(settings, pins=Pins())
    if not model.checkpoint_activations:
        yield "blocks recomputed (model.checkpoint_activations)", _recomputed(job), cluster, settings
    if job.batch_size % 2 == 0:
        half = job.batch_size // 2
        yield f"half the micro-batch (--batch-size {half})", replace(job, batch_size=half), cluster, settings
    if model.seq_len > 1024:
        short = replace(job, model=replace(model, seq_len=model.seq_len // 2))
        yield f"sequences of {model.seq_len // 2} tokens (--seq-len)", short, cluster, settings


def _more_devices(cluster: ClusterSpec, settings: Settings, larger: Larger) -> list[Remedy]:
    """Return the least number of devices, by doubling, that fits; or the most that were tried."""
    times = 2
    told: list[Remedy] = []
    while times <= MOST_TIMES and not (told and told[-1].fits):
        try:
            job, more = larger(times * cluster.world)
        except InputError:  # a description that holds for so many nodes only
            break
        need = _least(_recomputed(job), more, settings)
        if need is not None:
            fits = need <= usable_bytes(more, settings.reserve_gib)
            told.append(Remedy(what=f"{more.world} devices, blocks recomputed", num_bytes=need, fits=fits))
        times *= 2
    return told[-1:]


def _recomputed(job: Job) -> Job:
    return replace(job, model=replace(job.model, checkpoint_activations=True))


def _least(job: Job, cluster: ClusterSpec, settings: Settings) -> float | None:
    """Return the bytes that a rank needs at least, of every size of ep on the layout with the least that any plan needs and
    under the plainest plan; None if the job fits no mesh."""
    simulator = Simulator(cluster)
    try:
        meshes = layouts(job, cluster, settings.pins)
    except InputError:
        return None
    by_ep: dict[int, StepCostModel] = {}
    for grid in meshes:
        around = StepCostModel(job.step_model(cluster, grid.dp), grid, simulator)
        if grid.ep not in by_ep or around.least_bytes < by_ep[grid.ep].least_bytes:
            by_ep[grid.ep] = around
    found = []
    for around in by_ep.values():
        try:
            compiled = compile_on(Plan(order="fifo"), around.grid, simulator, around.model.layer)
            found.append(around.memory(compiled.forward, compiled.backward, compiled.grid).total)
        except InputError:
            continue
    return min(found, default=None)
