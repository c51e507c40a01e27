"""Ranks that come and go: restarts with any number of ranks, a new mesh for the remaining ranks,
launchers that die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from cli.test_train import has_lines, wait_for
from forked import Forked
from moesaic.errors import InputError
from moesaic.planner.job import Job
from moesaic.planner.split import JobSplit
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.train import auto_plan
from moesaic.train.auto_plan import with_planned
from moesaic.train.checkpoint import list_checkpoints
from moesaic.train.launch import meet
from planner.test_fewer_machines import SLOW
from runs import assert_same, losses, parameters, tiny, write_config
from train.disturbed import disturbing, free_port, start


def met(store: dist.Store, world: int) -> list[int]:
    """Return the order in which the ranks of an attempt reach a counter of its own store. The first
    rank arrives last."""
    order = [0] * world

    def come(rank: int) -> None:
        roll, missing = meet(store, rank, world, 300.0)
        assert missing == ""
        order[rank] = roll.store.add("met", 1)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(world))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(300)
    return sorted(order)


def test_every_attempt_has_a_store_of_its_own_whatever_earlier_ones_left():
    store = dist.HashStore()
    assert [met(store, world) for world in (3, 2, 4, 4)] == [
        [1, 2, 3],
        [1, 2],
        [1, 2, 3, 4],
        [1, 2, 3, 4],
    ]
    store.set("moesaic/comes/1", "of a rank that was killed before it was answered")
    assert met(store, 2) == [1, 2]


def test_who_does_not_come_is_named():
    assert meet(dist.HashStore(), 0, 3, 0.2)[1] == "1, 2"


def left(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Pretend that `world` ranks are running."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(auto_plan, "ranks_of_a_node", lambda _: world)


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.random)])
def test_a_search_finds_mesh_and_plan_for_the_ranks_that_are_left(tmp_path, monkeypatch, world):
    left(monkeypatch, world)
    config = tiny(
        tmp_path, batch_size=12, planner={"plan": "search"}, model={"moe": {"num_experts": 12}}
    )
    said: list[str] = []
    found = with_planned(config, said.append)
    grid = found.mesh
    assert world % grid.least_ranks == 0
    assert grid.least_ranks > 1 or found.layer_plan is not None
    assert found.planner.plan == ""
    stages = f"pp {grid.pp}, " * (grid.pp > 1)
    assert said[0].startswith(
        f"planner: {world} ranks take {stages}tp {grid.tp}, ep {grid.ep}, etp {grid.etp}"
    )
    assert with_planned(found) == found


def test_under_auto_a_mesh_that_fits_stays_and_another_is_searched(tmp_path, monkeypatch):
    config = tiny(tmp_path, batch_size=4, mesh={"ep": 4}, planner={"plan": "auto"})
    left(monkeypatch, 4)
    assert with_planned(config) == config
    layout = SimpleNamespace(
        grid=Grid(world=2, ep=2),
        split=JobSplit(),
        layout="ep 2",
        plan=Plan(chunks=2),
        seconds=0.5,
        estimate=SimpleNamespace(bottleneck="compute"),
    )
    result = SimpleNamespace(best=layout, ranking=[layout], why_recomputed=())
    monkeypatch.setattr(auto_plan, "find_layouts", lambda *_, **__: (Job(), result))
    left(monkeypatch, 2)
    found = with_planned(config)
    assert (found.mesh.ep, found.layer_plan, found.planner.plan) == (2, Plan(chunks=2), "auto")
    left(monkeypatch, 1)
    alone = with_planned(config)
    assert (alone.mesh.ep, alone.planner.plan) == (1, "")


@pytest.mark.random
def test_a_search_names_machines_that_do_not_pay(tmp_path, monkeypatch):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(SLOW.format(gbps=0.001))
    left(monkeypatch, 2)
    monkeypatch.setattr(auto_plan, "ranks_of_a_node", lambda _: 1)
    said: list[str] = []
    config = tiny(tmp_path, batch_size=4, planner={"plan": "search", "cluster": str(cluster)})
    with_planned(config, said.append)
    assert said[1].startswith("planner: 1 of 2 machines is as fast: ")


@pytest.mark.random
def test_a_search_takes_the_measured_rate_of_the_link_between_machines(tmp_path, monkeypatch):
    left(monkeypatch, 2)
    monkeypatch.setattr(auto_plan, "ranks_of_a_node", lambda _: 1)
    monkeypatch.setattr(auto_plan, "open_transport", lambda name: None)
    milliseconds = []
    for gbps in (0.001, 100.0):
        monkeypatch.setattr(auto_plan, "outside_gbps", lambda *_, gbps=gbps: gbps)
        said: list[str] = []
        with_planned(tiny(tmp_path, batch_size=4, planner={"plan": "search"}), said.append)
        assert said[0] == f"planner: the link between machines carries {gbps:.2g} Gbit/s"
        milliseconds += map(float, re.findall(r"a predicted step of ([\d.]+) ms", said[1]))
    assert milliseconds[0] > 2 * milliseconds[1]


def test_a_search_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    left(monkeypatch, 3)
    with pytest.raises(
        InputError, match=r"the search space holds no layout of 3 ranks: .* does not divide"
    ):
        with_planned(tiny(tmp_path, batch_size=4, planner={"plan": "search"}))
    with pytest.raises(
        InputError, match=r"planner.plan=search finds mesh.tp, mesh.ep, mesh.etp and plan"
    ):
        with_planned(tiny(tmp_path, batch_size=4, mesh={"ep": 4}, planner={"plan": "search"}))


def test_a_search_in_one_process_says_that_there_is_nothing_to_split(tmp_path):
    said: list[str] = []
    config = with_planned(tiny(tmp_path, planner={"plan": "search"}), said.append)
    (line,) = said
    assert line.startswith("planner: one process has nothing to split, so nothing is searched")
    assert "torchrun" in line
    assert config.planner.plan == ""


def children(parent: int) -> list[int]:
    """Return the processes that a process started."""
    processes = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [process for process in processes if status(process)[1:2] == [str(parent)]]


def status(process: int) -> list[str]:
    """Return the state of a process, the number of its parent and what else the kernel says;
    nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # the latter where it ends between opening and reading
        return []


def is_gone(process: int) -> bool:
    return status(process)[:1] in ([], ["Z"])


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path):
    process = start(tiny(tmp_path, steps=1_000_000, batch_size=4, mesh={"ep": 2}), tmp_path)
    run = tmp_path / "run"
    wait_for(lambda: has_lines(run, 2), process)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    until = time.monotonic() + 300
    while not all(map(is_gone, ranks)) and time.monotonic() < until:
        time.sleep(0.1)
    assert all(map(is_gone, ranks))
    _, err = process.communicate(timeout=300)
    assert err.count(f"torchrun (process {process.pid}) is gone: its ranks save and end") >= 1
    assert list_checkpoints(run / "checkpoints")[-1].name == f"step-{losses(run)[-1][0]:08d}"


def node(folder: Path, port: int, script: Path, nodes: str = "1:2") -> Forked:
    """Start a node of two ranks among so many."""
    words = ["-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "2"]
    words += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--max-restarts",
        "3",
    ]
    words += [
        "--rdzv-conf",
        "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=30",
        "--rdzv-id",
        "any",
    ]
    words += [str(script), "train", "--config", str(folder / "given.json")]
    return Forked(words, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "worlds"),
    [("lost", [4, 2]), ("joins", [2, 4]), ("lost, and another joins", [4, 2, 4])],
)
def test_a_run_whose_nodes_change_goes_on_with_the_mesh_and_the_losses_of_those_there_are(
    tmp_path, change, worlds
):
    config = tiny(
        tmp_path, steps=30, batch_size=4, save={"every": 5, "keep": 99}, existing="resume"
    )
    config = replace(config, planner=replace(config.planner, plan="search"))
    write_config(config, tmp_path / "given.json")
    # Steps of a run whose ranks will change again last long enough for that.
    slowly = (
        f"time.sleep(0.2 if given[0].ranks.world == {worlds[-1]} or given[0].state.step < 7 else 4)"
    )
    script = disturbing(tmp_path, "loop.Trainer._step", slowly)
    run = tmp_path / "run"
    port = free_port()
    nodes = [node(tmp_path, port, script)]
    time.sleep(1)  # the first keeps the store
    if change != "joins":
        nodes.append(node(tmp_path, port, script))
    try:
        wait_for(lambda: has_lines(run, 7), nodes[0])
        if change != "joins":
            for process in (nodes[1].pid, *children(nodes[1].pid)):
                os.kill(process, signal.SIGKILL)
        if change == "lost, and another joins":
            wait_for(lambda: has_lines(run, 17), nodes[0])
        if change != "lost":
            nodes.append(node(tmp_path, port, script))
        out, err = nodes[0].communicate(timeout=400)
    finally:
        for each in nodes:
            each.kill()
    assert nodes[0].returncode == 0, out + err
    assert re.findall(r"planner: (\d) ranks take", out) == list(map(str, worlds))
    assert [step for step, _ in losses(run)] == list(range(1, 31))
    resumed = int(re.findall(r"resumed after step (\d+)", out)[-1])
    assert 0 < resumed < 30
    twin = tmp_path / "twin"
    shutil.copytree(run, twin)
    for path in list_checkpoints(twin / "checkpoints"):
        if int(path.name[5:]) > resumed:
            shutil.rmtree(path)
    (tmp_path / "again").mkdir()
    write_config(replace(config, out=str(twin)), tmp_path / "again" / "given.json")
    count = worlds[-1] // 2
    port = free_port()
    again = [node(tmp_path / "again", port, script, nodes=str(count)) for _ in range(count)]
    said = [each.communicate(timeout=400)[0] for each in again]
    assert [each.returncode for each in again] == [0] * count, said
    assert losses(twin) == losses(run)
    assert_same(parameters(twin), parameters(run))
