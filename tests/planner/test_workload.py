"""Counts add up, have the requested skew, and are reproducible by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.workload import (
    Workload,
    dirichlet_counts,
    imbalance,
    largest_max_vio,
    read_counts,
    skewed_counts,
    uniform_counts,
    zipf_counts,
)
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

WORKLOAD = Workload(tokens=100, num_experts=16, top_k=2, dim=8, hidden=8)


def test_every_generator_sends_every_copy() -> None:
    tables = [
        uniform_counts(3, WORKLOAD),
        zipf_counts(3, WORKLOAD, exponent=1.0, seed=1),
        dirichlet_counts(3, WORKLOAD, concentration=0.2, seed=1),
    ]
    for counts in tables:
        assert counts.dtype == np.int64
        assert counts.min() >= 0
        assert counts.sum(axis=1).tolist() == [200, 200, 200]


@pytest.mark.parametrize(("ep", "max_vio"), [(4, 0.0), (4, 1.5), (4, 3.0), (8, 7.0), (16, 7.0)])
def test_one_rank_gets_the_max_vio_that_was_asked_for(ep: int, max_vio: float) -> None:
    counts = skewed_counts(2, WORKLOAD, ep=ep, max_vio=max_vio)
    loads = counts.sum(axis=0).reshape(ep, -1).sum(axis=1)
    assert counts.sum(axis=1).tolist() == [200, 200]
    assert loads.argmax() == 0
    assert loads[0] / loads.mean() - 1 == pytest.approx(max_vio, abs=0.1)
    assert loads[1:].max() - loads[1:].min() <= 2 * 16 / ep
    assert counts.max() <= WORKLOAD.tokens, "a token goes to an expert once"
    assert (skewed_counts(2, WORKLOAD, ep=ep, max_vio=max_vio) == counts).all()
    assert max_vio <= largest_max_vio(ep, WORKLOAD) == min(ep, 8) - 1


def test_skew_is_as_asked() -> None:
    big = Workload(tokens=100_000, num_experts=16, top_k=1, dim=8, hidden=8)
    assert imbalance(uniform_counts(2, big)) == pytest.approx(1.0)
    assert imbalance(zipf_counts(2, big, exponent=0.0, seed=3)) == pytest.approx(1.0)
    harmonic = sum(1 / i for i in range(1, 17))
    assert imbalance(zipf_counts(2, big, exponent=1.0, seed=3)) == pytest.approx(
        16 / harmonic, rel=1e-3
    )
    samples = dirichlet_counts(4000, big, concentration=0.3, seed=0)
    assert imbalance(samples) < 1.15, "all together even"
    assert imbalance(samples[:1]) > 3, "each one skewed"


def test_padding_adds_copies() -> None:
    padded = Workload(tokens=100, num_experts=16, top_k=2, dim=8, hidden=8, capacity_factor=1.6)
    assert uniform_counts(1, padded).sum() == 320


def test_sizes_share_copies_within_tensor_groups_and_repeat_them_under_the_baseline() -> None:
    grid = Grid(world=4, tp=2, ep=4)
    counts = zipf_counts(2, WORKLOAD, exponent=1.0, seed=0)
    shared = compile_plan(Plan(schedule="s2"), grid).forward
    repeated = compile_plan(Plan(schedule="baseline"), grid).forward
    layout = shared.slot("h").layout
    rows = [
        sum(sizes_of(program, WORKLOAD, grid, counts).num_rows(layout, rank) for rank in range(4))
        for program in (shared, repeated)
    ]
    assert rows == [400, 800]
    assert "give (2, 16)" in refused(lambda: sizes_of(shared, WORKLOAD, grid, counts[:1]))


def test_recorded_counts(tmp_path: Path) -> None:
    counts = zipf_counts(2, WORKLOAD, exponent=1.0, seed=0)
    np.save(tmp_path / "a.npy", counts)
    np.savetxt(tmp_path / "a.csv", counts, delimiter=",", fmt="%d")
    assert (read_counts(tmp_path / "a.npy") == counts).all()
    assert (read_counts(tmp_path / "a.csv") == counts).all()
    (tmp_path / "b.csv").write_text("1,2\n3,-4\n")
    (tmp_path / "c.csv").write_text("1,x\n")
    (tmp_path / "z.npy").write_bytes(b"PK\3\4")
    for name, line in (
        ("b.csv", "whole numbers"),
        ("c.csv", "does not parse"),
        ("d.npy", "cannot be read"),
        ("z.npy", "does not parse"),
        ("e.txt", "use .npy or .csv"),
    ):
        with pytest.raises(InputError, match=line):
            read_counts(tmp_path / name)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"tokens": 0}, "workload.tokens=0: must be at least 1"),
        ({"tokens": 2**63}, "workload.tokens=9223372036854775808: must be at least 1, and below"),
        ({"top_k": 17}, "workload.top_k=17: choose at most num_experts=16"),
        ({"dtype": "int3"}, "workload.dtype='int3': choose one of"),
        ({"capacity_factor": -1.0}, "workload.capacity_factor=-1.0"),
    ],
)
def test_impossible_workloads_are_refused(fields: dict, line: str) -> None:
    with pytest.raises(InputError, match=line.replace("[", r"\[")):
        Workload(**{"tokens": 1, "num_experts": 16, "top_k": 1, "dim": 1, "hidden": 1, **fields})
    assert "exponent=-1" in refused(zipf_counts, 1, WORKLOAD, exponent=-1.0, seed=0)
