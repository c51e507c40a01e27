"""The ranks of a layer in two views, dense (dp, tp) and sparse (edp, ep, etp), with a transport
between them.

tp is tensor parallelism of the dense part, dp data parallelism; ep splits the experts, etp the
hidden width of each, and edp counts the replicas of the experts. dp and edp are two axes each where
parameters are sharded inside nodes and replicated between them (`Mesh.shard`).

A mesh covers all processes, those of a process group, or those of a `DeviceMesh` or sub-mesh (of a
pipeline stage, say). PyTorch's `DeviceMesh` is for DTensors, FSDP2 and checkpoints. The layers' own
movements use the transport, point to point. They need no process groups of their own: their groups
are tuples of ranks, computed by the grid.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from itertools import groupby
from math import lcm
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moesaic.comm.collectives import check_same
from moesaic.comm.process_groups import Gloo, Nccl, keep_timeout, timeout_of
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError, to_install
from moesaic.program.grid import Axis, Grid, check_size

DeviceType = Literal["cpu", "cuda"]
Sharding = Literal["all", "node", "none"]
"""Over which ranks data parallelism shards parameters: all that hold copies, those on one node
(copies on other nodes are replicas), or none (every copy is whole)."""

TRANSPORTS = ("auto", "gloo", "nccl")
"""Names of the transports of this package: gloo between CPUs, nccl between GPUs; auto is the one
for the devices."""
TRANSPORTS_GROUP = "moesaic.transports"
"""Entry-point group in which other packages offer transports between CPUs: functions from a process
group to a transport."""

LAUNCHER_VARIABLE = "LOCAL_WORLD_SIZE"
"""The variable in which torchrun gives the number of ranks on this node. Settings override it."""


ADVICE_ON_SIZES = {
    "pp": (
        "a pipeline stage has a mesh of its own: Mesh.create(..., group=the process group of its "
        "ranks)"
    ),
    "cp": (
        "ranks that hold other tokens of one sequence are data parallel for a MoE layer: leave it "
        "at 1"
    ),
}
"""What to do instead of setting sizes that a mesh does not have."""
SPLIT_DIMENSIONS = ("ep", "etp", "tp")
"""Dimension names of a `DeviceMesh` that split experts."""
CACHE_ATTRIBUTE = "_moesaic_meshes"
"""Attribute of a root `DeviceMesh` that caches the meshes made over its ranks, so that layers share
a transport."""


class _MeshCache(dict[Any, "Mesh"]):
    """Meshes by the arguments they were made with. A copied or unpickled cache is empty, since
    connections cannot be copied."""

    def __reduce__(self) -> tuple[type[_MeshCache], tuple[()]]:
        return _MeshCache, ()


@dataclass(frozen=True)
class Mesh:
    """The ranks of a layer, as seen by one of them. Ranks are numbered from 0 within the mesh.

    Create one with `Mesh.create` or `Mesh.from_device_mesh`. A mesh of one process without
    `torch.distributed` has no device meshes, so nothing is sharded.
    """

    grid: Grid
    """Sizes of the axes, and the coordinates of every rank."""
    transport: AbstractTransport
    """Connects this rank to the others."""
    process_group: dist.ProcessGroup | None = None
    """The process group of the mesh's ranks; None without `torch.distributed`."""
    shared: dict[type, Any] = field(default_factory=dict, compare=False, repr=False)
    """Objects shared by the layers on this mesh, by class."""
    shard: Sharding = "all"
    """Over which ranks `shard_over_data` shards parameters."""

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
        device_type: DeviceType | None = None,
        transport: str = "auto",
        group: dist.ProcessGroup | None = None,
        shard: Sharding = "all",
    ) -> Mesh:
        """Create a mesh over all processes, or over those of a group, all of which must call this
        together. dp and edp follow.

        If torchrun started several processes and `torch.distributed` is not initialised, this
        initialises it, as torch's `init_device_mesh` does: with Gloo for "cpu", with Gloo and NCCL
        for "cuda", where each rank of a node gets its own GPU.

        Args:
            tp: tensor parallelism of the dense part.
            ep: number of ranks over which experts are split.
            etp: number of ranks over which each expert's hidden width is split.
            pp: must be 1; give each pipeline stage its own mesh over the group of its ranks.
            cp: must be 1; for a MoE layer, ranks with other tokens of the same sequence are data
                parallel.
            innermost: which of etp and ep has consecutive ranks.
            ranks_per_node: number of consecutive ranks that share a node. None: the number that
                torchrun gives, else all ranks.
            device_type: "cpu", or "cuda" for the current device of every process. None: "cuda" if
                there are GPUs, and the transport or the process group, if one exists, connects
                them; else "cpu".
            transport: what sends the messages of MoE layers. "auto" is "gloo" for "cpu" and "nccl"
                for "cuda". Other packages can offer further ones for "cpu", such as the
                laboratory's "sockets" (docs/distributed.md).
            group: the ranks, in ascending order: some or all of the world. None: the default group.
            shard: over which ranks `shard_over_data` shards parameters: "all"; "node", so that
                parameters are gathered inside nodes only, and gradients are summed between nodes;
                or "none".

        Raises:
            InputError: on every rank, if the sizes do not fit the ranks, the transport does not
                support the devices or cannot connect the ranks, or ranks ask for different meshes;
                if a launcher's variables are incomplete, or it started more ranks on this node than
                there are GPUs.
        """
        device_type = device_type or _default_device_type(transport, group)
        _join(device_type)
        opened = open_transport(device_type, group, transport)
        sizes = {"tp": tp, "ep": ep, "etp": etp, "pp": pp, "cp": cp}
        grid = _agreed_grid(
            opened, group, sizes, innermost=innermost, ranks_per_node=ranks_per_node, shard=shard
        )
        process_group = None if isinstance(opened, NoTransport) else group or dist.group.WORLD
        return cls(grid, opened, process_group, shard=shard)

    @classmethod
    def from_device_mesh(
        cls, device_mesh: DeviceMesh, *, tp: int = 1, transport: str = "auto"
    ) -> Mesh:
        """Create a mesh over the ranks of a torch `DeviceMesh` or sub-mesh, all of which must call
        this together.

        The last dimensions split the experts, according to their names:

            "ep"    ranks over which experts are split
            "etp"   ranks over which each expert's hidden width is split
            "tp"    like "etp", for ranks that also hold the same tokens, as a tensor-parallel group
                    does

        Any other name before these, such as "dp", "fsdp" or "cp", stands for ranks with their own
        tokens and with replicas of the same experts. A single dimension without a name is "ep".
        Pass the dimensions of all ranks that train the layer: `world["dp", "ep"]` of a world of
        ("pp", "dp", "ep"). Calls with the same ranks and names return the same mesh.

        Args:
            device_mesh: a device mesh on "cpu" or "cuda".
            tp: number of neighbours that hold the same tokens but split whole experts; only if no
                dimension is called "tp".
            transport: see `create`.

        Raises:
            InputError: on every rank, if no name refers to experts, the names are in another order,
                the sizes do not fit, or no transport supports the device or backend.
        """
        names = _checked_names(device_mesh)
        ranks = tuple(device_mesh.mesh.flatten().tolist())
        root = device_mesh._get_root_mesh()
        if not hasattr(root, CACHE_ATTRIBUTE):
            setattr(root, CACHE_ATTRIBUTE, _MeshCache())
        cache = getattr(root, CACHE_ATTRIBUTE)
        key = (ranks, names, tuple(device_mesh.shape), tp, transport)
        if key not in cache:
            sizes = dict(zip(names, device_mesh.shape))
            grid = Grid(
                world=len(ranks),
                tp=sizes.get("tp", tp),
                ep=sizes.get("ep", 1),
                etp=sizes.get("etp", sizes.get("tp", 1)),  # a dimension "tp" splits experts too
                innermost="ep" if names[-1] == "ep" else "etp",
                ranks_per_node=_ranks_per_node(ranks),
            )
            groups = device_mesh.get_all_groups()  # one for each dimension
            group = groups[0] if device_mesh.ndim == 1 else _new_group(ranks, *groups)
            cache[key] = cls(grid, open_transport(device_mesh.device_type, group, transport), group)
        mesh: Mesh = cache[key]
        return mesh

    @classmethod
    def of(cls, ranks: Mesh | DeviceMesh | dist.ProcessGroup) -> Mesh:
        """Return a mesh over ranks that are given in any form; all of them must call this together.

        Args:
            ranks: a mesh; a `DeviceMesh`, see `from_device_mesh`; or a process group, all of whose
                ranks split the experts. A process group gets new connections on every call: to
                share them between layers, create one mesh with `create(ep=..., group=...)`.

        Raises:
            InputError: for any other type, and see `create` and `from_device_mesh`.
        """
        if isinstance(ranks, Mesh):
            return ranks
        if isinstance(ranks, DeviceMesh):
            return cls.from_device_mesh(ranks)
        if isinstance(ranks, dist.ProcessGroup):
            new_group = _new_group(_world_ranks(ranks), ranks, backend=dist.get_backend(ranks))
            return cls.create(
                ep=ranks.size(),
                group=new_group,
                device_type="cuda" if ranks.name() == "nccl" else "cpu",
            )
        raise InputError(
            "a mesh is a moesaic.Mesh, a DeviceMesh or a process group, not "
            f"{type(ranks).__name__}: write Mesh.create(ep=...)"
        )

    @property
    def rank(self) -> int:
        """This process's rank in the mesh."""
        return self.transport.rank

    @property
    def device(self) -> torch.device:
        """The device whose tensors the ranks exchange: where this rank's model and tokens
        belong."""
        return self.transport.device

    @property
    def is_distributed(self) -> bool:
        """Whether there are process groups, and hence device meshes."""
        return self.process_group is not None

    def shards_of(self, axis: Literal["dp", "edp"]) -> int:
        """Return over how many of the ranks along a data-parallel axis parameters are sharded; the
        others hold replicas."""
        grid = self.grid
        size = grid.size(axis)
        if self.shard == "all":
            return size
        if self.shard == "none":
            return 1
        per_node = grid.ranks_per_node or grid.world
        stride, _ = grid.spans[axis]  # the rank difference between neighbours on the axis
        if per_node % stride:  # a node has no neighbours, or nodes have unequally many
            return 1
        return min(per_node // stride, size)

    def data_mesh(self, axis: Literal["dp", "edp"]) -> DeviceMesh | None:
        """Return the ranks of a data-parallel axis as FSDP2 takes them: one dimension, over which
        parameters are sharded, or two, (replicas, shards). None if nothing is sharded.

        A dimension of shards never has size 1: FSDP2 would divide gradients twice (torch 2.13). All
        ranks must call it together.
        """
        shards = self.shards_of(axis)
        if shards == 1:
            return None
        device_mesh = self.dense if axis == "dp" else self.sparse
        if shards == self.grid.size(axis):
            return device_mesh[axis]
        return device_mesh[f"{axis}_replicate", f"{axis}_shard"]

    def _data_axes(self, axis: Literal["dp", "edp"]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names and sizes of a data-parallel axis's dimensions in a device mesh."""
        size = self.grid.size(axis)
        shards = self.shards_of(axis)
        if shards in (1, size):
            return (axis,), (size,)
        return (f"{axis}_replicate", f"{axis}_shard"), (size // shards, shards)

    @cached_property
    def dense(self) -> DeviceMesh:
        """The ranks as a device mesh ("dp", "tp"), where dp may be two dimensions: ("dp_replicate",
        "dp_shard", "tp"). All ranks must access it together.

        Raises:
            RuntimeError: if `torch.distributed` is not initialised.
        """
        names, sizes = self._data_axes("dp")
        ranks = torch.arange(self.grid.world).view(*sizes, self.grid.tp)
        return self._device_mesh((*names, "tp"), ranks)

    @cached_property
    def sparse(self) -> DeviceMesh:
        """The ranks as a device mesh ("edp", "ep", "etp"), where edp may be two dimensions:
        ("edp_replicate", "edp_shard", "ep", "etp"). All ranks must access it together.

        Raises:
            RuntimeError: if `torch.distributed` is not initialised.
        """
        grid = self.grid
        names, sizes = self._data_axes("edp")
        ranks = torch.arange(self.grid.world)
        if grid.innermost == "etp":
            ranks = ranks.view(*sizes, grid.ep, grid.etp)
        else:
            ranks = ranks.view(*sizes, grid.etp, grid.ep).transpose(-1, -2)
        return self._device_mesh((*names, "ep", "etp"), ranks)

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The dimensions ("ep", "etp") of this rank's replica of the experts; None without process
        groups."""
        return self.sparse["ep", "etp"] if self.is_distributed else None

    def _device_mesh(self, names: tuple[str, ...], ranks: Tensor) -> DeviceMesh:
        """Return the ranks of this mesh as a device mesh. Processes outside the mesh need not take
        part.

        Args:
            names: of the dimensions.
            ranks: ranks of this mesh, one dimension per name.
        """
        if self.process_group is None:
            raise RuntimeError(
                "a mesh of one process has no device meshes: initialise torch.distributed first"
            )
        device_type = self.transport.device.type
        world_ranks = torch.tensor(_world_ranks(self.process_group))
        if len(world_ranks) == _world():
            return keep_timeout(
                DeviceMesh(device_type, ranks, mesh_dim_names=names), self.process_group
            )
        # A group per dimension: the ranks that differ from this one in that coordinate alone.
        coordinates = (ranks == self.rank).nonzero()[0].tolist()
        groups = []
        for dim in range(len(names)):
            index: list[int | slice] = list(coordinates)
            index[dim] = slice(None)
            members = world_ranks[ranks[tuple(index)]]
            groups.append(_new_group(tuple(members.tolist()), self.process_group))
        return DeviceMesh.from_group(
            groups, device_type, world_ranks[ranks].contiguous(), mesh_dim_names=names
        )

    def group(self, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from this one on `axes` only, ascending, including this
        one."""
        return self.grid.group(self.rank, axes)


def _default_device_type(transport: str, group: dist.ProcessGroup | None) -> DeviceType:
    """Return "cuda" if there are GPUs, and the transport or an existing process group connects
    them; else "cpu"."""
    if transport != "auto":  # nccl alone connects GPUs
        return "cuda" if transport == "nccl" else "cpu"
    if not torch.cuda.is_available():
        return "cpu"
    if dist.is_initialized() and "cuda:nccl" not in str(dist.get_backend_config(group)):
        return "cpu"
    return "cuda"


def _agreed_grid(
    transport: AbstractTransport,
    group: dist.ProcessGroup | None,
    sizes: Mapping[str, int],
    *,
    innermost: Literal["etp", "ep"],
    ranks_per_node: int | None,
    shard: Sharding,
) -> Grid:
    """Return the grid of a mesh over a transport's ranks, after these compared what they ask for;
    the arguments are those of `Mesh.create`."""
    # The launcher counts the ranks of the world, of which a part may be spread in another way: its
    # number is compared over ranks only if the mesh has the whole world.
    is_part = group is not None and transport.world < _world()
    per_node: int | str | None = ranks_per_node
    if ranks_per_node is None and not is_part:
        per_node = _launcher_text()
    shape = {**sizes, "innermost": innermost, "ranks_per_node": per_node, "shard": shard}
    check_same(transport, {f"mesh.{name}": value for name, value in shape.items()})
    _check_axes(transport, **sizes)
    if shard not in get_args(Sharding):
        raise InputError(f"mesh.shard={shard!r}: choose one of {', '.join(get_args(Sharding))}")
    if ranks_per_node is None and is_part:  # as the launcher's nodes divide these ranks
        ranks_per_node = _ranks_per_node(_world_ranks(group))
    elif ranks_per_node is None:
        ranks_per_node = _launched_per_node(transport.world)
    return Grid(
        world=transport.world,
        tp=sizes["tp"],
        ep=sizes["ep"],
        etp=sizes["etp"],
        innermost=innermost,
        ranks_per_node=ranks_per_node,
    )


def _check_axes(
    transport: AbstractTransport, *, tp: int, ep: int, etp: int, pp: int, cp: int
) -> None:
    """Raise InputError for sizes that no mesh has, or that need more processes than there are."""
    for name, size in (("tp", tp), ("ep", ep), ("etp", etp)):
        check_size(name, size)
    for name, size in (("pp", pp), ("cp", cp)):
        if size != 1:
            raise InputError(f"mesh.{name}={size}: {ADVICE_ON_SIZES[name]}")
    num_needed = lcm(tp, ep * etp)  # the fewest ranks that both views divide
    if isinstance(transport, NoTransport) and num_needed > 1:
        raise InputError(
            f"a mesh of {tp=}, {ep=}, {etp=} needs several processes: torchrun "
            f"--nproc-per-node {num_needed}"
        )


def _join(device_type: str) -> None:
    """Initialise `torch.distributed` if a launcher started several processes and nobody has
    initialised it."""
    world = os.environ.get("WORLD_SIZE", "1")
    if dist.is_initialized() or world == "1":
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE={world}, but {missing[0]} is not set: start the processes by torchrun, "
            "or call torch.distributed.init_process_group(...) before Mesh.create"
        )
    if device_type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_initialized():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise InputError(
                f"local rank {local_rank} has no GPU, this node has {gpus}: start a process per "
                "GPU, or write Mesh.create(..., device_type='cpu')"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")


def open_transport(
    device_type: str = "cpu", group: dist.ProcessGroup | None = None, name: str = "auto"
) -> AbstractTransport:
    """Open a transport between all processes, or between those of a group; all of them must call
    this together.

    Args:
        device_type: "cpu", or "cuda" for the current devices.
        group: the ranks: some or all of the world. None: the default group. NCCL creates its own
            groups.
        name: which transport; "auto" is "gloo" for "cpu" and "nccl" for "cuda".

    Returns:
        the transport; `NoTransport` if `torch.distributed` is not initialised.

    Raises:
        InputError: if the device type is missing here or not supported by the process group or the
            transport, if ranks name different transports, or if the transport cannot connect two
            ranks.
    """
    if device_type not in ("cpu", "cuda"):
        raise InputError(f"device_type={device_type!r}: write 'cpu' or 'cuda'")
    open_offered = None if name in TRANSPORTS else _offered(name)
    # nccl goes with "cuda", all others with "cpu"
    if name != "auto" and (name == "nccl") != (device_type == "cuda"):
        raise InputError(
            f"transport={name} does not carry messages between {device_type} devices: choose auto"
        )
    if device_type == "cuda" and not torch.cuda.is_available():
        raise InputError("device_type='cuda': there is no CUDA device here: write 'cpu'")
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if not dist.is_initialized():
        return NoTransport(device)
    process_group = group or dist.group.WORLD
    # torch returns another object to ranks outside a group
    if not isinstance(process_group, dist.ProcessGroup):
        raise InputError(
            "this process is not in the process group of the mesh: call on its ranks alone"
        )
    if device_type == "cuda":
        members = None if process_group.size() == _world() else _world_ranks(process_group)
        return Nccl.create(device, members, timeout_of(process_group))
    backends = str(dist.get_backend_config(process_group))
    if "cpu:gloo" not in backends:
        raise InputError(
            f"the process group has backend {backends}: for device_type='cpu' initialise it with "
            "'gloo' or 'cpu:gloo,cuda:nccl'"
        )
    gloo = Gloo(process_group)
    check_same(gloo, {"transport": name})
    return gloo if open_offered is None else open_offered(process_group)


def _offered(name: str) -> Callable[[dist.ProcessGroup], AbstractTransport]:
    """Return the function of another package that opens the transport of this name.

    Raises:
        InputError: if no installed package offers it.
    """
    offered = {entry.name: entry for entry in entry_points(group=TRANSPORTS_GROUP)}
    if name not in offered:
        hint = ""
        if "sockets" not in offered:
            hint = f"; sockets needs the package moesaic-lab: {to_install('./lab')}"
        raise InputError(
            f"transport={name!r} is unknown: choose one of "
            f"{', '.join([*TRANSPORTS, *offered])}{hint}"
        )
    opener: Callable[[dist.ProcessGroup], AbstractTransport] = offered[name].load()
    return opener


def _checked_names(device_mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a device mesh's dimensions, after checking them.

    Raises:
        InputError: if the names do not tell which dimensions split the experts.
    """
    names = device_mesh.mesh_dim_names or ()
    if not names and device_mesh.ndim == 1:
        names = ("ep",)
    split_names = [name for name in names if name in SPLIT_DIMENSIONS]
    dimensions = f"the DeviceMesh has the dimensions {names}"
    if not split_names:
        raise InputError(
            f'{dimensions}, and none of them spreads experts: call one "ep" (experts are split '
            'over it), "etp" or "tp" (their '
            "hidden width is)"
        )
    are_last = names[-len(split_names) :] == tuple(split_names)
    tp_is_last = "tp" not in split_names or split_names[-1] == "tp"
    if not are_last or not tp_is_last:
        raise InputError(f"{dimensions}: put ep and etp last, and tp last of all")
    if "etp" in split_names and "tp" in split_names:
        raise InputError(
            f"{dimensions}: the tp dimension already splits the experts' hidden width: leave "
            "etp out"
        )
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise InputError(
            f"{dimensions} and the ranks {ranks}: take a DeviceMesh whose ranks ascend"
        )
    if device_mesh.get_coordinate() is None:
        raise InputError("this process is not in the DeviceMesh: call on its ranks alone")
    return names


def _world() -> int:
    """Return the number of processes; 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _world_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the world ranks of a process group; of the default group for None."""
    return tuple(range(_world())) if group is None else tuple(dist.get_process_group_ranks(group))


def _new_group(
    ranks: tuple[int, ...], *groups: dist.ProcessGroup, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group of some ranks, ascending, which alone take part in creating it.

    Its operations wait as long as those of `groups`, which are the caller's (see `timeout_of`).
    """
    timeout = timeout_of(*groups)
    group = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _ranks_per_node(ranks: tuple[int, ...]) -> int | None:
    """Return how many consecutive ranks of these share a node, as the launcher tells.

    None if they are on one node, unevenly spread, or if the launcher tells nothing.
    """
    text = _launcher_text()
    if text is None or not text.isdecimal() or int(text) < 1:
        return None
    nodes = [rank // int(text) for rank in ranks]
    ranks_on_nodes = [len(list(run)) for _, run in groupby(nodes)]
    is_even = len(set(ranks_on_nodes)) == 1
    if len(ranks_on_nodes) == 1 or not is_even:
        return None
    return ranks_on_nodes[0]


def ranks_of_a_node(asked: int | None = None) -> int:
    """Return how many consecutive ranks share a node: `asked`, else what the launcher tells, else
    all of them.

    Raises:
        InputError: if the launcher's number does not divide the ranks.
    """
    per_node = _launched_per_node(_world()) if asked is None else asked
    return per_node or _world()


def _launcher_text() -> str | None:
    """Return the number of ranks of this node as the launcher's variable has it; None without it or
    without process groups."""
    return os.environ.get(LAUNCHER_VARIABLE) if dist.is_initialized() else None


def _launched_per_node(world: int) -> int | None:
    """Return how many ranks share a node, as the launcher tells; None if it does not. The number
    must divide the ranks."""
    text = _launcher_text()
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1 or world % int(text):
        raise InputError(
            f"{LAUNCHER_VARIABLE}={text} does not divide the {world} ranks: start as many on each "
            f"node, or set mesh.ranks_per_node to a divisor of {world}"
        )
    return int(text)
