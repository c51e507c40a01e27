"""The tensors of a checkpoint where a model is sharded: written by all ranks, read by any number of them.

Several ranks write `torch.distributed.checkpoint` files, each its own shards under global names and global places, so that
any other mesh, and one process too, reads what it needs. A checkpoint of one process (safetensors) is read in slices.

Files must be on the disk before a name promises them: they are flushed, read back, and known by their checksums.
"""

from __future__ import annotations

import errno
import hashlib
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from moesaic.models.split import local_part
from moesaic.parallel import num_copies
from moesaic.train.numbers import ROUNDING
from moesaic.train.ranks import Ranks
from moesaic.train.shard_metadata import ShardReader


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk, so that who reads a file next reads it from there.

    Windows knows no flushing of folders, and other systems than Linux may keep what they wrote in memory.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def checksum(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first `size` bytes; of all that it has where these are fewer."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20 if size is None else min(size, 1 << 20)):
            digest.update(block)
            size = None if size is None else size - len(block)
    return digest.hexdigest()


def require_read_back(written: Mapping[str, Tensor], read: Mapping[str, Tensor], share: float = 0.0) -> None:
    """Make sure that tensors came back from the disk as they went there.

    Args:
        written: by name, on whatever device.
        read: the same names.
        share: of a tensor's largest number by which its numbers may differ; 0 compares bits.

    Raises:
        OSError: if one did not.
    """
    for name, before in written.items():
        one, other = before.detach().cpu(), read[name].detach().cpu()
        apart = (one.double() - other.double()).abs().max() if share and one.numel() else 0.0
        is_same = apart <= share * one.double().abs().max() if share and one.numel() else _bits(one).equal(_bits(other))
        if not is_same:
            raise OSError(errno.EIO, f"{name} does not read back from the disk as it was written")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


SHARDS = "shards"
"""The folder of a sharded checkpoint's files, inside the checkpoint."""


def stage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the CPU's memory that training does not change, sharded as they are."""
    # PyTorch's stager (2.13) takes the offset of a DTensor that is a view, such as half of gate and up, for an address.
    tensors = {
        n: each.clone() if isinstance(each, DTensor) and each.storage_offset() else each for n, each in tensors.items()
    }
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged: dict[str, Tensor] = stager.stage(tensors)  # type: ignore[assignment]
    finally:
        stager.close()
    return staged


def write_shards(folder: Path, tensors: dict[str, Tensor], ranks: Ranks, group: str | None = None) -> dict[str, str]:
    """Write every rank's shards into `folder / SHARDS`, flush them and read them back; all ranks call it.

    Args:
        folder: on a file system that all ranks share; exists.
        tensors: by name, `model.<name>` and `optimizer.<name>.<state>`; DTensors, or plain ones that all ranks have alike.
        group: the name of a process group of their own, where the run goes on meanwhile; None for the world's.

    Returns:
        the checksum of each file that this rank looked after, by its path below `folder`; the ranks share them out.

    Raises:
        OSError, CheckpointException: on all ranks, if one of them cannot write; OSError on a rank whose part does not read
            back as it was.
    """
    members = None if group is None else _resolve_process_group(GroupName(group))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it remarks on CPU copies of tensors of a GPU's mesh
        state_dict_saver.save(tensors, checkpoint_id=folder / SHARDS, process_group=members)
    del members
    files = sorted(path for path in (folder / SHARDS).iterdir() if path.is_file())
    mine = files[ranks.rank :: ranks.world]
    for path in mine:
        flush(path)
    found = {f"{SHARDS}/{path.name}": checksum(path) for path in mine}
    read = _read_back(folder, {name: torch.empty_like(tensor) for name, tensor in tensors.items()})
    for has_copies, share in ((False, 0.0), (True, ROUNDING)):  # of copies one is written, perhaps another rank's
        own = {name: each for name, each in tensors.items() if (num_copies(each, ranks.world) > 1) == has_copies}
        require_read_back(
            {n: local_part(each) for n, each in own.items()}, {n: local_part(read[n]) for n in own}, share
        )
    return found


def _read_back(folder: Path, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read this rank's part of a sharded checkpoint into tensors, without a word to the others; return these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it remarks that this is one process
        state_dict_loader.load(targets, storage_reader=ShardReader(folder / SHARDS), no_dist=True)
    return targets


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the whole tensors of a sharded checkpoint whose names start with `prefix`, without it; in one process."""
    wanted = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in _listed(folder).items()}
    wanted = {name: tensor for name, tensor in wanted.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in _read_back(folder, wanted).items()}


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sharded: bool,
    names: Collection[str] | None = None,
) -> None:
    """Read this rank's part of a checkpoint into a sharded model and its optimizer; all ranks call it.

    Args:
        model: sharded; its names are those of the whole model.
        optimizer: of its parameters; its state is replaced.
        sharded: whether the checkpoint is; if not, it holds whole tensors.
        names: of the whole model's tensors, where this rank has a pipeline stage of it; None where it has them all.

    Raises:
        ValueError: if the names of the checkpoint's tensors are not those of the model; says which.
    """
    sizes = _listed(folder) if sharded else _listed_whole(folder)
    targets: dict[str, Tensor] = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    saved = {name for name in sizes if name.startswith("model.")}
    wanted = targets.keys() if names is None else {f"model.{name}" for name in names}
    if saved != wanted:
        odd = sorted(saved ^ wanted)
        raise ValueError(f"{len(odd)} tensors are only in one of them, {odd[0]} for one")
    targets |= _empty_state(model, optimizer, {name: size for name, size in sizes.items() if name not in saved})
    if sharded:
        state_dict_loader.load(targets, storage_reader=ShardReader(folder / SHARDS))
        return
    for part in ("model", "optimizer"):
        with safe_open(folder / f"{part}.safetensors", framework="pt") as file:
            for name, target in targets.items():
                if name.startswith(f"{part}."):
                    _fill(target, file, name.removeprefix(f"{part}."))


def _listed(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return size and dtype of every tensor of a sharded checkpoint."""
    entries = ShardReader(folder / SHARDS).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}  # type: ignore[union-attr]


def _listed_whole(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the sizes in a checkpoint of whole tensors; scalars there are float32."""
    found = {}
    for part in ("model", "optimizer"):
        with safe_open(folder / f"{part}.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                size = torch.Size(file.get_slice(name).get_shape())
                found[f"{part}.{name}"] = (size, torch.float32)
    return found


def _empty_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, sizes: dict[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Give every parameter the optimizer state that is listed, sharded as the parameter is; returns it by name."""
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    optimizer.state.clear()
    for place, (size, dtype) in sizes.items():
        name, _, key = place.removeprefix("optimizer.").rpartition(".")
        if name not in parameters:  # of another pipeline stage
            continue
        parameter = parameters[name]
        scalar = torch.zeros((), dtype=dtype, device=parameter.device)  # fused AdamW counts steps on the device
        state = optimizer.state[parameter]
        if key not in state:
            state[key] = torch.zeros_like(parameter.detach()) if size else scalar
        found[place] = state[key]
    return found


def _fill(target: Tensor, file: Any, name: str) -> None:
    """Copy this rank's part of a tensor in a safetensors file."""
    source = file.get_slice(name)
    if tuple(source.get_shape()) != tuple(target.shape):
        raise ValueError(f"{name} has {source.get_shape()} numbers, not {list(target.shape)}")
    if not isinstance(target, DTensor):
        target.copy_(source[...])
        return
    local = target.to_local()
    if not local.numel():
        return
    (chunk,) = target.__create_chunk_list__()
    assert tuple(chunk.sizes) == tuple(local.shape), f"{name} is not split into blocks"
    local.copy_(source[tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))])
