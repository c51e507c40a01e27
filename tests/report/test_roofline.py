"""The roofline as a picture: points stand where they are, names are escaped, the page holds everything."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("plotly")

from moesaic.cost.roofline import Point, roofline
from moesaic.errors import InputError
from moesaic.report.roofline import roofline_figure, write_roofline

DATA = roofline(
    50e12,
    [
        Point(name="s1, <linear>", ratio=0.5, throughput=15e12),
        Point(name="one device", ratio=float("inf"), throughput=48e12),
    ],
)


def test_points_and_curves_stand_where_the_data_says() -> None:
    traces = {trace.name: trace for trace in roofline_figure(DATA).data}
    point = traces["s1, &lt;linear&gt;"]
    assert (list(point.x), list(point.y)) == ([0.5], [15.0])
    assert "60% of what full overlap gives" in point.hovertemplate
    hidden, none = traces["all communication hidden"], traces["none hidden"]
    assert max(hidden.y) == 50
    assert all(a <= b + 1e-9 for a, b in zip(none.y, hidden.y))
    assert list(traces["one device"].x) == pytest.approx([hidden.x[-1]], rel=1e-5), "nothing moves: at the right end"
    assert traces["none hidden"].line.dash == "dash"


def test_the_page_holds_everything_and_no_name_ends_the_script(tmp_path: Path) -> None:
    path = write_roofline(DATA, "a & b", tmp_path / "deep" / "roofline.html")
    text = path.read_text(encoding="utf-8")
    assert "<h1>a &amp; b</h1>" in text
    assert 'http-equiv="Content-Security-Policy" content="default-src' in text
    assert "<linear>" not in text


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no plan to draw"):
        write_roofline(roofline(1.0, []), "none", tmp_path / "a.html")
    with pytest.raises(InputError, match="is a folder"):
        write_roofline(DATA, "folder", tmp_path)
