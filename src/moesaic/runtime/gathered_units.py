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
            is_held = any(group is held for held, _ in self._freed)  # since an earlier change
            if mesh_info is not None:
                self._freed.append((group, mesh_info))
                group.post_forward_mesh_info = None  # FSDP2 then keeps its parameters
            elif not is_held:  # it keeps its parameters whole anyway
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


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module's state; [] if it is no FSDP2 unit. Newer releases of
    torch have a list of them, older ones at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups:
        return [group for group in groups if group is not None]
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


def _groups_in_forward() -> list[tuple[Any, Any]]:
    """Return the parameter groups of all FSDP2 units of this process that a forward pass is in, and
    over which mesh each keeps its parameters where it is left; None where it keeps them whole."""
    if "torch.distributed.fsdp" not in sys.modules:  # nobody has made a unit
        return []
    try:
        from torch.distributed._composable_state import _module_state_mapping

        forward = _forward()
        groups_in_forward = []
        for reference in _module_state_mapping.values():
            for group in _groups_of(reference()):
                if group._training_state == forward:
                    groups_in_forward.append((group, group.post_forward_mesh_info))
        return groups_in_forward
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"in_flight cannot keep FSDP2's units gathered under torch {torch.__version__} "
            f"({error}): run the micro-batches one after another, or use torch 2.10 to 2.15"
        ) from None
