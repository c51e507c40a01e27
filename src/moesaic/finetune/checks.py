"""What a fine-tuning run refuses before anything is loaded: models without experts, ranks that do not divide them, memory."""

from __future__ import annotations

from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import transformers

from moesaic.errors import InputError
from moesaic.finetune.options import FinetuneOptions
from moesaic.finetune.targets import Targets
from moesaic.kernels import nf4
from moesaic.planner.finetune import LOSS_TOKENS, FinetunePrediction, predict_finetune
from moesaic.planner.hub import read_shape
from moesaic.planner.memory import GIB
from moesaic.weights.model import Architecture
from moesaic.weights.quantized import LOADED


def require_model(options: FinetuneOptions, world: int) -> None:
    """Check that a model can be fine-tuned on a number of ranks.

    Raises:
        InputError: the model cannot be read, has no experts, or does not fit the ranks or their memory.
    """
    if options.batch % (world * options.micro_batch):
        raise InputError(
            f"--batch {options.batch} is no multiple of {world} ranks times --micro-batch {options.micro_batch}: choose "
            "one that is"
        )
    config = read_config(options.model)
    model = Architecture(config).model
    experts = Targets.experts(model)
    if not experts:
        raise InputError(
            f"{options.model}: {config.model_type} has no experts that transformers stacks: choose an MoE model"
        )
    number = next(iter(experts.values())).num_experts
    if number % world:
        raise InputError(
            f"{options.model}: {world} ranks do not divide its {number} experts: choose --ranks that divide them"
        )
    for module in experts.values() if options.method != "lora" else ():
        for name in Targets.weights(module):
            shape = module._parameters[name].shape
            width = shape[1] if module.is_transposed else shape[2]
            if width % nf4.BLOCK:
                raise InputError(
                    f"{options.model}: {name} reads {width} inputs, no multiple of {nf4.BLOCK} as NF4 needs: give --method lora"
                )
    _require_memory(options, world)


def _require_memory(options: FinetuneOptions, world: int) -> None:
    """Raise InputError if the planner knows the model's sizes, and a rank would need more memory than it has."""
    table, _ = transformers.PreTrainedConfig.get_config_dict(options.model)
    try:
        shape = read_shape(table, options.model, seq_len=options.length)
    except InputError:
        return
    if options.memory_gib is not None:
        memory = options.memory_gib * GIB
    elif device_of(options) == "cuda":
        memory = float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    else:
        memory = psutil.virtual_memory().available / world

    def predicted(length: int, ranks: int) -> FinetunePrediction:
        return predict_finetune(
            shape,
            ranks=ranks,
            memory_bytes=memory,
            tokens=options.micro_batch * length,
            length=length,
            method=options.method,
            rank=options.rank,
            logits=LOSS_TOKENS,
        )

    found = predicted(options.length, world)
    if found.fits:
        return
    parts = sorted(found.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    shorter = (options.length >> halvings for halvings in range(1, 8) if options.length >> halvings)
    advice = [f"--length {each}" for each in shorter if predicted(each, world).fits][:1]
    more = (each for each in (2 * world, 4 * world, 8 * world) if shape.moe.num_experts % each == 0)
    advice += [f"--ranks {each}" for each in more if predicted(options.length, each).fits][:1]
    raise InputError(
        f"{options.model}: each of {world} ranks would need {found.bytes / GIB:.1f} GiB ({largest}) besides the framework's, "
        f"and has {memory / GIB:.1f}: {'give ' + ' or '.join(advice) if advice else 'take more or larger devices'}"
    )


def read_config(model: str) -> Any:
    """Return a model's configuration, without its quantization.

    Raises:
        InputError: there is none that transformers knows, or the weights are quantized in a way that is not read.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except Exception as error:  # of the hub, of a file, of transformers' checks
        reason = " ".join(str(error).split())
        raise InputError(
            f"{model}: is neither a folder nor a name on the hub of a model that transformers knows ({reason:.100})"
        ) from error
    quantized = quantization_of(model)
    if quantized and quantized not in LOADED:
        raise InputError(
            f"{model}: its weights are quantized ({quantized}): name the checkpoint that it was quantized from"
        )
    if quantized:
        del config.quantization_config
    return config


def quantization_of(model: str) -> str:
    """Return how a model's weights are quantized, as its configuration names it; empty if they are not."""
    table = transformers.PreTrainedConfig.get_config_dict(model)[0].get("quantization_config")
    return (
        str(table.get("quant_method", "in an unknown way"))
        if isinstance(table, dict) and table
        else ""
    )


def read_tokenizer(model: str) -> Any:
    """Return a model's tokenizer; InputError if it has none."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        if not tokenizer("text", add_special_tokens=False)[
            "input_ids"
        ]:  # without files, some classes know no word
            raise ValueError("there are no files of one")
        return tokenizer
    except Exception as error:  # of the hub, of a file, of a tokenizer's own code
        reason = " ".join(str(error).split())
        raise InputError(
            f"{model}: has no tokenizer that transformers can load ({reason:.100}): add its files"
        ) from error


def device_of(options: FinetuneOptions) -> str:
    """Return the type of the device that ranks use.

    Raises:
        InputError: a GPU is asked for, and there is none.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no GPU here: give --device cpu")
    return "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
