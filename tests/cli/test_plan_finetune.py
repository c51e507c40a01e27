"""`moesaic plan finetune`: what it prints, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.cli.output import WIDEST
from moesaic.cli.plan_finetune import _command
from moesaic.planner.answer import SPEED_RATIOS
from moesaic.planner.cluster import read_cluster
from moesaic.planner.finetune import FinetunePrediction, SplitPrediction
from moesaic.program.plan import Plan

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 32000,
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["plan", "finetune", "--model", str(tmp_path / "config.json"), "--seq-len", "512"]
    return [*words, "--cluster", "2x2x4090-10gbe"]


def test_it_says_what_fits_which_split_is_fastest_and_what_would_help(command, capsys):
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= WIDEST
    assert sum("fastest" in line for line in lines) == 1
    text = "\n".join(lines)
    for words in (
        "logits and loss 0.",
        "of 24",
        "layers, one rank at a time",
        "tokens/s likely",
        "a second NIC",
        "run on each of 2 machines, HOST being the first one's name:\n    torchrun --nnodes 2",
        "fp8",
    ):
        assert words in text


def test_json_has_everything(command, capsys):
    assert main([*command, "--json", "--rank", "4", "--batch-size", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["rank"], found["accumulation"]) == (1024, 4, 4)
    assert found["bytes"] == pytest.approx(sum(found["parts"].values()))
    assert found["tokens_per_second"] == pytest.approx(
        SPEED_RATIOS[1] * 4 * 4 * 1024 / found["seconds"]
    )
    assert found["fastest"] in found["splits"]
    halved = next(
        change
        for change in found["changes"]
        if change["what"] == "half the sequences in a micro-batch"
    )
    assert halved["bytes"] < found["bytes"]
    assert {"what", "speedup", "bytes", "fits"} == set(halved)


def refused(words: list[str], capsys) -> str:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_what_does_not_fit_is_refused_with_what_does(capsys):
    words = ["plan", "finetune", "--model", "qwen3-30b-a3b", "--cluster", "2x3090-pcie"]
    assert (
        "does not fit: needs 39.1 GiB of 24 on a device; smallest that fits: 4 such devices; "
        "or --method qlora"
    ) in refused([*words, "--method", "lora"], capsys)


def test_flags_and_models_that_have_no_meaning_are_refused(command, capsys):
    for flag in (["--ep", "2"], ["--allow-lossy"], ["--reserve-gib", "2"]):
        assert f"unknown argument {flag[0]}" in refused([*command, *flag], capsys)
    assert "--rank 0: must be at least 1" in refused([*command, "--rank", "0"], capsys)
    assert "config.json of one" in refused(
        ["plan", "finetune", "--model", "demo", "--cluster", "2x4090-pcie"], capsys
    )


def command_of(split: SplitPrediction, plan: Plan) -> str:
    """Return the printed command of a split, the only one."""
    found = FinetunePrediction(parts={}, fits=True, plan=plan, splits={"a split": split})
    sizes = {
        "ranks": 4,
        "method": "qlora",
        "rank": 16,
        "length": 128,
        "tokens": 256,
        "accumulation": 2,
    }
    return _command("model", read_cluster("4x4090-pcie"), found, sizes)


@pytest.mark.parametrize(
    ("plan", "stages", "flag"),
    [(Plan(), 1, ""), (Plan(all_to_all="hier2d"), 1, "--plan auto "), (Plan(chunks=2), 4, "")],
)
def test_a_speed_of_another_plan_than_the_default_comes_with_a_plan_that_is_timed(
    plan: Plan, stages: int, flag: str
) -> None:
    split = SplitPrediction(
        stages=stages, tokens_per_second=1.0, bytes=0.0, fits=True, bottleneck="compute"
    )
    pipeline = "" if stages == 1 else f"--pp {stages} "
    assert command_of(split, plan) == (
        f"moesaic finetune MODEL DATA --ranks 4 {pipeline}{flag}--method qlora --rank 16 "
        "--length 128 --micro-batch 2 --batch 16"
    )


@pytest.mark.parametrize(
    ("plan", "stages", "flags"),
    [
        (Plan(), 1, "--micro-batches-in-flight 2"),
        (Plan(chunks=2), 1, "--micro-batches-in-flight 2"),
        (Plan(all_to_all="hier2d"), 1, "--micro-batches-in-flight 2 --plan auto"),
        (Plan(), 2, "--micro-batches-in-flight 2 --pp 2"),
    ],
)
def test_a_split_with_halves_in_flight_is_run_so(plan: Plan, stages: int, flags: str) -> None:
    split = SplitPrediction(
        stages=stages,
        in_flight=2,
        tokens_per_second=1.0,
        bytes=0.0,
        fits=True,
        bottleneck="compute",
    )
    assert f"--ranks 4 {flags} --method" in command_of(split, plan)
