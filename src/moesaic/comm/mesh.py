"""One world of ranks, seen twice: dense (dp, tp) and sparse (edp, ep, etp), with a transport between the ranks.

PyTorch's `DeviceMesh` carries DTensors, FSDP2 and checkpoints; the layers' own movements go over the transport, point to
point, and need no process groups beyond the world: their groups are tuples of ranks, from the grid.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moesaic.comm import TransportName
from moesaic.comm.agree import check_same
from moesaic.comm.deepep import DeepEP
from moesaic.comm.gloo import Gloo
from moesaic.comm.nccl import Nccl
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid

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
        transport: TransportName = "auto",
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
            device_type: "cpu" or "cuda", which is every process's current device.
            transport: what carries the messages of MoE layers: "auto" takes "gloo" for "cpu" and "nccl" for "cuda"; "sockets"
                is another one for "cpu", on which small messages arrive sooner (docs/distributed.md).
            group: a process group of the whole world; None is the default group.

        Raises:
            InputError: on every rank: sizes that do not fit the world, a transport that does not serve the devices or cannot
                connect the ranks, or ranks that ask for different meshes.
        """
        opened = open_transport(device_type, group, transport)
        per_node = ranks_per_node if ranks_per_node is not None else _ranks_of_launcher()
        asked = {"tp": tp, "ep": ep, "etp": etp, "pp": pp, "cp": cp, "innermost": innermost, "ranks_per_node": per_node}
        check_same(opened, {f"mesh.{name}": value for name, value in asked.items()})
        for name, size in (("pp", pp), ("cp", cp)):
            if size != 1:
                raise InputError(f"mesh.{name}={size}: it is reserved for later: set it to 1")
        grid = Grid(
            world=opened.world,
            tp=tp,
            ep=ep,
            etp=etp,
            innermost=innermost,
            ranks_per_node=_fitting(per_node, opened.world, ranks_per_node is None),
        )
        if isinstance(opened, NoTransport):
            return cls(grid, opened)
        return cls(grid, opened, _dense(grid, device_type), _sparse(grid, device_type))

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


def open_transport(
    device_type: DeviceType = "cpu", group: dist.ProcessGroup | None = None, name: TransportName = "auto"
) -> AbstractTransport:
    """Open a transport between all processes; all of them call this together.

    Args:
        device_type: "cpu", or "cuda" for the current devices.
        group: a process group of the whole world; None is the default group. NCCL makes its own groups; sockets tell each
            other the ranks' addresses through this one.
        name: which transport; "auto" takes "gloo" for "cpu" and "nccl" for "cuda".

    Returns:
        the transport; without `torch.distributed`, that of a world of one rank.

    Raises:
        InputError: for a device type that is missing here or that the process group or the transport cannot serve, for ranks
            that name different transports, and where sockets cannot connect two ranks.
    """
    if device_type not in ("cpu", "cuda"):
        raise InputError(f"device_type={device_type!r}: write 'cpu' or 'cuda'")
    if name not in get_args(TransportName):
        raise InputError(f"transport={name!r} is unknown: choose one of {', '.join(get_args(TransportName))}")
    if name != "auto" and (name == "nccl") != (device_type == "cuda"):
        raise InputError(f"transport={name} does not carry messages between {device_type} devices: choose auto")
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
    gloo = Gloo(world_group)
    check_same(gloo, {"transport": name})
    if name == "sockets":
        from moesaic.comm.sockets import Sockets

        return Sockets.create(world_group)
    return gloo


def open_group(group: dist.ProcessGroup, device_type: str) -> AbstractTransport:
    """Open a transport between the ranks of a process group, which may be a part of the world; all of them call it together.

    Args:
        group: with backend gloo for "cpu"; for "cuda" only its ranks are read, since a lane wants a group of its own.
        device_type: "cpu", or "cuda" for the current devices.

    Raises:
        InputError: for another device type, or a group that cannot serve it.
    """
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        return Nccl.create(device, dist.get_process_group_ranks(group))
    if device_type != "cpu" or "gloo" not in str(dist.get_backend(group)):
        raise InputError(
            f"no transport moves rows between {device_type} devices over {dist.get_backend(group)}: use cuda, or cpu with gloo"
        )
    return Gloo(group)


def group_grid(group: dist.ProcessGroup, tp: int) -> Grid:
    """Return the grid of a process group of consecutive ranks that spread the experts among them, one copy of each.

    Args:
        group: the ranks.
        tp: so many neighbours hold the same tokens.
    """
    ranks, said = dist.get_process_group_ranks(group), _ranks_of_launcher()
    per_node = int(said) if said is not None and said.isdecimal() else len(ranks)
    spans_nodes = 0 < per_node < len(ranks) and len(ranks) % per_node == 0 and ranks[0] % per_node == 0
    return Grid(world=len(ranks), tp=tp, ep=len(ranks), ranks_per_node=per_node if spans_nodes else None)


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
