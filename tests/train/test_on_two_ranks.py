"""Training on two Gloo processes equals training on one: losses, gradient norms, parameters.
Refusals reach all ranks."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import kinds_of_files
from moesaic.train.checkpoint import list_checkpoints, load_checkpoint
from moesaic.train.config import SaveConfig, TrainConfig
from moesaic.train.distributed_checkpoint import read_whole
from runs import lines, run_quietly, tiny
from train.worlds import Outcome, assert_same_run, difference, train_on

BASE = {
    "batch_size": 4,
    "precision": "float64",
    "evaluate": {"every": 2, "sequences": 5},
    "steps": 2,
}
CONSTANT = {"final_share": 1.0, "warmup_steps": 0}
"""A learning rate that does not depend on the number of steps, so that a run in parts equals the
run in one."""
MODELS = {
    "plain": {},
    "dense": {"model": {"ffn": "dense", "dense_hidden": 24}},
    "odd vocabulary": {"data": {"vocab_size": 301}, "model": {"ffn": "dense", "dense_hidden": 24}},
    "everything": {
        "accumulation": 2,
        "model": {
            "checkpoint_activations": True,
            "moe": {
                "router": "sigmoid",
                "router_options": {"bias_rate": 0.01},
                "shared_hidden": 8,
                "capacity": "fixed",
                "capacity_factor": 1.0,
                "load_balance_level": "global_batch",
                "z_loss": 0.01,
            },
        },
    },
}
SAME = {
    "dense, dp": ({}, {}),
    "dense, tp": ({"tp": 2}, {}),
    "dense, positions": ({"tp": 2, "sequence_parallel": True}, {}),
    "odd vocabulary, tp": ({"tp": 2}, {}),
    "plain, ep": ({"ep": 2}, {"chunks": 2}),
    "plain, etp": ({"etp": 2}, {}),
    "plain, edp": ({}, {}),
    "plain, tp and edp": ({"tp": 2}, {"schedule": "s1"}),
    "plain, tp and ep": ({"tp": 2, "ep": 2}, {"schedule": "s1"}),
    "plain, tp and etp": ({"tp": 2, "etp": 2}, {"schedule": "s2", "chunks": 2}),
    "everything, ep": ({"ep": 2}, {}),
    "everything, positions": ({"tp": 2, "sequence_parallel": True}, {"schedule": "s1"}),
    "everything, tp and ep": ({"tp": 2, "ep": 2}, {"schedule": "s2"}),
}
"""Name to the mesh and the plan; a name begins with that of the model."""
MORE = (
    "dense, positions",
    "odd vocabulary, tp",
    "plain, etp",
    "plain, tp and edp",
    "everything, ep",
    "everything, positions",
)
"""Those of `make test-random`: the others train under each axis of the mesh, under every schedule
and with everything on."""
QUICK = [name for name in SAME if name not in MORE]


def alone(folder: Path, model: str) -> TrainConfig:
    return tiny(folder, **BASE, **MODELS[model], out=str(folder / f"one {model}"))


def meshed(folder: Path, name: str) -> TrainConfig:
    (mesh, plan) = SAME[name]
    model = name.partition(",")[0]
    # Written while training goes on, to the same effect.
    save = {"every": 1, "keep": 9, "background": True} if name == "plain, tp and ep" else {}
    return tiny(
        folder, **BASE, **MODELS[model], mesh=mesh, plan=plan, save=save, out=str(folder / name)
    )


def refusals(folder: Path) -> dict[str, TrainConfig | list[TrainConfig]]:
    """Return configurations that must be refused, or fail, on both ranks."""
    base = tiny(folder, **BASE)

    def changed(**changes: object) -> TrainConfig:
        return tiny(folder, **BASE | changes)

    return {
        r"InputError: seed differs: 0 on rank 0, 1 on rank 1": [base, replace(base, seed=1)],
        r"InputError: plan.chunks differs: 1 on rank 0, 2 on rank 1": [
            base,
            changed(plan={"chunks": 2}),
        ],
        (
            r"InputError: batch_size=3 does not split over 2 data parallel groups: choose a "
            r"multiple of 2"
        ): changed(batch_size=3),
        r"InputError: mesh.ep=4 times mesh.etp=1 does not divide the 2 ranks": changed(
            mesh={"ep": 4}
        ),
        r"InputError: .*one plain holds a run already": changed(out=str(folder / "one plain")),
        r"InputError: .*overlap_gather": changed(
            mesh={"tp": 2, "ep": 2}, plan={"schedule": "s1", "overlap_gather": True}
        ),
        r"InputError: replication clashes with plan.all_to_all=multicast": changed(
            mesh={"ep": 2}, plan={"all_to_all": "multicast"}, balance={"replication": "shadow"}
        ),
        r"InputError: out=.*blocked: holds checkpoints, which does not look like a run": replace(
            base, out=str(folder / "blocked"), save=SaveConfig(every=1)
        ),
        r"TrainingError: .* of step 2 is not finite": changed(
            optimizer={"lr": 1e300, "warmup_steps": 0}
        ),
    }


def chain(folder: Path, steps: int, **mesh: int) -> TrainConfig:
    """Return a part of a run that changes its mesh from step to step."""
    changes = {"steps": steps, "optimizer": CONSTANT, "save": {"every": 1}, "mesh": mesh}
    return tiny(folder, **BASE | changes, out=str(folder / "chain"), existing="resume")


def noisy(folder: Path, mesh: str) -> list[TrainConfig]:
    """Return a run in one go, and one that is taken up again after one step, with an evaluation
    more."""
    changes = {**BASE, "model": {"moe": {"router": "noisy"}}, "optimizer": CONSTANT}
    shape = {"tp": {"tp": 2}, "dp": {"ep": 2}}[mesh]
    whole = tiny(folder, **changes, mesh=shape, out=str(folder / f"whole-{mesh}"))
    parts = replace(whole, out=str(folder / f"parts-{mesh}"), existing="resume")
    return [whole, replace(parts, steps=1), parts]


def trained(
    folder: Path, cases: list[str], more: dict[str, object]
) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train the models of cases on one process, then the cases and more on two; return the outcomes
    by name."""
    for model in {name.partition(",")[0] for name in cases}:
        run_quietly(alone(folder, model))
    runs: dict = {name: meshed(folder, name) for name in cases} | more
    return folder, dict(zip(runs, train_on(2, list(runs.values()))))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    folder = tmp_path_factory.mktemp("two")
    run_quietly(chain(folder, 1))
    runs: dict[str, object] = {
        "chain 2": chain(folder, 2, tp=2, ep=2),
        "chain 3": chain(folder, 3, etp=2),
    }
    for mesh in ("tp", "dp"):
        runs |= {
            f"noisy {mesh} {place}": config for place, config in enumerate(noisy(folder, mesh))
        }
    (folder / "blocked").mkdir()
    (folder / "blocked" / "checkpoints").write_text("a file")
    return trained(folder, QUICK, runs | refusals(folder))


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    return trained(tmp_path_factory.mktemp("more"), list(MORE), {})


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.random) for name in MORE)]
)
def test_two_ranks_train_as_one_process(request, name):
    folder, outcomes = request.getfixturevalue("others" if name in MORE else "world")
    assert [outcome.refusal for outcome in outcomes[name]] == ["", ""]
    assert_same_run(folder / f"one {name.partition(',')[0]}", folder / name)
    assert outcomes[name][0].loss == pytest.approx(outcomes[name][1].loss, abs=1e-12)


def test_only_the_first_rank_speaks(world):
    outcomes = world[1]["plain, ep"]
    assert "x 2 ranks (dp 2, tp 1; edp 1, ep 2, etp 1)" in outcomes[0].said
    assert outcomes[1].said == ""


def test_a_run_goes_on_over_other_meshes_and_one_process(world):
    folder, outcomes = world
    assert [outcome.refusal for name in ("chain 2", "chain 3") for outcome in outcomes[name]] == [
        ""
    ] * 4
    checkpoint = folder / "chain" / "checkpoints" / "step-00000003"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "shards",
        "state.json",
    ]
    run_quietly(chain(folder, 4))
    run_quietly(replace(chain(folder, 4), out=str(folder / "again")))
    assert_same_run(folder / "again", folder / "chain", kinds=("train",))
    third, last = (
        read_whole(path, "model.") for path in (checkpoint, checkpoint.with_name("step-00000004"))
    )
    assert difference(third, last) > 1e-3, "a step moves the parameters"


def test_shards_that_are_written_while_training_goes_on_are_those_that_are_waited_for(world):
    folder, _ = world  # their tensors are compared with those of one process above
    kept = [path.name for path in list_checkpoints(folder / "plain, tp and ep" / "checkpoints")]
    assert kept == [f"step-{step:08d}" for step in (1, 2)]


@pytest.mark.parametrize(
    ("run", "step", "writers"), [("one plain", 2, 1), ("chain", 3, 2), ("plain, tp and ep", 2, 2)]
)
def test_no_file_of_a_checkpoint_is_a_pickle(world, run, step, writers):
    """Of one rank, of two, and written in the background (the last)."""
    kinds = kinds_of_files(world[0] / run / "checkpoints" / f"step-{step:08d}")
    assert {name for name, kind in kinds.items() if kind == "text"} == {
        "SHA256SUMS",
        "config.json",
        "shards/index.json",
        "state.json",
    }
    files = {
        f"shards/shard-{rank:05}-model-00001-of-00001.safetensors" for rank in range(1, writers + 1)
    }
    assert {name for name, kind in kinds.items() if kind == "safetensors"} == files
    assert set(kinds.values()) == {"text", "safetensors"}


def test_a_damaged_shard_is_passed_over(world, tmp_path):
    folder, _ = world
    shutil.copytree(folder / "plain, tp and etp" / "checkpoints", tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.iterdir()
    shutil.copytree(path, tmp_path / "step-00000009")
    shard = next((tmp_path / "step-00000009" / "shards").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    said: list[str] = []
    loaded = load_checkpoint(tmp_path, said.append)
    assert (loaded.step, len(said)) == (2, 1)
    assert f"shards/{shard.name} does not match its checksum" in said[0]
    assert "taking step-00000002 instead" in said[0]


@pytest.mark.parametrize("mesh", ["tp", "dp"])
def test_routing_noise_goes_on_where_it_stopped(world, mesh):
    folder, outcomes = world
    assert [outcomes[f"noisy {mesh} {place}"][0].refusal for place in range(3)] == [""] * 3
    assert_same_run(folder / f"whole-{mesh}", folder / f"parts-{mesh}", kinds=("train",))
    if mesh == "dp":  # each group draws its own: other routing than that of one process
        assert (
            lines(folder / "whole-dp", "train")[0]["layers"]
            != lines(folder / "whole-tp", "train")[0]["layers"]
        )


@pytest.mark.parametrize("place", range(9))
def test_what_is_refused_is_refused_on_every_rank(world, place):
    folder, outcomes = world
    expected = list(refusals(folder))[place]
    texts = [outcome.refusal for outcome in outcomes[expected]]
    assert texts[0] == texts[1]
    assert "\n" not in texts[0]
    assert re.match(expected, texts[0]), texts[0]
