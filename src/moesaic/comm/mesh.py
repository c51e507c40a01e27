"""One world of ranks, seen twice: dense (dp, tp) and sparse (edp, ep, etp), with a transport between the ranks.

PyTorch's `DeviceMesh` carries DTensors, FSDP2 and checkpoints; the layers' own movements go over the transport, point to
point, and need no process groups beyond the world: their groups are tuples of ranks, from the grid.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moesaic.comm.agree import check_same
from moesaic.comm.deepep import DeepEP
from moesaic.comm.gloo import Gloo
from moesaic.comm.nccl import Nccl
from moesaic.comm.sockets import Sockets
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid

__all__ = ["Mesh", "check_same", "open_transport"]

DeviceType = Literal["cpu", "cuda"]

LAUNCHER_VARIABLE = "LOCAL_WORLD_SIZE"
"""Where torchrun says how many ranks it started on this node. What a launcher says is no switch: config overrides it."""


@dataclass(frozen=True)
class Mesh:
    """The ranks, as one of them sees them. Make it with `Mesh.create`.

    A mesh of one process without `torch.distributed` has no device meshes: nothing is sharded on it.
    """

    grid: Grid
    """Sizes of the axes and everyone's coordinates."""
    transport: AbstractTransport
    """To the other ranks."""
    _dense: DeviceMesh | None = None
    _sparse: DeviceMesh | None = None

    @classmethod
    def create(
        cls,
        *,
        tp: int = 1,
        ep: int = 1,
        etp: int = 1,
        pp: int = 1,
        cp: int = 1,
        innermost: Literal["etp", "ep"] = "etp",
        ranks_per_node: int | None = None,
        device_type: DeviceType = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> Mesh:
        """Lay a mesh over all processes. All of them call this together; dp and edp follow from their number.

        Args:
            tp: tensor parallelism of the dense part.
            ep: ranks over which experts are split.
            etp: ranks over which each expert's hidden width is split.
            pp: reserved: 1.
            cp: reserved: 1.
            innermost: which of etp and ep has consecutive ranks.
            ranks_per_node: consecutive ranks that share a node; None takes what torchrun says, else one node.
            device_type: "cpu" sends over sockets, "cuda" over NCCL between the current devices.
            group: a process group of the whole world; None is the default group.

        Raises:
            InputError: on every rank: sizes that do not fit the world, or ranks that ask for different meshes.
        """
        transport = open_transport(device_type, group)
        per_node = ranks_per_node if ranks_per_node is not None else _ranks_of_launcher()
        asked = {"tp": tp, "ep": ep, "etp": etp, "pp": pp, "cp": cp, "innermost": innermost, "ranks_per_node": per_node}
        check_same(transport, {f"mesh.{name}": value for name, value in asked.items()})
        for name, size in (("pp", pp), ("cp", cp)):
            if size != 1:
                raise InputError(f"mesh.{name}={size}: it is reserved for later: set it to 1")
        grid = Grid(
            world=transport.world,
            tp=tp,
            ep=ep,
            etp=etp,
            innermost=innermost,
            ranks_per_node=_fitting(per_node, transport.world, ranks_per_node is None),
        )
        if isinstance(transport, NoTransport):
            return cls(grid, transport)
        return cls(grid, transport, _dense(grid, device_type), _sparse(grid, device_type))

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def is_distributed(self) -> bool:
        """Whether there are process groups, and so device meshes."""
        return self._dense is not None

    @property
    def dense(self) -> DeviceMesh:
        """The world as ("dp", "tp").

        Raises:
            RuntimeError: where `torch.distributed` is not initialised.
        """
        return _existing(self._dense)

    @property
    def sparse(self) -> DeviceMesh:
        """The world as ("edp", "ep", "etp").

        Raises:
            RuntimeError: where `torch.distributed` is not initialised.
        """
        return _existing(self._sparse)

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The dims ("ep", "etp") of this rank's copy of the experts; None where there are no process groups."""
        return None if self._sparse is None else self._sparse["ep", "etp"]

    @property
    def intra_node(self) -> tuple[int, ...]:
        """The ranks on this rank's node, ascending."""
        node = self.grid.node_of(self.rank)
        return tuple(rank for rank in range(self.grid.world) if self.grid.node_of(rank) == node)

    @property
    def inter_node(self) -> tuple[int, ...]:
        """The rail: the ranks with this rank's place on every node, ascending."""
        place = self.grid.local_of(self.rank)
        return tuple(rank for rank in range(self.grid.world) if self.grid.local_of(rank) == place)

    @cached_property
    def deepep(self) -> DeepEP:
        """DeepEP over ep, one for all layers on this mesh; only where that package is installed."""
        return DeepEP(self.sparse["ep"].get_group())

    def group(self, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from this one on `axes` only, ascending, this one among them."""
        return self.grid.group(self.rank, axes)


def open_transport(device_type: DeviceType = "cpu", group: dist.ProcessGroup | None = None) -> AbstractTransport:
    """Open a transport between all processes; all of them call this together.

    Args:
        device_type: "cpu" for sockets, "cuda" for NCCL between the current devices.
        group: a process group of the whole world; None is the default group. NCCL makes its own groups; sockets need one for
            the ranks' addresses, and where two ranks cannot be connected, the transport is Gloo (a warning says so).

    Returns:
        the transport; without `torch.distributed`, that of a world of one rank.

    Raises:
        InputError: for a device type that is missing here or that the process group cannot serve.
    """
    if device_type not in ("cpu", "cuda"):
        raise InputError(f"device_type={device_type!r}: write 'cpu' or 'cuda'")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise InputError("device_type='cuda': there is no CUDA device here: write 'cpu'")
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    if not dist.is_initialized():
        return NoTransport(device)
    world_group = group or dist.group.WORLD
    assert world_group is not None
    if world_group.size() != dist.get_world_size():
        raise InputError(
            f"the process group of a mesh has {world_group.size()} of the {dist.get_world_size()} ranks: "
            "pass a group of all of them"
        )
    if device_type == "cuda":
        return Nccl.create(device)
    backends = str(dist.get_backend_config(world_group))
    if "cpu:gloo" not in backends:
        raise InputError(
            f"the process group has backend {backends}: for device_type='cpu' initialise it with 'gloo' or "
            "'cpu:gloo,cuda:nccl'"
        )
    sockets = Sockets.create(world_group)
    if sockets is not None:
        return sockets
    if world_group.rank() == 0:
        warnings.warn(
            "not all ranks could be connected by sockets: messages go over Gloo, which is slower. Set GLOO_SOCKET_IFNAME to "
            "the network interface that all ranks reach",
            RuntimeWarning,
            stacklevel=2,
        )
    return Gloo(world_group)


def _ranks_of_launcher() -> str | None:
    return os.environ.get(LAUNCHER_VARIABLE) if dist.is_initialized() else None


def _fitting(per_node: int | str | None, world: int, from_launcher: bool) -> int | None:
    """Return ranks per node as a number; what the launcher said must divide the world (config is the grid's to check)."""
    if per_node is None or not from_launcher:
        assert not isinstance(per_node, str)
        return per_node
    text = str(per_node)
    if not text.isdecimal() or int(text) < 1 or world % int(text):
        raise InputError(
            f"{LAUNCHER_VARIABLE}={text} does not divide the {world} ranks: start as many on each node, or set "
            f"mesh.ranks_per_node to a divisor of {world}"
        )
    return int(text)


def _dense(grid: Grid, device_type: str) -> DeviceMesh:
    ranks = torch.arange(grid.world).view(grid.dp, grid.tp)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("dp", "tp"))


def _sparse(grid: Grid, device_type: str) -> DeviceMesh:
    ranks = torch.arange(grid.world)
    if grid.innermost == "etp":
        ranks = ranks.view(grid.edp, grid.ep, grid.etp)
    else:
        ranks = ranks.view(grid.edp, grid.etp, grid.ep).transpose(1, 2)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("edp", "ep", "etp"))


def _existing(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        raise RuntimeError("a mesh of one process has no device meshes: initialise torch.distributed first")
    return mesh
