"""Fine-tuning with experts in NF4 on four NCCL ranks that share a GPU: losses against one process,
then memory and speed.

The large model has the shape of Qwen3-30B-A3B. All its weights of a shape are one random tensor, so
no checkpoint of 57 GiB is needed; loading, quantizing, memory and time are those of other weights.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic.finetune import recipe
from moesaic.finetune.folder import FinetuneFolder
from moesaic.finetune.loss import loss_in_parts
from moesaic.finetune.options import FinetuneOptions
from moesaic.train.ranks import Ranks
from moesaic_lab.device.ranks import WORLD, sharing_gpu
from moesaic_lab.hf import as_launched

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LARGE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
LENGTH = 4096
STEPS = 3


def options_of(folder: str, **fields: Any) -> FinetuneOptions:
    """Return the options of a run into a folder."""
    return FinetuneOptions(model="", data="", out=folder, rank=8, **fields)


def losses_of(device: str, folder: str) -> list[float]:
    """Fine-tune a small model on this rank and return the losses of the run."""
    world = _world(device)
    given = options_of(
        f"{folder}/of-{world}", dtype="float32", length=32, batch=4, steps=4, learning_rate=1e-2
    )
    rows = torch.randint(4, 12, (8, 32), generator=torch.Generator().manual_seed(1))
    ranks = Ranks.of_world()
    folder_of_run = FinetuneFolder(given, ranks, {})
    folder_of_run.begin()
    model = _model(given, SMALL, world, device, shared=False)
    recipe.Run(given, model, folder_of_run, ranks, device).train(rows, None)
    folder_of_run.release()
    state = json.loads(Path(given.out, "checkpoint-4", "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def cost_of(device: str, folder: str, sizes: dict[str, Any], length: int) -> dict[str, float]:
    """Return the GiB that the model needs on this rank, those at the peak of a step, and tokens per
    second of all ranks."""
    world = _world(device)
    given = options_of(folder, length=length)
    model = _model(given, sizes, world, device, shared=True)
    is_gpu = device != "cpu"
    held = torch.cuda.memory_allocated() / 2**30 if is_gpu else 0.0
    model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    ids = torch.randint(sizes["vocab_size"], (1, length), device=device)
    loss_in_parts(model, ids[:, :64])
    seconds = []
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        begin = time.perf_counter()
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else 0.0
    return {"model_gib": held, "peak_gib": peak, "tokens_per_second": world * length / min(seconds)}


def finetune_row(*, dry: bool) -> dict[str, Any]:
    """Return the largest difference of a loss on four ranks from one process, and the cost of the
    large model on both."""
    sizes, length, device = (SMALL, 32, "cpu") if dry else (LARGE, LENGTH, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        expected = losses_of(device, folder)
        found = sharing_gpu(losses_of, folder, dry=dry)[0]
        of_ranks = sharing_gpu(cost_of, folder, sizes, length, dry=dry)
        one = cost_of(device, folder, sizes, length)
    four = {name: max(each[name] for each in of_ranks) for name in one}
    costs = {
        f"{of}_{name}": value
        for of, table in (("one", one), ("four", four))
        for name, value in table.items()
    }
    return {"worst": max(abs(a - b) for a, b in zip(found, expected, strict=True)), **costs}


def _world(device: str) -> int:
    """Return the number of ranks, and join them."""
    if not dist.is_initialized():
        return 1
    as_launched(device)
    return WORLD


def _model(
    given: FinetuneOptions, sizes: dict[str, Any], world: int, device: str, *, shared: bool
) -> Any:
    """Return a model of random weights with adapters, on this rank; shared: all weights of one
    shape are one tensor."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"])
    with torch.device("meta"):
        whole = Qwen3MoeForCausalLM(config)
    dtype = getattr(torch, given.dtype)
    made = dict[Any, Tensor]()
    weights: dict[str, Tensor] = {}
    for name, each in whole.state_dict().items():
        parts = {name: each.shape}
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            half = torch.Size([each.shape[1] // 2, each.shape[2]])
            parts = {
                f"{stem}{e}.{m}_proj.weight": half for e in range(len(each)) for m in ("gate", "up")
            }
        elif name.endswith("experts.down_proj"):
            parts = {
                f"{name.removesuffix('down_proj')}{e}.down_proj.weight": each.shape[1:]
                for e in range(len(each))
            }
        for part, shape in parts.items():
            key = shape if shared else part
            if key not in made:
                made[key] = (
                    torch.ones(shape) if len(shape) == 1 else torch.randn(shape).mul_(0.02)
                ).to(dtype)
            weights[part] = made[key]
    arguments = recipe.loading(given, world, device)
    return recipe.adapt(
        Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=weights, **arguments),
        given,
    )
