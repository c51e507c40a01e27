"""Training runs that benchmarks compare: without output, on one process or several, with the
metrics that they write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from moesaic.comm.mesh import Mesh
from moesaic.layer import finish_step
from moesaic.testing.runner import on_ranks
from moesaic.train.config import SaveConfig, TrainConfig
from moesaic.train.loop import TrainResult, train
from moesaic.train.metrics import read_metrics
from moesaic_lab.paper_train.command import task_of


def short_run(config: TrainConfig, steps: int, **changes: Any) -> TrainConfig:
    """Return a run of some steps in float32 on one thread of a CPU that evaluates and saves at its
    end.

    Args:
        config: the configuration of the model and the data.
        steps: optimizer steps; the learning-rate schedule ends with them.
        changes: further fields of the configuration.
    """
    end: dict[str, Any] = {
        "evaluate": replace(config.evaluate, every=steps),
        "save": SaveConfig(every=steps),
    }
    plain: dict[str, Any] = {
        "precision": "float32",
        "device": "cpu",
        "threads": 1,
        "tensorboard": False,
    }
    return replace(config, **{"steps": steps, "log_every": steps} | plain | end | changes)


def train_quietly(config: TrainConfig) -> TrainResult:
    """Train without printing anything."""
    return train(config, console=Console(quiet=True), task=task_of(config))


def train_all(configs: list[TrainConfig]) -> None:
    """Train configurations one after another; on several ranks, all ranks must call this
    together."""
    for config in configs:
        train_quietly(config)


def trained_on(world: int, config: TrainConfig, *, backend: str = "gloo") -> list[dict[str, Any]]:
    """Train on `world` processes (1: in this process) and return the lines of the run's metrics."""
    if world > 1:
        on_ranks(world, train_all, [config], backend=backend)
    else:
        train_quietly(config)
    return read_metrics(Path(config.out))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], mesh: Mesh
) -> float:
    """Run a training step of a decoder on a mesh; return the loss of this rank's own samples.

    Args:
        model: the decoder, parallelized.
        batch: tokens and targets of all ranks, (sequences, positions) int64 each.
        mesh: the mesh of all ranks.
    """
    # Each data-parallel group has an equal part of the sequences.
    num_groups = mesh.grid.dp
    group = mesh.grid.coordinate(mesh.rank, "dp")
    tokens, targets = (part.chunk(num_groups)[group] for part in batch)
    loss = model(tokens, targets).loss
    loss.backward()
    finish_step(model)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that describe training steps."""
    return [line for line in lines if line["kind"] == "train"]


def changes(config: Any) -> str:
    """Return the fields of a configuration that differ from their defaults, as "name=value"
    words."""
    plain = vars(type(config)())
    return " ".join(
        f"{name}={value}" for name, value in vars(config).items() if value != plain[name]
    )
