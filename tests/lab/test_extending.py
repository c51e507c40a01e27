"""`moesaic_lab/extending.py`: what docs/extending.md shows goes in by one file and one line, and is
simulated as it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import thinned
from moesaic_lab import extending

ROOT = Path(__file__).resolve().parent.parent.parent


PARTS = extending.extensions((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))


def test_the_page_shows_whole_files() -> None:
    assert [part.kind for part in PARTS] == list(extending.KINDS)


@pytest.mark.parametrize("part", thinned(PARTS, every=2), ids=lambda part: part.kind)
def test_a_part_touches_two_files_and_is_simulated_as_it_runs(part) -> None:
    rows = extending.checked(part, tests=False)
    assert {row["files_touched"] for row in rows} == {2}
    if part.kind in extending.FIELDS:
        assert {row["nodes"] for row in rows} == {2, 4, 8}
        assert all(abs(row["even_over_exact"] - 1) <= 0.01 for row in rows)


@pytest.mark.parametrize("kind", extending.KINDS)
def test_the_guide_names_the_contract_tests_of_every_kind(kind: str) -> None:
    for path in extending.contracts(kind, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        assert (ROOT / path).exists()


def test_a_part_that_touches_more_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = next(part for part in PARTS if part.kind == "router")

    def everywhere(extension: object, root: Path) -> None:
        install(extension, root)
        (root / "src" / "moesaic" / "errors.py").write_text("", encoding="utf-8")

    install = extending.install
    monkeypatch.setattr(extending, "install", everywhere)
    assert extending.checked(part, tests=False)[0]["files_touched"] == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'import a\n\nX = {\n    "b": a.b,\n}\nY = 1\n',
            'import a\nimport new\n\nX = {\n    "b": a.b,\n"c": new.c,}\nY = 1\n',
        ),
        (
            'import a\nX = {"b": 1}\nY = {}\n',
            'import a\nimport new\nX = {"b": 1, "c": new.c,}\nY = {}\n',
        ),
        (
            "import a\nX: dict[str, int] = {}\n",
            'import a\nimport new\nX: dict[str, int] = {"c": new.c,}\n',
        ),
    ],
)
def test_a_line_goes_to_the_end_of_its_registry(text: str, expected: str) -> None:
    line = extending.RegistryLine(
        path="x.py", registry="X", imports="import new\n", entry='"c": new.c,'
    )
    assert extending._with(text, line) == expected


def test_claims_tell_a_simulator_that_is_wrong_either_way() -> None:
    tested = {"files_touched": 2, "tests_passed": 9, "tests_failed": 0}
    rows = [{**tested, "even_over_exact": ratio} for ratio in (1.001, 0.5, 1.2)]
    worst, files, failed = extending.claims(rows)
    assert (worst.value, worst.holds) == (2.0, False)
    assert (files.value, files.holds) == (2, True)
    assert (failed.value, failed.holds) == (0, True)


def test_tests_that_nobody_saw_pass_are_no_claim() -> None:
    rows = [
        {"files_touched": 2, "tests_passed": passed, "tests_failed": 0, "even_over_exact": 1.0}
        for passed in (9, 0)
    ]
    assert extending.claims(rows)[-1].value is None


def test_tests_that_all_fail_are_a_claim_that_fails() -> None:
    row = {"files_touched": 2, "tests_passed": 0, "tests_failed": 9, "even_over_exact": 1.0}
    failed = extending.claims([row])[-1]
    assert (failed.value, failed.holds) == (9, False)
