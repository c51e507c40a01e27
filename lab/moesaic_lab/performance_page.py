"""Write docs/performance.md from the results in the repository: no figure is typed by hand.

A result that a change of Moesaic outdated has a field `stale` with the reason until it is measured again; the page says so.

For each question the page has a picture, the claims that have a target, and what they mean. Rows remain in the results.

python -m moesaic_lab.performance_page            # writes docs/performance.md
python -m moesaic_lab.performance_page --check    # exit code 1 if the page does not match the results
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic_lab.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
FEW = 4
"""Largest number of missed targets that are named; more are only counted."""

INTRODUCTION = """# Performance

`python -m moesaic_lab.performance_page` writes this page from `benchmarks/results/`, where every row of every
measurement is. `make bench` and `make bench-all` measure anew. A speed is a ratio against a named alternative that
ran in turn in the same process or session; absolute times are of two shared CPU cores and mean little elsewhere.
Emulated clusters are real processes and real bytes over links of a given rate ([the test bed](testbed.md)); no figure
is from a GPU. `docs/log.md` of the repository has what disturbed a measurement and what was tried.
"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A reader's question, and the results that answer it."""

    title: str
    meaning: str
    """What the figures mean, and what they do not show."""
    results: tuple[str, ...]
    """Stems of the files whose claims are shown."""
    picture: str = ""
    """Path of the picture under docs/images; "" for none."""


QUESTIONS = (
    Question(
        title="Is a whole training step faster than with other systems?",
        meaning=(
            "Steps of the demo's model on 2x2 ranks, communication at 0.82 of the plain step, the middle of Parm's range. "
            "The gain grows with the experts per token, since a token crosses between nodes once; at two experts per "
            "token little is left of it."
        ),
        results=("train",),
        picture="bench/train.svg",
    ),
    Question(
        title="Do the all-to-alls reach what the links give?",
        meaning=(
            "The share of the slowest link's rate, and times beside the linear exchange. Multicast misses its bound by "
            "the time that two cores take to gather and hand on rows for four to eight ranks."
        ),
        results=("comm",),
        picture="bench/comm.svg",
    ),
    Question(
        title="Which plan for a layer, and what does the choice gain?",
        meaning=(
            "Parm's baseline, ScheMoE's and Tutel's plans and ours on the same beds. Switching between plans moves no "
            "weight."
        ),
        results=("layer",),
        picture="bench/layer.svg",
    ),
    Question(
        title="What does skewed routing cost, and what helps?",
        meaning=(
            "MaxVio is the busiest rank's load over the mean, minus 1. The arbiter leaves plain expert parallelism far "
            "behind where loads are skewed; on some loads it is behind the best single technique by more than was asked, "
            "and without placing experts it cannot reach what was asked of the simulated clusters "
            "(docs/balance_figures.md says why)."
        ),
        results=("balance", "relocate_train"),
        picture="bench/balance.svg",
    ),
    Question(
        title="How near is the simulator to what is measured?",
        meaning=(
            "Layers on the beds, predicted from a profile that was taken before, at once or by an hour. What is missed is the "
            "worst pick: a plan that is predicted to be as fast as the fastest one, and is not. [The ledger](ledger.md) holds "
            "predictions against what other people measured, and names what is off. Seconds of a simulation are of even "
            "routing, where one rank stands for all, but for those of skewed loads."
        ),
        results=("model", "collectives", "simulator", "ledger"),
        picture="bench/model.svg",
    ),
    Question(
        title="Do the five papers' figures come out on their clusters?",
        meaning=(
            "Median errors of simulated figures that were not used for a fit; [the papers](reproduce.md) has each figure. "
            "`headline_here` is measured on emulated clusters, beside three quarters of the published ratio "
            "([papers.md](papers.md))."
        ),
        results=("reproduce", "headlines"),
        picture="reproduce.svg",
    ),
    Question(
        title="How fast is the layer on one device?",
        meaning=(
            "On a CPU, over the lower bound that the machine's own products and copies give (lb), and over the best other "
            "layer in time and memory. The other layers are at 1.08 to 1.20 of the bound themselves."
        ),
        results=("device_cpu", "kernels_cpu", "layer_memory"),
        picture="bench/kernels_cpu.svg",
    ),
    Question(
        title="Is the sparse model worth its parameters?",
        meaning=(
            "The demo's model against its dense twin of the same active parameters, tokens and steps, three seeds; a step "
            "of it takes longer on a CPU (`moe_vs_dense.time_ratio` in the results). The shape was chosen for the gain, "
            "so read it as a best case."
        ),
        results=("moe_vs_dense",),
    ),
    Question(
        title="Does everything compute the same?",
        meaning=(
            "Random meshes, plans and workloads against a dense float64 reference, planted bugs, bytes against the "
            "papers' formulas, codecs against their bounds, and parts that are added from the documentation."
        ),
        results=("check", "schedules", "codec_error", "extending"),
    ),
    Question(
        title="Does a run survive what happens to it?",
        meaning=(
            "Faults by a seeded schedule over runs on 2x2 ranks, odd inputs for every reader and command line, and a long "
            "run whose plans change (docs/reliability.md)."
        ),
        results=("chaos", "fuzz", "soak"),
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Write the page, or compare it with the results if --check is given, and return the exit code."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    text = page(results)
    if "--check" in arguments:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


def page(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the text of the page, from the results by file stem."""
    shown = {name for question in QUESTIONS for name in question.results}
    others = sorted(name for name in results if name not in shown)
    parts = [INTRODUCTION, *(section(question, results) for question in QUESTIONS)]
    if others:
        names = ", ".join(f"`{name}.json`{' (stale)' if 'stale' in results[name] else ''}" for name in others)
        parts.append(f"Further figures are in {names}.\n")
    return "\n".join(parts)


def section(question: Question, results: Mapping[str, dict[str, Any]]) -> str:
    """Return the section of a question: the meaning of the figures, a picture, and the claims that have a target."""
    answers = [(name, results[name]) for name in question.results if name in results]
    claims = [claim for _, result in answers for claim in result["claims"] if claim["target"] is not None]
    lines = [["claim", "value", "target", "holds"], *(line(alike) for alike in families(claims))]
    missed = [f"`{claim['name']}`" for claim in claims if claim["holds"] is False]
    verdict = f"Missed: {', '.join(missed)}." if len(missed) <= FEW else f"Missed: {len(missed)} of {len(claims)}."
    verdict = verdict if missed else "Every target holds."
    dates = sorted({result["date"] for _, result in answers})
    cores = sorted({f"{result['machine']['cpu']}, {result['machine']['cores']} cores" for _, result in answers})
    where = f"Measured {' and '.join(dates)} on {'; '.join(cores)}." if answers else "Not measured."
    where += "".join(f" **Stale:** `{name}.json`, {result['stale']}." for name, result in answers if "stale" in result)
    picture = [f"![{question.title}](images/{question.picture})"] if question.picture else []
    return (
        "\n\n".join([f"## {question.title}", f"{question.meaning} {verdict} {where}", *picture, markdown_table(lines)])
        + "\n"
    )


def families(claims: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group claims in their order: claims that hold with the same first word and target form a family, others stay alone."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for claim in claims:
        first = claim["name"].split(".")[0]
        alike = (first, claim["op"], claim["target"]) if claim["holds"] else claim["name"]
        groups.setdefault(alike, []).append(claim)
    return list(groups.values())


def line(alike: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table cells of a claim, or of the worst claim of a family."""
    worst = max if alike[0]["op"] == "<=" else min
    claim = worst(alike, key=lambda each: each["value"]) if len(alike) > 1 else alike[0]
    value = f"{claim['value']:.4g}" if claim["value"] is not None else f"not measured: {claim['reason']}"
    among = f" (the worst of {len(alike)} with this target)" if len(alike) > 1 else ""
    holds = {True: "yes", False: "**no**", None: ""}[claim["holds"]]
    return [f"`{claim['name']}`{among}", value, f"{claim['op']} {claim['target']:g}", holds]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
