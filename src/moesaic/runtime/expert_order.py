"""Which expert of a layer is where, once experts have moved: the map between an expert's number and its slot.

Routers, losses, counts, traces and checkpoints know experts by their numbers. Programs, replication policies and
budgets know slots: slot s belongs to place s // (slots per place) of ep, and expert e starts in slot e. Only what
stands between the two asks here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.balance.experts import check_order
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.routing.route import Routed, RoutingRecord
from moesaic.routing.routing import Routing


class ExpertOrder:
    """The order of one layer's experts on a mesh, and the load that was seen of them.

    Args:
        num_experts: how many experts the layer has.
    """

    def __init__(self, num_experts: int) -> None:
        self.experts: np.ndarray = np.arange(num_experts)
        """(num_experts,) int64: the expert in each slot, the same on all ranks."""
        self.watches = False
        """Whether `note` adds up."""
        self._slot: Tensor | None = None
        self._seen: dict[int, Tensor] = {}

    @property
    def is_plain(self) -> bool:
        """Whether every expert is in the slot of its number."""
        return self._slot is None

    def change(self, experts: np.ndarray) -> None:
        """Take another order; moving the weights is the caller's part.

        Args:
            experts: (num_experts,) int64: the expert in each slot.

        Raises:
            InputError: if it is no permutation.
        """
        check_order(experts, len(self.experts))
        self.experts = np.array(experts, dtype=np.int64)
        plain = np.array_equal(self.experts, np.arange(len(self.experts)))
        self._slot = None if plain else torch.from_numpy(np.append(np.argsort(self.experts), len(self.experts)))

    def slots(self, experts: Tensor) -> Tensor:
        """Return the slot of each expert, int64 as they are; that of no expert is none."""
        if self._slot is None:
            return experts
        if self._slot.device != experts.device:
            self._slot = self._slot.to(experts.device)
        return self._slot[experts]

    def columns(self, counts: np.ndarray) -> np.ndarray:
        """Return counts per expert, (..., num_experts), as counts per slot."""
        return counts if self._slot is None else counts[..., self.experts]

    def in_slots(self, routing: Routing) -> Routing:
        """Return a routing to slots in place of experts; its counts are by slot too."""
        if self._slot is None:
            return routing
        at = torch.from_numpy(self.experts).to(routing.counts.device)
        return replace(
            routing, expert=self.slots(routing.expert), counts=routing.counts[at], requested=routing.requested[at]
        )

    def routed(self, routed: Routed) -> Routed:
        """Return what the route stage returned with the choice and the routing by slot; counts of the record stay."""
        if self._slot is None:
            return routed
        choice = routed.record.choice
        record = routed.record._replace(choice=choice._replace(expert=self.slots(choice.expert)))
        return routed._replace(routing=self.in_slots(routed.routing), record=record)

    def note(self, record: RoutingRecord) -> None:
        """Add a call's copies to what was seen, on the device, without a sync; nothing where nobody watches."""
        if not self.watches or record.by_rank is None:
            return
        ranks = len(record.by_rank)
        self._seen[ranks] = self._seen[ranks] + record.by_rank if ranks in self._seen else record.by_rank.clone()

    def take(self, grid: Grid) -> np.ndarray:
        """Return the copies that each rank had for each expert since the last `take`, (world, num_experts) float64.

        Where the ranks of a tensor group route the same tokens, each is given an equal share of them.

        Args:
            grid: the mesh.
        """
        found = np.zeros((grid.world, len(self.experts)))
        for ranks, seen in self._seen.items():
            share = grid.world // ranks
            found += np.repeat(seen.cpu().numpy(), share, axis=0) / share
        self._seen = {}
        return found

    def guard(self, experts: nn.Module) -> None:
        """Let the experts' `state_dict` and `load_state_dict` refuse to mix up experts that are not in their slots."""
        experts.register_state_dict_pre_hook(self._refuse)
        experts.register_load_state_dict_pre_hook(self._refuse)

    def _refuse(self, *_: object) -> None:
        if not self.is_plain:
            raise InputError(
                "experts are placed anew, so a state_dict would take one for another: save and load within "
                "`with placement.at_home():`"
            )
