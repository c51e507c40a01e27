"""Functions for one rank of a spread model that loads a converted checkpoint;
`test_load_on_meshes.py` starts them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.tensor import DTensor

from moesaic.storage.shards import write_tensors
from moesaic.train.distributed_checkpoint import SHARDS
from moesaic.train.shard_metadata import ShardReader
from moesaic_lab.hf import RankCase, as_launched, load


def differing(case: RankCase, converted: str) -> tuple[int, list[str]]:
    """Fill a spread model with zeros, load a converted checkpoint, and compare it with the values
    that transformers loaded.

    Returns:
        the number of spread parameters, and the names of parameters for which this rank's part
        differs.
    """
    as_launched()
    model = load(case)
    expected = {name: local(tensor).clone() for name, tensor in model.state_dict().items()}
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    for tensor in tensors.values():
        tensor.zero_()
    state_dict_loader.load(tensors, storage_reader=ShardReader(Path(converted) / SHARDS))
    wrong = [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(local(tensor), expected[name])
    ]
    return sum(isinstance(tensor, DTensor) for tensor in tensors.values()), wrong


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_spread(case: RankCase, folder: str) -> None:
    """Write a spread model: each rank writes its own part, under global names."""
    as_launched()
    tensors = {f"model.{name}": tensor.detach() for name, tensor in load(case).state_dict().items()}
    write_tensors(Path(folder) / SHARDS, tensors)
