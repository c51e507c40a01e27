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
    options = options_of(
        f"{folder}/of-{world}", dtype="float32", length=32, batch=4, steps=4, learning_rate=1e-2
    )
    token_ids = torch.randint(4, 12, (8, 32), generator=torch.Generator().manual_seed(1))
    ranks = Ranks.of_world()
    run_folder = FinetuneFolder(options, ranks, {})
    run_folder.begin()
    model = _model(options, SMALL, world, device, shared=False)
    recipe.Run(options, model, run_folder, ranks, device).train(token_ids, None)
    run_folder.release()
    state = json.loads(Path(options.out, "checkpoint-4", "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def cost_of(device: str, folder: str, sizes: dict[str, Any], length: int) -> dict[str, float]:
    """Return the GiB that the model needs on this rank, those at the peak of a step, and tokens per
    second of all ranks."""
    world = _world(device)
    options = options_of(folder, length=length)
    model = _model(options, sizes, world, device, shared=True)
    is_gpu = device != "cpu"
    model_gib = torch.cuda.memory_allocated() / 2**30 if is_gpu else 0.0
    model.activation_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(sizes["vocab_size"], (1, length), device=device)
    loss_in_parts(model, ids[:, :64])  # from here on the model computes its loss in parts
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
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else 0.0
    return {
        "model_gib": model_gib,
        "peak_gib": peak_gib,
        "tokens_per_second": world * length / min(seconds),
    }


def finetune_row(*, dry: bool) -> dict[str, Any]:
    """Return the largest difference of a loss on four ranks from one process, and the cost of the
    large model on both."""
    sizes, length, device = (SMALL, 32, "cpu") if dry else (LARGE, LENGTH, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        expected_losses = losses_of(device, folder)
        losses = sharing_gpu(losses_of, folder, dry=dry)[0]
        cost_by_rank = sharing_gpu(cost_of, folder, sizes, length, dry=dry)
        cost_alone = cost_of(device, folder, sizes, length)
    differences = [abs(a - b) for a, b in zip(losses, expected_losses, strict=True)]
    row = {"worst": max(differences)}
    for name, value in cost_alone.items():
        row[f"one_{name}"] = value
    for name in cost_alone:
        row[f"four_{name}"] = max(cost[name] for cost in cost_by_rank)
    return row


def _world(device: str) -> int:
    """Return the number of ranks, and join them."""
    if not dist.is_initialized():
        return 1
    as_launched(device)
    return WORLD


def _model(
    options: FinetuneOptions, sizes: dict[str, Any], world: int, device: str, *, shared: bool
) -> Any:
    """Return a model of random weights with adapters, on this rank; shared: all weights of one
    shape are one tensor."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"])
    with torch.device("meta"):
        whole = Qwen3MoeForCausalLM(config)
    dtype = getattr(torch, options.dtype)
    tensors = dict[Any, Tensor]()  # by shape if shared, else by name
    weights: dict[str, Tensor] = {}
    for parameter_name, parameter in whole.state_dict().items():
        for name, shape in _checkpoint_shapes(parameter_name, parameter).items():
            key = shape if shared else name
            if key not in tensors:
                is_norm = len(shape) == 1
                values = torch.ones(shape) if is_norm else torch.randn(shape).mul_(0.02)
                tensors[key] = values.to(dtype)
            weights[name] = tensors[key]
    arguments = recipe.loading(options, world, device)
    model = Qwen3MoeForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, **arguments
    )
    return recipe.adapt(model, options)


def _checkpoint_shapes(name: str, parameter: Tensor) -> dict[str, torch.Size]:
    """Return the shapes, by name, of the tensors that hold a parameter of the model in a
    checkpoint, where every expert's matrices are tensors of their own."""
    shapes = {}
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        num_experts, gate_and_up, width = parameter.shape
        for expert in range(num_experts):
            for matrix in ("gate", "up"):
                shape = torch.Size([gate_and_up // 2, width])
                shapes[f"{stem}{expert}.{matrix}_proj.weight"] = shape
    elif name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        for expert in range(len(parameter)):
            shapes[f"{stem}{expert}.down_proj.weight"] = parameter.shape[1:]
    else:
        shapes[name] = parameter.shape
    return shapes
