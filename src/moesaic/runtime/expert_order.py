"""The map between an expert's number and its slot, for layers whose experts have moved between
ranks.

Routers, losses, counts, traces and checkpoints identify experts by number. Programs, replication
policies and budgets use slots: slot s belongs to place s // (slots per place) of ep, and expert e
starts in slot e. Only code between the two uses this map.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.routing.route import Routed, RoutingRecord
from moesaic.routing.routing import Routing
from moesaic.runtime.call_counts import check_order


class ExpertOrder:
    """The order of one layer's experts on a mesh, and each expert's recorded load."""

    def __init__(self, num_experts: int) -> None:
        self.experts: np.ndarray = np.arange(num_experts)
        """(num_experts,) int64: the expert in each slot, the same on all ranks."""
        self.watches = False
        """Whether `note` records loads."""
        self._slot: Tensor | None = None
        """(num_experts + 1,) int64: the slot of each expert, and last the number that means "no
        expert"; None if every expert e is in slot e."""
        self._recorded: dict[int, Tensor] = {}
        """Sums of `Gathered.by_rank`, (rows, num_experts), by their number of rows: one per
        rank, or one per tensor-parallel group."""

    @property
    def is_plain(self) -> bool:
        """Whether every expert e is in slot e."""
        return self._slot is None

    def change(self, experts: np.ndarray) -> None:
        """Change the order. The caller moves the weights.

        Args:
            experts: (num_experts,) int64: the expert in each slot.

        Raises:
            InputError: if it is not a permutation.
        """
        check_order(experts, len(self.experts))
        self.experts = np.array(experts, dtype=np.int64)
        is_plain = np.array_equal(self.experts, np.arange(len(self.experts)))
        self._slot = None
        if not is_plain:
            # the last entry is the number that means "no expert"
            slots = np.append(np.argsort(self.experts), len(self.experts))
            self._slot = torch.from_numpy(slots)

    def slots(self, experts: Tensor) -> Tensor:
        """Return the slot of each expert, int64. The number that means "no expert" stays as it
        is."""
        if self._slot is None:
            return experts
        if self._slot.device != experts.device:
            self._slot = self._slot.to(experts.device)
        return self._slot[experts]

    def columns(self, counts: np.ndarray) -> np.ndarray:
        """Return counts per expert, (..., num_experts), as counts per slot."""
        return counts if self._slot is None else counts[..., self.experts]

    def in_slots(self, routing: Routing) -> Routing:
        """Return a routing with slots instead of experts; its counts are per slot too."""
        if self._slot is None:
            return routing
        experts = torch.from_numpy(self.experts).to(routing.counts.device)
        return replace(
            routing,
            expert=self.slots(routing.expert),
            counts=routing.counts[experts],
            requested=routing.requested[experts],
        )

    def routed(self, routed: Routed) -> Routed:
        """Return the route stage's result with slots in its choice and its routing; counts of the
        record stay per expert."""
        if self._slot is None:
            return routed
        choice = routed.record.choice
        record = routed.record._replace(choice=choice._replace(expert=self.slots(choice.expert)))
        return routed._replace(routing=self.in_slots(routed.routing), record=record)

    def note(self, record: RoutingRecord) -> None:
        """Add a call's copies to the recorded load, on the device, without a sync. Does nothing
        unless `watches` is set."""
        if not self.watches or record.gathered is None:
            return
        copies = record.gathered.by_rank
        num_rows = len(copies)
        if num_rows in self._recorded:
            copies = self._recorded[num_rows] + copies
        self._recorded[num_rows] = copies

    def take(self, grid: Grid) -> np.ndarray:
        """Return the copies that each rank had for each expert since the last `take`, (world,
        num_experts) float64.

        If the ranks of a tensor-parallel group route the same tokens, each rank gets an equal share
        of the copies.

        Args:
            grid: the mesh.
        """
        copies = np.zeros((grid.world, len(self.experts)))
        for num_rows, counts in self._recorded.items():
            ranks_per_row = grid.world // num_rows  # tp, or 1
            of_ranks = np.repeat(counts.cpu().numpy(), ranks_per_row, axis=0)
            copies += of_ranks / ranks_per_row
        self._recorded = {}
        return copies

    def guard(self, experts: nn.Module) -> None:
        """Make the experts' `state_dict` and `load_state_dict` raise InputError while experts are
        not in their own slots."""
        experts.register_state_dict_pre_hook(self._refuse)
        experts.register_load_state_dict_pre_hook(self._refuse)

    def _refuse(self, *_: object) -> None:
        """Raise InputError unless every expert is in its own slot."""
        if not self.is_plain:
            raise InputError(
                "experts have changed their slots, so a state_dict would mix them up: save and "
                "load within `with placement.at_home():`"
            )
