"""Every constant says which figures it was made of, and none of these figures counts as
validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic_lab.reproduce import fitting
from moesaic_lab.reproduce.fitting import FITS, Named, refit
from moesaic_lab.reproduce.papers import HEADLINES, REPRODUCTIONS, TARGETS, gain_off
from moesaic_lab.reproduce.records import (
    PAPERS,
    Book,
    Constant,
    PublishedCell,
    Reproduction,
    read_book,
)

BOOK = read_book()
QUICK = (
    "schemoe.nic",
    "parm.a.link",
    "parm.a.message",
    "parm.b.link",
    "parm.b.message",
    "schemoe.turn",
    "schemoe.tflops",
    "schemoe.codec",
    "schemoe.rest.layer",
    "schemoe.rest.fixed",
    "tutel.tflops",
    "netmoe.nic",
    "netmoe.tflops",
    "netmoe.launch",
    "tutel.swin.train",
    "tutel.swin.infer",
)
"""Constants that are found in a second."""


@pytest.mark.parametrize("constant", BOOK.constants.values(), ids=lambda constant: constant.name)
def test_a_constant_names_printed_cells_and_says_how(constant: Constant) -> None:
    assert constant.cells
    assert constant.how
    assert constant.unit
    for name in constant.cells:
        assert BOOK.value(name) > float("-inf")


def test_every_constant_is_found_by_a_function_and_every_function_finds_one() -> None:
    named = [name for together in FITS for name in together]
    assert sorted(named) == sorted(BOOK.constants)


@pytest.mark.parametrize("cell", BOOK.cells.values(), ids=lambda cell: cell.name)
def test_no_cell_that_a_constant_rests_on_is_validation(cell: PublishedCell) -> None:
    follows = {cell.name, *cell.derived}
    rests = any(follows & set(constant.cells) for constant in BOOK.constants.values())
    role = BOOK.role(cell.name)
    counts = "arithmetic" if cell.arithmetic else "validation"
    others = "no prediction" if cell.not_printed else "kept back" if cell.value is None else counts
    assert role == ("fit" if cell.value is not None and rests else others)
    assert cell.source
    assert all(name in BOOK.cells for name in cell.derived)


def test_most_printed_cells_of_every_paper_are_left_for_validation() -> None:
    for paper in PAPERS:
        roles = [BOOK.role(name) for name in BOOK.cells if name.startswith(f"{paper}.")]
        assert roles.count("validation") > roles.count("fit"), paper


def test_a_fit_cannot_read_a_cell_that_its_constant_does_not_name() -> None:
    cells = Named(BOOK, "schemoe.nic")
    assert cells["schemoe.a2a.12"] == 252.6
    with pytest.raises(AssertionError, match=r"schemoe.a2a.16 is not among"):
        cells["schemoe.a2a.16"]


def test_the_fits_read_the_paper_only_through_the_guard() -> None:
    source = Path(fitting.__file__).read_text(encoding="utf-8")
    assert source.count(".value(") == 1  # the guard's own


@pytest.mark.parametrize("name", QUICK)
def test_a_refit_finds_the_committed_value(name: str) -> None:
    assert refit(BOOK, (name,)).constant(name) == pytest.approx(BOOK.constant(name), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("names", [names for names in FITS if not set(names) & set(QUICK)], ids=str)
def test_a_slow_refit_finds_the_committed_values(names: tuple[str, ...]) -> None:
    found = refit(BOOK, names)
    for name in names:
        assert found.constant(name) == pytest.approx(BOOK.constant(name), rel=2e-3)


def test_a_fit_notices_another_figure() -> None:
    old = BOOK.cells["schemoe.a2a.12"]
    other = PublishedCell(
        name=old.name, value=2 * 252.6, unit=old.unit, place=old.place, what=old.what
    )
    book = Book({**BOOK.cells, old.name: other}, BOOK.constants)
    assert refit(book, ("schemoe.nic",)).constant("schemoe.nic") == pytest.approx(
        BOOK.constant("schemoe.nic") / 2, rel=1e-3
    )


def test_errors_are_of_speeds_for_gains_and_in_points_for_points() -> None:
    gain = PublishedCell(name="a.b.c", value=20.0, unit="gain %", place="", what="x")
    assert gain.error(32.0) == pytest.approx(0.1)
    assert PublishedCell(name="a.b.c", value=-39.0, unit="points", place="", what="x").error(
        -36.5
    ) == pytest.approx(2.5)
    assert PublishedCell(name="a.b.c", value=2.0, unit="x", place="", what="x").error(
        1.5
    ) == pytest.approx(0.25)
    with pytest.raises(InputError, match="kept back"):
        PublishedCell(name="a.b.c", value=None, unit="x", place="", what="x").error(1.0)


def test_a_figure_that_is_printed_twice_counts_once() -> None:
    rows = BOOK.rows(
        {
            "parm.s1.b8.m2s4": 3.0,
            "parm.chosen.b8.m2s4": 3.37,
            "parm.s1.b8.m2s2": 9.0,
            "parm.s1.b16.m2s2": 1.0,
        }
    )
    made = Reproduction(paper="parm", title="", rows=rows, constants=())
    assert [row.role for row in rows] == ["validation", "validation", "fit", "kept back"]
    assert made.errors() == pytest.approx([1 - 3.0 / 3.37])
    assert made.median_error == made.errors()[0]


def test_figures_that_follow_from_sizes_are_no_evidence() -> None:
    known = {name for name in BOOK.cells if BOOK.role(name) == "arithmetic"}
    assert len(known) == 15
    assert {name.rsplit(".", 1)[0] for name in known} == {
        "schemoe.a2a",
        *(f"netmoe.before.{where}.{gpus}" for where in ("intra", "inter") for gpus in (16, 32)),
    }
    rows = BOOK.rows(dict.fromkeys(known, 1.0) | {"netmoe.compute.4": 1.79})
    assert Reproduction(paper="netmoe", title="", rows=rows, constants=()).errors() == [0.0]


def test_figures_of_an_unknown_batch_or_length_are_no_predictions() -> None:
    unknown = {name for name in BOOK.cells if BOOK.role(name) == "no prediction"}
    assert {name for name in unknown if name.startswith("parm.")} == {
        name for name in BOOK.cells if name.startswith("parm.step.")
    }
    assert "tutel.swin.infer.fairseq.128" in unknown
    rows = BOOK.rows(dict.fromkeys(sorted(unknown), 100.0) | {"parm.s1.b8.m2s4": 3.37})
    assert {row.error for row in rows if row.role == "no prediction"} == {None}, (
        "printed or kept back"
    )
    assert len(Reproduction(paper="parm", title="", rows=rows, constants=()).errors()) == 1
    assert all(BOOK.cells[name].not_printed for name in unknown)


def test_all_papers_have_a_reproduction_a_target_and_a_headline_that_counts() -> None:
    assert set(PAPERS) == set(REPRODUCTIONS) == set(TARGETS) == set(HEADLINES)
    assert {BOOK.role(name) for name in HEADLINES.values()} == {"validation"}


@pytest.mark.parametrize(
    ("ours", "times"), [(22.0, 0.0), (11.0, 0.5), (44.0, 1.0), (159.0, 159 / 22 - 1), (-5.5, 1.25)]
)
def test_a_headline_is_off_if_its_gain_is_too_large_too(ours: float, times: float) -> None:
    (row,) = BOOK.rows({"schemoe.layers.gain": ours})
    assert gain_off(row) == pytest.approx(times)


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_a_reproduction_has_every_cell_of_its_paper_with_the_role_that_the_constants_give(
    paper: str,
) -> None:
    made = REPRODUCTIONS[paper](BOOK)
    inputs = {cell for cell in BOOK.cells if ".all_gather." in cell}
    assert {row.cell.name for row in made.rows} == {
        n for n in BOOK.cells if n.startswith(f"{paper}.")
    } - inputs
    used = {cell for constant in BOOK.constants.values() for cell in constant.cells}
    for row in made.rows:
        if row.role == "validation":
            assert row.cell.name not in used
            assert not used & set(row.cell.derived)
    assert {constant.name for constant in made.constants} >= {c.name for c in BOOK.of(paper)}
    assert made.median_error <= TARGETS[paper]
