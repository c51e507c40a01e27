"""On two Gloo processes, traces equal those of one process, and replays train what one process
trains, to 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.traces.trace import Trace
from moesaic.train.config import TrainConfig
from runs import losses, parameters, run_quietly, tiny
from train.worlds import Outcome, assert_same_run, difference, train_on

BASE = {
    "batch_size": 4,
    "precision": "float64",
    "evaluate": {"every": 100, "sequences": 4},
    "accumulation": 2,
    "steps": 2,
}
MESHES: dict[str, dict[str, Any]] = {
    "ep": {"mesh": {"ep": 2}, "plan": {"chunks": 2}},
    "tp, s2": {"mesh": {"tp": 2, "ep": 2}, "plan": {"schedule": "s2"}},
    "tp, s1": {"mesh": {"tp": 2, "etp": 2}, "plan": {"schedule": "s1"}},
}
RECORDED = [
    ("ep", "counts"),
    ("ep", "tokens"),
    ("tp, s2", "counts"),
    ("tp, s1", "counts"),
    ("tp, s1", "tokens"),
]
NOISY = {
    "model": {"moe": {"router": "gshard", "load_balance_level": "global_batch"}, "seq_len": 15}
}
"""A router with other random second choices on another mesh, so that only a replay agrees; and
sequences that two ranks cannot split evenly."""


def run(folder: Path, out: str, holds: str = "tokens", **changes: Any) -> TrainConfig:
    return tiny(folder, **BASE, record_routing=holds, out=str(folder / out), **changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process, then on two; return the folder and the outcomes by the name of the
    run's folder."""
    folder = tmp_path_factory.mktemp("record")
    for config in (
        *(run(folder, holds, holds) for holds in ("counts", "tokens")),
        run(folder, "noisy", **NOISY),
    ):
        run_quietly(config)
    told, counted = ({"replay_routing": str(folder / name)} for name in ("noisy", "counts"))
    (folder / "blocked").mkdir()
    (folder / "blocked" / "routing").write_text("a file")
    runs = [
        *(run(folder, f"{name} {holds}", holds, **MESHES[name]) for name, holds in RECORDED),
        *(run(folder, f"{name} told", **NOISY, **told, **mesh) for name, mesh in MESHES.items()),
        run(folder, "free", **NOISY, mesh={"ep": 2}),
        run(folder, "again", **NOISY, mesh={"ep": 2}, replay_routing=str(folder / "free")),
        run(folder, "refused", **counted),
        run(folder, "blocked"),
    ]
    return folder, dict(zip((Path(config.out).name for config in runs), train_on(2, runs)))


def assert_same_tables(one: Path, other: Path) -> None:
    for a, b in zip(Trace.open(one).segments(), Trace.open(other).segments(), strict=True):
        assert (a.table == b.table).all()


@pytest.mark.parametrize(("name", "holds"), RECORDED)
def test_a_trace_does_not_depend_on_the_mesh(world, name, holds):
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[f"{name} {holds}"]] == ["", ""]
    assert_same_tables(folder / holds, folder / f"{name} {holds}")
    one = Trace.open(folder / holds)
    two = Trace.open(folder / f"{name} {holds}")
    assert one.steps == two.steps == [0, 1]
    groups = 1 if "tp" in name else 2
    assert two.counts(0, 1).shape == (groups, 4)
    assert (two.counts(0, 1) == one.counts(0, 1, groups=groups)).all()
    assert (one.counts(0, 1, groups=2)[0] != one.counts(0, 1, groups=2)[1]).any()


@pytest.mark.parametrize("name", MESHES)
def test_a_replay_on_two_ranks_is_the_run_of_one(world, name):
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[f"{name} told"]] == ["", ""]
    assert_same_tables(folder / "noisy", folder / f"{name} told")
    one, two, free = (losses(folder / out) for out in ("noisy", f"{name} told", "free"))
    assert two == [(step, pytest.approx(loss, abs=1e-9)) for step, loss in one]
    assert difference(parameters(folder / "noisy"), parameters(folder / f"{name} told")) < 1e-9
    assert max(abs(a - b) for (_, a), (_, b) in zip(one, free)) > 1e-6, (
        "without the trace the mesh draws other noise"
    )


def test_a_replay_on_the_same_mesh_is_bit_identical(world):
    folder, outcomes = world
    assert outcomes["again"][0].refusal == ""
    assert losses(folder / "free") == losses(folder / "again")
    assert difference(parameters(folder / "free"), parameters(folder / "again")) == 0.0


def test_recorded_runs_agree_over_meshes(world):
    folder, _ = world
    assert_same_run(folder / "tokens", folder / "ep tokens")


@pytest.mark.parametrize(
    ("name", "words"),
    [("refused", "holds counts only"), ("blocked", "which does not look like a run")],
)
def test_refusals_reach_both_ranks(world, name, words):
    said = [outcome.refusal for outcome in world[1][name]]
    assert said[0] == said[1]
    assert words in said[0]
    assert "\n" not in said[0]
