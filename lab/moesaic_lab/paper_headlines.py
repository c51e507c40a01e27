"""The headlines of a paper as its page shows them: measured, simulated, or not here with the
reason. Each holds or fails in the open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moesaic_lab.headlines import COMPARISONS, OFF, Comparison, Headline, found
from moesaic_lab.measured import measured
from moesaic_lab.reproduce.records import Book, read_book
from moesaic_lab.tables import markdown_table, share

HEAD = ("comparison", "place", "published", "here", "how", "off the gain", "verdict")


def headlines_of(paper: str, results: Mapping[str, Any]) -> str:
    """Return the section of a paper's headlines."""
    book = read_book()
    lines = [list(HEAD)]
    for make in COMPARISONS[paper]:  # type: ignore[index]
        comparison = make()
        rows = results["headlines"]["rows"]
        lines += [of_bed(book, comparison, each, rows) for each in comparison.headlines]
    if paper == "fastermoe":
        lines += of_gates(book, results["gates_loss"]["rows"])
    lines += of_simulator(book, paper, results["reproduce"]["rows"])
    load = ", under a synthetic Zipf load" if paper == "fastermoe" else ""
    return (
        f"## Headlines{load}\n\nA headline holds if our gain is within {OFF:.0%} of the published "
        f"gain, in either direction. Measured {measured({'headlines': results['headlines']})}.\n\n"
        f"{markdown_table(lines)}"
    )


def verdict(book: Book, cell: str, here: float, published: float) -> tuple[str, str]:
    """Return how far a gain is off the published one, and whether that holds or why not."""
    off = (here - 1) / (published - 1) - 1
    reason = book.missed.get(f"papers.{cell}", "")
    return f"{off:+.0%}", "holds" if abs(off) <= OFF else f"**failed**: {reason}"


def of_bed(
    book: Book, comparison: Comparison, headline: Headline, rows: list[dict[str, Any]]
) -> list[str]:
    """Return the line of a headline that is measured on an emulated cluster."""
    ratio = found(comparison, headline, rows)
    cells = [*map(known(book), headline.cells)]
    place = ", ".join(dict.fromkeys(cell.place for cell in cells if cell.place))
    published = "" if headline.published is None else share(headline.published)
    if ratio is None:
        return [headline.what, place, published, "", "not here", "", "its methods have not run yet"]
    here = share(ratio.median)
    here += (
        " (medians)" if ratio.interval is None else " ({:.2f} to {:.2f})".format(*ratio.interval)
    )
    of_comparison = {cell for each in comparison.headlines for cell in each.cells}
    shared = next(
        row["share_here"]
        for row in rows
        if row["part"] == "headline" and of_comparison & set(row["cells"])
    )
    how = f"measured on {comparison.bed_in_words}, communication {shared:.0%} "
    how += f"(paper {comparison.share:.0%})"
    if headline.published is None:
        return [headline.what, place, published, here, how, "", "shown, not claimed"]
    judged = verdict(book, headline.cells[0], ratio.median, headline.published)
    return [headline.what, place, published, here, how, *judged]


def known(book: Book) -> Any:
    """Return a function that gives a published figure by name."""
    return lambda name: book.cells.get(name) or book.quotes[name]


def of_gates(book: Book, rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of the topology gate over GShard and BASE."""
    times = {row["gate"]: row["time_to_loss_ratio"] for row in rows}
    for gate in ("gshard", "base"):
        cell = book.quotes[f"fastermoe.over_{gate}"]
        here = times[gate] / times["topology"]
        published = book.value(cell.name)
        what = f"time to a loss: {gate} over the topology gate"
        how = "measured, a model of our own (`gates_loss.json`)"
        judged = verdict(book, cell.name, here, published)
        yield [what, cell.place, share(published), share(here), how, *judged]


def of_simulator(book: Book, paper: str, rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the lines of headlines that are simulated, or not here."""
    ours = {row["cell"]: row["ours"] for row in rows}
    for headline in book.headlines(paper):
        cell = known(book)(headline.cell)
        is_gain = cell.unit == "gain %"
        published = 1 + cell.value / 100 if is_gain else cell.value
        line = [headline.what, cell.place, share(published)]
        if headline.why:
            yield [*line, "", "not here", "", book.filled(headline.why, ours)]
            continue
        here = 1 + ours[headline.cell] / 100 if is_gain else ours[headline.cell]
        judged = verdict(book, headline.cell, here, published)
        yield [*line, share(here), "simulated", *judged]
