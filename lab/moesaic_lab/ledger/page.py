"""`moesaic bench ledger`: compare published measurements with predictions, as claims, rows and the page docs/ledger.md.

A figure to which a preset's numbers were fitted is marked and does not count as evidence. Everything is computed in seconds
from committed data, without torch. The rows of the emulated clusters and of the papers come from the results that their own
commands committed.

    moesaic bench ledger --page docs/ledger.md --json benchmarks/results/ledger.json
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from moesaic.cost.cluster import presets, read_cluster
from moesaic_lab.benchmark import Benchmark, PagedOptions, Shown, Told, notes_of
from moesaic_lab.claims import Claim
from moesaic_lab.ledger import parts
from moesaic_lab.ledger.records import SOURCES, Entry, Kind, counted, median_error, worst_error
from moesaic_lab.ledger.trace import trace
from moesaic_lab.tables import markdown_table

SHOWN = 40
"""The most rows per kind that the page prints, evenly spaced from the smallest to the largest ratio."""
TARGETS: tuple[tuple[str, str, float], ...] = (
    ("layers", "median", 0.10), ("layers", "worst", 0.25), ("collectives", "median", 0.10), ("steps", "median", 0.15),
    ("steps", "worst", 0.35), ("memory", "median", 0.10),
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
        parts.grouped_products, parts.layers, parts.laer,
        parts.steps, parts.memory, parts.papers, parts.beds,
    ):  # fmt: skip
        yield from each()


def measure(options: LedgerOptions, cases: None, told: Told) -> list[Entry]:
    """Return all entries with their predictions, including those of the trace if one is given."""
    return list(entries()) + ([] if options.trace is None else trace(Path(options.trace)))


def claims(found: list[Entry]) -> list[Claim]:
    """Return claims on the median and worst errors of the entries to which nothing was fitted."""
    of = {"median": median_error, "worst": worst_error}
    made = [
        Claim(name=f"ledger.{k}_{how}", value=of[how](found, k), unit="1", target=t, op="<=") for k, how, t in TARGETS
    ]
    for each, (name, target) in zip((each for each in found if each.kind == "trace"), TRACE_TARGETS):
        made.append(Claim(name=name, value=each.error, unit="1", target=target, op="<="))
    return sorted(made, key=lambda claim: claim.name)


def rows(found: list[Entry]) -> list[dict[str, Any]]:
    """Return a row per kind, with errors and ratios over the entries that count as evidence."""
    lines = []
    for kind in get_args(Kind):
        evidence = counted(found, kind)
        if not evidence:
            continue
        ratios = sorted(each.ratio for each in evidence)
        lines.append({
            "kind": kind, "figures": len(evidence), "fitted": sum(each.kind == kind for each in found) - len(evidence),
            "median_error": median_error(found, kind), "worst_error": worst_error(found, kind),
            "median_ratio": statistics.median(ratios), "quartiles": _quartiles(ratios),
        })  # fmt: skip
    return lines


def _quartiles(ratios: list[float]) -> list[float]:
    """Return the first and the third quartile of ratios in ascending order."""
    return [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]


def page(found: list[Entry]) -> str:
    """Return the text of docs/ledger.md: introduction, errors, measured parts of presets, and all figures except a trace's."""
    found = [each for each in found if each.kind != "trace"]
    of_kinds = [
        [row["kind"], str(row["figures"]), str(row["fitted"]), f"{row['median_error']:.3f}", f"{row['worst_error']:.2f}",
         f"{row['median_ratio']:.2f}", "{:.2f} and {:.2f}".format(*row["quartiles"])] for row in rows(found)
    ]  # fmt: skip
    of_claims = [
        [f"`{claim.name}`", f"{claim.value:.3f}", f"<= {claim.target:g}", "yes" if claim.holds else "**no**"]
        for claim in claims(found)
    ]
    names = [
        "kind", "figures", "used for a fit", "median error", "worst", "median ratio", "half of the ratios lie between",
    ]  # fmt: skip
    text = [
        "# Ledger of errors: what others measured beside what Moesaic predicts", INTRODUCTION, "## By kind",
        markdown_table([names, *of_kinds]), markdown_table([["claim", "value", "target", "holds"], *of_claims]),
        MISSES,
        "## What of a preset was measured",
        markdown_table([["preset", "measured", "the rest"], *([
            f"`{name}`", "; ".join(read_cluster(name).measured) or "nothing of it by us", read_cluster(name).source,
        ] for name in presets())]),
    ]  # fmt: skip
    text += [_kind(found, kind) for kind in get_args(Kind) if any(each.kind == kind for each in found)]
    text += ["## Sources", "\n".join(f"- `{name}`: {what}." for name, what in SOURCES.items())]
    return "\n\n".join(text) + "\n"


INTRODUCTION = """Made by `moesaic bench ledger --page docs/ledger.md`; do not edit it. Every row is a figure that somebody
measured and the prediction of it, which was not used for a fit; rows that a preset's numbers rest on are marked *fit* and count
nowhere. A ratio is predicted over measured, of times (of memory, bytes); an error is how far it is from 1. The data and their
licences are in `lab/moesaic_lab/ledger/data/README.md`."""
MISSES = """What is off, and why as far as we know:

- Products of few rows and narrow matrices: one curve by rows knows nothing of the tiles that fill a device.
- Expert stages on L40S come out twice as fast as measured: the only framework measured there runs them at half the rate of
  plain products, on which the preset's rate agrees.
- DeepEP with one or two experts per token is slower than the links: its kernels have a cost per token that the preset has not.
- A ring of eight inside a node is 5 to 10 % faster than an all-to-all of as many bytes, a ring of two 15 % slower than one of
  two, whose messages are the same. So many senders to one receiver are not the reason: a share of the rate for them, fitted to
  the marked rows, is 1. All-reduces of a few megabytes in eight GPUs' switch are slower than its two passes.
- Of steps, every row that is off by more than 16 % says why, as far as anybody knows. Layouts are those of the recipes that are
  published beside the figures (performance recipes of Megatron-Bridge, benchmark recipes of NeMo Automodel, launch scripts of
  SimuMax, the threads named). What a framework runs step by step in eager PyTorch and which kernels compute its attention are
  read in its source (`stepwise` and `score_kernel` of a layout, `cost/step_model.py`); what few kernels cost that are counted
  nowhere makes most rows 5 to 18 % too fast. LAER's steps have no published layout, and Megatron-Bridge's releases
  before 26.04 ran slower on the same machines than those after them; neither is here.
- Float8 products of few rows with a scale per block are several times slower than the preset says.
- DeepSeek's trace has no licence to be committed here: `moesaic bench ledger --trace FILE` holds a copy of it against the
  simulator."""


def _kind(found: list[Entry], kind: str) -> str:
    """Return the section with a kind's figures; of more than `SHOWN`, an evenly spaced selection by ratio."""
    of = sorted((each for each in found if each.kind == kind), key=lambda each: each.ratio)
    step = max(1, -(-len(of) // SHOWN))
    some = [each for place, each in enumerate(of) if place % step == 0 or place == len(of) - 1]
    lines = [["what", "machine", "measured", "predicted", "unit", "ratio", "source", ""]]
    for each in some:
        source = each.source if each.source not in SOURCES else f"`{each.source}`"
        lines.append([
            each.what, each.machine, f"{each.measured:.4g}", f"{each.predicted:.4g}", each.unit, f"{each.ratio:.2f}", source,
            "fit" if each.fitted else each.why,
        ])  # fmt: skip
    shown = "" if step == 1 else f", {len(some)} of them from the fastest prediction to the slowest"
    figures = f"<details><summary>{len(of)} figures{shown}</summary>\n\n{markdown_table(lines)}\n\n</details>"
    return f"## {kind.capitalize()}\n\n{figures}"


BENCHMARK = Benchmark(
    name="ledger", description="Predict what others measured, and say how far off that is.", options=LedgerOptions,
    notes=notes_of(__doc__), cases=lambda options: None, measure=measure, rows=rows, claims=claims, page=page,
    columns=(Shown(title="predicted over measured"),), packages=("numpy",),
)  # fmt: skip
