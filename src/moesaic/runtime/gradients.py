"""Gradients over a mesh without FSDP: what data parallelism adds up and divides, in one place.

A local backward pass leaves dense gradients that belong to the rank's data-parallel group, and expert gradients that are
sums over all tokens of one copy of the experts. With a loss that is a mean over each group's tokens, the global gradient is
the dense sum over dp and the expert sum over edp, both divided by dp: no factor depends on ep, etp or tp.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moesaic.comm.collectives import all_reduce_sum
from moesaic.comm.mesh import Mesh
from moesaic.experts import AbstractExperts
from moesaic.experts.experts import is_dtensor
from moesaic.program.grid import Axis


def expert_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of all experts that are spread over a mesh; a shared expert is a dense layer and not among them."""
    for part in module.modules():
        if isinstance(part, AbstractExperts) and part.is_spread:
            yield from part.parameters()


@torch.no_grad()
def average_gradients(module: nn.Module, mesh: Mesh) -> None:
    """Make the gradients of a module those of the mean over all ranks' tokens; call it once, before the optimizer step.

    All ranks call it. Parameters without a gradient on this rank count as zero, so ranks need not agree on them.

    Args:
        module: its MoE layers are on the mesh; nothing in it is wrapped by FSDP or DDP, which do this themselves.
        mesh: the ranks.
    """
    of_experts = {id(parameter) for parameter in expert_parameters(module)}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        axis: Axis = "edp" if id(parameter) in of_experts else "dp"
        group = mesh.grid.group(mesh.rank, (axis,))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        local: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
        local.copy_(all_reduce_sum(mesh.transport, group, local) / mesh.grid.dp)
