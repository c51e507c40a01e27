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
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moesaic.files import write
from moesaic_lab.claims import RESULTS, ROOT
from moesaic_lab.measured import measured
from moesaic_lab.paper_figures import figures_of
from moesaic_lab.paper_headlines import headlines_of
from moesaic_lab.paper_pairs import Row, pairs
from moesaic_lab.paper_tables import tables_of
from moesaic_lab.pays import TECHNIQUES
from moesaic_lab.pictures import Panel, PlottedSeries, write_picture
from moesaic_lab.reproduce.records import PAPERS, page_of, read_book
from moesaic_lab.tables import CLAIM_COLUMNS, markdown_table, share, with_unit, write_page

DOCS = ROOT / "docs"
CLAIMS = DOCS / "reproduce.md"
CLAIM_MARKS = ("<!-- claims: moesaic_lab/papers_page.py -->", "<!-- end of claims -->")
MARKS = ("<!-- evidence: moesaic_lab/papers_page.py -->", "<!-- end of evidence -->")


SOURCES = {
    "layer": "layers",
    "model": "layers",
    "comm": "all-to-alls",
    "balance": "layers under skew",
    "netmoe": "layers in a row",
}
"""What the pairs of a benchmark are."""
TRAINED = {"schemoe": "codec_convergence", "tutel": "vision_sweeps", "fastermoe": "gates_loss"}
"""Benchmark that trains models under what a paper changes, by paper."""


def main() -> int:
    """Write all pages and pictures, and return the exit code."""
    results = read_results()
    for paper in PAPERS:
        write(DOCS / f"papers_{paper}.md", page(paper, results))
        panels = list(panels_of(paper, results))
        title = "Time without a technique over time with it, simulated; above 1 it pays"
        write_picture(DOCS / "images" / f"papers_{paper}.svg", title, panels)
    shown = claims_of(results["reproduce"]["claims"], simulated(results))
    write_page(CLAIMS, shown, CLAIM_MARKS)
    return 0


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
    maps = [row for row in results["pays"]["rows"] if row["paper"] == paper]
    parts = [
        "## Where it pays",
        f"![gain over tokens](images/papers_{paper}.svg)",
        summary(paper, results),
        f"Measured {measured({name: results[name] for name in measured_in(paper)})}.",
        *tables_of(paper, results),
        *(
            folded(f"{name}: the whole map; skew is a synthetic Zipf law", map_table(maps, name))
            for name in dict.fromkeys(r["technique"] for r in maps)
        ),
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


def summary(paper: str, results: Mapping[str, Any]) -> str:
    """Return a line per technique and benchmark: the simulated map in short, beside the measured
    pairs."""
    # A row of `measured`: a benchmark, and the arguments of `pairs`.
    names = (
        "technique|simulated gain|pays from, tokens per rank|measured|faster in, cases|median gain"
        "|range of gains|predicted gain"
    )
    lines = [names.split("|")]
    for technique in TECHNIQUES:
        if technique.paper != paper:
            continue
        maps = [row for row in results["pays"]["rows"] if row["technique"] == technique.name]
        for result, *words in technique.measured:
            rows = results[result]["rows"]
            found = pairs(rows, *words)
            if not found:
                lines.append([technique.name, *in_short(maps), "not yet", "", "", "", ""])
                continue
            values = [gain for gain, _ in found]
            predicted = [each for _, each in found if each is not None]
            # The third word, if there is one, is the only bed that counts.
            where = f" on {words[2]}" if len(words) > 2 else beds_of(rows, words[0])
            measured = [
                f"{len(values)} {SOURCES[result]}{where} (`{result}.json`)",
                str(sum(value > 1 for value in values)),
                share(statistics.median(values)),
                f"{min(values):.2f} to {max(values):.2f}",
                share(statistics.median(predicted)) if predicted else "",
            ]
            lines.append([technique.name, *in_short(maps), *measured])
    return markdown_table(lines)


def beds_of(rows: Sequence[Row], word: str) -> str:
    """Return on which emulated clusters methods with a word in their names were measured, nodes x
    ranks per node; "" if rows do not tell."""
    beds = set()
    for row in rows:
        method = row.get("plan") or row.get("method") or ""
        if "bed" in row and row.get("part") != "search" and word in method.split(", "):
            # A bed's name begins with its shape, as "2x4 200mbit"; other names have none.
            first, *_ = row["bed"].split()
            if first[0].isdigit():
                beds.add(first.rstrip(","))
    return f" on {', '.join(sorted(beds))}" if beds else ""


def in_short(maps: Sequence[Row]) -> tuple[str, str]:
    """Return a technique's range over its map, and where it begins to pay at the paper's links.

    Args:
        maps: rows of `moesaic bench pays`.
    """
    if not maps:
        return "", ""
    starts = []
    for row in maps:
        if row["links"] == 1:
            where = f"width {row['width']}{', skewed' if row['skew'] else ''}"
            starts.append(f"{where}: {crossing(row)}")
    least = min(row["least"] for row in maps)
    most = max(row["most"] for row in maps)
    return f"{least:.2f} to {most:.2f}", "; ".join(starts)


def crossing(row: Row) -> str:
    """Return in words where a gain is above 1, in tokens per rank."""
    if not row["crossovers"]:
        return "always" if row["least"] >= 1 else "never"
    # At each crossover the gain rises above 1 or falls below it, in turn.
    rises = row["gains"][0] < 1
    words = []
    for tokens in row["crossovers"]:
        words.append(f"from {tokens:,.0f}" if rises else f"up to {tokens:,.0f}")
        rises = not rises
    return " ".join(words)


def map_table(maps: Sequence[Row], technique: str) -> str:
    """Return a technique's gains over tokens, links, width and skew; losses are bold."""
    chosen = [row for row in maps if row["technique"] == technique]
    lines = [
        [
            "links",
            "width",
            "skew",
            *(f"{tokens:,} tokens" for tokens in chosen[0]["tokens"]),
            "pays",
        ]
    ]
    for row in chosen:
        gains = [share(gain) if gain >= 1 else f"**{gain:.2f}**" for gain in row["gains"]]
        lines.append(
            [f"x{row['links']:g}", str(row["width"]), f"{row['skew']:g}", *gains, crossing(row)]
        )
    return markdown_table(lines)


def panels_of(paper: str, results: Mapping[str, Any]) -> Iterator[Panel]:
    """Yield a panel per technique: its gain over tokens at the paper's links; NetMoE's over the
    locality of samples."""
    if paper == "netmoe":
        rows = [row for row in results["netmoe"]["rows"] if row["part"] == "simulated"]
        lines = []
        for ranks in dict.fromkeys(row["per_node"] for row in rows):
            own = [row for row in rows if row["per_node"] == ranks]
            localities = tuple(row["locality"] for row in own)
            gains = tuple(1 / row["predicted_time_ratio"] for row in own)
            lines.append(PlottedSeries(name=f"{ranks} ranks per node", x=localities, y=gains))
        yield Panel(
            title="placement over FastMoE", x_title="locality", y_title="gain", series=tuple(lines)
        )
    maps = [row for row in results["pays"]["rows"] if row["paper"] == paper and row["links"] == 1]
    for name in dict.fromkeys(row["technique"] for row in maps):
        chosen = [row for row in maps if row["technique"] == name]
        x = tuple(map(float, chosen[0]["tokens"]))
        # A line at 1, above which the technique pays.
        series = [PlottedSeries(name="equal", x=(x[0], x[-1]), y=(1.0, 1.0))]
        for row in chosen:
            label = f"width {row['width']}{', skewed' if row['skew'] else ''}"
            series.append(PlottedSeries(name=label, x=x, y=tuple(row["gains"])))
        yield Panel(
            title=name,
            x_title="tokens per rank",
            y_title="gain",
            series=tuple(series),
            log_x=True,
            log_y=True,
        )


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
