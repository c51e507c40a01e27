"""Record the `.metadata` that the Python and the torch at hand write:
`python record_metadata.py FOLDER`.

The files in `train/metadata/` were recorded so, once, each in an environment with the Python and
the torch of its name. Needs torch and numpy alone.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

TENSORS = {
    "model.matrix": torch.arange(12.0).view(3, 4),
    "model.empty": torch.empty(0, 4),
    "model.half": torch.ones(2, dtype=torch.bfloat16),
    "model.image": torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "optimizer.scalar": torch.tensor(3.0),
    "model.count": torch.tensor([1, 2]),
}


class Planner(DefaultSavePlanner):
    """Stores the plans of all ranks in the list, as Megatron-Core's planner does."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.all_local_plans = plans
        return plans, metadata


def record(folder: Path) -> Path:
    """Write tensors and, as torchtitan does, something that is none. Keep the list of them; return
    its path."""
    version = torch.__version__.partition("+")[0]
    path = folder / f"python-{platform.python_version()}-torch-{version}.metadata"
    with tempfile.TemporaryDirectory() as shards:
        state = {**TENSORS, "train_state": {"step": 3}}
        state_dict_saver.save(state, checkpoint_id=shards, no_dist=True, planner=Planner())
        path.write_bytes((Path(shards) / ".metadata").read_bytes())
    return path


if __name__ == "__main__":
    print(record(Path(sys.argv[1])))
