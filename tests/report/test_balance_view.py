"""The balance section: shares, legends and charts match the metrics; a run without decisions gets no section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.report import balance
from moesaic.report.page import write_report
from report.folders import eval_line, layer, sparse_run, train_line, write_run


def of_layer(options: dict[str, int], alone: list[float], rows: list[float], **more: Any) -> dict[str, Any]:
    return {
        "options": options, "predicted_seconds": {}, "rows_alone": alone, "rows": rows, "copies_replicated": 3.0,
        "token_bytes_alone": 4.0 * 2**20, "token_bytes": 2.0 * 2**20, "weight_bytes": 2.0**20, "decision_seconds": 0.002,
    } | more  # fmt: skip


def told(step: int, layers: list[dict[str, Any]], share: float = 0.01) -> dict[str, Any]:
    return train_line(step, 2.0, 100.0, [layer([1, 1], 0.0)] * 2, balance={"decision_share": share, "layers": layers})


LINES = [
    told(10, [of_layer({"alone": 2}, [5, 5], [5, 5]), of_layer({"alone": 2}, [9, 1], [9, 1])]),
    told(
        20,
        [
            of_layer({"alone": 1, "<spill>": 3}, [8, 2], [5, 5]),
            of_layer({"shadow": 4}, [9, 1], [6, 4], samples_moved=2.0, sample_bytes_across=-(2.0**20)),
        ],
        share=0.03,
    ),
]


@pytest.fixture
def entries() -> balance.BalanceLines:
    lines = balance.balance_of([*LINES, eval_line(20, 2.0), train_line(30, 2.0, 100.0, [])])
    assert lines is not None
    return lines


def test_the_lines_are_those_with_decisions(entries: balance.BalanceLines) -> None:
    assert entries.steps == (10, 20)
    assert entries.options == ("alone", "shadow", "<spill>")
    assert balance.balance_of([train_line(30, 2.0, 100.0, [])]) is None


def test_loads_are_those_of_the_busiest_rank_over_the_mean(entries: balance.BalanceLines) -> None:
    chart = balance.busiest_rank(entries)
    assert [trace.name for trace in chart.data] == ["left alone", "as decided"]
    assert list(chart.data[0].y) == pytest.approx([(1 + 1.8) / 2, (1.6 + 1.8) / 2])
    assert list(chart.data[1].y) == pytest.approx([(1 + 1.8) / 2, (1 + 1.2) / 2])


def test_the_layer_with_most_skew_is_drawn_rank_by_rank(entries: balance.BalanceLines) -> None:
    assert balance.most_skewed(entries) == 1
    before, after = (balance.load_per_rank(entries, 1, name).data[0] for name in ("rows_alone", "rows"))
    assert [list(row) for row in before.z] == [[1.8, 1.8], [0.2, 0.2]]
    assert [list(row) for row in after.z] == [[1.8, 1.2], [0.2, 0.8]]
    assert list(after.x) == [10, 20]


def test_decisions_are_the_commonest_of_each_line(entries: balance.BalanceLines) -> None:
    (trace,) = balance.decisions(entries).data
    assert [list(row) for row in trace.z] == [[0, 2], [0, 1]]
    assert trace.text[0][1] == "&lt;spill&gt;"
    colours = balance.option_colours(entries.options)
    assert len(set(colours.values())) == 3
    assert trace.colorscale[0][1] == colours["alone"]
    assert trace.colorscale[-1][1] == colours["<spill>"]


def test_bytes_are_means_over_the_layers_that_have_them(entries: balance.BalanceLines) -> None:
    traces = {trace.name: list(trace.y) for trace in balance.bytes_moved(entries).data}
    assert traces["tokens, left alone"] == [4, 4]
    assert traces["tokens"] == [2, 2]
    assert traces["weights of experts"] == [1, 1]
    assert traces["samples, between nodes"] == [0, -1]
    assert "samples, inside nodes" not in traces


def test_the_table_has_the_last_lines_numbers(entries: balance.BalanceLines) -> None:
    table = balance.table(entries)
    assert table.rows[1] == ("layer 1", "shadow x 4", "1.80", "1.20", "3", "2", "2.00")
    assert [key.name for key in balance.legend(entries.options).keys] == list(entries.options)


def test_long_runs_are_thinned_and_keep_their_last_line() -> None:
    many = [told(step, [of_layer({"alone": 1}, [1, 1], [1, 1])]) for step in range(1, 451)]
    entries = balance.balance_of(many)
    assert entries is not None
    steps = [step for step, _ in balance.thinned(entries)]
    assert len(steps) <= 200
    assert steps[-1] == 450


def test_the_page_has_the_section_for_runs_that_decided_and_no_others(tmp_path: Path) -> None:
    page = write_report([write_run(tmp_path / "run", [*LINES, eval_line(20, 2.0)])]).read_text(encoding="utf-8")
    for title in ("Balance of", "Load per rank of layer 1, if left alone", "Bytes that moved", "Decisions"):
        assert title in page
    assert "<spill>" not in page
    assert "Balance of" not in write_report([sparse_run(tmp_path / "plain")]).read_text(encoding="utf-8")


def test_a_run_in_which_only_samples_moved_has_a_section_too(tmp_path: Path) -> None:
    moved = {"samples_moved": 3.0, "sample_bytes_across": -1e6, "sample_bytes_inside": 2e6}
    lines = [told(step, [moved, {}], share=0.0) for step in (10, 20)]
    page = write_report([write_run(tmp_path / "run", [*lines, eval_line(20, 2.0)])]).read_text(encoding="utf-8")
    assert "Balance of" in page
    assert "Load of the busiest rank" not in page
    assert "Bytes that moved" in page
