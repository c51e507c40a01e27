"""Fine-tunes a model of transformers by its Trainer: what is loaded, what is trained, and what a
checkpoint holds.

Trainer would save the optimizer of the first rank alone. Here each rank saves its own states, and a
checkpoint counts once all ranks have saved theirs. The same number of ranks goes on from it with
the same bits.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.errors import InputError, TrainingError, in_one_line
from moesaic.finetune.checks import device_of, require_model
from moesaic.finetune.data import sequences
from moesaic.finetune.folder import (
    ADAPTERS,
    CHECKPOINTS,
    OF_PEFT,
    TRAINER_STATE,
    FinetuneFolder,
    require_folder,
)
from moesaic.finetune.loss import loss_in_parts
from moesaic.finetune.merge import write_merged
from moesaic.finetune.options import MERGED, FinetuneOptions, require_data
from moesaic.finetune.states import read_states, states_name, write_states
from moesaic.finetune.targets import Targets
from moesaic.program.plan import Plan
from moesaic.resuming import DamagedError
from moesaic.train.launch import stop_requests
from moesaic.train.progress import TrainingProgress
from moesaic.train.ranks import Ranks
from moesaic.transformers import (
    FourBitExpertsConfig,
    adopt_adapters,
    distributed_config,
    register_plan,
)
from moesaic.weights.contents import contents_of
from moesaic.weights.layout import first_names
from moesaic.weights.load import load_model
from moesaic.weights.source import read_tokenizer, source_folder

COMPARES = {"auto": None, "yes": True, "no": False}
"""Whether --merge compares logits, by --logits; None if the size decides."""
FIXED = "moesaic_finetune"
"""Name of the plan of `--plan default` among transformers' implementations."""


def require(options: FinetuneOptions, world: int) -> None:
    """Raise InputError if a run cannot succeed; reads no weights, and writes nothing."""
    require_data(options.data)
    require_folder(options, world)
    require_model(options, world)


def finetune(options: FinetuneOptions, world: int) -> bool:
    """Fine-tune a model; all ranks call it together, and the first one writes the results.

    Returns:
        whether the run is done; False if a signal stopped it, after it was saved.

    Raises:
        InputError: see `require`, `sequences` and `FinetuneFolder`.
        TrainingError: the loss is no longer finite.
    """
    require(options, world)
    ranks = Ranks.of_world()
    device = device_of(options)
    transformers.logging.set_verbosity_error()
    if not ranks.is_first:
        transformers.logging.disable_progress_bar()
    source = source_folder(options.model)
    tokenizer = read_tokenizer(source, options.model)
    rows = sequences(options.data, tokenizer, options.length, options.batch)
    contents = {}
    with ranks.together():
        if ranks.is_first:
            contents = {"data": hash_of(rows), "model": contents_of(source)}
    folder = FinetuneFolder(options, ranks, contents)
    try:
        start = folder.claim(say)
        folder.require_places([*OF_PEFT, *tokenizer_files(tokenizer)])
        model = adapt(load_model(source, **loading(options, world, device)), options)
        model.peft_config["default"].base_model_name_or_path = options.model
        folder.begin()  # only now, so that a run that cannot load leaves nothing
        run = Run(options, model, folder, ranks, device)
        if not run.train(rows, start):
            return False
        folder.place("results", partial(_save_results, model, tokenizer, ranks))
        if options.merge:
            run.restore_logits()
            dtype, compares = getattr(torch, options.dtype), COMPARES[options.logits]
            merge = partial(
                write_merged, model, source, dtype=dtype, tokenizer=tokenizer, compares=compares
            )
            folder.place("merged", merge, within=MERGED)
        return True
    finally:
        folder.release()


def say(line: str) -> None:
    """Print a line on standard error."""
    print(in_one_line(f"moesaic finetune: {line}"), file=sys.stderr, flush=True)


def hash_of(rows: Tensor) -> str:
    """Return a hash of sequences, (sequences, length) int64."""
    digest = hashlib.sha256(str(list(rows.shape)).encode())
    for part in rows.split(4096):
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def tokenizer_files(tokenizer: Any) -> list[str]:
    """Return the names of the files that a tokenizer is saved in."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        return sorted(path.name for path in Path(place).iterdir())


def _save_results(model: peft.PeftModel, tokenizer: Any, ranks: Ranks, folder: Path) -> None:
    """Save adapters and tokenizer into a new folder."""
    model.save_pretrained(str(folder), is_main_process=ranks.is_first, save_embedding_layers=False)
    if ranks.is_first:
        tokenizer.save_pretrained(folder)


def loading(options: FinetuneOptions, world: int, device: str) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` loads a rank's part of the frozen model."""
    found: dict[str, Any] = {
        "dtype": getattr(torch, options.dtype),
        "experts_implementation": "moesaic",
    }
    if options.method != "lora":
        found["quantization_config"] = FourBitExpertsConfig(double=options.method == "qlora-double")
    if world == 1:
        return found | {"device_map": device}
    if options.plan == "auto":
        return found | {"distributed_config": distributed_config(world)}
    register_plan(FIXED, Plan())
    return found | {"distributed_config": distributed_config(world, ep_implementation=FIXED)}


def adapt(base: Any, options: FinetuneOptions) -> peft.PeftModel:
    """Return a loaded model with new adapters, of which each rank keeps those of its own
    experts."""
    targets = Targets(base)
    torch.manual_seed(options.seed)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=targets.modules,
        target_parameters=targets.parameters,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config, low_cpu_mem_usage=True)
    adopt_adapters(model)
    return model


class Run:
    """The training of adapters by transformers' Trainer, into checkpoints of ours; all ranks use it
    together."""

    def __init__(
        self,
        options: FinetuneOptions,
        model: peft.PeftModel,
        folder: FinetuneFolder,
        ranks: Ranks,
        device: str,
    ) -> None:
        self._options = options
        self._model = model
        self._folder = folder
        self._ranks = ranks
        self._device = device
        self._restore: Callable[[], None] | None = None

    def train(self, rows: Tensor, start: Path | None) -> bool:
        """Train, from a checkpoint if one is given. Return whether the last step was taken; False
        after a signal.

        Args:
            rows: (sequences, length), the same on all ranks.

        Raises:
            InputError: the checkpoint does not fit the model, or no checkpoint can be written.
            TrainingError: the loss is no longer finite.
        """
        options = self._options
        states: dict[str, Any] | None = None
        if start is not None:
            with self._ranks.together():
                states = self._loaded(start)
        self._restore = loss_in_parts(self._model, rows[:1, :64].to(self._device))
        steps = options.steps or options.epochs * len(rows) // options.batch
        done = 0 if start is None else CHECKPOINTS.step_of(start)
        if done >= steps:
            return True
        with (
            TrainingProgress(steps, done, label="fine-tuning") as progress,
            stop_requests() as asked,
        ):
            keep = _Keep(states, asked, self._ranks)
            trainer = _Trainer(
                model=self._model,
                args=self._arguments(),
                train_dataset=[{"input_ids": row, "labels": row} for row in rows],
                callbacks=[keep, _Show(progress, options.batch * options.length)],
            )
            trainer.save_as = self._save
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
            step = trainer.state.global_step
            if keep.stopped_by is None or step >= steps:
                return True
            if self._ranks.is_first:
                resume = "" if options.resume else " and --resume"
                progress.say(
                    f"stopped by {keep.stopped_by} after step {step}, saved; go on with the "
                    f"same command{resume}"
                )
            return False

    def restore_logits(self) -> None:
        """Make the model compute logits again, in place of the loss in parts."""
        if self._restore is not None:
            self._restore()

    def _loaded(self, start: Path) -> dict[str, Any]:
        """Give the model the adapters of a checkpoint, and return this rank's other states of
        it."""
        try:
            states = read_states(start / states_name(self._ranks.rank, self._ranks.world))
            adapters = load_file(start / ADAPTERS)
            found: Any = peft.set_peft_model_state_dict(
                self._model, adapters, adapter_name="default"
            )
        except DamagedError as error:
            raise InputError(
                f"{start}: {error}: take it away, so that an older one is taken"
            ) from error
        except Exception as error:  # of a file of other tensors
            reason = " ".join(str(error).split())
            raise InputError(
                f"{start / ADAPTERS}: holds no adapters of this run ({reason:.200}): take the "
                "checkpoint away"
            ) from error
        lost = [name for name in (*found.missing_keys, *found.unexpected_keys) if "lora_" in name]
        if lost:
            raise InputError(
                f"{start / ADAPTERS}: lacks {first_names(lost)}: take the checkpoint away"
            )
        return states

    def _arguments(self) -> transformers.TrainingArguments:
        """Return the settings of transformers' Trainer, which saves nothing by itself."""
        options = self._options
        return transformers.TrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.batch // (self._ranks.world * options.micro_batch),
            max_steps=options.steps or -1,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,
            weight_decay=0.0,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_steps=options.save_every,
            save_only_model=True,
            seed=options.seed,
            report_to="none",
            disable_tqdm=True,
            use_cpu=self._device == "cpu",
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": False},
        )

    def _save(self, trainer: transformers.Trainer) -> None:
        """Write a checkpoint."""

        def write_into(folder: Path) -> None:
            self._model.save_pretrained(
                str(folder), is_main_process=self._ranks.is_first, save_embedding_layers=False
            )
            if self._ranks.is_first:
                trainer.state.save_to_json(str(folder / TRAINER_STATE))

        own = partial(_write_own, trainer.optimizer, trainer.lr_scheduler)
        self._folder.save(trainer.state.global_step, write_into, own)


class _Trainer(transformers.Trainer):
    """transformers' Trainer with checkpoints of ours: it writes no file, and reads the trainer's
    state alone."""

    save_as: Callable[[Any], None]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_as(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: the adapters are loaded already."""


def _write_own(optimizer: Any, schedule: Any, path: Path) -> None:
    """Write a rank's states of the training."""
    own = optimizer.state_dict()
    own["state"] = {
        number: {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in each.items()
        }
        for number, each in own["state"].items()
    }
    random = [
        torch.get_rng_state(),
        *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ()),
    ]
    write_states(path, {"optimizer": own, "schedule": schedule.state_dict(), "random": random})


class _Keep(transformers.TrainerCallback):
    """Gives the first step the states of a checkpoint, and saves and ends a run that a signal asks
    to.

    Args:
        states: this rank's states of the checkpoint to go on from.
        asked: gets the names of signals that this rank received.
    """

    def __init__(self, states: dict[str, Any] | None, asked: list[str], ranks: Ranks) -> None:
        self._states: dict[str, Any] | None = states
        self._asked = asked
        self._ranks = ranks
        self.stopped_by: str | None = None
        """The signal that ended the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save as often as this command says, not as that which wrote the checkpoint did."""
        state.save_steps = args.save_steps

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Load this rank's states before the first step."""
        if self._states is None:
            return
        kept = self._states
        self._states = None
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number, values in kept["optimizer"]["state"].items():
            parameter = parameters[number]
            for name, value in values.items() if isinstance(parameter, DTensor) else ():
                if value.dim():
                    local = value.to(parameter.device)
                    values[name] = DTensor.from_local(
                        local, parameter.device_mesh, parameter.placements, run_check=False
                    )
        optimizer.load_state_dict(kept["optimizer"])
        lr_scheduler.load_state_dict(kept["schedule"])
        torch.set_rng_state(kept["random"][0])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(kept["random"][1:])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and end if any rank received a signal."""
        self.stopped_by = self._ranks.agree(self._asked)[0]
        if self.stopped_by is not None:
            control.should_save = True
            control.should_training_stop = True


class _Show(transformers.TrainerCallback):
    """Shows losses and tokens per second, and ends a run whose loss is not finite."""

    def __init__(self, progress: TrainingProgress, tokens: int) -> None:
        self._progress = progress
        self._tokens = tokens
        self._before = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show a step."""
        if "loss" not in logs:
            return
        now = time.perf_counter()
        speed = self._tokens / (now - self._before)
        self._before = now
        if not abs(logs["loss"]) < float("inf"):
            raise TrainingError(
                f"the loss of step {state.global_step} is {logs['loss']}: go on from the newest "
                "checkpoint with a lower --learning-rate, in another --out"
            )
        if state.is_world_process_zero:
            self._progress.advance(
                state.global_step, f"loss {logs['loss']:.4f}  {speed:,.0f} tokens/s"
            )
