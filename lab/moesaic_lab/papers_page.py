"""Write the pages of the five papers, and the claims of docs/reproduce.md, from the papers' quotes
and committed results.

A page begins with what people wrote, the paper's page.md, and goes on with evidence.
Neither types a number: published ones come from the paper's quotes.toml, ours from a file of
benchmarks/results. `moesaic bench pays` simulates where techniques pay. Measured gains are those of
all pairs of methods in the committed benchmarks that differ by the technique alone.

    python -m moesaic_lab.papers_page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moesaic.files import write
from moesaic_lab.claims import RESULTS, ROOT
from moesaic_lab.measured import measured
from moesaic_lab.paper_figures import figures_of
from moesaic_lab.paper_headlines import headlines_of
from moesaic_lab.paper_pairs import Row
from moesaic_lab.paper_tables import tables_of
from moesaic_lab.pays import TECHNIQUES
from moesaic_lab.pays_page import SOURCES, panels_of, picture_of, pictures_of, table_of
from moesaic_lab.pictures import write_picture
from moesaic_lab.reproduce.records import PAPERS, page_of, read_book
from moesaic_lab.tables import CLAIM_COLUMNS, markdown_table, with_unit, write_page

DOCS = ROOT / "docs"
CLAIMS = DOCS / "reproduce.md"
DECIDING = DOCS / "pays.md"
CLAIM_MARKS = ("<!-- claims: moesaic_lab/papers_page.py -->", "<!-- end of claims -->")
MARKS = ("<!-- evidence: moesaic_lab/papers_page.py -->", "<!-- end of evidence -->")
TRAINED = {"schemoe": "codec_convergence", "tutel": "vision_sweeps", "fastermoe": "gates_loss"}
"""Benchmark that trains models under what a paper changes, by paper."""


def main() -> int:
    """Write all pages and pictures, and return the exit code."""
    results = read_results()
    for paper in PAPERS:
        write(DOCS / f"papers_{paper}.md", page(paper, results))
    for technique in TECHNIQUES:
        panels = list(panels_of(technique, results))
        title = "Time without the technique over time with it, simulated; above 1 it pays"
        write_picture(DOCS / picture_of(technique), title, panels, columns=4)
    write_page(DECIDING, deciding(results), MARKS)
    shown = claims_of(results["reproduce"]["claims"], simulated(results))
    write_page(CLAIMS, shown, CLAIM_MARKS)
    return 0


def deciding(results: Mapping[str, Any]) -> str:
    """Return the generated part of the page by which a reader decides."""
    return f"{table_of(results, TECHNIQUES)}\n\n## Pictures\n\n{pictures_of()}"


def page(paper: str, results: Mapping[str, Any]) -> str:
    """Return a paper's page."""
    written = read_book().filled(page_of(paper), simulated(results), figures_of(paper, results))
    return f"{written.rstrip()}\n\n{MARKS[0]}\n\n{evidence(paper, results)}\n{MARKS[1]}\n"


def simulated(results: Mapping[str, Any]) -> dict[str, float]:
    """Return our simulated figures by the name of the published one."""
    return {row["cell"]: row["ours"] for row in results["reproduce"]["rows"]}


def read_results() -> dict[str, Any]:
    """Return the committed results by name."""
    also = ("layer_memory", "placement_cases")
    names = ("reproduce", "headlines", "pays", *also, *SOURCES, *TRAINED.values())
    return {
        name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names
    }


def claims_by_paper(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the claims of every paper: its headlines, its simulated figures, and those with a
    target of trained models."""
    listed = [claim for name in ("headlines", "reproduce") for claim in results[name]["claims"]]
    by_paper = {
        paper: [claim for claim in listed if claim["name"].split(".")[1] == paper]
        for paper in PAPERS
    }
    for paper, name in TRAINED.items():
        by_paper[paper] += [
            claim for claim in results[name]["claims"] if claim["target"] is not None
        ]
    return by_paper


def evidence(paper: str, results: Mapping[str, Any]) -> str:
    """Return the generated part of a paper's page."""
    about = results["reproduce"]["papers"][paper]
    parts = [
        "## Where it pays",
        "[Where each technique pays](pays.md) explains this table and has a picture of each line.",
        table_of(results, [each for each in TECHNIQUES if each.paper == paper]),
        f"Measured {measured({name: results[name] for name in measured_in(paper)})}.",
        *tables_of(paper, results),
        headlines_of(paper, results),
        "## Claims",
        claims_of(claims_by_paper(results)[paper], simulated(results)),
        "## Figures, simulated",
        *simulated_of(paper, results, about),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def measured_in(paper: str) -> list[str]:
    """Return the benchmarks whose measurements a paper's page shows, without its headlines."""
    shown: set[str] = set()
    for technique in TECHNIQUES:
        if technique.paper == paper:
            shown.update(result for result, *_ in technique.measured)
    if paper in TRAINED:
        shown.add(TRAINED[paper])
    return sorted(shown)


def claims_of(claims: Sequence[Row], ours: Mapping[str, float]) -> str:
    """Return a table of claims, with the reason of each that is missed.

    Args:
        ours: our simulated figures by name, which the reasons may quote.
    """
    lines = [[*CLAIM_COLUMNS]]
    book = read_book()
    for claim in claims:
        reason = book.filled(book.missed.get(claim["name"], ""), ours)
        holds = {True: "yes", False: f"**no**: {reason}", None: ""}[claim["holds"]]
        if claim["value"] is None:
            value = claim["reason"]
        else:
            value = with_unit(f"{claim['value']:.3g}", claim.get("unit", "1"))
        target = f"{claim['op']} {claim['target']:g}"
        lines.append([f"`{claim['name']}`", value, target, holds])
    return markdown_table(lines)


def simulated_of(paper: str, results: Mapping[str, Any], about: Row) -> Iterator[str]:
    """Yield the tables and lists of a paper's simulated figures.

    Args:
        about: findings, constants, assumptions and unexplained figures of the paper.
    """
    chosen = [row for row in results["reproduce"]["rows"] if row["paper"] == paper]
    yield from (
        rows_table(paper, chosen, role)
        for role in ("validation", "arithmetic", "fit", "kept back", "no prediction")
    )
    marks = {True: "Holds", False: "Does not hold", None: "Found"}
    yield "\n".join(
        f"- {marks[each['holds']]}: {each['statement']}: {each['ours']}."
        for each in about["findings"]
    )
    constants = [["constant", "value", "from", "how"]]
    for each in about["constants"]:
        value = f"{each['value']:.4g} {each['unit']}"
        constants.append(
            [
                f"`{each['name']}`",
                value,
                ", ".join(f"`{cell}`" for cell in each["cells"]),
                each["how"],
            ]
        )
    yield folded(f"{len(constants) - 1} constants", markdown_table(constants))
    yield "\n".join(f"- Assumed: {line}" for line in about["assumptions"])
    yield "\n".join(f"- Not explained: {line}" for line in about["unexplained"])


def rows_table(paper: str, rows: Sequence[Row], role: str) -> str:
    """Return a folded table of a paper's rows that have one role; "" if none has."""
    last = ["simulated", "unit", "off by"]
    if role == "no prediction":
        last = ["simulated with assumed sizes", "unit", "not printed"]
    lines = [[role, "place", "published", *last]]
    book = read_book()
    for row in rows:
        if row["role"] != role:
            continue
        error = row["error"]
        if role == "no prediction":
            off = row["not_printed"]
        elif error is None:
            off = ""
        else:
            off = f"{error:.1f}" if row["unit"] == "points" else f"{error:.1%}"
        published = "." if row["published"] is None else f"{row['published']:g}"
        name = row["cell"].removeprefix(f"{paper}.")
        place = book.cells[row["cell"]].place
        ours = f"{row['ours']:.4g}"
        lines.append([f"`{name}`", place, published, ours, row["unit"], off])
    if len(lines) == 1:
        return ""
    return folded(f"{len(lines) - 1} figures, {role}", markdown_table(lines))


def folded(title: str, text: str) -> str:
    """Return a text that unfolds on a click."""
    return f"<details markdown='1'><summary>{title}</summary>\n\n{text}\n\n</details>"


if __name__ == "__main__":
    sys.exit(main())
