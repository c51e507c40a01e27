"""Meshes without processes: a world of one, ranks on any transport, bad input. Real processes:
test_processes.py."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig

from helpers import refused
from moesaic.comm import mesh as module
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh, open_transport
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.program.grid import Grid


def test_one_process_needs_no_process_group(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # ignored without torch.distributed
    mesh = Mesh.create()
    assert isinstance(mesh.transport, NoTransport)
    assert (mesh.rank, mesh.grid, mesh.is_distributed, mesh.expert_mesh) == (
        0,
        Grid(world=1),
        False,
        None,
    )
    assert mesh.group("ep", "etp") == (0,)
    for name in ("dense", "sparse"):
        with pytest.raises(RuntimeError, match="a mesh of one process has no device meshes"):
            getattr(mesh, name)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 2}, f"mesh.pp=2: {module.ADVICE_ON_SIZES['pp']}"),
        ({"cp": 4}, f"mesh.cp=4: {module.ADVICE_ON_SIZES['cp']}"),
        (
            {"tp": 2},
            "a mesh of tp=2, ep=1, etp=1 needs several processes: torchrun --nproc-per-node 2",
        ),
        (
            {"tp": 4, "ep": 3, "etp": 2},
            "a mesh of tp=4, ep=3, etp=2 needs several processes: torchrun --nproc-per-node 12",
        ),
        ({"ep": 0}, "mesh.ep=0: must be a whole number of at least 1"),
        ({"ep": "4"}, "mesh.ep='4': must be a whole number of at least 1"),
        (
            {"ranks_per_node": 2},
            "mesh.ranks_per_node=2 does not divide the 1 ranks: choose a divisor of 1",
        ),
        ({"device_type": "tpu"}, "device_type='tpu': write 'cpu' or 'cuda'"),
        (
            {"transport": "mpi"},
            "transport='mpi' is unknown: choose one of auto, gloo, nccl; sockets needs the package "
            "moesaic-lab: in a clone of the "
            'repository, pip install "./lab"',
        ),
        (
            {"transport": "nccl", "device_type": "cpu"},
            "transport=nccl does not carry messages between cpu devices: choose auto",
        ),
    ],
)
def test_bad_sizes_give_one_line(sizes, message, monkeypatch):
    monkeypatch.setattr(module, "entry_points", lambda **_: ())
    assert refused(Mesh.create, **sizes) == message


def test_a_transport_of_another_package_is_found_by_its_name(monkeypatch):
    offered = EntryPoint("carrier", "comm.test_mesh:opened", module.TRANSPORTS_GROUP)
    monkeypatch.setattr(
        module, "entry_points", lambda *, group: (offered,) if group == offered.group else ()
    )
    assert module._offered("carrier") is opened
    with pytest.raises(
        InputError,
        match=r"choose one of auto, gloo, nccl, carrier; sockets needs the package moesaic-lab",
    ):
        module._offered("mpi")


def opened(group: dist.ProcessGroup) -> AbstractTransport:
    raise NotImplementedError


def test_a_launcher_with_missing_variables_gives_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        InputError,
        match=r"WORLD_SIZE=4, but RANK is not set: .*init_process_group\(\.\.\.\) before Mesh",
    ):
        Mesh.create(ep=4)
    assert not dist.is_initialized()


def test_a_rank_without_a_gpu_of_its_own_gives_one_line(monkeypatch):
    for name, value in {
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        InputError, match=r"local rank 3 has no GPU, this node has 2: .*device_type='cpu'\)"
    ):
        Mesh.create(ep=4)


@pytest.mark.parametrize(
    ("gpus", "backend", "transport", "device_type"),
    [
        (False, None, "auto", "cpu"),
        (True, None, "auto", "cuda"),
        (True, "gloo", "auto", "cpu"),
        (True, "nccl", "auto", "cuda"),
        (True, "cpu:gloo,cuda:nccl", "auto", "cuda"),
        (False, "cpu:gloo,cuda:nccl", "auto", "cpu"),
        (True, None, "sockets", "cpu"),
        (True, "cpu:gloo,cuda:nccl", "gloo", "cpu"),
        (True, None, "nccl", "cuda"),
    ],
)
def test_the_device_follows_the_transport_the_process_group_and_the_machine(
    gpus, backend, transport, device_type, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: BackendConfig(Backend(backend)))
    assert module._default_device_type(transport, None) == device_type


def test_cuda_where_there_is_none_gives_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        refused(open_transport, "cuda")
        == "device_type='cuda': there is no CUDA device here: write 'cpu'"
    )


def said(sizes: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def rank(transport: AbstractTransport) -> str:
        try:
            Mesh.create(**sizes[transport.rank])  # type: ignore[arg-type]
        except InputError as error:
            return str(error)
        return ""

    transports: list[AbstractTransport] = []
    monkeypatch.setattr(module, "open_transport", lambda *_: transports[-1])

    def started(transport: AbstractTransport) -> str:
        transports.append(transport)  # `create` opens its transport before it lets another rank run
        return rank(transport)

    return run_ranks(len(sizes), started)


def test_ranks_that_ask_for_different_meshes_all_say_so(monkeypatch):
    line = "mesh.ep differs: 2 on ranks 0-2, 3 on rank 3: start every rank with the same settings"
    assert said([{"ep": 2}, {"ep": 2}, {"ep": 2}, {"ep": 3}], monkeypatch) == [line] * 4


def test_a_mesh_that_does_not_fit_is_refused_by_every_rank(monkeypatch):
    line = "mesh.tp=3 does not divide the 4 ranks: choose a divisor of 4"
    assert said([{"tp": 3}] * 4, monkeypatch) == [line] * 4


@pytest.mark.parametrize("text", ["3", "0", "many", "8"])
def test_a_launcher_whose_nodes_do_not_divide_the_world(text, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    line = (
        f"LOCAL_WORLD_SIZE={text} does not divide the 4 ranks: start as many on each node, or set "
        "mesh.ranks_per_node to a divisor of 4"
    )
    assert said([{}] * 4, monkeypatch) == [line] * 4
