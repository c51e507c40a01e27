"""Data parallelism around a layer: averaging gradients over a mesh without FSDP, and the ranks that train a layer on no mesh.

On a mesh, a local backward pass produces dense gradients for the rank's data-parallel group. Expert gradients are sums over all
tokens of one copy of the experts. If the loss is a mean over each group's tokens, the global gradient is the dense sum over dp
and the expert sum over edp, both divided by dp. No factor depends on ep, etp or tp.

If a layer is on no mesh, each rank under DDP or FSDP2 has tokens of its own (`DataRanks`). Quantities over all tokens are then
summed over these ranks: the load that a router adapts to, and the counts of a loss over the global batch. Counting the copies
of a rank several times (over a tensor-parallel dimension, for example) changes neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moesaic.comm.collectives import all_reduce_sum
from moesaic.comm.mesh import Mesh
from moesaic.draw import is_dtensor
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts
from moesaic.program.grid import Axis

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module from which DDP reads the names of parameters that it leaves alone."""
BUCKET_BYTES = 32 * 2**20
"""Largest size of a bucket of gradients, unless a single gradient is larger. One message per gradient would cost its latency
each."""


def expert_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of all experts that are spread over a mesh. Shared experts are left out: they are dense layers."""
    for part in module.modules():
        if isinstance(part, AbstractExperts) and part.is_spread:
            yield from part.parameters()


@torch.no_grad()
def average_gradients(module: nn.Module, mesh: Mesh) -> None:
    """Make the gradients of a module those of the mean over all ranks' tokens. Call it once, before the optimizer step.

    All ranks call it together. A parameter without a gradient on this rank counts as zero, so ranks need not agree on which
    parameters have one.

    Args:
        module: a module with its MoE layers on the mesh and no part wrapped by FSDP or DDP, which average by themselves.
        mesh: the ranks.

    Raises:
        InputError: `mesh` is no `Mesh`.
    """
    if not isinstance(mesh, Mesh):
        raise InputError(
            f"average_gradients: mesh={mesh!r} is no Mesh: give the mesh of the module's layers"
        )
    expert_ids = {id(parameter) for parameter in expert_parameters(module)}
    buckets: dict[tuple[Axis, torch.dtype], list[Tensor]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        local: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
        axis: Axis = "edp" if id(parameter) in expert_ids else "dp"
        bucket = buckets.setdefault((axis, local.dtype), [])
        if bucket and sum(each.nbytes for each in bucket) + local.nbytes > BUCKET_BYTES:
            _average(buckets.pop((axis, local.dtype)), axis, mesh)
            bucket = buckets.setdefault((axis, local.dtype), [])
        bucket.append(local)
    for (axis, _), bucket in buckets.items():
        _average(bucket, axis, mesh)


def _average(gradients: list[Tensor], axis: Axis, mesh: Mesh) -> None:
    """Sum gradients of one dtype over an axis, in one all-reduce, and divide them by dp, in place."""
    joined = (
        gradients[0].flatten()
        if len(gradients) == 1
        else torch.cat([each.flatten() for each in gradients])
    )
    summed = (
        all_reduce_sum(mesh.transport, mesh.grid.group(mesh.rank, (axis,)), joined) / mesh.grid.dp
    )
    for gradient, average in zip(gradients, summed.split([each.numel() for each in gradients])):
        gradient.copy_(average.view_as(gradient))


Group = dist.ProcessGroup | Literal["auto"] | None
"""The ranks that train a layer together: a process group, "auto" to detect them, or None for this process alone."""


class DataRanks:
    """The ranks that train one layer on tokens of their own. Copied or unpickled, it forgets them and detects them anew."""

    def __init__(self) -> None:
        self._groups: tuple[dist.ProcessGroup, ...] | None = None
        self._is_fixed = False

    def settle(self, group: Group, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Set the ranks, or detect them from the parameters.

        Args:
            group: the user's argument; "auto" keeps an earlier group that was given.
            parameters: the layer's parameters; FSDP2's sharded ones have a device mesh of the ranks.
        """
        if group != "auto":
            self._groups, self._is_fixed = () if group is None else (group,), True
        elif not self._is_fixed:
            for parameter in parameters:
                if is_dtensor(parameter) and any(
                    place.is_shard() for place in parameter.placements
                ):
                    self._groups = tuple(parameter.device_mesh.get_all_groups())
                    return

    def note_wrapper(self) -> None:
        """Take the ranks of the DDP wrapper that is in its forward pass, if any."""
        if self._groups is None and _world() > 1 and not torch.compiler.is_compiling():
            wrapper = DistributedDataParallel._get_active_ddp_module()
            if wrapper is not None:
                self._groups = (wrapper.process_group,)

    def total(self, counts: Tensor, purpose: str) -> Tensor:
        """Return the sum over the ranks. All of them call this together.

        Args:
            counts: (n,) int64 of this rank.
            purpose: the use of the counts, for the error message.

        Raises:
            InputError: if there are several processes, and it is unknown which of them train the layer.
        """
        if _world() == 1:
            return counts
        if self._groups is None:
            raise InputError(
                f"{purpose} spans the tokens of all ranks, and which of the {_world()} processes train this layer together is "
                "unknown: call balance_on_step(optimizer, model) on the model that DDP or FSDP2 has wrapped, or pass it "
                "group=a process group, or group=None if each process trains alone"
            )
        total = counts.clone()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> DataRanks:
        return DataRanks()

    def __reduce__(self) -> tuple[type[DataRanks], tuple[()]]:
        return DataRanks, ()


class UnpreparedForDDP:
    """What a module has in place of the names of parameters that DDP ignores, until `prepare_ddp` sets them.

    DDP reads the names of the module that it wraps first of all. Without them it fails later on, in words about DTensors.
    """

    REFUSAL = (
        "DDP would give all ranks the first one's experts, which are spread over a mesh: call "
        "moesaic.prepare_ddp(model, mesh) before DDP wraps the model"
    )

    def __iter__(self) -> Iterator[str]:
        raise InputError(self.REFUSAL)

    @classmethod
    def mark(cls, module: nn.Module) -> None:
        """Mark a module some of whose experts are spread, unless somebody chose what DDP ignores in it."""
        if not hasattr(module, DDP_IGNORES):
            setattr(module, DDP_IGNORES, cls())


def wrapped_by_ddp(model: nn.Module) -> dict[nn.Module, dist.ProcessGroup]:
    """Return the process group of each module that is wrapped by DDP in `model`."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return {module: wrapper.process_group for wrapper in wrappers for module in wrapper.modules()}


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
