"""`moesaic chaos`: its schedule, its judgement, and faults on plain processes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic_lab.chaos.benchmark import BENCHMARK, ChaosOptions, cases, claims
from moesaic_lab.chaos.schedule import INTERVAL, KINDS, draw_faults, kinds_of
from moesaic_lab.chaos.stage import FaultOutcome


def test_a_schedule_follows_from_its_seed_and_has_every_kind_and_way() -> None:
    faults = draw_faults(200, 1, list(KINDS))
    assert faults == draw_faults(200, 1, list(KINDS))
    assert faults != draw_faults(200, 2, list(KINDS))
    assert {(fault.kind, fault.way) for fault in faults} == {
        (name, way) for name, kind in KINDS.items() for way in kind.ways
    }
    assert len(KINDS) >= 12
    assert all(1 <= fault.after <= 2 * INTERVAL for fault in faults)


def test_links_are_cut_on_beds_only() -> None:
    assert not {name for name in kinds_of((), on_bed=False) if KINDS[name].needs_bed}
    with pytest.raises(InputError, match="needs an emulated cluster"):
        kinds_of(("cut",), on_bed=False)
    with pytest.raises(InputError, match="did you mean forward"):
        kinds_of(("foward",), on_bed=True)
    with pytest.raises(InputError, match="--faults 0"):
        cases(ChaosOptions(faults=0))
    with pytest.raises(InputError, match="--steps 20"):
        cases(ChaosOptions(steps=20))


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        ({"resumed": 0}, "chaos.steps_lost_beyond_interval"),
        ({"hung": True}, "chaos.hangs"),
        ({"leftovers": 1}, "chaos.leftovers"),
        ({"named": False}, "chaos.unnamed"),
        ({"same": False}, "chaos.losses_that_differ"),
        ({"recovered": False}, "chaos.restarts_recovered"),
    ],
)
def test_a_broken_promise_is_a_claim_that_does_not_hold(
    broken: dict[str, object], claim: str
) -> None:
    sound = {"number": 0, "kind": "restart", "way": "", "rank": 1, "transport": "gloo"}
    sound |= {"reached": 7, "resumed": 6, "recovered": True}
    for changes, holds in (({}, True), (broken, False)):
        found = FaultOutcome(**{**sound, **changes})  # type: ignore[arg-type]
        assert found.is_wrong is not holds
        rows = [
            asdict(found)
            | {"lost": found.lost, "may_be_lost": found.may_be_lost, "is_wrong": found.is_wrong}
        ]
        assert {each.name: each.holds for each in claims(rows)}[claim] is holds


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [(["backward"], 24), pytest.param(["startup", "damage"], 60, marks=pytest.mark.random)],
)
def test_runs_under_fire_on_plain_processes_keep_every_promise(
    tmp_path: Path, kinds: list[str], steps: int
) -> None:
    target = tmp_path / "chaos.json"
    words = ["--faults", str(len(kinds)), "--kinds", ",".join(kinds), "--steps", str(steps)]
    words += ["--no-bed", "--json", str(target)]
    # they are not two hundred
    assert BENCHMARK.run([*words, "--keep", str(tmp_path / "kept")]) == 1
    found = json.loads(target.read_text())
    assert [row["line"] for row in found["rows"] if row["is_wrong"]] == []
    assert sorted(row["kind"] for row in found["rows"]) == sorted(kinds)
    assert {claim["name"] for claim in found["claims"] if claim["holds"] is False} == {
        "chaos.faults",
        "chaos.kinds",
    }
