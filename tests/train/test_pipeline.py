"""Training in pipeline stages, with both schedules and with every other kind of parallelism, equals training on one
process."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.train.config import TrainConfig
from runs import run_quietly, skip_measuring, tiny
from train.worlds import Outcome, assert_same_run, train_on

MOE = {
    "num_experts": 4,
    "top_k": 2,
    "hidden": 16,
    "load_balance_level": "global_batch",
    "z_loss": 0.01,
}
MODEL = {"num_layers": 9, "moe_every": 2, "moe": MOE}
BASE = {
    "batch_size": 4, "accumulation": 4, "steps": 2, "precision": "float64",
    "evaluate": {"every": 100, "sequences": 5}, "model": MODEL,
}  # fmt: skip
STAGES = {
    "1f1b-2": {"pp": 2, "ep": 2},
    "1f1b-4": {"pp": 4},
    "interleaved-2": {"pp": 2, "parts_per_stage": 2},
    "interleaved-4": {"pp": 4, "parts_per_stage": 2},
    "tp": {"pp": 2, "parts_per_stage": 2, "tp": 2, "etp": 2, "sequence_parallel": True},
}
"""Name to mesh of four ranks. Every second of the nine layers is dense, so parts differ in size and some have no
experts."""
MORE = ("1f1b-2", "1f1b-4", "interleaved-2", "interleaved-4")
"""Cases that only `make test-random` runs. 1F1B is also tested by the run that changes its stages, and interleaving
with tp."""
REFUSED = {
    "pp=3: 3 stages do not divide the 4 ranks": {"mesh": {"pp": 3}, "accumulation": 3},
    "mesh.ep": {"mesh": {"pp": 2, "ep": 4}},
}
"""A part of the error message to settings that only the ranks can refuse."""


def staged(folder: Path, name: str, **changes: object) -> TrainConfig:
    return tiny(folder, **BASE | {"mesh": STAGES[name], "out": str(folder / name)} | changes)


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process and in the stages of `MORE`."""
    folder = tmp_path_factory.mktemp("more")
    with pytest.MonkeyPatch.context() as patch:
        skip_measuring(patch)
        run_quietly(tiny(folder, **BASE, out=str(folder / "one")))
        return folder, dict(zip(MORE, train_on(4, [staged(folder, name) for name in MORE])))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process and in stages. Half of one run is resumed in other stages, and then on one process."""
    folder = tmp_path_factory.mktemp("stages")
    runs = {name: staged(folder, name) for name in STAGES if name not in MORE}
    runs |= {line: tiny(folder, **BASE | changes, out=str(folder / "refused")) for line, changes in REFUSED.items()}
    runs["half"] = staged(folder, "1f1b-2", out=str(folder / "moved"), steps=1)
    runs["moved"] = staged(folder, "interleaved-2", out=str(folder / "moved"), steps=2, existing="resume")
    with pytest.MonkeyPatch.context() as patch:
        skip_measuring(patch)
        run_quietly(tiny(folder, **BASE, out=str(folder / "one")))
        outcomes = dict(zip(runs, train_on(4, list(runs.values()))))
    return folder, outcomes


@pytest.mark.parametrize("name", [name for name in STAGES if name not in MORE])
def test_stages_train_as_one_process(world, name):
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[name]] == [""] * 4
    assert_same_run(folder / "one", folder / name)


@pytest.mark.random
@pytest.mark.parametrize("name", MORE)
def test_more_stages_train_as_one_process(more, name):
    folder, outcomes = more
    assert [outcome.refusal for outcome in outcomes[name]] == [""] * 4
    assert_same_run(folder / "one", folder / name)


def test_a_run_goes_on_in_other_stages_and_without(world, monkeypatch):
    folder, outcomes = world
    skip_measuring(monkeypatch)
    assert [outcome.refusal for name in ("half", "moved") for outcome in outcomes[name]] == [""] * 8
    for steps, out in ((3, "moved"), (1, "steps"), (2, "steps"), (3, "steps")):
        run_quietly(tiny(folder, **BASE | {"steps": steps}, out=str(folder / out), existing="resume"))
    assert_same_run(folder / "steps", folder / "moved")


@pytest.mark.parametrize("line", REFUSED)
def test_sizes_that_do_not_fit_the_ranks_are_refused(world, line):
    for outcome in world[1][line]:
        assert outcome.refusal.startswith("InputError: ")
        assert line in outcome.refusal
        assert "\n" not in outcome.refusal


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mesh": {"pp": 1, "parts_per_stage": 2}}, "mesh.parts_per_stage=2: one stage has the whole model"),
        ({"mesh": {"pp": 4, "parts_per_stage": 4}}, "needs 16 layers or more, but model.num_layers=9"),
        ({"mesh": {"pp": 2}, "accumulation": 3}, "2 stages do not divide accumulation=3"),
        ({"mesh": {"pp": 2}, "balance": {"replication": "shadow"}}, "clashes with balance.replication=shadow"),
        ({"mesh": {"pp": 2}, "planner": {"plan": "auto"}}, "clashes with planner.plan=auto"),
        ({"mesh": {"pp": 2}, "record_routing": "counts"}, "clashes with record_routing=counts"),
        ({"mesh": {"pp": 0}}, "mesh.pp=0: must be at least 1"),
    ],
)  # fmt: skip
def test_settings_that_clash_are_refused(tmp_path, changes, line):
    with pytest.raises(InputError, match=line):
        tiny(tmp_path, **BASE | changes)


def test_one_process_is_told_how_to_start_stages(tmp_path):
    with pytest.raises(InputError, match="torchrun --nproc-per-node 4"):
        run_quietly(staged(tmp_path, "1f1b-4"))
