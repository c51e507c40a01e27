"""Charts of runs: their lines, colours and titles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from report.folders import dense_run, eval_line, sparse_run, train_line, write_run

pytest.importorskip("plotly")

from moesaic.report import page
from moesaic.report.style import INK, expert_loads, load_shares, run_colour, time_unit
from moesaic.report.summary import RunSummary, read_runs


@pytest.fixture
def runs(tmp_path: Path) -> list[RunSummary]:
    return read_runs([sparse_run(tmp_path / "moe"), dense_run(tmp_path / "dense")])


def test_loss_has_both_losses_of_both_runs(runs: list[RunSummary]) -> None:
    chart = page.loss_over_steps(runs).figure
    assert [(trace.name, trace.line.color) for trace in chart.data] == [
        ("moe, training", run_colour(0)),
        ("dense, training", run_colour(1)),
        ("moe, validation", run_colour(0)),
        ("dense, validation", run_colour(1)),
    ]
    assert list(chart.data[2].y) == [2.5, 2.75]
    assert chart.data[2].mode == "lines+markers"
    assert chart.data[0].line.width < chart.data[2].line.width
    assert chart.layout.yaxis.title.text == "loss (nats/byte)"


def test_a_single_evaluation_is_a_marker(runs: list[RunSummary]) -> None:
    assert page.validation_over_time(runs).figure.data[1].mode == "markers"


def test_losses_of_other_tokens_are_named_as_such(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "bpe", [train_line(1, 5.0, 1.0, []), eval_line(1, 5.0, per_byte=1.5)]
    )
    chart = page.loss_over_steps(read_runs([run])).figure
    assert chart.layout.yaxis.title.text == "loss (nats/token)"
    assert list(chart.data[1].y) == [5.0]
    assert list(page.validation_over_time(read_runs([run])).figure.data[0].y) == [1.5]


def test_the_loss_axis_starts_below_the_first_steep_drop(tmp_path: Path) -> None:
    lines = [train_line(1, 9.0, 1.0, []), *[eval_line(step, 3.0 - step / 10) for step in (2, 4, 6)]]
    low, high = page.loss_over_steps(
        read_runs([write_run(tmp_path / "a", lines)])
    ).figure.layout.yaxis.range
    assert low < 2.4
    assert 2.8 < high < 9.0


def test_validation_over_time_uses_a_fitting_unit(runs: list[RunSummary]) -> None:
    assert list(page.validation_over_time(runs).figure.data[0].x) == [5.0, 15.0]
    long = [replace(run, training_seconds=1200.0) for run in runs]
    chart = page.validation_over_time(long).figure
    assert list(chart.data[0].x) == [5 / 60, 15 / 60]
    assert chart.layout.xaxis.title.text == "training time (min)"
    assert [time_unit(seconds)[0] for seconds in (599, 601, 4 * 3600)] == ["s", "min", "h"]


def test_runs_without_a_number_are_left_out_and_colours_stay(tmp_path: Path) -> None:
    runs = read_runs([dense_run(tmp_path / "dense"), sparse_run(tmp_path / "moe")])
    chart = page.over_steps(runs)[-1].figure
    assert [(trace.name, trace.line.color) for trace in chart.data] == [("moe", run_colour(1))]


def test_charts_over_steps_have_a_line_per_run_and_titles(runs: list[RunSummary]) -> None:
    drawn = page.over_steps(runs)
    titles = ["Throughput", "MFU", "Gradient norm", "Learning rate", "Auxiliary loss: load balance"]
    assert [each.title for each in drawn] == titles
    for chart in (each.figure for each in drawn[:4]):
        assert [trace.name for trace in chart.data] == ["moe", "dense"]
        assert chart.layout.xaxis.title.text == "optimizer step"
        assert chart.layout.yaxis.title.text
        assert chart.layout.showlegend is True
        assert [trace.line.dash for trace in chart.data] == [None, "dash"]
    for place, name in enumerate(("tokens_per_second", "mfu")):
        assert [trace.y[0] for trace in drawn[place].figure.data] == [
            run.over_steps(name).values[0] for run in runs
        ]


def test_layers_have_a_line_each_and_the_mean(runs: list[RunSummary]) -> None:
    drawn = page.layer_charts(runs[0])
    assert len(drawn) == 5
    for each in drawn:
        assert [trace.name for trace in each.figure.data] == ["layer 0", "layer 1", "mean"]
    chart = drawn[0].figure
    assert list(chart.data[2].y) == [0.2, 0.5, 0.7]
    assert chart.data[2].line.color == INK
    assert len({trace.line.color for trace in chart.data}) == 3


def test_heatmap_is_load_over_mean_centred_at_one(runs: list[RunSummary]) -> None:
    layer = runs[0].layers[0]
    heat = expert_loads(layer.load_steps, layer.loads).data[0]
    assert list(heat.x) == [10, 20, 30]
    assert [list(row) for row in heat.z] == [
        [1.333, 2.0, 1.0],
        [0.0, 0.667, 1.0],
        [1.333, 0.667, 1.333],
        [1.333, 0.667, 0.667],
    ]
    assert (heat.zmin + heat.zmax) / 2 == 1
    assert heat.colorscale[2][0] == 0.5


def test_many_columns_are_added_up(runs: list[RunSummary]) -> None:
    layer = runs[0].layers[0]
    steps, shares = load_shares(layer.load_steps, layer.loads, most_columns=2)
    assert steps == [20, 30]
    assert shares[0] == [round(10 / 6, 3), round(2 / 6, 3), 1.0, 1.0]


def test_an_interval_without_load_is_blank() -> None:
    assert load_shares((1,), ((0, 0),)) == ([1], [[None, None]])
