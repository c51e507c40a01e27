"""`quantization_config=moesaic.transformers.FourBitExpertsConfig()`: experts become NF4 while a
checkpoint is read.

transformers reads one parameter at a time, of which a rank gets its own experts, and this quantizes
it before the next one is read: no rank ever holds the model, and a device holds one parameter of a
layer in 16 bits at a time; of a checkpoint that `weights.load_model` reads, one expert. All else
stays as it is.

In the module a weight then has two or three parameters: its codes, two of four bits a byte, under
the weight's own name; a scale for each `nf4.BLOCK` inputs of a row (`scales_name`); and, if scales
are in eight bits too, what expands these (`groups_name`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moesaic.errors import InputError
from moesaic.kernels import nf4
from moesaic.transformers.experts_backend import FLAGS, refusal, split_inputs
from moesaic.transformers.lora import (
    adopt_at_first_call,
    groups_name,
    local_part,
    scales_name,
    scales_of,
)

METHOD = "moesaic_nf4_experts"


@register_quantization_config(METHOD)
class FourBitExpertsConfig(QuantizationConfigMixin):
    """Asks `from_pretrained` for experts in NF4, in the layout of bitsandbytes' `Experts4bit`;
    attention and all else stay.

    The experts are frozen; train adapters with PEFT's `target_parameters`.

    Args:
        double: also keep the scales in eight bits, outside that layout: 4.13 bits for each weight,
            not 4.5. A call has them in float32, so it saves no memory while several layers'
            activations are kept, without gradient checkpointing.
    """

    def __init__(self, double: bool = False, **_: Any) -> None:
        self.quant_method = METHOD
        self.double = double


@register_quantizer(METHOD)
class FourBitExpertsQuantizer(HfQuantizer):
    """Makes room for codes and scales in a model, and quantizes each weight of experts as it is
    read."""

    def is_serializable(self) -> bool:
        """Return that a model so loaded is not saved whole; its adapters are."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether adapters of the model can be trained."""
        return True

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Return whether a parameter is a weight of experts."""
        *path, name = param_name.split(".")
        return name in four_bit_weights(model.get_submodule(".".join(path)))

    def get_quantize_ops(self) -> ConversionOps:
        """Return what quantizes a weight."""
        return _Quantize()

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """Shard scales like the weights."""
        for name, style in list(plan.items()):
            # transformers' word for weights whose experts are shared out
            if style == "grouped_gemm" and name.endswith("_proj"):
                plan[scales_name(name)] = style
                if self.quantization_config.double:
                    plan[groups_name(name)] = style

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        """Replace experts' weights by empty codes and scales, which loading then fills."""
        modules = [module for module in model.modules() if four_bit_weights(module)]
        if not modules:
            raise InputError(
                f"{type(model).__name__} has no experts that can be in NF4: leave "
                "quantization_config out"
            )
        for module in modules:
            for name in four_bit_weights(module):
                self._make_room(module, name)
        return model

    def _make_room(self, module: Any, name: str) -> None:
        """Replace a weight of an experts module by empty codes and scales, and note its shape."""
        weight = module._parameters[name]
        num_experts, rows, inputs = weight.mT.shape if module.is_transposed else weight.shape
        if inputs % nf4.BLOCK:
            raise InputError(
                f"{name} of {type(module).__name__} reads {inputs} inputs, no multiple of "
                f"{nf4.BLOCK}: leave quantization_config out"
            )

        def add_empty(own_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            """Give the module an empty parameter; `shape` is that of one expert."""
            empty = torch.empty(num_experts, *shape, dtype=dtype, device=weight.device)
            module._parameters[own_name] = nn.Parameter(empty, requires_grad=False)

        blocks = inputs // nf4.BLOCK
        add_empty(name, (rows, inputs // 2), torch.uint8)
        if self.quantization_config.double:
            num_groups = -(-rows * blocks // nf4.GROUP)
            add_empty(scales_name(name), (rows, blocks), torch.uint8)
            # one number more than groups: `nf4.compress` adds the mean of the scales
            add_empty(groups_name(name), (1 + num_groups,), torch.float32)
        else:
            add_empty(scales_name(name), (rows, blocks), torch.float32)
        module.__dict__.setdefault("moesaic_whole_shapes", {})[name] = tuple(weight.shape)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Tell PEFT the shapes of whole weights, and let experts in NF4 compute by Moesaic."""
        for module in model.modules():
            for name, shape in getattr(module, "moesaic_whole_shapes", {}).items():
                # PEFT looks there for the shape of a weight that is stored otherwise.
                getattr(module, name).ds_shape = shape
            # `MoesaicEP`, which is there as `_moesaic` on several ranks, has done it itself
            if hasattr(module, "moesaic_whole_shapes") and not hasattr(module, "_moesaic"):
                adopt_at_first_call(module)
        return model


class _Quantize(ConversionOps):
    """Quantizes one weight of this rank's experts; blocks lie along the input width, and a gate's
    rows come first."""

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, **others: Any
    ) -> dict[str, Tensor]:
        """Return codes and scales, by name. A weight may be read while its experts are iterated."""
        stacked: dict[str, Tensor] = {}
        for full_name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value  # a list has one weight
            path, _, name = full_name.rpartition(".")
            module = model.get_submodule(path)
            for number, matrix in enumerate(weight):
                if module.is_transposed:
                    matrix = matrix.mT
                if name != "down_proj":  # (2 hidden, dim), in the order of `Experts4bit`
                    matrix = split_inputs(module, matrix.unsqueeze(0)).flatten(0, 2)
                # what is in float32 was dequantized from NF4, whose bits it gets again
                quantize = nf4.requantize if matrix.dtype == torch.float32 else nf4.quantize
                codes, scales = quantize(matrix)
                parts = {full_name: codes, scales_name(full_name): scales}
                if hasattr(module, groups_name(name)):
                    scales, groups = nf4.compress(scales)
                    parts[scales_name(full_name)] = scales
                    parts[groups_name(full_name)] = groups
                for part_name, part in parts.items():
                    if number == 0:
                        stacked[part_name] = part.new_empty(len(weight), *part.shape)
                    stacked[part_name][number] = part
        return stacked


def dequantized(module: Any, name: str) -> Tensor:
    """Return the numbers that this rank's part of a weight in NF4 stands for, in the family's
    layout, float32."""
    codes = local_part(getattr(module, name))
    weight = nf4.dequantize(codes, scales_of(module, name), torch.float32)
    if name == "gate_up_proj" and not module.is_concatenated:
        # all rows of the gate, then those of up, become rows in turn: undoes `split_inputs`
        weight = weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return weight.mT if module.is_transposed else weight


def four_bit_weights(module: Any) -> tuple[str, ...]:
    """Return the names of the weights of an experts module that can be in NF4; () for other
    modules."""
    if not all(hasattr(module, flag) for flag in FLAGS):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    if not all(name in module._parameters for name in names):
        return ()
    # weights that are in NF4 already have a dtype that `refusal` refuses
    is_quantized = hasattr(module, "moesaic_whole_shapes")
    return names if is_quantized or refusal(module) is None else ()
