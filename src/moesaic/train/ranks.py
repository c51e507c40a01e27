"""The ranks of a run, and what they agree on: settings, errors, means, when to stop. One process is
a world of one rank.

The ranks are first cut into pipeline stages, and those of a stage share its layers on a mesh with
the axes dp and tp (attention and dense layers) and edp, ep and etp (experts). A data-parallel group
is all ranks with one `dp_index`, which read the same samples.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moesaic.comm.collectives import check_same, ranks_in_words
from moesaic.comm.mesh import DeviceType, Mesh, open_transport
from moesaic.comm.process_groups import keep_timeout
from moesaic.errors import InputError, TrainingError
from moesaic.train.config import TrainConfig

T = TypeVar("T")


class Ranks:
    """All processes of a run, as one of them sees them.

    Args:
        mesh: the mesh on which the ranks share the model, or this rank's pipeline stage of it; None
            for a single process.
        stages: the ranks as a mesh with the axes ("pp", "stage"); None without pipeline stages.
        rank: this rank, and
        world: the number of ranks, without a mesh.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        stages: DeviceMesh | None = None,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.mesh = mesh
        self.stages = stages
        self.pp = 1
        """Number of pipeline stages."""
        self.stage = 0
        """This rank's stage."""
        self.rank = rank
        self.world = world
        self.dp = 1
        """Number of data-parallel groups."""
        self.dp_index = 0
        """This rank's data-parallel group."""
        if stages is not None:
            self.pp = stages.size(0)
            self.stage = stages.get_local_rank("pp")
        if mesh is not None:
            ranks_per_stage = mesh.grid.world
            self.rank = self.stage * ranks_per_stage + mesh.rank
            self.world = self.pp * ranks_per_stage
            self.dp = mesh.grid.dp
            self.dp_index = mesh.grid.coordinate(mesh.rank, "dp")

    @classmethod
    def of(cls, config: TrainConfig, device_type: DeviceType) -> Ranks:
        """Return the ranks of the initialised process group, and check that all were started with
        the same configuration.

        Args:
            config: its `mesh` must fit the ranks.
            device_type: device of the parameters, "cpu" or "cuda".

        Raises:
            InputError: on every rank, if the mesh does not fit the ranks, or they were started with
                different settings.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world == 1:
            if config.mesh.least_ranks > 1:
                raise InputError(
                    f"mesh asks for {config.mesh.least_ranks} ranks, this is one process: start "
                    f"with torchrun --nproc-per-node {config.mesh.least_ranks} -m moesaic train "
                    "..."
                )
            return cls()
        return cls(*_make_meshes(config, device_type))

    @classmethod
    def of_world(cls) -> Ranks:
        """Return the ranks of the initialised process group, on no mesh; one process if there is
        none."""
        if not dist.is_initialized():
            return cls()
        return cls(rank=dist.get_rank(), world=dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def in_words(self) -> str:
        """Return number and mesh of the ranks, for a line that describes the run; empty for a
        single process."""
        if self.mesh is None:
            return ""
        grid = self.mesh.grid
        stages = f"pp {self.pp}, each " if self.pp > 1 else ""
        return (
            f" x {self.world} ranks ({stages}dp {grid.dp}, tp {grid.tp}; edp {grid.edp}, ep "
            f"{grid.ep}, etp {grid.etp})"
        )

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, on its device; the tensor itself for one
        process."""
        return tensor if self.world == 1 else self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks."""
        return tensor if self.world == 1 else self._reduced(tensor, dist.ReduceOp.MAX)

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over the data-parallel groups of a tensor that is identical within each
        group.

        With pipeline stages, the last stage passes the tensor, and the others pass zeros.
        """
        if self.world == 1:
            return tensor
        # world / pp ranks add to the sum, those of one stage
        return self.total(tensor) * self.pp / self.world

    def gathered(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; for small picklable data."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def merge_stages(self, values: Mapping[int, T]) -> dict[int, T]:
        """Merge the dicts of all stages, sorted by key; for small data that is identical on all
        ranks of a stage."""
        tables = [values] if self.pp == 1 else self.gathered(dict(values))
        merged: dict[int, T] = {}
        for table in tables:
            for number, value in table.items():
                merged.setdefault(number, value)  # that of the lowest rank
        return {number: merged[number] for number in sorted(merged)}

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value."""
        return self.gathered(value if self.is_first else None)[0]

    def agree(self, received: list[str], *, is_busy: bool = False) -> tuple[str | None, bool]:
        """Return the name of a signal that any rank received, or None, and whether any rank is
        busy. All ranks get the same result.

        Args:
            received: names of the signals that this rank received, oldest first.
            is_busy: whether this rank still writes a checkpoint.
        """
        if self.world == 1:
            return (received[0] if received else None), is_busy
        # one maximum for both: the signal's number, 0 for none, and 1 if busy
        own_number = signal.Signals[received[0]].value if received else 0
        flags = torch.tensor([own_number, int(is_busy)])  # on the CPU: no rank waits for a GPU
        number, is_any_busy = self.largest(flags).tolist()
        name = signal.Signals(number).name if number else None
        return name, bool(is_any_busy)

    @contextmanager
    def together(self) -> Iterator[None]:
        """If any rank raises in the block, raise on all ranks.

        Raises:
            InputError, TrainingError: the error of the lowest rank that raised one, on every rank,
                with the ranks that raised it if the run is on several hosts.
        """
        refusal: InputError | TrainingError | None = None
        try:
            yield
        except (InputError, TrainingError) as error:
            refusal = error
        if self.world == 1:
            if refusal is not None:
                raise refusal
            return
        own_report = None
        if refusal is not None:
            own_report = (type(refusal) is InputError, str(refusal))
        hosts, reports = self.of_hosts(own_report)
        raised = [rank for rank, report in enumerate(reports) if report is not None]
        if not raised:
            return
        first = reports[raised[0]]
        is_input_error, text = first
        same = [rank for rank in raised if reports[rank] == first]
        if len(set(hosts.values())) > 1 and len(same) < self.world:
            text += f" (on {ranks_in_words(same, hosts)})"
        kind = InputError if is_input_error else TrainingError
        raise kind(text) from refusal

    def require_same(self, what: str, value: object, advice: str) -> None:
        """Raise InputError on every rank if the ranks' values differ.

        Args:
            what: what the value is, for the message.
            advice: what to do, for the message.
        """
        hosts, values = self.of_hosts(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                first = ranks_in_words([0], hosts)
                another = ranks_in_words([rank], hosts)
                raise InputError(f"{what} differs between {first} and {another}: {advice}")

    def of_hosts(self, value: Any) -> tuple[dict[int, str], list[Any]]:
        """Return the hosts of all ranks, and their values, by rank."""
        gathered = self.gathered((socket.gethostname(), value))
        hosts = {rank: host for rank, (host, _) in enumerate(gathered)}
        return hosts, [value_of_rank for _, value_of_rank in gathered]

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        """Return a tensor reduced over all ranks, in a copy: the ranks' own ones stay."""
        result = tensor.detach().clone()
        dist.all_reduce(result, op=operation)
        return result


def require_same_settings(fields: Mapping[str, object], packages: Sequence[str]) -> None:
    """Check that all ranks of the process group were started with the same settings and versions.

    Args:
        fields: the settings by name.
        packages: names of packages whose versions are compared.

    Raises:
        InputError: on every rank; see `check_same`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    versions = {f"the version of {name}": _version(name) for name in packages}
    advice = dict.fromkeys(versions, "install the same version on every machine")
    # Use Gloo, which launch() sets up for CPU tensors: NCCL would create communicators just for
    # this.
    check_same(open_transport("cpu"), {**fields, **versions}, advice=advice)


def _version(package: str) -> str:
    """Return the version of a package, without what follows "+", such as that of CUDA."""
    return str(import_module(package).__version__).partition("+")[0]


def require_same_config(config: TrainConfig) -> None:
    """Check that all ranks of the process group were started with the same configuration.

    Raises:
        InputError: on every rank; see `check_same`.
    """
    # The number of CPU threads may differ between machines; everything else is the same on all
    # ranks.
    common = replace(config, threads=None)
    require_same_settings(_flat(asdict(common)), ["moesaic", "torch"])


def _make_meshes(config: TrainConfig, device_type: DeviceType) -> tuple[Mesh, DeviceMesh | None]:
    """Return the mesh of this rank's stage, and the mesh of stages (None if there is one stage)."""
    require_same_config(config)
    mesh_config = config.mesh
    world = dist.get_world_size()
    stages = None
    group = None  # the ranks of this one's stage; None for all
    if world % mesh_config.pp:
        raise InputError(
            f"mesh.pp={mesh_config.pp}: {mesh_config.pp} stages do not divide the {world} ranks: "
            f"choose a divisor of {world}"
        )
    if mesh_config.pp > 1 and world % mesh_config.least_ranks:
        raise InputError(
            f"mesh.pp={mesh_config.pp} leaves {world // mesh_config.pp} of the {world} ranks to a "
            f"stage, too few for mesh.tp={mesh_config.tp}, mesh.ep={mesh_config.ep} and "
            f"mesh.etp={mesh_config.etp}: start a multiple of {mesh_config.least_ranks}, or give "
            "--mesh.pp 1"
        )
    if mesh_config.pp > 1:
        stages = init_device_mesh(
            device_type, (mesh_config.pp, world // mesh_config.pp), mesh_dim_names=("pp", "stage")
        )
        group = keep_timeout(stages)["stage"].get_group()
    per_node = mesh_config.ranks_per_node
    if per_node is not None:  # a stage may be part of a node
        per_node = min(per_node, dist.get_world_size(group))
    mesh = Mesh.create(
        tp=mesh_config.tp,
        ep=mesh_config.ep,
        etp=mesh_config.etp,
        innermost=mesh_config.innermost,
        ranks_per_node=per_node,
        device_type=device_type,
        transport=mesh_config.transport,
        group=group,
    )
    return mesh, stages


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested table as a dict from dotted path to value as JSON text."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat
