"""Pictures: what is drawn where, checked by reading the SVG and plotly's own figure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from moesaic.errors import InputError
from moesaic_lab.claims import Claim
from moesaic_lab.pictures import COLOURS, Panel, Series, check_picture, colours, figure, to_html, write_picture
from moesaic_lab.pictures_svg import BAR_SHARE, Scale, to_svg
from moesaic_lab.tables import Column, byte_size, claims_table, milliseconds, share, table

SVG = "{http://www.w3.org/2000/svg}"

LINES = Panel(
    title="time < size",
    x_title="per rank",
    y_title="ms",
    series=(
        Series(name="linear", x=(16.0, 64.0, 256.0), y=(1.0, 2.0, 8.0), low=(0.9, 1.9, 7.0), high=(1.1, 2.2, 9.0)),
        Series(name="a & b", x=(16.0, 64.0), y=(2.0, 3.0), bounds=(0.5, None)),
    ),
    x_ticks=((16.0, "16 KiB"), (256.0, "256 KiB")),
    log_x=True,
    log_y=True,
)
BARS = Panel(
    title="bars",
    x_title="",
    y_title="ms",
    categories=("one", "two"),
    series=(
        Series(name="linear", x=(0.0, 1.0), y=(4.0, 2.0), low=(3.0, 1.0), high=(5.0, 3.0), bounds=(1.0, 2.0)),
        Series(name="other", x=(1.0,), y=(1.0,)),
    ),
)


def tree(panels: list[Panel], **options) -> ET.Element:
    return ET.fromstring(to_svg("a <title>", panels, **options))


def of_class(root: ET.Element, tag: str) -> list[ET.Element]:
    return root.findall(f".//{SVG}{tag}")


def test_scales_are_linear_or_logarithmic():
    assert Scale(0.0, 10.0, 100.0, 0.0)(2.5) == 75.0
    assert Scale(1.0, 100.0, 0.0, 200.0, is_log=True)(10.0) == pytest.approx(100.0)
    assert Scale(5.0, 5.0, 10.0, 20.0)(5.0) == 10.0  # one value: nothing to divide by


def test_ticks_are_round_and_inside():
    assert Scale(0.0, 10.0, 0, 1).ticks() == [0, 2, 4, 6, 8, 10]
    assert Scale(0.0, 0.37, 0, 1).ticks() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert Scale(0.8, 30.0, 0, 1, is_log=True).ticks() == [1, 2, 5, 10, 20]
    assert Scale(0.8, 3000.0, 0, 1, is_log=True).ticks() == [1, 10, 100, 1000]


def test_a_name_has_one_colour_in_all_panels():
    assert colours([LINES, BARS]) == {"linear": COLOURS[0], "a & b": COLOURS[1], "other": COLOURS[2]}


def test_a_line_goes_through_its_points():
    root = tree([LINES])
    first, second = of_class(root, "polyline")
    points = [tuple(map(float, pair.split(","))) for pair in first.attrib["points"].split()]
    assert len(points) == 3
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # fourfold steps on a logarithmic axis
    assert (y1 - y2) == pytest.approx(2 * (y0 - y1), abs=0.3)  # 2 to 8 is twice as far as 1 to 2
    assert len(second.attrib["points"].split()) == 2
    assert len([line for line in of_class(root, "line") if line.attrib.get("class") == "bound"]) == 1


def test_bars_stand_on_zero_side_by_side():
    root = tree([BARS])
    bars = [rect for rect in of_class(root, "rect") if "fill" in rect.attrib and float(rect.attrib["height"]) > 10]
    bars = [rect for rect in bars if rect.attrib["fill"] in COLOURS]
    heights = [float(rect.attrib["height"]) for rect in bars]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.3)
    assert heights[2] == pytest.approx(heights[0] / 4, abs=0.3)
    feet = {round(float(rect.attrib["y"]) + float(rect.attrib["height"]), 1) for rect in bars}
    assert len({round(foot) for foot in feet}) == 1
    left, right = (float(bars[n].attrib["x"]) for n in (1, 2))
    assert right - left == pytest.approx((330 - 52 - 12) / 2 * BAR_SHARE / 2, abs=0.3)
    marks = [line for line in of_class(root, "line") if line.attrib.get("class") == "bound"]
    tops = {float(rect.attrib["y"]) for rect in bars}
    assert len(marks) == 2
    assert float(marks[1].attrib["y1"]) in tops  # the second bound is the second bar's height


def test_spread_is_drawn_from_low_to_high():
    root = tree([BARS])
    upright = [line for line in of_class(root, "line") if line.attrib["x1"] == line.attrib["x2"]]
    lengths = [float(line.attrib["y1"]) - float(line.attrib["y2"]) for line in upright]
    assert len(lengths) == 2
    assert lengths[0] == pytest.approx(lengths[1], abs=0.2)  # 3 to 5, and 1 to 3


def test_words_are_escaped_and_wrapped():
    text = to_svg("a <title>", [LINES], notes="word " * 200)
    assert "a &lt;title&gt;" in text
    assert "a &amp; b" in text
    assert "time &lt; size" in text
    wrapped = [
        node.text or "" for node in of_class(ET.fromstring(text), "text") if (node.text or "").startswith("word")
    ]
    assert len(wrapped) > 5
    assert {len(line) <= 80 for line in wrapped} == {True}


def test_names_under_bars_have_lines():
    bars = Panel(
        title="", x_title="", y_title="", categories=("a\nb<",), series=(Series(name="s", x=(0.0,), y=(1.0,)),)
    )
    nodes = [node for node in of_class(tree([bars]), "text") if "x" in node.attrib]
    found = {node.text: (node.attrib["x"], node.attrib["y"]) for node in nodes}
    assert found["a"][0] == found["b<"][0]
    assert float(found["b<"][1]) - float(found["a"][1]) == 12
    assert list(figure([bars]).data[0].x) == ["a<br>b&lt;"]


def test_panels_stand_in_rows():
    root = tree([LINES] * 5, columns=2)
    places = [node.attrib["transform"] for node in of_class(root, "g")]
    numbers = [tuple(map(int, re.findall(r"\d+", place))) for place in places]
    assert [x for x, _ in numbers] == [0, 330, 0, 330, 0]
    assert [y - numbers[0][1] for _, y in numbers] == [0, 0, 240, 240, 480]


def test_no_panels_make_an_empty_picture():
    assert of_class(tree([]), "polyline") == []
    assert len(figure([]).data) == 0


def test_plotly_gets_medians_spread_and_bounds():
    made = figure([LINES, BARS])
    assert [(trace.type, trace.name) for trace in made.data] == [
        ("scatter", "linear"), ("scatter", "a &amp; b"), ("scatter", "bound"), ("bar", "linear"), ("scatter", "bound"),
        ("bar", "other"),
    ]  # fmt: skip
    first = made.data[0]
    assert list(first.error_y.array) == pytest.approx([0.1, 0.2, 1.0])
    assert list(first.error_y.arrayminus) == pytest.approx([0.1, 0.1, 1.0])
    assert list(made.data[3].x) == ["one", "two"]
    assert list(made.data[4].y) == [1.0, 2.0]
    shown = [trace.name for trace in made.data if trace.showlegend]
    assert shown == ["linear", "a &amp; b", "bound", "other"]
    assert made.layout.xaxis.type == "log"
    assert list(made.layout.xaxis.ticktext) == ["16 KiB", "256 KiB"]


def test_a_page_needs_no_network():
    text = to_html("a <title>", [BARS], "x & y")
    assert "<h1>a &lt;title&gt;</h1>" in text
    assert "x &amp; y" in text
    assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="http', text)


def test_a_picture_is_written_by_its_suffix(tmp_path):
    write_picture(tmp_path / "deep" / "x.svg", "t", [LINES])
    assert (tmp_path / "deep" / "x.svg").read_text().startswith("<svg")
    write_picture(tmp_path / "x.html", "t", [LINES])
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    with pytest.raises(InputError, match=r"unknown kind of picture: end its name with \.html or \.svg"):
        check_picture(tmp_path / "x.png")


def test_what_does_not_fit_is_refused():
    with pytest.raises(AssertionError, match="low does not fit"):
        Series(name="a", x=(1.0, 2.0), y=(1.0, 2.0), low=(1.0,))
    with pytest.raises(AssertionError, match="bars have a zero"):
        Panel(title="", x_title="", y_title="", series=(), categories=("a",), log_y=True)


def test_tables_show_rows_in_groups():
    columns = (Column(key="name", title="name", is_text=True), Column(key="ms", title="ms", show=milliseconds))
    rows = [{"name": "a", "ms": 0.1234}, {"name": "a", "ms": None}, {"name": "b"}]
    made = table("t", rows, columns, group_by=("name",))
    assert [list(column.cells) for column in made.columns] == [["a", "a", "b"], ["123", "", ""]]
    assert [row.end_section for row in made.rows] == [False, True, False]


def test_numbers_are_shown_with_their_units():
    assert [milliseconds(s) for s in (1.5, 0.01234, 0.0012345)] == ["1500", "12.3", "1.23"]
    assert [byte_size(n) for n in (512, 16384, 4 << 20, 3 << 30)] == ["512 B", "16 KiB", "4 MiB", "3 GiB"]
    assert share(0.955) == "0.95"


def test_claims_tell_whether_they_hold_or_why_not():
    claims = [
        Claim(name="a", value=0.5, unit="1", target=0.4, op=">="),
        Claim(name="b", value=0.5, unit="1", target=0.4, op="<="),
        Claim(name="c", value=None, unit="1", target=1.0, op="<=", reason="no time"),
    ]
    assert [list(column.cells) for column in claims_table(claims).columns] == [
        ["a", "b", "c"], ["0.5", "0.5", ""], [">= 0.4", "<= 0.4", "<= 1"], ["yes", "no", "no time"],
    ]  # fmt: skip


def test_long_labels_are_cut_at_commas():
    names = ("linear, 2 chunks, no codec", "linear, zfp", "a name without commas that is far too long")
    panel = Panel(title="bars", x_title="", y_title="ms", categories=names, series=BARS.series)
    texts = [text.text for text in of_class(tree([panel]), "text")]
    assert {"linear, 2 chunks", "no codec", "linear, zfp", names[2]} <= set(texts)
