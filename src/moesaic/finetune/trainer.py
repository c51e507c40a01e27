"""transformers' Trainer as fine-tuning runs use it: checkpoints are ours, a signal saves, and a
loss that is not finite ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

from moesaic.errors import InputError, TrainingError
from moesaic.finetune.states import NAMES, numbered, require_states, write_states
from moesaic.train.progress import TrainingProgress
from moesaic.train.ranks import Ranks
from moesaic.transformers.in_flight import both


class AdapterTrainer(transformers.Trainer):
    """transformers' Trainer with checkpoints of ours: it writes no file, and reads the trainer's
    state alone."""

    save_as: Callable[[Any], None]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as the run does."""
        self.save_as(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: the adapters are loaded already."""


class FlyingTrainer(AdapterTrainer):
    """The same with a micro-batch's halves in flight, up to the hidden states: FSDP2 would take the
    head's weight away after one half's loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this rank's part of the mean loss of a step, times the number of ranks, (); or
        what `Trainer` returns if outputs are asked for."""
        if return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def hidden_states(half: torch.Tensor) -> torch.Tensor:
            """Return the hidden states of half a micro-batch. They stand where a model returns its
            logits, since `loss_in_parts` made the head pass them through."""
            found: torch.Tensor = model(input_ids=half, use_cache=False).logits
            return found

        hidden = torch.cat(both(hidden_states, inputs["input_ids"].chunk(2)))
        base = model.get_base_model()
        # `loss_in_parts` also put a loss here that multiplies hidden states by the head itself.
        # Where it leaves a model as it is, `hidden` are logits, which the model's own loss takes.
        loss = base.loss_function(
            logits=hidden,
            labels=inputs["labels"],
            vocab_size=base.config.get_text_config().vocab_size,
            num_items_in_batch=num_items_in_batch,
        )
        # Gradients become their mean over the ranks, which divides by the number of ranks again.
        return loss * self.accelerator.num_processes


def write_own(optimizer: Any, schedule: Any, names: list[str] | None, path: Path) -> None:
    """Write a rank's states of the training, with the names of its adapters if it has a stage."""
    own = optimizer.state_dict()
    local: dict[int, dict[str, Any]] = {}  # the state of each parameter, by its number
    for number, state in own["state"].items():
        local[number] = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
    own["state"] = local
    random = [torch.get_rng_state()]  # of the CPU, then of each GPU
    if torch.cuda.is_available():
        random += torch.cuda.get_rng_state_all()
    states = {"optimizer": own, "schedule": schedule.state_dict(), "random": random}
    if names is not None:
        states[NAMES] = names
    write_states(path, states)


def _give(states: dict[str, Any], optimizer: Any, lr_scheduler: Any) -> None:
    """Give optimizer, schedule and random numbers the states of a checkpoint."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, values in states["optimizer"]["state"].items():
        parameter = parameters[number]
        if isinstance(parameter, DTensor):
            _distribute_like(parameter, values)
    optimizer.load_state_dict(states["optimizer"])
    lr_scheduler.load_state_dict(states["schedule"])
    # of the CPU, then of each GPU, as `write_own` has them
    torch.set_rng_state(states["random"][0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["random"][1:])


class Keep(transformers.TrainerCallback):
    """Gives the first step the states of a checkpoint, and saves and ends a run that a signal asks
    to.

    Args:
        start: the checkpoint to go on from; None to begin.
        states: this rank's states of it.
        asked: gets the names of signals that this rank received.
        ranks: the ranks of the run.
    """

    def __init__(
        self, start: Path | None, states: dict[str, Any] | None, asked: list[str], ranks: Ranks
    ) -> None:
        self._start = start
        self._states: dict[str, Any] | None = states
        self._asked = asked
        self._ranks = ranks
        self.stopped_by: str | None = None
        """The signal that ended the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and show as often as this command says, not as that which wrote the checkpoint
        did."""
        state.save_steps = args.save_steps
        state.logging_steps = args.logging_steps

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Load this rank's states before the first step."""
        if self._states is None:
            return
        states = self._states
        self._states = None
        with self._ranks.together():  # what one rank raises, all raise
            try:
                states["optimizer"] = numbered(states["optimizer"], optimizer, model)
                require_states(states, optimizer)
                _give(states, optimizer, lr_scheduler)
            except Exception as error:  # of states of other types
                reason = " ".join(str(error).split())
                raise InputError(
                    f"{self._start}: its states are none of this run ({reason:.200}): take it "
                    "away, so that an older one is taken"
                ) from error

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and end if any rank received a signal."""
        # (the signal, the same on all ranks; whether one still writes a checkpoint)
        self.stopped_by = self._ranks.agree(self._asked)[0]
        if self.stopped_by is not None:
            control.should_save = True
            control.should_training_stop = True


def _distribute_like(parameter: DTensor, values: dict[str, Any]) -> None:
    """Make an optimizer's state of a parameter DTensors like the parameter: of the tensors in it,
    which are this rank's parts. Numbers, (), stay."""
    for name, value in values.items():
        if value.dim():
            local = value.to(parameter.device)
            values[name] = DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, run_check=False
            )


class Show(transformers.TrainerCallback):
    """Shows losses and tokens per second, and ends a run whose loss is not finite.

    Args:
        progress: shows them.
        tokens: those of a step, over all ranks.
    """

    def __init__(self, progress: TrainingProgress, tokens: int) -> None:
        self._progress = progress
        self._tokens = tokens
        self._before = time.perf_counter()  # when the step before ended

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show a step."""
        if "loss" not in logs:  # of the whole training, at its end
            return
        now = time.perf_counter()
        speed = self._tokens / (now - self._before)
        self._before = now
        if not abs(logs["loss"]) < float("inf"):  # so that a NaN is refused too
            raise TrainingError(
                f"the loss of step {state.global_step} is {logs['loss']}: go on from the newest "
                "checkpoint with a lower --learning-rate, in another --out"
            )
        if state.is_world_process_zero:
            self._progress.advance(
                state.global_step, f"loss {logs['loss']:.4f}  {speed:,.0f} tokens/s"
            )
