"""The balance section: shares and charts match the metrics; a run without decisions gets no
section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from moesaic.report.page import balance_section, write_report
from moesaic.report.summary import summarise
from report.folders import eval_line, layer, sparse_run, train_line, write_run


def of_layer(
    options: dict[str, int], alone: list[float], rows: list[float], **more: Any
) -> dict[str, Any]:
    return {
        "options": options,
        "predicted_seconds": {},
        "rows_alone": alone,
        "rows": rows,
        "copies_replicated": 3.0,
        "token_bytes_alone": 4.0 * 2**20,
        "token_bytes": 2.0 * 2**20,
        "weight_bytes": 2.0**20,
        "decision_seconds": 0.002,
    } | more


def told(step: int, layers: list[dict[str, Any]], share: float = 0.01) -> dict[str, Any]:
    return train_line(
        step,
        2.0,
        100.0,
        [layer([1, 1], 0.0)] * 2,
        balance={"decision_share": share, "layers": layers},
    )


LINES = [
    told(10, [of_layer({"alone": 2}, [5, 5], [5, 5]), of_layer({"alone": 2}, [9, 1], [9, 1])]),
    told(
        20,
        [
            of_layer({"alone": 1, "<spill>": 3}, [8, 2], [5, 5]),
            of_layer(
                {"shadow": 4}, [9, 1], [6, 4], samples_moved=2.0, sample_bytes_across=-(2.0**20)
            ),
        ],
        share=0.03,
    ),
]


@pytest.fixture
def charts(tmp_path: Path) -> dict[str, go.Figure]:
    run = write_run(tmp_path / "run", [*LINES, eval_line(20, 2.0), train_line(30, 2.0, 100.0, [])])
    section = balance_section(summarise(run, "run"), "#123456")
    return {picture.title: picture.figure for picture in section.charts}


def test_loads_are_those_of_the_busiest_rank_over_the_mean(charts: dict[str, go.Figure]) -> None:
    alone, decided = charts["Load of the busiest rank"].data
    assert (alone.name, decided.name) == ("left alone", "as decided")
    assert list(alone.x) == [10, 20]
    assert list(alone.y) == pytest.approx([(1 + 1.8) / 2, (1.6 + 1.8) / 2])
    assert list(decided.y) == pytest.approx([(1 + 1.8) / 2, (1 + 1.2) / 2])


def test_decisions_are_shares_of_the_calls(charts: dict[str, go.Figure]) -> None:
    traces = {trace.name: list(trace.y) for trace in charts["Decisions"].data}
    assert traces == {"&lt;spill&gt;": [0, 0.375], "alone": [1, 0.125], "shadow": [0, 0.5]}


def test_bytes_are_means_over_the_layers_that_have_them(charts: dict[str, go.Figure]) -> None:
    traces = {trace.name: list(trace.y) for trace in charts["Bytes that moved"].data}
    assert traces["tokens, left alone"] == [4, 4]
    assert traces["tokens"] == [2, 2]
    assert traces["weights of experts"] == [1, 1]
    assert traces["samples, between nodes"] == [0, -1]
    assert "samples, inside nodes" not in traces


def test_the_page_has_the_section_for_runs_that_decided_and_no_others(tmp_path: Path) -> None:
    page = write_report([write_run(tmp_path / "run", [*LINES, eval_line(20, 2.0)])]).read_text(
        encoding="utf-8"
    )
    for title in ("Balance of", "Load of the busiest rank", "Bytes that moved", "Decisions"):
        assert title in page
    assert "<spill>" not in page
    assert "Balance of" not in write_report([sparse_run(tmp_path / "plain")]).read_text(
        encoding="utf-8"
    )


def test_a_run_in_which_only_samples_moved_has_a_section_too(tmp_path: Path) -> None:
    moved = {"samples_moved": 3.0, "sample_bytes_across": -1e6, "sample_bytes_inside": 2e6}
    lines = [told(step, [moved, {}], share=0.0) for step in (10, 20)]
    page = write_report([write_run(tmp_path / "run", [*lines, eval_line(20, 2.0)])]).read_text(
        encoding="utf-8"
    )
    assert "Balance of" in page
    assert "Load of the busiest rank" not in page
    assert "Bytes that moved" in page
