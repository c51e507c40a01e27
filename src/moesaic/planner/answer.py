"""Answers to common questions about a planned step, such as its speed and utilization, what to
change first, and costs.

Most answers predict the best plan of the search again with one thing changed. If no layout fits the
memory, `remedies` finds single changes after which one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from moesaic.errors import InputError
from moesaic.planner.candidates import Pins, layouts
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.job import Job
from moesaic.planner.loads import memory_under_counts, on_replica, simulate_counts
from moesaic.planner.rank_memory import FRAGMENTED, GIB, Memory, usable_bytes
from moesaic.planner.search import Result, Settings, smallest_layout
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import WHOLE, JobSplit, SplitCostModel, holdings, split_choices
from moesaic.planner.workload import largest_max_vio, skewed_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid

SPEED_RATIOS = (0.76, 0.95, 1.13)
"""First quartile, median and third quartile of measured over predicted speed of the published steps
in docs/ledger.md, each predicted without its own system in the fit (`moesaic_lab.ledger.held_out`).
One for all machines: no class of machines has enough sources for its own."""

USUAL_PRICE = 2.5
"""US dollars for a device and hour, where no price is given."""
SKEWED = 256
"""Largest number of ranks that share the experts under which skew is predicted, since each is
simulated: 256 take 0.7 s of a processor, and twice as many four times as long."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The predicted speed of a step."""

    tokens_per_second: float
    """Tokens per second and device: the median of its interval."""
    step_seconds: float
    """Seconds of a step at that speed: the simulated ones, as much longer as published steps are in
    the median."""
    interval: tuple[float, float]
    """Likely range of `tokens_per_second`, by the errors of the ledger's steps."""
    utilization: float
    """Model FLOPs (6 per active parameter and token, plus scores, without recomputation) over the
    rate of the data sheet."""

    def price(self, per_hour: float) -> float:
        """Return the cost of training on a trillion tokens.

        Args:
            per_hour: price of one device per hour.
        """
        return per_hour / 3600 / self.tokens_per_second * 1e12


@dataclass(frozen=True, kw_only=True)
class Change:
    """The effect of one change on the best plan."""

    what: str
    """The change, in words."""
    speedup: float
    """Step time before the change over step time after it."""


def speed_of(
    job: Job,
    step: PlannedStep,
    cluster: ClusterSpec,
    *,
    devices: int,
    sequences: int,
    longer: tuple[float, float] = (1.0, 1.0),
) -> Speed:
    """Return the speed of a step.

    Args:
        job: the training job.
        step: the step.
        cluster: the cluster.
        devices: number of devices that run the step, those of all pipeline stages included.
        sequences: number of sequences per optimizer step.
        longer: range of factors by which the step may take longer, for example from
            `longer_by_narrow_rate`.
    """
    simulated = sequences * job.model.seq_len / step.seconds / devices
    low, middle, high = SPEED_RATIOS
    least_longer, most_longer = longer
    tokens_per_second = simulated * middle
    # without a data sheet's rate, the one that products reach
    peak = cluster.device.peak_tflops * 1e12 or cluster.device.tflops.of(job.dtype(cluster))
    return Speed(
        tokens_per_second=tokens_per_second,
        step_seconds=step.seconds / middle,
        interval=(simulated * low / most_longer, simulated * high / least_longer),
        utilization=tokens_per_second * operations_per_token(job, cluster) / peak,
    )


def operations_per_token(job: Job, cluster: ClusterSpec) -> float:
    """Return the floating-point operations of a training step per token, forward and backward."""
    step = job.step_model(cluster, dp=1)
    _, active_parameters = job.parameters(cluster)
    # an embedding of its own is looked up, not multiplied
    embedding = 0 if job.model.tied else step.vocab * step.layer.dim
    multiplied = active_parameters - embedding
    # two operations a parameter, forward, and twice as many backward; likewise for scores
    return 6 * multiplied + 3 * step.num_layers * step.scores


def changes(
    job: Job, cluster: ClusterSpec, result: Result, *, reserve_gib: float = 1.0
) -> list[Change]:
    """Return the effects of single changes of the machine on the best plan, largest speedup first.

    Changes of less than half a percent are left out.

    Args:
        job: the training job.
        cluster: the cluster.
        result: result of the search.
        reserve_gib: device memory set aside for the framework.
    """
    best = result.best
    # Both times are by the cluster's description; those of the ranking may be under counts.
    seconds_before, _ = again(job, cluster, best)
    effects = []
    for what, changed_cluster in _machines(cluster):
        seconds, _ = again(job, changed_cluster, best)
        effects.append(Change(what=what, speedup=seconds_before / seconds))

    # what a device with more memory could run: (in words, job, plan)
    larger_runs = []
    if result.too_large is not None:
        larger_runs.append((result.too_large.layout, job, result.too_large))
    if job.model.checkpoint_activations:
        without_recomputation = replace(job, model=replace(job.model, checkpoint_activations=False))
        larger_runs.append(("nothing recomputed", without_recomputation, best))
    for what, changed_job, planned in larger_runs:
        seconds, memory = again(changed_job, cluster, planned)
        gib = math.ceil(memory.total * FRAGMENTED / GIB + reserve_gib)
        if gib > cluster.device.memory_gib and seconds < seconds_before:
            speedup = seconds_before / seconds
            effects.append(Change(what=f"devices of {gib} GiB ({what})", speedup=speedup))
    noticeable = [effect for effect in effects if abs(effect.speedup - 1) > 0.005]
    return sorted(noticeable, key=lambda effect: -effect.speedup)


def again(job: Job, cluster: ClusterSpec, planned: PlannedStep) -> tuple[float, Memory]:
    """Predict a plan again under even routing, by the description of a cluster; returns the seconds
    of a step and the memory.

    Args:
        job: the training job.
        cluster: the cluster, with as many ranks as the layout.
        planned: the plan and its layout.
    """
    simulator = Simulator(cluster)
    cost_model = SplitCostModel(job, planned.grid, planned.split, simulator)
    compiled = compile_plan(planned.plan, planned.grid)
    passes = simulator.passes(
        compiled.forward, compiled.backward, cost_model.model.layer, compiled.grid
    )
    return cost_model.estimate_of(compiled, *passes).seconds, cost_model.memory(compiled)


@dataclass(frozen=True, kw_only=True)
class SkewedStep:
    """A step in which the experts of one ep rank get more copies than the others in every layer."""

    longer: float
    """Factor by which it takes longer than under even routing."""
    memory: Memory
    """Memory of the rank that needs most."""


def under_skew(
    job: Job, cluster: ClusterSpec, planned: PlannedStep, max_vio: float
) -> SkewedStep | None:
    """Predict a plan under a MaxVio over ranks: the busiest ep rank's load over the mean load,
    minus 1.

    One replica of the experts is simulated and stands for all. With ep = 1 every rank has all
    experts, and skew costs nothing.

    Returns:
        the step; None if one replica has too many ranks to simulate them individually, or allows no
        such MaxVio.
    """
    grid = planned.grid
    simulator = Simulator(cluster)
    if grid.ep == 1:
        return SkewedStep(longer=1.0, memory=planned.memory)
    compiled = on_replica(compile_plan(planned.plan, grid), cluster)
    # the ratio is that of micro-batches in turn
    split = replace(planned.split, in_flight=1)
    cost_model = SplitCostModel(job, grid, split, simulator)
    layer = cost_model.model.layer
    if compiled.grid.world > SKEWED or max_vio > largest_max_vio(grid.ep, layer):
        return None
    counts = skewed_counts(compiled.grid.dp, layer, ep=grid.ep, max_vio=max_vio)
    forward, backward = simulate_counts(simulator, compiled, layer, counts)
    skewed_seconds = cost_model.estimate(forward, backward).seconds
    even_seconds, _ = again(job, cluster, replace(planned, split=split))
    memory_of = SplitCostModel(job, grid, planned.split, simulator).memory
    memory = memory_under_counts(memory_of, simulator, compiled, layer, [counts])
    return SkewedStep(longer=skewed_seconds / even_seconds, memory=memory)


def _machines(cluster: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    """Yield clusters with one property twice as good, each after a description of the change."""
    kinds: tuple[tuple[Literal["inside", "outside"], str], ...] = (
        ("outside", "links between nodes"),
        ("inside", "links inside nodes"),
    )
    for kind, words in kinds:
        names = [link.name for link in cluster.links if link.carries in (kind, "all")]
        if names and (kind == "inside" or cluster.nodes > 1):
            yield f"{words} twice as fast ({', '.join(names)})", cluster.with_links(kind, 2.0)
    device = cluster.device
    yield "products twice as fast", replace(cluster, device=device.with_products(2.0))
    faster = replace(device, memory_gigabytes_per_second=2 * device.memory_gigabytes_per_second)
    yield "memory twice as fast", replace(cluster, device=faster)


MOST_TIMES = 64
"""Largest factor by which the number of devices is increased."""
Larger = Callable[[int], tuple[Job, ClusterSpec]]
"""Function of a number of devices that returns the job and a cluster of at least so many
devices."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change that may make a layout fit the memory."""

    what: str
    """The change, in words."""
    num_bytes: float
    """Bytes per rank of the smallest layout after the change."""
    fits: bool
    """Whether these bytes fit the memory of a device."""


def remedies(
    job: Job, cluster: ClusterSpec, settings: Settings, larger: Larger | None = None
) -> list[Remedy]:
    """Return changes that were tried, first those after which a layout fits the memory.

    Args:
        job: a job that fits no layout.
        cluster: the cluster.
        settings: settings of the search.
        larger: returns the job and a cluster for a larger number of devices; None if there is no
            larger cluster.
    """
    tried = []
    usable = usable_bytes(cluster, settings.reserve_gib)
    for what, changed_job, changed_settings in _changes(job, settings):
        num_bytes = _smallest_bytes(changed_job, cluster, changed_settings)
        if num_bytes is not None:
            tried.append(Remedy(what=what, num_bytes=num_bytes, fits=num_bytes <= usable))
    if larger is not None:
        tried += _more_devices(cluster, settings, larger)
    num_bytes = _smallest_bytes(job.recomputing, cluster, settings)
    if num_bytes is not None:
        gib = math.ceil(num_bytes * FRAGMENTED / GIB + settings.reserve_gib)
        what = f"devices of {gib} GiB, blocks recomputed"
        tried.append(Remedy(what=what, num_bytes=num_bytes, fits=True))
    return sorted(tried, key=lambda each: not each.fits)


def in_words(tried: list[Remedy]) -> str:
    """Return remedies as a clause of a sentence."""
    fitting = [f"{each.what} ({each.num_bytes / GIB:.1f} GiB)" for each in tried if each.fits]
    too_large = [f"{each.what} ({each.num_bytes / GIB:.1f})" for each in tried if not each.fits]
    words = "no single change that was tried makes it fit"
    if fitting:
        words = f"what fits: {'; '.join(fitting)}"
    if too_large:
        words += f"; not enough alone: {'; '.join(too_large)}"
    return words


def _changes(job: Job, settings: Settings) -> Iterator[tuple[str, Job, Settings]]:
    """Yield changes: a description of each, and the job and the settings after it."""
    model = job.model
    if settings.pins != Pins():
        yield "sizes of axes left free", job, replace(settings, pins=Pins())
    if settings.pp not in (None, 1):
        yield "no stages (without --pp)", job, replace(settings, pp=None)
    if not model.checkpoint_activations:
        yield "blocks recomputed (model.checkpoint_activations)", job.recomputing, settings
    if job.batch_size % 2 == 0:
        half = job.batch_size // 2
        what = f"half the micro-batch (--batch-size {half})"
        yield what, replace(job, batch_size=half), settings
    if model.seq_len > 1024:
        seq_len = model.seq_len // 2
        what = f"sequences of {seq_len} tokens (--seq-len)"
        yield what, replace(job, model=replace(model, seq_len=seq_len)), settings


def _more_devices(cluster: ClusterSpec, settings: Settings, larger: Larger) -> list[Remedy]:
    """Return the smallest number of devices, by doubling, on which a layout fits, or the largest
    number tried; [] if none."""
    last: list[Remedy] = []
    times = 2
    while times <= MOST_TIMES:
        try:
            job, larger_cluster = larger(times * cluster.world)
        except InputError:  # the description of the cluster is valid for its number of nodes only
            break
        num_bytes = _smallest_bytes(job.recomputing, larger_cluster, settings)
        if num_bytes is not None:
            fits = num_bytes <= usable_bytes(larger_cluster, settings.reserve_gib)
            what = f"{larger_cluster.world} devices, blocks recomputed"
            last = [Remedy(what=what, num_bytes=num_bytes, fits=fits)]
            if fits:
                break
        times *= 2
    return last


def _smallest_bytes(job: Job, cluster: ClusterSpec, settings: Settings) -> float | None:
    """Return the bytes per rank of the smallest layout; None if the job fits no mesh."""
    simulator = Simulator(cluster)
    splits = [WHOLE]
    sizes = []
    with suppress(InputError):
        if settings.most_stages:
            splits = split_choices(job, cluster, settings.most_stages, settings.pp)
        for split in splits:
            with suppress(InputError):
                grids = layouts(split.of(job), cluster, settings.pins, split.pp)
                models = [_leanest(job, grid, split, simulator) for grid in grids]
                sizes.append(smallest_layout(models)[1])
    return min(sizes, default=None)


def _leanest(job: Job, grid: Grid, split: JobSplit, simulator: Simulator) -> SplitCostModel:
    """Return the way of holding the model on a layout that needs the fewest bytes."""
    ways = [split] if split == WHOLE else holdings(grid, split)
    models = [SplitCostModel(job, grid, split=each, simulator=simulator) for each in ways]
    return min(models, key=lambda each: each.least_bytes)
