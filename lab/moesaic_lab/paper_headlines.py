"""The headlines of a paper as its page shows them: measured, simulated, or not here with the
reason. Each holds or fails in the open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moesaic_lab.headlines import (
    COMPARISONS,
    OFF,
    SLOWER,
    Comparison,
    Headline,
    MeasuredRatio,
    found,
    rows_about,
)
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
    full: str = ""
    """Our ratio at the full rates of the bed, where messages cost more of a step."""
    how: str = "not here"
    off: str = ""
    verdict: str

    @property
    def cells(self) -> list[str]:
        """The cells of the line."""
        published = "" if self.published is None else share(self.published)
        here = [self.here, self.full, self.how, self.off]
        return [self.comparison, self.place, published, *here, self.verdict]


HEAD = [
    "comparison",
    "place",
    "published gain, a ratio",
    "here",
    "at full rates",
    "how",
    "off the gain",
    "verdict",
]


def headlines_of(paper: str, results: Mapping[str, Any]) -> str:
    """Return the section of a paper's headlines."""
    book = read_book()
    ours = {row["cell"]: row["ours"] for row in results["reproduce"]["rows"]}
    lines: list[HeadlineLine] = []
    for make in COMPARISONS[paper]:  # type: ignore[index]
        about = (make(1), make(SLOWER), results["headlines"]["rows"])
        _, slow, _ = about
        lines += [of_bed(book, *about, each) for each in slow.headlines]
        for part in slow.parts:
            full, slower = (found(each, part, about[2]) for each in about[:2])
            simulated = book.ratio(part.cells, ours) if part.cells else None
            line = of_bed(book, *about, part)
            lines.append(replace(line, verdict=reason(full, slower, simulated)))
    if paper == "fastermoe":
        lines += of_gates(book, results["gates_loss"]["rows"])
    lines += of_simulator(book, paper, ours)
    load = ", under a synthetic Zipf load" if paper == "fastermoe" else ""
    table = markdown_table([HEAD, *(line.cells for line in lines)])
    where = measured({"headlines": results["headlines"]})
    return (
        f"## Headlines{load}\n\nA headline holds if our gain is within {OFF:.0%} of the published "
        f"gain, in either direction. Measured {where}, on links and accelerators {SLOWER} times "
        "slower than those of the column *at full rates*: bytes and products keep the proportion "
        "of the paper, and the processor time of a message, which the ranks of two cores share, is "
        "a small part of a step. A part of a method says whose loss it is, if it loses at full "
        "rates: the bed's, if it gains where messages cost next to no processor time, and in part "
        "if it loses less there; our code's, if it loses as much there, and the simulator has a "
        "gain for the same programs on the paper's cluster; otherwise it is not explained.\n\n"
        f"{table}"
    )


def in_words(ratio: MeasuredRatio | None) -> str:
    """Return a measured ratio with its interval."""
    if ratio is None:
        return "not run"
    if ratio.interval is None:
        return f"{share(ratio.median)} (medians)"
    low, high = ratio.interval
    return f"{share(ratio.median)} ({low:.2f} to {high:.2f})"


def reason(full: MeasuredRatio | None, slow: MeasuredRatio | None, simulated: float | None) -> str:
    """Return why a part loses at full rates, with its simulated gain."""
    if full is None or slow is None:
        return "not run"
    if slow.median >= 1:
        return "a part, gains" if full.median >= 1 else "a part, loses by the bed"
    if slow.median > full.median:
        return "a part, loses in part by the bed"
    if simulated is None or simulated < 1:
        return "a part, loses: not explained"
    return f"a part, loses by our code: simulated {share(simulated)}"


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
    book: Book, full: Comparison, slow: Comparison, rows: list[dict[str, Any]], headline: Headline
) -> HeadlineLine:
    """Return the line of a headline that is measured on an emulated cluster, at its full rates and
    slowed down."""
    ratio = found(slow, headline, rows)
    places = [known(book, cell).place for cell in headline.cells]
    line = HeadlineLine(
        comparison=headline.what,
        place=", ".join(dict.fromkeys(filter(None, places))),
        published=headline.published,
        full=in_words(found(full, headline, rows)),
        verdict="its methods have not run yet",
    )
    if ratio is None:
        return line
    # All headlines of a comparison have one share of communication: that of its reference.
    first, *_ = (row for row in rows_about(slow, rows) if row["part"] == "headline")
    how = f"measured on {slow.bed_in_words}, communication {first['share_here']:.0%} "
    how += f"(paper {slow.share:.0%})"
    off = ""
    verdict = "shown, not claimed"
    if headline.published is not None:
        off, verdict = judged(book, headline.cells[0], ratio.median, headline.published)
    return replace(line, here=in_words(ratio), how=how, off=off, verdict=verdict)


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


def of_simulator(book: Book, paper: str, ours: Mapping[str, float]) -> Iterator[HeadlineLine]:
    """Yield the lines of headlines that are simulated, or not here."""
    for headline in book.headlines(paper):
        cell = known(book, headline.cell)
        published = book.ratio([cell.name])
        line = HeadlineLine(
            comparison=headline.what,
            place=cell.place,
            published=published,
            verdict=book.filled(headline.why, ours),
        )
        if not headline.why:  # otherwise the reason why it is not simulated
            here = book.ratio([cell.name], ours)
            off, verdict = judged(book, headline.cell, here, published)
            line = replace(line, here=share(here), how="simulated", off=off, verdict=verdict)
        yield line
