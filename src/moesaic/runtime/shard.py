"""Cutting a layer's experts for a mesh: one storage layout, whatever the plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moesaic.errors import InputError
from moesaic.experts import AbstractExperts, ModuleExperts
from moesaic.program.grid import Grid


def shard_experts(experts: AbstractExperts, grid: Grid, rank: int, device_mesh: DeviceMesh | None) -> None:
    """Keep this rank's shard of every parameter, in place.

    Args:
        experts: whole, with the same values on all ranks.
        grid: the mesh.
        rank: whose shard stays.
        device_mesh: dims ("ep", "etp"): parameters become DTensors on it, sharded over ep on the expert dimension and
            over etp on the hidden one. None: plain tensors.

    Raises:
        InputError: if the experts do not split so.
    """
    _check(experts, grid)
    experts.is_spread = True
    each = experts.num_experts // grid.ep
    first = grid.coordinate(rank, "ep") * each
    if isinstance(experts, ModuleExperts):
        experts.keep_only(range(first, first + each), grid.edp)
        return
    at = grid.coordinate(rank, "etp")
    for name in (name for names in experts.names for name in names):
        whole = experts.get_parameter(name)
        local, dim = whole.detach()[first : first + each], experts.shard_dim(name)
        if dim is not None:
            local = local.chunk(grid.etp, dim)[at]
        local = local.clone(memory_format=torch.contiguous_format)
        value: Tensor = local
        if device_mesh is not None:
            from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

            placements: list[Placement] = [Shard(0), Replicate() if dim is None else Shard(dim)]
            value = DTensor.from_local(local, device_mesh, placements, run_check=False)
        setattr(experts, name, nn.Parameter(value, requires_grad=whole.requires_grad))


def _check(experts: AbstractExperts, grid: Grid) -> None:
    if experts.num_experts % grid.ep:
        raise InputError(
            f"num_experts={experts.num_experts} does not split over mesh.ep={grid.ep}: choose ep as a divisor of it"
        )
    if grid.etp == 1:
        return
    names = [name for name in experts.names[0] if experts.shard_dim(name) is not None]
    if not names:
        raise InputError(
            f"{type(experts).__name__} cannot be cut into shards: choose mesh.etp=1 (mesh.ep spreads whole experts)"
        )
    for name in names:
        width = experts.get_parameter(name).shape[experts.shard_dim(name) or 0]
        if width % grid.etp:
            raise InputError(
                f"an expert's hidden width of {width} does not split over mesh.etp={grid.etp}: choose etp as a divisor of it"
            )
