"""What a person asks of a planner: tokens per second with an interval, utilization, what to change first, what skew and tokens
cost. Each is the search's best plan predicted again with one thing changed.
Where no layout fits, single changes that make one fit are looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.memory import FRAGMENTED, GIB, Memory, usable_bytes
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.cost.timing import SpecTiming
from moesaic.cost.workload import uniform_counts
from moesaic.errors import InputError
from moesaic.plan.candidates import Pins, compile_on, layouts, name_of
from moesaic.plan.compile import Compiled
from moesaic.plan.loads import simulate_counts
from moesaic.plan.model import Job
from moesaic.plan.plan import Plan
from moesaic.plan.predict import APART
from moesaic.plan.search import Found, Result, Settings

SPREAD = (0.83, 0.93)
"""Measured over predicted speed between which the middle half of published steps lies; docs/ledger.md has them."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a step is."""

    tokens_per_second: float
    """Of one device."""
    interval: tuple[float, float]
    """What the same may turn out to be: as far off as the ledger's steps were, and where ranks are unlike, slower by that."""
    utilization: float
    """Model FLOPs (6 per active parameter and token, and scores) over the data sheet's rate; recomputing counts nothing."""

    def price(self, per_hour: float) -> float:
        """Return what a trillion tokens cost.

        Args:
            per_hour: of one device.
        """
        return per_hour / 3600 / self.tokens_per_second * 1e12


@dataclass(frozen=True, kw_only=True)
class Change:
    """The best plan with one thing changed."""

    what: str
    speedup: float
    """Seconds before over seconds after."""


DRAWS = (8, 2)
"""Steps that are drawn of unlike ranks, each with speeds of its own, and passes of each, with latenesses of their own."""


def speed_of(
    job: Job,
    found: Found,
    cluster: ClusterSpec,
    *,
    devices: int,
    sequences: int,
    longer: tuple[float, float] = (1.0, 1.0),
) -> Speed:
    """Return how fast a step is.

    Args:
        job: sizes of the model.
        found: the step.
        cluster: on what.
        devices: that run it, pipeline stages included.
        sequences: of an optimizer step.
        longer: as of `longer_by_rank_skew`.
    """
    tokens = sequences * job.model.seq_len
    each = tokens / found.seconds / devices
    peak = cluster.device.peak_tflops * 1e12 or cluster.device.tflops.of(job.dtype(cluster))
    return Speed(
        tokens_per_second=each,
        interval=(each * SPREAD[0] / longer[1], each * SPREAD[1] / longer[0]),
        utilization=each * operations_per_token(job, cluster) / peak,
    )


def operations_per_token(job: Job, cluster: ClusterSpec) -> float:
    """Return the operations of a training step per token, forward and backward."""
    step = job.step_model(cluster, job.batch_size)
    layer, matrices = step.layer, step.layer.matrices
    experts = step.moe_layers * matrices * layer.dim * (layer.top_k * layer.hidden + step.shared_hidden)
    around = step.dense_parameters - (step.embeddings - 1) * step.vocab * layer.dim
    return 6 * (experts + around) + 3 * step.num_layers * step.scores


def changes(job: Job, cluster: ClusterSpec, result: Result, *, reserve_gib: float = 1.0) -> list[Change]:
    """Return what the best plan would gain by one change of the machine, or of ep, the most first; what changes nothing is
    left out.

    Args:
        job: sizes of the model.
        cluster: on what.
        result: of a search.
        reserve_gib: memory of a device that the framework takes.
    """
    best = result.best
    # By the cluster's description both times: a ranking under counts or by a profile has other seconds.
    before = again(job, cluster, best)[0]
    found = [Change(what=what, speedup=before / again(job, other, best)[0]) for what, other in _machines(cluster)]
    more = []
    if result.too_large is not None:
        more.append((name_of(result.too_large.grid), *again(job, cluster, result.too_large)))
    if job.model.checkpoint_activations:
        kept = replace(job, model=replace(job.model, checkpoint_activations=False))
        more.append(("nothing recomputed", *again(kept, cluster, best)))
    for what, seconds, memory in more:
        gib = math.ceil(memory.total * FRAGMENTED / GIB + reserve_gib)
        if gib > cluster.device.memory_gib and seconds < before:
            found.append(Change(what=f"devices of {gib} GiB ({what})", speedup=before / seconds))
    for ep, of in result.by_ep.items():
        if of.best is not None and ep != best.grid.ep:
            found.append(Change(what=f"ep {ep} ({name_of(of.best.grid)})", speedup=best.seconds / of.best.seconds))
    return sorted((each for each in found if abs(each.speedup - 1) > 0.005), key=lambda each: -each.speedup)


def again(job: Job, cluster: ClusterSpec, found: Found) -> tuple[float, Memory]:
    """Return the seconds and the memory of a plan on its layout under even routing, by a cluster's description.

    Args:
        job: sizes of the model.
        cluster: of as many ranks as the plan is for.
        found: the plan and its layout.
    """
    simulator = Simulator(cluster)
    around = StepCostModel(job.step_model(cluster, found.grid.dp), found.grid, simulator)
    compiled = compile_on(found.plan, found.grid, simulator, around.model.layer)
    programs = compiled.forward, compiled.backward
    memory = around.memory(*programs, compiled.grid, memory_budget=found.plan.memory_budget)
    return around.estimate(*simulator.passes(*programs, around.model.layer, compiled.grid)).seconds, memory


def cost_of_skew(job: Job, cluster: ClusterSpec, found: Found) -> float | None:
    """Return how many times as long a step takes where one rank's experts get twice their share (a MaxVio of ranks of 1) in
    every layer; None where ranks are too many to simulate apart.

    One replica of the experts stands for all; all of them are as uneven.
    """
    grid, simulator = found.grid, Simulator(cluster)
    compiled = _replica(job, found, simulator)
    if compiled is None or grid.ep == 1:
        return None
    around = StepCostModel(job.step_model(cluster, grid.dp), grid, simulator)
    layer = around.model.layer
    share = np.ones(layer.num_experts)
    hot = layer.num_experts // grid.ep
    share[:hot] = min(2.0, grid.ep)
    share[hot:] = (layer.num_experts - share[:hot].sum()) / (layer.num_experts - hot)
    counts = np.tile(np.rint(share * layer.copies / layer.num_experts).astype(np.int64), (compiled.grid.dp, 1))
    skewed = around.estimate(*simulate_counts(simulator, compiled, layer, counts)).seconds
    return skewed / again(job, cluster, found)[0]


def longer_by_rank_skew(job: Job, cluster: ClusterSpec, found: Found) -> tuple[float, float] | None:
    """Return between how many times the time of a step with equal ranks the middle half of steps lies; None where the cluster
    says nothing of unlike ranks, or they are too many to simulate apart.

    A step has speeds of its own and the mean over several passes of a layer, each with latenesses of its own. One replica of
    the experts stands for all, and what runs outside MoE layers waits for its slowest rank.

    Args:
        job: sizes of the model.
        cluster: on what; its `rank_skew` is drawn from.
        found: the step with equal ranks.
    """
    skew, compiled = cluster.rank_skew, _replica(job, found, Simulator(cluster))
    if compiled is None or skew == type(skew)():
        return None
    step, ranks = job.step_model(cluster, found.grid.dp), compiled.grid.world
    counts, draw = uniform_counts(compiled.grid.dp, step.layer), np.random.default_rng(0)

    def seconds(speeds: np.ndarray, late: np.ndarray) -> float:
        known = np.resize(cluster.speeds or (1.0,), cluster.world)
        # Devices behind the replica's are as fast as its slowest.
        known[ranks:] = known[:ranks].min()
        unlike = known * np.append(speeds, np.full(cluster.world - ranks, speeds.min()))
        uneven = replace(cluster, speeds=tuple(unlike.tolist()))
        simulator = Simulator(uneven, timing=SpecTiming(uneven, late=late))
        runs = simulate_counts(simulator, compiled, step.layer, counts)
        return StepCostModel(step, found.grid, simulator).estimate(*runs).seconds

    equal, (steps, passes) = seconds(np.ones(ranks), np.zeros(ranks)), DRAWS
    drawn = []
    for _ in range(steps):
        speeds = np.exp(skew.speed * draw.standard_normal(ranks))
        drawn.append(
            np.mean([seconds(speeds, skew.start_us * 1e-6 * draw.exponential(size=ranks)) for _ in range(passes)])
        )
    low, high = np.quantile(drawn, (0.25, 0.75)) / equal
    return float(low), float(high)


def _replica(job: Job, found: Found, simulator: Simulator) -> Compiled | None:
    """Return a plan compiled on the ranks of one replica of the experts, whole nodes; None if they are too many to simulate
    apart."""
    grid, cluster = found.grid, simulator.cluster
    small = compile_on(found.plan, grid, simulator, job.step_model(cluster, grid.dp).layer)
    unit = max(grid.ep * grid.etp, cluster.devices_per_node, grid.tp)
    if unit > APART:
        return None
    one = replace(grid, world=min(unit, grid.world))
    return replace(small, grid=replace(one, etp_inner=small.grid.etp_inner))


def _machines(cluster: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    """Yield clusters with one thing twice as good, and what that is."""
    kinds: tuple[tuple[Literal["inside", "outside"], str], ...] = (
        ("outside", "links between nodes"), ("inside", "links inside nodes"),
    )  # fmt: skip
    for kind, words in kinds:
        names = [link.name for link in cluster.links if link.carries in (kind, "all")]
        if names and (kind == "inside" or cluster.nodes > 1):
            yield f"{words} twice as fast ({', '.join(names)})", cluster.with_links(kind, 2.0)
    device = cluster.device
    rates = {name: 2 * rate for name, rate in vars(device.tflops).items()}
    yield "products twice as fast", replace(cluster, device=replace(device, tflops=replace(device.tflops, **rates)))
    faster = replace(device, memory_gigabytes_per_second=2 * device.memory_gigabytes_per_second)
    yield "memory twice as fast", replace(cluster, device=faster)


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
