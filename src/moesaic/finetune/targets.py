"""What adapters adapt in a model: the attention beside its experts, and the experts."""

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
        experts = {_place(path): module for path, module in self.experts(model).items()}
        layers = {layer for layer, _ in experts}
        blocks = {name.split(".")[0] for _, name in experts}
        self.parameters = sorted(
            {
                f"{name}.{weight}"
                for (_, name), each in experts.items()
                for weight in self.weights(each)
            }
        )
        """Weights of experts."""
        linear = {
            _place(path) for path, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        self.modules = sorted(
            {n for layer, n in linear if layer in layers and n.split(".")[0] not in blocks}
        )
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
    """Return the list of layers that a module is in, and its name within its layer."""
    found = re.fullmatch(r"(.+?)\.\d+\.(.+)", path)
    return (found[1], found[2]) if found else ("", path)
