"""Checkpoints of transformers' `Trainer` from which a run goes on, on as many ranks as there are
then.

transformers refuses to checkpoint the optimizer of a model that `distributed_config` shards, and
cannot read weights back into one. Even in one process it leaves out, with a warning, weights whose
names in files differ from the model's: the experts and routers of many families. Here
`from_pretrained` reads the weights, and the optimizer's tensors are kept in safetensors files under
the parameters' names. No file is a pickle.

A checkpoint is *sealed* by a last file with the checksums of all others. A model is *spread* if
`distributed_config` shards it over ranks, whose parameters are then DTensors. `typed`
says that a user typed the path of a folder, which may then be a link.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed import load_optimizer_distributed

from moesaic.errors import InputError
from moesaic.files import kind_of, read_text, write
from moesaic.resuming import COMPLETE, Checkpoints, DamagedError, checksum, require_sealed, seal
from moesaic.storage.nested import dumped, loaded, read_nested, write_nested
from moesaic.storage.shards import IndexReader, read_index, write_tensors

OPTIMIZER = "optimizer"
"""Folder of a checkpoint that holds the optimizer's state: tensors of all ranks, and `OPTIONS`."""
OPTIONS = "options.json"
"""What the optimizer's folder holds besides tensors: learning rates and the like, by parameter."""
SCHEDULER = "scheduler.json"
"""The schedule's file of a checkpoint."""
ARGUMENTS = "training_args.bin"
EARLIER_SCHEDULER = "scheduler.pt"
"""A pickle of the arguments, which `Trainer` leaves; and the schedule's file of earlier
versions."""
CHECKPOINTS = Checkpoints(
    name=re.compile(r"checkpoint-([1-9][0-9]{0,11})"),
    final="checkpoint-",
    replaced="",
    files=(),
    texts=(),
)
"""What `Trainer` calls its checkpoints. It deletes old ones itself."""
T = TypeVar("T")


class Resumable:
    """Makes a trainer resume exactly, also a model sharded by `distributed_config`, also on another
    number of ranks.

    Put it before a trainer's class: `class ResumableTrainer(Resumable, Trainer): pass`. Keep the
    product of ranks, `per_device_train_batch_size` and `gradient_accumulation_steps`, so that the
    run goes on with the batch that follows.

    Checkpoints hold the checksums of their files. One that is damaged is not resumed.

    Raises:
        InputError: a checkpoint to resume from is damaged, or was written by a trainer without this
            class, or the trainer adds adapters to a model on several ranks and is to save more than
            the model.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **options: Any) -> None:
        if args is None or not isinstance(model, PreTrainedModel):
            super().__init__(model, args, *others, **options)  # type: ignore[call-arg]
            return
        # while save_only_model is False, transformers refuses a sharded model here
        save_only_model = args.save_only_model
        args.save_only_model = True
        try:
            super().__init__(model, args, *others, **options)  # type: ignore[call-arg]
        finally:
            args.save_only_model = save_only_model
        is_spread = getattr(model, "is_distributed_loading_by_transformers", False)
        has_added_adapters = self.model is not model  # the trainer has wrapped it
        if is_spread and has_added_adapters and not save_only_model:
            raise InputError(
                "Resumable: adapters on several ranks are not resumed: pass save_only_model=True"
            )

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any
    ) -> Any:
        """Train as `Trainer.train` does; with `resume_from_checkpoint=True` from the newest
        undamaged checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _on_first(self._newest)
        return super().train(resume_from_checkpoint, *others, **options)  # type: ignore[misc]

    def _newest(self) -> str | bool:
        """Return the newest undamaged checkpoint; True if there is none at all, of which `Trainer`
        itself complains."""
        folder = Path(self.args.output_dir)
        if not CHECKPOINTS.listed(folder, typed=True):
            return True
        remedy = "train anew, or put an undamaged one back"
        return str(CHECKPOINTS.newest(folder, _undamaged, warnings.warn, remedy, typed=True))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint and seal it with the checksums of its files, which the ranks share
        out."""
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")  # type: ignore[attr-defined]
        rank, world = _rank_and_world()
        if world > 1:
            dist.barrier()  # all ranks have written their files
        files = sorted(
            path
            for path in folder.rglob("*")
            if kind_of(path) == "a file" and path.name != COMPLETE
        )
        own = {path.relative_to(folder).as_posix(): checksum(path) for path in files[rank::world]}
        of_ranks = [own]
        if world > 1:
            of_ranks = [{} for _ in range(world)]
            dist.all_gather_object(of_ranks, own)
        if self.args.should_save:
            checksums: dict[str, Any] = {}
            for of_rank in of_ranks:
                checksums |= of_rank
            seal(folder, checksums)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Read a checkpoint's weights as `from_pretrained` does, under the names of its files;
        first compare its checksums."""
        _on_first(lambda: _require_undamaged(Path(resume_from_checkpoint)))
        if not isinstance(self.model, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        # FSDP2 gives a model a class of its own, derived from the model's and from FSDPModule.
        classes: list[Any] = list(type(self.model).__mro__)
        # the first of the others is the model's own
        of_model = [each for each in classes if not issubclass(each, FSDPModule)]
        distributed = getattr(self.model.config, "distributed_config", None)
        # a copy, so that the model's own stays as it is
        options = {} if distributed is None else {"distributed_config": replace(distributed)}
        read = of_model[0].from_pretrained(
            resume_from_checkpoint, dtype=self.model.dtype, **options
        )
        self.model.load_state_dict(read.state_dict())

    def _load_best_model(self) -> None:
        """Load the best checkpoint as `_load_from_checkpoint` does, which knows a model that
        transformers spread."""
        if not isinstance(self.model, PreTrainedModel):
            super()._load_best_model()  # type: ignore[misc]
            return
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model without the pickle of the arguments that `Trainer` leaves beside it."""
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        (Path(output_dir or self.args.output_dir) / ARGUMENTS).unlink(missing_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer and the schedule; overrides `Trainer`'s method."""
        _save_optimizer(
            self.model, _inner(self.optimizer), Path(output_dir) / OPTIMIZER, self.args.should_save
        )
        if self.args.should_save:
            write(Path(output_dir) / SCHEDULER, dumped(self.lr_scheduler.state_dict()) + "\n")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer and the schedule; overrides `Trainer`'s method. Reads the files that
        `_save_optimizer_and_scheduler` writes, or those of the earlier format."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        is_old_format = _is_old_format(folder)
        has_schedule = is_old_format or (folder / SCHEDULER).is_file()
        if not (folder / OPTIMIZER).is_dir() or not has_schedule:
            raise InputError(
                f"{folder}: has no {OPTIMIZER}/ and {SCHEDULER} of a Resumable trainer: resume a "
                "checkpoint that one wrote with save_only_model=False, or load its weights by "
                "from_pretrained and start anew"
            )
        if is_old_format:
            with _without_warning_of_one_process():
                load_optimizer_distributed(
                    self.model, _inner(self.optimizer), str(folder / OPTIMIZER)
                )
            schedule = torch.load(folder / EARLIER_SCHEDULER, map_location="cpu", weights_only=True)
        else:
            _load_optimizer(self.model, _inner(self.optimizer), folder / OPTIMIZER)
            schedule = read_json(folder / SCHEDULER)
        self.lr_scheduler.load_state_dict(_for_groups(schedule, len(self.optimizer.param_groups)))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the states of random numbers without pickle."""
        numpy_state: Any = np.random.get_state()
        algorithm, keys, *others = numpy_state  # the keys are uint32, which torch does not save
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": (algorithm, torch.from_numpy(keys.astype("int64")), *others),
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        write_nested(self._random_states(Path(output_dir)), state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the states of random numbers that `_save_rng_state` saved."""
        if checkpoint is None:
            return
        path = self._random_states(Path(checkpoint))
        if not path.is_file():  # of fewer ranks, or of an earlier version
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            return
        state = read_nested(path)
        algorithm, keys, *others = state["numpy"]
        random.setstate(state["python"])
        np.random.set_state((algorithm, keys.numpy().astype("uint32"), *others))
        torch.set_rng_state(state["cpu"])
        # states of another number of devices would not be those of the same ones
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])

    def _random_states(self, folder: Path) -> Path:
        """Return the file of this rank's random states."""
        return folder / f"random-{self.args.process_index}-of-{self.args.world_size}.safetensors"


def _save_optimizer(model: Any, optimizer: Any, folder: Path, is_first: bool) -> None:
    """Save an optimizer's state under the parameters' names. All ranks call it together; the first
    one also writes what is no tensor."""
    tensors = {}
    options = {}
    for name, value in _states(model, optimizer).items():
        if isinstance(value, Tensor):
            tensors[name] = _contiguous(value)
        else:
            options[name] = value
    write_tensors(folder, tensors, is_alone=_is_alone())
    if is_first:
        write(folder / OPTIONS, dumped(options) + "\n")


def _load_optimizer(model: Any, optimizer: Any, folder: Path) -> None:
    """Load what `_save_optimizer` saved, on any number of ranks. All ranks call it together."""
    state = _states(model, optimizer)
    # What is read into: the tensors, or blocks of DTensors, whose old placements then get the
    # values.
    tensors = {
        name: _contiguous(value) for name, value in state.items() if isinstance(value, Tensor)
    }
    options = read_json(folder / OPTIONS)
    stored = _stored(folder)
    for name, value in state.items():
        is_stored = name in (stored if isinstance(value, Tensor) else options)
        if not is_stored:
            raise InputError(
                f"{folder}: has no {name}: it is of another model or optimizer, resume with "
                "those that wrote it"
            )

    state_dict_loader.load(tensors, storage_reader=IndexReader(folder), no_dist=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            state[name] = options[name]
        elif isinstance(value, DTensor) and tensors[name] is not value:  # read as other blocks
            state[name] = tensors[name].redistribute(placements=value.placements)
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""An optimizer's state by names that do not depend on how parameters are grouped, which depends on
the mesh."""


def _states(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state by name: tensors, and options of each parameter's group."""
    return dict(get_optimizer_state_dict(model, optimizer, options=FLAT))


def _contiguous(value: Any) -> Any:
    """Return a DTensor whose part on each rank is one block, as files store them; anything else
    unchanged."""
    if not isinstance(value, DTensor):
        return value
    # FSDP2 after expert parallelism shards a dimension that is sharded already, in strides.
    placements = tuple(
        Shard(placement.dim) if hasattr(placement, "dim") else placement
        for placement in value.placements
    )
    if placements == value.placements:
        return value
    return value.redistribute(placements=placements)


def _is_alone() -> bool:
    """Whether no other ranks take part."""
    return not (dist.is_available() and dist.is_initialized())


def _stored(folder: Path) -> Collection[str]:
    """Return the names of the tensors in a folder."""
    try:
        return read_index(folder)
    except OSError as error:
        raise InputError(
            f"{folder}: its list of tensors cannot be read ({error.strerror}): resume an "
            "earlier checkpoint"
        ) from error


def read_json(path: Path) -> Any:
    """Return a state in JSON.

    Raises:
        InputError: it cannot be read, or is damaged.
    """
    try:
        return loaded(read_text(path))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: cannot be read, or is damaged ({reason:.200}): resume an earlier checkpoint"
        ) from error


def _require_undamaged(folder: Path) -> None:
    """Raise InputError for a damaged or incomplete checkpoint of a Resumable trainer; those of
    others have no checksums."""
    try:
        _undamaged(folder)
    except DamagedError as damage:
        raise InputError(
            f"{folder}: the checkpoint is damaged ({damage}): resume an older one; "
            "resume_from_checkpoint=True finds it"
        ) from damage


def _undamaged(folder: Path) -> Path:
    """Return a checkpoint that matches its checksums; DamagedError if it does not. Those of earlier
    versions, with the schedule in an archive of torch, and those of other trainers have none."""
    is_own = (folder / OPTIMIZER).is_dir() and not _is_old_format(folder)
    if is_own or (folder / COMPLETE).exists():
        require_sealed(folder)
    return folder


def _is_old_format(folder: Path) -> bool:
    """Return whether an earlier version of this class wrote a checkpoint, in its own format."""
    return (folder / EARLIER_SCHEDULER).is_file() and not (folder / SCHEDULER).is_file()


def _rank_and_world() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _on_first(question: Callable[[], T]) -> T:
    """Return on all ranks what the first one answers, or raise the InputError that it raises."""
    rank, world = _rank_and_world()
    answer: Any = None
    refusal: str | None = None
    if rank == 0:
        try:
            answer = question()
        except InputError as error:
            refusal = str(error)
    if world > 1:
        message = [answer, refusal]
        dist.broadcast_object_list(message, 0)
        answer, refusal = message
    if refusal is not None:
        raise InputError(refusal)
    found: T = answer
    return found


def _for_groups(schedule: dict[str, Any], num_groups: int) -> dict[str, Any]:
    """Return a schedule's state for another number of parameter groups: `Trainer` makes one for
    each mesh of the parameters."""
    num_written = len(schedule["_last_lr"])
    if num_written == num_groups:
        return schedule
    # entries with a value for each group
    of_groups = {
        key: values
        for key, values in schedule.items()
        if isinstance(values, list) and len(values) == num_written
    }
    differing = [
        key for key, values in of_groups.items() if any(value != values[0] for value in values)
    ]
    if differing:
        raise InputError(
            f"{SCHEDULER}: parameter groups differ in {', '.join(differing)}, and there are "
            f"{num_written} of them in the checkpoint but {num_groups} now: resume on as many "
            "ranks as before"
        )
    return schedule | {key: values[:1] * num_groups for key, values in of_groups.items()}


@contextmanager
def _without_warning_of_one_process() -> Iterator[None]:
    """Silence torch's warning, outside a process group, that it assumes one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _inner(optimizer: Any) -> Any:
    """Return torch's optimizer in accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
