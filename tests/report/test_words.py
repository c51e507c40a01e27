"""Headline cards, and short forms of numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.report.page import over_steps
from moesaic.report.summary import amount, cards, duration, percent, read_runs
from report.folders import dense_run, eval_line, layer, sparse_run, train_line, write_run


def test_a_run_without_a_measured_peak_has_no_mfu(tmp_path: Path) -> None:
    line = {
        name: value
        for name, value in train_line(5, 4.0, 9.0, [layer([2, 2], 0.0)]).items()
        if name != "mfu"
    }
    runs = read_runs([write_run(tmp_path / "cpu", [line])])
    assert "MFU" not in {card.title for card in cards(runs)}
    (chart,) = (picture.figure for picture in over_steps(runs) if picture.title == "MFU")
    assert not chart.data


def test_different_numbers_of_steps_are_said(tmp_path: Path) -> None:
    runs = read_runs(
        [sparse_run(tmp_path / "moe"), write_run(tmp_path / "long", [eval_line(60, 2.5)])]
    )
    assert {card.title: card.note for card in cards(runs)}["Tokens"] == "in 30 to 60 steps"


def test_cards_hold_a_value_per_run(tmp_path: Path) -> None:
    runs = read_runs([sparse_run(tmp_path / "moe"), dense_run(tmp_path / "dense")])
    values_of = {card.title: card.values for card in cards(runs)}
    assert values_of["Validation loss"] == ("2.750", "2.875")
    assert values_of["Best validation"] == ("2.500", "2.875")
    assert values_of["Tokens"] == ("1.92 k", "1.92 k")
    assert values_of["MaxVio"] == ("0.70", "—")
    assert (values_of["Dead experts"], values_of["Dropped"]) == (("1", "—"), ("4.2 %", "—"))
    assert "MaxVio" not in {card.title for card in cards(runs[1:])}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (812.4, "812"), (9213, "9.21 k"), (92130, "92.1 k"), (2.048e6, "2.05 M")],
)
def test_amounts(value: float, text: str) -> None:
    assert amount(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (0.314, "31 %"), (0.0314, "3.1 %"), (0.00314, "0.31 %")]
)
def test_percentages(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.26, "4.3 s"),
        (48.2, "48 s"),
        (59.7, "1 min 00 s"),
        (131, "2 min 11 s"),
        (18190, "5 h 03 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
