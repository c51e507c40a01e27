"""Nothing that the library does makes torch say that it is deprecated: importing it, or training on
two ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import moesaic
from forked import Forked
from runs import tiny, write_config


def test_training_on_two_ranks_hears_of_nothing_deprecated(tmp_path: Path) -> None:
    config = write_config(
        tiny(tmp_path, steps=1, batch_size=4, mesh={"ep": 2}), tmp_path / "config.json"
    )
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    environment = os.environ | {
        "PYTHONWARNINGS": "default",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    places = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    words = ["-m", "moesaic", "train", "--config", str(config)]
    # Rank 0 is not forked: what has been imported before warns no more.
    first = subprocess.Popen(
        [sys.executable, *words], env=places[0], stderr=subprocess.PIPE, text=True
    )
    second = Forked(words, places[1])
    err = [rank.communicate(timeout=300)[1] for rank in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], err
    ours = str(Path(moesaic.__file__).parent)
    said = [
        line for line in "\n".join(err).splitlines() if "deprecated" in line or "Warning: " in line
    ]
    # Of Python's warnings those that name a file of ours; torch also logs some, which name no file.
    assert [line for line in said if line.startswith(ours) or "Warning: " not in line] == []
