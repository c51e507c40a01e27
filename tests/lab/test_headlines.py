"""The papers' headlines: what is compared, what becomes of the times, and that the page's table is that of the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from moesaic_lab import headlines
from moesaic_lab.headlines import COMPARISONS, SAID, Comparison, Headline, Paper, claims, rows_of, section
from moesaic_lab.measure import TimedCell, Timing
from moesaic_lab.reproduce.records import read_book
from moesaic_lab.tables import write_page
from moesaic_testbed.bed import Bed

ROOT = Path(__file__).resolve().parents[2]
MADE = [make() for of_paper in COMPARISONS.values() for make in of_paper]


def nothing(*_: object) -> tuple[TimedCell, float]:
    raise AssertionError


def comparison(*made: Headline) -> Comparison:
    return Comparison(
        paper="schemoe", name="x", bed=Bed(nodes=2, ranks_per_node=2, inter="200mbit"), share=0.5, of="its Table 1",
        reference="plain", headlines=made, run=nothing,
    )  # fmt: skip


def timed(**seconds: float) -> TimedCell:
    return TimedCell(timings={name: Timing.of((each, 2 * each, each)) for name, each in seconds.items()})


def test_every_paper_has_a_headline_whose_figure_is_published() -> None:
    assert set(COMPARISONS) == set(get_args(Paper))
    for each in MADE:
        assert 0 < each.share < 1
        for headline in each.headlines:
            assert headline.published > 1
            assert headline.why
            assert set(headline.cells) <= set(read_book().cells)
    assert len({each.name for each in MADE}) == len(MADE)


def test_a_gain_and_a_quotient_of_times_are_ratios_of_speeds() -> None:
    found = {headline.cells: headline.published for each in MADE for headline in each.headlines}
    assert found["schemoe.layers.gain",] == pytest.approx(1.22)
    assert found["schemoe.ablation.naive", "schemoe.ablation.zfp"] == pytest.approx(2401 / 1264)
    assert found["parm.chosen.b32.m4s4",] == 4.91


def test_a_ratio_is_of_the_fastest_on_each_side() -> None:
    headline = Headline(
        cells=("schemoe.layers.gain",), what="w", slow=("plain", "slower"), fast=("a", "b"), why="because"
    )
    rows = rows_of(comparison(headline), timed(plain=2.0, slower=3.0, a=1.0, b=0.8), 0.5)
    first = rows[0]
    assert (first["slow"], first["fast"], first["here"], first["pairs"]) == ("plain", "b", 2.5, 3)
    assert first["off"] == pytest.approx(2.5 / 1.22 - 1)
    assert first["share_here"] == pytest.approx(1 - 0.5 / 2.0)
    assert [row["method"] for row in rows[1:]] == ["plain", "slower", "a", "b"]


def test_the_table_says_why_where_a_ratio_is_far_off_and_only_there() -> None:
    far = Headline(cells=("schemoe.layers.gain",), what="far", slow=("plain",), fast=("a",), why="because")
    near = Headline(cells=("schemoe.layers.gain",), what="near", slow=("plain",), fast=("b",), why="never said")
    rows = rows_of(comparison(far, near), timed(plain=2.0, a=1.0, b=1.6), 0.5)
    text = section(rows)
    assert "+64%: because" in text
    assert "never said" not in text
    assert "| ScheMoE | far | 1.22 | 2.00 (2.00 to 2.00) | 50% (its Table 1) | 75% |" in text


def test_claims_are_of_each_papers_first_headline_and_say_what_was_not_run() -> None:
    one = Headline(cells=("schemoe.layers.gain",), what="w", slow=("plain",), fast=("a",))
    found = {claim.name: claim for claim in claims(rows_of(comparison(one, one), timed(plain=1.0, a=1.0), 0.5))}
    assert list(found) == [f"papers.{paper}.headline_here" for paper in headlines.PAPERS]
    assert found["papers.schemoe.headline_here"].holds is True
    assert found["papers.schemoe.headline_here"].target == pytest.approx(0.75 * 1.22)
    assert found["papers.parm.headline_here"].reason == "not run"


def test_the_table_goes_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{headlines.MARKS[0]}\n\nold\n\n{headlines.MARKS[1]}\nafter\n")
    one = Headline(cells=("schemoe.layers.gain",), what="w", slow=("plain",), fast=("a",))
    write_page(page, section(rows_of(comparison(one), timed(plain=1.0, a=1.0), 0.5)), headlines.MARKS)
    text = page.read_text()
    assert text.startswith(f"before\n{headlines.MARKS[0]}\n\n| paper |")
    assert text.endswith(f"{headlines.MARKS[1]}\nafter\n")
    assert "old" not in text


def test_the_page_has_the_table_of_the_results_and_a_reason_for_every_miss() -> None:
    stored = ROOT / "benchmarks" / "results" / "headlines.json"
    rows = json.loads(stored.read_text(encoding="utf-8"))["rows"] if stored.exists() else []
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    between = text.split(headlines.MARKS[0])[1].split(headlines.MARKS[1])[0].strip()
    assert between == (section(rows) if rows else "")
    assert all(row["why"] for row in rows if row["part"] == "headline" and abs(row["off"]) > SAID)
