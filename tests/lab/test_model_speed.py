"""How long the simulator takes: every size that is timed compiles and simulates, and claims are of
the slowest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic_lab.simulator import (
    CASES,
    PLANNED,
    SKEWED,
    claims,
    simulate,
    simulate_skewed,
    simulator_of,
    whole,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.world} {case.plan.all_to_all}")
def test_every_size_compiles_on_its_whole_mesh_and_runs(case) -> None:
    """A mesh that does not divide its world was found only by the whole benchmark's last part."""
    compiled = whole(case)
    simulator = simulator_of(case)
    assert compiled.grid.world == case.world
    simulate(simulator, case, compiled)


def test_uneven_loads_run_rank_by_rank() -> None:
    simulate_skewed(replace(SKEWED, world=32, tp=2, ep=8, etp=2))
    assert (SKEWED.world, SKEWED.plan.all_to_all) == (4096, "hier2d")


def test_claims_take_the_slower_of_a_world_and_ask_what_is_wanted() -> None:
    worlds = (2048, 2048, 131_072, SKEWED.world, PLANNED)
    rows = [
        {"ranks": world, "cold_seconds": 0.1 * (number + 1)} for number, world in enumerate(worlds)
    ]
    found = {claim.name: (round(claim.value or 0, 9), claim.target) for claim in claims(rows)}
    assert found == {
        "plan.seconds_64": (0.5, 10),
        "model.simulate_2048_seconds": (0.2, 1),
        "model.simulate_100k_seconds": (0.3, 1),
        "model.simulate_skewed_4096_seconds": (0.4, 30),
    }
