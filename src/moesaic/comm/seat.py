"""What a layer needs of a mesh: the coordinates, this rank, and a wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from moesaic.comm.wire import AbstractWire
from moesaic.program.grid import Grid


class AbstractMesh(Protocol):
    """A mesh as one rank sees it."""

    @property
    def grid(self) -> Grid:
        """The sizes of the axes, and every rank's coordinates."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def wire(self) -> AbstractWire:
        """Between this rank and the others."""

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The dims ("ep", "etp") of this rank's copy of the experts; None where there are no process groups."""


@dataclass(frozen=True)
class Seat:
    """A mesh on any wire, without process groups: a loopback rank, or one's own experiments."""

    grid: Grid
    wire: AbstractWire
    expert_mesh: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        """The rank whose wire it is."""
        return self.wire.rank
