"""What adapters adapt in a model: the attention beside its experts, and the experts.

PEFT is told names within a layer, such as `self_attn.q_proj` and `mlp.experts.down_proj`.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from moesaic.transformers.experts_backend import FLAGS

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights of an experts module of transformers."""


class Targets:
    """The targets of adapters, as PEFT takes them: names within a layer."""

    def __init__(self, model: nn.Module) -> None:
        parameters = set()
        stacks = set()  # the lists of layers that have experts
        blocks = set()  # the blocks of a layer that have experts, such as mlp
        for path, experts in self.experts(model).items():
            stack, name = _place(path)
            stacks.add(stack)
            blocks.add(name.split(".")[0])
            parameters |= {f"{name}.{weight}" for weight in self.weights(experts)}
        self.parameters = sorted(parameters)
        """Weights of experts."""

        linear_layers = set()
        for path, module in model.named_modules():
            stack, name = _place(path)
            is_beside = stack in stacks and name.split(".")[0] not in blocks
            if isinstance(module, nn.Linear) and is_beside:
                linear_layers.add(name)
        self.modules = sorted(linear_layers)
        """Linear layers beside the block of the experts."""

    @staticmethod
    def experts(model: nn.Module) -> dict[str, Any]:
        """Return the experts modules of a model, which may be on the meta device, by name."""
        return {
            path: each
            for path, each in model.named_modules()
            if all(hasattr(each, flag) for flag in FLAGS)
        }

    @staticmethod
    def weights(experts: nn.Module) -> list[str]:
        """Return the names of the weights of an experts module."""
        return [name for name in WEIGHTS if name in experts._parameters]


def _place(path: str) -> tuple[str, str]:
    """Return the name of the list of layers that a module is in, "" if it is in none, and the
    module's name within its layer."""
    match = re.fullmatch(r"(.+?)\.\d+\.(.+)", path)
    return (match[1], match[2]) if match else ("", path)
