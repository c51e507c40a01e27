"""Algorithm 1 as a run names it: what it takes is what the closed form says of the cluster's own
lines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from helpers import refused
from moesaic.planner.algorithm1 import choose, corrected, operations
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.train.auto_plan import Ranks, with_planned
from moesaic.train.config import PlannerConfig
from planner.clusters import DEVICE, flat
from runs import tiny

GRID = Grid(world=8, tp=4, ep=2, etp=4, ranks_per_node=4)
LAYER = Workload(tokens=2048, num_experts=8, top_k=2, dim=512, hidden=512, matrices=2, dtype="fp32")


def test_the_choice_is_the_rules_on_the_clusters_operations() -> None:
    simulator = Simulator(flat(2, 4, device=DEVICE))
    found = operations(simulator, GRID, LAYER.top_k, capacity_factor=LAYER.capacity_factor)
    assert min(found.all_to_all.beta, found.gather.beta, found.overlapped.beta) > 0
    plan = choose(simulator, LAYER, GRID)
    assert plan.schedule == corrected(found, LAYER, 4, 4)
    assert plan.overlap_gather == (plan.schedule == "s2")


def test_a_rule_needs_times_from_one_place() -> None:
    assert "planner.plan=parm needs the times" in refused(PlannerConfig, plan="parm")
    named = PlannerConfig(plan="parm", cluster="25gbe")
    assert (named.rule, named.file, named.is_auto) == ("parm", "", False)


def test_the_rule_says_what_it_chose_and_needs_no_rate_of_float64(tmp_path, monkeypatch):
    """Bytes decide, so a float64 run chooses what a float32 run of twice the width does."""
    grid = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=4)
    monkeypatch.setattr(Ranks, "of", lambda *_: SimpleNamespace(mesh=SimpleNamespace(grid=grid)))
    config = tiny(tmp_path, batch_size=4, planner={"plan": "parm", "cluster": "25gbe"})
    said: list[str] = []
    chosen = {}
    for precision in ("float32", "float64"):
        of = with_planned(replace(config, precision=precision), said.append)
        assert of.planner.plan == ""
        chosen[precision] = of.plan.schedule
    assert all(
        f"Algorithm 1 chooses {chosen[name]}, " in line
        for name, line in zip(chosen, said, strict=True)
    )
    assert "tp 2, ep 2, etp 2" in said[0]
    dim = config.model.dim
    wide = with_planned(
        replace(config, precision="float32", model=replace(config.model, dim=2 * dim)), said.append
    )
    assert wide.plan.schedule == chosen["float64"]
