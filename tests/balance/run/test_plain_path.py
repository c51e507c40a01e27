"""A layer without balancing runs no line of the balancing code; a layer with balancing does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
from meshes import make_layer, on_mesh, tokens_of

import moesaic
from moesaic.balance.run.calls import BalancedCalls
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.runtime.expert_parallel import PlainCalls

SOURCE = f"{Path(moesaic.__file__).parent}/"
GRID = Grid(world=2, ep=2, ranks_per_node=1)
ORDER = "runtime/expert_order.py"
"""The order of experts, after moves: balancing code in a folder that layers without balancing use
too."""
BUDGET = "balance/budget.py"
"""Memory budgets: planning uses them too and imports no runtime."""


def entered(plan: Plan, *, placed: bool = False) -> set[str]:
    """Return the paths of the balancing files with functions that a layer's training step runs, on
    any rank."""
    whole = make_layer()

    def rank(transport: AbstractTransport) -> set[str]:
        layer = on_mesh(whole, GRID, transport, plan)
        found = set()
        if placed:
            layer.on_mesh.order.watches = True

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
                found.add(frame.f_code.co_filename.removeprefix(SOURCE))

        x = tokens_of(transport.rank).requires_grad_()
        sys.setprofile(note)
        try:
            layer(x).sum().backward()
        finally:
            sys.setprofile(None)
        return found

    files: set[str] = set().union(*run_ranks(GRID.world, rank))
    assert {"layer.py", "runtime/expert_parallel.py"} <= files
    return {path for path in files if "balance" in Path(path).parts or path in (ORDER, BUDGET)}


@pytest.mark.parametrize("plan", [Plan(), Plan(all_to_all="multicast", chunks=2)])
def test_a_plan_that_balances_nothing_enters_no_balancing_code(plan: Plan) -> None:
    assert entered(plan) == set()


def test_what_balances_is_entered_where_it_is_on() -> None:
    assert {"balance/selector/arbiter.py", "balance/run/calls.py"} <= entered(
        Plan(replication="arbiter")
    )
    assert BUDGET in entered(Plan(memory_budget=8))
    assert entered(Plan(), placed=True) == {ORDER}


def test_a_switch_of_plans_switches_what_decides() -> None:
    whole = make_layer()

    def rank(transport: AbstractTransport) -> list[type]:
        layer = on_mesh(whole, GRID, transport, Plan())
        found = []
        for plan in (Plan(), Plan(memory_budget=8), Plan()):
            layer.use_plan(plan)
            found.append(type(layer.on_mesh.calls))
        return found

    for found in run_ranks(GRID.world, rank):
        assert found == [PlainCalls, BalancedCalls, PlainCalls]
