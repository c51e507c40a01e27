"""Traces and replays with moving samples and experts: four Gloo processes equal one process, to 1e-9.

The replayed trace comes from another model, so a replay trains differently from both runs without one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.traces.trace import Trace
from moesaic.train.config import TrainConfig
from runs import lines, losses, parameters, run_quietly, skip_measuring, tiny
from train.worlds import Outcome, difference, train_on

BASE: dict[str, Any] = {
    "batch_size": 8, "precision": "float64", "evaluate": {"every": 100, "sequences": 4}, "steps": 3,
    "model": {"num_heads": 4, "num_layers": 3, "moe": {"num_experts": 8}},
}  # fmt: skip
NODES = {"ep": 4, "ranks_per_node": 2}
MOVED = {"samples": "two_stage"}
EXPERTS = {"experts": "smartmoe", "experts_every": 1}
ARBITER = {"replication": "arbiter"}
TOLD: dict[str, dict[str, Any]] = {
    "samples": {"balance": MOVED},
    "samples, recomputed": {"balance": MOVED, "model": {"checkpoint_activations": True}},
    "samples, two copies of the experts": {"balance": MOVED, "mesh": {"ep": 2}},
    "experts": {"balance": EXPERTS},
    "arbiter": {"balance": ARBITER},
    "all": {"balance": {"samples": "weighed"} | EXPERTS | ARBITER},
}
"""What moves in a run that replays the experts of a trace."""
HOLDS = ("counts", "tokens")


def configured(folder: Path, name: str, **more: Any) -> TrainConfig:
    """Return a run. It has four ranks if `more` names a mesh."""
    slug = name.replace(", ", "-").replace(" ", "-")
    more = {**BASE, **more, "model": BASE["model"] | more.get("model", {})}
    return tiny(folder, **more, out=str(folder / slug))


def on_four(folder: Path, name: str, **more: Any) -> TrainConfig:
    """Return a run of four ranks."""
    return configured(folder, name, **{"mesh": NODES, **more})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process, then on four; return the folder and the outcomes by name."""
    folder = tmp_path_factory.mktemp("moved")
    trace = str(folder / "other")
    with pytest.MonkeyPatch.context() as patch:
        skip_measuring(patch)
        run_quietly(configured(folder, "other", record_routing="tokens", accumulation=2, seed=7))
        run_quietly(configured(folder, "told", replay_routing=str(trace), accumulation=2))
        run_quietly(configured(folder, "free", accumulation=2))
        runs: dict[str, TrainConfig] = {}
        for name, how in TOLD.items():
            told = {"replay_routing": str(trace), "record_routing": "tokens", "accumulation": 2}
            runs[f"told {name}"] = on_four(folder, f"told {name}", **told, **how)
        for holds in HOLDS:
            run_quietly(configured(folder, f"one {holds}", record_routing=holds))
            both = {"balance": MOVED | EXPERTS, "record_routing": holds}
            runs[f"four {holds}"] = on_four(folder, f"four {holds}", **both)
        first = runs["four tokens"]
        runs["again"] = replace(first, out=str(folder / "again"), replay_routing=first.out)
        outcomes = train_on(4, list(runs.values()))
    return folder, dict(zip(runs, outcomes))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_a_replay_with_moves_is_the_replay_of_one_process(world: tuple[Path, dict], name: str) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[f"told {name}"]] == [""] * 4
    moved, one = Path(on_four(folder, f"told {name}").out), folder / "told"
    assert losses(moved) == [(step, pytest.approx(loss, abs=1e-9)) for step, loss in losses(one)]
    assert difference(parameters(one), parameters(moved)) < 1e-9
    assert difference(parameters(folder / "free"), parameters(moved)) > 1e-4, "routers that choose train another model"
    for a, b in zip(Trace.open(folder / "other").segments(), Trace.open(moved).segments(), strict=True):
        assert (a.table == b.table).all()


def layers_of(folder: Path) -> list[dict[str, Any]]:
    return [layer for line in lines(folder, "train") for layer in line.get("balance", {"layers": []})["layers"]]


@pytest.mark.slow
def test_what_was_to_move_moved(world: tuple[Path, dict]) -> None:
    folder, _ = world
    for name in [name for name in TOLD if "samples" in name]:
        moved = layers_of(Path(on_four(folder, f"told {name}").out))
        assert any(layer["samples_moved"] > 0 for layer in moved), name
    for name in ("experts", "all"):
        told = Path(on_four(folder, f"told {name}").out)
        assert sum(line["place_experts"]["experts"] for line in lines(told, "train")) > 0
    options = {option for layer in layers_of(folder / "told-all") for option in layer["options"]}
    assert "relocate" in options


@pytest.mark.slow
@pytest.mark.parametrize("holds", HOLDS)
def test_a_trace_is_of_the_batch_whatever_moved(world: tuple[Path, dict], holds: str) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[f"four {holds}"]] == [""] * 4
    one, four = Trace.open(folder / f"one-{holds}"), Trace.open(folder / f"four-{holds}")
    assert any(layer["samples_moved"] > 0 for layer in layers_of(folder / f"four-{holds}"))
    for a, b in zip(one.segments(), four.segments(), strict=True):
        assert (a.table == b.table).all()
    assert (four.counts(2, 1) == one.counts(2, 1, groups=4)).all()


@pytest.mark.slow
def test_a_replay_on_the_same_mesh_moves_the_same_samples_bit_by_bit(world: tuple[Path, dict]) -> None:
    """The next layer's routing is predicted by its router, as in the recorded run, though the trace would tell it."""
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes["again"]] == [""] * 4
    first, again = folder / "four-tokens", folder / "again"
    assert losses(first) == losses(again)
    assert difference(parameters(first), parameters(again)) == 0.0
    decided = [
        [(layer["samples_moved"], layer["sample_bytes_across"]) for layer in layers_of(each)] for each in (first, again)
    ]
    assert decided[0] == decided[1]
