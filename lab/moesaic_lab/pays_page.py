"""The page by which a reader decides, docs/pays.md: one picture per technique of the five papers,
with its gain along each axis of `moesaic bench pays` and the published gain where the paper tells
its place; and a table of where each technique pays."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moesaic_lab.paper_pairs import Row, pairs
from moesaic_lab.pays import TECHNIQUES, Technique
from moesaic_lab.pictures import Panel, PlottedSeries
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.tables import markdown_table, share

AXES = {
    "tokens": ("tokens per rank", ",.0f"),
    "share": ("share of messages", ".0%"),
    "skew": ("MaxVio of experts", ".1f"),
    "ranks": ("ranks of a node", ".0f"),
}
"""By an axis of `moesaic bench pays`: its title and how a place on it is written."""
SOURCES = {
    "layer": "layers",
    "model": "whole layers",
    "comm": "all-to-alls",
    "balance": "layers under skew",
    "netmoe": "layers in a row",
}
"""What the pairs of a benchmark are."""
Results = Mapping[str, Any]


def picture_of(technique: Technique) -> str:
    """Return the path of a technique's picture from the folder of the documentation."""
    name = re.sub(r"\W+", "_", technique.name.lower())
    return f"images/pays/{technique.paper}_{name}.svg"


def published(technique: Technique) -> float | None:
    """Return the published gain of a technique; None if its paper prints none."""
    cells = technique.published.get("cells")
    return read_book().ratio(cells) if cells else None


def table_of(results: Results, techniques: Sequence[Technique]) -> str:
    """Return the table of where techniques pay."""
    titles = [title for title, _ in AXES.values()]
    head = [
        "technique",
        "option",
        "its paper's layer",
        "published gain",
        *titles,
        "faster, measured",
    ]
    lines = [head]
    for technique in techniques:
        rows = {row["axis"]: row for row in rows_of(technique, results)}
        gain = published(technique)
        # The paper's own layer is the same in all rows.
        own = next((f"{r['gain']:.2f} at {r['share']:.0%} messages" for r in rows.values()), "")
        lines.append(
            [
                f"[{technique.name}](papers_{technique.paper}.md#where-it-pays)",
                f"`{technique.use}`",
                own,
                "" if gain is None else share(gain),
                *(crossing(rows[axis]) if axis in rows else "" for axis in AXES),
                "; ".join(measured_gains(technique, results)),
            ]
        )
    return markdown_table(lines)


def pictures_of() -> str:
    """Return the pictures of all techniques as a section each."""
    return "\n\n".join(
        f"### {technique.name}\n\n![gain along each axis]({picture_of(technique)})"
        for technique in TECHNIQUES
    )


def rows_of(technique: Technique, results: Results) -> list[Row]:
    """Return the rows of a technique, one per axis."""
    return [row for row in results["pays"]["rows"] if row["technique"] == technique.name]


def measured_gains(technique: Technique, results: Results) -> Iterator[str]:
    """Yield how often a technique is faster in each benchmark, and its gains: the median, the least
    and the largest."""
    for result, *words in technique.measured:
        gains = pairs(results[result]["rows"], *words)
        # The third word, if there is one, is the only bed that counts.
        where = " ".join([SOURCES[result], *words[2:]])
        faster = sum(gain > 1 for gain in gains)
        yield (
            f"{faster} of {len(gains)} {where}: {statistics.median(gains):.2f} ({min(gains):.2f} "
            f"to {max(gains):.2f})"
        )


def crossing(row: Row) -> str:
    """Return in words where a gain is above 1 on an axis."""
    if not row["crossovers"]:
        return "always" if row["least"] >= 1 else "never"
    _, form = AXES[row["axis"]]
    # At each crossover the gain rises above 1 or falls below it, in turn.
    rises = row["gains"][0] < 1
    words = []
    for place in row["crossovers"]:
        words.append(f"{'from' if rises else 'up to'} {place:{form}}")
        rises = not rises
    return " ".join(words)


def panels_of(technique: Technique, results: Results) -> Iterator[Panel]:
    """Yield a panel per axis of a technique; NetMoE's is the locality of samples."""
    if technique.at is None:
        yield locality(results["netmoe"]["rows"])
    for row in rows_of(technique, results):
        title, _ = AXES[row["axis"]]
        x = tuple(map(float, row["places"]))
        series = [
            PlottedSeries(name="simulated", x=x, y=tuple(row["gains"])),
            # A line at 1, above which the technique pays.
            PlottedSeries(name="equal", x=(x[0], x[-1]), y=(1.0, 1.0)),
        ]
        gain = published(technique)
        place = technique.published.get(row["axis"])
        if gain is not None and place is not None:
            series.append(
                PlottedSeries(name="published", x=(place,), y=(gain,), low=(1.0,), high=(gain,))
            )
        yield Panel(
            title=technique.name,
            x_title=title,
            y_title="gain",
            series=tuple(series),
            log_x=row["axis"] in ("tokens", "ranks"),
            log_y=True,
        )


def locality(rows: Sequence[Row]) -> Panel:
    """Return the panel of NetMoE's placement over the locality of samples."""
    simulated = [row for row in rows if row["part"] == "simulated"]
    lines = []
    for ranks in dict.fromkeys(row["per_node"] for row in simulated):
        own = [row for row in simulated if row["per_node"] == ranks]
        localities = tuple(row["locality"] for row in own)
        gains = tuple(1 / row["predicted_time_ratio"] for row in own)
        lines.append(PlottedSeries(name=f"{ranks} ranks of a node", x=localities, y=gains))
    return Panel(
        title="placement over FastMoE", x_title="locality", y_title="gain", series=tuple(lines)
    )
