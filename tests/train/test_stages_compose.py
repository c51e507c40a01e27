"""What runs in pipeline stages together with them: recorded and replayed routing, replication,
budgets, any number of micro-batches, skipped steps and other precisions, as in one process."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.models.split import local_part
from moesaic.traces.trace import Trace
from moesaic.train.config import TrainConfig
from moesaic.train.loop import Trainer
from moesaic.train.state import load_trained
from moesaic.train.watch import _outward, between_stages
from runs import lines, losses, parameters, run_quietly, tiny
from train.worlds import Outcome, assert_same_run, difference, train_on
from worlds import on_ranks

MOE = {"num_experts": 4, "top_k": 2, "hidden": 16, "load_balance_level": "global_batch"}
BASE: dict[str, Any] = {
    "batch_size": 4,
    "accumulation": 3,
    "steps": 3,
    "precision": "float64",
    "evaluate": {"every": 100, "sequences": 5},
}
STAGES = {"pp": 2, "ep": 2}
RUNS: dict[str, dict[str, Any]] = {
    "three micro-batches": {"mesh": STAGES},
    "fewer micro-batches than stages": {"mesh": {"pp": 4}},
    "shadow": {"mesh": STAGES, "balance": {"replication": "shadow"}},
    "arbiter": {"mesh": STAGES, "balance": {"replication": "arbiter"}},
    "budget": {"mesh": STAGES, "balance": {"memory_budget": 100_000}},
    "recorded": {"mesh": STAGES | {"parts_per_stage": 2}, "record_routing": "tokens"},
    "inside nodes": {"mesh": {"pp": 2, "ranks_per_node": 1, "shard": "node"}},
}
"""Runs whose figures are those of one process."""
PLACES = ("a step", "an evaluation")
"""Where the layers of one stage refuse."""
NOISY = {"router": "gshard", "load_balance_level": "global_batch"}
"""A router with other random second choices on another mesh, so that only a replay agrees."""


def configured(folder: Path, out: str, moe: dict[str, Any] = MOE, **changes: Any) -> TrainConfig:
    """Return a run in which every second layer is dense."""
    model = {"num_layers": 5, "moe_every": 2, "moe": MOE | moe}
    return tiny(folder, **BASE | {"model": model, "out": str(folder / out)} | changes)


def refuse(trainer: Trainer) -> None:
    """Let the layers of one stage refuse their calls, if the run is named so: in the second step,
    or in the evaluation."""
    in_step, in_evaluation = (trainer.state.folder.name == f"refuses in {at}" for at in PLACES)
    if not ((in_step and trainer.ranks.stage == 1) or (in_evaluation and trainer.ranks.stage == 0)):
        return

    def hook(layer: MoE, _: Any) -> None:
        if layer.training == in_step and trainer.state.step == (1 if in_step else 3):
            raise InputError(f"a layer of stage {trainer.ranks.stage} refuses")

    for layer in trainer.moe_layers.values():
        layer.register_forward_pre_hook(hook)


def spoil_a_step(plain: Any = Trainer._accumulate) -> Any:
    """Return `Trainer._accumulate` with a gradient that is not a number on one rank, in the second
    step of the runs called skips."""

    def spoiled(trainer: Trainer, *, again: bool = False) -> Any:
        refuse(trainer)
        result: tuple[Tensor, Any] = plain(trainer, again=again)
        name = trainer.state.folder.name
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if name.startswith("skips") and trainer.state.step == 1 and is_last:
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            local_part(gradients[0]).mul_(math.nan)
        return result

    return spoiled


def prepare() -> None:
    Trainer._accumulate = spoil_a_step()  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train on one process and in stages; return the folder and the outcomes by name."""
    folder = tmp_path_factory.mktemp("compose")
    run_quietly(configured(folder, "one", record_routing="tokens"))
    run_quietly(configured(folder, "noisy", NOISY, record_routing="tokens"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_accumulate", spoil_a_step())
        run_quietly(configured(folder, "skips in one"))
    told = {"replay_routing": str(folder / "noisy")}
    single = {"precision": "float32", "steps": 2}
    rounded = STAGES | {"stage_precision": "bfloat16"}
    runs = {name: configured(folder, name, **changes) for name, changes in RUNS.items()}
    runs["replayed"] = configured(folder, "replayed", NOISY, mesh=STAGES, **told)
    runs["skips"] = configured(folder, "skips", mesh=STAGES)
    runs["too small"] = configured(folder, "too small", mesh=STAGES, balance={"memory_budget": 1})
    for place in PLACES:
        runs[place] = configured(folder, f"refuses in {place}", mesh=STAGES)
    runs["single"] = configured(folder, "single", mesh=STAGES, **single)
    runs["rounded"] = configured(folder, "rounded", mesh=rounded, **single)
    return folder, dict(zip(runs, train_on(4, list(runs.values()), prepare)))


@pytest.mark.parametrize("name", RUNS)
def test_figures_are_those_of_one_process(world: Any, name: str) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[name]] == [""] * 4
    assert_same_run(folder / "one", folder / name)


def test_a_trace_holds_the_layers_of_all_stages(world: Any) -> None:
    folder, _ = world
    for a, b in zip(
        Trace.open(folder / "one").segments(),
        Trace.open(folder / "recorded").segments(),
        strict=True,
    ):
        assert (a.table == b.table).all()


def test_a_replayed_trace_trains_what_was_recorded(world: Any) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes["replayed"]] == [""] * 4
    told, noisy = (dict(losses(folder / name)) for name in ("replayed", "noisy"))
    assert told == pytest.approx(noisy, abs=1e-9)
    assert difference(parameters(folder / "replayed"), parameters(folder / "noisy")) < 1e-9


def test_all_stages_skip_a_step_together(world: Any) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes["skips"]] == [""] * 4
    assert [line["step"] for line in lines(folder / "skips", "skipped")] == [2]
    assert_same_run(folder / "skips in one", folder / "skips")


def test_decisions_and_budgets_are_those_of_all_layers(world: Any) -> None:
    folder, _ = world
    layers = 3  # every second of five, counted from the last
    line = lines(folder / "arbiter", "train")[-1]
    assert len(line["balance"]["layers"]) == len(line["layers"]) == layers
    assert len(lines(folder / "budget", "train")[-1]["memory_budget"]) == layers


def test_what_a_layer_of_one_stage_refuses_ends_all_stages_in_one_line(world: Any) -> None:
    _, outcomes = world
    refusals = {
        name: {outcome.refusal for outcome in outcomes[name]} for name in (*PLACES, "too small")
    }
    assert refusals["a step"] == {"InputError: a layer of stage 1 refuses"}
    assert refusals["an evaluation"] == {"InputError: a layer of stage 0 refuses"}
    (line,) = refusals["too small"]
    assert line.startswith("InputError: plan.memory_budget=1: ")
    assert "\n" not in line


def test_messages_between_stages_may_be_rounded(world: Any) -> None:
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes["rounded"]] == [""] * 4
    plain, rounded = (dict(losses(folder / name)) for name in ("single", "rounded"))
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=1e-3)


def test_a_staged_run_is_loaded_whole(world: Any) -> None:
    folder, _ = world
    tokens = torch.arange(16).view(1, 16)
    one, staged = (
        load_trained(folder / name, "cpu").model.double()(tokens).logits
        for name in ("one", "recorded")
    )
    assert torch.allclose(one, staged, rtol=0, atol=1e-6)


def test_rounds_of_interleaved_stages_are_equal(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="accumulation=5 does not divide into them"):
        configured(tmp_path, "run", accumulation=5, mesh={"pp": 2, "parts_per_stage": 2})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"balance": {"experts": "balanced"}, "mesh": STAGES}, "on one rank"),
        ({"balance": {"samples": "two_stage"}, "mesh": STAGES}, "a sample leaves a stage"),
        ({"planner": {"plan": "auto"}, "mesh": STAGES}, "the slowest stage"),
        ({"mesh": STAGES | {"hold": "nothing"}}, "after a step's last micro-batch"),
        ({"mesh": STAGES | {"schedule": "zb-v"}}, "an MoE layer's is one node"),
        ({"mesh": STAGES | {"schedule": "ScheduleDualPipeV"}}, "an MoE layer's is one node"),
        ({"mesh": STAGES | {"schedule": "gpipe"}}, "mesh.schedule=gpipe: is unknown: choose 1f1b"),
    ],
)
def test_what_stages_cannot_do_says_why(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        configured(tmp_path, "run", **changes)


def wait_words() -> str:
    """Return where the watch sees the first of two stages wait, while the second one does not
    step."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    layer = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=rank == 1)
    y = torch.ones(1, 2, requires_grad=True)
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"), x, y)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, _: y.sum(), scale_grads=False)
    ends = {"target": torch.ones(2, 2)} if rank else {}
    begins = () if rank else (torch.ones(2, 2),)
    schedule.step(*begins, **ends)  # the first step also agrees on shapes
    found: list[str] = []

    def look(thread: int) -> None:
        while not found:
            frames = list(_outward(sys._current_frames()[thread]))
            found.extend(filter(None, [between_stages(frames)]))
        store.set("seen", "")

    if rank == 0:
        threading.Thread(target=look, args=(threading.get_ident(),), daemon=True).start()
    else:
        store.wait(["seen"])
    schedule.step(*begins, **ends)
    return "".join(found)


def test_a_wait_between_stages_is_named() -> None:
    assert on_ranks(2, wait_words)[0] == (
        "in a message between pipeline stages: part 0, whose neighbours are on rank 1"
    )
