"""Fine-tunes a model of transformers by its Trainer: what is loaded, what is trained, and what a
checkpoint holds.

Trainer would save the optimizer of the first rank alone. Here each rank saves its own states, and a
checkpoint counts once all ranks have saved theirs. The same number of ranks goes on from it with
the same bits.

With stages (`--pp`) the layers of a model are spread over groups of ranks; the ranks of a stage
share its experts, as all ranks do without stages. In a block of `ranks.together()`, what one rank
raises is raised on all.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

from moesaic.comm.collectives import check_same
from moesaic.comm.mesh import DeviceType, open_transport
from moesaic.errors import InputError, in_one_line
from moesaic.finetune.adapters import save_adapters
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
from moesaic.finetune.staged import StagedModel, StagedTrainer
from moesaic.finetune.stages import StageCut, load_stage, ranks_in_stages
from moesaic.finetune.states import Adapter, adapters_of, names_in, states_of_split
from moesaic.finetune.targets import Targets
from moesaic.finetune.trainer import AdapterTrainer, FlyingTrainer, Keep, Show, write_own
from moesaic.program.plan import Plan
from moesaic.resuming import DamagedError
from moesaic.train.launch import stop_requests
from moesaic.train.machines import once_all_ended
from moesaic.train.progress import TrainingProgress
from moesaic.train.ranks import Ranks, require_same_settings
from moesaic.train.shared_folder import require_shared
from moesaic.transformers import (
    FourBitExpertsConfig,
    adopt_adapters,
    distributed_config,
    register_plan,
)
from moesaic.weights.contents import contents_of
from moesaic.weights.layout import first_names
from moesaic.weights.load import load_model
from moesaic.weights.model_tensors import Architecture
from moesaic.weights.quantized import LOADED
from moesaic.weights.source import read_config, read_tokenizer, save_tokenizer, source_folder

COMPARES = {"auto": None, "yes": True, "no": False}
"""Whether --merge compares logits, by --logits; None if the size decides."""
PACKAGES = ("moesaic", "torch", "transformers", "peft")
"""Packages whose versions must be the same on all ranks."""
FIXED = "moesaic_finetune"
"""Name of the plan of `--plan default` among transformers' implementations."""


@dataclass(frozen=True)
class Ended:
    """How a run has ended."""

    was_stopped: bool = False
    """Whether a signal ended it before its last step."""
    got_signal: bool = False
    """Whether this rank itself got that signal."""


def require(options: FinetuneOptions, world: int) -> None:
    """Raise InputError if a run cannot succeed; reads no weights, and writes nothing."""
    require_data(options.data)
    require_folder(options, world)
    require_model(options, world)


def finetune(options: FinetuneOptions, world: int) -> Ended:
    """Fine-tune a model, and return how that ended; all ranks call it together, and the first one
    writes the results.

    Raises:
        InputError: see `require`, `sequences` and `FinetuneFolder`; on all ranks, if they have
            other options, packages, data or models, or share no folder.
        TrainingError: the loss is no longer finite.
    """
    ranks = Ranks.of_world()
    device = _require_together(options, ranks)
    cut = None  # the stage that this rank has, if there are several
    if options.pp > 1:
        ranks, cut = ranks_in_stages(options.pp, device)
    transformers.logging.set_verbosity_error()
    if not ranks.is_first:
        transformers.logging.disable_progress_bar()
    with ranks.together():
        source = source_folder(options.model)
        tokenizer = read_tokenizer(source, options.model)
        rows = sequences(options.data, tokenizer, options.length, options.batch)
        contents = {"data": hash_of(rows), "model": contents_of(source)}
    _require_same_contents(contents, rows)
    folder = FinetuneFolder(options, ranks, contents)
    try:
        start = folder.claim(say)
        folder.require_places([*OF_PEFT, *tokenizer_files(tokenizer)])
        model = adapted(source, options, device, ranks, cut)
        model.peft_config["default"].base_model_name_or_path = options.model
        folder.begin()  # only now, so that a run that cannot load leaves nothing
        run = Run(options, model, folder, ranks, device)
        ended = run.train(rows, start)
        if ended.was_stopped:
            return ended
        folder.place("results", partial(_save_results, model, tokenizer, ranks))
        if options.merge:
            run.restore_logits()

            def merge(merged: Path) -> None:
                """Write the merged model into a new folder."""
                write_merged(
                    model,
                    source,
                    merged,
                    dtype=getattr(torch, options.dtype),
                    tokenizer=tokenizer,
                    compares=COMPARES[options.logits],
                    ranks=ranks,
                    logits_of=None if run.staged is None else run.staged.logits_on_first,
                )

            folder.place("merged", merge, within=MERGED)
        return ended
    finally:
        folder.release()


def _require_together(options: FinetuneOptions, ranks: Ranks) -> DeviceType:
    """Check that a run can succeed, and that its ranks ask for the same; return the type of their
    devices."""
    with ranks.together():
        device = device_of(options)
    require_same_settings({**options.of_all_ranks(), "device": device}, PACKAGES)
    with ranks.together():
        require(options, ranks.world)
    require_shared(Path(options.out), ranks)
    return device


def _require_same_contents(contents: Mapping[str, str], rows: Tensor) -> None:
    """Raise InputError on all ranks if their models or sequences, (sequences, length), differ,
    under whatever names; `contents` has hashes of both."""
    model = "the model in MODEL"
    data = "what DATA holds"
    fields = {
        model: f"hash {contents['model'][:16]}",
        data: f"{len(rows)} sequences with hash {contents['data'][:16]}",
    }
    advice = {
        model: "give every rank the same model",
        data: "give every rank the same data and tokenizer",
    }
    check_same(open_transport("cpu"), fields, advice=advice)


def say(line: str) -> None:
    """Print a line on standard error."""
    print(in_one_line(f"moesaic finetune: {line}"), file=sys.stderr, flush=True)


def hash_of(rows: Tensor) -> str:
    """Return a hash of sequences, (sequences, length) int64."""
    digest = hashlib.sha256(str(list(rows.shape)).encode())
    for part in rows.split(4096):  # so that only a part is copied
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def tokenizer_files(tokenizer: Any) -> list[str]:
    """Return the names of the files that a tokenizer is saved in."""
    with tempfile.TemporaryDirectory() as place:
        save_tokenizer(tokenizer, Path(place))
        return sorted(path.name for path in Path(place).iterdir())


def _save_results(model: peft.PeftModel, tokenizer: Any, ranks: Ranks, folder: Path) -> None:
    """Save adapters and tokenizer into a new folder."""
    save_adapters(model, ranks, folder)
    if ranks.is_first:
        save_tokenizer(tokenizer, folder)


def adapted(
    source: Path, options: FinetuneOptions, device: str, ranks: Ranks, cut: StageCut | None
) -> peft.PeftModel:
    """Return this rank's part of a frozen model with new adapters.

    Args:
        source: folder of the model.
        device: type of the device.
        cut: the stage that this rank has; None without stages.
    """
    if cut is None:
        base = load_model(source, **loading(options, ranks.world, device))
        return adapt(base, options)
    per_stage = ranks.world // ranks.pp
    base = load_stage(source, cut, **loading(options, per_stage, device))
    whole = Architecture(read_config(source, methods=LOADED)).model  # on the meta device
    group = None if ranks.mesh is None else ranks.mesh.process_group  # the ranks of the stage
    with cut.layers_on_meta(base, whole):
        return adapt(base, options, group)


def loading(options: FinetuneOptions, sharing: int, device: str) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` loads a rank's part of the frozen model,
    whose experts `sharing` ranks share."""
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, options.dtype),
        "experts_implementation": "moesaic",
    }
    if options.method != "lora":
        is_double = options.method == "qlora-double"
        arguments["quantization_config"] = FourBitExpertsConfig(double=is_double)
    if sharing == 1:
        return arguments | {"device_map": device}
    implementation = "moesaic"  # which chooses a plan while it trains
    if options.plan == "default":
        register_plan(FIXED, Plan())
        implementation = FIXED
    arguments["distributed_config"] = distributed_config(
        sharing, fsdp_size=sharing, ep_implementation=implementation
    )
    return arguments


def adapt(
    base: Any, options: FinetuneOptions, group: dist.ProcessGroup | None = None
) -> peft.PeftModel:
    """Return a loaded model with new adapters, of which each rank of the group keeps those of its
    own experts."""
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
    adopt_adapters(model, group)
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
        """What undoes `loss_in_parts`; None if there is nothing to undo."""
        self.staged: StagedModel | None = None
        """The model in stages, if it has some."""
        if ranks.pp > 1:
            self.staged = StagedModel(
                model.get_base_model(),
                ranks,
                tokens=(options.micro_batch, options.length),
                count=self._accumulation,
                device=device,
                flies=options.micro_batches_in_flight == 2,
            )

    def train(self, rows: Tensor, start: Path | None) -> Ended:
        """Train, from a checkpoint if one is given. Return how the training has ended.

        Args:
            rows: (sequences, length), the same on all ranks.

        Raises:
            InputError: the checkpoint does not fit the model, or no checkpoint can be written.
            TrainingError: the loss is no longer finite.
        """
        options = self._options
        states: dict[str, Any] | None = None
        if start is not None:
            adapters = self._adapters_of_all_stages()
            with self._ranks.together():
                states = self._loaded(start, adapters)
        steps = options.steps or options.epochs * len(rows) // options.batch
        done = 0 if start is None else CHECKPOINTS.step_of(start)
        self._restore = loss_in_parts(
            self._model,
            rows[:1, :64].to(self._device),  # a short piece is enough to compare losses
            loss_of=None if self.staged is None else self.staged.loss,
        )
        if done >= steps:
            return Ended()

        with (
            TrainingProgress(steps, done, label="fine-tuning") as progress,
            stop_requests() as signals,  # gets the names of signals that ask to stop
        ):
            keep = Keep(start, states, signals, self._ranks)
            show = Show(progress, options.batch * options.length)
            trainer = self._trainer(rows, [keep, show])
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
            step = trainer.state.global_step
            if keep.stopped_by is None or step >= steps:
                return Ended()
            if self._ranks.is_first:
                resume = "" if options.resume else " and --resume"
                progress.say(
                    f"stopped by {keep.stopped_by} after step {step}, saved; {once_all_ended()}go "
                    f"on with the same command{resume}"
                )
            return Ended(was_stopped=True, got_signal=bool(signals))

    def _trainer(
        self, rows: Tensor, callbacks: list[transformers.TrainerCallback]
    ) -> AdapterTrainer:
        """Return transformers' Trainer over sequences, (sequences, length)."""
        trainer = self._trainer_class()(
            model=self._model,
            args=self._arguments(),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=callbacks,
        )
        trainer.save_as = self._save
        if self.staged is not None and isinstance(trainer, StagedTrainer):
            trainer.staged = self.staged
            trainer.ranks = self._ranks
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def _adapters_of_all_stages(self) -> list[Adapter]:
        """Return the adapters of the whole model, in its order; all ranks call it together."""
        of_ranks = self._ranks.gathered(adapters_of(self._model))
        per_stage = self._ranks.world // self._ranks.pp
        of_stages = of_ranks[::per_stage]  # the ranks of a stage have the same ones
        return [adapter for of_stage in of_stages for adapter in of_stage]

    def restore_logits(self) -> None:
        """Make the model compute logits again, in place of the loss in parts."""
        if self._restore is not None:
            self._restore()

    def _loaded(self, start: Path, all_adapters: list[Adapter]) -> dict[str, Any]:
        """Give the model the adapters of a checkpoint, and return this rank's other states of it,
        those of `states_of_split`."""
        try:
            states = states_of_split(start, self._model, self._ranks, all_adapters)
            tensors = load_file(start / ADAPTERS)
            if self._ranks.pp > 1:
                # PEFT's names in files are without the adapter's, "default"
                own = {each.name.replace(".default", "") for each in adapters_of(self._model)}
                tensors = {name: tensor for name, tensor in tensors.items() if name in own}
            found: Any = peft.set_peft_model_state_dict(
                self._model, tensors, adapter_name="default"
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
        # names of adapters have this part; the frozen weights are not in the file
        lost = [name for name in (*found.missing_keys, *found.unexpected_keys) if "lora_" in name]
        if lost:
            raise InputError(
                f"{start / ADAPTERS}: lacks {first_names(lost)}: take the checkpoint away"
            )
        return states

    def _trainer_class(self) -> type[AdapterTrainer]:
        """Return the kind of trainer that the options ask for."""
        if self.staged is not None:
            return StagedTrainer
        return AdapterTrainer if self._options.micro_batches_in_flight == 1 else FlyingTrainer

    @property
    def _accumulation(self) -> int:
        """Micro-batches of a step on this rank."""
        options = self._options
        ranks_with_data = self._ranks.world // options.pp
        return options.batch // (ranks_with_data * options.micro_batch)

    def _arguments(self) -> transformers.TrainingArguments:
        """Return the settings of transformers' Trainer, which saves nothing by itself."""
        options = self._options
        at_once = 1 if options.pp == 1 else self._accumulation  # stages get all micro-batches
        return transformers.TrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=options.micro_batch * at_once,
            gradient_accumulation_steps=self._accumulation // at_once,
            max_steps=options.steps or -1,  # -1: by epochs
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,  # below 1: a share of the steps
            weight_decay=0.0,
            logging_steps=1,
            logging_nan_inf_filter=False,  # `Show` ends a run whose loss is not finite
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
            """Write what the ranks write once: the adapters, and the trainer's state."""
            save_adapters(self._model, self._ranks, folder)
            if self._ranks.is_first:
                trainer.state.save_to_json(str(folder / TRAINER_STATE))

        names = None if self.staged is None else names_in(trainer.optimizer, self._model)
        own = partial(write_own, trainer.optimizer, trainer.lr_scheduler, names)
        self._folder.save(trainer.state.global_step, write_into, own)
