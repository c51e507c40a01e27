"""On two Gloo processes, traces equal those of one process, and replays train what one process trains, to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.traces.trace import Trace
from moesaic.train.config import TrainConfig
from runs import losses, parameters, run_quietly, skip_measuring, tiny
from train.worlds import Outcome, assert_same_run, difference, train_on

BASE = {
    "batch_size": 4,
    "precision": "float64",
    "evaluate": {"every": 100, "sequences": 4},
    "accumulation": 2,
    "steps": 2,
}
MESHES = {
    "ep": ({"ep": 2}, {"chunks": 2}),
    "tp, s2": ({"tp": 2, "ep": 2}, {"schedule": "s2"}),
    "tp, s1": ({"tp": 2, "etp": 2}, {"schedule": "s1"}),
}
HOLDS = ("counts", "tokens")
RECORDED = [("ep", "counts"), ("ep", "tokens"), ("tp, s2", "counts"), ("tp, s1", "counts"), ("tp, s1", "tokens")]
NOISY = {"model": {"moe": {"router": "gshard", "load_balance_level": "global_batch"}, "seq_len": 15}}
"""A router with other random second choices on another mesh, so that only a replay agrees; and sequences that two ranks
cannot split evenly."""


def plain(folder: Path, holds: str = "tokens") -> TrainConfig:
    """Return the run of one process that is recorded."""
    return tiny(folder, **BASE, out=str(folder / f"one-{holds}"), record_routing=holds)


def on_mesh(folder: Path, name: str, holds: str) -> TrainConfig:
    """Return the same run on two ranks."""
    mesh, plan = MESHES[name]
    slug = name.replace(", ", "-")
    return tiny(folder, **BASE, out=str(folder / f"two-{slug}-{holds}"), record_routing=holds, mesh=mesh, plan=plan)


def noisy(folder: Path) -> TrainConfig:
    """Return a run of one process whose routing no other mesh would draw."""
    return tiny(folder, **{**BASE, **NOISY}, out=str(folder / "noisy"), record_routing="tokens")


def told(folder: Path, name: str, trace: str) -> TrainConfig:
    """Return its replay on two ranks, recorded too."""
    mesh, plan = MESHES[name]
    slug = name.replace(", ", "-")
    out = str(folder / f"told-{slug}-{Path(trace).name}")
    return tiny(
        folder, **{**BASE, **NOISY}, out=out, record_routing="tokens", replay_routing=str(trace), mesh=mesh, plan=plan
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process, then on two; return the folder and the outcomes by name."""
    folder = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        skip_measuring(patch)
        for holds in HOLDS:
            run_quietly(plain(folder, holds))
        run_quietly(noisy(folder))
        runs: dict[str, TrainConfig | list[TrainConfig]] = {}
        for name in MESHES:
            runs[f"{name} told"] = told(folder, name, str(folder / "noisy"))
        runs |= {f"{name} {holds}": on_mesh(folder, name, holds) for name, holds in RECORDED}
        free = tiny(folder, **{**BASE, **NOISY}, out=str(folder / "free"), mesh={"ep": 2}, record_routing="tokens")
        runs["free"] = free
        runs["again"] = replace(free, out=str(folder / "again"), record_routing="tokens", replay_routing=free.out)
        counts = str(folder / "one-counts")
        runs["refused"] = tiny(folder, **BASE, out=str(folder / "refused"), replay_routing=str(counts))
        runs["blocked"] = tiny(folder, **BASE, out=str(folder / "blocked"), record_routing="counts")
        (folder / "blocked").mkdir()
        (folder / "blocked" / "routing").write_text("a file")
        outcomes = train_on(2, list(runs.values()))
    return folder, dict(zip(runs, outcomes))


@pytest.mark.parametrize(("name", "holds"), RECORDED)
def test_a_trace_does_not_depend_on_the_mesh(world, name, holds):
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[f"{name} {holds}"]] == ["", ""]
    one, two = Trace.open(Path(plain(folder, holds).out)), Trace.open(Path(on_mesh(folder, name, holds).out))
    assert one.steps == two.steps == [0, 1]
    for a, b in zip(one.segments(), two.segments(), strict=True):
        assert (a.table == b.table).all()
    groups = 1 if "tp" in name else 2
    assert two.counts(0, 1).shape == (groups, 4)
    assert (two.counts(0, 1) == one.counts(0, 1, groups=groups)).all()
    assert (one.counts(0, 1, groups=2)[0] != one.counts(0, 1, groups=2)[1]).any()


@pytest.mark.parametrize("name", MESHES)
def test_a_replay_on_two_ranks_is_the_run_of_one(world, name):
    folder, outcomes = world
    config = told(folder, name, str(folder / "noisy"))
    assert [outcome.refusal for outcome in outcomes[f"{name} told"]] == ["", ""]
    for a, b in zip(Trace.open(folder / "noisy").segments(), Trace.open(Path(config.out)).segments(), strict=True):
        assert (a.table == b.table).all()
    one, two = losses(folder / "noisy"), losses(Path(config.out))
    assert two == [(step, pytest.approx(loss, abs=1e-9)) for step, loss in one]
    assert difference(parameters(folder / "noisy"), parameters(Path(config.out))) < 1e-9
    free = losses(folder / "free")
    assert max(abs(a - b) for (_, a), (_, b) in zip(one, free)) > 1e-6, "without the trace the mesh draws other noise"


def test_a_replay_on_the_same_mesh_is_bit_identical(world):
    folder, outcomes = world
    assert outcomes["again"][0].refusal == ""
    assert losses(folder / "free") == losses(folder / "again")
    assert difference(parameters(folder / "free"), parameters(folder / "again")) == 0.0


def test_recorded_runs_agree_over_meshes(world):
    folder, _ = world
    assert_same_run(folder / "one-tokens", folder / "two-ep-tokens")


def test_refusals_reach_both_ranks(world):
    _, outcomes = world
    for name, text in (("refused", "holds counts only"), ("blocked", "which does not look like a run")):
        said = [outcome.refusal for outcome in outcomes[name]]
        assert said[0] == said[1]
        assert text in said[0]
        assert "\n" not in said[0]
