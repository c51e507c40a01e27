"""Other people's layers on one device, with the weights and the routing of our layer. All their
packages are optional.

The peers are transformers' Mixtral experts behind a router of three lines, in each of the three
implementations that transformers has, and DeepSpeed's layer without drops. All have SwiGLU experts.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.layer import MoE
from moesaic.routing.routers import SoftmaxTopK

HF_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
"""Names of transformers' implementations of the experts."""
MAX_BATCHED_BYTES = 4 * 2**30
"""Limit on the weights that `batched_mm` copies, an expert's matrices per row; cases that need more
are not run."""


def peers() -> dict[str, Callable[[MoE], nn.Module] | str]:
    """Return, by name, a function that creates the peer from one of our layers, or the reason why
    the peer is unavailable."""
    makers: dict[str, Callable[[MoE], nn.Module] | str] = {}
    for implementation in HF_IMPLEMENTATIONS:
        name = f"transformers {implementation}"
        makers[name] = "transformers is not installed"
        if find_spec("transformers"):
            makers[name] = _hf_maker(implementation)
    makers["deepspeed"] = _deepspeed if find_spec("deepspeed") else "deepspeed is not installed"
    return makers


class HuggingFaceLayer(nn.Module):
    """A router followed by `MixtralExperts`, as in Mixtral's MoE block.

    Args:
        layer: our layer to take weights from; it has SwiGLU experts.
        implementation: one of `HF_IMPLEMENTATIONS`.
    """

    def __init__(self, layer: MoE, implementation: str) -> None:
        super().__init__()
        config: Any = import_module("transformers").MixtralConfig(
            hidden_size=layer.dim,
            intermediate_size=layer.hidden,
            num_local_experts=layer.num_experts,
            num_experts_per_tok=layer.top_k,
        )
        config._experts_implementation = implementation
        self.top_k = layer.top_k
        self.experts: Any = import_module(
            "transformers.models.mixtral.modeling_mixtral"
        ).MixtralExperts(config)
        assert isinstance(layer.router, SoftmaxTopK)
        self.weight = nn.Parameter(layer.router.weight.detach().clone())
        ours = layer.experts
        with torch.no_grad():
            self.experts.to(ours.get_parameter("w13").dtype)
            self.experts.gate_up_proj.copy_(ours.get_parameter("w13").flatten(1, 2))
            self.experts.down_proj.copy_(ours.get_parameter("w2"))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (tokens, dim) -> (tokens, dim)."""
        logits = F.linear(x.float(), self.weight.float())
        values, index = logits.topk(self.top_k, dim=-1)
        y: Tensor = self.experts(x, index, values.softmax(-1).to(x.dtype))
        return y


def _hf_maker(implementation: str) -> Callable[[MoE], nn.Module]:
    """Return a function that makes a layer of transformers with an implementation of experts."""

    def make(layer: MoE) -> nn.Module:
        return HuggingFaceLayer(layer, implementation)

    return make


def _deepspeed(layer: MoE) -> nn.Module:
    """Return DeepSpeed's layer, in a process group of one rank."""
    import torch.distributed as dist

    from moesaic_lab.peers.deepspeed import DeepSpeedLayer
    from moesaic_lab.peers.exchange import TorchExchange

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=_host_store(), rank=0, world_size=1)
    dtype = layer.experts.get_parameter("w2").dtype
    group = dist.group.WORLD
    assert group is not None
    peer = DeepSpeedLayer(layer, TorchExchange(group)).to(dtype)
    gate = peer.layer.deepspeed_moe.gate
    gate.wg.float()  # DeepSpeed's gate computes in float32
    return peer


def _host_store() -> Any:
    """Return an in-memory store for a process group of one process."""
    return import_module("torch.distributed").HashStore()
