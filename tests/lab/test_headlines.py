"""The papers' headlines: what is compared, what becomes of the times, and what is claimed."""

from __future__ import annotations

from typing import get_args

import pytest

from moesaic_lab.headlines import COMPARISONS, Comparison, Headline, Paper, claims, rows_of
from moesaic_lab.measure import TimedCell, Timing
from moesaic_lab.reproduce.records import read_book
from moesaic_testbed.bed import Bed

MADE = [make() for of_paper in COMPARISONS.values() for make in of_paper]


def nothing(*_: object) -> tuple[TimedCell, float]:
    raise AssertionError


def comparison(*made: Headline) -> Comparison:
    return Comparison(
        paper="schemoe",
        name="x",
        bed=Bed(nodes=2, ranks_per_node=2, inter="200mbit"),
        share=0.5,
        of="its Table 1",
        reference="plain",
        headlines=made,
        run=nothing,
    )


def timed(**seconds: float) -> TimedCell:
    return TimedCell(
        timings={name: Timing.of((each, 2 * each, each)) for name, each in seconds.items()}
    )


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
        cells=("schemoe.layers.gain",),
        what="w",
        slow=("plain", "slower"),
        fast=("a", "b"),
        why="because",
    )
    rows = rows_of(comparison(headline), timed(plain=2.0, slower=3.0, a=1.0, b=0.8), 0.5)
    first = rows[0]
    assert (first["slow"], first["fast"], first["here"], first["pairs"]) == ("plain", "b", 2.5, 3)
    assert first["off"] == pytest.approx(2.5 / 1.22 - 1)
    assert first["share_here"] == pytest.approx(1 - 0.5 / 2.0)
    assert [row["method"] for row in rows[1:]] == ["plain", "slower", "a", "b"]


@pytest.mark.parametrize(
    ("seconds", "holds"), [(1.0, False), (1.0 / 1.10, False), (1.0 / 1.12, True)]
)
def test_a_claim_needs_half_of_the_published_gain_and_says_what_was_not_run(
    seconds: float, holds: bool
) -> None:
    one = Headline(cells=("schemoe.layers.gain",), what="w", slow=("plain",), fast=("a",))
    found = {
        claim.name: claim
        for claim in claims(rows_of(comparison(one), timed(plain=1.0, a=seconds), 0.5))
    }
    assert list(found) == [
        f"papers.{each.cells[0]}" for of_paper in MADE for each in of_paper.headlines
    ]
    assert all(claim.target is not None and claim.target > 1 for claim in found.values())
    assert found["papers.schemoe.layers.gain"].target == pytest.approx(1.11)
    assert found["papers.schemoe.layers.gain"].holds is holds
    assert found["papers.parm.chosen.b32.m2s2"].reason == "not run"
