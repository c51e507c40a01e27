"""Training in pipeline stages, with both schedules and with every other kind of parallelism, equals
training on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.train.config import TrainConfig
from runs import run_quietly, tiny
from train.worlds import Outcome, assert_same_run, train_on

MOE = {
    "num_experts": 4,
    "top_k": 2,
    "hidden": 16,
    "load_balance_level": "global_batch",
    "z_loss": 0.01,
}
BASE = {
    "batch_size": 4,
    "accumulation": 4,
    "precision": "float64",
    "evaluate": {"every": 100, "sequences": 5},
    "optimizer": {"final_share": 1.0, "warmup_steps": 0},
}
"""A constant learning rate, so that a run in parts equals the run in one."""
STAGES = {
    "tp": {"pp": 2, "parts_per_stage": 2, "tp": 2, "etp": 2, "sequence_parallel": True},
    "1f1b-2": {"pp": 2, "ep": 2},
    "1f1b-4": {"pp": 4},
    "interleaved-2": {"pp": 2, "parts_per_stage": 2},
    "interleaved-4": {"pp": 4, "parts_per_stage": 2},
}
"""Name to mesh of four ranks."""
MORE = tuple(STAGES)[1:]
"""Cases that only `make test-random` runs. 1F1B is also tested by the run that changes its stages,
and interleaving with tp."""
REFUSED = {
    "pp=3: 3 stages do not divide the 4 ranks": {"mesh": {"pp": 3}, "accumulation": 3},
    "leaves 2 of the 4 ranks to a stage, too few for mesh.tp=1, mesh.ep=4": {
        "mesh": {"pp": 2, "ep": 4}
    },
}
"""A part of the error message to settings that only the ranks can refuse."""


def configured(
    folder: Path, out: str, *, layers: int = 5, steps: int = 3, **changes: object
) -> TrainConfig:
    """Return a run in which every second layer is dense, so that parts differ in size and some have
    no experts."""
    model = {"num_layers": layers, "moe_every": 2, "moe": MOE}
    return tiny(
        folder, **BASE | {"model": model, "steps": steps, "out": str(folder / out)} | changes
    )


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process and in the stages of `MORE`."""
    folder = tmp_path_factory.mktemp("more")
    run_quietly(configured(folder, "one", layers=9))
    runs = [configured(folder, name, layers=9, mesh=STAGES[name]) for name in MORE]
    return folder, dict(zip(MORE, train_on(4, runs)))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process and in stages. A run that is begun in some stages goes on in others, and
    then on one process."""
    folder = tmp_path_factory.mktemp("stages")
    runs = {"tp": configured(folder, "tp", mesh=STAGES["tp"])}
    runs |= {line: configured(folder, "refused", **changes) for line, changes in REFUSED.items()}
    for steps, name in ((1, "1f1b-2"), (2, "interleaved-2")):
        runs[name] = configured(folder, "moved", steps=steps, mesh=STAGES[name], existing="resume")
    run_quietly(configured(folder, "one"))
    outcomes = dict(zip(runs, train_on(4, list(runs.values()))))
    run_quietly(configured(folder, "moved", existing="resume"))
    return folder, outcomes


@pytest.mark.parametrize(
    "name", ["tp", *(pytest.param(name, marks=pytest.mark.random) for name in MORE)]
)
def test_stages_train_as_one_process(request, name):
    folder, outcomes = request.getfixturevalue("more" if name in MORE else "world")
    assert [outcome.refusal for outcome in outcomes[name]] == [""] * 4
    assert_same_run(folder / "one", folder / name)


def test_a_run_goes_on_in_other_stages_and_without(world):
    folder, outcomes = world
    assert [
        outcome.refusal for name in ("1f1b-2", "interleaved-2") for outcome in outcomes[name]
    ] == [""] * 8
    assert_same_run(folder / "one", folder / "moved", kinds=("train",))


@pytest.mark.parametrize("line", REFUSED)
def test_sizes_that_do_not_fit_the_ranks_are_refused(world, line):
    for outcome in world[1][line]:
        assert outcome.refusal.startswith("InputError: ")
        assert line in outcome.refusal
        assert "\n" not in outcome.refusal


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"mesh": {"pp": 1, "parts_per_stage": 2}},
            "mesh.parts_per_stage=2: one stage has the whole model",
        ),
        (
            {"mesh": {"pp": 4, "parts_per_stage": 4}},
            "needs 16 layers or more, but model.num_layers=5",
        ),
        ({"mesh": {"pp": 2}, "planner": {"plan": "auto"}}, "clashes with planner.plan=auto"),
        ({"mesh": {"pp": 0}}, "mesh.pp=0: must be at least 1"),
    ],
)
def test_settings_that_clash_are_refused(tmp_path, changes, line):
    with pytest.raises(InputError, match=line):
        configured(tmp_path, "run", **changes)


def test_one_process_is_told_how_to_start_stages(tmp_path):
    with pytest.raises(InputError, match="torchrun --nproc-per-node 4"):
        run_quietly(configured(tmp_path, "run", mesh=STAGES["1f1b-4"]))
