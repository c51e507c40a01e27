"""Layers under the arbiter: the same results whatever it chooses, its own programs, and
recomputations without a new choice."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from meshes import compiled, make_layer, step, tokens_of
from torch import Tensor

from helpers import refused
from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import (
    AbstractChooser,
    AbstractReplicationPolicy,
    CallDecision,
)
from moesaic.balance.replication.shadow import Shadow
from moesaic.balance.run.calls import calls_by
from moesaic.balance.selector.arbiter import Arbiter
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.runtime import expert_parallel as runtime
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.cases import AnyOption

GRIDS = {
    "ep": Grid(world=4, ep=4, ranks_per_node=2),
    "tp": Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2),
    "copies": Grid(world=4, ep=2, ranks_per_node=2),
}
DEAR = Rates(tflops=1e-6, inter_gbps=1e-3, intra_gbps=1e-3, inter_latency_us=0)
"""Costs by which replication pays even for the tiny sizes of tests."""


def spread_over(
    layer: MoE,
    grid: Grid,
    transport: AbstractTransport,
    plan: Plan,
    policy: AbstractReplicationPolicy | None,
) -> MoE:
    layer = copy.deepcopy(layer)
    calls = None if policy is None else calls_by(policy)
    layer.parallelize(Mesh(grid, transport), compiled(plan, grid), calls=calls)
    return layer


def lean(layer: MoE, by: float) -> None:
    """Make a router prefer the first experts."""
    with torch.no_grad():
        weight = next(layer.router.parameters())
        weight[0] += by


def test_the_true_arbiter_replicates_under_skew_and_nothing_under_even_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = GRIDS["ep"]
    whole = make_layer()
    ran: list[Any] = []
    programs: list[dict[str, Compiled]] = []
    run_program = runtime.run_program

    def watched(work: Any, *tensors: Any) -> Tensor:
        ran.append(work.compiled)
        return run_program(work, *tensors)

    monkeypatch.setattr(runtime, "run_program", watched)
    work = compile_plan(Plan(replication="arbiter"), mesh)
    even = copy.deepcopy(whole)
    even.top_k = even.num_experts

    def rank(transport: AbstractTransport) -> tuple[list[str], list[int], bool]:
        names: list[str] = []
        rows: list[int] = []
        same = True
        for layer in (even, whole):
            layer = copy.deepcopy(layer)
            lean(layer, 9.0 * (layer.top_k == 2))
            plain, x = copy.deepcopy(layer), tokens_of(transport.rank, 12).abs()
            layer.parallelize(Mesh(mesh, transport), work, calls=calls_by(Arbiter(costs=DEAR)))
            plain.parallelize(Mesh(mesh, transport), Plan())
            same = same and all(
                torch.allclose(a, b, atol=1e-10) for a, b in zip(step(layer, x), step(plain, x))
            )
            (verdict,) = layer.on_mesh.calls.take()
            names.append(verdict.option)
            rows += [max(each.rows) for each in verdict.moved()]
            programs.append(layer.on_mesh.calls.programs)
            assert layer.on_mesh.calls.take() == []
        return names, rows, same

    results = run_ranks(4, rank)
    names, rows, _ = results[0]
    assert all(result == results[0] for result in results)
    assert results[0][2]
    assert names[0] in ("alone", "steps")
    assert rows[0] == rows[1] == 48
    assert any(policy in names[1] for policy in ("shadow", "spill", "redundant"))
    assert rows[3] < rows[2]
    first = [each[names[0]] for each in programs]
    assert sum(any(each is one for one in first) for each in ran) == 4, (
        "the very program of a plan without replication"
    )
    assert first[0] is first[1] is work.under(first[0].plan), (
        "layers share what their plan compiles"
    )
    assert sum(each.replicates for each in ran) == 4


@dataclass(frozen=True, kw_only=True)
class Counting(AnyOption):
    """Counts how often it is asked."""

    asked: list[int]

    def start(self, plans: Mapping[str, Plan]) -> AbstractChooser:
        arbitration = super().start(plans)
        asked = self.asked
        choose = arbitration.choose

        def counted(load: CallLoad) -> CallDecision:
            asked.append(int(load.copies.sum()))
            return choose(load)

        arbitration.choose = counted  # type: ignore[method-assign]
        return arbitration


def test_a_recomputation_runs_what_its_forward_pass_chose() -> None:
    mesh = GRIDS["ep"]
    whole = make_layer()

    def rank(transport: AbstractTransport) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        asked: list[int] = []
        layer = spread_over(
            whole, mesh, transport, Plan(replication="arbiter"), Counting(seed=5, asked=asked)
        )
        plain = spread_over(whole, mesh, transport, Plan(), None)
        inputs = [tokens_of(transport.rank, seed=number).requires_grad_() for number in range(4)]
        outputs = [checkpoint(layer, x) for x in inputs]
        torch.stack(outputs).sin().sum().backward()
        pairs: list[tuple[Tensor, Tensor]] = []
        for x in inputs:
            other = x.detach().clone().requires_grad_()
            plain(other).sin().sum().backward()
            assert x.grad is not None
            assert other.grad is not None
            pairs.append((x.grad, other.grad))
        return len(asked), pairs

    for asked, pairs in run_ranks(4, rank):
        assert asked == 4, "not asked again by the recomputation"
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_arbiters_of_two_layers_remember_apart() -> None:
    mesh = GRIDS["ep"]
    settings = Arbiter(costs=DEAR)
    plans = settings.option_plans(Plan(replication="arbiter"), mesh)
    one, other = (settings.start(plans) for _ in range(2))
    copies = np.zeros((4, 4), dtype=np.int64)
    even = np.full((4, 4), 12)
    copies[:, 0] = 50
    assert one.choose(CallLoad(mesh, copies, 4, 8, 4)).option != "alone"
    assert len(one.choose(CallLoad(mesh, copies, 4, 8, 4)).seconds) > 1
    assert next(iter(other.choose(CallLoad(mesh, even, 4, 8, 4)).seconds)) == "alone"


def test_ranks_with_other_settings_are_refused() -> None:
    def check(policies: list[Any], plan: Plan) -> None:
        def rank(transport: AbstractTransport) -> None:
            layer = spread_over(
                make_layer(), GRIDS["ep"], transport, plan, policies[transport.rank]
            )
            step(layer, tokens_of(transport.rank, 8))

        assert "ranks [2] run another plan" in refused(run_ranks, 4, rank)

    usual = Arbiter(costs=DEAR)
    arbiter = Plan(replication="arbiter")
    for other in (Arbiter(costs=DEAR, margin=0.2), Arbiter()):
        check([usual, usual, other, usual], arbiter)
    check([Shadow(), Shadow(), Shadow(DEAR), Shadow()], Plan(replication="shadow"))
    check([Shadow(), Shadow(), Shadow(at_most=3), Shadow()], Plan(replication="shadow"))
