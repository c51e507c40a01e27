"""The headlines of a paper as its page shows them: measured, simulated, or not here with the
reason. Each holds or fails in the open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moesaic_lab.headlines import COMPARISONS, OFF, Comparison, Headline, found
from moesaic_lab.measured import measured
from moesaic_lab.reproduce.records import Book, PublishedCell, read_book
from moesaic_lab.tables import markdown_table, share


@dataclass(frozen=True, kw_only=True)
class HeadlineLine:
    """A line of the table of headlines."""

    comparison: str
    place: str
    published: float | None
    here: str = ""
    how: str = "not here"
    off: str = ""
    verdict: str

    @property
    def cells(self) -> list[str]:
        """The cells of the line."""
        published = "" if self.published is None else share(self.published)
        return [self.comparison, self.place, published, self.here, self.how, self.off, self.verdict]


HEAD = ["comparison", "place", "published", "here", "how", "off the gain", "verdict"]


def headlines_of(paper: str, results: Mapping[str, Any]) -> str:
    """Return the section of a paper's headlines."""
    book = read_book()
    lines: list[HeadlineLine] = []
    for make in COMPARISONS[paper]:  # type: ignore[index]
        comparison = make()
        rows = results["headlines"]["rows"]
        lines += [of_bed(book, comparison, each, rows) for each in comparison.headlines]
    if paper == "fastermoe":
        lines += of_gates(book, results["gates_loss"]["rows"])
    lines += of_simulator(book, paper, results["reproduce"]["rows"])
    load = ", under a synthetic Zipf load" if paper == "fastermoe" else ""
    table = markdown_table([HEAD, *(line.cells for line in lines)])
    where = measured({"headlines": results["headlines"]})
    return (
        f"## Headlines{load}\n\nA headline holds if our gain is within {OFF:.0%} of the published "
        f"gain, in either direction. Measured {where}.\n\n{table}"
    )


def judged(book: Book, cell: str, here: float, published: float) -> tuple[str, str]:
    """Return how far a gain is off the published one, and whether that holds or why not.

    Args:
        here: our ratio of speeds, whose gain is the ratio - 1.
        published: the paper's.
    """
    off = (here - 1) / (published - 1) - 1
    reason = book.missed.get(f"papers.{cell}", "")
    verdict = "holds" if abs(off) <= OFF else f"**failed**: {reason}"
    return f"{off:+.0%}", verdict


def of_bed(
    book: Book, comparison: Comparison, headline: Headline, rows: list[dict[str, Any]]
) -> HeadlineLine:
    """Return the line of a headline that is measured on an emulated cluster."""
    ratio = found(comparison, headline, rows)
    places = [known(book, cell).place for cell in headline.cells]
    line = HeadlineLine(
        comparison=headline.what,
        place=", ".join(dict.fromkeys(filter(None, places))),
        published=headline.published,
        verdict="its methods have not run yet",
    )
    if ratio is None:
        return line
    interval = " (medians)"
    if ratio.interval is not None:
        low, high = ratio.interval
        interval = f" ({low:.2f} to {high:.2f})"

    # All headlines of a comparison have one share of communication: that of its reference.
    cells = {cell for each in comparison.headlines for cell in each.cells}
    shares = [
        row["share_here"]
        for row in rows
        if row["part"] == "headline" and not cells.isdisjoint(row["cells"])
    ]
    how = f"measured on {comparison.bed_in_words}, communication {shares[0]:.0%} "
    how += f"(paper {comparison.share:.0%})"
    off = ""
    verdict = "shown, not claimed"
    if headline.published is not None:
        off, verdict = judged(book, headline.cells[0], ratio.median, headline.published)
    here = share(ratio.median) + interval
    return replace(line, here=here, how=how, off=off, verdict=verdict)


def known(book: Book, name: str) -> PublishedCell:
    """Return a published figure by name."""
    return book.cells.get(name) or book.quotes[name]


def of_gates(book: Book, rows: list[dict[str, Any]]) -> Iterator[HeadlineLine]:
    """Yield the lines of the topology gate over GShard and BASE."""
    times = {row["gate"]: row["time_to_loss_ratio"] for row in rows}
    for gate in ("gshard", "base"):
        cell = book.quotes[f"fastermoe.over_{gate}"]
        here = times[gate] / times["topology"]
        published = book.value(cell.name)
        off, verdict = judged(book, cell.name, here, published)
        yield HeadlineLine(
            comparison=f"time to a loss: {gate} over the topology gate",
            place=cell.place,
            published=published,
            here=share(here),
            how="measured, a model of our own (`gates_loss.json`)",
            off=off,
            verdict=verdict,
        )


def of_simulator(book: Book, paper: str, rows: list[dict[str, Any]]) -> Iterator[HeadlineLine]:
    """Yield the lines of headlines that are simulated, or not here."""
    ours = {row["cell"]: row["ours"] for row in rows}
    for headline in book.headlines(paper):
        cell = known(book, headline.cell)
        is_gain = cell.unit == "gain %"
        value = book.value(cell.name)
        published = 1 + value / 100 if is_gain else value
        line = HeadlineLine(
            comparison=headline.what,
            place=cell.place,
            published=published,
            verdict=book.filled(headline.why, ours),
        )
        if not headline.why:  # otherwise the reason why it is not simulated
            figure = ours[headline.cell]
            here = 1 + figure / 100 if is_gain else figure
            off, verdict = judged(book, headline.cell, here, published)
            line = replace(line, here=share(here), how="simulated", off=off, verdict=verdict)
        yield line
