"""Nothing that the library does makes torch say that it is deprecated: importing it, or training on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import moesaic
from runs import tiny, write_config


def test_training_on_two_ranks_hears_of_nothing_deprecated(tmp_path: Path) -> None:
    config = write_config(tiny(tmp_path, steps=1, batch_size=4, mesh={"ep": 2}), tmp_path / "config.json")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moesaic", "train"]
    # Not forked: what has been imported before warns no more.
    ended = subprocess.run(
        [sys.executable, *words, "--config", str(config)],
        env=os.environ | {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    ours = str(Path(moesaic.__file__).parent)
    said = [line for line in ended.stderr.splitlines() if "deprecated" in line or "Warning: " in line]
    # Of Python's warnings those that name a file of ours; torch also logs some, which name no file.
    assert [line for line in said if line.startswith(ours) or "Warning: " not in line] == []
