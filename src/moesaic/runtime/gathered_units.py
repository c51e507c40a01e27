"""FSDP2 units that two micro-batches in flight share stay gathered until the second has left them.

A unit frees its parameters when a forward pass leaves it, and knows nothing of a second one that is
still inside. So while two micro-batches are in flight, a unit that one of them is in when it hands
its turn over does not free them where it would; the second to leave frees them, since FSDP2 then
takes the unit for one that no forward pass is in. A rank thus holds the parameters of at most two
blocks, beside what it holds anyway. The gradients need nothing: the unit's hook at the end of its
backward pass is that of the micro-batch which entered first, whose backward pass leaves last.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from moesaic.errors import InputError


class GatheredUnits:
    """The FSDP2 units that two micro-batches are in, from their first change of turns to their
    end."""

    def __init__(self) -> None:
        self._freed: list[tuple[Any, Any]] = []
        """The parameter groups that would free their parameters, with the mesh over which they
        would keep them."""

    def hold(self) -> list[Any]:
        """Keep the units gathered that a forward pass is in. Return the parameter groups of those
        that stay gathered anyway."""
        staying = []
        for group, mesh_info in _groups_in_forward():
            if mesh_info is not None:
                self._freed.append((group, mesh_info))
                group.post_forward_mesh_info = None
            elif all(group is not other for other, _ in self._freed):
                staying.append(group)
        return staying

    def restore(self) -> None:
        """Let units free their parameters again as before."""
        for group, mesh_info in self._freed:
            group.post_forward_mesh_info = mesh_info
        self._freed.clear()


def enter_again(groups: list[Any]) -> None:
    """Tell parameter groups which stay gathered that a forward pass is in them; else FSDP2 would
    free them where the second micro-batch leaves."""
    for group in groups:
        group._training_state = _forward()


def _forward() -> Any:
    """Return FSDP2's word for a unit that a forward pass is in."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return _fsdp_common.TrainingState.FORWARD


def _groups_in_forward() -> list[tuple[Any, Any]]:
    """Return the parameter groups of all FSDP2 units of this process that a forward pass is in, and
    over which mesh each keeps its parameters where it is left; None where it keeps them whole."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    try:
        from torch.distributed._composable_state import _module_state_mapping

        states = [reference() for reference in _module_state_mapping.values()]
        groups = [
            group
            for state in states
            for group in getattr(state, "_fsdp_param_groups", None)
            or [getattr(state, "_fsdp_param_group", None)]
            if group is not None
        ]
        forward = _forward()
        return [
            (group, group.post_forward_mesh_info)
            for group in groups
            if group._training_state == forward
        ]
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"in_flight cannot keep FSDP2's units gathered under torch {torch.__version__} "
            f"({error}): run the micro-batches one after another, or use torch 2.10 to 2.13"
        ) from None
