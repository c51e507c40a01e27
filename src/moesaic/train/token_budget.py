"""A run's token budget: held on one process too, and what layers did about it, in numbers."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import nn

from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import NoTransport
from moesaic.layer import MoE
from moesaic.plan import Plan
from moesaic.program.grid import Grid
from moesaic.runtime.balance.calls import BalancedCalls


def hold_to_budget(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Let the MoE layers of a run on one process run in slices where the plan has a token budget.

    Args:
        model: on its device.
        plan: of the run; without ranks to spread over, nothing else of it matters.
        device: of the model.
    """
    if plan.token_budget is None:
        return
    for module in model.modules():
        if isinstance(module, MoE):
            module.parallelize(Mesh(Grid(world=1), NoTransport(device)), Plan(token_budget=plan.token_budget))


def budget_values(model: nn.Module) -> dict[str, list[dict[str, int]]]:
    """Return what each MoE layer did about its budget since the last call, for a line of metrics; nothing without one."""
    layers = [module.on_mesh for module in model.modules() if isinstance(module, MoE)]
    balanced = [each.calls for each in layers if each is not None and isinstance(each.calls, BalancedCalls)]
    if not any(each.compiled.plan.token_budget is not None for each in balanced):
        return {}
    return {"token_budget": [asdict(each.budget.take()) for each in balanced]}
