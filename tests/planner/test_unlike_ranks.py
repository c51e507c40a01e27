"""Ranks that compute slowly, checked by hand. Equal ranks give bit-identical results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.configfile import as_json
from moesaic.errors import InputError
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import Tflops, read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from planner.clusters import FREE, flat

GRID = Grid(world=4, ep=4, ranks_per_node=4)
LAYER = Workload(tokens=64, num_experts=4, top_k=2, dim=16, hidden=32)
PRODUCTS = replace(FREE, tflops=Tflops(bf16=1e-3))
"""A device with 10^9 operations per second and instant copies."""


def run(speeds: tuple[float, ...] = ()) -> Simulated:
    """Return a layer's forward pass on one node, with every rank simulated separately."""
    spec = replace(flat(1, 4, device=PRODUCTS), speeds=speeds)
    program = compile_plan(Plan(order="fifo"), GRID).forward
    sizes = sizes_of(program, LAYER, GRID)
    return Simulator(spec).run(program, LAYER, GRID, sizes=sizes)


def test_a_slow_device_makes_all_wait_as_much_longer_as_it_computes() -> None:
    """128 rows of a rank's expert are 2 * 3 * 16 * 32 operations each: 393 us at speed 1, 786 at
    1/2."""
    once = 128 * 6 * 16 * 32 / 1e9
    plain = run()
    slow = run((1.0, 1.0, 0.5, 2.0))
    assert plain.compute_seconds == pytest.approx(once, rel=1e-3)
    assert slow.ends == pytest.approx(plain.ends + once, rel=1e-3)
    assert slow.compute_seconds == pytest.approx(2 * once, rel=1e-3)
    spec = replace(flat(1, 4, device=PRODUCTS), speeds=(1.0, 1.0, 0.5, 2.0))
    one_for_all = Simulator(spec).run(compile_plan(Plan(order="fifo"), GRID).forward, LAYER, GRID)
    assert one_for_all.seconds == pytest.approx(slow.seconds, rel=1e-6)


def test_equal_ranks_give_bit_identical_times() -> None:
    plain = run()
    same = run((1.0,) * 4)
    assert same.timeline == plain.timeline
    assert (same.ends == plain.ends).all()


def test_speeds_are_read_checked_and_cut_with_the_cluster(tmp_path) -> None:
    spec = replace(flat(2, 4), speeds=(1.0,) * 7 + (0.8,))
    path = tmp_path / "cluster.json"
    path.write_text(as_json(spec), encoding="utf-8")
    assert read_cluster(str(path)) == spec
    assert spec.of_devices(4).speeds == (1.0,) * 4
    per_node = replace(spec, speeds=(1.0, 1.0, 1.0, 0.8))
    assert per_node.of_devices(8).speeds == per_node.speeds
    for wrong, words in (
        (
            {"speeds": (1.0, 2.0)},
            "cluster.speeds has 2 values: give one for each of a node's 4 devices, or of all 8",
        ),
        ({"speeds": (1.0, 1.0, 1.0, 0.0)}, "cluster.speeds=0.0: must be a finite number above 0"),
    ):
        with pytest.raises(InputError, match=words):
            replace(spec, **wrong)
