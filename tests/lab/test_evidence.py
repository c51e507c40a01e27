"""The benchmarks of gates and of samples that move: what they make of times and curves, and that stored results are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import InputError
from moesaic_lab import codec_convergence, gates_loss
from moesaic_lab.netmoe import benchmark as netmoe

ROOT = Path(__file__).resolve().parent.parent.parent


def gate_row(name: str, losses: list[float], seconds: float) -> dict[str, Any]:
    return {"gate": name, "curve_steps": [10, 20, 30], "curve_losses": losses, "step_time_ratio": seconds}


def test_time_to_a_loss_is_steps_to_it_times_the_step() -> None:
    rows = [gate_row("softmax", [4.0, 3.0, 2.0], 1.0), gate_row("fast", [4.0, 3.5, 2.5], 0.5)]
    gates_loss.add_times(rows)
    assert [row["goal_loss"] for row in rows] == [2.0, 2.5]
    assert [row["steps_to_loss_ratio"] for row in rows] == [1.0, 30 / 25]
    assert [row["time_to_loss_ratio"] for row in rows] == [1.0, pytest.approx(0.6)]
    better = [gate_row("softmax", [4.0, 3.0, 2.0], 1.0), gate_row("better", [4.0, 2.0, 1.0], 1.5)]
    gates_loss.add_times(better)
    assert better[1]["goal_loss"] == 2.0
    assert better[1]["time_to_loss_ratio"] == pytest.approx(20 / 30 * 1.5)
    with pytest.raises(InputError, match="choose more evaluations"):
        gates_loss.add_times([gate_row("softmax", [3.0, 2.0, 1.0], 1.0), gate_row("bad", [5.0, 4.0, 3.5], 1.0)])


def test_base_and_switch_have_the_parameters_of_the_others() -> None:
    models = {gate: gates_loss.configuration(gate, 0, 10).model.moe for gate in gates_loss.GATES}
    assert {moe.num_experts * moe.hidden for moe in models.values()} == {64 * 64}
    assert {moe.top_k * moe.hidden for moe in models.values()} == {128}
    assert {gate: moe.router for gate, moe in models.items()} == {gate: gate for gate in gates_loss.GATES} | {
        "topology": "softmax"
    }


def test_runs_that_are_compared_can_be_configured() -> None:
    """A run's configuration refuses a `Plan` where a `StaticPlan` is due."""
    codecs = codec_convergence.CodecConvergenceOptions().codecs
    plans = [codec_convergence.configuration("demo", Path("out"), 5, 0, each).plan for each in codecs]
    assert [(plan.codec, plan.backward_codec) for plan in plans] == list(map(codec_convergence.pair, codecs))
    assert codec_convergence.configuration("seq2seq-tiny", Path("out"), 5, 0, "dense").model.ffn == "dense"


def test_claims_of_parts_that_were_not_run_say_so() -> None:
    row = {"part": "2x2", "method": "two_stage", "locality": 0.4, "inter_saved": 0.25, "time_ratio": 0.9}
    found = {claim.name: claim for claim in netmoe.claims([row])}
    assert found["balance.netmoe_inter_bytes_saved"].value == 0.25
    assert found["balance.netmoe_time_ratio"].value == 0.9
    assert found["balance.netmoe_decision_over_hidden"].value is None
    assert found["balance.netmoe_decision_over_hidden"].reason == "not run"


@pytest.mark.parametrize("name", ["netmoe", "gates_loss", "relocate_train"])
def test_stored_results_have_all_their_claims(name: str) -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert len(stored["claims"]) >= 3
    assert all(claim["value"] is not None for claim in stored["claims"])
    assert all(claim["holds"] in (True, None) for claim in stored["claims"])
    assert len(stored["rows"]) >= 3
