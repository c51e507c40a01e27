"""Meshes, collectives and settings over real processes on Gloo."""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moesaic.comm import process_groups
from moesaic.comm.collectives import (
    DIRECT_BYTES,
    all_gather,
    all_reduce_sum,
    broadcast,
    share,
    slice_rows,
)
from moesaic.comm.mesh import Mesh, check_same, open_transport
from moesaic.comm.transport import Transfer
from moesaic.errors import InputError
from moesaic.testing.runner import leave
from worlds import start


def refusal(function: Any) -> str:
    try:
        function()
    except InputError as error:
        return str(error)
    return ""


def meshes(rank: int, world: int) -> dict[str, Any]:
    """Return what a rank observes of meshes."""
    results: dict[str, Any] = {}
    for innermost in ("etp", "ep"):
        mesh = Mesh.create(tp=2, ep=2, etp=world // 2, innermost=innermost, ranks_per_node=2)
        for name, device_mesh, grid_axes in (
            ("dense", mesh.dense, ("dp", "tp")),
            ("sparse", mesh.sparse, ("edp", "ep", "etp")),
        ):
            assert device_mesh.mesh_dim_names == grid_axes
            for axis in grid_axes:
                ranks = tuple(sorted(dist.get_process_group_ranks(device_mesh[axis].get_group())))
                assert ranks == mesh.grid.group(rank, (axis,)), f"{name} {axis} {innermost}"
                assert device_mesh.get_local_rank(axis) == mesh.grid.coordinate(rank, axis)
        assert mesh.expert_mesh.mesh_dim_names == ("ep", "etp")
        assert mesh.is_distributed
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.sparse["ep"].get_group())
        results[innermost] = (float(total), mesh.group("ep"))
    os.environ["LOCAL_WORLD_SIZE"] = str(world // 2)
    results["launcher"] = Mesh.create().grid.ranks_per_node
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    results["bad launcher"] = refusal(Mesh.create)
    results["config over launcher"] = Mesh.create(ranks_per_node=1).grid.ranks_per_node
    del os.environ["LOCAL_WORLD_SIZE"]
    results["misfit"] = refusal(lambda: Mesh.create(ep=3))
    results["differ"] = refusal(lambda: Mesh.create(ep=2 if rank else 1))
    return results


def movements(rank: int, world: int, name: str) -> dict[str, Any]:
    """Return what a rank observes of its transport."""
    mesh = Mesh.create(transport=name)
    transport = mesh.transport
    everyone = tuple(range(world))
    results: dict[str, Any] = {}
    large = torch.randn(DIRECT_BYTES, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    results["large"] = all_reduce_sum(transport, everyone, large)
    results["small"] = all_reduce_sum(
        transport, everyone, torch.tensor(rank + 1, dtype=torch.int16)
    ).item()
    results["empty"] = tuple(all_reduce_sum(transport, everyone, torch.ones(0, 3)).shape)
    results["halves"] = all_reduce_sum(
        transport, mesh.grid.group(rank, ("dp",)), torch.ones(2, dtype=torch.bfloat16)
    ).tolist()
    results["sent"] = broadcast(
        transport, everyone, torch.full((2,), rank).to(torch.float8_e4m3fn), world - 1
    ).tolist()
    results["gathered"] = [
        bool(part) for part in all_gather(transport, everyone, torch.tensor(rank % 2 == 0))
    ]
    weight = torch.ones(3, requires_grad=True)
    x = torch.arange(5.0).requires_grad_()
    (
        slice_rows(transport, everyone, x * 1).sum()
        * (rank + 1)
        * share(transport, everyone, weight * 1).sum()
    ).backward()
    results["gradients"] = (weight.grad.tolist(), x.grad.tolist())
    first = transport.take_tags(3)  # each rank issues in another order and waits in reverse
    handles = []
    buffers = {}
    for number in sorted(range(3), key=lambda number: (number + rank) % 3):
        receives = {peer: torch.empty(1) for peer in everyone if peer != rank}
        sends = {
            peer: torch.full((1,), float(100 * number + rank)) for peer in everyone if peer != rank
        }
        handles.append(transport.issue(Transfer(rank, first + number, sends, receives)))
        buffers[number] = receives
    for handle in reversed(handles):
        transport.wait(handle)
    results["tags"] = all(
        float(b) == 100 * number + peer for number in buffers for peer, b in buffers[number].items()
    )
    results["different"] = refusal(
        lambda: check_same(transport, {"a": 1, **({"b": 2} if rank else {})})
    )
    check_same(transport, {"a": 1})
    results["transport"] = type(transport).__name__
    return results


def other_transports(rank: int) -> dict[str, object]:
    """Return the default transport, and the errors of ranks that ask for different or unknown
    ones."""
    return {
        "default": type(open_transport()).__name__,
        "unknown": refusal(lambda: open_transport(name="mpi")),
        "transports differ": refusal(lambda: Mesh.create(transport="auto" if rank else "gloo")),
    }


def process(rank: int, world: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    results = {**meshes(rank, world), **movements(rank, world, name), **other_transports(rank)}
    torch.save(results, Path(folder) / f"{rank}.pt")
    leave()


def on_processes(world: int, name: str, folder: Path) -> list[dict[str, Any]]:
    start(world, process, world, name, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def test_real_processes(tmp_path, monkeypatch):
    world = 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    results = on_processes(world, "gloo", tmp_path)
    check_movements(results, "Gloo")
    others = f"ranks 1-{world - 1}"
    step = world // 2
    for rank, saw in enumerate(results):
        outer = tuple(r for r in range(world) if r % step == rank % step)
        inner = tuple(r for r in range(world) if r // 2 == rank // 2)
        assert saw["etp"] == (2.0, outer)
        assert saw["ep"] == (2.0, inner)
        assert (saw["launcher"], saw["config over launcher"]) == (world // 2, 1)
        assert saw["bad launcher"].startswith(
            f"LOCAL_WORLD_SIZE=3 does not divide the {world} ranks"
        )
        assert saw["misfit"].startswith(
            f"mesh.ep=3 times mesh.etp=1 does not divide the {world} ranks"
        )
        same = "start every rank with the same settings"
        assert saw["default"] == "Gloo"
        assert saw["unknown"].startswith(
            "transport='mpi' is unknown: choose one of auto, gloo, nccl"
        )
        assert (
            saw["transports differ"]
            == f"transport differs: gloo on rank 0, auto on {others}: {same}"
        )
        assert saw["differ"] == f"mesh.ep differs: 1 on rank 0, 2 on {others}: {same}"
        assert saw["different"] == f"b differs: nothing on rank 0, 2 on {others}: {same}"


def check_movements(results: list[dict[str, Any]], name: str) -> None:
    world = len(results)
    large = torch.zeros(DIRECT_BYTES)
    for rank in range(world):
        large += (
            torch.randn(DIRECT_BYTES, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
        )
    for saw in results:
        assert torch.equal(saw["large"], large)
        assert (saw["small"], saw["empty"]) == (world * (world + 1) // 2, (0, 3))
        assert (saw["halves"], saw["sent"]) == ([world, world], [world - 1] * 2)
        assert saw["gathered"] == [r % 2 == 0 for r in range(world)]
        shares = [list(range(5 * r // world, 5 * (r + 1) // world)) for r in range(world)]
        of_weight = float(sum((r + 1) * sum(rows) for r, rows in enumerate(shares)))
        of_rows = [3.0 * (r + 1) for r, rows in enumerate(shares) for _ in rows]
        assert saw["gradients"] == ([of_weight] * 3, of_rows)
        assert (saw["tags"], saw["transport"]) == (True, name)


TO_THE_END = """
import sys
import torch
import torch.distributed as dist
from moesaic import Mesh

store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
mesh = Mesh.create()
large = [[number] for number in range(300_000)]  # the interpreter takes a while to end
for _ in range(50):
    dist.all_reduce(torch.ones(4))  # a thread drops the tensor after the wait has returned
dist.destroy_process_group()
"""


def test_a_process_ends_well_while_threads_of_gloo_still_drop_tensors(tmp_path):
    """Without the pause at exit half of these processes abort."""
    commands = [
        [sys.executable, "-c", TO_THE_END, str(tmp_path / "store"), str(rank)] for rank in range(2)
    ]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for run in runs:
        error = run.communicate(timeout=300)[1]
        assert run.returncode == 0, error


def test_a_process_that_ends_waits_for_a_thread_that_has_work():
    done = threading.Event()

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # without the interpreter's lock
        done.set()

    threading.Thread(target=work, daemon=True).start()
    process_groups._let_threads_end()
    assert done.is_set()
