"""Moving experts between ranks with all that belongs to them: weights, gradients, master copies, optimizer state.

SmartMoE's published code moves parameters only: moments stay behind, and an optimizer with master copies writes the old
expert's weights over the new one's at its next step. Here every tensor that has a part per expert moves, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts, ModuleExperts
from moesaic.experts.experts import is_dtensor
from moesaic.program.grid import Grid

Masters = Mapping[nn.Parameter, Tensor]
"""From parameters to copies that the optimizer steps in their place."""


@dataclass(frozen=True)
class ExpertSlots:
    """What this rank has of a layer's slots, of one parameter or, of modules, of all."""

    slots: list[list[Tensor]]
    """By place among this rank's slots: its tensors, as views of what the optimizer steps."""
    layout: str
    """What each slot has, in words; the same on all ranks."""
    over_edp: bool = False
    """Data-parallel sharding cuts between slots, so that the copies of the experts have different ones of them."""

    @property
    def slot_bytes(self) -> int:
        """Of one slot on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.slots[0]) if self.slots else 0


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank sent."""

    num_bytes: int = 0
    inter_node_bytes: int = 0
    """Of them, to other nodes."""

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.num_bytes + other.num_bytes, self.inter_node_bytes + other.inter_node_bytes)


def expert_slots_of(
    experts: AbstractExperts, optimizer: torch.optim.Optimizer | None, masters: Masters
) -> list[ExpertSlots]:
    """Return what moves with a layer's experts; call it anew for each move, since state comes and goes.

    Args:
        experts: spread over a mesh; under FSDP, not between its hooks.
        optimizer: of their parameters; None for none.
        masters: copies of parameters that move too, with their own state.

    Raises:
        InputError: for optimizer state that has no part per expert.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(experts, FSDPModule):
        experts.reshard()
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    if isinstance(experts, ModuleExperts):
        return [_of_modules(experts, state, masters)]
    return [_of_parameter(name, experts, state, masters) for names in experts.names for name in names]


def _of_parameter(name: str, experts: AbstractExperts, state: Mapping[Any, Any], masters: Masters) -> ExpertSlots:
    """Return the slots of a stacked parameter: every tensor cut along its first dimension."""
    parameter = experts.get_parameter(name)
    rows, tensors, words = len(_local(parameter)), [], []
    for what, value in _belongings(parameter, state, masters):
        if value.dim() == 0 or (value.numel() == 1 and value.shape != parameter.shape):
            continue  # a count of steps: all experts have the same
        local = _local(value)
        if len(local) != rows:
            raise InputError(
                f"place_experts: the optimizer's {what} of {name}, {tuple(value.shape)}, cannot be cut by expert as "
                f"{tuple(parameter.shape)} can: use an optimizer whose state is shaped like parameters, or leave it off"
            )
        tensors.append(local)
        words.append(f"{what} {value.dtype} {tuple(value.shape[1:])}")
    over_edp = is_dtensor(parameter) and any(
        axis == "edp" and getattr(place, "dim", None) == 0
        for axis, place in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements)
    )
    slots = [[tensor[row] for tensor in tensors] for row in range(rows)]
    return ExpertSlots(slots, f"{name}: {', '.join(words)}", over_edp)


def _of_modules(experts: ModuleExperts, state: Mapping[Any, Any], masters: Masters) -> ExpertSlots:
    """Return the slots of modules: all their parameters, buffers and state, counts of steps too."""
    slots, words = [], ""
    for module in experts.experts.children():
        found = [
            (f"{name} {what}", value)
            for name, parameter in module.named_parameters()
            for what, value in _belongings(parameter, state, masters)
        ]
        found += list(module.named_buffers())
        slots.append([_local(value) for _, value in found])
        words = ", ".join(f"{what} {value.dtype} {tuple(value.shape)}" for what, value in found)
    return ExpertSlots(slots, f"modules: {words}")


def _belongings(parameter: nn.Parameter, state: Mapping[Any, Any], masters: Masters) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that belongs to a parameter, with a name, in the same order on all ranks."""
    owners: list[tuple[str, Tensor]] = [("weight", parameter)]
    if parameter in masters:
        owners.append(("master", masters[parameter]))
    for owner, tensor in owners:
        yield owner, tensor.detach()
        if tensor.grad is not None:
            yield f"{owner}.grad", tensor.grad
        for key, value in sorted(state.get(tensor, {}).items()):
            if isinstance(value, Tensor):
                yield f"{owner}.{key}", value
            elif value is not None and not isinstance(value, int | float | str):
                raise InputError(
                    f"place_experts: the optimizer keeps a {type(value).__name__} as its {key}, which cannot be cut by "
                    "expert: use an optimizer whose state is tensors, or leave it off"
                )


@torch.no_grad()
def carry_slots(
    expert_slots: ExpertSlots, transport: AbstractTransport, grid: Grid, before: np.ndarray, after: np.ndarray
) -> SentBytes:
    """Move experts from slot to slot; all ranks call it together.

    Args:
        expert_slots: what this rank has.
        transport: between all ranks.
        grid: the mesh.
        before: (num_experts,) the expert in each slot now.
        after: the same when it returns.
    """
    tag, rank = transport.take_tags(1), transport.rank
    holder = _holders(expert_slots, grid, rank, len(before))
    was = np.empty(len(before), dtype=np.int64)
    was[before] = np.arange(len(before))
    sends: dict[int, list[Tensor]] = {}
    receives: dict[int, list[int]] = {}
    stays: list[tuple[int, Tensor]] = []
    for slot, expert in enumerate(after):
        (source, old), (target, new) = holder[was[expert]], holder[slot]
        if source == rank and target == rank and old != new:
            stays.append((new, _packed(expert_slots.slots[old], transport.device)))
        elif source == rank and target != rank:
            sends.setdefault(target, []).append(_packed(expert_slots.slots[old], transport.device))
        elif target == rank and source != rank:
            receives.setdefault(source, []).append(new)
    messages = {peer: torch.cat(parts) for peer, parts in sends.items()}
    buffers = {
        peer: torch.empty(len(places) * expert_slots.slot_bytes, dtype=torch.uint8, device=transport.device)
        for peer, places in receives.items()
    }
    transport.wait(transport.issue(Transfer(rank, tag, messages, buffers)))
    arrived = (
        (new, part) for peer, places in receives.items() for new, part in zip(places, _cut(buffers[peer], places))
    )
    for new, part in (*stays, *arrived):
        _unpack(part, expert_slots.slots[new])
    others = {peer: message.numel() for peer, message in messages.items()}
    return SentBytes(
        sum(others.values()), sum(n for peer, n in others.items() if grid.node_of(peer) != grid.node_of(rank))
    )


def _holders(expert_slots: ExpertSlots, grid: Grid, rank: int, num_experts: int) -> list[tuple[int, int]]:
    """Return who has each slot among the ranks that this one trades with, and at which place among its own."""
    each = num_experts // grid.ep
    traders = grid.group(rank, ("edp", "ep") if expert_slots.over_edp else ("ep",))
    at = {(grid.coordinate(r, "edp") if expert_slots.over_edp else 0, grid.coordinate(r, "ep")): r for r in traders}
    part = -(-each // grid.edp) if expert_slots.over_edp else each
    found = [(at[slot % each // part, slot // each], slot % each % part) for slot in range(num_experts)]
    held = sum(owner == rank for owner, _ in found)
    assert held == len(expert_slots.slots), (
        f"rank {rank} has {len(expert_slots.slots)} slots of {expert_slots.layout}, not {held}"
    )
    return found


def _packed(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of tensors, one after the other."""
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8).to(device) for tensor in tensors]
    return torch.cat(parts)


def _cut(buffer: Tensor, places: list[int]) -> tuple[Tensor, ...]:
    return buffer.view(len(places), -1).unbind()


def _unpack(part: Tensor, tensors: list[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        whole = part[start:end].clone()  # of its own: other types want aligned storage
        tensor.copy_(whole.view(tensor.dtype).view(tensor.shape))
        start = end


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part, as a view."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()
