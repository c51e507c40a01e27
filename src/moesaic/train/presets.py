"""Presets: functions that return a configuration. `--preset NAME` starts from one; flags override it.

The models are those of `plan/presets.py`; what a run needs besides stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from moesaic.configfile import override
from moesaic.plan.presets import PRESETS as MODELS
from moesaic.train.config import TrainConfig

WARM = {"lr": 6e-4, "schedule": "cosine:0.1:warmup=500"}
RUNS: dict[str, dict[str, Any]] = {
    "demo": {"out": "runs/demo/moe", "steps": 600, "save": "300"},
    "gpt-tiny": {"steps": 50, "evaluate": [25, 8], "optimizer": {"lr": 1e-2, "schedule": "cosine:0.1:warmup=10"}},
    "bert-tiny": {"steps": 250, "evaluate": [100, 4096], "model": {"conv_width": 8}, "optimizer": {"lr": 1e-2}},
    "seq2seq-tiny": {"steps": 1000, "evaluate": [100, 512], "optimizer": {"lr": 1e-2}},
    "gpt-small": {
        "steps": 20_000, "evaluate": [500, 128], "save": "1000", "optimizer": WARM,
        "model": {"moe": {"losses": ["load_balance:0.01", "z_loss:0.001"]}},
    },
}  # fmt: skip
"""How a model is trained, by its name; PUBLISHED for those that are not here."""
PUBLISHED: dict[str, Any] = {
    "steps": 100_000, "evaluate": [1000, 128], "save": "1000", "model": {"conv_width": 1}, "optimizer": WARM,
}  # fmt: skip


def preset(name: str) -> TrainConfig:
    """Return the configuration of a model of `plan/presets.py`."""
    config = override(TrainConfig(out=f"runs/{name}"), asdict(MODELS[name]), source=name)
    if config.model.moe.top_k == 1:  # the weight of one expert of one would be 1, and the router would learn nothing
        config = override(config, {"model": {"moe": {"router": "switch"}}}, source=name)
    return override(config, RUNS.get(name, PUBLISHED), source=name)


def demo() -> TrainConfig:
    """Return the sparse half of `make demo`: a byte-level GPT-MoE that trains in about three minutes on two CPU cores.

    The experts are narrow on purpose: of the shapes tried, this one gained most over a dense model (docs/log.md).
    """
    return preset("demo")


def demo_dense() -> TrainConfig:
    """Return the dense half of `make demo`: the same active parameters, tokens and steps."""
    config = demo()
    return replace(config, out="runs/demo/dense", model=replace(config.model, ffn="dense"))


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo, "demo-dense": demo_dense, **{name: partial(preset, name) for name in MODELS if name != "demo"}
}  # fmt: skip
