"""The tensors of checkpoints: all ranks write them together, and any number of ranks reads them.

The files are safetensors, as `moesaic.storage.shards` has them. Each rank writes its own shards
under global names and offsets, so any other mesh, or a single process, reads the parts it needs. A
process alone writes and reads without a process group.

Files must be on disk before the checkpoint gets its name: they are flushed, read back and
checksummed.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from moesaic.models.split import local_part
from moesaic.parallel import num_copies
from moesaic.resuming import checksum, flush
from moesaic.storage.shards import write_tensors
from moesaic.train.numbers import ROUNDING
from moesaic.train.ranks import Ranks
from moesaic.train.shard_metadata import ShardReader


def require_read_back(
    written: Mapping[str, Tensor], read: Mapping[str, Tensor], share: float = 0.0
) -> None:
    """Check that tensors read back from disk as they were written.

    Args:
        written: tensors by name, on any device.
        read: the tensors of the same names, as read.
        share: allowed difference as a share of the tensor's largest absolute value; 0 compares
            bits.

    Raises:
        OSError: if one differs.
    """
    for name, tensor in written.items():
        expected = tensor.detach().cpu()
        actual = read[name].detach().cpu()
        if share and expected.numel():
            difference = (expected.double() - actual.double()).abs().max()
            is_same = bool(difference <= share * expected.double().abs().max())
        else:
            is_same = _bits(expected).equal(_bits(actual))
        if not is_same:
            raise OSError(errno.EIO, f"{name} does not read back from the disk as it was written")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


SHARDS = "shards"
"""The folder inside a checkpoint that holds the files of its shards."""


def stage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors in CPU memory, sharded as before, that training does not
    change."""
    # PyTorch's stager (2.13) takes the offset of a DTensor that is a view, such as half of gate and
    # up, for an address.
    sources = dict(tensors)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.storage_offset():
            sources[name] = tensor.clone()
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)
    try:
        staged: dict[str, Tensor] = stager.stage(sources)  # type: ignore[assignment]
    finally:
        stager.close()
    return staged


def write_shards(
    folder: Path, tensors: dict[str, Tensor], ranks: Ranks, group: str | None = None
) -> dict[str, str]:
    """Write every rank's shards into `folder / SHARDS`, flush them and read them back. All ranks
    call it.

    Args:
        folder: an existing folder on a file system that all ranks share.
        tensors: tensors by name, `model.<name>` and `optimizer.<name>.<state>`; either DTensors, or
            plain tensors that are identical on all ranks.
        group: the name of a process group that is used for nothing else, so that training can
            continue; None for the default group.

    Returns:
        checksums of the files that this rank flushed, by path below `folder`; each file is flushed
            by one rank.

    Raises:
        OSError, CheckpointException: on all ranks, if one of them cannot write; OSError on a rank
            whose part does not read back as written.
    """
    members = None if group is None else _resolve_process_group(GroupName(group))
    write_tensors(folder / SHARDS, tensors, group=members, is_alone=ranks.mesh is None)
    del members  # a reference would keep the group alive after torch destroyed it
    files = sorted(path for path in (folder / SHARDS).iterdir() if path.is_file())
    own_files = files[ranks.rank :: ranks.world]  # the ranks take them in turn
    for path in own_files:
        flush(path)
    sums = {f"{SHARDS}/{path.name}": checksum(path) for path in own_files}

    read = read_into(folder, {name: torch.empty_like(tensor) for name, tensor in tensors.items()})
    parts_read = {name: local_part(tensor) for name, tensor in read.items()}
    single: dict[str, Tensor] = {}
    copied: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = copied if num_copies(tensor, ranks.world) > 1 else single
        parts[name] = local_part(tensor)
    require_read_back(single, parts_read)
    # of a tensor that several ranks hold, one rank's is written; others may differ by rounding
    require_read_back(copied, parts_read, ROUNDING)
    return sums


def held_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a model: its persistent buffers and its parameters, but no
    frozen ones."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def read_into(folder: Path, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read this rank's part of a checkpoint into tensors, without communication. Return the
    tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        state_dict_loader.load(targets, storage_reader=ShardReader(folder / SHARDS), no_dist=True)
    return targets


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the full tensors of a checkpoint with names that start with `prefix`, which is
    removed."""
    targets = {}
    for name, (size, dtype) in shard_sizes(folder).items():
        if name.startswith(prefix):
            targets[name] = torch.empty(size, dtype=dtype)
    tensors = read_into(folder, targets)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def restore(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    names: Collection[str] | None = None,
) -> None:
    """Read this rank's part of a checkpoint into a model and its optimizer, without communication.

    Args:
        model: a model, sharded or not, with the same parameter names as the unsharded one.
        optimizer: the optimizer of the model's parameters, whose state is replaced; None reads the
            model alone.
        names: names of the full model's tensors, if this rank holds a pipeline stage; None if it
            holds all of them.

    Raises:
        ValueError: if the names of the checkpoint's tensors differ from the model's; the message
            names one.
    """
    sizes = shard_sizes(folder)
    targets: dict[str, Tensor] = {
        f"model.{name}": tensor.detach() for name, tensor in held_state(model).items()
    }
    saved = {name for name in sizes if name.startswith("model.")}
    expected = set(targets) if names is None else {f"model.{name}" for name in names}
    if saved != expected:
        mismatched = sorted(saved ^ expected)
        raise ValueError(
            f"{len(mismatched)} tensors are in only one of the two, such as {mismatched[0]}"
        )
    if optimizer is not None:
        sizes_of_state = {name: size for name, size in sizes.items() if name not in saved}
        targets |= _empty_state(model, optimizer, sizes_of_state)
    read_into(folder, targets)


def shard_sizes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return size and dtype of every tensor of a checkpoint."""
    entries = ShardReader(folder / SHARDS).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}  # type: ignore[union-attr]


def _empty_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sizes: dict[str, tuple[torch.Size, torch.dtype]],
) -> dict[str, Tensor]:
    """Give every parameter zeroed optimizer state of the listed names, sharded like the parameter.
    Return the state by name.

    Args:
        sizes: size and dtype of each tensor of state, by `optimizer.<parameter>.<state>`; those of
            other pipeline stages are passed over.
    """
    parameters = dict(model.named_parameters())
    state_by_name: dict[str, Tensor] = {}
    optimizer.state.clear()
    for full_name, (size, dtype) in sizes.items():
        name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
        if name not in parameters:  # belongs to another pipeline stage
            continue
        parameter = parameters[name]
        state = optimizer.state[parameter]
        if key not in state:
            if size:
                state[key] = torch.zeros_like(parameter.detach())
            else:  # a count of steps, which fused AdamW keeps on the device
                state[key] = torch.zeros((), dtype=dtype, device=parameter.device)
        state_by_name[full_name] = state[key]
    return state_by_name
