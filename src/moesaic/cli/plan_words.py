"""The answer of `moesaic plan` in words: lines about the best plan, and about other layouts.

Jobs, layouts and MaxVio are those of `plan_search.py`. *Ours* is the speed of the best plan of the
search, *others* are layouts of other training systems, and *narrow* products are those in 8 bits.
Of a step's `estimate`, `parts` are seconds that sum to it, and `limits` the seconds in which each
resource, such as a link, is busy; the `bottleneck` is the busiest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.table import Table

from moesaic.errors import counted
from moesaic.planner.algorithm1 import choose
from moesaic.planner.answer import (
    SKEWED,
    USUAL_PRICE,
    SkewedStep,
    Speed,
    changes,
    speed_of,
    under_skew,
)
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.emit import SYSTEMS, from_flags, unread_flags
from moesaic.planner.job import Job
from moesaic.planner.other_systems import (
    OthersLayout,
    fills_pipeline,
    longer_by_narrow_rate,
    predict,
    without_what_we_lack,
)
from moesaic.planner.rank_memory import GIB, Memory, about_fragments, what_is_missing
from moesaic.planner.search import Result
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import largest_max_vio
from moesaic.program.plan import plan_in_words

OTHERS_STEPS = "fitted to steps of other systems (no step of this one on several GPUs was measured)"
"""What the line on the speed of our own plans says of its interval."""


def table_of(
    result: Result,
    cluster: ClusterSpec,
    model: str,
    skewed: Sequence[SkewedStep | None] = (),
    *,
    loads: str = "",
) -> Table:
    """Return the ranking as a table; `skewed` has each of its plans under a MaxVio, if one is
    given; `loads` names a trace under which the steps were simulated."""
    table = Table(
        title=(
            f"{model} on {cluster.name}, {counted(cluster.nodes, 'node')} of "
            f"{cluster.devices_per_node}: simulated steps" + (f" under {loads}" if loads else "")
        ),
        box=None,
    )
    for name in ("", "ms", "over bound", "layout", "plan", "limited by", "GiB"):
        is_text = name in ("layout", "plan", "limited by")
        table.add_column(name, justify="left" if is_text else "right")
    if skewed:
        for name in ("ms under skew", "GiB under skew"):
            table.add_column(name, justify="right")

    for number, planned in enumerate(result.ranking, start=1):
        cells = [
            str(number),
            f"{planned.seconds * 1e3:,.2f}",
            f"{planned.seconds / planned.bound_seconds:.2f}",
            planned.layout,
            plan_in_words(planned.plan),
            _limit(planned),
            f"{planned.memory.total / GIB:.1f}",
        ]
        if skewed:
            cells += _skew_cells(planned, skewed[number - 1])
        table.add_row(*cells)
    return table


def _skew_cells(planned: PlannedStep, step: SkewedStep | None) -> list[str]:
    """Return the milliseconds and the GiB of a plan under a MaxVio."""
    if step is None:
        return ["-", "-"]
    return [f"{step.longer * planned.seconds * 1e3:,.2f}", f"{step.memory.total / GIB:.1f}"]


def about_parameters(job: Job, cluster: ClusterSpec) -> str:
    """Return a line with the parameters of the model."""
    total, active = job.parameters(cluster)
    return f"model: {_in_words(total)} total, {_in_words(active)} active parameters"


def _in_words(number: float) -> str:
    """Return a number in millions or billions."""
    if number >= 1e9:
        return f"{number / 1e9:,.1f} billion"
    return f"{number / 1e6:,.1f} million"


def what_was_measured(cluster: ClusterSpec) -> str:
    """Return a line that says which numbers of a cluster were measured, and where the others come
    from."""
    source = (
        cluster.source or "its description does not say where its numbers come from (source = ...)"
    )
    if not cluster.measured:
        return f"measured of {cluster.name}: nothing by us; {source}"
    return f"measured of {cluster.name}: {'; '.join(cluster.measured)}; the rest: {source}"


def answer(
    job: Job,
    cluster: ClusterSpec,
    result: Result,
    *,
    price: float | None,
    max_vio: float | None,
    reserve_gib: float,
    under_counts: bool = False,
) -> Iterator[str]:
    """Yield the lines that every answer has: speed, limit, memory, what to change, other sizes of
    ep, and skew.

    Args:
        job: the training job.
        cluster: the cluster.
        result: the result of the search.
        price: price of a device per hour, if known.
        max_vio: a MaxVio over ranks, if given.
        reserve_gib: device memory set aside for the framework.
        under_counts: the result is under recorded counts. What changes and skew cost is predicted
            under even routing, so these lines are left out.
    """
    best = result.best
    speed = best_speed(job, cluster, best)
    yield about_parameters(job, cluster)
    tokens = job.batch_size * job.accumulation * job.model.seq_len
    yield f"speed: {_speed_in_words(speed, tokens, best.seconds)}; {OTHERS_STEPS}"
    yield from result.why_recomputed

    name = best.estimate.bottleneck
    yield (
        f"limited by {name}, busy {best.estimate.limits[name] / best.seconds:.0%} of the step; "
        f"{best.seconds / best.bound_seconds:.2f} times the bound of this layout, "
        f"{best.seconds / result.bound_seconds:.2f} times that of any"
    )

    yield (
        f"memory: {best.memory.total / GIB:.1f} of {cluster.device.memory_gib:g} GiB: "
        f"{_memory_in_words(best.memory)}"
    )
    yield about_fragments(best.memory, cluster)

    if not under_counts:
        yield _first_changes(job, cluster, result, reserve_gib)
    yield from _other_eps(result)
    if not under_counts:
        yield from _about_skew(job, cluster, best, max_vio)
    if price is not None:
        yield (
            f"price: {speed.price(price):,.0f} for a trillion tokens, at {price:g} a device and "
            "hour, in the currency of --price-per-hour"
        )


def _first_changes(job: Job, cluster: ClusterSpec, result: Result, reserve_gib: float) -> str:
    """Return a line with the changes that gain most."""
    gains = [
        f"{change.what}: {change.speedup:.2f} times the speed"
        for change in changes(job, cluster, result, reserve_gib=reserve_gib)
        if change.speedup > 1  # some slow a step down
    ]
    nothing = "no change that was tried helps by more than half a percent"
    return f"change first: {'; '.join(gains[:5]) or nothing}"


def further(job: Job, simulator: Simulator, result: Result, *, has_price: bool) -> Iterator[str]:
    """Yield the lines that are printed on demand: parts, ep = 1, Parm's rule and the origin of the
    numbers."""
    best = result.best
    cluster = simulator.cluster
    parts = ", ".join(
        f"{part} {seconds * 1e3:,.1f} ms" for part, seconds in best.estimate.parts.items()
    )
    yield (
        f"best: {best.layout} (dp {best.grid.dp}, edp {best.grid.edp}), "
        f"{plan_in_words(best.plan)}: {parts}"
    )

    yield _about_whole_experts(result)
    if best.grid.tp * best.grid.etp > 1:
        # `split.of` cuts the job's micro-batches as the split does
        layer = best.split.of(job).step_model(cluster, best.grid.dp).layer
        schedule = choose(simulator, layer, best.grid).schedule
        yield (
            f"Parm's Algorithm 1 chooses {schedule} on the best layout (moesaic train --plan parm)"
        )

    if not has_price:
        cost = best_speed(job, cluster, best).price(USUAL_PRICE)
        yield (
            f"price: unknown without --price-per-hour; at {USUAL_PRICE:g} US dollars a device and "
            f"hour a trillion tokens cost {cost:,.0f} US dollars"
        )
    yield what_was_measured(cluster)


def best_speed(job: Job, cluster: ClusterSpec, best: PlannedStep) -> Speed:
    """Return the speed of the best plan of a search."""
    return speed_of(
        job, best, cluster, devices=cluster.world, sequences=job.batch_size * job.accumulation
    )


def as_others_shard(
    system: str,
    job: Job,
    cluster: ClusterSpec,
    best: tuple[OthersLayout, PlannedStep] | None,
    ours: Speed | None,
    asked: str,
) -> Iterator[str]:
    """Yield a line with the speed of the best layout of another system, the command that prints it,
    what we lack of it, and a warning if its pipeline lacks sequences.

    Args:
        system: a key of `SYSTEMS`.
        job: the training job.
        cluster: the cluster.
        best: the layout and its step; None if none fits.
        ours: the speed of our best plan; None if none fits.
        asked: the flags that say the model, the cluster and the sizes of a step.
    """
    name = SYSTEMS[system].version or system
    if best is None:
        yield f"as {name} runs it: no layout that was tried fits, with a pipeline or without"
        return
    layout, step = best
    speed = speed_of(
        job, step, cluster, devices=cluster.world, sequences=layout.sequences(cluster.world)
    )

    times = ""
    if ours is not None:
        ratio = speed.tokens_per_second / ours.tokens_per_second
        times = f", {ratio:.2f} times the speed above"
    choices = ", ".join(_choices_of(layout))
    yield (
        f"as {name} runs it: {choices}: {speed.tokens_per_second:,.0f} tokens/s and "
        f"device, {step.memory.total / GIB:.1f} GiB{times}"
    )
    yield f"    moesaic plan emit {system} --pp {layout.pp} {asked}  # prints its flags"

    gains = without_what_we_lack(job, cluster, layout)
    if gains:
        parts = [f"{what} ({gain:.2f} times as fast with it)" for what, gain in gains.items()]
        yield f"of that, the ranking does not try {', '.join(parts)}"
    yield from _starved(job, cluster, layout)


def _choices_of(layout: OthersLayout) -> list[str]:
    """Return what a layout of another system chooses, in words: sizes of axes, then options."""
    choices = []
    for axis in ("pp", "cp", "tp", "ep"):
        size = getattr(layout, axis)
        if size > 1:
            choices.append(f"{axis} {size}")
    if not choices:
        choices.append("every size 1")
    choices.append(f"micro-batch {layout.micro_batch}")

    if layout.pp > 1:
        choices.append(layout.schedule)
    if layout.virtual_pp > 1:
        choices.append(f"{layout.virtual_pp} runs a rank")
    if layout.by_deepep:
        choices.append("DeepEP")
    if layout.overlapped:
        choices.append("overlapped")
    if layout.is_narrow:
        choices.append(layout.precision)
    if layout.recompute:
        choices.append(f"recomputes {' '.join(layout.recompute)}")
    return choices


def explained(job: Job, cluster: ClusterSpec, ours: Speed | None, flags: str) -> Iterator[str]:
    """Yield lines with the predicted speed of the layout that flags of another system describe.

    Args:
        job: the training job.
        cluster: the cluster.
        ours: speed of the best layout of the search, to compare with; None if none fits.
        flags: flags of Megatron or torchtitan.
    """
    layout = from_flags(flags)
    step = predict(job, cluster, layout)
    sequences = layout.sequences(cluster.world)
    # (least, most) factor by which a step may take longer: the rate of narrow products is uncertain
    longer = longer_by_narrow_rate(job, cluster, layout)
    speed = speed_of(job, step, cluster, devices=cluster.world, sequences=sequences, longer=longer)
    yield (
        f"yours: {_speed_in_words(speed, sequences * job.model.seq_len, step.seconds)}; limited by "
        f"{_limit(step)}; {step.memory.total / GIB:.1f} GiB{what_is_missing(step.memory, cluster)}"
    )

    parts = [f"{part} {seconds * 1e3:,.1f} ms" for part, seconds in step.estimate.parts.items()]
    yield f"your parts: {', '.join(parts)}; memory: {_memory_in_words(step.memory)}"

    unread = unread_flags(flags, job)
    if unread:
        yield f"flags of yours that are not read, and may matter: {', '.join(unread)}"
    if not layout.global_batch:
        yield (
            "your flags give no global batch, so a step of yours is taken to have the fewest "
            f"sequences, {sequences}: add --global-batch-size (torchtitan: "
            "--training.global-batch-size)"
        )
    yield from _starved(job, cluster, layout)
    if ours is not None:
        gain = ours.tokens_per_second / speed.tokens_per_second
        compared = f"{gain:.2f} times as much" if gain > 1 else f"only {gain:.2f} of it"
        of_best = job.batch_size * job.accumulation
        if sequences != of_best:
            compared += f", in steps of {of_best:,} sequences, not of {sequences:,} as yours"
        yield f"the layout above reaches {compared}"


def _starved(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> Iterator[str]:
    """Yield a warning if a step has fewer sequences than its pipelines need."""
    if not fills_pipeline(job, cluster, layout):
        groups = cluster.world // (layout.tp * layout.cp * layout.pp)  # data-parallel pipelines
        yield (
            f"warning: a step has {counted(layout.sequences(cluster.world), 'sequence')}, fewer "
            f"than its pipelines need: give at least {layout.pp * groups * layout.micro_batch}"
        )


def _limit(planned: PlannedStep) -> str:
    """Return what limits a step, and the share of the step in which it is busy."""
    limits = planned.estimate.limits
    name = planned.estimate.bottleneck
    return f"{name} ({limits[name] / planned.seconds:.0%})"


def _memory_in_words(memory: Memory) -> str:
    """Return the GiB of each part of the memory."""
    return ", ".join(f"{part} {num_bytes / GIB:.1f}" for part, num_bytes in asdict(memory).items())


def _speed_in_words(speed: Speed, tokens: int, simulated_seconds: float) -> str:
    """Return a speed in words, with its step of a number of tokens, and what was simulated of
    that."""
    low, high = speed.interval
    longer = speed.step_seconds / simulated_seconds
    return (
        f"{speed.tokens_per_second:,.0f} tokens/s and device ({low:,.0f} to {high:,.0f} by "
        f"published steps), a step of {tokens:,} tokens in {speed.step_seconds:,.2f} s "
        f"({simulated_seconds * 1e3:,.2f} ms simulated; published steps take {longer:.2f} times "
        f"that), MFU {speed.utilization:.0%}"
    )


def _other_eps(result: Result) -> Iterator[str]:
    """Yield a line about the best layouts of other sizes of ep that were searched to the end, and
    the sizes that were not."""
    best = result.best
    searched = []
    too_large = []
    not_searched = []
    for ep, results in result.by_ep.items():
        if ep == best.grid.ep:
            continue
        if results.is_searched and results.best:
            searched.append(results.best)
        if results.is_too_large:
            too_large.append(str(ep))
        elif not results.is_searched:
            not_searched.append(str(ep))

    clauses = []
    for planned in sorted(searched, key=lambda planned: planned.seconds):
        speed = best.seconds / planned.seconds
        clauses.append(f"ep {planned.grid.ep} ({planned.layout}): {speed:.2f} times the speed")
    if too_large:
        clauses.append(f"ep {', '.join(too_large)}: do not fit")
    if not_searched:
        clauses.append(f"ep {', '.join(not_searched)}: not searched (--ep does)")
    if clauses:
        yield f"slower: {'; '.join(clauses)}"


def _about_whole_experts(result: Result) -> str:
    """Return a line about ep = 1, under which every rank has all experts."""
    best = result.best
    whole_experts = result.by_ep.get(1)
    if whole_experts is None:
        return (
            "ep = 1, every rank with all experts, was not searched: the given sizes of axes "
            "exclude it"
        )
    if whole_experts.is_too_large:
        return (
            "ep = 1, every rank with all experts, does not fit: it needs more memory than a "
            "device has"
        )
    if best.grid.ep == 1:
        return "ep = 1 wins: gathering experts' parameters costs less than sending tokens"
    planned = whole_experts.best
    if planned is None or not whole_experts.is_searched:
        return (
            "ep = 1 was not searched to the end: it takes at least "
            f"{whole_experts.floor_seconds * 1e3:,.1f} ms (--ep 1)"
        )
    return (
        f"ep = 1 would take {planned.seconds / best.seconds:.2f} times as long "
        f"({planned.layout}, limited by {planned.estimate.bottleneck}); it wins if blocks have "
        "enough tokens to hide the gathering of experts"
    )


def _about_skew(
    job: Job, cluster: ClusterSpec, best: PlannedStep, max_vio: float | None
) -> Iterator[str]:
    """Yield a line about the cost of skew, of the MaxVio that is given, else of 1 (or the largest
    that is possible); nothing for ep = 1 if none is given."""
    if best.grid.ep == 1:
        if max_vio is not None:
            yield f"a MaxVio of {max_vio:g}: costs nothing, since every rank has all experts"
        return

    if max_vio is None:
        largest = largest_max_vio(best.grid.ep, job.step_model(cluster, best.grid.dp).layer)
        max_vio = min(1.0, largest)
    step = under_skew(job, cluster, best, max_vio)
    if step is None:
        yield (
            f"a MaxVio of {max_vio:g}: not predicted, since more than {SKEWED} ranks share a copy "
            "of the experts"
        )
        return
    yield (
        f"a MaxVio of {max_vio:g} (one rank's experts get {1 + max_vio:g} times their share in "
        f"every layer) makes a step {step.longer:.2f} times as long and takes "
        f"{step.memory.total / GIB:.1f} GiB instead of "
        f"{best.memory.total / GIB:.1f}{what_is_missing(step.memory, cluster)}"
    )
