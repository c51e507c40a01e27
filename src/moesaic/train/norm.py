"""The gradient's norm over a mesh: every shard once, replicas once, whichever of the two meshes a parameter is on.

`torch.nn.utils.clip_grad_norm_` refuses parameters of different meshes. Experts, their shards or replicas left out or counted
twice would make clipping depend on the mesh, so all goes through one formula:

    norm^2 = sum over ranks, over parameters of |this rank's part|^2 / (ranks that hold the same part)
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.models.split import local_part
from moesaic.train.ranks import Ranks


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], ranks: Ranks, experts: Iterable[nn.Parameter] = ()) -> Tensor:
    """Return the 2-norm of the whole model's gradient, (), the same on every rank.

    Args:
        parameters: of the model; those without a gradient count as zero.
        ranks: that share them.
        experts: those among them that are experts' spread over the mesh. Modules of a user stay plain tensors there, of
            which other ranks hold other experts.
    """
    present = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for _, gradient in present]
    if ranks.mesh is None:
        return nn.utils.get_total_norm(gradients)
    spread = {id(parameter) for parameter in experts}
    by_copies: dict[int, list[Tensor]] = {}
    for parameter, gradient in present:
        holders = ranks.world
        if id(parameter) in spread and not _knows_experts(gradient):
            holders = ranks.mesh.grid.edp
        by_copies.setdefault(num_copies(gradient, holders), []).append(local_part(gradient))
    device = gradients[0].device if gradients else None
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for copies, parts in by_copies.items():
        squares += nn.utils.get_total_norm(parts).double().square() / copies
    return ranks.total(squares).sqrt()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`; 0 for no limit.

    Args:
        parameters: of the model.
        norm: what `gradient_norm` returned for them.
        limit: the largest norm.
    """
    factor = torch.clamp((limit or math.inf) / (norm + 1e-6), max=1.0)
    parts = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for dtype in {part.dtype for part in parts}:
        same = [part for part in parts if part.dtype == dtype]
        torch._foreach_mul_(same, factor.to(dtype))


@torch.no_grad()
def largest_parameter(model: nn.Module, ranks: Ranks) -> float:
    """Return the largest absolute value of any parameter on any rank; not finite if one is not."""
    parts = [local_part(parameter.detach()) for parameter in model.parameters()]
    largest = nn.utils.get_total_norm([part for part in parts if part.numel()], math.inf)
    if ranks.mesh is not None:  # a maximum over ranks may lose what is not a number
        largest = largest.nan_to_num(nan=math.inf)
    return float(ranks.largest(largest))


def _knows_experts(tensor: Tensor) -> bool:
    """Whether a tensor's placements say which experts this rank holds."""
    return isinstance(tensor, DTensor) and "ep" in (tensor.device_mesh.mesh_dim_names or ())


def num_copies(tensor: Tensor, world: int) -> int:
    """Return how many ranks hold the same part of a tensor as this one.

    Args:
        tensor: sharded, or a plain one, of which every rank has a copy.
        world: ranks that have the tensor, whole or in part.
    """
    if not isinstance(tensor, DTensor):
        return world
    shards = [tensor.device_mesh.size(axis) for axis, place in enumerate(tensor.placements) if not place.is_replicate()]
    return world // math.prod(shards)
