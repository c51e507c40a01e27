"""Compares the simulator with the papers' formulas, on clusters that match each formula's
assumptions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload, zipf_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Kind, Op
from planner.clusters import flat

W = 8
S = 1024
DIM = 32
EXPERTS = 16
TOP_K = 2
"""Ranks of one node, tokens of a tensor-parallel group, width, experts, experts per token."""
WORKLOAD = Workload(tokens=S, num_experts=EXPERTS, top_k=TOP_K, dim=DIM, hidden=64, dtype="bf16")
PER_BYTE = 1e-10
"""Seconds per byte of one device's link: 80 Gb/s."""
ECD = S * TOP_K * DIM * 2 * PER_BYTE
"""Seconds to send all copies of a group's tokens: E * C * D elements in the papers."""
SD = S * DIM * 2 * PER_BYTE
"""Seconds to send all tokens of a group."""


def node(per_node: int = W) -> ClusterSpec:
    """Return one node whose devices send and receive 10 GB/s each, whoever the peer."""
    return flat(1, per_node, intra=80.0)


def movements(schedule: str, tp: int, etp: int, **plan: object) -> dict[str, float]:
    """Return the seconds of the movements of rows and tokens, by slot name, without routing weights
    and indices."""
    grid = Grid(world=W, tp=tp, ep=W // etp, etp=etp)
    compiled = compile_plan(Plan(schedule=schedule, **plan), grid)  # type: ignore[arg-type]
    program = compiled.forward
    simulator = Simulator(node())
    slots = {slot.name: slot for slot in program.slots}
    volumes = simulator.volumes(program, WORKLOAD, compiled.grid)
    return {
        task.name: sum(moved.load.alone for moved in volumes.movements(task, slots, ""))
        for task in program.tasks
        if task.op is Op.MOVE
        and slots[task.writes[0]].kind in (Kind.ROWS, Kind.TOKENS, Kind.WEIGHT)
    }


@pytest.mark.parametrize(("m", "s"), [(1, 1), (2, 2), (2, 4), (4, 2), (4, 4)])
def test_parms_baseline(m: int, s: int) -> None:
    """Papers.md 1.2: AG_ESP(s S D), AR_ESP(s E C D), two A2A_EP(s E C D)."""
    p = W // s
    seconds_by_slot = movements("baseline", m, s)
    assert seconds_by_slot["x_wide"] == pytest.approx((s - 1) / s * s * SD)
    reduce = [seconds for name, seconds in seconds_by_slot.items() if name.startswith("summed")]
    assert sum(reduce) == pytest.approx(2 * (s - 1) / s * s * ECD)
    assert seconds_by_slot["h"] == pytest.approx((p - 1) / p * s * ECD)
    assert seconds_by_slot["back"] == pytest.approx((p - 1) / p * s * ECD)


@pytest.mark.parametrize(("m", "s"), [(1, 1), (2, 2), (2, 4), (4, 2), (4, 4)])
def test_parms_s1_and_s2(m: int, s: int) -> None:
    """1.3 and 1.4: two A2A over all ranks of s E C D / m, AG_MP of S D or E C D; 1.5: the latter is
    k f times as long."""
    one = movements("s1", m, s)
    two = movements("s2", m, s)
    for seconds_by_slot in (one, two):
        for name in ("h", "z"):
            assert seconds_by_slot[name] == pytest.approx((W - 1) / W * s * ECD / m)
    assert one["y"] == pytest.approx((m - 1) / m * SD)
    assert two["z_full"] == pytest.approx((m - 1) / m * ECD)
    if m > 1:
        assert two["z_full"] / one["y"] == pytest.approx(TOP_K)


@pytest.mark.parametrize("r", [0, 1, 2, 4])
def test_tutels_r(r: int) -> None:
    """3.2: tokens 2 r E C D (W - 1) / W, weights (q - 1) P / W; r = 0: P (W - 1) / W and no
    token."""
    s = 4
    seconds_by_slot = movements("s1", 1, s, gather_weights=r)
    parameters = EXPERTS * 3 * DIM * WORKLOAD.hidden * 2 * PER_BYTE
    if r == 0:
        assert seconds_by_slot["w_full"] == pytest.approx(
            parameters * (W - 1) / W * (W // s) / (W // s)
        )
        assert "h" not in seconds_by_slot
        return
    q = s // r
    assert seconds_by_slot.get("w_full", 0.0) == pytest.approx((q - 1) * parameters / W)
    # A token's copies for the rank's own shard stay: one in W // q of the ranks visited is the rank
    # itself.
    visited = W // q
    assert seconds_by_slot["h"] == pytest.approx(r * ECD * (visited - 1) / visited)


def test_2dh_pays_where_messages_cost_and_not_where_bytes_do() -> None:
    """3.3: messages between nodes are m times larger and fewer, and bytes cross links inside nodes
    once more."""
    nodes = 8
    g = 4
    spec = flat(nodes, g, intra=16, inter=8, message_us=(0.1, 50.0))
    grid = Grid(world=nodes * g, ep=nodes * g, ranks_per_node=g)
    seconds: dict[tuple[str, int], float] = {}
    for tokens in (64, 65536):
        workload = Workload(tokens=tokens, num_experts=32, top_k=2, dim=64, hidden=64)
        for name in ("linear", "hier2d"):
            compiled = compile_plan(Plan(all_to_all=name), grid)  # type: ignore[arg-type]
            seconds[(name, tokens)] = Simulator(spec).run(compiled.forward, workload, grid).seconds
    assert seconds[("hier2d", 64)] < 0.5 * seconds[("linear", 64)]
    assert seconds[("hier2d", 65536)] > seconds[("linear", 65536)]


def test_the_busiest_link_of_skewed_counts_sets_the_time() -> None:
    """FasterMoE, eq. 2 and errata F2: remote copies only, over the busiest rank's link, out or
    in."""
    grid = Grid(world=W, ep=W)
    counts = zipf_counts(W, WORKLOAD, exponent=1.0, seed=0)
    compiled = compile_plan(Plan(), grid)
    sizes = sizes_of(compiled.forward, WORKLOAD, grid, counts)
    per_rank = counts.reshape(W, W, -1).sum(axis=2)
    np.fill_diagonal(per_rank, 0)
    busiest = max(per_rank.sum(axis=0).max(), per_rank.sum(axis=1).max())
    run = Simulator(node()).run(compiled.forward, WORKLOAD, grid, sizes=sizes)
    spans = {span.task: span for span in run.timeline.spans}
    assert spans["h"].end - spans["h"].start == pytest.approx(
        busiest * DIM * 2 * PER_BYTE, rel=1e-6
    )
    assert len(run.ends) == W


def simulated(world: int, **mesh: int) -> Simulated:
    spec = read_cluster("dgx-h100", nodes=world // 8)
    grid = Grid(world=world, ranks_per_node=8, **mesh)  # type: ignore[arg-type]
    workload = Workload(tokens=4096, num_experts=max(grid.ep, 64), top_k=2, dim=4096, hidden=4096)
    small = Grid(world=grid.ep * grid.etp, tp=grid.tp, ep=grid.ep, etp=grid.etp, ranks_per_node=8)
    compiled = compile_plan(Plan(schedule="s2", chunks=2, all_to_all="hier2d"), small)
    return Simulator(spec).run(compiled.forward, workload, grid)


def test_a_hundred_thousand_ranks_are_simulated_by_one() -> None:
    """One of 98,304 ranks does the same as one of 512, and simulating them costs the same, up to
    the switches above."""
    large = simulated(98304, tp=8, ep=64, etp=8)
    small = simulated(512, tp=8, ep=64, etp=8)
    assert large.seconds == pytest.approx(small.seconds)
    assert large.link_seconds == pytest.approx(small.link_seconds)
    assert len(large.ends) == 1, "one actor, one node's links"
    assert len(large.link_seconds) <= 4 * 8


def test_experts_over_thousands_of_ranks() -> None:
    """2DH among 256 nodes: rows go out and back, with 255 messages each for rows, routing weights
    and results of two chunks."""
    thousands = simulated(2048, tp=1, ep=2048, etp=1)
    copies = 4096 * 2 * 4096 * 2
    crossing = copies * (1 - 8 / 2048) * 2 / (368e9 / 8)
    started = 2 * 3 * 255 * 1e-6
    assert thousands.link_seconds["nic out 0"] == pytest.approx(crossing + started, rel=1e-3)


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code.group(1), "planning.md", "exec"), {})
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "linear",
        "hier2d",
        "multicast",
    ]


def test_the_clusters_file_of_the_page_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    table = re.search(r"```toml\n(nodes.*?)```", page, re.DOTALL)
    (tmp_path / "mine.toml").write_text(table.group(1), encoding="utf-8")
    assert [link.name for link in read_cluster(str(tmp_path / "mine.toml")).links] == [
        "pcie",
        "nic",
    ]
