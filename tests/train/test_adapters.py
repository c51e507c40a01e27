"""Adapters over the experts of another run's model, in Moesaic's own trainer: gradients, ranks,
checkpoints, the hub."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moesaic.errors import InputError
from moesaic.experts import FourBitExperts
from moesaic.layer import MoE
from moesaic.train.checkpoint import load_checkpoint
from moesaic.train.config import TrainConfig
from moesaic.train.state import load_trained, open_run
from moesaic.weights.run import export_run
from runs import lines, parameters, run_quietly, tiny
from train.worlds import assert_same_run, difference, train_on

WIDE: dict[str, Any] = {
    "precision": "float64",
    "batch_size": 4,
    "evaluate": {"every": 2, "sequences": 5},
    "optimizer": {"lr": 1e-2, "final_share": 1.0, "warmup_steps": 0},
    "model": {"dim": 64, "conv_width": 1, "moe": {"hidden": 128}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and the run `base`."""
    path = tmp_path_factory.mktemp("adapters")
    run_quietly(tiny(path, **WIDE, steps=2, out=str(path / "base")))
    return path


def adapting(folder: Path, out: str, **changes: Any) -> TrainConfig:
    adapters = {"base": str(folder / "base"), "rank": 4}
    return tiny(
        folder, **{**WIDE, "steps": 4, "adapters": adapters, **changes}, out=str(folder / out)
    )


class Adapted(nn.Module):
    """Adds the product of an adapter's factors to a weight."""

    def __init__(self, inner: Tensor, outer: Tensor) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Parameter(each.detach().clone()) for each in (inner, outer))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.outer @ (self.inner if weight.dim() == 3 else self.inner.unsqueeze(1))


def test_gradients_are_those_of_a_dense_float64_model(folder):
    run = open_run(adapting(folder, "gradients"), pytest.fail)
    dense = load_trained(folder / "base", "cpu").model.double().train()
    of_others = {
        name: tensor for name, tensor in run.model.state_dict().items() if ".experts." not in name
    }
    assert difference(of_others, {name: dense.state_dict()[name] for name in of_others}) < 1e-6
    dense.load_state_dict(of_others, strict=False)
    for number, (ours, theirs) in enumerate(zip(moe_layers(run.model), moe_layers(dense))):
        experts = ours.experts
        assert isinstance(experts, FourBitExperts)
        merged = experts.merged()  # the adapters add nothing yet
        assert (
            0.05
            < difference({"w2": merged.w2}, {"w2": theirs.experts.w2})
            / theirs.experts.w2.abs().max()
            < 0.3
        )
        for name, side in (("w13", "gate_up"), ("w2", "down")):
            torch.manual_seed(number)
            nn.init.normal_(experts.get_parameter(f"{side}_lora_B"), std=0.2)
            theirs.experts.get_parameter(name).data.copy_(merged.get_parameter(name))
            factors = (experts.get_parameter(f"{side}_lora_{letter}") for letter in "AB")
            parametrize.register_parametrization(theirs.experts, name, Adapted(*factors))
    tokens, targets = run.batches.get(0)
    losses = [model(tokens, targets).loss for model in (run.model, dense)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(moe_layers(run.model), moe_layers(dense)):
        for name, side in (("w13", "gate_up"), ("w2", "down")):
            (wanted,) = theirs.experts.parametrizations[name]
            for letter, factor in (("A", wanted.inner), ("B", wanted.outer)):
                torch.testing.assert_close(
                    ours.experts.get_parameter(f"{side}_lora_{letter}").grad, factor.grad
                )
    trained = [name for name, each in run.model.named_parameters() if each.grad is not None]
    assert len(trained) == 8
    assert all("_lora_" in name for name in trained)
    run.claim.release()


def moe_layers(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


@pytest.mark.parametrize(
    ("world", "meshes"),
    [
        (2, [{"ep": 2}, {"etp": 2}, {"tp": 2, "ep": 2}]),
        pytest.param(4, [{"ep": 4}, {"ep": 2, "etp": 2}], marks=pytest.mark.random),
    ],
)
def test_ranks_train_adapters_as_one_process_does(folder, world, meshes):
    alone = adapting(folder, f"alone {world}")
    run_quietly(alone)
    runs = [adapting(folder, f"on {world}, {mesh}", mesh=mesh) for mesh in meshes]
    for run, outcomes in zip(runs, train_on(world, runs)):
        assert [outcome.refusal for outcome in outcomes] == [""] * world
        assert_same_run(Path(run.out), Path(alone.out))


def test_experts_without_a_gate_are_adapted_too(folder):
    plain = {"model": {**WIDE["model"], "moe": {"hidden": 128, "experts": "gelu"}}}
    run_quietly(tiny(folder, **{**WIDE, **plain}, steps=1, out=str(folder / "plain base")))
    plain["adapters"] = {"base": str(folder / "plain base"), "rank": 4}
    alone, spread = (
        adapting(folder, f"plain {mesh}", mesh=mesh, **plain) for mesh in ({}, {"etp": 2})
    )
    run_quietly(alone)
    (outcomes,) = train_on(2, [spread])
    assert [outcome.refusal for outcome in outcomes] == ["", ""]
    assert_same_run(Path(spread.out), Path(alone.out))


def test_checkpoints_hold_adapters_alone_and_go_on_exactly(folder):
    straight = adapting(folder, "straight")
    parts = adapting(folder, "parts", steps=2, save={"every": 2})
    run_quietly(straight)
    run_quietly(parts)
    run_quietly(adapting(folder, "parts", existing="resume"))
    assert_same_run(folder / "parts", folder / "straight", kinds=("train",))
    names = {
        f"blocks.{block}.ffn.experts.{side}_lora_{letter}"
        for block in "01"
        for side in ("gate_up", "down")
        for letter in "AB"
    }
    assert parameters(folder / "straight").keys() == names
    states = load_checkpoint(folder / "straight" / "checkpoints", pytest.fail).optimizer
    assert {name.rpartition(".")[0] for name in states} == names
    first, *_, last = lines(folder / "straight", "train")
    assert last["loss"] < first["loss"]
    base = load_trained(folder / "base", "cpu").model
    adapters = sum(parameter.numel() for parameter in parameters(folder / "straight").values())
    assert (
        load_trained(folder / "straight", "cpu").model.num_parameters()
        == base.num_parameters() + adapters
    )
    with pytest.raises(
        InputError, match=r"adapters\.base is empty, but .* holds adapters .*: name that run"
    ):
        run_quietly(adapting(folder, "straight", adapters={}, existing="resume"))


def test_the_hub_gets_the_model_with_its_adapters_merged(folder, tmp_path):
    transformers = pytest.importorskip("transformers", reason='pip install ".[transformers]"')
    run_quietly(adapting(folder, "hub", precision="float32"))
    export_run(folder / "hub", tmp_path / "hub")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    tokens = torch.arange(16).unsqueeze(0)
    adapted, base = (
        load_trained(folder / name, "cpu").model(tokens).logits for name in ("hub", "base")
    )
    logits = merged(input_ids=tokens).logits
    torch.testing.assert_close(logits, adapted.float(), rtol=1e-4, atol=1e-4)
    assert float((logits - base).abs().max()) > 0.01


def test_adapters_are_read_over_the_model_that_they_were_trained_over_alone(folder):
    base = tiny(folder, **WIDE, steps=1, out=str(folder / "moving"))
    run_quietly(base)
    adapters = {"base": str(folder / "moving"), "rank": 4}
    with pytest.raises(
        InputError, match=r"adapters\.base=.*: lies in out=.*, which this run writes"
    ):
        run_quietly(adapting(folder, "moving", adapters=adapters, existing="replace"))
    assert load_trained(folder / "moving", "cpu").config == replace(base, existing="resume")
    run_quietly(adapting(folder, "over it", adapters=adapters, steps=1))
    run_quietly(tiny(folder, **WIDE, steps=2, out=str(folder / "moving"), existing="resume"))
    for read in (
        lambda: load_trained(folder / "over it", "cpu"),
        lambda: run_quietly(adapting(folder, "over it", adapters=adapters, existing="resume")),
    ):
        with pytest.raises(
            InputError,
            match=r"step 2 there is not the model over which the adapters in .* were trained",
        ):
            read()


def test_what_cannot_be_adapted_is_refused_in_one_line(folder):
    run_quietly(adapting(folder, "adapted", steps=1))
    of_adapters = {"adapters": {"base": str(folder / "adapted")}}
    for changes, line in (
        (
            of_adapters,
            "adapters.base: .* holds adapters, not a whole model: name the run that it adapts",
        ),
        (
            {"adapters": {"base": str(folder / "none")}},
            "no checkpoint there: train first, or name another run folder",
        ),
        (
            {"model": {**WIDE["model"], "dim": 128}},
            r"is of another architecture, model.dim \(128 and 64\)",
        ),
        ({"model": {**WIDE["model"], "dim": 32}}, "dim=32 and hidden=128 must be multiples of 64"),
        ({"model": {"ffn": "dense", "dense_hidden": 24}}, "a dense model has no experts to adapt"),
    ):
        with pytest.raises(InputError, match=line):
            run_quietly(adapting(folder, "refused", **changes))
    with pytest.raises(InputError, match=r"mesh\.pp=2 clashes with adapters\.base"):
        adapting(folder, "refused", mesh={"pp": 2}, accumulation=2)
    with pytest.raises(InputError, match=r"adapters\.rank=0: must be at least 1"):
        adapting(folder, "refused", adapters={"base": "x", "rank": 0})
    with pytest.raises(InputError, match=r"balance\.experts clashes with adapters\.base"):
        adapting(folder, "refused", mesh={"ep": 2}, balance={"experts": "balanced"})
    (outcomes,) = train_on(2, [adapting(folder, "refused")])
    for outcome in outcomes:
        assert re.search(
            "adapters.base: the mesh keeps 2 copies of each expert: choose mesh.ep", outcome.refusal
        )
