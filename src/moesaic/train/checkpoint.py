"""Checkpoints: folders of tensors and JSON. They are written under another name and then renamed,
so a folder with its final name is complete.

    checkpoints/step-00000250/  shards/index.json  shards/*.safetensors  state.json  SHA256SUMS

Each checkpoint also has copies of the run folder's `config.json` and `tokenizer.json`, and the plan
table if any. `SHA256SUMS` holds a checksum of every other file, in the format of the command
sha256sum. Loading takes the newest checkpoint that matches its checksums. When a step is saved
again, its earlier checkpoint is renamed until the new one is complete, so that at every instant a
complete one exists.

All ranks write their own parts of the tensors into shards, one file or more each; the first rank
writes the other files. The architecture is the fields of the model's configuration that must be
those of the checkpoint, since they decide which parameters there are.
"""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.files import (
    MOST_TEXT,
    WRITING,
    entries,
    folder_below,
    kind_of,
    read_text,
    refuse_link,
    write,
)
from moesaic.models.config import ModelConfig
from moesaic.resuming import Checkpoints, DamagedError, checksum, flush
from moesaic.routing.routers import ON_MESH, ROUTERS, options_of
from moesaic.storage.shards import FILES, INDEX
from moesaic.train.distributed_checkpoint import (
    SHARDS,
    held_state,
    read_whole,
    restore,
    stage,
    write_shards,
)
from moesaic.train.pipeline import PipelinedGPT
from moesaic.train.ranks import Ranks

FORMAT = 5
"""Version of the layout that is written: the tensors are in safetensors files with a list of
them."""
READ_FORMATS = (4, FORMAT)
"""Versions that are read; all others are refused. In version 4, torch's distributed checkpoint
wrote the tensors."""
STATE = "state.json"
SUMS = "SHA256SUMS"
"""The files that hold a checkpoint's description and its checksums."""
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
PLAN_TABLE = "plan-table.json"
"""Copies of the run's own files, as of the time of saving."""
OWN_FILES = (
    STATE,
    SUMS,
    CONFIG,
    TOKENIZER,
    PLAN_TABLE,
    f"{SHARDS}/{INDEX}",
    f"{SHARDS}/{FILES}",
    f"{SHARDS}/.metadata*",
    f"{SHARDS}/__*.distcp",
)
"""Patterns of all files that saving writes, or wrote in version 4. No other file in a checkpoint's
folder is ever deleted."""
CHECKPOINTS = Checkpoints(
    name=re.compile(r"(?:step|\.replaced)-(\d{8,})(?:-\d+)?"),
    final="step-",
    replaced=".replaced-{step:08d}-{number}",
    files=OWN_FILES,
    texts=(STATE, SUMS, CONFIG, TOKENIZER, PLAN_TABLE, f"{SHARDS}/{INDEX}"),
)
"""What the checkpoints of a run of `train` are called, and what they hold."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match their checksums."""

    step: int
    """Optimizer steps taken."""
    model_config: ModelConfig
    """Architecture of the saved model."""
    vocab_size: int
    """Vocabulary size of the saved model."""
    extra: dict[str, Any]
    """Further JSON data that the training loop stored."""
    folder: Path
    """The folder of the checkpoint."""

    @property
    def model(self) -> dict[str, Tensor]:
        """The full parameters and persistent buffers by name, read at each use."""
        return read_whole(self.folder, "model.")

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """The full optimizer state by `<parameter>.<state>`, read at each use."""
        return read_whole(self.folder, "optimizer.")


class Saving:
    """A checkpoint that is being written. All ranks call `finish` together.

    Args:
        target: the path that the checkpoint gets once it is complete.
        texts: the description and the copies of the run's files, by file name.
        keep_last: number of checkpoints to keep.
        write: writes this rank's tensors into a folder, and returns the checksums of the files by
            path.
        background: write in a thread, and return at once.
    """

    def __init__(
        self,
        target: Path,
        texts: Mapping[str, str],
        keep_last: int,
        ranks: Ranks,
        write: Callable[[Path], dict[str, str]],
        *,
        background: bool,
    ) -> None:
        self.target = target
        self._texts = texts
        self._keep_last = keep_last
        self._ranks = ranks
        # the temporary name, under which the files are written
        self._unfinished = target.with_name(f"{WRITING}{CHECKPOINTS.step_of(target):08d}")
        self._sums: Future[dict[str, str]] = Future()
        """What `write` returns, or raises, once it is done."""
        work = partial(_run_into, self._sums, partial(write, self._unfinished))
        if background:
            threading.Thread(target=work, name="moesaic-checkpoint", daemon=True).start()
        else:
            work()

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its files, so that `finish` does not wait for them."""
        return self._sums.done()

    def finish(self) -> Path:
        """Wait for the files of all ranks, give the checkpoint its final name, and delete old ones.
        Return its path.

        Raises:
            InputError: on all ranks, if the disk is full, the folder cannot be written, or written
                files do not read back correctly. Earlier checkpoints are kept.
        """
        own_sums: dict[str, str] = {}
        with _reporting_write_errors(self.target, self._unfinished, self._ranks):
            own_sums = self._sums.result()
        sums: dict[str, str] = {}
        for sums_of_rank in self._ranks.gathered(own_sums):
            sums |= sums_of_rank
        with _reporting_write_errors(self.target, self._unfinished, self._ranks):
            if self._ranks.is_first:
                _write_texts(self._unfinished, self._texts, sums)
                CHECKPOINTS.put(self._unfinished, self.target, self._keep_last)
        return self.target


def _run_into(future: Future[dict[str, str]], work: Callable[[], dict[str, str]]) -> None:
    """Run `work`, and store its result or exception in `future`."""
    try:
        future.set_result(work())
    except BaseException as error:  # of any kind: whoever asks for the result would wait for ever
        future.set_exception(error)


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
    files: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
    background: str | bool = False,
) -> Saving:
    """Start to write `folder/step-XXXXXXXX` under a temporary name, and read it back.

    `finish` then renames it, and deletes all but the newest `keep_last` checkpoints up to it. It
    also deletes later checkpoints. They were damaged and ignored when the run was resumed, so they
    belong to an abandoned course.

    Args:
        model: the module whose trained parameters and persistent buffers are saved.
        optimizer: the optimizer whose state is saved by parameter name.
        extra: JSON data that loading returns; the first rank's is kept.
        files: texts of the run's own files by name; the first rank's are written.
        ranks: the ranks that share the model, which all call this function; None for one process.
        background: copy the tensors and write them in a thread. With several ranks, this is the
            name of a process group that is used for nothing else; at most one checkpoint is written
            in it at a time.

    Raises:
        InputError: if the folder cannot be written; earlier checkpoints are kept.
    """
    ranks = ranks or Ranks()
    target = folder / f"step-{step:08d}"
    unfinished = folder / f"{WRITING}{step:08d}"
    state = {
        "format": FORMAT,
        "step": step,
        "model_config": asdict(model_config),
        "vocab_size": vocab_size,
        "extra": extra,
    }
    tensors = {f"model.{name}": tensor for name, tensor in held_state(model).items()}
    for name, tensor in optimizer_tensors(model, optimizer).items():
        tensors[f"optimizer.{name}"] = tensor
    with _reporting_write_errors(target, unfinished, ranks):
        if ranks.is_first:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # `folder_below` makes the folder if it is missing
            for leftover in entries(folder_below(folder), f"{WRITING}*"):
                remove_checkpoint(leftover)
            refuse_link(target)
            unfinished.mkdir()  # anew, since torch opens the files in it itself
    if background:
        tensors = stage(tensors)  # training changes the originals meanwhile
    group = background if isinstance(background, str) else None
    write = partial(write_shards, tensors=tensors, ranks=ranks, group=group)
    texts = {STATE: json.dumps(state, indent=2), **(files or {})}
    return Saving(target, texts, keep_last, ranks, write, background=bool(background))


def _write_texts(unfinished: Path, texts: Mapping[str, str], sums: dict[str, str]) -> None:
    """Write the texts of a checkpoint whose tensors are written, then the checksums of all its
    files, of which `sums` has those of the tensors; flush all files to disk."""
    for name, text in texts.items():
        write(unfinished / name, text)
        sums[name] = checksum(unfinished / name)
    lines = [f"{value}  {name}\n" for name, value in sorted(sums.items())]
    write(unfinished / SUMS, "".join(lines))
    # all files must be on disk before the folder gets its final name
    for name in (*texts, SUMS, SHARDS, ""):  # the last one is the folder itself
        flush(unfinished / name)


def remove_checkpoint(path: Path) -> None:
    """Delete the files of a checkpoint, unless it is a link. Delete its folder too unless it holds
    other files."""
    CHECKPOINTS.delete(path)


@contextmanager
def _reporting_write_errors(target: Path, unfinished: Path, ranks: Ranks) -> Iterator[None]:
    """Turn a write error into an InputError on every rank, and delete the half-written
    checkpoint."""
    with ranks.together():
        try:
            yield
        except (OSError, CheckpointException) as error:
            remove_checkpoint(unfinished)
            who = ""
            cause: BaseException = error
            if isinstance(error, CheckpointException) and error.failures:
                rank = min(error.failures)
                cause, _ = error.failures[rank]
                who = f"by rank {rank}: "
            text = " ".join(str(cause).split())
            has_code = getattr(cause, "errno", None) == errno.ENOSPC
            is_full = has_code or "No space left" in str(cause)
            reason = "the disk is full: free space" if is_full else f"{text:.300}: check the folder"
            raise InputError(
                f"checkpoint {target} could not be written, {who}{reason}; earlier checkpoints "
                "are intact"
            ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first. An earlier checkpoint of a step
    (`.replaced-*`) comes before the newer one of that step."""
    return CHECKPOINTS.listed(folder)


def load_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint:
    """Return the newest undamaged checkpoint, however many ranks wrote it.

    Args:
        warn: called with one line for each damaged checkpoint that is skipped.

    Raises:
        InputError: if there is no checkpoint, or all are damaged.
    """
    remedy = (
        "mend one, or train anew with another --out, or with --existing replace, which deletes them"
    )
    return CHECKPOINTS.newest(folder, _read, warn, remedy)


def identity(checkpoint: Checkpoint) -> str:
    """Return a checksum of all that a checkpoint holds: that of its list of checksums."""
    return checksum(checkpoint.folder / SUMS, at_most=MOST_TEXT)


def find_copy(folder: Path, name: str) -> Path | None:
    """Return the newest copy of a run's file whose checksum in its checkpoint is correct; None if
    there is none."""
    for path in reversed(list_checkpoints(folder)):
        with suppress(OSError, ValueError, DamagedError):
            if checksum(path / name, at_most=MOST_TEXT) == _listed_sums(path).get(name):
                return path / name
    return None


def load_into(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: ModelConfig,
    vocab_size: int,
) -> None:
    """Read this rank's part of a checkpoint into a model, sharded or not, and its optimizer (None:
    the model alone).

    Raises:
        InputError: if the checkpoint has another `architecture` (the message names the fields that
            differ), or does not fit the model.
    """
    require_architecture(checkpoint, config, vocab_size)
    names = model.names if isinstance(model, PipelinedGPT) else None
    try:
        restore(checkpoint.folder, model, optimizer, names=names)
    except InputError:
        raise
    except (ValueError, RuntimeError, CheckpointException) as error:
        # the fields agree, but not the saved model
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # of one rank, since it reads alone
            cause, _ = next(iter(error.failures.values()))
        reason = " ".join(str(cause).split())
        raise InputError(
            f"the checkpoint of step {checkpoint.step} does not fit the model that this Moesaic "
            f"builds ({reason:.200}): use the version that wrote it, or choose another run folder"
        ) from error


def require_architecture(checkpoint: Checkpoint, config: ModelConfig, vocab_size: int) -> None:
    """Raise InputError, naming the fields that differ, if a checkpoint has another
    `architecture`."""
    configured = architecture(config)
    saved = architecture(checkpoint.model_config)
    # A field that only one of the two has depends on another field, which differs and is named.
    different = [
        f"{name} ({value!r} and {saved[name]!r})"
        for name, value in configured.items()
        if value != saved.get(name, value)
    ]
    if vocab_size != checkpoint.vocab_size:
        different.append(f"vocabulary ({vocab_size} and {checkpoint.vocab_size})")
    if different:
        raise InputError(
            f"the checkpoint of step {checkpoint.step} is of another architecture, "
            f"{'; '.join(different)} (configured and saved): configure the saved one, or choose "
            "another run folder"
        )


def architecture(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that decide which parameters a model has and what they mean. All other
    fields steer training."""
    moe = config.moe
    values = {f"model.{name}": value for name, value in _values_of(config).items()}
    for name, value in _values_of(config.block).items():
        values[f"model.block.{name}"] = value
    for name, value in _values_of(moe).items():
        values[f"model.moe.{name}"] = value
    values["model.dense_hidden"] = config.active_hidden  # inner width of dense layers

    left_out = set(_STEER_TRAINING)
    sparse = [config.is_sparse(layer) for layer in range(config.num_layers)]
    if any(sparse):
        default_options = options_of((ROUTERS | ON_MESH)[moe.router])
        for name, value in (default_options | moe.router_options).items():
            values[f"model.moe.router_options.{name}"] = value
    else:  # no MoE layers, so that their fields mean nothing
        left_out |= {name for name in values if name.startswith("model.moe.")}
        left_out.remove("model.moe.experts")  # dense layers are of this kind
        left_out.add("model.moe_every")
    if all(sparse):  # no dense layers
        left_out.add("model.dense_hidden")
    if config.block.positions == "learned":
        # seq_len is then the number of rows of their table, and nothing rotates
        left_out.discard("model.seq_len")
        left_out |= {"model.block.rope_theta", "model.block.rope_factor"}
    return {name: value for name, value in values.items() if name not in left_out}


def _values_of(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; dataclasses in them stay as they are."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


_STEER_TRAINING = (
    "model.moe",
    "model.block",
    "model.moe.router_options",  # whose fields are compared one by one
    "model.seq_len",
    "model.checkpoint_activations",
    "model.block.dropout",
    "model.moe.router_options.bias_rate",
    "model.moe.capacity",
    "model.moe.capacity_factor",
    "model.moe.capacity_scope",
    "model.moe.capacity_order",
    "model.moe.load_balance",
    "model.moe.load_balance_level",
    "model.moe.importance",
    "model.moe.z_loss",
)
"""Fields of the model configuration that may change on resuming. New fields count as architecture
unless listed here."""


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as a dict from `<parameter>.<state>` to tensor."""
    return {  # a state that is a plain number, as a count of steps may be, becomes a tensor
        f"{name}.{key}": torch.as_tensor(value).contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _read(path: Path) -> Checkpoint:
    """Read a checkpoint's state, and name what is damaged."""
    try:
        state = _checked_state(path)
        return Checkpoint(
            step=state["step"],
            model_config=override(ModelConfig(), state["model_config"], source=str(path / STATE)),
            vocab_size=state["vocab_size"],
            extra=state["extra"],
            folder=path,
        )
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise DamagedError(f"{type(error).__name__}: {error}") from error


def _checked_state(path: Path) -> dict[str, Any]:
    """Return a checkpoint's description, after comparing every file with its checksum.

    Raises:
        InputError: for another version of the format.
        DamagedError, OSError, ValueError, KeyError, TypeError: for a damaged checkpoint.
    """
    CHECKPOINTS.require_sums(path, _listed_sums(path), SUMS)
    state: dict[str, Any] = json.loads(read_text(path / STATE))
    if state["format"] not in READ_FORMATS:
        raise InputError(
            f"checkpoint {path} has format {state['format']}, this Moesaic reads "
            f"{' and '.join(map(str, READ_FORMATS))}: use the version that wrote it"
        )
    if type(state["step"]) is not int or state["step"] != CHECKPOINTS.step_of(path):
        raise DamagedError(f"{STATE} is of step {state['step']}: rename the folder as it was")
    if type(state["vocab_size"]) is not int:
        raise DamagedError(f"{STATE} has a vocabulary of {state['vocab_size']!r}")
    return state


def _listed_sums(path: Path) -> dict[str, str]:
    """Return the checksums in a checkpoint's `SHA256SUMS`, by path."""
    sums = {}
    for line in read_text(path / SUMS).splitlines():
        value, _, name = line.partition("  ")
        # any other name could lead out of the folder, to a file that would then be read
        if not CHECKPOINTS.is_own(name):
            raise DamagedError(f"{SUMS} lists {name!r:.100}, which no checkpoint has")
        sums[name] = value
    if kind_of(path / SHARDS) == "a symbolic link":
        raise DamagedError(f"{SHARDS} is a link")
    return sums
