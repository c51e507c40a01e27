"""Recorded routing equals what the layers routed, a replay equals the run bit by bit, and a killed
run keeps its segments."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import refused
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.routing.replay import decoded, encoded
from moesaic.routing.routers import GShardTop2
from moesaic.traces.trace import Trace, samples_of, segment_name
from moesaic.train import record
from moesaic.train.config import TrainConfig
from moesaic.train.loop import Trainer
from moesaic.train.record import prune, shape_of
from runs import assert_same, lines, losses, parameters, run_quietly, signal_after, snapshot, tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulation": 2},
    "recomputed": {"model": {"checkpoint_activations": True, "moe": {"router": "noisy"}}},
    "sigmoid": {
        "model": {
            "moe": {
                "router": "sigmoid",
                "router_options": {"bias_rate": 0.01},
                "load_balance_level": "global_batch",
            }
        }
    },
    "gshard": {"model": {"moe": {"router": "gshard"}}},
    "dropped": {
        "model": {"moe": {"capacity": "fixed", "capacity_factor": 0.6, "capacity_order": "score"}}
    },
    "every second": {"model": {"num_layers": 3, "moe_every": 2}},
}


def traced(config: TrainConfig) -> Trace:
    return Trace.open(Path(config.out))


def spied(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """Collect what `MoE._route` asked for in training, per call, before capacity: copies per
    expert."""
    seen: list[list[torch.Tensor]] = []
    plain = MoE._route

    def route(self: MoE, *args: Any) -> Any:
        routed = plain(self, *args)
        if self.training and (self.routing_cache is None or not self.routing_cache.is_replaying):
            seen.append(routed.routing.requested.clone())
        return routed

    monkeypatch.setattr(MoE, "_route", route)
    return seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trace_holds_what_the_routers_asked_for_and_its_replay_is_the_run_bit_by_bit(
    tmp_path, monkeypatch, variant
):
    seen = spied(monkeypatch)
    config = tiny(tmp_path, **VARIANTS[variant], record_routing="tokens")
    run_quietly(config)
    monkeypatch.undo()
    trace = traced(config)
    shape = shape_of(config)
    assert trace.steps == [0, 1, 2, 3]
    assert trace.shape == shape
    assert shape.num_layers == 2
    calls = [
        trace.samples(layer, step, micro)
        for step in trace.steps
        for micro in range(shape.accumulation)
        for layer in range(shape.num_layers)
    ]
    assert len(calls) == len(seen)
    for samples, requested in zip(calls, seen):
        assert samples.sum(0).tolist() == requested.tolist()
        if variant != "gshard":
            assert samples.sum(1).tolist() == [shape.seq_len * shape.top_k] * shape.sequences
    loads = trace.loads()
    assert loads.sum(0).tolist() != loads.sum(0)[::-1].tolist(), "layers that are told apart"
    for line, load in zip(lines(Path(config.out), "train"), loads):
        assert [layer["tokens_per_expert"] for layer in line["layers"]] == load.tolist()
    again = replace(config, out=str(tmp_path / "again"), replay_routing=config.out)
    run_quietly(again)
    assert losses(tmp_path / "run") == losses(tmp_path / "again")
    assert_same(parameters(tmp_path / "run"), parameters(tmp_path / "again"))
    assert (traced(again).loads() == loads).all()


def test_counts_are_those_of_the_tokens_and_a_trace_says_how_large_it_is(tmp_path):
    by_count = tiny(
        tmp_path, record_routing="counts", accumulation=2, model={"moe": {"router": "gshard"}}
    )
    by_token = replace(by_count, out=str(tmp_path / "tokens"), record_routing="tokens")
    run_quietly(by_count)
    run_quietly(by_token)
    one = traced(by_count)
    other = traced(by_token)
    for step, layer, micro in itertools.product(range(4), range(2), range(2)):
        experts = other.experts(layer, step, micro)
        assert (one.samples(layer, step, micro) == other.samples(layer, step, micro)).all()
        assert (samples_of(experts, other.shape) == one.samples(layer, step, micro)).all()
        assert (experts[:, 0] != experts[:, 1]).all()
    for config, table, size in (
        (by_count, "samples", 2 * 2 * 2 * 4),
        (by_token, "experts", 2 * 2 * 32 * 2),
    ):
        assert shape_of(config).bytes_per_step(config.record_routing) == size
        with np.load(Path(config.out) / "routing" / segment_name(0)) as file:
            assert file[table].nbytes == 4 * size


def test_recording_changes_nothing(tmp_path):
    plain = tiny(tmp_path, **VARIANTS["recomputed"])
    run_quietly(plain)
    run_quietly(replace(plain, out=str(tmp_path / "recorded"), record_routing="tokens"))
    assert losses(tmp_path / "run") == losses(tmp_path / "recorded")
    assert_same(parameters(tmp_path / "run"), parameters(tmp_path / "recorded"))
    assert not (tmp_path / "run" / "routing").exists()


def test_a_replay_obeys_the_trace_and_not_its_router(tmp_path):
    config = tiny(tmp_path, record_routing="tokens")
    run_quietly(config)
    free = replace(config, out=str(tmp_path / "free"), seed=1)
    told = replace(
        free, out=str(tmp_path / "told"), record_routing="tokens", replay_routing=config.out
    )
    run_quietly(free)
    run_quietly(told)
    original, other, obeyed = (traced(each) for each in (config, free, told))
    assert any((original.experts(0, step) != other.experts(0, step)).any() for step in range(4))
    assert all(
        (original.experts(layer, step) == obeyed.experts(layer, step)).all()
        for layer in (0, 1)
        for step in range(4)
    )
    assert losses(tmp_path / "free") != losses(tmp_path / "told")


def test_a_replayed_router_still_learns_and_evaluates_by_itself(tmp_path, monkeypatch):
    config = tiny(tmp_path, record_routing="tokens", steps=1)
    run_quietly(config)
    chosen = []
    plain = Trainer._evaluate

    def evaluate(self: Trainer, *args: Any) -> float:
        chosen.append(any("choose" in vars(layer.router) for layer in self.moe_layers.values()))
        return plain(self, *args)

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    again = replace(config, out=str(tmp_path / "again"), replay_routing=config.out)
    run_quietly(replace(again, optimizer=replace(config.optimizer, lr=0.1)))
    assert chosen == [False]
    before = parameters(Path(config.out))
    after = parameters(tmp_path / "again")
    routers = [name for name in before if "router" in name]
    assert len(routers) == 2
    assert not any(torch.equal(before[name], after[name]) for name in routers)


def test_a_killed_run_loses_the_last_segment_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "SEGMENT_STEPS", 2)
    config = tiny(tmp_path, record_routing="tokens", steps=7)
    whole = replace(config, out=str(tmp_path / "whole"))
    run_quietly(whole)
    plain = Trainer._step

    def step(self: Trainer) -> dict[str, Any]:
        if self.state.step == 5:
            raise KeyboardInterrupt  # as abrupt as a process can be told to end from inside
        return plain(self)

    monkeypatch.setattr(Trainer, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(config)
    left = traced(config)
    assert left.steps == [0, 1, 2, 3]
    assert (left.loads() == traced(whole).loads()[:4]).all()
    assert sorted(path.name for path in (tmp_path / "run" / "routing").iterdir()) == [
        segment_name(0),
        segment_name(2),
    ]


def test_a_resumed_run_has_each_step_once(tmp_path, monkeypatch):
    config = tiny(tmp_path, record_routing="counts")
    run_quietly(replace(config, out=str(tmp_path / "whole")))
    signal_after(monkeypatch, 2)
    run_quietly(config)
    monkeypatch.undo()
    run_quietly(replace(config, existing="resume"))
    assert traced(config).steps == list(range(4))
    assert (traced(config).loads() == Trace.open(tmp_path / "whole").loads()).all()


def test_steps_that_are_taken_anew_leave_the_trace(tmp_path):
    config = tiny(tmp_path, record_routing="tokens", steps=6)
    run_quietly(config)
    folder = tmp_path / "run" / "routing"
    before = traced(config).loads()
    prune(folder, 4)
    assert traced(config).steps == [0, 1, 2, 3]
    assert (traced(config).loads() == before[:4]).all()
    prune(folder, 0)
    assert list(folder.iterdir()) == []


def test_a_new_run_in_an_old_folder_starts_a_new_trace(tmp_path):
    run_quietly(tiny(tmp_path, record_routing="counts", steps=2))
    config = tiny(
        tmp_path,
        record_routing="counts",
        steps=1,
        existing="replace",
        model={"moe": {"num_experts": 8}},
    )
    run_quietly(config)
    assert (traced(config).steps, traced(config).shape.num_experts) == ([0], 8)
    run_quietly(tiny(tmp_path, steps=1, existing="replace"))
    assert "holds no steps-" in refused(traced, config)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    run_quietly(tiny(folder, record_routing="tokens"))
    out = str(folder / "counts")
    run_quietly(
        tiny(folder, record_routing="counts", out=out, model={"moe": {"router": "expert_choice"}})
    )
    return folder


REFUSED = {
    "replay_routing=RUN: is of another model or batch, num_experts=4 (not 8): set the same": {
        "model": {"moe": {"num_experts": 8}}
    },
    "replay_routing=RUN: is of another model or batch, sequences=2 (not 4): set": {"batch_size": 4},
    (
        "replay_routing=RUN: holds steps 0 to 3, the run needs 0 to 8: set fewer steps, or record "
        "more"
    ): {"steps": 9},
    (
        "replay_routing=COUNTS: holds counts only: record the tokens' experts with "
        "--record-routing tokens"
    ): {"replay_routing": "COUNTS"},
    "replay_routing=RUN: lies in out=RUN, which this run writes: choose": {
        "out": "RUN",
        "existing": "replace",
    },
    "trace nowhere: no such file: name a trace": {"replay_routing": "nowhere"},
    "replay_routing: the model has no MoE layers: set model.ffn=moe": {"model": {"ffn": "dense"}},
    "record_routing=tokens: under model.moe.router=expert_choice tokens do not choose": {
        "record_routing": "tokens",
        "replay_routing": "",
        "model": {"moe": {"router": "expert_choice"}},
    },
}


@pytest.mark.parametrize("line", REFUSED)
def test_refusals_are_one_line_and_leave_nothing(recorded, line):
    places = {"RUN": str(recorded / "run"), "COUNTS": str(recorded / "counts")}
    changes = {"out": str(recorded / "new"), "replay_routing": "RUN"} | REFUSED[line]
    before = snapshot(recorded)
    assert refused(
        lambda: run_quietly(
            tiny(
                recorded,
                **{n: places.get(v, v) if isinstance(v, str) else v for n, v in changes.items()},
            )
        )
    ).startswith(line.replace("RUN", places["RUN"]).replace("COUNTS", places["COUNTS"]))
    assert snapshot(recorded) == before


def test_a_resumed_run_keeps_to_the_kind_of_its_trace(tmp_path):
    run_quietly(tiny(tmp_path, record_routing="counts"))
    with pytest.raises(
        InputError, match=r"routing holds a trace with holds=counts \(not tokens\): move it away"
    ):
        run_quietly(tiny(tmp_path, record_routing="tokens", existing="resume", steps=6))


def test_copies_that_a_router_held_back_are_written_down_and_come_back():
    router = GShardTop2(8, 5, second="random_dispatch").train()
    noise = router.draw(60, torch.device("cpu"))
    scores = router.scores(torch.randn(60, 8), noise, None)
    choice = router.choose(scores, 2, None, noise)
    assert choice.sent is not None
    assert 0 < int((~choice.sent).sum()) < 60
    written = encoded(choice, 2)
    assert ((written >= 0).reshape(-1) == choice.sent).all()
    again = decoded(written)
    assert torch.equal(again.expert, choice.expert)
    assert again.sent is not None
    assert torch.equal(again.sent, choice.sent)
