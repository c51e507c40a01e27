"""What one rank does in the tests of expert parallelism; `test_expert_parallel.py` starts it in real processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moesaic.transformers
from moesaic import Plan

TOKENS = 6


@dataclass(frozen=True)
class Case:
    """One model on one mesh."""

    folder: str
    ep: int
    tp: int = 1
    plan: dict[str, Any] | None = None
    """Fields of a plan that is registered by name; None for "moesaic" as it is."""
    then: dict[str, Any] = field(default_factory=dict)
    """Fields of a plan that the model is switched to for a second step, which the result is of; empty for none."""
    recompute: bool = False


def batch(sequences: int) -> Tensor:
    """Return token ids, (sequences, TOKENS)."""
    return torch.randint(3, 60, (sequences, TOKENS), generator=torch.Generator().manual_seed(7))


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be spread over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if "ep" not in (tensor.device_mesh.mesh_dim_names or ()):
        return tensor.full_tensor().detach()
    # `full_tensor` puts the parts of a strided shard into another order than the ranks have them in.
    parts: list[Any] = [None] * dist.get_world_size()
    place = (tensor.device_mesh.get_local_rank("ep"), dist.get_rank())
    dist.all_gather_object(parts, (place, tensor.to_local().detach()))
    return torch.cat([part for _, part in sorted(parts, key=lambda entry: entry[0])])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return every gradient whole, by name."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def load(case: Case, **options: Any) -> nn.Module:
    """Return the case's model on this rank."""
    name, world = "moesaic", dist.get_world_size()
    if case.plan is not None:
        name = "of-the-test"
        moesaic.transformers.register_plan(name, Plan(**case.plan))
    spread = DistributedConfig(tp_size=case.tp, fsdp_size=world // case.tp, ep_size=case.ep, ep_implementation=name)
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(case.folder, distributed_config=spread, **options)
    return model.train()


def as_launched() -> None:
    """Set what a launcher sets."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(dist.get_rank())
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(dist.get_world_size())


def steps(cases: list[Case]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return each case's logits of this rank's sequence and all gradients."""
    as_launched()
    found = []
    for case in cases:
        model = load(case)
        if case.recompute:
            model.gradient_checkpointing_enable()
        ids = batch(dist.get_world_size() // case.tp)[dist.get_rank() // case.tp].unsqueeze(0)
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        if case.then:
            moesaic.transformers.use_plan(model, Plan(**case.then))
            model.zero_grad()
            out = model(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
        found.append((out.logits.detach(), gradients(model)))
    return found


def lines(folder: str) -> list[str]:
    """Return what ranks say of a plan that they bring differently, and of experts that programs cannot run."""
    import warnings

    from worlds import refusal

    as_launched()
    chunks = 1 + dist.get_rank()
    said = [refusal(load, Case(folder, ep=2, plan={"chunks": chunks}))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(Case(folder, ep=2), hidden_act="mish")
    said += [str(each.message) for each in caught if "moesaic" in str(each.message)][:1]
    said.append(refusal(moesaic.transformers.use_plan, model, Plan()))
    said.append(refusal(moesaic.transformers.register_plan, "all_to_all", Plan()))
    return said


def find_plan(folder: str) -> dict[str, Any]:
    """Train until the plan is found, under a made-up clock by which the last candidate is the fastest."""
    import logging

    as_launched()
    logging.getLogger("moesaic").setLevel(logging.ERROR)
    model = load(Case(folder, ep=dist.get_world_size()))
    chosen = {module._moesaic.on_mesh.auto for module in model.modules() if hasattr(module, "_moesaic")}
    (auto,) = chosen  # all layers have one
    now = [0.0]
    auto.clock = lambda: now[0]
    head = [parameter for name, parameter in model.named_parameters() if "lm_head" in name]
    for parameter in model.parameters():
        parameter.requires_grad_(
            any(parameter is each for each in head)
        )  # as under LoRA: no layer's parameter is trained
    optimizer = torch.optim.SGD(head, lr=0.01)
    ids = batch(dist.get_world_size())[dist.get_rank()].unsqueeze(0)
    for _ in range(60):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now[0] += 1.0 if auto.table is None else 2.0 - 0.1 * auto.table.running
    plans = {module._moesaic.on_mesh.compiled.plan for module in model.modules() if hasattr(module, "_moesaic")}
    return {"plans": plans, "candidates": auto.table.plans, "said": auto.said}


class Sequences(torch.utils.data.Dataset):
    """Eight sequences of fixed tokens, their own labels."""

    def __init__(self) -> None:
        self._ids = batch(8)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def arguments(folder: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a trainer that takes a few steps on the CPU, in order, and writes nothing."""
    fixed = {"output_dir": folder, "max_steps": 3, "learning_rate": 0.01, "use_cpu": True, "report_to": "none"}
    quiet = {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "train_sampling_strategy": "sequential"}
    return {**fixed, **quiet, "max_grad_norm": 0.0, **options}


def losses(trainer: Any) -> list[float]:
    """Train and return the loss of each step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(folder: str, out: str) -> list[float]:
    """Return the losses of transformers' Trainer over this rank's part of the experts."""
    from transformers import Trainer, TrainingArguments

    as_launched()
    model = load(Case(folder, ep=dist.get_world_size()))
    given = TrainingArguments(**arguments(out, per_device_train_batch_size=4 // dist.get_world_size()))
    return losses(Trainer(model=model, args=given, train_dataset=Sequences()))
