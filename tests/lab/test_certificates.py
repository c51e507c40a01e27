"""`moesaic bench certificates`: systems that are installed are run, others are listed; the page is
what the result gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic_lab.certificates import BENCHMARK, MARKS, page
from moesaic_lab.certified_systems import NEEDS_A_GPU, SYSTEMS

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_moesaic_and_transformers_pass(tmp_path):
    out = tmp_path / "found.json"
    assert (
        main(["bench", "certificates", "--only", "moesaic,transformers", "--json", str(out)]) == 0
    )
    rows = [row for row in json.loads(out.read_text())["rows"] if "quantity" in row]
    asked = {name for name in SYSTEMS if name.startswith(("moesaic", "transformers"))}
    assert len(asked) == 11
    assert {(row["system"], row["world"]) for row in rows} == {
        (s, w) for s in asked for w in (2, 4)
    }
    wrong = {(row["situation"], row["quantity"]) for row in rows if not row["holds"]}
    assert wrong <= {("empty rank", "auxiliary loss over own tokens")}, (
        "a mean over no tokens (docs/certificates.md)"
    )


def test_an_unknown_system_is_refused(capsys):
    assert main(["bench", "certificates", "--only", "tutel"]) == 2
    assert "only=tutel: choose among moesaic, " in capsys.readouterr().err


def test_the_page_is_what_the_committed_result_gives():
    rows = json.loads(
        (ROOT / "benchmarks" / "results" / "certificates.json").read_text(encoding="utf-8")
    )["rows"]
    text = (ROOT / "docs" / "certificates.md").read_text(encoding="utf-8")
    assert page(rows) == text.split(MARKS[0])[1].split(MARKS[1])[0].strip()
    for system in {row["system"] for row in rows if "quantity" in row and not row["holds"]}:
        assert f"Smallest example for {system}" in text
    assert {row["system"] for row in rows} <= {*SYSTEMS, *NEEDS_A_GPU}
    assert {claim.name: claim.holds for claim in BENCHMARK.claims(rows)} == {
        "certificates.systems": True,
        "certificates.moesaic_worst": True,
    }


def test_every_planted_fault_must_be_caught():
    rows = [
        {"system": "moesaic", "fault": name, "caught": name != "missed"}
        for name in ("seen", "missed")
    ]
    held = {claim.name: claim.holds for claim in BENCHMARK.claims(rows)}
    assert held["certify.planted_caught"] is False
    assert {claim.name: claim.holds for claim in BENCHMARK.claims(rows[:1])}[
        "certify.planted_caught"
    ]
