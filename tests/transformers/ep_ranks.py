"""Functions for single ranks, which `test_transformers_ranks.py` and `test_trainers.py` start in
processes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moesaic.transformers
from moesaic import Plan
from moesaic_lab.hf import RankCase, as_launched, batch, load


def lines(folder: str) -> list[str]:
    """Return the messages for plans that differ between ranks, and for experts that programs cannot
    run."""
    import warnings

    from worlds import refusal

    as_launched()
    chunks = 1 + dist.get_rank()
    messages = [refusal(load, RankCase(folder, ep=2, plan={"chunks": chunks}))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(RankCase(folder, ep=2), hidden_act="mish")
    messages += [str(each.message) for each in caught if "moesaic" in str(each.message)][:1]
    messages.append(refusal(moesaic.transformers.use_plan, model, Plan()))
    messages.append(refusal(moesaic.transformers.register_plan, "all_to_all", Plan()))
    return messages


def moved_experts(folder: str) -> tuple[int, int]:
    """Return how many parameters of experts a step moves, by an optimizer that was made as soon as
    the model was loaded, and how many there are."""
    as_launched()
    model = load(RankCase(folder, ep=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    experts = [each for name, each in model.named_parameters() if ".experts." in name]
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in experts]
    before = [part.detach().clone() for part in parts]
    ids = batch(2)[dist.get_rank()].unsqueeze(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    held = [each for name, each in model.named_parameters() if ".experts." in name]
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in held]
    moved = sum(not torch.equal(old, new) for old, new in zip(before, parts, strict=True))
    return moved, len(held)


def find_plan(folder: str) -> dict[str, Any]:
    """Train until a plan is chosen, with a fake clock on which the last candidate is the
    fastest."""
    import logging

    as_launched()
    logging.getLogger("moesaic").setLevel(logging.ERROR)
    model = load(RankCase(folder, ep=dist.get_world_size()))
    chosen = {
        module._moesaic.run.on_mesh.auto
        for module in model.modules()
        if hasattr(module, "_moesaic")
    }
    (begin,) = chosen  # all layers have one
    auto = begin.__self__
    now = [0.0]
    auto.clock = lambda: now[0]
    head = [parameter for name, parameter in model.named_parameters() if "lm_head" in name]
    for parameter in model.parameters():
        parameter.requires_grad_(
            any(parameter is each for each in head)
        )  # as under LoRA: no layer's parameter is trained
    optimizer = torch.optim.SGD(head, lr=0.01)
    ids = batch(dist.get_world_size())[dist.get_rank()].unsqueeze(0)
    for _ in range(80):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now[0] += 1.0 if auto.table is None else 2.0 - 0.1 * auto.table.running
    plans = {
        module._moesaic.run.on_mesh.compiled.plan
        for module in model.modules()
        if hasattr(module, "_moesaic")
    }
    return {"plans": plans, "candidates": auto.table.plans, "said": auto.said}


class Sequences(torch.utils.data.Dataset):
    """Eight sequences of fixed tokens, which are also their labels."""

    def __init__(self) -> None:
        self._ids = batch(8)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def arguments(folder: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a trainer that runs a few steps on the CPU, without shuffling, and
    writes nothing."""
    fixed = {
        "output_dir": folder,
        "max_steps": 3,
        "learning_rate": 0.01,
        "use_cpu": True,
        "report_to": "none",
    }
    quiet = {
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    return {**fixed, **quiet, **options}


def losses(trainer: Any) -> list[float]:
    """Train and return the loss of each step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def supervised(models: Iterable[Any], out: str) -> list[list[float]]:
    """Fine-tune each model by TRL's trainer, and return the losses."""
    trl, datasets, tokenizers = (
        pytest.importorskip(n, reason=f"pip install {n}") for n in ("trl", "datasets", "tokenizers")
    )
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(64)}
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="w0", eos_token="w2")
    rows = datasets.Dataset.from_dict({"input_ids": batch(8).tolist()})
    given = trl.SFTConfig(**arguments(out, per_device_train_batch_size=4, bf16=False))
    make = partial(trl.SFTTrainer, args=given, train_dataset=rows, processing_class=tokenizer)
    return [losses(make(model=model)) for model in models]


def train(folder: str, out: str, flies: bool = False) -> list[float]:
    """Train with transformers' Trainer, with this rank's part of the experts, in one line more with
    halves of micro-batches in flight, and return the losses."""
    from transformers import Trainer, TrainingArguments

    class FlyingTrainer(moesaic.transformers.InFlight, Trainer):
        pass

    as_launched()
    model = load(RankCase(folder, ep=dist.get_world_size()))
    options = TrainingArguments(
        **arguments(out, per_device_train_batch_size=4 // dist.get_world_size())
    )
    kind = FlyingTrainer if flies else Trainer
    return losses(kind(model=model, args=options, train_dataset=Sequences()))


def clipped(folder: str, out: str) -> dict[str, Any]:
    """Train one step with and without clipping; return the reported norm and both gradients by
    name, gathered whole."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from moesaic_lab.hf import gradients

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            found.append({name: gradient.clone() for name, gradient in gradients(model).items()})

    as_launched()
    found: list[dict[str, Tensor]] = []
    norms = []
    for limit in (1e9, 0.1):
        options = arguments(out, per_device_train_batch_size=2, max_steps=1, max_grad_norm=limit)
        model = load(RankCase(folder, ep=dist.get_world_size()))
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**options),
            train_dataset=Sequences(),
            callbacks=[Keep()],
        )
        trainer.train()
        norms += [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"norms": norms, "whole": found[0], "clipped": found[1]}


def lora(folder: str) -> Any:
    """Return LoRA's gradients on attention, before and after averaging."""
    import peft

    from moesaic import average_gradients
    from moesaic.comm.mesh import Mesh

    as_launched()
    world = dist.get_world_size()
    rank = dist.get_rank()
    base = load(RankCase(folder, ep=world))
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    ids = batch(world)[rank : rank + 1]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    average_gradients(model, Mesh.create(ep=world))
    return own, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def resumed(folder: str, runs: list[tuple[str, str | None, dict[str, Any]]]) -> list[list[float]]:
    """Train five steps per run with a trainer that resumes, saving after two, and return the
    losses.

    A run is its folder, the checkpoint to start from and options of the trainer. Ranks hold half of
    the experts each.
    """
    from transformers import Trainer, TrainingArguments

    from moesaic.transformers import Resumable

    class ResumableTrainer(Resumable, Trainer):
        pass

    world = 1
    if dist.is_initialized():
        as_launched()
        world = dist.get_world_size()
    found = []
    for out, checkpoint, options in runs:
        case = RankCase(folder, ep=min(world, 2))
        model = load(case) if world > 1 else load_whole(folder)
        given = {
            "max_steps": 5,
            "save_strategy": "steps",
            "save_steps": 2,
            "per_device_train_batch_size": 4 // world,
        }
        trainer = ResumableTrainer(
            model=model,
            args=TrainingArguments(**arguments(out, **given, **options)),
            train_dataset=Sequences(),
            eval_dataset=Sequences(),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if options:
            found.append([trainer.evaluate()["eval_loss"], trainer.state.best_metric])
    return found


def load_whole(folder: str) -> Any:
    """Return a folder's model in one process."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="moesaic"
    ).train()
