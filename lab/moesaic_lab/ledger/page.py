"""`moesaic bench ledger`: compare published measurements with predictions, as claims, rows and the
page docs/ledger.md.

A figure to which a preset's numbers were fitted is marked and does not count as evidence.
Everything is computed in seconds from committed data, without torch. The rows of the emulated
clusters and of the papers come from the results that their own commands committed.

    moesaic bench ledger --page docs/ledger.md --json benchmarks/results/ledger.json
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from moesaic.planner.cluster import presets, read_cluster
from moesaic_lab.benchmark import Benchmark, PagedOptions, Shown, Told, notes_of
from moesaic_lab.claims import RESULTS, Claim
from moesaic_lab.ledger import parts
from moesaic_lab.ledger.held_out import (
    CLASSES,
    NARROW_ENOUGH,
    PublishedStep,
    coverage,
    held_out_ratios,
    inside,
    ordered_right,
    published_steps,
)
from moesaic_lab.ledger.records import SOURCES, Entry, Kind, counted, median_error, worst_error
from moesaic_lab.ledger.trace import trace
from moesaic_lab.measured import places
from moesaic_lab.tables import CLAIM_COLUMNS, markdown_table

SHOWN = 40
"""The most rows per kind that the page prints, evenly spaced from the smallest to the largest
ratio."""
TARGETS: tuple[tuple[str, str, float], ...] = (
    ("layers", "median", 0.10),
    ("layers", "worst", 0.25),
    ("collectives", "median", 0.10),
    ("steps", "median", 0.08),
    ("steps", "worst", 0.30),
    ("memory", "median", 0.10),
    ("own stages", "median", 0.05),
    ("own stages", "worst", 0.10),
)
"""Claims on errors: (kind, median or worst, largest allowed error)."""
TRACE_TARGETS = (("ledger.trace_order", 0.02), ("ledger.trace_predicted", 0.15))
"""Claims on the two entries of a trace, if one is given: (name, largest allowed error)."""


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(PagedOptions):
    """Options of `moesaic bench ledger`."""

    trace: str | None = None
    """Also compare the simulator with this extract of DeepSeek's training trace, which is not part
    of the repository (`ledger/trace.py` describes the format)."""


def entries() -> Iterator[Entry]:
    """Yield all entries of the ledger, without those of a trace."""
    for each in (
        parts.nccl,
        parts.deepep,
        parts.deepep_across,
        parts.products,
        parts.narrow_products,
        parts.expert_stages,
        parts.grouped_products,
        parts.own_products,
        parts.own_stages,
        parts.own_layers,
        parts.layers,
        parts.laer,
        parts.steps,
        parts.memory,
        parts.papers,
        parts.beds,
    ):
        yield from each()


def measure(options: LedgerOptions, cases: None, told: Told) -> list[Entry]:
    """Return all entries with their predictions, including those of the trace if one is given."""
    ledger = list(entries())
    if options.trace is not None:
        ledger += trace(Path(options.trace))
    return ledger


def claims(ledger: list[Entry]) -> list[Claim]:
    """Return claims on the median and worst errors of the entries that count as evidence, and on
    steps of unseen systems."""
    error_of = {"median": median_error, "worst": worst_error}
    claimed = []
    for kind, how, target in TARGETS:
        error = error_of[how](ledger, kind)
        name = f"ledger.{_word(kind)}_{how}"
        claimed.append(Claim(name=name, value=error, unit="1", target=target, op="<="))
    traces = [entry for entry in ledger if entry.kind == "trace"]
    for entry, (name, target) in zip(traces, TRACE_TARGETS):
        claimed.append(Claim(name=name, value=entry.error, unit="1", target=target, op="<="))
    claimed += step_claims()
    return sorted(claimed, key=lambda claim: claim.name)


def step_claims() -> list[Claim]:
    """Return claims on published steps of systems that are left out of the fit, on their interval,
    and on their order."""
    steps = published_steps()
    # errors of the time: ratios are of published to predicted speed
    errors = [abs(1 / ratio - 1) for ratio in held_out_ratios(steps)]
    orders = ordered_right(steps)
    return [
        Claim(
            name="ledger.steps_held_out_median",
            value=statistics.median(errors),
            unit="1",
            target=0.09,
            op="<=",
        ),
        *(coverage_claim(steps, kind) for kind in ("", *CLASSES)),
        Claim(
            name="ledger.steps_order",
            value=statistics.mean(orders.values()),
            unit="1",
            target=0.8,
            op=">=",
        ),
    ]


def coverage_claim(steps: Sequence[PublishedStep], kind: str) -> Claim:
    """Return the claim on how far the coverage of a class of machines ("" for all) is from one
    half; without a value if there are too few sources to tell."""
    found = coverage(steps, kind)
    reason = (
        f"not enough sources: {found.sources} give {found.share:.2f}, and their binomial interval "
        f"is {found.low:.2f} to {found.high:.2f}, more than {NARROW_ENOUGH} to a side"
    )
    return Claim(
        name=f"ledger.steps_coverage_off_{kind}" if kind else "ledger.steps_coverage_off",
        value=abs(found.share - 0.5) if found.is_known else None,
        unit="1",
        target=0.1,
        op="<=",
        reason="" if found.is_known else reason,
    )


def _steps_inside() -> str:
    """Return the count of published steps inside their interval, in words."""
    single = list(itertools.chain(*inside(published_steps()).values()))
    return f"{sum(single)} of {len(single)}"


def _orders() -> str:
    """Return the share of layouts in the right order by source, in words."""
    found = ordered_right(published_steps())
    return ", ".join(f"{share:.2f} ({source})" for source, share in found.items())


def _word(kind: str) -> str:
    """Return a kind as a part of a claim's name."""
    return "h200_stage" if kind == "own stages" else kind


def rows(ledger: list[Entry]) -> list[dict[str, Any]]:
    """Return a row per kind, with errors and ratios over the entries that count as evidence."""
    table = []
    for kind in get_args(Kind):
        evidence = counted(ledger, kind)
        if not evidence:
            continue
        num_entries = sum(each.kind == kind for each in ledger)
        ratios = sorted(each.ratio for each in evidence)
        table.append(
            {
                "kind": kind,
                "figures": len(evidence),
                "fitted": num_entries - len(evidence),
                "sources": len({each.system or each.source for each in evidence}),
                "median_error": median_error(ledger, kind),
                "worst_error": worst_error(ledger, kind),
                "median_ratio": statistics.median(ratios),
                "quartiles": _quartiles(ratios),
            }
        )
    return table


def _quartiles(ratios: list[float]) -> list[float]:
    """Return the first and the third quartile of ratios in ascending order."""
    return [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]


def page(ledger: list[Entry]) -> str:
    """Return the text of docs/ledger.md: introduction, errors, measured parts of presets, and all
    figures except a trace's."""
    ledger = [each for each in ledger if each.kind != "trace"]
    sections = [
        "# Ledger of errors: predictions and measurements by others",
        INTRODUCTION.format(inside=_steps_inside(), orders=_orders()),
        "## By kind",
        markdown_table(_of_kinds(ledger)),
        markdown_table(_of_claims(ledger)),
        MISSES,
        "## Measured numbers of presets",
        markdown_table(_of_presets()),
    ]
    kinds = {each.kind for each in ledger}
    sections += [_kind(ledger, kind) for kind in get_args(Kind) if kind in kinds]
    beds = json.loads((RESULTS / "model.json").read_text(encoding="utf-8"))
    sources = {**SOURCES, "beds": f"{SOURCES['beds']}, measured {' and '.join(places(beds))}"}
    sections += ["## Sources", "\n".join(f"- `{name}`: {what}." for name, what in sources.items())]
    return "\n\n".join(sections) + "\n"


def _of_kinds(ledger: list[Entry]) -> list[list[str]]:
    """Return the table of errors by kind of figure."""
    names = [
        "kind",
        "figures",
        "figures used for a fit",
        "sources",
        "median error",
        "worst error",
        "median ratio",
        "middle half of the ratios",
    ]
    of_kinds = [
        [
            row["kind"],
            str(row["figures"]),
            str(row["fitted"]),
            str(row["sources"]),
            f"{row['median_error']:.3f}",
            f"{row['worst_error']:.2f}",
            f"{row['median_ratio']:.2f}",
            "{:.2f} and {:.2f}".format(*row["quartiles"]),
        ]
        for row in rows(ledger)
    ]
    return [names, *of_kinds]


def _of_claims(ledger: list[Entry]) -> list[list[str]]:
    """Return the table of claims with their values and targets."""
    of_claims = [
        [
            f"`{claim.name}`",
            claim.reason if claim.value is None else f"{claim.value:.3f}",
            f"{claim.op} {claim.target:g}",
            "yes" if claim.holds else "**no**",
        ]
        for claim in claims(ledger)
    ]
    return [[*CLAIM_COLUMNS], *of_claims]


def _of_presets() -> list[list[str]]:
    """Return the table of what was measured of each preset of a cluster."""
    table = [["preset", "measured", "the rest"]]
    for name in presets():
        cluster = read_cluster(name)
        table.append([f"`{name}`", "; ".join(cluster.measured) or "nothing by us", cluster.source])
    return table


INTRODUCTION = """\
This page compares predictions of the planner with figures that others measured. It tells you how far you can trust a
prediction, by kind of figure. Rows marked *fit* were used to fit a preset and are not counted. To the steps one term with two
numbers was fitted, equal for all systems (`LAUNCHES` in `planner/step.py`), and one factor of the presets of NVL72 machines. The
claims `steps_held_out_median`, `steps_coverage_off` and `steps_order` predict every system by a fit and an interval without it
(`python -m moesaic_lab.ledger.held_out`). The order is that of different layouts of one model on one machine with the same number
of GPUs, length of sequences and precision, whose speeds differ by more than 3 %; every source weighs the same: {orders}. The
coverage is the share of steps inside the interval, which is made to hold one half; it is a claim only if its binomial interval, with
a source as one trial, is at most 0.15 to a side. Counted one by one, {inside} steps lie inside. A ratio is predicted over
measured time (for memory, bytes); an error is its distance from 1; *sources* are systems for steps and memory.
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
  (`stepwise` and `score_kernel` of a layout, `STEPWISE` in `planner/step.py`). On B200 12 of 20 steps are by SimuMax, whose
  system file the preset is taken from too; the steps on NVL72 are all by Megatron-Bridge, and its presets were fitted to them, so
  they say nothing of other systems there. LAER's steps are excluded, since they have no published layout.
- Float8 products of few rows with a scale per block are several times slower than predicted.
- DeepSeek's trace has no licence that allows a copy in this repository. `moesaic bench ledger --trace FILE` compares
  your copy with the simulator."""


def _kind(ledger: list[Entry], kind: str) -> str:
    """Return the section with a kind's figures; of more than `SHOWN`, an evenly spaced selection by
    ratio."""
    of_kind = [each for each in ledger if each.kind == kind]
    ordered = sorted(of_kind, key=lambda each: each.ratio)
    last = len(ordered) - 1
    step = max(1, -(-len(ordered) // SHOWN))
    selected = [each for at, each in enumerate(ordered) if at % step == 0 or at == last]
    lines = [["what", "machine", "measured", "predicted", "unit", "ratio", "source", ""]]
    for each in selected:
        source = f"`{each.source}`" if each.source in SOURCES else each.source
        lines.append(
            [
                each.what,
                each.machine,
                f"{each.measured:.4g}",
                f"{each.predicted:.4g}",
                each.unit,
                f"{each.ratio:.2f}",
                source,
                "fit" if each.fitted else each.why,
            ]
        )
    shown = "" if step == 1 else f", {len(selected)} of them shown, by ratio"
    figures = (
        f"<details markdown='1'><summary>{len(ordered)} "
        f"figures{shown}</summary>\n\n{markdown_table(lines)}\n\n</details>"
    )
    return f"## {kind.capitalize()}\n\n{figures}"


BENCHMARK = Benchmark(
    name="ledger",
    description="Predict published measurements, and report the errors.",
    options=LedgerOptions,
    notes=notes_of(__doc__),
    cases=lambda options: None,
    measure=measure,
    rows=rows,
    claims=claims,
    page=page,
    columns=(Shown(title="predicted over measured"),),
    packages=("numpy",),
)
