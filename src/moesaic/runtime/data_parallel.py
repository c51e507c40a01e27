"""Data parallelism around a layer: the gradients over a mesh without FSDP, and the ranks of a layer that no mesh spreads.

On a mesh a local backward pass leaves dense gradients that belong to the rank's data-parallel group, and expert gradients that
are sums over all tokens of one copy of the experts. With a loss that is a mean over each group's tokens, the global gradient is
the dense sum over dp and the expert sum over edp, both divided by dp: no factor depends on ep, etp or tp.

Where no mesh spreads a layer, each rank under DDP or FSDP2 has tokens of its own (`DataRanks`). What spans the tokens of all of
them is summed over them: the load that a router adapts to, the counts of a loss over the global batch. Summing one rank's
copies several times (over a tensor parallel dimension, say) changes neither.
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
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts
from moesaic.experts.experts import is_dtensor
from moesaic.program.grid import Axis

BUCKET_BYTES = 32 * 2**20
"""Gradients that travel together, at most, unless one alone has more: a message for each would cost its latency."""


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
    buckets: dict[tuple[Axis, torch.dtype], list[Tensor]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        local: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
        axis: Axis = "edp" if id(parameter) in of_experts else "dp"
        held = buckets.setdefault((axis, local.dtype), [])
        if held and sum(each.nbytes for each in held) + local.nbytes > BUCKET_BYTES:
            _average(buckets.pop((axis, local.dtype)), axis, mesh)
            held = buckets.setdefault((axis, local.dtype), [])
        held.append(local)
    for (axis, _), held in buckets.items():
        _average(held, axis, mesh)


def _average(gradients: list[Tensor], axis: Axis, mesh: Mesh) -> None:
    """Sum gradients of one dtype over an axis, all in one message to each rank, and divide them by dp, in place."""
    joined = gradients[0].flatten() if len(gradients) == 1 else torch.cat([each.flatten() for each in gradients])
    summed = all_reduce_sum(mesh.transport, mesh.grid.group(mesh.rank, (axis,)), joined) / mesh.grid.dp
    for gradient, found in zip(gradients, summed.split([each.numel() for each in gradients])):
        gradient.copy_(found.view_as(gradient))


Group = dist.ProcessGroup | Literal["auto"] | None
"""The ranks that train a layer together; "auto" to find them, None for this process alone."""


class DataRanks:
    """What one layer knows of them. A copy of it, or what is read from a file, starts to look for them anew."""

    def __init__(self) -> None:
        self._groups: tuple[dist.ProcessGroup, ...] | None = None
        self._is_given = False

    def settle(self, group: Group, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Take the ranks that are given, or look for them.

        Args:
            group: what the user says; "auto" leaves what was said before.
            parameters: the parameters of the layer; those that FSDP2 has split tell the ranks.
        """
        if group != "auto":
            self._groups, self._is_given = () if group is None else (group,), True
        elif not self._is_given:
            for parameter in parameters:
                if is_dtensor(parameter) and any(place.is_shard() for place in parameter.placements):
                    self._groups = tuple(parameter.device_mesh.get_all_groups())
                    return

    def note_wrapper(self) -> None:
        """Take the ranks of the DDP whose forward pass runs, if one does."""
        if self._groups is None and _world() > 1 and not torch.compiler.is_compiling():
            wrapper = DistributedDataParallel._get_active_ddp_module()
            if wrapper is not None:
                self._groups = (wrapper.process_group,)

    def total(self, counts: Tensor, of: str) -> Tensor:
        """Return the sum over the ranks; all of them call this together.

        Args:
            counts: (n,) int64 of this rank.
            of: what the counts are for, for a message.

        Raises:
            InputError: if there are several processes and nobody said which of them train the layer.
        """
        if _world() == 1:
            return counts
        if self._groups is None:
            raise InputError(
                f"{of} spans the tokens of all ranks, and which of the {_world()} processes train this layer together is "
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


def wrapped_by_ddp(model: nn.Module) -> dict[nn.Module, dist.ProcessGroup]:
    """Return the modules inside a DDP that `model` is or has, with its process group."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return {module: wrapper.process_group for wrapper in wrappers for module in wrapper.modules()}


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
