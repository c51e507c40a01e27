"""Parm's figures beside ours: the table of speed-ups, the order of S1 and S2, Algorithm 1, the histogram, the shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moesaic.plan.algorithm1 import RULES, operations
from moesaic_lab.reproduce.parm import COLUMNS, MODELS, SIZES, ParmTimes, Testbed, mean_speedup, saa_gain, shares
from moesaic_lab.reproduce.records import Book, Chart, PaperFinding, Reproduction, Row

RULE_WORDS = {"parm_printed": "published", "parm": "corrected"}
"""Of the keys of `RULES`."""
ASSUMPTIONS = (
    "E is W / s, one expert per place of EP, as the end-to-end runs have it; k is 1 or 2, fitted; fp32; F and D are the "
    "printed widths times s",
    "the published start-up and rate of an all-gather are those of a ring of two ranks, start-up paid per message",
    "a speed-up is of forward and backward pass together; the mean is over all layers that fit into memory",
    "products reach 65 TFLOP/s on an RTX 4090",
    "Table V: four sequences per tensor group, of 512 tokens (BERT) and 1,024 (GPT-2), f 1.2, m = s = 4, an MoE layer in every "
    "block; attention is computed whole on each GPU's share, gradients are not exchanged; Parm takes the faster of S1 and S2",
    "SAA against all-to-all and all-gather one after the other: of the whole layer under S2, mean over the sweep; the sentence "
    "prints 1.09 % and 1.12 % and compares SAA with itself: read as ratios",
)
UNEXPLAINED = (
    "runnable configurations: ours drop far fewer for memory; DeepSpeed's dispatch masks, (tokens, experts, capacity) in fp32, "
    "grow with the square of the tokens and would explain a half",
    "the widest share of communication: encoding and gating, which a simulator of bytes takes as cheap, would have to be "
    "overlapped or left out of the total",
)


@dataclass(frozen=True)
class ParmChoices:
    """What one rule picked in a cell's layers."""

    speedup: float
    """Mean over layers of the schedule that it picked."""
    right: int
    """Layers in which it picked the faster one."""
    regret: float
    """Mean time of what it picked over that of the faster one, minus 1."""
    of: int
    """Layers."""


def reproduce(book: Book) -> Reproduction:
    """Simulate the sweep and set it beside the paper's figures."""
    beds = {name: Testbed(book, name) for name in ("a", "b")}
    cells = {(name, world, m, s): beds[name].cell(world, m, s) for name, world in COLUMNS for m, s in SIZES}
    chosen = {key: {rule: _choose(beds[key[0]], key, times, rule) for rule in RULES} for key, times in cells.items()}
    found: dict[str, float] = {}
    for (name, world, m, s), times in cells.items():
        case = f"{name}{world}.m{m}s{s}"
        for schedule in ("s1", "s2"):
            found[f"parm.{schedule}.{case}"] = mean_speedup(times, schedule)
        found[f"parm.chosen.{case}"] = chosen[name, world, m, s]["parm"].speedup
    wide = [shares(times) for (name, world, *_), times in cells.items() if world == 32]
    found["parm.share.least"] = min(least for least, _ in wide)
    found["parm.share.most"] = max(most for _, most in wide)
    best = cells["b", 32, 4, 4]
    above = sum(each.count for each in best if max(each.speedup("s1"), each.speedup("s2")) > 4)
    found["parm.histogram.above4"] = 100 * above / sum(each.count for each in best)
    found["parm.sweep.runnable"] = float(sum(each.count for times in cells.values() for each in times))
    for name, world in (("a", 8), ("b", 32)):
        of_bed = [each for (bed, *_), times in cells.items() if bed == name for each in times]
        found[f"parm.saa.{name}"] = saa_gain(of_bed)
        for model in MODELS:
            steps = beds[name].steps_ms(model, world)
            found[f"parm.step.{model}.{name}.baseline"] = steps["baseline"]
            found[f"parm.step.{model}.{name}.parm"] = min(steps["s1"], steps["s2"])
    rows = book.rows(found, {"parm.sweep.runnable": "16 of the 27 cells of 162 layers are in the table"})
    return Reproduction(
        paper="parm",
        title="Parm: speed-ups of S1, S2 and the choice between them over DeepSpeed-MoE",
        rows=rows,
        constants=(*book.of("parm"), book.constants["schemoe.nic"]),
        findings=(*_order(book, rows), *_algorithm(chosen), *_by_cell(cells)),
        assumptions=ASSUMPTIONS,
        unexplained=UNEXPLAINED,
        charts=_charts(rows, best),
    )


def order(book: Book, rows: tuple[Row, ...]) -> tuple[int, int]:
    """Return in how many cells S1 and S2 come in the paper's order, and of how many cells it is known."""
    ours = {row.cell.name: row.ours for row in rows}
    right, known = 0, 0
    for name, world in COLUMNS:
        for m, s in SIZES:
            one, two = (f"parm.{schedule}.{name}{world}.m{m}s{s}" for schedule in ("s1", "s2"))
            first, second = book.cells[one].value, book.cells[two].value
            if first is not None and second is not None:
                known += 1
                right += (ours[one] > ours[two]) == (first > second)
    return right, known


def _choose(bed: Testbed, key: tuple[str, int, int, int], times: list[ParmTimes], rule: str) -> ParmChoices:
    _, world, m, s = key
    known = operations(bed.simulator, bed.grid(world, m, s), bed.top_k)
    right, regret, speedups = 0, 0.0, 0.0
    for each in times:
        picked = RULES[rule](known, each.workload, m, s)
        best = min(("s1", "s2"), key=lambda schedule: each.seconds[schedule])
        right += each.count * (picked == best)
        regret += each.count * (each.seconds[picked] / each.seconds[best] - 1)
        speedups += each.count * each.speedup(picked)
    total = sum(each.count for each in times)
    return ParmChoices(speedups / total, right, regret / total, total)


def _order(book: Book, rows: tuple[Row, ...]) -> tuple[PaperFinding, ...]:
    right, known = order(book, rows)
    return (
        PaperFinding(
            statement="S1 and S2 come in the order of Table IV (target: three quarters of the cells)",
            ours=f"{right} of {known} cells",
            holds=right >= 0.75 * known,
        ),
    )


def _algorithm(chosen: Mapping[tuple[str, int, int, int], Mapping[str, ParmChoices]]) -> tuple[PaperFinding, ...]:
    found = []
    for rule in RULES:
        each = [by_rule[rule] for by_rule in chosen.values()]
        right, total = sum(c.right for c in each), sum(c.of for c in each)
        lost = sum(c.regret * c.of for c in each) / total
        found.append(
            PaperFinding(
                statement=f"Algorithm 1 as {RULE_WORDS[rule]} picks the faster schedule",
                ours=f"{right} of {total} layers ({right / total:.0%}); its picks take {lost:.1%} longer than the best",
            )
        )
    return tuple(found)


def _by_cell(cells: Mapping[tuple[str, int, int, int], list[ParmTimes]]) -> tuple[PaperFinding, ...]:
    one_sided = 0
    for times in cells.values():
        faster = {min(("s1", "s2"), key=lambda schedule: each.seconds[schedule]) for each in times}
        one_sided += len(faster) == 1
    return (
        PaperFinding(
            statement="one of S1 and S2 is faster in every layer of a cell, as Parm's choice, constant in 13 of 16, suggests",
            ours=f"{one_sided} of {len(cells)} cells",
        ),
    )


def _charts(rows: tuple[Row, ...], best: list[ParmTimes]) -> tuple[Chart, ...]:
    charts = []
    cases = tuple(f"{name}{world}.m{m}s{s}" for name, world in COLUMNS for m, s in SIZES)
    labels = tuple(case.replace(".", "\n") for case in cases)
    for schedule in ("s1", "s2", "chosen"):
        of = {row.cell.name.removeprefix(f"parm.{schedule}."): row for row in rows}
        paper = [(n, of[case].cell.value) for n, case in enumerate(cases)]
        known = [(float(n), value) for n, value in paper if value is not None]
        charts.append(
            Chart(
                title=f"{schedule} over the baseline", x_title="testbed, GPUs, m and s", y_title="speed-up",
                categories=labels,
                series=(
                    ("paper", tuple(x for x, _ in known), tuple(y for _, y in known)),
                    ("simulated", tuple(float(n) for n in range(len(cases))), tuple(of[case].ours for case in cases)),
                ),
            )
        )  # fmt: skip
    values = [max(each.speedup("s1"), each.speedup("s2")) for each in best for _ in range(each.count)]
    heights, edges = np.histogram(values, bins=np.arange(2.0, 8.25, 0.25))
    charts.append(
        Chart(
            title="the better of S1 and S2, 32 GPUs, m = s = 4", x_title="speed-up over the baseline", y_title="layers",
            series=(("simulated", tuple(float(edge) for edge in edges[:-1]), tuple(float(h) for h in heights)),),
        )
    )  # fmt: skip
    return tuple(charts)
