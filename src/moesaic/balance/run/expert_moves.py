"""`ExpertPlacement`: moves the experts of a model's MoE layers between ranks from time to time,
without changing the model.

Between two optimizer steps, a policy (`balance/expert_placement.py`) computes from recent loads
which expert goes to which slot. Weights and their optimizer state follow. Routers, losses, counts
and traces are not affected.

Experts move with everything that belongs to them: weights, gradients, master copies, optimizer
state. SmartMoE's published code moves only parameters: moments stay behind, and an optimizer with
master copies overwrites the new expert's weights with the old one's at its next step. Here every
tensor that has a part per expert moves, bit by bit.

An expert is in a *slot*: with n experts, place p of ep has the slots from p * n / ep on. An *order*
is the expert in each slot, (num_experts,) int64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.balance.expert_placement import AbstractExpertPlacer, Balanced, ExpertLoad, places_of
from moesaic.comm.collectives import all_reduce_max, all_reduce_sum, broadcast, check_same
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts, ModuleExperts
from moesaic.initial_values import is_dtensor
from moesaic.program.grid import Grid
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import TopologyRouter
from moesaic.runtime.call_counts import check_order
from moesaic.runtime.expert_order import ExpertOrder
from moesaic.runtime.expert_parallel import ExpertParallel

Masters = Mapping[nn.Parameter, Tensor]
"""Maps parameters to the copies that the optimizer steps instead of them."""


@dataclass(frozen=True)
class ExpertSlots:
    """The tensors in this rank's slots of a layer: of one stacked parameter, or of all modules."""

    slots: list[list[Tensor]]
    """For each of this rank's slots: its tensors, as views of those that the optimizer steps."""
    layout: str
    """A description of the tensors of a slot, the same on all ranks."""
    shards: int = 1
    """Over how many ranks along edp data-parallel sharding cuts between slots, so that they have
    different slots."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on this rank."""
        if not self.slots:
            return 0
        return sum(tensor.numel() * tensor.element_size() for tensor in self.slots[0])


def expert_slots_of(
    experts: AbstractExperts, optimizer: torch.optim.Optimizer | None, masters: Masters
) -> list[ExpertSlots]:
    """Return everything that moves with a layer's experts. Call it again before each move, since
    optimizer state changes.

    Args:
        experts: experts that are spread over a mesh; under FSDP, not between its hooks.
        optimizer: the optimizer of their parameters; None for none.
        masters: copies of parameters, which move too, with their own optimizer state.

    Raises:
        InputError: for optimizer state that cannot be cut by expert.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(experts, FSDPModule):
        experts.reshard()  # then its parameters are the shards, which the optimizer steps
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    if isinstance(experts, ModuleExperts):
        return [_module_slots(experts, state, masters)]
    sharded_names, common_names = experts.names
    return [
        _parameter_slots(name, experts, state, masters) for name in (*sharded_names, *common_names)
    ]


def _parameter_slots(
    name: str, experts: AbstractExperts, state: Mapping[Any, Any], masters: Masters
) -> ExpertSlots:
    """Return the slots of a stacked parameter: every tensor is cut along its first dimension."""
    parameter = experts.get_parameter(name)
    rows = len(_local(parameter))
    tensors = []
    descriptions = []
    for tensor_name, value in _belongings(parameter, state, masters):
        is_step_count = value.numel() == 1 and value.shape != parameter.shape
        if value.dim() == 0 or is_step_count:  # the same for all experts
            continue
        local = _local(value)
        if len(local) != rows:
            raise InputError(
                f"place_experts: the optimizer's {tensor_name} of {name}, {tuple(value.shape)}, "
                f"cannot be cut by expert as {tuple(parameter.shape)} can: use an optimizer whose "
                "state is shaped like parameters, or leave it off"
            )
        tensors.append(local)
        descriptions.append(f"{tensor_name} {value.dtype} {tuple(value.shape[1:])}")

    shards = 1
    if is_dtensor(parameter):  # ep and etp are its last axes, those of data parallelism the others
        device_mesh = parameter.device_mesh
        for axis, place in enumerate(parameter.placements[:-2]):
            if getattr(place, "dim", None) == 0:  # it splits the dimension of experts
                shards *= device_mesh.size(axis)
    slots = [[tensor[row] for tensor in tensors] for row in range(rows)]
    return ExpertSlots(slots, f"{name}: {', '.join(descriptions)}", shards)


def _module_slots(
    experts: ModuleExperts, state: Mapping[Any, Any], masters: Masters
) -> ExpertSlots:
    """Return the slots of modules: all their parameters, buffers and optimizer state, step counts
    included."""
    slots = []
    description = ""
    for module in experts.experts.children():
        tensors = []
        for name, parameter in module.named_parameters():
            for what, value in _belongings(parameter, state, masters):
                tensors.append((f"{name} {what}", value))
        tensors += list(module.named_buffers())
        slots.append([_local(value) for _, value in tensors])
        description = ", ".join(
            f"{tensor_name} {value.dtype} {tuple(value.shape)}" for tensor_name, value in tensors
        )
    return ExpertSlots(slots, f"modules: {description}")


def _belongings(
    parameter: nn.Parameter, state: Mapping[Any, Any], masters: Masters
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that belongs to a parameter, with a name, in the same order on all
    ranks."""
    # the parameter and its master copy, each with its gradient and its optimizer state
    copies: list[tuple[str, Tensor]] = [("weight", parameter)]
    if parameter in masters:
        copies.append(("master", masters[parameter]))
    for name, tensor in copies:
        yield name, tensor.detach()
        if tensor.grad is not None:
            yield f"{name}.grad", tensor.grad
        for key, value in sorted(state.get(tensor, {}).items()):
            if isinstance(value, Tensor):
                yield f"{name}.{key}", value
            # numbers and words are of all experts, and stay where they are
            elif value is not None and not isinstance(value, int | float | str):
                raise InputError(
                    f"place_experts: the optimizer keeps a {type(value).__name__} as its {key}, "
                    "which cannot be cut by expert: use an optimizer whose state is tensors, or "
                    "leave it off"
                )


@torch.no_grad()
def carry_slots(
    expert_slots: ExpertSlots,
    transport: AbstractTransport,
    grid: Grid,
    before: np.ndarray,
    after: np.ndarray,
) -> tuple[int, int]:
    """Move experts from slot to slot. All ranks call this together.

    Args:
        expert_slots: this rank's slots.
        transport: the transport between all ranks.
        grid: the mesh.
        before: (num_experts,) the expert in each slot before the move.
        after: (num_experts,) the expert in each slot after it.

    Returns:
        the bytes that this rank sent, and how many of them went to other nodes.
    """
    tag = transport.take_tags(1)
    rank = transport.rank
    device = transport.device
    holders = _holders(expert_slots, grid, rank, len(before))
    old_slot = np.argsort(before)  # of each expert

    # by peer, this rank included: the packed slots to send, and the indices of the slots to fill
    leaving: dict[int, list[Tensor]] = {}
    arriving: dict[int, list[int]] = {}
    for slot, expert in enumerate(after):
        source, source_index = holders[old_slot[expert]]
        target, target_index = holders[slot]
        if (source, source_index) == (target, target_index):  # it stays
            continue
        if source == rank:
            packed = _packed(expert_slots.slots[source_index], device)
            leaving.setdefault(target, []).append(packed)
        if target == rank:
            arriving.setdefault(source, []).append(target_index)

    messages = {peer: torch.cat(parts) for peer, parts in leaving.items()}
    buffers = {}
    for peer, indices in arriving.items():
        if peer != rank:
            num_bytes = len(indices) * expert_slots.slot_bytes
            buffers[peer] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    arrived = dict(buffers)
    if rank in messages:  # slots that change on this rank are not sent
        arrived[rank] = messages.pop(rank)
    transport.wait(transport.issue(Transfer(rank, tag, sends=messages, receives=buffers)))
    for peer, indices in arriving.items():
        for index, part in zip(indices, arrived[peer].view(len(indices), -1)):
            _unpack(part, expert_slots.slots[index])

    sent_bytes = {peer: message.numel() for peer, message in messages.items()}
    to_other_nodes = [peer for peer in sent_bytes if grid.node_of(peer) != grid.node_of(rank)]
    return sum(sent_bytes.values()), sum(sent_bytes[peer] for peer in to_other_nodes)


def _holders(
    expert_slots: ExpertSlots, grid: Grid, rank: int, num_experts: int
) -> list[tuple[int, int]]:
    """Return, for each slot, the rank that has it, among the ranks that exchange with this one, and
    its index on that rank."""
    per_place = num_experts // grid.ep
    shards = expert_slots.shards
    # the ranks that hold all slots once: their coordinates along edp form a run of `shards`
    run = grid.coordinate(rank, "edp") // shards
    rank_at = {}
    for other in grid.group(rank, ("edp", "ep")):
        edp = grid.coordinate(other, "edp")
        if edp // shards == run:
            # by position within the run, and place of ep
            rank_at[edp % shards, grid.coordinate(other, "ep")] = other

    per_rank = -(-per_place // shards)  # rounded up
    holders = []
    for slot in range(num_experts):
        place, slot_in_place = divmod(slot, per_place)
        shard, index = divmod(slot_in_place, per_rank)
        holders.append((rank_at[shard, place], index))
    num_own = sum(holder == rank for holder, _ in holders)
    assert num_own == len(expert_slots.slots), (
        f"rank {rank} has {len(expert_slots.slots)} slots of {expert_slots.layout}, not {num_own}"
    )
    return holders


def _packed(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of tensors, one after another."""
    parts = []
    for tensor in tensors:
        flat = tensor.contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8).to(device))
    return torch.cat(parts)


def _unpack(part: Tensor, tensors: list[Tensor]) -> None:
    """Copy the bytes of a message into tensors, one after the other."""
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        aligned = part[start:end].clone()  # a copy, since other dtypes need aligned storage
        tensor.copy_(aligned.view(tensor.dtype).view(tensor.shape))
        start = end


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a view."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


class PlacedLayer(Protocol):
    """The attributes that placement needs of a layer; `MoE` has them."""

    experts: AbstractExperts
    router: AbstractRouter
    on_mesh: ExpertParallel | None


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Statistics of one placement, over all layers and ranks."""

    experts: int
    """Number of experts that went to another place of ep; copies and shards of an expert count
    once."""
    num_bytes: int
    """Bytes that were sent between ranks."""
    inter_node_bytes: int
    """Bytes that were sent between nodes."""
    busiest_before: tuple[float, ...] = ()
    """Per layer: load of the busiest place over the mean load, with the old placement; 0 if there
    was no load."""
    busiest_after: tuple[float, ...] = ()
    """The same for the same load with the new placement."""


class ExpertPlacement:
    """Places the experts of layers anew every `every` optimizer steps. All ranks create it and call
    it together.

    As long as it is used, a layer's parameters hold experts by slot, and `state_dict` is refused
    outside of `at_home`.

    Args:
        layers: MoE layers on the mesh.
        optimizer: the optimizer of the experts' parameters; its state moves with them.
        every: optimizer steps between decisions.
        placer: the policy; None for `Balanced`.
        speeds: speed of each rank's products relative to the rates of the policy; () if all are
            equal.
        masters: copies that the optimizer steps instead of parameters; they move too.

    Raises:
        InputError: for layers on no mesh, a mesh without expert parallelism, or a router that
            depends on where experts are.
    """

    def __init__(
        self,
        layers: Sequence[PlacedLayer],
        mesh: Mesh,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        placer: AbstractExpertPlacer | None = None,
        speeds: tuple[float, ...] = (),
        masters: Masters | None = None,
    ) -> None:
        if every < 1:
            raise InputError(f"place_experts every={every}: must be at least 1 step")
        if mesh.grid.ep == 1:
            raise InputError(
                "place_experts: with mesh.ep=1 every rank has all experts, none of which can "
                "move: choose an ep above 1"
            )
        self.every = every
        self._mesh = mesh
        self._optimizer = optimizer
        self._placer = placer or Balanced()
        self._masters = masters or {}
        self._layers = [layer.experts for layer in layers]
        """The experts of each layer."""
        self._orders = [_order_of(layer) for layer in layers]
        """The order of each layer, which also sums its load."""
        self._speeds = speeds
        for experts, order in zip(self._layers, self._orders):
            order.watches = True  # it sums the load of calls from now on
            order.guard(experts)  # refuses `state_dict` unless experts are in their own slots
        self._steps = 0
        """Optimizer steps so far."""

    @property
    def orders(self) -> list[np.ndarray]:
        """Per layer, (num_experts,) int64: the expert in each slot."""
        return [order.experts for order in self._orders]

    def after_step(self) -> Moved | None:
        """Count an optimizer step; every `every` steps, decide and move. All ranks call this, best
        with gradients set to None.

        Returns:
            statistics of the moves, if there was a decision.
        """
        self._steps += 1
        if self._steps % self.every:
            return None
        loads = self._loads()
        moved = self.place(self._decide(loads))
        before = [_busiest_over_mean(load, load.place) for load in loads]
        after = [
            _busiest_over_mean(load, places_of(order, self._mesh.grid.ep))
            for load, order in zip(loads, self.orders)
        ]
        return replace(moved, busiest_before=tuple(before), busiest_after=tuple(after))

    def place(self, orders: Sequence[np.ndarray]) -> Moved:
        """Move experts to the given orders. All ranks call this together, between steps.

        Args:
            orders: per layer, (num_experts,) int64: the expert in each slot.

        Raises:
            InputError: on every rank, before anything moves: if an order is not a permutation,
                optimizer state cannot be cut by expert, or ranks differ in either.
        """
        grid = self._mesh.grid
        transport = self._mesh.transport
        if len(orders) != len(self._layers):
            raise InputError(
                f"place_experts: {len(orders)} orders for {len(self._layers)} layers: give one each"
            )
        all_slots, refusal = self._all_slots(orders)
        self._check_agreement(orders, all_slots, refusal)

        sent = torch.zeros(2, dtype=torch.int64)  # bytes, and those of them to other nodes
        num_moved = 0
        for layer_slots, order, new_order in zip(all_slots, self._orders, orders):
            if np.array_equal(order.experts, new_order):
                continue
            for expert_slots in layer_slots:
                carried = carry_slots(expert_slots, transport, grid, order.experts, new_order)
                sent += torch.tensor(carried)
            is_moved = places_of(order.experts, grid.ep) != places_of(new_order, grid.ep)
            num_moved += int(is_moved.sum())
            order.change(new_order)

        everyone = tuple(range(grid.world))
        sent_by_all = all_reduce_sum(transport, everyone, sent.to(transport.device))
        num_bytes, inter_node_bytes = sent_by_all.tolist()
        return Moved(experts=num_moved, num_bytes=num_bytes, inter_node_bytes=inter_node_bytes)

    def _check_agreement(
        self, orders: Sequence[np.ndarray], all_slots: Sequence[Sequence[ExpertSlots]], refusal: str
    ) -> None:
        """Raise InputError on every rank if ranks differ in what moves or where, or if one of them
        cannot move it."""
        fields: dict[str, object] = {}
        for number, order in enumerate(orders):
            fields[f"place_experts layer {number} order"] = list(order)
        for number, layer_slots in enumerate(all_slots):
            layouts = [expert_slots.layout for expert_slots in layer_slots]
            fields[f"place_experts layer {number} state"] = "; ".join(layouts)
        fields["place_experts"] = refusal
        check_same(self._mesh.transport, fields)
        if refusal:
            raise InputError(refusal)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Return a context in which every expert is in its own slot, for saving and loading. All
        ranks enter it together.

        After an error inside, experts stay in their own slots: not all ranks may have had it, so
        they could not move together.
        """
        placed = [order.copy() for order in self.orders]
        self.place([np.arange(len(order)) for order in placed])
        yield
        self.place(placed)

    def _all_slots(self, orders: Sequence[np.ndarray]) -> tuple[list[list[ExpertSlots]], str]:
        """Return what moves, by layer, and "" or the reason why this rank cannot move it."""
        slots: list[list[ExpertSlots]] = []
        try:
            for experts, order in zip(self._layers, orders):
                check_order(order, experts.num_experts)
                slots.append(expert_slots_of(experts, self._optimizer, self._masters))
        except InputError as error:
            return [], str(error)
        return slots, ""

    def _decide(self, loads: Sequence[ExpertLoad]) -> list[np.ndarray]:
        """Return the first rank's orders on all ranks: rounding differences could lead ranks to
        different orders."""
        transport = self._mesh.transport
        orders = self.orders
        if transport.rank == 0:
            orders = [self._placer.decide(load) for load in loads]
        lengths = [len(order) for order in orders]
        joined = torch.from_numpy(np.concatenate(orders)).to(transport.device)
        everyone = tuple(range(self._mesh.grid.world))
        joined = broadcast(transport, everyone, joined, source=0).cpu()
        return [part.numpy() for part in joined.split(lengths)]

    def _loads(self) -> list[ExpertLoad]:
        """Return the load of each layer since the last decision, the same on all ranks."""
        transport = self._mesh.transport
        grid = self._mesh.grid
        all_slots, _ = self._all_slots(self.orders)
        layer_bytes = [0] * len(self._layers)  # if this rank cannot move its experts
        if all_slots:
            layer_bytes = [sum(slots.slot_bytes for slots in of_layer) for of_layer in all_slots]
        sizes = torch.tensor(layer_bytes, device=transport.device)
        largest = all_reduce_max(transport, tuple(range(grid.world)), sizes).tolist()

        return [
            ExpertLoad(
                grid=grid,
                copies=order.take(grid) / self.every,  # summed since the last decision
                order=order.experts,
                dim=experts.dim,
                expert_parameters=_shard_parameters(experts, grid.etp),
                expert_bytes=num_bytes,
                steps=self.every,
                speeds=self._speeds,
            )
            for experts, order, num_bytes in zip(self._layers, self._orders, largest)
        ]


def _order_of(layer: PlacedLayer) -> ExpertOrder:
    """Return where the experts of a layer are, and refuse a layer whose experts cannot move."""
    if layer.on_mesh is None:
        raise InputError(
            "place_experts: a layer is on no mesh: call parallelize(mesh, plan) on it first"
        )
    if isinstance(layer.router, TopologyRouter):
        raise InputError(
            "place_experts clashes with the router TopologyRouter, whose choices depend on "
            "where experts are: choose another"
        )
    return layer.on_mesh.order


def _shard_parameters(experts: AbstractExperts, etp: int) -> int:
    """Return the number of parameters of one shard of an expert, independently of data-parallel
    sharding."""
    if isinstance(experts, ModuleExperts):
        first_expert = next(experts.experts.children())
        return sum(parameter.numel() for parameter in first_expert.parameters())
    total = 0
    for parameter in experts.parameters():  # (experts, ...); a DTensor counts those of all ranks
        shards = etp if is_dtensor(parameter) else 1
        total += parameter.numel() // len(parameter) // shards
    return total


def _busiest_over_mean(load: ExpertLoad, place: np.ndarray) -> float:
    """Return the load of the busiest place over the mean of the fullest replica; 0 without load."""
    mean = float(load.weight.sum(1).max()) / load.grid.ep
    return load.busiest(place) / mean if mean else 0.0
