"""Presets of `moesaic train`: a model of `planner/presets.py`, and how to train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from moesaic.configfile import override
from moesaic.planner.presets import PRESETS as MODELS
from moesaic.train.config import TrainConfig

WARM = {"lr": 6e-4, "warmup_steps": 500}
RARELY = {"every": 1000}
RUNS: dict[str, dict[str, Any]] = {
    "demo": {"out": "runs/demo/moe", "steps": 600, "save": {"every": 300}},
    "gpt-tiny": {
        "steps": 50,
        "evaluate": {"every": 25, "sequences": 8},
        "optimizer": {"lr": 1e-2, "warmup_steps": 10},
    },
    "gpt-small": {
        "steps": 20_000,
        "evaluate": {"every": 500},
        "save": RARELY,
        "optimizer": WARM,
        "model": {"moe": {"z_loss": 0.001}},
    },
}
"""Training settings of each preset; presets that are not listed use `PUBLISHED`."""
PUBLISHED: dict[str, Any] = {
    "steps": 100_000,
    "evaluate": RARELY,
    "save": RARELY,
    "optimizer": WARM,
}


def preset(name: str, settings: dict[str, Any] | None = None) -> TrainConfig:
    """Return the configuration that trains a model of `planner/presets.py`.

    Args:
        settings: fields of `TrainConfig`, as nested tables; None for those that `RUNS` has for it.
    """
    config = override(TrainConfig(out=f"runs/{name}"), asdict(MODELS[name]), source=name)
    # The default router divides weights by their sum: with one expert per token its weight would
    # always be 1, and the router would learn nothing.
    if config.model.moe.top_k == 1:
        config = override(config, {"model": {"moe": {"router": "switch"}}}, source=name)
    return override(config, settings or RUNS.get(name, PUBLISHED), source=name)


def demo() -> TrainConfig:
    """Return the sparse half of `make demo`: a byte-level GPT-MoE that trains in about two minutes
    on two CPU cores.

    The experts are narrow on purpose: of the shapes tried, this one gained most over a dense model
    (docs/log.md).
    """
    return preset("demo")


def demo_dense() -> TrainConfig:
    """Return the dense half of `make demo`: the same active parameters, tokens and steps."""
    config = demo()
    return replace(config, out="runs/demo/dense", model=replace(config.model, ffn="dense"))


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "demo-dense": demo_dense,
    **{
        name: partial(preset, name)
        for name, job in MODELS.items()
        if job.model.block.kind == "decoder" and name != "demo"
    },
}
