"""`ExpertPlacement`: the experts of a model's MoE layers move between ranks now and then, and the model stays the same.

Between two optimizer steps a policy (`balance/experts.py`) looks at the load of the steps before and says which expert
goes where; weights and all that the optimizer keeps of them follow. Routers, losses, counts and traces never learn of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from moesaic.balance.experts import AbstractExpertPlacer, Balanced, ExpertLoad, check_order, places_of
from moesaic.comm.agree import check_same
from moesaic.comm.collectives import all_reduce_max, all_reduce_sum, broadcast
from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts, ModuleExperts
from moesaic.experts.experts import is_dtensor
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import TopologyRouter
from moesaic.runtime.balance.experts.move import ExpertSlots, Masters, SentBytes, carry_slots, expert_slots_of
from moesaic.runtime.expert_order import ExpertOrder
from moesaic.runtime.expert_parallel import ExpertParallel


class PlacedLayer(Protocol):
    """What is asked of a layer; `MoE` is one."""

    experts: AbstractExperts
    router: AbstractRouter
    on_mesh: ExpertParallel | None


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a decision did, over all layers and ranks."""

    experts: int
    """That went to another place; copies and shards of an expert count once."""
    num_bytes: int
    """SentBytes between ranks."""
    inter_node_bytes: int
    """Of them, between nodes."""
    busiest_before: tuple[float, ...] = ()
    """Per layer: copies per step at the busiest place over the mean, where experts were; none seen is 0."""
    busiest_after: tuple[float, ...] = ()
    """The same load where experts are now."""


class ExpertPlacement:
    """Places the experts of layers anew every so many optimizer steps; all ranks make it and call it together.

    Until it is dropped, a layer's parameters hold experts by slot: `state_dict` is refused except `at_home`.

    Args:
        layers: MoE layers on the mesh.
        mesh: the ranks.
        optimizer: of the experts' parameters; its state moves with them.
        every: steps between decisions.
        placer: the policy; None for `Balanced`.
        masters: copies of parameters that the optimizer steps in their place; they move too.

    Raises:
        InputError: for layers that are on no mesh, a mesh without expert parallelism, a router that asks where experts are.
    """

    def __init__(
        self,
        layers: Sequence[PlacedLayer],
        mesh: Mesh,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        placer: AbstractExpertPlacer | None = None,
        masters: Masters | None = None,
    ) -> None:
        if every < 1:
            raise InputError(f"place_experts every={every}: must be at least 1 step")
        if mesh.grid.ep == 1:
            raise InputError(
                "place_experts: with mesh.ep=1 every rank has all experts, none of which can move: choose an ep above 1"
            )
        self.every, self._mesh, self._optimizer = every, mesh, optimizer
        self._placer, self._masters = placer or Balanced(), masters or {}
        self._layers = [layer.experts for layer in layers]
        self._orders = [_order_of(layer) for layer in layers]
        for experts, order in zip(self._layers, self._orders):
            order.watches = True
            order.guard(experts)
        self._steps = 0

    @property
    def orders(self) -> list[np.ndarray]:
        """Per layer (num_experts,) int64: the expert in each slot."""
        return [order.experts for order in self._orders]

    def after_step(self) -> Moved | None:
        """Count an optimizer step; every `every` steps decide and move. All ranks call it, gradients best set to None.

        Returns:
            what moved, if there was a decision.
        """
        self._steps += 1
        if self._steps % self.every:
            return None
        loads = self._loads()
        moved = self.place(self._decide(loads))
        after = [places_of(order, self._mesh.grid.ep) for order in self.orders]
        return Moved(
            experts=moved.experts,
            num_bytes=moved.num_bytes,
            inter_node_bytes=moved.inter_node_bytes,
            busiest_before=tuple(_over_mean(load, load.place) for load in loads),
            busiest_after=tuple(_over_mean(load, place) for load, place in zip(loads, after)),
        )

    def place(self, orders: Sequence[np.ndarray]) -> Moved:
        """Move experts to these orders; all ranks call it together, between steps.

        Args:
            orders: per layer (num_experts,) int64: the expert in each slot.

        Raises:
            InputError: on every rank, with nothing moved: for an order that is no permutation, optimizer state that cannot be
                cut by expert, ranks that differ in either.
        """
        grid, transport = self._mesh.grid, self._mesh.transport
        if len(orders) != len(self._layers):
            raise InputError(f"place_experts: {len(orders)} orders for {len(self._layers)} layers: give one each")
        everything, refusal = self._all_slots(orders)
        fields = {f"place_experts layer {number} order": list(order) for number, order in enumerate(orders)}
        of_layers = {
            f"place_experts layer {n} state": "; ".join(s.layout for s in of) for n, of in enumerate(everything)
        }
        check_same(transport, {**fields, **of_layers, "place_experts": refusal})
        if refusal:
            raise InputError(refusal)
        sent, moved = SentBytes(), 0
        for of_layer, order, wanted in zip(everything, self._orders, orders):
            if np.array_equal(order.experts, wanted):
                continue
            for expert_slots in of_layer:
                sent += carry_slots(expert_slots, transport, grid, order.experts, wanted)
            moved += int((places_of(order.experts, grid.ep) != places_of(wanted, grid.ep)).sum())
            order.change(wanted)
        told = torch.tensor([sent.num_bytes, sent.inter_node_bytes], device=transport.device)
        num_bytes, between = all_reduce_sum(transport, tuple(range(grid.world)), told).tolist()
        return Moved(experts=moved, num_bytes=num_bytes, inter_node_bytes=between)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """A stretch in which every expert is in the slot of its number, for saving and loading; all ranks enter it.

        After an error experts stay at home: ranks that do not agree on one could not move them together.
        """
        away = [order.copy() for order in self.orders]
        self.place([np.arange(len(order)) for order in away])
        yield
        self.place(away)

    def _all_slots(self, orders: Sequence[np.ndarray]) -> tuple[list[list[ExpertSlots]], str]:
        """Return what moves, by layer, and why this rank cannot; "" where it can."""
        found: list[list[ExpertSlots]] = []
        try:
            for experts, order in zip(self._layers, orders):
                check_order(order, experts.num_experts)
                found.append(expert_slots_of(experts, self._optimizer, self._masters))
        except InputError as error:
            return [], str(error)
        return found, ""

    def _decide(self, loads: Sequence[ExpertLoad]) -> list[np.ndarray]:
        """Return the first rank's orders, the same on all: times that differ in a last bit might order them otherwise."""
        transport = self._mesh.transport
        found = self.orders if transport.rank else [self._placer.decide(load) for load in loads]
        told = torch.from_numpy(np.concatenate(found)).to(transport.device)
        told = broadcast(transport, tuple(range(self._mesh.grid.world)), told, 0).cpu()
        return [part.numpy() for part in told.split([len(order) for order in found])]

    def _loads(self) -> list[ExpertLoad]:
        """Return the load of each layer since the last decision; all ranks get the same."""
        transport, grid = self._mesh.transport, self._mesh.grid
        mine = [sum(expert_slots.slot_bytes for expert_slots in of) for of in self._all_slots(self.orders)[0]]
        sizes = torch.tensor(mine or [0] * len(self._layers), device=transport.device)
        largest = all_reduce_max(transport, tuple(range(grid.world)), sizes).tolist()
        return [
            ExpertLoad(
                grid=grid,
                copies=order.take(grid) / self.every,
                order=order.experts,
                dim=experts.dim,
                expert_parameters=_shard_parameters(experts, grid.etp),
                expert_bytes=num_bytes,
                steps=self.every,
            )
            for experts, order, num_bytes in zip(self._layers, self._orders, largest)
        ]


def _order_of(layer: PlacedLayer) -> ExpertOrder:
    if layer.on_mesh is None:
        raise InputError("place_experts: a layer is on no mesh: call parallelize(mesh, plan) on it first")
    if isinstance(layer.router, TopologyRouter):
        raise InputError(
            "place_experts clashes with the router TopologyRouter, whose choices depend on where experts are: choose another"
        )
    return layer.on_mesh.order


def _shard_parameters(experts: AbstractExperts, etp: int) -> int:
    """Return the parameters of one shard of an expert, however data parallelism splits it."""
    if isinstance(experts, ModuleExperts):
        return sum(parameter.numel() for parameter in next(experts.experts.children()).parameters())
    return sum(p.numel() // len(p) // (etp if is_dtensor(p) else 1) for p in experts.parameters())


def _over_mean(load: ExpertLoad, place: np.ndarray) -> float:
    mean = float(load.weight.sum(1).max()) / load.grid.ep
    return load.busiest(place) / mean if mean else 0.0
