"""Gantt charts: bars match the timeline, charts of one page share their axis, and the page is
self-contained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers import refused

pytest.importorskip("plotly")

from moesaic.program.build import SCHEDULES
from moesaic.program.order.optsche import optsche
from moesaic.program.passes.split import split_capacity
from moesaic.program.task import Lane, Stage
from moesaic.program.timeline import Span, Timeline, lay_out
from moesaic.program.transpose import transpose
from moesaic.report.gantt import gantt, in_words, unit_of, write_gantt
from moesaic.report.style import WHOLE, ordered_colours
from report.test_page import BROWSER, complaints, needs_browser, open_in_browser, without_plotly

SPANS = (
    Span("take", Lane.COMPUTE, None, Stage.DISPATCH, 0.0, 0.001),
    Span("h.0", Lane.INTER, 0, Stage.DISPATCH, 0.001, 0.005),
    Span("out.0", Lane.COMPUTE, 0, Stage.EXPERT, 0.005, 0.008),
    Span("h.1", Lane.INTER, 1, Stage.DISPATCH, 0.005, 0.009),
)
TIMELINE = Timeline("made by hand", SPANS)


def bars(timeline: Timeline) -> dict[str, tuple[str, float, float, str]]:
    """Return (lane, start, length, colour) by task."""
    return {
        task: (lane, start, length, trace.marker.color)
        for trace in gantt(timeline).data
        for task, lane, start, length in zip(trace.text, trace.y, trace.base, trace.x)
    }


def test_bars_stand_where_the_timeline_says() -> None:
    first, second = ordered_colours(2)
    assert bars(TIMELINE) == {
        "take": ("compute", 0, 1, WHOLE),
        "h.0": ("inter", 1, 4, first),
        "out.0": ("compute", 5, 3, first),
        "h.1": ("inter", 5, 4, second),
    }


def test_lanes_run_from_top_to_bottom_and_idle_ones_are_left_out() -> None:
    made = gantt(TIMELINE)
    assert list(made.layout.yaxis.categoryarray) == ["inter", "compute"]
    assert [trace.name for trace in made.data] == ["all chunks", "chunk 0", "chunk 1"]
    assert made.layout.xaxis.title.text == "time (ms)"
    assert list(made.layout.xaxis.range) == [0, 9]
    assert list(gantt(TIMELINE, 0.02).layout.xaxis.range) == [0, 20]


def test_with_one_chunk_the_stages_have_colours_of_their_own() -> None:
    """Every task works on all copies; dispatch, experts and combine are told apart."""
    program = SCHEDULES["s2"]()
    timeline = lay_out(program, {task.name: 1e-3 for task in program.tasks})
    made = gantt(timeline)
    assert [trace.name for trace in made.data] == ["dispatch", "expert", "combine"]
    assert len({trace.marker.color for trace in made.data} - {WHOLE}) == 3
    stages = {span.task: span.stage.value for span in timeline.spans}
    assert {task: trace.name for trace in made.data for task in trace.text} == stages


def test_hovering_shows_stage_and_end() -> None:
    (trace,) = (trace for trace in gantt(TIMELINE).data if trace.name == "chunk 0")
    assert [list(row) for row in trace.customdata] == [["dispatch", 5], ["expert", 8]]


def test_every_task_of_a_real_program_has_its_bar() -> None:
    program = optsche(split_capacity(SCHEDULES["s3"](), 3))
    timeline = lay_out(program, {task.name: 2e-6 for task in program.tasks})
    drawn = bars(timeline)
    assert set(drawn) == {task.name for task in program.tasks}
    for span in timeline.spans:
        lane, start, length, _ = drawn[span.task]
        assert (lane, start * 1e-6, length * 1e-6) == (
            span.lane.value,
            pytest.approx(span.start),
            pytest.approx(2e-6),
        )


@pytest.mark.parametrize(
    ("seconds", "unit"), [(2.0, "s"), (1.0, "s"), (0.5, "ms"), (2e-4, "µs"), (0.0, "µs")]
)
def test_units_fit_the_length(seconds: float, unit: str) -> None:
    assert unit_of(seconds)[0] == unit


def test_words_say_length_load_and_overlap() -> None:
    assert in_words(TIMELINE) == (
        "made by hand: 9 ms; busy: compute 44%, inter 89%; 38% of the communication is hidden "
        "behind computation"
    )
    assert in_words(Timeline("nothing", ())) == "nothing: 0 µs"
    assert list(gantt(Timeline("nothing", ())).layout.xaxis.range) == [0, 1]


def page_of(tmp_path: Path) -> Path:
    forward = split_capacity(SCHEDULES["s2"](), 2)
    timelines = {
        title: lay_out(program, {task.name: 0.5 for task in program.tasks})
        for title, program in (
            ("forward", optsche(forward)),
            ("backward <b>", optsche(transpose(forward))),
        )
    }
    return write_gantt(timelines, tmp_path / "new" / "gantt.html")


def test_the_page_holds_both_charts_below_each_other_on_one_axis(tmp_path: Path) -> None:
    text = without_plotly(page_of(tmp_path).read_text(encoding="utf-8"))
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["forward", "backward &lt;b&gt;"]
    assert "h.0: chunk 0 of h" in text
    assert text.index("id='chart-1'") < text.index("id='chart-2'")
    charts = json.loads(re.search(r"const charts = (\{.*?\n\});", text, re.S)[1])
    assert list(charts) == ["chart-1", "chart-2"]
    ranges = [chart["layout"]["xaxis"]["range"] for chart in charts.values()]
    assert ranges[0] == ranges[1]
    ends = [
        max(b + x for t in chart["data"] for b, x in zip(t["base"], t["x"]))
        for chart in charts.values()
    ]
    assert max(ends) == ranges[0][1]
    assert not re.search(r"https?://|\ssrc=|\shref=|url\(", text)


@pytest.mark.parametrize("chunks", [1, 32])
def test_the_page_is_readable_on_a_telephone(chunks: int, tmp_path: Path) -> None:
    """At 390 pixels: charts take the width of the page, and no legend takes the place of a row."""
    forward = split_capacity(SCHEDULES["s1"](), chunks)
    timeline = lay_out(forward, dict.fromkeys((task.name for task in forward.tasks), 1e-3))
    page = write_gantt({"forward": timeline}, tmp_path / "gantt.html")
    text = without_plotly(page.read_text(encoding="utf-8"))
    assert "<meta name='viewport' content='width=device-width, initial-scale=1'>" in text
    assert "{responsive: true" in text
    assert "overflow-x:auto" in text
    charts = json.loads(re.search(r"const charts = (\{.*?\n\});", text, re.S)[1])
    for chart in charts.values():
        layout = chart["layout"]
        assert "width" not in layout
        assert layout["yaxis"]["categoryarray"]
        rows = len(layout["yaxis"]["categoryarray"])
        entries = sum(trace["showlegend"] for trace in chart["data"])
        assert all(len(trace["name"]) <= 10 for trace in chart["data"])
        lines = -(-entries * 80 // (390 - 56 - 18 - 28))
        left = layout["height"] - 12 - 44 - 20 * lines
        assert left >= 32 * rows, f"{entries} entries, {rows} rows of {layout['height']} pixels"


@needs_browser
def test_a_browser_draws_it_without_complaint(tmp_path: Path) -> None:
    assert BROWSER
    dom, log = open_in_browser(page_of(tmp_path), tmp_path / "profile")
    assert complaints(log) == []
    assert dom.count("main-svg") >= 2
    assert dom.count('class="point"') == 19 + 20


def test_the_page_has_the_title_that_is_given(tmp_path: Path) -> None:
    title = "A layer of <gpt> on 25gbe: ep 4"
    page = write_gantt({"forward": TIMELINE}, tmp_path / "gantt.html", title)
    text = without_plotly(page.read_text(encoding="utf-8"))
    assert "<h1>A layer of &lt;gpt&gt; on 25gbe: ep 4</h1>" in text
    assert "<title>A layer of &lt;gpt&gt; on 25gbe: ep 4 · moesaic timeline</title>" in text


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert "is a folder: name a file" in refused(write_gantt, {"forward": TIMELINE}, tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(
        write_gantt, {"forward": TIMELINE}, tmp_path / "file" / "gantt.html"
    )
    assert "no timeline to draw" in refused(write_gantt, {}, tmp_path / "gantt.html")
