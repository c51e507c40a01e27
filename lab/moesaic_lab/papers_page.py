"""Write the evidence on the pages of the five papers, and the claims of docs/reproduce.md, from
committed results.

Every figure comes from a file of benchmarks/results; none is typed by hand. `moesaic bench pays`
simulates where techniques pay. Measured gains are those of all pairs of methods in the committed
benchmarks that differ by the technique alone.

    python -m moesaic_lab.papers_page
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moesaic_lab.house import ROOT
from moesaic_lab.measured import measured
from moesaic_lab.pays import TECHNIQUES
from moesaic_lab.pictures import Panel, PlottedSeries, write_picture
from moesaic_lab.reproduce.records import PAPERS, read_book
from moesaic_lab.tables import markdown_table, share, write_page

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = DOCS / "reproduce.md"
CLAIM_MARKS = ("<!-- claims: moesaic_lab/papers_page.py -->", "<!-- end of claims -->")
MARKS = ("<!-- evidence: moesaic_lab/papers_page.py -->", "<!-- end of evidence -->")
CASE = ("part", "cell", "bed", "case", "what", "size_bytes", "locality")
"""Keys that two rows share if their methods were timed in turn on the same layer."""
SAID = 0.05
"""Relative deviation from which the table of headlines gives a reason."""
Row = Mapping[str, Any]


def pairs(
    rows: Sequence[Row], word: str, without: str, bed: str = ""
) -> list[tuple[float, float | None]]:
    """Return the measured gain of each pair of methods that differ by a word, and the predicted one
    if the benchmark has it.

    Trials of a search are left out: they are of few repeats, and the layers are timed again among
    the methods.

    Args:
        rows: rows of a benchmark.
        word: word of the names of methods with a technique.
        without: the word in its place without the technique; empty for none.
        bed: the beginning of the names of beds to include; empty for all.
    """
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if (
            row.get("part") != "search"
            and ("method" in row or "plan" in row)
            and row.get("bed", "").startswith(bed)
        ):
            cases.setdefault(tuple(row.get(key) for key in CASE), {})[
                row.get("plan") or row["method"]
            ] = row
    gains = []
    for methods in cases.values():
        for name, row in methods.items():
            words = name.split(", ")
            other = methods.get(
                ", ".join(filter(None, (without if each == word else each for each in words)))
            )
            if word in words and other is not None and seconds(other) and seconds(row):
                known = "predicted_seconds" in row and "predicted_seconds" in other
                predicted = other["predicted_seconds"] / row["predicted_seconds"] if known else None
                gains.append((seconds(other) / seconds(row), predicted))
    return gains


def seconds(row: Row) -> float:
    """Return the measured seconds of a row; 0 if it was only simulated."""
    measured = (row.get(key) for key in ("median_seconds", "measured_seconds", "seconds"))
    return next((float(each) for each in measured if isinstance(each, float)), 0.0)


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
        write_page(DOCS / f"papers_{paper}.md", evidence(paper, results), MARKS)
        panels = list(panels_of(paper, results))
        title = "Time without a technique over time with it, simulated; above 1 it pays"
        write_picture(DOCS / "images" / f"papers_{paper}.svg", title, panels)
    write_page(CLAIMS, claims_of(results["reproduce"]["claims"]), CLAIM_MARKS)
    return 0


def read_results() -> dict[str, Any]:
    """Return the committed results by name."""
    names = ("reproduce", "headlines", "pays", *SOURCES, *TRAINED.values())
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
        *(
            [predictor(results["balance"]["rows"]), by_load(results["balance"]["rows"])]
            if paper == "fastermoe"
            else []
        ),
        trained(results["netmoe"]["rows"]) if paper == "netmoe" else "",
        *(
            folded(f"{name}: the whole map", map_table(maps, name))
            for name in dict.fromkeys(r["technique"] for r in maps)
        ),
        "## Headlines, measured",
        f"Measured {measured({'headlines': results['headlines']})}.",
        headlines_table([row for row in results["headlines"]["rows"] if row["paper"] == paper]),
        "## Claims",
        claims_of(claims_by_paper(results)[paper]),
        "## Figures, simulated",
        *figures_of(paper, results["reproduce"]["rows"], about),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def measured_in(paper: str) -> list[str]:
    """Return the benchmarks whose measurements a paper's page shows, without its headlines."""
    shown = [result for each in TECHNIQUES if each.paper == paper for result, *_ in each.measured]
    return sorted({*shown, *filter(None, [TRAINED.get(paper)])})


def summary(paper: str, results: Mapping[str, Any]) -> str:
    """Return a line per technique and benchmark: the simulated map in short, beside the measured
    pairs."""
    names = (
        "technique|simulated|pays from, tokens per rank|measured|faster in|median|range|predicted"
    )
    lines = [names.split("|")]
    for technique in TECHNIQUES:
        if technique.paper != paper:
            continue
        maps = [row for row in results["pays"]["rows"] if row["technique"] == technique.name]
        for result, *words in technique.measured:
            found = pairs(results[result]["rows"], *words)
            if not found:
                lines.append([technique.name, *in_short(maps), "not yet", "", "", "", ""])
                continue
            values = [gain for gain, _ in found]
            predicted = [each for _, each in found if each is not None]
            on = f" on {words[2]}" if len(words) > 2 else ""
            measured = [
                f"{len(values)} {SOURCES[result]}{on} (`{result}.json`)",
                str(sum(value > 1 for value in values)),
                share(statistics.median(values)),
                f"{min(values):.2f} to {max(values):.2f}",
                share(statistics.median(predicted)) if predicted else "",
            ]
            lines.append([technique.name, *in_short(maps), *measured])
    return markdown_table(lines)


def in_short(maps: Sequence[Row]) -> tuple[str, str]:
    """Return a technique's range over its map, and where it begins to pay at the paper's links."""
    if not maps:
        return "", ""
    starts = []
    for row in maps:
        if row["links"] == 1:
            where = f"width {row['width']}{', skewed' if row['skew'] else ''}"
            starts.append(f"{where}: {crossing(row)}")
    return f"{min(r['least'] for r in maps):.2f} to {max(r['most'] for r in maps):.2f}", "; ".join(
        starts
    )


def predictor(rows: Sequence[Row]) -> str:
    """Return FasterMoE's figure 9: R^2 of equations 1 and 2 together against the measured layers
    without a technique."""
    plain = [row for row in rows if row.get("part") == "bed" and row["method"] == "plain ep"]
    measured = [row["median_seconds"] for row in plain]
    errors = [
        row["communication_seconds"] + row["computing_seconds"] - row["median_seconds"]
        for row in plain
    ]
    mean = statistics.mean(measured)
    r2 = 1 - sum(error**2 for error in errors) / sum((each - mean) ** 2 for each in measured)
    return (
        "Figure 9: the time of the busiest link (equation 2) plus that of the busiest rank "
        f"(equation 1) against {len(plain)} measured layers without a technique: R^2 {r2:.3f}, "
        "published 0.987 and 0.967 for the two alone (`balance.json`)."
    )


def by_load(rows: Sequence[Row]) -> str:
    """Return the measured gains of FasterMoE's techniques under every load: of a Zipf law, by bed
    and MaxVio, or recorded."""
    lines = [["load", "MaxVio", "shadowing", "smart schedule", "both"]]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.get("part") == "bed":
            cases.setdefault(row["case"], {})[row["method"]] = row
    for case, methods in cases.items():
        chosen = [
            methods[name] for name in ("shadow, published", "smart schedule", "smart + shadow")
        ]
        gains = [
            f"{row['plain_over_this']:.2f} ({span(row['plain_over_this_95'])})" for row in chosen
        ]
        lines.append([case, share(methods["plain ep"]["max_vio"]), *gains])
    return "FastMoE's time over that with each technique, by load:\n\n" + markdown_table(lines)


def trained(rows: Sequence[Row]) -> str:
    """Return what placement saves and gains under the recorded routing of trained models; "" if
    that was not run."""
    chosen = [row for row in rows if row["part"] == "trained" and row["method"] == "two_stage"]
    lines = [
        [
            "trained on",
            "steps",
            "locality",
            "saved between nodes, simulated",
            "gain, simulated",
            "gain, measured",
        ]
    ]
    for text in dict.fromkeys(row["text"] for row in chosen):
        steps = sorted({row["step"] for row in chosen if row["text"] == text})
        for part in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
            of_part = [row for row in chosen if row["text"] == text and row["step"] in part]
            simulated = [row for row in of_part if "time_ratio" not in row]
            measured = [
                (
                    f"{row['bed']}: {1 / row['time_ratio']:.2f} "
                    f"({span([1 / row['time_ratio_high'], 1 / row['time_ratio_low']])})"
                )
                for row in of_part
                if "time_ratio" in row
            ]
            saved = span([100 * row["predicted_inter_saved"] for row in simulated], "%")
            gain = span([1 / row["predicted_time_ratio"] for row in simulated])
            locality = span([row["locality"] for row in simulated])
            lines.append(
                [text, f"{part[0]} to {part[-1]}", locality, saved, gain, "; ".join(measured)]
            )
    return markdown_table(lines) if chosen else ""


def span(values: Sequence[float], unit: str = "") -> str:
    """Return the least and the largest of some figures."""
    digits = 0 if unit else 2
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}{unit and ' ' + unit}"


def crossing(row: Row) -> str:
    """Return in words where a gain is above 1."""
    if not row["crossovers"]:
        return "always" if row["least"] >= 1 else "never"
    rises = row["gains"][0] < 1
    words = ["from", "up to"] if rises else ["up to", "from"]
    return " ".join(
        f"{words[number % 2]} {tokens:,.0f}" for number, tokens in enumerate(row["crossovers"])
    )


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
        lines = tuple(
            PlottedSeries(
                name=f"{ranks} ranks per node",
                x=tuple(row["locality"] for row in rows if row["per_node"] == ranks),
                y=tuple(
                    1 / row["predicted_time_ratio"] for row in rows if row["per_node"] == ranks
                ),
            )
            for ranks in dict.fromkeys(row["per_node"] for row in rows)
        )
        yield Panel(
            title="placement over FastMoE", x_title="locality", y_title="gain", series=lines
        )
    maps = [row for row in results["pays"]["rows"] if row["paper"] == paper and row["links"] == 1]
    for name in dict.fromkeys(row["technique"] for row in maps):
        chosen = [row for row in maps if row["technique"] == name]
        x = tuple(map(float, chosen[0]["tokens"]))
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


def headlines_table(rows: Sequence[Row]) -> str:
    """Return the table of a paper's measured headlines."""
    lines = [["comparison", "published", "here", "communication, paper", "here", "difference"]]
    for row in rows:
        if row["part"] != "headline":
            continue
        low, high = row["here_95"]
        off = f"{row['off']:+.0%}" + (f": {row['why']}" if abs(row["off"]) > SAID else "")
        lines.append(
            [
                row["what"],
                share(row["published"]),
                f"{row['here']:.2f} ({low:.2f} to {high:.2f})",
                f"{row['share']:.0%} ({row['share_of']})",
                f"{row['share_here']:.0%}",
                off,
            ]
        )
    return markdown_table(lines)


def claims_of(claims: Sequence[Row]) -> str:
    """Return a table of claims, with the reason of each that is missed."""
    lines = [["claim", "value", "target", "holds"]]
    reasons = read_book().missed
    for claim in claims:
        holds = {True: "yes", False: f"**no**: {reasons.get(claim['name'], '')}", None: ""}[
            claim["holds"]
        ]
        value = claim["reason"] if claim["value"] is None else f"{claim['value']:.3g}"
        lines.append([f"`{claim['name']}`", value, f"{claim['op']} {claim['target']:g}", holds])
    return markdown_table(lines)


def figures_of(paper: str, rows: Sequence[Row], about: Row) -> Iterator[str]:
    """Yield the tables and lists of a paper's simulated figures."""
    chosen = [row for row in rows if row["paper"] == paper]
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
    no_prediction = role == "no prediction"
    last = (
        ["simulated with assumed sizes", "unit", "not printed"]
        if no_prediction
        else ["simulated", "unit", "off by"]
    )
    lines = [[role, "published", *last]]
    for row in rows:
        if row["role"] != role:
            continue
        error = row["error"]
        off = (
            row["not_printed"]
            if no_prediction
            else ""
            if error is None
            else f"{error:.1f}"
            if row["unit"] == "points"
            else f"{error:.1%}"
        )
        published = "." if row["published"] is None else f"{row['published']:g}"
        name = row["cell"].removeprefix(f"{paper}.")
        lines.append([f"`{name}`", published, f"{row['ours']:.4g}", row["unit"], off])
    if len(lines) == 1:
        return ""
    return folded(f"{len(lines) - 1} figures, {role}", markdown_table(lines))


def folded(title: str, text: str) -> str:
    """Return a text that unfolds on a click."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


if __name__ == "__main__":
    sys.exit(main())
