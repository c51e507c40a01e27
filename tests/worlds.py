"""Real processes over Gloo for the tests: one start of the processes serves all that one call of a function does."""

from __future__ import annotations

import datetime
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.multiprocessing.spawn import spawn

from moesaic.testing.processes import leave

TIMEOUT_SECONDS = 120


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function of a module in `world` processes of one process group; return what each rank's returned."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, args=(world, folder, function, arguments), nprocs=world)
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
