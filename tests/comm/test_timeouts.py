"""Process groups that a mesh makes wait as long as those of the caller, over real processes on
Gloo."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moesaic
from moesaic import Mesh
from moesaic.testing import runner
from worlds import preloaded

WORLD_SECONDS = 97.0
GROUP_SECONDS = 45.0
"""Timeouts that torch chooses for no group."""


def seconds(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def of_mesh(mesh: Mesh) -> Iterator[float]:
    """Yield the timeouts of all groups of a mesh."""
    assert mesh.process_group is not None
    assert mesh.expert_mesh is not None
    yield seconds(mesh.process_group)
    for device_mesh in (mesh.dense, mesh.sparse, mesh.expert_mesh):
        yield from of_device_mesh(device_mesh)


def of_device_mesh(device_mesh: DeviceMesh) -> Iterator[float]:
    yield from map(seconds, device_mesh.get_all_groups())


def timeouts() -> dict[str, set[float]]:
    """Return the timeouts of the groups of meshes that are made in every way."""
    halves = [(0, 1), (2, 3)]
    own = halves[dist.get_rank() // 2]
    plain = [dist.new_group(half) for half in halves][dist.get_rank() // 2]
    chosen = [dist.new_group(half, timeout=timedelta(seconds=GROUP_SECONDS)) for half in halves][
        dist.get_rank() // 2
    ]
    world_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    assert tuple(dist.get_process_group_ranks(plain)) == own
    return {
        "world": set(of_mesh(Mesh.create(ep=2))),
        "world with all axes": set(of_mesh(Mesh.create(tp=2, ep=2, etp=2))),
        "a group with a timeout": set(of_mesh(Mesh.create(ep=2, group=chosen))),
        "a group as it stands": set(of_mesh(Mesh.of(chosen))),
        "parts of a group without one": set(
            map(seconds, Mesh.create(ep=2, group=plain).sparse.get_all_groups())
        ),
        "a device mesh of torch": set(of_mesh(Mesh.of(world_2d))),
    }


def test_groups_of_a_mesh_take_the_timeout_of_the_callers_groups():
    for found in runner.on_ranks(4, timeouts, timeout_seconds=WORLD_SECONDS, preload=preloaded()):
        assert found == {
            "world": {WORLD_SECONDS},
            "world with all axes": {WORLD_SECONDS},
            "a group with a timeout": {GROUP_SECONDS},
            "a group as it stands": {GROUP_SECONDS},
            "parts of a group without one": {WORLD_SECONDS},
            "a device mesh of torch": {WORLD_SECONDS},
        }


@pytest.mark.random
def test_every_new_group_of_the_library_is_given_a_timeout():
    package = Path(moesaic.__file__).parent
    without = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "attr", getattr(called, "id", ""))
            is_given = isinstance(node, ast.Call) and any(
                each.arg == "timeout" for each in node.keywords
            )
            if (
                name in ("new_group", "split_group", "new_subgroups", "init_process_group")
                and not is_given
            ):
                without.append(f"{path.relative_to(package)}: {name}")
    # the caller has none, so torch's default is right
    assert without == ["comm/mesh.py: init_process_group"]


@pytest.mark.random
def test_every_device_mesh_of_the_library_keeps_the_timeout():
    package = Path(moesaic.__file__).parent
    for path in package.rglob("*.py"):
        calls = [
            node.func
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call)
        ]
        names = [getattr(called, "attr", getattr(called, "id", "")) for called in calls]
        made = names.count("DeviceMesh") + names.count("init_device_mesh")
        assert names.count("keep_timeout") == made, path
