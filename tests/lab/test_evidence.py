"""The benchmarks of gates and of samples that move: what they make of times and curves, and that
stored results are whole."""

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
    curves = {
        "curve_losses": losses,
        "seed_losses": [losses, [losses[0], losses[1] - 0.25, losses[2]]],
    }
    return {"gate": name, "curve_steps": [10, 20, 30], "step_time_ratio": seconds, **curves}


def test_time_to_a_loss_is_steps_to_it_times_the_step() -> None:
    rows = [gate_row("softmax", [4.0, 3.0, 2.0], 1.0), gate_row("fast", [4.0, 3.5, 2.5], 0.5)]
    gates_loss.add_times(rows)
    assert [row["goal_loss"] for row in rows] == [2.0, 2.5]
    assert [row["steps_to_loss_ratio"] for row in rows] == [1.0, 30 / 25]
    assert [row["time_to_loss_ratio"] for row in rows] == [1.0, pytest.approx(0.6)]
    # the other seed's curve falls from 2.75 to 2 and passes 2.5
    softmax_steps = 20 + 10 * 0.25 / 0.75
    other_seed = 0.5 * 30 / softmax_steps
    assert (rows[1]["time_to_loss_least"], rows[1]["time_to_loss_most"]) == pytest.approx(
        (0.6, other_seed)
    )
    for time, holds in ((1.0, True), (1.5, False), (0.6, False)):
        topology = {"gate": "topology", "val_nats_per_byte": 2.5, "time_to_loss_ratio": time}
        claims = {each.name: each for each in gates_loss.claims([rows[0], rows[1] | topology])}
        assert claims["gates_loss.off_table_3.topology"].holds is holds, "1.076 in the paper"
        assert claims["gates_loss.off_table_3.base"].reason == "not run"
        assert claims["papers.fastermoe.over_base"].value is None
    better = [gate_row("softmax", [4.0, 3.0, 2.0], 1.0), gate_row("better", [4.0, 2.0, 1.0], 1.5)]
    gates_loss.add_times(better)
    assert better[1]["goal_loss"] == 2.0
    assert better[1]["time_to_loss_ratio"] == pytest.approx(20 / 30 * 1.5)
    with pytest.raises(InputError, match="choose more evaluations"):
        gates_loss.add_times(
            [gate_row("softmax", [3.0, 2.0, 1.0], 1.0), gate_row("bad", [5.0, 4.0, 3.5], 1.0)]
        )


def test_base_and_switch_have_the_parameters_of_the_others() -> None:
    models = {gate: gates_loss.configuration(gate, 0, 10).model.moe for gate in gates_loss.GATES}
    assert {moe.num_experts * moe.hidden for moe in models.values()} == {64 * 64}
    assert {moe.top_k * moe.hidden for moe in models.values()} == {128}
    assert {gate: moe.router for gate, moe in models.items()} == {
        gate: gate for gate in gates_loss.GATES
    } | {"topology": "softmax"}


def test_runs_that_are_compared_can_be_configured() -> None:
    """A run's configuration refuses a `Plan` where a `StaticPlan` is due."""
    codecs = codec_convergence.CodecConvergenceOptions().codecs
    plans = [
        codec_convergence.configuration("demo", Path("out"), 5, 0, each).plan for each in codecs
    ]
    assert [(plan.codec, plan.backward_codec) for plan in plans] == list(
        map(codec_convergence.pair, codecs)
    )
    assert (
        codec_convergence.configuration("seq2seq-tiny", Path("out"), 5, 0, "dense").model.ffn
        == "dense"
    )


def codec_row(codec: str, scores: list[float], steps: int = 100) -> dict[str, Any]:
    results = [{"score": score, "val_loss": 1.0} for score in scores]
    return codec_convergence.row("language", "gpt-tiny", codec, steps, results)


@pytest.mark.parametrize(
    ("coded", "holds"),
    [
        ([8.0, 8.2], True),
        ([8.2, 8.4], False),
        ([7.7, 7.8], False),  # a codec that is better by as much proves nothing either
    ],
)
def test_a_codec_may_move_the_score_less_than_seeds_do(coded: list[float], holds: bool) -> None:
    rows = [
        codec_row("dense", [9.0, 9.0]),
        codec_row("none", [8.0, 8.15]),
        codec_row("int8", coded),
    ]
    found = {claim.name: claim for claim in codec_convergence.claims(rows)}
    assert found["codec.int8_gap_perplexity"].holds is holds
    assert found["codec.int8_over_zfp_perplexity"].value is None
    assert found["codec.int8_gap_bleu"].value is None
    assert found["codec.plateau_moe_perplexity"].value is None


@pytest.mark.parametrize(
    ("dense", "none", "beats", "is_narrow"),
    [
        ([9.0, 9.1], [8.0, 8.2], True, True),
        ([9.0, 9.5], [7.0, 9.4], True, False),  # seeds differ by more than the experts gain
        ([9.0, 8.0], [8.5, 8.1], False, False),  # the experts lose with one seed
    ],
)
def test_experts_gain_with_every_seed_and_more_than_seeds_differ(
    dense, none, beats, is_narrow
) -> None:
    rows = [codec_row("dense", dense), codec_row("none", none)]
    found = {claim.name: claim for claim in codec_convergence.claims(rows)}
    assert found["codec.moe_over_dense_perplexity"].holds is beats
    assert found["codec.spread_perplexity"].holds is is_narrow


def test_a_model_has_converged_if_twice_the_steps_change_less_than_seeds_do() -> None:
    rows = [codec_row("dense", [9.0, 9.1]), codec_row("none", [8.0, 8.2])]
    rows += [codec_row("dense", [8.9, 8.8], 200), codec_row("none", [7.9, 8.05], 200)]
    found = {claim.name: claim.holds for claim in codec_convergence.claims(rows)}
    assert (found["codec.plateau_dense_perplexity"], found["codec.plateau_moe_perplexity"]) == (
        False,
        True,
    )


def test_translation_on_a_cpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"--translation seq2seq-tiny: .* add --device cuda"):
        codec_convergence.cases(
            codec_convergence.CodecConvergenceOptions(translation="seq2seq-tiny")
        )


@pytest.mark.parametrize(
    ("gains", "beaten"), [([0.9, 1.0, 1.1], 1), ([0.1, 1.0, 1.9], 0), ([-0.1, -0.2, -0.3], 0)]
)
def test_a_sparse_model_beats_its_twin_if_the_interval_of_its_gain_is_above_zero(
    gains: list[float], beaten: int
) -> None:
    losses = [("moe", 1.0, 0.0), ("dense", 1.0, 1.0)]
    rows = [
        {"model": "gpt-tiny", "ffn": ffn, "seed": seed, "loss": loss + factor * gain}
        for seed, gain in enumerate(gains)
        for ffn, loss, factor in losses
    ]
    found = {claim.name: claim.value for claim in tiny.claims(rows)}
    assert found["mission.tiny_beats_dense"] == beaten
    half = 4.3027 * abs(gains[2] - gains[0]) / 2 / 3**0.5  # Student's t of two degrees of freedom
    assert found["tiny.gain_low.gpt-tiny"] == pytest.approx(gains[1] - half, rel=1e-4)
    (alone,) = (claim for claim in tiny.claims(rows[:2]) if claim.name == "tiny.gain_low.gpt-tiny")
    assert alone.value is None


def test_claims_of_parts_that_were_not_run_say_so() -> None:
    row = {
        "part": "2x2",
        "method": "two_stage",
        "locality": 0.4,
        "inter_saved": 0.25,
        "time_ratio": 0.9,
    }
    found = {claim.name: claim for claim in netmoe.claims([row])}
    assert found["balance.netmoe_inter_bytes_saved"].value == 0.25
    assert found["balance.netmoe_time_ratio"].value == 0.9
    assert found["balance.netmoe_decision_over_hidden"].value is None
    assert found["balance.netmoe_decision_over_hidden"].reason == "not run"


@pytest.mark.parametrize("name", ["netmoe", "gates_loss", "relocate_train"])
def test_stored_results_have_all_their_claims(name: str) -> None:
    stored = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )
    assert len(stored["claims"]) >= 3
    assert all(claim["value"] is not None for claim in stored["claims"])
    assert len(stored["rows"]) >= 3
