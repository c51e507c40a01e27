"""Training on two Gloo processes equals training on one: losses, gradient norms, parameters. Refusals reach all ranks."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.train.checkpoint import list_checkpoints, load_checkpoint
from moesaic.train.config import SaveConfig, TrainConfig
from runs import assert_same, lines, parameters, run_quietly, skip_measuring, tiny
from train.worlds import Outcome, assert_same_run, difference, train_on

BASE = {"batch_size": 4, "precision": "float64", "evaluate": {"every": 2, "sequences": 5}, "steps": 2}
DENSE = {"model": {"ffn": "dense", "dense_hidden": 24}}
ODD_VOCABULARY = {"data": {"vocab_size": 301}, "model": {"ffn": "dense", "dense_hidden": 24}}
FULL = {
    "accumulation": 2,
    "model": {
        "checkpoint_activations": True,
        "moe": {
            "router": "sigmoid", "router_options": {"bias_rate": 0.01}, "shared_hidden": 8,
            "capacity": "fixed", "capacity_factor": 1.0,
            "load_balance_level": "global_batch", "z_loss": 0.01,
        },
    },
}  # fmt: skip
SAME = {
    "dense, dp": (DENSE, {}, {}),
    "dense, tp": (DENSE, {"tp": 2}, {}),
    "dense, positions": (DENSE, {"tp": 2, "sequence_parallel": True}, {}),
    "odd vocabulary, tp": (ODD_VOCABULARY, {"tp": 2}, {}),
    "ep": ({}, {"ep": 2}, {"chunks": 2}),
    "etp": ({}, {"etp": 2}, {}),
    "edp": ({}, {}, {}),
    "tp, edp": ({}, {"tp": 2}, {"schedule": "s1"}),
    "tp and ep, s1": ({}, {"tp": 2, "ep": 2}, {"schedule": "s1"}),
    "tp and etp, s2": ({}, {"tp": 2, "etp": 2}, {"schedule": "s2", "chunks": 2}),
    "everything, ep": (FULL, {"ep": 2}, {}),
    "everything, positions": (FULL, {"tp": 2, "sequence_parallel": True}, {"schedule": "s1"}),
    "everything, tp and ep": (FULL, {"tp": 2, "ep": 2}, {"schedule": "s2"}),
}
"""Name to what is trained, the mesh, the plan."""
MORE = ("dense, positions", "odd vocabulary, tp", "etp", "tp, edp", "everything, ep", "everything, positions")
"""Those of `make test-random`: the others train under each axis of the mesh, under every schedule and with everything on."""


def one_and_two(folder: Path, name: str) -> tuple[TrainConfig, TrainConfig]:
    """Return the configurations of a case for one process and for two."""
    changes, mesh, plan = SAME[name]
    plain = tiny(folder, **BASE, **changes)
    meshed = tiny(folder, **BASE, **changes, mesh=mesh, plan=plan)
    slug = name.replace(" ", "-").replace(",", "")
    return replace(plain, out=str(folder / f"one-{slug}")), replace(meshed, out=str(folder / f"two-{slug}"))


def refusals(folder: Path) -> dict[str, TrainConfig | list[TrainConfig]]:
    """Return configurations that must be refused, or fail, on both ranks."""
    base = tiny(folder, **BASE)
    taken = replace(base, out=str(folder / "one-ep"))
    return {
        r"InputError: seed differs: 0 on rank 0, 1 on rank 1": [base, replace(base, seed=1)],
        r"InputError: plan.chunks differs: 1 on rank 0, 2 on rank 1": [base, tiny(folder, **BASE, plan={"chunks": 2})],
        r"InputError: batch_size=3 does not split over 2 data parallel groups: choose a multiple of 2": replace(
            base, batch_size=3
        ),
        r"InputError: mesh.ep=4 times mesh.etp=1 does not divide the 2 ranks": tiny(folder, **BASE, mesh={"ep": 4}),
        r"InputError: .*one-ep holds a run already": taken,
        r"InputError: .*overlap_gather": tiny(
            folder, **BASE, mesh={"tp": 2, "ep": 2}, plan={"schedule": "s1", "overlap_gather": True}
        ),
        r"InputError: replication clashes with plan.all_to_all=multicast": tiny(
            folder, **BASE, mesh={"ep": 2}, plan={"all_to_all": "multicast"}, balance={"replication": "shadow"}
        ),
        r"InputError: out=.*blocked: holds checkpoints, which does not look like a run": replace(
            base, out=str(folder / "blocked"), save=SaveConfig(every=1)
        ),
        r"TrainingError: .* of step 2 is not finite": tiny(folder, **BASE, optimizer={"lr": 1e300, "warmup_steps": 0}),
    }


def chain(folder: Path) -> list[TrainConfig]:
    """Return a run that changes its mesh: one process took its first step, its last is taken by one again."""
    base = tiny(folder, **BASE | {"steps": 1}, out=str(folder / "chain"), save={"every": 1})
    run_quietly(base)
    first = tiny(folder, **BASE, out=base.out, existing="resume", mesh={"tp": 2, "ep": 2})
    second = tiny(folder, **BASE | {"steps": 3}, out=base.out, existing="resume", mesh={"etp": 2})
    return [first, second]


def noisy(folder: Path, mesh: str) -> list[TrainConfig]:
    """Return a run in one go, and one that is taken up again after one, with an evaluation more; the rate is constant."""
    changes = {**BASE, "model": {"moe": {"router": "noisy"}}, "optimizer": {"final_share": 1.0, "warmup_steps": 0}}
    shape = {"tp": {"tp": 2}, "dp": {"ep": 2}}[mesh]
    whole = tiny(folder, **changes, mesh=shape, out=str(folder / f"whole-{mesh}"))
    parts = replace(whole, out=str(folder / f"parts-{mesh}"), existing="resume")
    return [whole, replace(parts, steps=1), parts]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train everything on one process, then on two; return the folder and the outcomes by name."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        skip_measuring(patch)
        pairs = {name: one_and_two(folder, name) for name in SAME if name not in MORE}
        for plain, _ in pairs.values():
            run_quietly(plain)
        runs: dict[str, TrainConfig | list[TrainConfig]] = {name: meshed for name, (_, meshed) in pairs.items()}
        for place, config in enumerate(chain(folder)):
            runs[f"chain {place}"] = config
        for mesh in ("tp", "dp"):
            runs |= {f"noisy {mesh} {place}": config for place, config in enumerate(noisy(folder, mesh))}
        meshed = pairs["tp and ep, s1"][1]
        background = SaveConfig(every=1, keep=9, background=True)
        runs["background"] = replace(meshed, save=background, out=str(folder / "background"))
        (folder / "blocked").mkdir()
        (folder / "blocked" / "checkpoints").write_text("a file")
        runs |= refusals(folder)
        outcomes = train_on(2, list(runs.values()))
    return folder, dict(zip(runs, outcomes))


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train the cases of `MORE` on one process, then on two."""
    folder = tmp_path_factory.mktemp("more")
    with pytest.MonkeyPatch.context() as patch:
        skip_measuring(patch)
        for name in MORE:
            run_quietly(one_and_two(folder, name)[0])
        return folder, dict(zip(MORE, train_on(2, [one_and_two(folder, name)[1] for name in MORE])))


@pytest.mark.parametrize("name", [name for name in SAME if name not in MORE])
def test_two_ranks_train_as_one_process(world, name):
    assert_trained_as_one(*world, name)


@pytest.mark.random
@pytest.mark.parametrize("name", MORE)
def test_two_ranks_train_more_as_one_process(more, name):
    assert_trained_as_one(*more, name)


def assert_trained_as_one(folder: Path, outcomes: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.refusal for outcome in outcomes[name]] == ["", ""]
    plain, meshed = one_and_two(folder, name)
    assert_same_run(Path(plain.out), Path(meshed.out))
    assert outcomes[name][0].loss == pytest.approx(outcomes[name][1].loss, abs=1e-12)


def test_only_the_first_rank_speaks(world):
    outcomes = world[1]["ep"]
    assert "x 2 ranks (dp 2, tp 1; edp 1, ep 2, etp 1)" in outcomes[0].said
    assert outcomes[1].said == ""


def test_training_moves_the_parameters(world):
    folder = world[0]
    start = tiny(folder, **BASE | {"steps": 1}, out=str(folder / "start"))
    run_quietly(start)
    assert difference(parameters(folder / "start"), parameters(folder / "two-ep")) > 1e-3


def test_a_run_goes_on_over_other_meshes_and_one_process(world, monkeypatch):
    folder, outcomes = world
    skip_measuring(monkeypatch)
    assert [outcome.refusal for place in (0, 1) for outcome in outcomes[f"chain {place}"]] == [""] * 4
    names = sorted(path.name for path in (folder / "chain" / "checkpoints" / "step-00000003").iterdir())
    assert names == ["SHA256SUMS", "config.json", "shards", "state.json"]
    run_quietly(tiny(folder, **BASE | {"steps": 4}, out=str(folder / "chain"), existing="resume"))
    run_quietly(tiny(folder, **BASE | {"steps": 4}, out=str(folder / "whole")))
    rates = [(line["loss"], line["grad_norm"]) for line in lines(folder / "chain", "train")]
    # The schedule of the rate depends on `steps`, which grew: the runs part ways as one process's would.
    for steps in (1, 2, 3, 4):
        config = tiny(
            folder, **BASE | {"steps": steps}, out=str(folder / "again"), save={"every": 1}, existing="resume"
        )
        run_quietly(config)
    expected = [(line["loss"], line["grad_norm"]) for line in lines(folder / "again", "train")]
    assert rates == [pytest.approx(pair, abs=1e-9) for pair in expected]
    assert difference(parameters(folder / "chain"), parameters(folder / "again")) < 1e-9


def test_shards_that_are_written_while_training_goes_on_are_those_that_are_waited_for(world):
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes["background"]] == ["", ""]
    kept = [path.name for path in list_checkpoints(folder / "background" / "checkpoints")]
    assert kept == [f"step-{step:08d}" for step in (1, 2)]
    loaded = [load_checkpoint(folder / out / "checkpoints", pytest.fail) for out in ("background", "two-tp-and-ep-s1")]
    assert_same(loaded[0].model, loaded[1].model)
    assert_same(loaded[0].optimizer, loaded[1].optimizer)


def test_a_damaged_shard_is_passed_over(world, monkeypatch):
    folder, _ = world
    skip_measuring(monkeypatch)
    shutil.copytree(folder / "two-tp-and-ep-s1", folder / "damaged")
    (path,) = (folder / "damaged" / "checkpoints").iterdir()
    shutil.copytree(path, path.with_name("step-00000009"))
    shard = next((path.with_name("step-00000009") / "shards").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    said: list[str] = []
    loaded = load_checkpoint(folder / "damaged" / "checkpoints", said.append)
    assert (loaded.step, len(said)) == (2, 1)
    assert f"shards/{shard.name} does not match its checksum" in said[0]
    assert "taking step-00000002 instead" in said[0]


@pytest.mark.parametrize("mesh", ["tp", "dp"])
def test_routing_noise_goes_on_where_it_stopped(world, mesh):
    folder, outcomes = world
    assert [outcomes[f"noisy {mesh} {place}"][0].refusal for place in range(3)] == [""] * 3
    assert_same_run(folder / f"whole-{mesh}", folder / f"parts-{mesh}", kinds=("train",))
    if mesh == "dp":  # each group draws its own: other routing than that of one process
        assert lines(folder / "whole-dp", "train")[0]["layers"] != lines(folder / "whole-tp", "train")[0]["layers"]


@pytest.mark.parametrize("place", range(9))
def test_what_is_refused_is_refused_on_every_rank(world, place):
    folder, outcomes = world
    expected = list(refusals(folder))[place]
    texts = [outcome.refusal for outcome in outcomes[expected]]
    assert texts[0] == texts[1]
    assert "\n" not in texts[0]
    assert re.match(expected, texts[0]), texts[0]
