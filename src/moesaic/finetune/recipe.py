"""Fine-tunes a model of transformers by its Trainer: what is loaded, what is trained, and what a checkpoint holds.

Trainer would save the optimizer of the first rank alone. Here each rank saves its own states, and a checkpoint counts once all
ranks have saved theirs. The same number of ranks goes on from it with the same bits.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.errors import TrainingError
from moesaic.files import write, writing
from moesaic.finetune.checks import device_of, quantization_of, read_tokenizer, require_model
from moesaic.finetune.data import sequences
from moesaic.finetune.loss import loss_in_parts
from moesaic.finetune.merge import write_merged
from moesaic.finetune.options import (
    COMPLETE,
    MERGED,
    RUN,
    FinetuneOptions,
    require_data,
    require_folder,
)
from moesaic.finetune.targets import Targets
from moesaic.program.plan import Plan
from moesaic.train.progress import TrainingProgress
from moesaic.transformers import (
    FourBitExpertsConfig,
    adopt_adapters,
    distributed_config,
    register_plan,
)
from moesaic.weights.load import load_model

FIXED = "moesaic_finetune"
"""Name of the plan of `--plan default` among transformers' implementations."""


def require(options: FinetuneOptions, world: int) -> None:
    """Raise InputError if a run cannot succeed; reads no weights, and writes nothing."""
    require_data(options.data)
    require_folder(options, world)
    require_model(options, world)


def finetune(options: FinetuneOptions, world: int) -> None:
    """Fine-tune a model; all ranks call it together, and the first one writes the results.

    Raises:
        InputError: see `require` and `sequences`.
        TrainingError: the loss is no longer finite.
    """
    require(options, world)
    is_first, folder, device = (
        world == 1 or dist.get_rank() == 0,
        Path(options.out),
        device_of(options),
    )
    transformers.logging.set_verbosity_error()
    if not is_first:
        transformers.logging.disable_progress_bar()
    tokenizer = read_tokenizer(options.model)
    rows = sequences(options.data, tokenizer, options.length, options.batch)
    load = (
        load_model
        if quantization_of(options.model)
        else transformers.AutoModelForCausalLM.from_pretrained
    )
    model = adapt(load(options.model, **loading(options, world, device)), options)
    if is_first:  # only now, so that a run that cannot load leaves nothing
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / RUN, json.dumps(options.kept(world), indent=1) + "\n")
    train(options, model, rows, world, device)
    model.save_pretrained(str(folder), is_main_process=is_first)
    if is_first:
        tokenizer.save_pretrained(folder)
    if options.merge:
        write_merged(
            model, options.model, folder / MERGED, getattr(torch, options.dtype), tokenizer
        )


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
    """Return a loaded model with new adapters, of which each rank keeps those of its own experts."""
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


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    found = {
        int(path.parent.name.rpartition("-")[2]): path.parent
        for path in folder.glob(f"checkpoint-*/{COMPLETE}")
    }
    return found[max(found)] if found else None


def train(
    options: FinetuneOptions, model: peft.PeftModel, rows: Tensor, world: int, device: str
) -> None:
    """Train the adapters; all ranks call it together.

    Args:
        rows: (sequences, length), the same on all ranks.

    Raises:
        TrainingError: the loss is no longer finite.
    """
    loss_in_parts(model, rows[:1, :64].to(device))
    accumulation = options.batch // (world * options.micro_batch)
    given = transformers.TrainingArguments(
        output_dir=options.out,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=accumulation,
        max_steps=options.steps or -1,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        weight_decay=0.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=options.save_every,
        save_total_limit=2,
        save_only_model=True,
        seed=options.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=device == "cpu",
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
    )
    start = newest(Path(options.out)) if options.resume else None
    steps = options.steps or options.epochs * len(rows) // options.batch
    done = 0 if start is None else int(start.name.rpartition("-")[2])
    if start is not None and done >= steps:
        model.load_adapter(str(start), "default", is_trainable=True)
        return
    with TrainingProgress(steps, done, label="fine-tuning") as progress:
        trainer = transformers.Trainer(
            model=model,
            args=given,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[_Keep(world, start), _Show(progress, options.batch * options.length)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=None if start is None else str(start))


class _Keep(transformers.TrainerCallback):
    """Saves each rank's part of the optimizer in a checkpoint, and loads it from the checkpoint `start`."""

    def __init__(self, world: int, start: Path | None) -> None:
        self._rank, self._world, self._start = dist.get_rank() if world > 1 else 0, world, start

    def on_save(
        self,
        args: Any,
        state: Any,
        control: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Save this rank's states; then the first rank marks the checkpoint as complete."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
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
        with writing(folder / self._name) as file:
            torch.save(
                {"optimizer": own, "schedule": lr_scheduler.state_dict(), "random": random}, file
            )
        if self._world > 1:
            dist.barrier()
        if self._rank == 0:
            write(folder / COMPLETE, "{}\n")

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
        if self._start is None:
            return
        kept = torch.load(self._start / self._name, weights_only=True, map_location="cpu")
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
        self._start = None

    @property
    def _name(self) -> str:
        return f"states-{self._rank}-of-{self._world}.pt"


class _Show(transformers.TrainerCallback):
    """Shows losses and tokens per second, and ends a run whose loss is not finite."""

    def __init__(self, progress: TrainingProgress, tokens: int) -> None:
        self._progress, self._tokens, self._before = progress, tokens, time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show a step."""
        if "loss" not in logs:
            return
        now = time.perf_counter()
        speed, self._before = self._tokens / (now - self._before), now
        if not abs(logs["loss"]) < float("inf"):
            raise TrainingError(
                f"the loss of step {state.global_step} is {logs['loss']}: go on from the newest checkpoint with a lower "
                "--learning-rate, in another --out"
            )
        if state.is_world_process_zero:
            self._progress.advance(
                state.global_step, f"loss {logs['loss']:.4f}  {speed:,.0f} tokens/s"
            )
