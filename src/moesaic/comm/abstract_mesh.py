"""What a layer needs of a mesh: coordinates, this rank, a transport. `Mesh` is one; on a loopback rank `Mesh(grid,
transport)`."""

from __future__ import annotations

from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from moesaic.comm.deepep import DeepEP
from moesaic.comm.transport import AbstractTransport
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
    def transport(self) -> AbstractTransport:
        """Between this rank and the others."""

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The dims ("ep", "etp") of this rank's copy of the experts; None where there are no process groups."""

    @property
    def deepep(self) -> DeepEP:
        """DeepEP over ep, one for all layers on the mesh; asked for where a plan names it."""
