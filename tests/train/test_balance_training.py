"""Training on four processes with the arbiter, with moving samples, and with both equals training
without them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.traces.trace import Trace
from moesaic.train.config import TrainConfig
from runs import lines, losses, parameters, run_quietly, tiny
from train.worlds import Outcome, assert_same_run, difference, train_on

BASE = {
    "batch_size": 8,
    "precision": "float64",
    "evaluate": {"every": 100, "sequences": 5},
    "model": {"num_heads": 4},
    "steps": 3,
    "record_routing": "tokens",
}
NODES = {"ep": 4, "ranks_per_node": 2}
SLOW = """
nodes = 2
devices_per_node = 2
links = [
  { name = "shared memory", devices = 1, gbps = [0.02], carries = "inside" },
  { name = "card", devices = 2, gbps = [0.002], carries = "outside" },
]
[device]
tflops = { fp64 = 1e-6 }
memory_gib = 8
memory_gigabytes_per_second = 5
gemm_rows = [1]
gemm_share = [1]
"""
"""Computing and links so slow that where toy sizes are computed matters."""
RUNS: dict[str, dict[str, dict]] = {
    "arbiter": {"mesh": NODES, "balance": {"replication": "arbiter"}},
    "arbiter-tp": {
        "mesh": {"tp": 2, "ep": 2, "etp": 2, "ranks_per_node": 2},
        "plan": {"schedule": "s2"},
        "balance": {"replication": "arbiter"},
    },
    "two-stage": {"mesh": NODES, "balance": {"samples": "two_stage"}},
    "two copies of the experts": {"mesh": NODES | {"ep": 2}, "balance": {"samples": "two_stage"}},
    "shards": {"mesh": NODES | {"ep": 2, "etp": 2}, "balance": {"samples": "two_stage"}},
    "tensor groups": {
        "mesh": NODES | {"tp": 2},
        "balance": {"samples": "two_stage"},
        "record_routing": "counts",
    },
    "experts": {"mesh": NODES, "balance": {"experts": "smartmoe", "experts_every": 1}},
    "all": {
        "mesh": NODES,
        "model": {"num_heads": 4, "checkpoint_activations": True},
        "balance": {
            "replication": "arbiter",
            "samples": "weighed",
            "experts": "smartmoe",
            "experts_every": 1,
        },
    },
    "weighed": {"mesh": NODES, "plan": {"chunks": 2}, "balance": {"samples": "weighed"}},
    "both": {"mesh": NODES, "balance": {"replication": "arbiter", "samples": "two_stage"}},
}


def configured(folder: Path, name: str) -> TrainConfig:
    planner = {"cluster": str(folder / "slow.toml")}
    return tiny(folder, **BASE | RUNS[name], planner=planner, out=str(folder / name))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process, then on four in every way, and once as a recorded run was routed;
    return the outcomes by name."""
    folder = tmp_path_factory.mktemp("balance")
    (folder / "slow.toml").write_text(SLOW)
    run_quietly(tiny(folder, **BASE, out=str(folder / "one")))  # type: ignore[arg-type]
    runs = {name: configured(folder, name) for name in RUNS}
    runs["again"] = replace(
        runs["two-stage"], out=str(folder / "again"), replay_routing=str(folder / "two-stage")
    )
    return folder, dict(zip(runs, train_on(4, list(runs.values()), views_are_errors)))


def views_are_errors() -> None:
    """FSDP warns of a block that returns a view: what changes it in place loses the hook that
    gathers parameters again."""
    warnings.filterwarnings("error", r".*\(FSDPMovingBlock\) returned a view")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, "again"])
def test_training_and_its_trace_are_what_they_are_without(
    world: tuple[Path, dict], name: str
) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[name]] == [""] * 4
    assert_same_run(folder / "one", folder / name)
    one = Trace.open(folder / "one")
    four = Trace.open(folder / name)
    for step in range(3):
        assert (four.samples(1, step) == one.samples(1, step)).all()
        assert four.holds == "counts" or (four.experts(1, step) == one.experts(1, step)).all()


@pytest.mark.slow
def test_a_replay_on_the_same_mesh_moves_the_same_samples_bit_by_bit(
    world: tuple[Path, dict],
) -> None:
    """The next layer's routing is predicted by its router, as in the recorded run, though the trace
    would tell it."""
    folder, _ = world
    assert losses(folder / "two-stage") == losses(folder / "again")
    assert difference(parameters(folder / "two-stage"), parameters(folder / "again")) == 0.0
    first, again = (
        [
            (layer["samples_moved"], layer["sample_bytes_across"])
            for layer in of_layers(folder / name)
        ]
        for name in ("two-stage", "again")
    )
    assert first == again


def of_layers(folder: Path) -> list[dict]:
    return [layer for line in lines(folder, "train") for layer in line["balance"]["layers"]]


@pytest.mark.slow
def test_the_metrics_tell_what_was_decided(world: tuple[Path, dict[str, list[Outcome]]]) -> None:
    folder, _ = world
    layers = of_layers(folder / "arbiter")
    options = {name for layer in layers for name in layer["options"]}
    assert options - {"alone"}
    for layer in layers:
        assert sum(layer["rows"]) == pytest.approx(sum(layer["rows_alone"]))
        assert len(layer["rows"]) == 4
        assert layer["token_bytes_alone"] > 0
        assert "alone" in layer["predicted_seconds"]
    assert any(max(layer["rows"]) < max(layer["rows_alone"]) for layer in layers)
    assert any(layer["weight_bytes"] > 0 for layer in layers)
    assert any(layer["copies_replicated"] > 0 for layer in layers)
    assert all(
        0 < line["balance"]["decision_share"] < 1 for line in lines(folder / "arbiter", "train")
    )


@pytest.mark.slow
def test_the_metrics_tell_where_samples_went(world: tuple[Path, dict[str, list[Outcome]]]) -> None:
    folder, _ = world
    moved = of_layers(folder / "two-stage")
    assert any(layer["samples_moved"] > 0 for layer in moved)
    assert sum(layer["sample_bytes_across"] for layer in moved) < 0, "fewer rows between nodes"
    both = of_layers(folder / "both")
    assert any("relocate" in layer["options"] for layer in both)
    assert {name for layer in both for name in layer["options"]} - {"relocate"}
    assert "balance" not in lines(folder / "one", "train")[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"mesh": {"tp": 2, "sequence_parallel": True}},
            (
                r"balance\.samples=two_stage clashes with mesh\.sequence_parallel, which gives "
                r"each rank a part"
            ),
        ),
        (
            {"model": {"ffn": "dense"}},
            r"clashes with model\.ffn=\"dense\", which has no MoE layers",
        ),
        (
            {"planner": {"plan": "auto", "cluster": "bed-2x2"}},
            r"clashes with planner\.plan=auto, whose plans are predicted",
        ),
    ],
)
def test_what_cannot_go_with_placement_is_refused_at_once(
    tmp_path: Path, options: dict, line: str
) -> None:
    with pytest.raises(InputError, match=line):
        tiny(
            tmp_path,
            **{**options, "balance": {"samples": "two_stage", **options.get("balance", {})}},
        )


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"balance\.experts_every=0: must be at least 1"):
        tiny(tmp_path, balance={"experts": "balanced", "experts_every": 0})
    with pytest.raises(
        InputError, match=r"balance\.samples=two_stage: one process has nowhere to move samples"
    ):
        run_quietly(tiny(tmp_path, balance={"samples": "two_stage"}))
    assert not (tmp_path / "run").exists()


def test_the_configuration_is_kept_with_the_run(tmp_path: Path) -> None:
    run_quietly(tiny(tmp_path, balance={"memory_budget": 10**9}, out=str(tmp_path / "kept")))
    saved = json.loads((tmp_path / "kept" / "config.json").read_text())
    usual = {
        "replication": "none",
        "memory_budget": None,
        "samples": "none",
        "experts": "none",
        "experts_every": 50,
    }
    assert saved["balance"] == usual | {"memory_budget": 10**9}
