"""The optimizer of a run and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moesaic.layer import MoE
from moesaic.routing.router import AbstractRouter
from moesaic.train.config import OptimizerConfig

DECAY_SHARE = 0.2
"""Share of the steps after the warm-up over which the wsd schedule decays (Hu et al. 2024 take 10
to 20 %)."""


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW of all parameters that are not frozen, with decay on matrices only; routers,
    norms and biases have none.

    AdamW's fused kernels process a parameter group together, so parameters on different meshes get
    separate groups. A group's `rate` is the multiple of the step's learning rate that it uses.
    """
    routers: set[nn.Parameter] = set()
    rates: dict[nn.Parameter, float] = {}
    for module in model.modules():
        if isinstance(module, AbstractRouter):
            routers.update(module.parameters())
            rates |= dict.fromkeys(module.parameters(), config.router_lr_scale)
        elif isinstance(module, MoE):
            rates |= dict.fromkeys(module.experts.parameters(), config.expert_lr_scale)

    # groups with decay come first, and within them parameters are in the model's order
    groups: dict[tuple[bool, float, object], list[nn.Parameter]] = {}
    for group_decays in (True, False):
        for parameter in model.parameters():
            decays = parameter.dim() >= 2 and parameter not in routers
            if parameter.requires_grad and decays == group_decays:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                key = (decays, rates.get(parameter, 1.0), mesh)
                groups.setdefault(key, []).append(parameter)
    described = []
    for (decays, rate, _), parameters in groups.items():
        weight_decay = config.weight_decay if decays else 0.0
        described.append({"params": parameters, "weight_decay": weight_decay, "rate": rate})
    return torch.optim.AdamW(described, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step `step` of `steps`, counted from 0: linear warm-up, then a
    decay to `final_share` of the peak."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    # progress of the decay, from 0 at the peak to 1 at the last step; nothing may be left to decay
    progress = (step - config.warmup_steps) / max(steps - 1 - config.warmup_steps, 1)
    if config.schedule == "wsd":
        # from 0 to 1 over the last `DECAY_SHARE` of the steps; below 0 while the rate is stable
        progress = 1 - (1 - progress) / DECAY_SHARE
    progress = min(max(progress, 0.0), 1.0)
    if config.schedule == "cosine":
        share_left = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share_left = 1 - progress
    return config.lr * (config.final_share + (1 - config.final_share) * share_left)
