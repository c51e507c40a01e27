"""Parm's sweep on its two testbeds: the baseline and the two schedules, as our programs on our
simulator.

Pan et al. (INFOCOM 2024), section VI. An average speed-up is a mean over the sweep's layers that
fit into memory. The speed-up of a layer is the baseline's time over the schedule's, forward and
backward passes together. In the paper's notation, m is the number of ranks of a tensor-parallel
group, and s the number of shards of an expert; a cell of Table IV has one testbed, m and s.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.planner.algorithm1 import Operations, corrected, faster, operations
from moesaic.planner.cluster import ClusterSpec, Tflops, read_cluster
from moesaic.planner.rank_memory import GIB, layer_memory
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.reproduce.end_to_end import WholeStep
from moesaic_lab.reproduce.records import Book, Chart, PaperFinding, Reproduction, Row, paper_bars
from moesaic_lab.reproduce.sweep import SweptRuns

COLUMNS = (("a", 8), ("b", 8), ("b", 16), ("b", 32))
"""(testbed, GPUs) of the columns of Table IV."""
SIZES = ((2, 2), (2, 4), (4, 2), (4, 4))
"""(m, s) of the rows of Table IV: ranks of a tensor-parallel group, and shards of an expert."""
PLANS = {
    "baseline": Plan(schedule="baseline"),
    "s1": Plan(),
    "s2": Plan(schedule="s2", overlap_gather=True),
    "s2 in turn": Plan(schedule="s2"),
}
"""Plans of the schedules. S2 overlaps its last all-to-all and all-gather (SAA); "s2 in turn" runs
one after the other."""
MODELS = {"bert": ("parm-bert-base", 512), "gpt2": ("parm-gpt2", 1024)}
"""(preset, sequence length) of the models of Table V."""
STEP_SEQUENCES = 4
STEP_FACTOR = 1.2
"""Assumed sequences per tensor-parallel group and capacity factor of Table V, which gives
neither."""
BATCHES = (2, 4, 8)
LENGTHS = (512, 1024, 2048)
WIDTHS = (1024, 2048, 4096)
FACTORS = (1.2, 2.4)
RESERVE_GIB = 1.0
"""Memory of a device that the framework itself uses."""


@dataclass(frozen=True)
class ParmTimes:
    """Simulated times of one layer of the sweep under all schedules."""

    workload: Workload
    count: int
    """Number of identical layers in the sweep: batch size B and length L matter only as B * L."""
    seconds: Mapping[str, float]
    """Seconds of the forward and backward passes, by schedule."""
    compute: Mapping[str, float]
    """Seconds that the busiest rank computes in them, by schedule."""

    @property
    def best_speedup(self) -> float:
        """The speed-up of the faster one of S1 and S2."""
        return max(self.speedup("s1"), self.speedup("s2"))

    def speedup(self, schedule: str) -> float:
        """Return the time of the baseline over that of a schedule."""
        return self.seconds["baseline"] / self.seconds[schedule]


class Testbed:
    """Simulates layers and steps on one of the two testbeds.

    Args:
        book: gives the constants.
        name: "a" or "b".
    """

    def __init__(self, book: Book, name: str) -> None:
        self.name = name
        self.top_k = round(book.constant("parm.top_k"))
        self.cluster = testbed(book, name)
        self.runs = SweptRuns(self.cluster)

    def cell(
        self, world: int, m: int, s: int, schedules: tuple[str, ...] = tuple(PLANS)
    ) -> list[ParmTimes]:
        """Return the times of all layers of a cell that fit into memory.

        Args:
            world: number of GPUs.
            m: ranks per tensor-parallel group.
            s: shards per expert.
            schedules: the schedules to run, keys of `PLANS`.
        """
        grid = self.grid(world, m, s)
        times = []
        for workload, count in layers(world, s, self.top_k):
            if not self._fits(workload, grid):
                continue
            seconds = {}
            compute = {}
            for schedule in schedules:
                runs = self.runs.run(PLANS[schedule], grid, workload)
                seconds[schedule] = sum(run.seconds for run in runs)
                compute[schedule] = sum(run.compute_seconds for run in runs)
            times.append(ParmTimes(workload, count, seconds, compute))
        return times

    def steps_ms(self, model: str, world: int) -> dict[str, float]:
        """Return the milliseconds of a training step of Table V by schedule, without gradient
        exchange as in the paper.

        Args:
            model: a key of `MODELS`.
            world: number of GPUs; m = s = 4.
        """
        name, length = MODELS[model]
        grid = self.grid(world, 4, 4)
        step = WholeStep(name, self.cluster, grid, num_experts=world // 4, sequences=STEP_SEQUENCES)
        layer = replace(step.model.layer, top_k=self.top_k, capacity_factor=STEP_FACTOR)
        assert layer.tokens == STEP_SEQUENCES * length
        milliseconds = {}
        for schedule in ("baseline", "s1", "s2"):
            forward, backward = self.runs.run(PLANS[schedule], grid, layer)
            around = step.around_seconds(forward, backward, exchanges=False)
            milliseconds[schedule] = 1e3 * (
                around + step.model.moe_layers * (forward.seconds + backward.seconds)
            )
        return milliseconds

    def grid(self, world: int, m: int, s: int) -> Grid:
        """Return the mesh: one replica of the experts over all ranks, shards and tensor groups
        innermost."""
        per_node = self.cluster.devices_per_node
        return Grid(world=world, tp=m, ep=world // s, etp=s, ranks_per_node=per_node)

    def _fits(self, workload: Workload, grid: Grid) -> bool:
        """Return whether the baseline's layer fits into memory: weights, gradients, kept
        activations and live buffers."""
        plan = self.runs.compiled(PLANS["baseline"], grid)
        volumes = self.runs.simulator.volumes(plan.forward, workload, plan.grid)
        activations, buffers = layer_memory(plan.forward, plan.backward, volumes)
        experts_per_rank = workload.num_experts / grid.ep
        weights = experts_per_rank * workload.matrices * workload.dim * workload.hidden / grid.etp
        weight_bytes = weights * workload.element_bytes
        total_bytes = activations + buffers + 2 * weight_bytes  # with gradients
        return total_bytes / GIB + RESERVE_GIB <= self.cluster.device.memory_gib


def testbed(book: Book, name: str) -> ClusterSpec:
    """Return a testbed's preset with the constants in place.

    The published start-up and time per element of an all-gather are taken as those of a ring of two
    ranks, in which each rank sends one message with half of the output.
    """
    spec = read_cluster(f"parm-{name}")
    pcie, *others = spec.links
    rate = book.constant(f"parm.{name}.link")
    startup = book.constant(f"parm.{name}.message")
    links = [replace(pcie, gbps=(rate,), latency_us=0.0, message_us=startup), *others]
    if name == "a":  # whose GPU is rated by its preset
        return replace(spec, links=tuple(links))
    nic = replace(links[1], gbps=(book.constant("schemoe.nic"),))
    device = replace(spec.device, tflops=Tflops(fp32=book.constant("parm.b.tflops")))
    return replace(spec, device=device, links=(links[0], nic))


def layers(world: int, s: int, top_k: int) -> Iterator[tuple[Workload, int]]:
    """Yield the different ones of a cell's 162 layers, each with the number of identical layers."""
    # several batch sizes and lengths have the same product
    count_by_tokens = Counter(batch * length for batch in BATCHES for length in LENGTHS)
    for tokens, count in sorted(count_by_tokens.items()):
        for dim, hidden, factor in itertools.product(WIDTHS, WIDTHS, FACTORS):
            layer = Workload(
                tokens=tokens,
                num_experts=world // s,
                top_k=top_k,
                dim=dim * s,
                hidden=hidden * s,
                matrices=2,
                dtype="fp32",
                capacity_factor=factor,
            )
            yield layer, count


def mean_speedup(times: Sequence[ParmTimes], schedule: str) -> float:
    """Return the average speed-up of a schedule over the baseline, with equal weight for every
    layer of the sweep."""
    speedups = [each.speedup(schedule) for each in times]
    return float(np.average(speedups, weights=[each.count for each in times]))


def saa_gain(times: Sequence[ParmTimes]) -> float:
    """Return the mean speed-up of S2 with SAA over S2 that runs all-to-all and all-gather one after
    the other."""
    ratios = [each.seconds["s2 in turn"] / each.seconds["s2"] for each in times]
    return float(np.average(ratios, weights=[each.count for each in times]))


def shares(times: Sequence[ParmTimes]) -> tuple[float, float]:
    """Return the smallest and the largest share of communication in a layer of the baseline, in per
    cent."""
    percentages = [
        100 * (1 - each.compute["baseline"] / each.seconds["baseline"]) for each in times
    ]
    return min(percentages), max(percentages)


def published(operations: Operations, layer: Workload, m: int, s: int) -> str:
    """Return "s1" or "s2" by Algorithm 1 as printed; arguments as of `corrected`.

    T in line 2 already contains the width M, and line 3, y = E T M N_ESP, multiplies by M again.
    Line 5 evaluates the overlapped operation at y, not at y / m (errata P1 and P3).
    """
    per_expert = layer.copies / layer.num_experts * layer.dim
    y = layer.num_experts * per_expert * layer.dim * s
    return faster(operations, layer, y / m, y)


RULES: dict[str, Callable[[Operations, Workload, int, int], str]] = {
    "published": published,
    "corrected": corrected,
}
"""The two forms of Algorithm 1, by their names in findings."""


@dataclass(frozen=True)
class ParmChoices:
    """The schedules that one rule picked for a cell's layers."""

    speedup: float
    """Mean speed-up of the picked schedules over the baseline."""
    right: int
    """Number of layers for which the rule picked the faster schedule."""
    regret: float
    """Mean of the picked schedule's time over the faster one's, minus 1."""
    of: int
    """Number of layers."""


Key = tuple[str, int, int, int]
"""(testbed, GPUs, m, s): names a cell of Table IV."""
Cells = Mapping[Key, list[ParmTimes]]
"""Times of the layers of the sweep, by cell."""
Chosen = Mapping[Key, Mapping[str, ParmChoices]]
"""What Algorithm 1 chooses, by cell and by rule, a key of `RULES`."""
BEST: Key = ("b", 32, 4, 4)
"""The cell with the largest speed-ups."""


def reproduce(book: Book) -> Reproduction:
    """Simulate the sweep and the training steps, and compare them with the paper's figures."""
    beds = {name: Testbed(book, name) for name in ("a", "b")}
    cells = {}
    chosen = {}
    for name, world in COLUMNS:
        for m, s in SIZES:
            key = (name, world, m, s)
            cells[key] = beds[name].cell(world, m, s)
            chosen[key] = {rule: _choose(beds[name], key, cells[key], rule) for rule in RULES}
    figures = {
        **_figures_of_sweep(cells, chosen),
        **_figures_of_bed(beds["a"], 8, cells),
        **_figures_of_bed(beds["b"], 32, cells),
    }
    rows = book.rows(figures)
    findings = _findings(book, rows, chosen, cells)
    return book.reproduction("parm", rows, findings, _charts(rows, cells[BEST]))


def _figures_of_sweep(cells: Cells, chosen: Chosen) -> dict[str, float]:
    """Return the figures of the sweep over layers, by name."""
    figures: dict[str, float] = {}
    for (name, world, m, s), times in cells.items():
        case = f"{name}{world}.m{m}s{s}"
        for schedule in ("s1", "s2"):
            figures[f"parm.{schedule}.{case}"] = mean_speedup(times, schedule)
        figures[f"parm.chosen.{case}"] = chosen[name, world, m, s]["corrected"].speedup
    cell_shares = [shares(times) for (_, world, _, _), times in cells.items() if world == 32]
    figures["parm.share.least"] = min(least for least, _ in cell_shares)
    figures["parm.share.most"] = max(most for _, most in cell_shares)
    best = cells[BEST]
    above = sum(each.count for each in best if each.best_speedup > 4)
    figures["parm.histogram.above4"] = 100 * above / _num_layers(best)
    figures["parm.sweep.runnable"] = float(sum(_num_layers(times) for times in cells.values()))
    return figures


def _num_layers(times: Sequence[ParmTimes]) -> int:
    """Return the number of layers of a cell, identical ones included."""
    return sum(each.count for each in times)


def _figures_of_bed(bed: Testbed, world: int, cells: Cells) -> dict[str, float]:
    """Return the figures of a testbed with `world` GPUs, by name."""
    bed_times: list[ParmTimes] = []
    for (name, *_), times in cells.items():
        if name == bed.name:
            bed_times += times
    figures = {f"parm.saa.{bed.name}": saa_gain(bed_times)}
    for model in MODELS:
        steps = bed.steps_ms(model, world)
        figures[f"parm.step.{model}.{bed.name}.baseline"] = steps["baseline"]
        figures[f"parm.step.{model}.{bed.name}.parm"] = min(steps["s1"], steps["s2"])
    return figures


def order(book: Book, rows: tuple[Row, ...]) -> tuple[int, int]:
    """Return in how many cells S1 and S2 come in the paper's order, and for how many cells that
    order is known."""
    ours = {row.cell.name: row.ours for row in rows}
    right = 0
    known = 0
    for name, world in COLUMNS:
        for m, s in SIZES:
            s1 = f"parm.s1.{name}{world}.m{m}s{s}"
            s2 = f"parm.s2.{name}{world}.m{m}s{s}"
            published_s1 = book.cells[s1].value
            published_s2 = book.cells[s2].value
            if published_s1 is not None and published_s2 is not None:
                known += 1
                if (ours[s1] > ours[s2]) == (published_s1 > published_s2):
                    right += 1
    return right, known


def _choose(bed: Testbed, key: Key, times: list[ParmTimes], rule: str) -> ParmChoices:
    """Return what a rule, a key of `RULES`, chooses for the layers of a cell."""
    _, world, m, s = key
    costs = operations(bed.runs.simulator, bed.grid(world, m, s), bed.top_k)
    right = 0
    regret = 0.0
    speedups = 0.0
    for layer in times:
        picked = RULES[rule](costs, layer.workload, m, s)
        best = _faster(layer)
        if picked == best:
            right += layer.count
        regret += layer.count * (layer.seconds[picked] / layer.seconds[best] - 1)
        speedups += layer.count * layer.speedup(picked)
    total = _num_layers(times)
    return ParmChoices(speedups / total, right, regret / total, total)


def _findings(
    book: Book, rows: tuple[Row, ...], chosen: Chosen, cells: Cells
) -> Iterator[PaperFinding]:
    """Yield the findings about the paper's statements."""
    right, known = order(book, rows)
    yield PaperFinding(
        "S1 and S2 rank as in Table IV (target: three quarters of the cells)",
        f"{right} of {known} cells",
        right >= 0.75 * known,
    )
    for rule in RULES:
        choices = [by_rule[rule] for by_rule in chosen.values()]
        right = sum(choice.right for choice in choices)
        total = sum(choice.of for choice in choices)
        lost = sum(choice.regret * choice.of for choice in choices) / total
        yield PaperFinding(
            f"Algorithm 1 as {rule} picks the faster schedule",
            (
                f"{right} of {total} layers ({right / total:.0%}); its picks take {lost:.1%} "
                "longer than the best"
            ),
        )
    one_sided = 0
    for times in cells.values():
        faster_schedules = {_faster(layer) for layer in times}
        if len(faster_schedules) == 1:
            one_sided += 1
    yield PaperFinding(
        (
            "one of S1 and S2 is faster in every layer of a cell, as Parm's choice, constant in "
            "most cells, suggests"
        ),
        f"{one_sided} of {len(cells)} cells",
    )


def _faster(times: ParmTimes) -> str:
    """Return the faster of S1 and S2."""
    return min(("s1", "s2"), key=lambda schedule: times.seconds[schedule])


def _charts(rows: tuple[Row, ...], best: list[ParmTimes]) -> tuple[Chart, ...]:
    """Return the charts of the paper; `best` holds the times of the cell with the largest
    speed-ups."""
    figures = {row.cell.name: (row.cell.value, row.ours) for row in rows}
    cases = [f"{name}{world}.m{m}s{s}" for name, world in COLUMNS for m, s in SIZES]
    by_schedule = []
    for schedule in ("s1", "s2", "chosen"):
        bars = {case.replace(".", "\n"): figures[f"parm.{schedule}.{case}"] for case in cases}
        title = f"{schedule} over the baseline"
        by_schedule.append(paper_bars(title, "testbed, GPUs, m and s", "speed-up", bars))

    speedups: list[float] = []
    for each in best:
        speedups += [each.best_speedup] * each.count
    heights, edges = np.histogram(speedups, bins=np.arange(2.0, 8.25, 0.25))
    histogram = (("simulated", tuple(edges[:-1].tolist()), tuple(map(float, heights))),)
    title = "the better of S1 and S2, 32 GPUs, m = s = 4"
    return (*by_schedule, Chart(title, "speed-up over the baseline", "layers", histogram))
