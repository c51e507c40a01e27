"""What a fine-tuning run refuses before anything is loaded: models without experts, ranks that do
not divide them, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from moesaic.comm.mesh import DeviceType
from moesaic.errors import InputError
from moesaic.finetune.options import FinetuneOptions
from moesaic.finetune.stages import require_stages
from moesaic.finetune.targets import Targets
from moesaic.kernels import nf4
from moesaic.planner.finetune import LOSS_TOKENS, FinetunePrediction, predict_finetune
from moesaic.planner.hub import read_shape
from moesaic.planner.rank_memory import GIB
from moesaic.weights.model_tensors import Architecture
from moesaic.weights.quantized import LOADED
from moesaic.weights.source import CONFIG, WORDS, read_config, read_settings, source_folder


def require_model(options: FinetuneOptions, world: int) -> None:
    """Check that a model can be fine-tuned on a number of ranks.

    Raises:
        InputError: the model cannot be read, has no experts, or does not fit the ranks or their
            memory.
    """
    if world % options.pp:
        raise InputError(
            f"--pp {options.pp}: {options.pp} stages do not divide {world} ranks: choose a divisor"
        )
    sharing = world // options.pp  # the ranks of a stage, which share its experts
    if options.batch % (sharing * options.micro_batch):
        of_stage = " of a stage" if options.pp > 1 else ""
        raise InputError(
            f"--batch {options.batch} is no multiple of {sharing} ranks{of_stage} times "
            f"--micro-batch {options.micro_batch}: choose one that is"
        )
    folder = source_folder(options.model, WORDS)
    if not (folder / CONFIG).exists():
        raise InputError(
            f"{options.model}: is neither a folder nor a name on the hub of a model: it has "
            f"no {CONFIG}"
        )
    config = read_config(folder, methods=LOADED)
    model = Architecture(config).model
    experts = Targets.experts(model)
    if not experts:
        raise InputError(
            f"{options.model}: {config.model_type} has no experts that transformers stacks: "
            "choose an MoE model"
        )
    num_experts = next(iter(experts.values())).num_experts
    _require_top_k(config, num_experts, options.model)
    if num_experts % sharing:
        raise InputError(
            f"{options.model}: {sharing} ranks do not divide its {num_experts} experts: choose "
            "--ranks that divide them"
        )
    if options.method != "lora":
        for module in experts.values():
            _require_whole_blocks(module, options.model)
    if options.pp > 1:
        layers = config.get_text_config().num_hidden_layers
        if layers < options.pp:
            raise InputError(
                f"--pp {options.pp}: {options.model} has {layers} layers: choose at most as many "
                "stages"
            )
        require_stages(model, options.pp, options.model)
    _require_memory(options, world, folder)


def _require_whole_blocks(experts: Any, model: str) -> None:
    """Raise InputError if the inputs of a weight of an experts module are no whole blocks of
    NF4."""
    for name in Targets.weights(experts):
        shape = experts._parameters[name].shape  # (experts, out, in), or transposed
        num_inputs = shape[1] if experts.is_transposed else shape[2]
        if num_inputs % nf4.BLOCK:
            raise InputError(
                f"{model}: {name} reads {num_inputs} inputs, no multiple of "
                f"{nf4.BLOCK} as NF4 needs: give --method lora"
            )


def _require_top_k(config: Any, num_experts: int, model: str) -> None:
    """Raise InputError if a configuration says that a token goes to more experts than there are."""
    top_k = getattr(config.get_text_config(), "num_experts_per_tok", 1)
    if isinstance(top_k, int) and not 1 <= top_k <= num_experts:
        raise InputError(
            f"{model}: num_experts_per_tok={top_k}, but the model has {num_experts} experts: use "
            f"the model's own {CONFIG}"
        )


def _require_memory(options: FinetuneOptions, world: int, folder: Path) -> None:
    """Raise InputError if the planner knows the model's sizes, and a rank would need more memory
    than it has."""
    try:
        shape = read_shape(read_settings(folder / CONFIG), options.model, seq_len=options.length)
    except (InputError, OSError, ValueError):
        return
    if options.memory_gib is not None:
        memory = options.memory_gib * GIB
    elif device_of(options) == "cuda":
        memory = float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    else:
        memory = psutil.virtual_memory().available / world  # ranks share the host's

    def predicted(length: int, ranks: int) -> FinetunePrediction:
        """Return the prediction for a length of sequences and a number of ranks."""
        at_once = max(ranks // options.pp, 1) * options.micro_batch  # sequences, of all ranks
        return predict_finetune(
            shape,
            ranks=ranks,
            memory_bytes=memory,
            tokens=options.micro_batch * length,
            length=length,
            method=options.method,
            rank=options.rank,
            logits=LOSS_TOKENS,
            projections=4,  # linear layers of attention with adapters: q, k, v and o
            # (stages, micro-batches of a step)
            stages=(options.pp, max(options.batch // at_once, 1)),
            in_flight=options.micro_batches_in_flight,
        )

    prediction = predicted(options.length, world)
    if prediction.fits:
        return
    parts = sorted(prediction.parts.items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:3])

    advice = []
    for halvings in range(1, 8):
        length = options.length >> halvings  # halved that many times
        if length and predicted(length, world).fits:
            advice.append(f"--length {length}")
            break
    for ranks in (2 * world, 4 * world, 8 * world):
        if shape.moe.num_experts % ranks == 0 and predicted(options.length, ranks).fits:
            advice.append(f"--ranks {ranks}")
            break
    remedy = "give " + " or ".join(advice) if advice else "take more or larger devices"
    raise InputError(
        f"{options.model}: each of {world} ranks would need {prediction.bytes / GIB:.1f} GiB "
        f"({largest}) besides the framework's, and has {memory / GIB:.1f}: {remedy}"
    )


def device_of(options: FinetuneOptions) -> DeviceType:
    """Return the type of the device that ranks use.

    Raises:
        InputError: a GPU is asked for, and there is none.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no GPU here: give --device cpu")
    return "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
