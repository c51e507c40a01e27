"""The claims of the conformance suite, made of what `moesaic check --json` prints."""

from __future__ import annotations

import json

import pytest

from moesaic.cli.main import main
from moesaic_lab.check import claims, rows
from moesaic_lab.planted import mutants

FOUND = {
    "machine": {},
    "versions": {},
    "passed": False,
    "cases": 4,
    "cases_by_processes": {},
    "failures": [{"seed": 3, "failure": "output 1.0"}],
    "worst_errors": {"output": 1e-16},
    "mutants": [
        {"mutant": name, "source": "own", "caught_by": by}
        for name, by in (("a", "numbers"), ("b", "nobody"))
    ],
}


def test_claims_count_cases_failures_and_mutants() -> None:
    found = {claim.name: claim for claim in claims(FOUND)}
    assert {name: claim.value for name, claim in found.items()} == {
        "check.cases": 4,
        "check.failures": 1,
        "check.mutants": 2,
        "check.mutants_caught": 1,
        "check.gloo_worlds": None,
    }
    assert found["check.gloo_worlds"].reason == "run without processes (--no-gloo)"
    assert found["check.mutants_caught"].holds is False
    assert found["check.failures"].holds is False


def test_worlds_of_processes_are_counted_and_listed() -> None:
    made = {**FOUND, "cases_by_processes": {2: 8, 4: 6, 8: 4}}
    assert next(claim for claim in claims(made) if claim.name == "check.gloo_worlds").value == 3
    assert {"world": 4, "cases": 6} in rows(made)
    assert {"seed": 3, "failure": "output 1.0"} in rows(made)


@pytest.fixture
def planted_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mutants,
        "MUTANTS",
        (*mutants.MUTANTS[:2], mutants.Mutant("nothing", "own", "step", "nobody")),
    )


@pytest.mark.usefixtures("planted_few")
def test_a_bug_that_escapes_is_a_claim_that_does_not_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["bench", "check", "--cases", "1", "--no-gloo", "--workers", "1", "--json", "-"]) == 1
    )
    found = json.loads(capsys.readouterr().out)
    caught = {row["mutant"]: row["caught_by"] for row in found["rows"] if "mutant" in row}
    assert list(caught.values()) == ["numbers", "numbers", "nobody"]
    claim = next(claim for claim in found["claims"] if claim["name"] == "check.mutants_caught")
    assert (claim["value"], claim["target"], claim["holds"]) == (2, 3, False)
