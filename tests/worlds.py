"""Real processes over Gloo for the tests: one start of the processes serves all that one call of a function does."""

from __future__ import annotations

import datetime
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from moesaic.testing.processes import leave, start_ranks

TIMEOUT_SECONDS = 120
PRELOAD = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.run", "torch.distributed.pipelining",
    "moesaic.cli.main", "moesaic.cli.train", "moesaic.train.loop", "pytest",
)  # fmt: skip
"""What ranks of tests and commands import besides."""


def start(world: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` in `world` processes; see `start_ranks`."""
    start_ranks(world, function, *arguments, preload=preloaded())


def preloaded() -> tuple[str, ...]:
    """Return the names of what the server imports off which all processes of tests are forked."""
    return (*PRELOAD, *(name for name in ("transformers",) if name in sys.modules))


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function of a module in `world` processes of one process group; return what each rank's returned."""
    with tempfile.TemporaryDirectory() as folder:
        start(world, _process, world, folder, function, arguments)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def refusal(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return the kind and the text of the error that a call ends with; empty for none."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _process(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    found = function(*arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    leave()
