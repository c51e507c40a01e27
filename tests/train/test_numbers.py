"""Numerical faults: skipped steps, the origin of a fault, loss spikes, collapsed routers, drifting
ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers import refused
from moesaic.comm.mesh import Mesh
from moesaic.errors import TrainingError
from moesaic.models.split import local_part
from moesaic.runtime.telemetry import LoadStatistics
from moesaic.train import numbers
from moesaic.train.checkpoint import list_checkpoints, load_checkpoint, optimizer_tensors
from moesaic.train.loop import Trainer
from moesaic.train.numbers import FEWEST, Spikes, collapsed_routers, require_same_weights
from moesaic.train.ranks import Ranks
from runs import assert_same, lines, losses, parameters, run_quietly, signal_after, tiny
from train.worlds import train_on
from worlds import on_ranks, refusal

FAULTS = {
    "loss": lambda layer: _when(layer, forward=lambda y: y * math.nan),
    "gradient": lambda layer: _when(layer, backward=lambda gradient: gradient * math.inf),
    "expert": lambda layer: _spoil(layer.experts.w1, 1),
}


def _when(layer, forward=None, backward=None):
    """Change a layer's output, or the gradient of it. Return a function that undoes this."""

    def returned(_, __, output):
        y, routing = output
        if forward is not None:
            y = forward(y)
        elif y.requires_grad:
            y.register_hook(backward)
        return y, routing

    handle = layer.register_forward_hook(returned, prepend=True)
    return handle.remove


def _spoil(parameter, expert):
    """Make one element of an expert's weights NaN. Return a function that undoes this."""
    rows = local_part(parameter.data)
    before = rows[expert].clone()
    rows[expert].view(-1)[3] = math.nan
    return lambda: rows[expert].copy_(before)


def spoil_steps(steps: dict[int, str]) -> None:
    """Make faults happen in the given steps, on the last rank, in the second MoE layer."""
    plain = Trainer._step

    def step(self):
        what = steps.get(self.state.step)
        if what is None or self.ranks.rank < self.ranks.world - 1:
            return plain(self)
        undo = FAULTS[what](list(self.moe_layers.values())[1])
        try:
            return plain(self)
        finally:
            undo()

    Trainer._step = step


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_step", Trainer._step)
    monkeypatch.setattr(Trainer, "_evaluate", Trainer._evaluate)


ORIGINS = {
    2: "weights of blocks.1.ffn.experts.w13, expert 1 are not finite on rank 0",
    4: "what blocks.1.ffn returns is the first that is not finite, on rank 0",
    6: "the gradient that reaches blocks.1.ffn is the first that is not finite, on rank 0",
}


def test_a_step_whose_numbers_are_wrong_is_left_out_and_says_where_it_began(tmp_path):
    spoil_steps({1: "expert", 3: "loss", 5: "gradient"})
    spoilt = Trainer._step
    states = []

    def step(self):
        values = spoilt(self)
        state = self.model.state_dict() | optimizer_tensors(self.model, self.state.optimizer)
        states.append({name: tensor.clone() for name, tensor in state.items()})
        return values

    Trainer._step = step
    result, screen = run_quietly(tiny(tmp_path, steps=7))
    assert result.step == 7
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 3, 5, 7]
    skipped = lines(tmp_path / "run", "skipped")
    assert [line["step"] for line in skipped] == list(ORIGINS)
    for line, (step, origin) in zip(skipped, ORIGINS.items()):
        assert line["origin"].startswith(origin)
        assert origin in screen
        assert_same(states[step - 2], states[step - 1])
        assert not torch.equal(
            states[step - 1]["embedding.weight"], states[step]["embedding.weight"]
        )
    assert load_checkpoint(tmp_path / "run" / "checkpoints", pytest.fail).extra["skipped"] == 3
    assert lines(tmp_path / "run", "train")[-1]["skipped"] == 3


def test_wrong_steps_in_a_row_end_the_run_and_others_do_not(tmp_path):
    spoil_steps(dict.fromkeys((1, 2, 4, 5, 6), "expert"))
    with pytest.raises(TrainingError) as caught:
        run_quietly(tiny(tmp_path, steps=9))
    for part in (
        "the loss of step 7 is not finite (nan",
        "as were the 2 before it: weights of blocks.1.ffn.experts.w13",
    ):
        assert part in str(caught.value)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 4]
    assert "nonfinite_steps=0: must be at least 1" in refused(tiny, tmp_path, nonfinite_steps=0)


def test_a_run_that_left_steps_out_is_taken_up_bit_by_bit(tmp_path, monkeypatch):
    config = tiny(tmp_path)
    spoil_steps({1: "gradient"})
    run_quietly(replace(config, out=str(tmp_path / "whole")))
    signal_after(monkeypatch, 2)
    run_quietly(config)
    monkeypatch.undo()
    run_quietly(replace(config, existing="resume"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert_same(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))
    assert [line.get("skipped", 0) for line in lines(tmp_path / "run", "train")] == [0, 1, 1]


def _spoil_on_two() -> None:
    spoil_steps({1: "loss", 2: "gradient", 3: "expert"})


def test_on_two_ranks_all_leave_the_step_out_and_name_the_one_that_spoilt_it(tmp_path):
    config = tiny(tmp_path, steps=5, batch_size=4, mesh={"ep": 2}, nonfinite_steps=4)
    (outcomes,) = train_on(2, [config], _spoil_on_two)
    assert [each.refusal for each in outcomes] == ["", ""]
    origins = [line["origin"] for line in lines(tmp_path / "run", "skipped")]
    assert origins[0].startswith(
        "what blocks.1.ffn returns is the first that is not finite, on rank 1"
    )
    assert (
        origins[1]
        == "the gradient that reaches blocks.1.ffn is the first that is not finite, on rank 1"
    )
    assert origins[2].startswith(
        "weights of blocks.1.ffn.experts.w13, expert 3 are not finite on rank 1"
    )
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 5]
    assert all(value.isfinite().all() for value in parameters(tmp_path / "run").values())


def _drift(by: float) -> None:
    plain = Trainer._evaluate

    def evaluate(self, *arguments):
        if dist.get_rank() == 1 and self.state.step == 2:
            local_part(self.model.norm.weight.data)[2] += by
        return plain(self, *arguments)

    Trainer._evaluate = evaluate


def test_ranks_whose_copies_of_a_weight_drift_apart_are_named(tmp_path):
    config = tiny(
        tmp_path,
        steps=4,
        batch_size=4,
        evaluate={"every": 2, "sequences": 4},
        save={"every": 1},
        mesh={"tp": 2, "ep": 2},
    )
    (outcomes,) = train_on(2, [config], partial(_drift, 0.01))
    (said,) = {each.refusal for each in outcomes}
    assert said.startswith(
        "TrainingError: after step 2 ranks 0, 1 disagree on norm.weight, by up to 0.01: "
        "suspect the memory or the processor of ranks 0, 1; the checkpoint"
    ), said
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000001"


def _check_alone() -> list[str]:
    """Make copies on four ranks differ: by much, by rounding, and by a NaN. Return each error and
    the weight's maximum."""
    mesh = Mesh.create(tp=4)
    found = []
    for odd, by in ((2, 0.5), (3, 1e-6), (1, math.nan)):
        model = nn.Linear(8, 4)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 0.0)
        with torch.no_grad():
            model.weight[1, 3] += by if dist.get_rank() == odd else 0.0
        found.append(refusal(require_same_weights, model, Ranks(mesh), 7, "go on", align=True))
        found.append(str(float(model.weight.detach().max())))
    return found


def test_of_several_copies_the_odd_one_is_named_and_rounding_is_aligned():
    for rank, (much, left, little, aligned, no_number, _) in enumerate(on_ranks(4, _check_alone)):
        assert much.startswith(
            "TrainingError: after step 7 rank 2 disagrees with the other ranks on weight, by "
            "up to 0.5"
        )
        assert float(left) == (1.5 if rank == 2 else 1.0)
        assert (little, float(aligned)) == ("", 1.0)
        assert no_number.startswith(
            "TrainingError: after step 7 rank 1 disagrees with the other ranks on weight, by up"
        )


def test_a_leap_of_the_loss_is_no_wandering():
    draw = random.Random(0)
    spikes = Spikes()
    for step in range(200):  # a curve that falls and trembles
        assert spikes.usual(3 * math.exp(-step / 50) + 2 + draw.gauss(0, 0.1)) is None
    assert spikes.usual(6.0) == pytest.approx(2.1, abs=0.2)
    assert spikes.usual(2.0) is None
    early = Spikes()
    assert [early.usual(loss) for loss in [5.0] * (FEWEST - 1) + [50.0]] == [None] * FEWEST


def leaping(monkeypatch: pytest.MonkeyPatch, *, with_samples: bool) -> None:
    """Let the loss of the seventh step be tenfold; `with_samples`: only with the samples that were
    first meant for it."""
    plain = Trainer._accumulate

    def accumulate(self, **options):
        loss, auxiliary = plain(self, **options)
        leaps = self.state.step + self.state.left_out * with_samples == 6
        return (10 * loss if leaps else loss), auxiliary

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    monkeypatch.setattr(numbers, "FEWEST", 2)


@pytest.mark.parametrize(
    ("on_spike", "with_samples", "returns"),
    [("warn", True, 0), ("rollback", True, 1), ("rollback", False, 3)],
)
def test_a_leap_is_said_or_rolled_back_three_times_at_most(
    tmp_path, monkeypatch, on_spike, with_samples, returns
):
    leaping(monkeypatch, with_samples=with_samples)
    config = tiny(tmp_path, steps=8, save={"every": 4}, optimizer={"lr": 1e-3}, on_spike=on_spike)
    result, screen = run_quietly(config)
    assert result.step == 8
    assert "the loss of step 7 leaps to" in screen
    assert screen.count("going back to") == returns
    assert ("and the run goes on" in screen) == (returns != 1)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 9))
    # Step 5 is the first after the checkpoint of step 4, and takes the samples after those of the
    # leap.
    assert (
        load_checkpoint(tmp_path / "run" / "checkpoints", pytest.fail).extra["left_out"]
        == 3 * returns
    )
    if returns == 1:
        assert max(loss for _, loss in losses(tmp_path / "run")) < 6


def test_a_router_that_collapses_is_named():
    even = [32] * 8
    worst = [250, 6, 0, 0, 0, 0, 0, 0]
    loads = [LoadStatistics.of(counts) for counts in (even, worst)]
    (found,) = collapsed_routers(loads, ["first", "second"], 2).items()
    assert found[0] == "second"
    assert found[1].startswith(
        "the router of second has collapsed: 2 of its 8 experts get 100% of the tokens; raise"
    )
    assert not collapsed_routers(
        [LoadStatistics.of([40, 4, 0, 0, 0, 0, 0, 0])], ["too few to tell"], 2
    )
    assert not collapsed_routers([LoadStatistics.of([600, 0])], ["top 1 of 2"], 1)


def test_a_run_says_once_that_a_router_collapsed(tmp_path, monkeypatch):
    plain = Trainer._accumulate

    def accumulate(self, **options):
        for layer in self.moe_layers.values():
            layer.router.weight.data[:] = 0  # ties go to the lowest experts
        return plain(self, **options)

    monkeypatch.setattr(Trainer, "_accumulate", accumulate)
    _, screen = run_quietly(tiny(tmp_path, batch_size=8, model={"moe": {"num_experts": 8}}))
    assert screen.count("the router of blocks.0.ffn has collapsed: 2 of its 8 experts") == 1
    assert screen.count("the router of blocks.1.ffn has collapsed") == 1
