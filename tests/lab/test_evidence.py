"""The benchmarks of gates and of samples that move: what they make of times and curves, and that stored results are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import InputError
from moesaic_lab import codec_convergence, gates_loss, tiny
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


def codec_row(codec: str, scores: list[float]) -> dict[str, Any]:
    results = [{"score": score, "val_loss": 1.0} for score in scores]
    return codec_convergence.row("language", "demo", codec, 100, results)


@pytest.mark.parametrize(
    ("dense", "none", "coded", "holds"),
    [
        (9.0, [8.0, 8.1], [8.0, 8.2], True),
        (9.0, [8.0, 8.1], [9.5, 9.6], False),
        (9.0, [8.0, 8.1], [6.5, 6.6], False),  # a codec that is better by as much proves nothing either
        (9.0, [7.0, 9.5], [7.0, 9.5], False),  # the seeds differ by more than the experts gain
        (7.0, [8.0, 8.0], [8.0, 8.0], True),  # the gap is nothing, but the experts lose
    ],
)
def test_a_codec_may_move_the_score_less_than_the_experts_gain(dense, none, coded, holds) -> None:
    rows = [codec_row("dense", [dense] * 2), codec_row("none", none), codec_row("int8", coded)]
    found = {claim.name: claim for claim in codec_convergence.claims(rows)}
    assert found["codec.int8_gap_perplexity"].holds is holds
    assert found["codec.moe_over_dense_perplexity"].holds is (dense >= sum(none) / 2)
    assert found["codec.int8_gap_bleu"].value is None


def test_a_sparse_model_beats_its_twin_only_if_it_does_with_every_seed() -> None:
    losses = {"gpt-tiny": [(1.0, 2.0), (1.0, 1.1)], "bert-tiny": [(1.0, 9.0), (2.0, 1.9)]}
    rows = [
        {"model": model, "ffn": ffn, "seed": seed, "loss": loss}
        for model, of_seeds in losses.items()
        for seed, pair in enumerate(of_seeds)
        for ffn, loss in zip(("moe", "dense"), pair)
    ]
    found = {claim.name: claim.value for claim in tiny.claims(rows)}
    assert found["mission.tiny_beats_dense"] == 1
    assert found["tiny.gain.bert-tiny"] == pytest.approx(3.95)


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
