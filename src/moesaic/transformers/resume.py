"""Checkpoints of transformers' `Trainer` from which a run goes on, on as many ranks as there are then.

transformers refuses to checkpoint the optimizer of a model that `distributed_config` shards, and cannot read weights back into
one. Even in one process it leaves out, with a warning, weights whose names in files differ from the model's: the experts and
routers of many families. Here `from_pretrained` reads the weights, and torch's distributed checkpoint keeps the optimizer
under the parameters' names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.distributed import load_optimizer_distributed, save_optimizer_distributed

from moesaic.errors import InputError

OPTIMIZER = "optimizer"
"""Folder of a checkpoint that holds the optimizer's state, as torch's distributed checkpoint writes it."""
SCHEDULER = "scheduler.pt"
"""The schedule's file of a checkpoint, as `Trainer` calls it."""


class Resumable:
    """Makes a trainer resume exactly, also a model sharded by `distributed_config`, also on another number of ranks.

    Put it before a trainer's class: `class ResumableTrainer(Resumable, Trainer): pass`. Keep the product of ranks,
    `per_device_train_batch_size` and `gradient_accumulation_steps`, so that the run goes on with the batch that follows.

    Raises:
        InputError: a checkpoint to resume from was written by a trainer without this class, or the trainer adds adapters to a
            model on several ranks and is to save more than the model.
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
        asked, args.save_only_model = (
            args.save_only_model,
            True,
        )  # else transformers refuses a sharded model here
        try:
            super().__init__(model, args, *others, **options)  # type: ignore[call-arg]
        finally:
            args.save_only_model = asked
        if (
            not asked
            and getattr(model, "is_distributed_loading_by_transformers", False)
            and self.model is not model
        ):
            raise InputError(
                "Resumable: adapters on several ranks are not resumed: pass save_only_model=True"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Read a checkpoint's weights as `from_pretrained` does, under the names of its files."""
        if not isinstance(self.model, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        kind: Any = next(
            each for each in type(self.model).__mro__ if not issubclass(each, FSDPModule)
        )
        spread = getattr(self.model.config, "distributed_config", None)
        options = {} if spread is None else {"distributed_config": replace(spread)}
        read = kind.from_pretrained(resume_from_checkpoint, dtype=self.model.dtype, **options)
        self.model.load_state_dict(read.state_dict())

    def _load_best_model(self) -> None:
        if not isinstance(self.model, PreTrainedModel):
            super()._load_best_model()  # type: ignore[misc]
            return
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with _alone():
            save_optimizer_distributed(
                self.model, _inner(self.optimizer), str(Path(output_dir) / OPTIMIZER)
            )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not (folder / OPTIMIZER).is_dir() or not (folder / SCHEDULER).is_file():
            raise InputError(
                f"{folder}: has no {OPTIMIZER}/ and {SCHEDULER} of a Resumable trainer: resume a checkpoint that one wrote "
                "with save_only_model=False, or load its weights by from_pretrained and start anew"
            )
        with _alone():
            load_optimizer_distributed(self.model, _inner(self.optimizer), str(folder / OPTIMIZER))
        schedule = torch.load(folder / SCHEDULER, map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(_for_groups(schedule, len(self.optimizer.param_groups)))


def _for_groups(schedule: dict[str, Any], groups: int) -> dict[str, Any]:
    """Return a schedule's state for another number of parameter groups: `Trainer` makes one for each mesh of the parameters."""
    written = len(schedule["_last_lr"])
    if written == groups:
        return schedule
    of_group = {
        key: value
        for key, value in schedule.items()
        if isinstance(value, list) and len(value) == written
    }
    differ = [key for key, value in of_group.items() if any(each != value[0] for each in value)]
    if differ:
        raise InputError(
            f"{SCHEDULER}: parameter groups differ in {', '.join(differ)}, and there are {written} of them in the checkpoint "
            f"but {groups} now: resume on as many ranks as before"
        )
    return schedule | {key: value[:1] * groups for key, value in of_group.items()}


@contextmanager
def _alone() -> Iterator[None]:
    """Silence torch's word that a checkpoint of one process is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _inner(optimizer: Any) -> Any:
    """Return torch's optimizer in accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
