"""Record a checkpoint of the version at hand: `python record_checkpoint.py FOLDER`, with moesaic
installed.

`train/checkpoint_of_format_4/` was recorded so by commit 68b2adfd, whose checkpoints have torch's
distributed format. It is step 2 of a run of four steps on two ranks, and `losses.json` has the
losses of all four.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from runs import losses, tiny, write_text

RUN = {
    "out": "run",
    "save": {"every": 2, "keep": 2},
    "model": {"dim": 8, "num_layers": 1, "num_heads": 1, "moe": {"num_experts": 2, "hidden": 8}},
}


def write_run(folder: Path, **changes: object) -> Path:
    """Write the run's text and its configuration, with relative paths, into a folder. Return the
    configuration's path."""
    write_text(folder / "text.txt")
    config = tiny(folder, **{**RUN, **changes})
    config = replace(config, data=replace(config.data, path=("text.txt",)))
    path = folder / "configured.json"
    path.write_text(json.dumps(asdict(config)))
    return path


def record(folder: Path) -> None:
    """Train, and keep the checkpoint of step 2."""
    with tempfile.TemporaryDirectory() as made:
        config = write_run(Path(made), mesh={"ep": 2})
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        subprocess.run(
            [*start, "-m", "moesaic", "train", "--config", str(config)], cwd=made, check=True
        )
        shutil.copytree(Path(made, "run", "checkpoints", "step-00000002"), folder / "step-00000002")
        (folder / "losses.json").write_text(json.dumps(losses(Path(made, "run"))) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
