"""`moesaic bench ledger`: compare published measurements with predictions, as claims, rows and the page docs/ledger.md.

A figure to which a preset's numbers were fitted is marked and does not count as evidence. Everything is computed in seconds
from committed data, without torch. The rows of the emulated clusters and of the papers come from the results that their own
commands committed.

    moesaic bench ledger --page docs/ledger.md --json benchmarks/results/ledger.json
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from moesaic.planner.cluster import presets, read_cluster
from moesaic_lab.benchmark import Benchmark, PagedOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.ledger import parts
from moesaic_lab.ledger.held_out import (
    coverage,
    held_out_ratios,
    inside,
    ordered_right,
    published_steps,
)
from moesaic_lab.ledger.records import SOURCES, Entry, Kind, counted, median_error, worst_error
from moesaic_lab.ledger.trace import trace
from moesaic_lab.tables import markdown_table

SHOWN = 40
"""The most rows per kind that the page prints, evenly spaced from the smallest to the largest ratio."""
TARGETS: tuple[tuple[str, str, float], ...] = (
    ("layers", "median", 0.10), ("layers", "worst", 0.25), ("collectives", "median", 0.10), ("steps", "median", 0.08),
    ("steps", "worst", 0.30), ("memory", "median", 0.10), ("own stages", "median", 0.05), ("own stages", "worst", 0.10),
)  # fmt: skip
"""Claims on errors: (kind, median or worst, largest allowed error)."""
TRACE_TARGETS = (("ledger.trace_order", 0.02), ("ledger.trace_predicted", 0.15))
"""Claims on the two entries of a trace, if one is given: (name, largest allowed error)."""


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(PagedOptions):
    """Options of `moesaic bench ledger`."""

    trace: str | None = None
    """Also compare the simulator with this extract of DeepSeek's training trace, which is not part of the repository
    (`ledger/trace.py` describes the format)."""


def entries() -> Iterator[Entry]:
    """Yield all entries of the ledger, without those of a trace."""
    for each in (
        parts.nccl, parts.deepep, parts.deepep_across, parts.products, parts.narrow_products, parts.expert_stages,
        parts.grouped_products, parts.own_products, parts.own_stages,
        parts.own_layers, parts.layers, parts.laer,
        parts.steps, parts.memory, parts.papers, parts.beds,
    ):  # fmt: skip
        yield from each()


def measure(options: LedgerOptions, cases: None, told: Told) -> list[Entry]:
    """Return all entries with their predictions, including those of the trace if one is given."""
    return list(entries()) + ([] if options.trace is None else trace(Path(options.trace)))


def claims(ledger: list[Entry]) -> list[Claim]:
    """Return claims on the median and worst errors of the entries that count as evidence, and on steps of unseen systems."""
    of = {"median": median_error, "worst": worst_error}
    claimed = [
        Claim(
            name=f"ledger.{_word(k)}_{how}", value=of[how](ledger, k), unit="1", target=t, op="<="
        )
        for k, how, t in TARGETS
    ]
    for each, (name, target) in zip(
        (each for each in ledger if each.kind == "trace"), TRACE_TARGETS
    ):
        claimed.append(Claim(name=name, value=each.error, unit="1", target=target, op="<="))
    claimed += step_claims()
    return sorted(claimed, key=lambda claim: claim.name)


def step_claims() -> list[Claim]:
    """Return claims on published steps of systems that are left out of the fit, on their interval, and on their order."""
    steps = published_steps()
    errors = [abs(1 / ratio - 1) for ratio in held_out_ratios(steps)]
    return [
        Claim(
            name="ledger.steps_held_out_median",
            value=statistics.median(errors),
            unit="1",
            target=0.1,
            op="<=",
        ),
        Claim(
            name="ledger.steps_coverage_off",
            value=abs(coverage(steps) - 0.5),
            unit="1",
            target=0.1,
            op="<=",
        ),
        Claim(name="ledger.steps_order", value=ordered_right(steps), unit="1", target=0.8, op=">="),
    ]


def _steps_inside() -> str:
    """Return the count of published steps inside their interval, in words."""
    single = list(itertools.chain(*inside(published_steps()).values()))
    return f"{sum(single)} of {len(single)}"


def _word(kind: str) -> str:
    """Return a kind as a part of a claim's name."""
    return "h200_stage" if kind == "own stages" else kind


def rows(ledger: list[Entry]) -> list[dict[str, Any]]:
    """Return a row per kind, with errors and ratios over the entries that count as evidence."""
    lines = []
    for kind in get_args(Kind):
        evidence = counted(ledger, kind)
        if not evidence:
            continue
        ratios = sorted(each.ratio for each in evidence)
        lines.append({
            "kind": kind, "figures": len(evidence), "fitted": sum(each.kind == kind for each in ledger) - len(evidence),
            "median_error": median_error(ledger, kind), "worst_error": worst_error(ledger, kind),
            "median_ratio": statistics.median(ratios), "quartiles": _quartiles(ratios),
        })  # fmt: skip
    return lines


def _quartiles(ratios: list[float]) -> list[float]:
    """Return the first and the third quartile of ratios in ascending order."""
    return [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]


def page(ledger: list[Entry]) -> str:
    """Return the text of docs/ledger.md: introduction, errors, measured parts of presets, and all figures except a trace's."""
    ledger = [each for each in ledger if each.kind != "trace"]
    of_kinds = [
        [row["kind"], str(row["figures"]), str(row["fitted"]), f"{row['median_error']:.3f}", f"{row['worst_error']:.2f}",
         f"{row['median_ratio']:.2f}", "{:.2f} and {:.2f}".format(*row["quartiles"])] for row in rows(ledger)
    ]  # fmt: skip
    of_claims = [
        [
            f"`{claim.name}`",
            f"{claim.value:.3f}",
            f"{claim.op} {claim.target:g}",
            "yes" if claim.holds else "**no**",
        ]
        for claim in claims(ledger)
    ]
    names = [
        "kind", "figures", "used for a fit", "median error", "worst", "median ratio", "middle half of the ratios",
    ]  # fmt: skip
    text = [
        "# Ledger of errors: predictions and measurements by others", INTRODUCTION.format(inside=_steps_inside()), "## By kind",
        markdown_table([names, *of_kinds]), markdown_table([["claim", "value", "target", "holds"], *of_claims]),
        MISSES,
        "## Measured numbers of presets",
        markdown_table([["preset", "measured", "the rest"], *([
            f"`{name}`", "; ".join(read_cluster(name).measured) or "nothing by us", read_cluster(name).source,
        ] for name in presets())]),
    ]  # fmt: skip
    text += [
        _kind(ledger, kind) for kind in get_args(Kind) if any(each.kind == kind for each in ledger)
    ]
    text += ["## Sources", "\n".join(f"- `{name}`: {what}." for name, what in SOURCES.items())]
    return "\n\n".join(text) + "\n"


INTRODUCTION = """\
This page compares predictions of the planner with figures that others measured. It tells you how far you can trust a
prediction, by kind of figure. Rows marked *fit* were used to fit a preset and are not counted. To the steps one term with two
numbers was fitted, equal for all systems (`LAUNCHES` in `planner/step.py`). The claims `steps_held_out_median`,
`steps_coverage_off` (how far the share of steps inside the interval is from one half; systems have equal weight, as in the fit)
and `steps_order` (pairs of layouts of a model on a machine whose speeds differ by more than 3 %) predict every system by a fit
and an interval without it (`python -m moesaic_lab.ledger.held_out`). Counted one by one, {inside} steps lie inside. A
ratio is predicted over measured time (for memory, bytes); an error is its distance from 1.
`lab/moesaic_lab/ledger/data/README.md` lists the data and their licences.

`moesaic bench ledger --page docs/ledger.md` writes this page; do not edit it."""
MISSES = """Known errors and their causes:

- Products of few rows and narrow matrices: the model has one curve by rows and ignores how the tiles of a product fill
  a device.
- Expert stages on L40S are predicted twice as fast as measured. The only framework measured there runs them at half the rate of
  plain products, which the preset predicts correctly.
- Our own kernels on H200: products and traffic are fitted to nine layers, and the three that are 1,536 wide count. Of the nine,
  fine experts 4,096 wide are predicted up to 7 % too slow, wide experts as much too fast. A layer is its measured expert stage
  plus the predicted router, whose small kernels take 16 to 36 % of a layer longer in the three forward passes that count.
- DeepEP with one or two experts per token is slower than the links: its kernels have a cost per token, which the preset lacks.
- A ring of eight inside a node is 5 to 10 % faster than an all-to-all of the same size. A ring of two is 15 % slower
  than an all-to-all of two, although the messages are the same. Several senders to one receiver do not explain this: a
  share of the rate for them, fitted to the marked rows, is 1. All-reduces of a few megabytes in the switch of eight
  GPUs are slower than its two passes.
- Steps: each row with an error above 16 % states the likely cause. Layouts are those of recipes published with the
  figures (performance recipes of Megatron-Bridge, benchmark recipes of NeMo Automodel, launch scripts of SimuMax, the
  named threads). The source of each framework shows the parts that it runs in eager PyTorch and its attention kernels
  (`stepwise` and `score_kernel` of a layout, `STEPWISE` in `planner/step.py`). On B200 12 of 17 steps are by SimuMax, whose
  system file the preset is taken from too. Large pipelines of NeMo Automodel are 18 to 30 % too fast. LAER's are excluded,
  since they have no published layout. So are Megatron-Bridge's releases before 26.04, which ran slower on the same machines
  than later ones.
- Float8 products of few rows with a scale per block are several times slower than predicted.
- DeepSeek's trace has no licence that allows a copy in this repository. `moesaic bench ledger --trace FILE` compares
  your copy with the simulator."""


def _kind(ledger: list[Entry], kind: str) -> str:
    """Return the section with a kind's figures; of more than `SHOWN`, an evenly spaced selection by ratio."""
    ordered = sorted((each for each in ledger if each.kind == kind), key=lambda each: each.ratio)
    step = max(1, -(-len(ordered) // SHOWN))
    selected = [
        each for place, each in enumerate(ordered) if place % step == 0 or place == len(ordered) - 1
    ]
    lines = [["what", "machine", "measured", "predicted", "unit", "ratio", "source", ""]]
    for each in selected:
        source = each.source if each.source not in SOURCES else f"`{each.source}`"
        lines.append([
            each.what, each.machine, f"{each.measured:.4g}", f"{each.predicted:.4g}", each.unit, f"{each.ratio:.2f}", source,
            "fit" if each.fitted else each.why,
        ])  # fmt: skip
    shown = "" if step == 1 else f", {len(selected)} of them shown, by ratio"
    figures = f"<details><summary>{len(ordered)} figures{shown}</summary>\n\n{markdown_table(lines)}\n\n</details>"
    return f"## {kind.capitalize()}\n\n{figures}"


BENCHMARK = Benchmark(
    name="ledger", description="Predict published measurements, and report the errors.", options=LedgerOptions,
    notes=notes_of(__doc__), cases=lambda options: None, measure=measure, rows=rows, claims=claims, page=page,
    columns=(Shown(title="predicted over measured"),), packages=("numpy",),
)  # fmt: skip
