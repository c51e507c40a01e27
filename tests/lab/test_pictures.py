"""Pictures: what is drawn where, checked by asking matplotlib's own figure."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from matplotlib.axes import Axes

from moesaic.errors import InputError
from moesaic_lab.claims import Claim
from moesaic_lab.pictures import (
    BAR_SHARE,
    COLOURS,
    Panel,
    PlottedSeries,
    check_picture,
    colours,
    figure,
    write_picture,
)
from moesaic_lab.tables import (
    byte_size,
    cell,
    claims_table,
    milliseconds,
    print_whole,
    share,
    table,
)

SVG = "{http://www.w3.org/2000/svg}"

LINES = Panel(
    title="time < size",
    x_title="per rank",
    y_title="ms",
    series=(
        PlottedSeries(
            name="linear",
            x=(16.0, 64.0, 256.0),
            y=(1.0, 2.0, 8.0),
            low=(0.9, 1.9, 7.0),
            high=(1.1, 2.2, 9.0),
        ),
        PlottedSeries(name="a & b", x=(16.0, 64.0), y=(2.0, 3.0), bounds=(0.5, None)),
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
        PlottedSeries(
            name="linear",
            x=(0.0, 1.0),
            y=(4.0, 2.0),
            low=(3.0, 1.0),
            high=(5.0, 3.0),
            bounds=(1.0, 2.0),
        ),
        PlottedSeries(name="other", x=(1.0,), y=(1.0,)),
    ),
)


def axes(panels: list[Panel], **options: int) -> list[Axes]:
    return [on for on in figure("a <title>", panels, **options).axes if on.axison]


def test_a_name_has_one_colour_in_all_panels():
    assert colours([LINES, BARS]) == {
        "linear": COLOURS[0],
        "a & b": COLOURS[1],
        "other": COLOURS[2],
    }


def test_a_line_goes_through_its_points_and_bounds_are_marks():
    (on,) = axes([LINES])
    first, second, bound = on.get_lines()
    assert (list(first.get_xdata()), list(first.get_ydata())) == (
        [16.0, 64.0, 256.0],
        [1.0, 2.0, 8.0],
    )
    assert (first.get_color(), second.get_color()) == (COLOURS[0], COLOURS[1])
    assert (bound.get_marker(), list(bound.get_xdata()), list(bound.get_ydata())) == (
        "_",
        [16.0],
        [0.5],
    )
    assert (on.get_xscale(), on.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in on.get_xticklabels()] == ["16 KiB", "256 KiB"]


def test_bars_stand_on_zero_side_by_side():
    (on,) = axes([BARS])
    bars = on.patches
    assert [bar.get_height() for bar in bars] == [4.0, 2.0, 1.0]
    assert {bar.get_y() for bar in bars} == {0.0}
    middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    assert middles == pytest.approx([-BAR_SHARE / 4, 1 - BAR_SHARE / 4, 1 + BAR_SHARE / 4])
    (bound,) = on.get_lines()
    assert list(bound.get_xdata()) == pytest.approx(middles[:2])
    assert on.get_ylim()[0] == 0


def test_spread_is_drawn_from_low_to_high():
    (on,) = axes([BARS])
    (spread,) = on.collections
    assert [sorted(segment[:, 1]) for segment in spread.get_segments()] == [[3.0, 5.0], [1.0, 3.0]]


def test_the_legend_names_every_series_once():
    (legend,) = figure("t", [LINES, BARS]).legends
    assert [text.get_text() for text in legend.get_texts()] == ["linear", "a & b", "bound", "other"]
    assert legend.get_title().get_text() == "t"


def test_panels_stand_in_rows():
    made = axes([LINES] * 5, columns=2)
    places = [
        (on.get_subplotspec().rowspan.start, on.get_subplotspec().colspan.start) for on in made
    ]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_no_panels_make_an_empty_picture(tmp_path):
    assert axes([]) == []
    write_picture(tmp_path / "x.svg", "t", [])
    assert (tmp_path / "x.svg").exists()


def test_a_picture_is_written_by_its_suffix_and_twice_the_same(tmp_path):
    for name in ("x", "y"):
        write_picture(
            tmp_path / "deep" / f"{name}.svg",
            "a <title>, 5 $ and 6 $",
            [LINES],
            notes="word " * 200,
        )
    text = (tmp_path / "deep" / "x.svg").read_text()
    assert text == (tmp_path / "deep" / "y.svg").read_text()
    words = {node.text for node in ET.fromstring(text).iter(f"{SVG}text")}
    assert {"a <title>, 5 $ and 6 $", "a & b", "time < size"} <= words
    assert len([word for word in words if word and word.startswith("word")]) >= 1
    write_picture(tmp_path / "x.png", "t", [BARS])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        InputError, match=r"unknown kind of picture: end its name with \.svg, \.png, \.pdf"
    ):
        check_picture(tmp_path / "x.html")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write_picture(tmp_path / "file" / "x.svg", "t", [LINES])


def test_what_does_not_fit_is_refused():
    with pytest.raises(AssertionError, match="low does not fit"):
        PlottedSeries(name="a", x=(1.0, 2.0), y=(1.0, 2.0), low=(1.0,))
    with pytest.raises(AssertionError, match="bars have a zero"):
        Panel(title="", x_title="", y_title="", series=(), categories=("a",), log_y=True)


def test_tables_show_rows_in_groups():
    rows = [
        {"name": "a", "step_seconds": 0.1234},
        {"name": "a", "step_seconds": None},
        {"name": "b"},
    ]
    made = table("t", rows, (("name", "who"), "step_seconds"), group_by=("name",))
    assert [column.header for column in made.columns] == ["who", "step ms"]
    assert [list(column.cells) for column in made.columns] == [["a", "a", "b"], ["123", "", ""]]
    assert [row.end_section for row in made.rows] == [False, True, False]


def test_numbers_are_shown_with_their_units():
    assert [milliseconds(s) for s in (1.5, 0.01234, 0.0012345)] == ["1500", "12.3", "1.23"]
    assert [byte_size(n) for n in (512, 16384, 4 << 20, 3 << 30)] == [
        "512 B",
        "16 KiB",
        "4 MiB",
        "3 GiB",
    ]
    assert share(0.955) == "0.95"
    cells = {
        "is_best": True,
        "over": 1.2345,
        "rate": 12345.6,
        "peak_bytes": 2048,
        "ranks": 8,
        "of": None,
    }
    assert [cell(*each) for each in cells.items()] == ["yes", "1.23", "12,346", "2 KiB", "8", ""]


def test_claims_tell_whether_they_hold_or_why_not():
    claims = [
        Claim(name="a", value=0.5, target=0.4, op=">="),
        Claim(name="b", value=0.5, target=0.4),
        Claim(name="c", value=None, target=1.0, reason="no time"),
    ]
    assert [list(column.cells) for column in claims_table(claims).columns] == [
        ["a", "b", "c"],
        ["0.5", "0.5", ""],
        [">= 0.4", "<= 0.4", "<= 1"],
        ["yes", "no", "no time"],
    ]


def test_long_labels_are_cut_at_commas():
    names = (
        "linear, 2 chunks, no codec",
        "linear, zfp",
        "a name without commas that is far too long",
    )
    (on,) = axes(
        [Panel(title="bars", x_title="", y_title="ms", categories=names, series=BARS.series)]
    )
    labels = [label.get_text() for label in on.get_xticklabels()]
    assert labels == ["linear, 2 chunks\nno codec", "linear, zfp", names[2]]


def test_a_table_that_is_wider_than_a_line_is_printed_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"column number {number}" for number in range(12)]
    print_whole(table("a wide one", [dict.fromkeys(names, "x" * 20)]))
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    assert printed.count("x" * 20) == len(names)
