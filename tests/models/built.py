"""Small models with random weights, and the weights of another model in them."""

from __future__ import annotations

from typing import Any

import torch

from moesaic.models.config import ModelConfig, MoEConfig
from moesaic.shapes import BlockConfig

VOCAB = 40
LENGTH = 12
SHAPE: dict[str, Any] = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "seq_len": LENGTH,
    "conv_width": 1,
}


def built(kind: Any, block: BlockConfig, experts: str = "gelu", **changes: Any) -> Any:
    moe = MoEConfig(num_experts=4, top_k=2, hidden=24, experts=experts)
    model = kind(ModelConfig(**SHAPE | {"block": block, "moe": moe} | changes), VOCAB)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, shape)


def copy(into: torch.nn.Module, values: dict[str, torch.Tensor], *known: str) -> None:
    """Load values by name; only names with one of the `known` words may be missing."""
    missing, unknown = into.load_state_dict(values, strict=False)
    assert not unknown
    assert all(any(word in name for word in known) for name in missing), missing
