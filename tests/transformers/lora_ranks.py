"""Tiny models with adapters of experts, on one process and on ranks, for `test_lora.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from ep_ranks import Sequences, arguments, losses
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

import moesaic.transformers
from moesaic.kernels import nf4
from moesaic.transformers import FourBitExpertsConfig
from moesaic.weights.load import load_model
from moesaic_lab.hf import as_launched, batch

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, Any] = {
    "qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, intermediate_size=64, moe_intermediate_size=64, num_experts=4)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **SIZES, intermediate_size=128, num_local_experts=4, layer_types=["full_attention"] * 2
        )
    ),
}


def write_models(folder: Path) -> None:
    """Save a tiny model of each family, and the same model with the numbers that NF4 makes of its
    experts."""
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if name == "gpt_oss" and "experts" in parameter_name:
                    parameter.normal_(std=0.1)
        model.save_pretrained(folder / name, max_shard_size="100KB")
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                    parameter.copy_(by_nf4(parameter, is_transposed=name == "gpt_oss"))
        model.save_pretrained(folder / f"{name}-rounded")


def by_nf4(weight: Tensor, *, is_transposed: bool) -> Tensor:
    """Return the numbers that NF4 makes of a weight of experts, float32."""
    rows = weight.mT.contiguous() if is_transposed else weight
    numbers = nf4.dequantize(*nf4.requantize(rows), torch.float32)
    return numbers.mT if is_transposed else numbers


def load(
    folder: str, *, four_bit: bool, ep: int = 1, experts: str = "moesaic", double: bool = False
) -> Any:
    """Return a model on this rank, by `load_model` if it is quantized."""
    options: dict[str, Any] = (
        {"quantization_config": FourBitExpertsConfig(double=double)} if four_bit else {}
    )
    if ep > 1:
        options["distributed_config"] = moesaic.transformers.distributed_config(ep)
    is_quantized = "quantization_config" in json.loads(Path(folder, "config.json").read_text())
    kind = load_model if is_quantized else AutoModelForCausalLM.from_pretrained
    return kind(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation=experts,
        **options,
    )


def with_adapters(model: nn.Module, attention: bool = True) -> Any:
    """Return the model with random adapters of experts, the same on all ranks."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"] if attention else [],
        init_lora_weights=False,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return peft.get_peft_model(model, config)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def stepped(model: Any, ids: Tensor, *, recompute: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Train one step; return the loss before it and the adapters after it, by PEFT's names."""
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.SGD(trained(model), lr=1.0)
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach()), peft.get_peft_model_state_dict(model)


def on_rank(folder: str, cases: list[tuple[str, bool, bool]], double: bool = False) -> list[Any]:
    """Return `stepped` of (model, whether in NF4, whether to recompute) with this rank's
    sequences."""
    as_launched()
    world = dist.get_world_size()
    rank = dist.get_rank()
    found = []
    for name, four_bit, recompute in cases:
        model = with_adapters(load(f"{folder}/{name}", four_bit=four_bit, ep=world, double=double))
        found.append(stepped(model, batch(4).chunk(world)[rank], recompute=recompute))
    return found


def trainer_losses(folder: str, out: str, four_bit: bool, ep: int) -> list[float]:
    """Train adapters with transformers' Trainer, save them, and return the losses."""
    if ep > 1:
        as_launched()
    options = TrainingArguments(
        **arguments(
            out,
            per_device_train_batch_size=4 // ep,
            gradient_accumulation_steps=2,
            max_grad_norm=0.05,
        )
    )
    model = with_adapters(load(folder, four_bit=four_bit, ep=ep))
    trainer = Trainer(model=model, args=options, train_dataset=Sequences())
    found = losses(trainer)
    trainer.save_model(out)
    saved = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    with torch.no_grad():
        for parameter in trained(model):
            parameter.zero_()
    model.load_adapter(out, "default", is_trainable=True)
    for name, tensor in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(tensor, saved[name]), name
    return found


def merged_logits(folder: str) -> Tensor:
    """Return the logits of a model on ranks after its adapters were merged into each rank's
    experts."""
    as_launched()
    model = with_adapters(
        load(folder, four_bit=False, ep=dist.get_world_size()), attention=False
    ).eval()
    moesaic.transformers.adopt_adapters(model)
    with torch.no_grad():
        logits: Tensor = model.merge_and_unload()(input_ids=batch(2)).logits
    return logits
