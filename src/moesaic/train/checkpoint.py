"""Checkpoints: safetensors and JSON, written aside and renamed, so that a folder that has its name is whole.

    checkpoints/step-00000250/  model.safetensors  optimizer.safetensors  state.json

`state.json` holds a checksum of each tensor file; loading takes the newest checkpoint whose checksums hold.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.models.config import ModelConfig
from moesaic.train.configfile import override

FORMAT = 1
"""Version of the layout; a reader refuses newer ones."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    step: int
    """Optimizer steps taken."""
    model_config: ModelConfig
    """Architecture of the saved model."""
    vocab_size: int
    """Its vocabulary."""
    model: dict[str, Tensor]
    """Parameters and persistent buffers by name."""
    optimizer: dict[str, Tensor]
    """`<parameter>.<state>` to tensor."""
    extra: dict[str, Any]
    """What the loop stored beside them."""


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    model: nn.Module,
    model_config: ModelConfig,
    vocab_size: int,
    optimizer: torch.optim.Optimizer,
    extra: dict[str, Any],
    keep_last: int,
) -> Path:
    """Write `folder/step-XXXXXXXX` atomically, then delete all but the newest `keep_last` checkpoints up to it.

    Later ones, damaged and passed over when the run was taken up, go too: they belong to a course that is given up.

    Args:
        folder: the run's `checkpoints` folder.
        step: optimizer steps taken.
        model: its parameters and persistent buffers are saved.
        model_config: its architecture.
        vocab_size: its vocabulary.
        optimizer: its state is saved by parameter name.
        extra: JSON data to hand back on loading.
        keep_last: checkpoints to keep.

    Raises:
        InputError: if the disk is full or the folder cannot be written; earlier checkpoints stay.
    """
    target, aside = folder / f"step-{step:08d}", folder / f".writing-{step:08d}"
    state = {
        "format": FORMAT, "step": step, "model_config": asdict(model_config), "vocab_size": vocab_size, "extra": extra
    }  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir()
        tensors = {
            "model.safetensors": {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
            "optimizer.safetensors": optimizer_tensors(model, optimizer),
        }
        state["sha256"] = {name: _write(aside / name, part) for name, part in tensors.items()}
        (aside / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        for path in (aside / "state.json", aside):  # what the name promises must be on the disk before the name is
            _flush(path)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        reason = "the disk is full: free space" if full else f"{error}: check the folder"
        raise InputError(
            f"checkpoint {target} could not be written, {reason}; earlier checkpoints are intact"
        ) from error
    upto = [path for path in list_checkpoints(folder) if path.name <= target.name]
    for path in list_checkpoints(folder):
        if path not in upto[-keep_last:]:
            shutil.rmtree(path, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def load_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint:
    """Load the newest whole checkpoint.

    Args:
        folder: the run's `checkpoints` folder.
        warn: is given one line for each damaged checkpoint that is passed over.

    Raises:
        InputError: if there is none, or none is whole.
    """
    candidates = list_checkpoints(folder)
    if not candidates:
        raise InputError(f"{folder}: no checkpoint there: train first, or name another run folder")
    damages: list[str] = []
    for path in reversed(candidates):
        try:
            loaded = _read(path)
        except _DamagedError as damage:
            damages.append(f"{path.name}: {damage}")
            continue
        for line in damages:
            warn(f"{folder}: a checkpoint is damaged ({line}): taking {path.name} instead")
        return loaded
    raise InputError(
        f"{folder}: every checkpoint there is damaged ({'; '.join(damages)}): train anew with --existing replace"
    )


def load_into(model: nn.Module, checkpoint: Checkpoint, config: ModelConfig, vocab_size: int) -> None:
    """Copy a checkpoint's parameters into a model.

    Raises:
        InputError: if the checkpoint is of another `architecture`; names the fields that differ.
    """
    wanted, saved = architecture(config), architecture(checkpoint.model_config)
    # A field that only one of the two has depends on one in which they differ, which is named.
    different = [
        f"{name} ({value!r} and {saved[name]!r})" for name, value in wanted.items() if value != saved.get(name, value)
    ]
    if vocab_size != checkpoint.vocab_size:
        different.append(f"vocabulary ({vocab_size} and {checkpoint.vocab_size})")
    if different:
        raise InputError(
            f"the checkpoint of step {checkpoint.step} is of another architecture, {'; '.join(different)} "
            "(configured and saved): configure the saved one, or choose another run folder"
        )
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:  # the fields agree, but another version built the saved model
        reason = " ".join(str(error).split())
        raise InputError(
            f"the checkpoint of step {checkpoint.step} does not fit the model that this Moesaic builds ({reason:.200}): "
            "use the version that wrote it, or choose another run folder"
        ) from error


def architecture(config: ModelConfig) -> dict[str, Any]:
    """Return what decides a model's parameters and what they mean, by field; the rest of the fields steer training."""
    outer = {field.name: getattr(config, field.name) for field in fields(config)}
    inner = {field.name: getattr(config.moe, field.name) for field in fields(config.moe)}
    sparse = [config.is_sparse(layer) for layer in range(config.num_layers)]
    unused = {"moe", *_STEER_TRAINING}
    if all(sparse):
        unused.add("dense_hidden")
    if not any(sparse):
        unused |= inner.keys() - {"experts"}
    if config.moe.router != "group_limited":
        unused |= {"num_groups", "top_groups"}
    outer["dense_hidden"] = config.active_hidden
    named = {f"model.{name}": value for name, value in outer.items() if name not in unused}
    return named | {f"model.moe.{name}": value for name, value in inner.items() if name not in unused}


_STEER_TRAINING = (
    "seq_len", "checkpoint_activations", "bias_rate", "capacity", "capacity_factor", "admit_by", "balance_loss",
    "balance_level", "importance_loss", "z_loss",
)  # fmt: skip
"""Fields of a model's configuration that may change on resuming; a field that is new counts as architecture."""


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `<parameter>.<state>` to tensor."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": torch.as_tensor(value).contiguous()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned."""
    parameters = dict(model.named_parameters())
    for place, value in tensors.items():
        name, _, key = place.rpartition(".")
        parameter = parameters[name]
        optimizer.state[parameter][key] = value.to(parameter.device)  # "step" too: fused AdamW counts on the device


class _DamagedError(Exception):
    """A checkpoint that is not whole."""


def _write(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors, flush them to the disk, return the file's checksum."""
    save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, path)
    _flush(path)
    return _checksum(path)


def _flush(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk; Windows knows no flushing of folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state["format"] > FORMAT:
            raise InputError(
                f"checkpoint {path} has format {state['format']}, this Moesaic reads up to {FORMAT}: upgrade it"
            )
        for name, checksum in state["sha256"].items():
            if _checksum(path / name) != checksum:
                raise _DamagedError(f"{name} does not match its checksum")
        return Checkpoint(
            step=state["step"],
            model_config=override(ModelConfig(), state["model_config"], source=str(path / "state.json")),
            vocab_size=state["vocab_size"],
            model=load_file(path / "model.safetensors"),
            optimizer=load_file(path / "optimizer.safetensors"),
            extra=state["extra"],
        )
    except FileNotFoundError as error:
        raise _DamagedError(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise _DamagedError(f"{type(error).__name__}: {error}") from error
