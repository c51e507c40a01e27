"""Training runs on several Gloo processes for the tests. The processes are started once for many
runs."""

from __future__ import annotations

import datetime
import io
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import FileStore

from moesaic.balance.samples import PlacerOptions
from moesaic.errors import InputError, TrainingError
from moesaic.testing.runner import leave
from moesaic.train import balance
from moesaic.train.checkpoint import load_checkpoint
from moesaic.train.config import TrainConfig
from moesaic.train.loop import train
from moesaic_lab.paper_train.command import task_of
from runs import lines, parameters
from worlds import start


@dataclass(frozen=True)
class Outcome:
    """How a run ended on one rank."""

    refusal: str
    """The text of the error; empty for none."""
    said: str
    """The console output."""
    loss: float | None
    """The last validation loss."""


def train_on(
    world: int,
    runs: list[TrainConfig] | list[list[TrainConfig]],
    prepare: Callable[[], object] = dict,
) -> list[list[Outcome]]:
    """Train runs one after another on `world` processes.

    Args:
        world: number of processes.
        runs: for each run one configuration for all ranks, or one per rank.
        prepare: a module-level function that each process calls first.

    Returns:
        the outcomes per run and rank.
    """
    per_rank = [[run] * world if isinstance(run, TrainConfig) else run for run in runs]
    with tempfile.TemporaryDirectory() as folder:
        start(world, _process, world, per_rank, folder, prepare)
        found = [
            pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world)
        ]
    return [list(outcomes) for outcomes in zip(*found)]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two sets of tensors of the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_same_run(one: Path, other: Path, kinds: tuple[str, ...] = ("train", "eval")) -> None:
    """Assert that two runs have equal training and evaluation metrics, parameters and optimizer
    states."""
    figures = {"train": ("loss", "grad_norm", "lr"), "eval": ("val_loss", "val_nats_per_byte")}
    for kind in kinds:
        keys = figures[kind]
        for a, b in zip(lines(one, kind), lines(other, kind), strict=True):
            assert {key: a[key] for key in ("step", *keys)} == pytest.approx(
                {key: b[key] for key in ("step", *keys)}, abs=1e-9
            )
    for a, b in zip(lines(one, "train"), lines(other, "train"), strict=True):
        assert a["layers"] == b["layers"]
        for name in ("load_balance", "load_balance_global_batch", "z_loss"):
            assert (name in a) == (name in b)
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), abs=1e-9)
    assert difference(parameters(one), parameters(other)) < 1e-9
    states = [
        load_checkpoint(folder / "checkpoints", pytest.fail).optimizer for folder in (one, other)
    ]
    assert difference(*states) < 1e-9


def _process(
    rank: int, world: int, runs: list[list[TrainConfig]], folder: str, prepare: Callable[[], object]
) -> None:
    torch.set_num_threads(1)
    prepare()
    # Move samples for any gain in every pass: toy samples gain too little, and the policy would
    # pause between moves.
    balance.PlacerOptions = partial(PlacerOptions, least_gain=0.0, rest=0)
    store = FileStore(str(Path(folder) / "store"), world)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    outcomes = []
    for run in runs:
        screen = io.StringIO()
        try:
            result = train(
                run[rank], console=Console(file=screen, width=200), task=task_of(run[rank])
            )
            outcomes.append(Outcome("", screen.getvalue(), result.val_nats_per_byte))
        except (InputError, TrainingError) as error:
            outcomes.append(Outcome(f"{type(error).__name__}: {error}", screen.getvalue(), None))
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))
    leave()
