"""The first weights of a run: the same on every mesh, to the bit; none undefined; no rank draws
what it does not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic import initial_values
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT
from moesaic.routing.routers import ROUTERS
from moesaic.train.config import TrainConfig
from moesaic.train.presets import PRESETS
from moesaic.train.state import load_trained, open_run
from moesaic.train.task import DECODER
from moesaic_lab.paper_train.command import PRESETS as PAPER_PRESETS
from moesaic_lab.paper_train.command import task_of
from moesaic_lab.paper_train.models import Encoder, EncoderDecoder
from runs import run_quietly, tiny
from worlds import on_ranks

MOE = {"num_experts": 4, "top_k": 2, "hidden": 20, "shared_hidden": 12, "router": "noisy"}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"dim": 20, "num_layers": 3, "num_heads": 2, "moe_every": 2, "moe": MOE},
    "untied": {
        "num_layers": 4,
        "moe": {**MOE, "router": "sigmoid"},
        "block": {"tied": False, "norm": "layer", "positions": "learned", "bias": True},
    },
    "translation": {
        "num_layers": 2,
        "block": {"kind": "encoder_decoder", "norm": "post_layer"},
        "moe": {"hidden": 16},
    },
}
"""Name to model. 20 does not split evenly over four ranks along every dimension."""
MESHES: dict[str, dict[str, Any]] = {
    "dp 4": {},
    "ep 2": {"ep": 2},
    "ep 4": {"ep": 4},
    "ep 2, etp 2": {"ep": 2, "etp": 2},
    "tp 2": {"tp": 2},
    "tp 2, ep 2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "pp 2": {"pp": 2},
    "pp 2, ep 2": {"pp": 2, "ep": 2},
    "pp 2, tp 2": {"pp": 2, "tp": 2, "etp": 2},
}


def configured(folder: Path, model: str, mesh: str | None) -> TrainConfig:
    sizes = {} if mesh is None else {"mesh": MESHES[mesh]}
    pairs = {"data": {"path": [str(pairs_in(folder))]}} if model == "translation" else {}
    settings = {"batch_size": 4, "accumulation": 2, "model": MODELS[model], **sizes, **pairs}
    return tiny(folder, **settings, out=str(folder / f"{model} {mesh}"))


def pairs_in(folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    if not path.exists():
        path.write_text(
            "\n".join(f'{{"source": "a{n}", "target": "b{n}"}}' for n in range(400)),
            encoding="utf-8",
        )
    return path


CASES = [
    ("tied", mesh) for mesh in ("dp 4", "ep 2", "ep 2, etp 2", "tp 2, ep 2", "pp 2", "pp 2, ep 2")
]
CASES += [("untied", mesh) for mesh in ("dp 4", "ep 4", "tp 2", "pp 2, tp 2")]
CASES += [("translation", "tp 2, ep 2")]


def first_values(config: TrainConfig) -> dict[str, Tensor]:
    """Return the whole tensors of a new run, of those that this rank has a part of."""
    run = open_run(config, pytest.fail, task=task_of(config))
    run.claim.release()
    state = run.model.state_dict() | {
        name: value for name, value in run.model.named_buffers() if "frequencies" in name
    }
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        for name, each in state.items()
    }


def all_first_values(configs: list[TrainConfig]) -> list[dict[str, Tensor]]:
    return [first_values(config) for config in configs]


def test_a_run_starts_equal_on_every_mesh(tmp_path):
    alone = {model: first_values(configured(tmp_path, model, None)) for model in MODELS}
    assert all(value.isfinite().all() for values in alone.values() for value in values.values())
    of_ranks = on_ranks(4, all_first_values, [configured(tmp_path, *case) for case in CASES])
    for (model, mesh), states in zip(CASES, zip(*of_ranks)):
        seen = set()
        for state in states:
            for name, value in state.items():
                seen.add(name)
                assert torch.equal(value, alone[model][name]), (model, mesh, name)
        assert seen == set(alone[model])


def test_a_value_does_not_depend_on_the_rest_of_the_model(tmp_path):
    few, many = (
        first_values(tiny(tmp_path, out=str(tmp_path / str(n)), model={"moe": {"num_experts": n}}))
        for n in (4, 8)
    )
    for name, value in few.items():
        if ".experts." in name:
            assert torch.equal(many[name][:4], value), name
        elif ".router." not in name:
            assert torch.equal(many[name], value), name


def counted(config: TrainConfig) -> int:
    """Return how many numbers this rank draws for a run."""
    drawn = 0
    original = initial_values._draw_part

    def counting(part: Tensor, ranges: Any, shape: torch.Size, *rest: Any) -> None:
        nonlocal drawn
        drawn += shape.numel()
        original(part, ranges, shape, *rest)

    initial_values._draw_part = counting
    try:
        first_values(config)
    finally:
        initial_values._draw_part = original
    return drawn


def test_a_rank_draws_its_experts_and_its_stage_alone(tmp_path):
    moe = {"num_experts": 8, "hidden": 16}
    model = {"num_layers": 4, "moe": moe}
    settings = {"batch_size": 4, "accumulation": 2, "model": model, "data": {"vocab_size": 256}}
    configs = [
        tiny(tmp_path, **settings, mesh=mesh, out=str(tmp_path / str(number)))
        for number, mesh in enumerate(({"ep": 2}, {"pp": 2}))
    ]
    whole = counted(tiny(tmp_path, **settings, out=str(tmp_path / "one")))
    experts = 4 * 8 * 3 * 16 * 16
    embedding = 256 * 16
    by_ep, by_stage = zip(*on_ranks(2, counted_all, configs))
    assert by_ep == (whole - experts // 2,) * 2
    assert sum(by_stage) == whole + embedding, "both stages hold the tied embedding"
    assert max(by_stage) < 0.8 * whole


def counted_all(configs: list[TrainConfig]) -> list[int]:
    return [counted(config) for config in configs]


def shrunk(config: ModelConfig) -> ModelConfig:
    """Return a model of the same kind with small sizes."""
    kv_heads = config.block.kv_heads and 2
    head_dim = config.block.head_dim and 8
    moe = replace(
        config.moe, num_experts=8, top_k=min(config.moe.top_k, 2), hidden=16, router="switch"
    )
    layers = 4 if config.num_layers > 1 else 1
    block = replace(config.block, kv_heads=kv_heads, head_dim=head_dim)
    return replace(config, dim=32, num_heads=4, num_layers=layers, seq_len=16, moe=moe, block=block)


def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `to_empty` return NaN, or 77 in integers."""
    original = torch.empty_like

    def dirty(*arguments: Any, **options: Any) -> Tensor:
        tensor = original(*arguments, **options).detach()
        return (
            tensor
            if tensor.is_meta
            else tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        )

    monkeypatch.setattr(torch, "empty_like", dirty)


KINDS = {
    repr(model): (name, model)
    for name, make in (PRESETS | PAPER_PRESETS).items()
    for model in [shrunk(make().model)]
}
KINDS = dict(KINDS.values())  # of presets that shrink to the same model, one
DEMO = shrunk(PRESETS["demo"]().model)
MODEL_OF = {"decoder": GPT, "encoder": Encoder, "encoder_decoder": EncoderDecoder}
KINDS |= {
    f"router {name}": replace(
        DEMO, moe=replace(DEMO.moe, router=name, top_k=1 if name == "base" else 2)
    )
    for name in ROUTERS
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_undefined_after_to_empty(monkeypatch, kind):
    with torch.device("meta"):
        model = MODEL_OF[KINDS[kind].block.kind](KINDS[kind], 50)
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    filled(monkeypatch)
    model.to_empty(device="cpu")
    assert all(p.isnan().all() for p in model.parameters())
    model.reset_parameters(initial_values.SeededDraw(0, model))
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert value.isfinite().all(), name
        assert value.is_floating_point() or int(value.max()) < 77, name


def test_a_trained_model_is_read_without_drawing(tmp_path, monkeypatch):
    settings = {"steps": 1, "model": MODELS["untied"] | {"block": {"tied": False}}}
    run_quietly(tiny(tmp_path, **settings))
    whole = load_trained(tmp_path / "run", "cpu").model
    monkeypatch.setattr(initial_values, "_draw_part", lambda *_: pytest.fail("drawn"))
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(
            Tensor, name, lambda x, *_, **__: x if x.is_meta else pytest.fail("drawn")
        )
    filled(monkeypatch)
    read = load_trained(tmp_path / "run", "cpu").model
    for one, other in (
        (read.state_dict(), whole.state_dict()),
        (dict(read.named_buffers()), dict(whole.named_buffers())),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    resumed = open_run(tiny(tmp_path, existing="resume", **settings), pytest.fail)
    resumed.claim.release()
    assert all(
        torch.equal(value, whole.state_dict()[name])
        for name, value in resumed.model.state_dict().items()
    )


def test_a_run_says_what_it_does_before_it_takes_long(tmp_path, monkeypatch):
    said: list[str] = []
    config = tiny(tmp_path)
    task = replace(
        DECODER, load_corpus=lambda *_: (said.append("data"), DECODER.load_corpus(*_))[1]
    )
    monkeypatch.setattr("moesaic.train.state.reset_weights", lambda *_: said.append("weights"))
    run = open_run(config, pytest.fail, said.append, task)
    run.claim.release()
    millions = run.model.num_parameters() / 1e6
    assert said == [
        "run: reading the data",
        "data",
        f"run: drawing {millions:.2f} M parameters on cpu",
        "weights",
    ]


def test_a_model_is_drawn_once(monkeypatch):
    drawn: dict[int, int] = {}
    for name in ("normal_", "uniform_"):
        original = getattr(Tensor, name)

        def counting(
            tensor: Tensor, *arguments: Any, original: Any = original, **options: Any
        ) -> Tensor:
            if not tensor.is_meta:
                drawn[tensor.data_ptr()] = drawn.get(tensor.data_ptr(), 0) + 1
            return original(tensor, *arguments, **options)

        monkeypatch.setattr(Tensor, name, counting)
    model = GPT(DEMO, 50)
    matrices = {p.data_ptr() for p in model.parameters() if p.dim() > 1 and not (p == 0).all()}
    assert set(drawn) == matrices
    assert set(drawn.values()) == {1}
