"""The ranks that train one layer together where no mesh spreads it: under DDP or FSDP2 each has tokens of its own.

What spans the tokens of all of them is summed over them: the load that a router adapts to, the counts of a loss over the
global batch. Summing one rank's copies several times (over a tensor parallel dimension, say) changes neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moesaic.errors import InputError
from moesaic.experts.experts import is_dtensor

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
            parameters: of the layer; those that FSDP2 has split tell the ranks.
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

    @staticmethod
    def refuse_wrapped(parameters: Iterable[nn.Parameter]) -> None:
        """Make sure that no DDP takes parameters of which every rank has its own for copies of the same.

        Args:
            parameters: of experts that are spread over a mesh.

        Raises:
            InputError: if the DDP whose forward pass runs does.
        """
        if torch.compiler.is_compiling():
            return
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None and not all(hasattr(parameter, "_ddp_ignored") for parameter in parameters):
            raise InputError(
                "DDP would give all ranks the first one's experts, which are spread over a mesh: call "
                "moesaic.parallel.prepare_ddp(model, mesh) before DDP wraps the model"
            )

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
