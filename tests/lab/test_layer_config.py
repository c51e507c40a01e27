"""The layer benchmark: its configuration, its routing, which plans do the same, its predictions and
its jobs."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from moesaic.errors import InputError
from moesaic.measure.host import BalancedRouter, balanced_choice, visits
from moesaic.planner.call_sizes import node_tokens_per_node
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Op
from moesaic.routing.node_tokens import find_node_tokens
from moesaic_lab.bounds import program_messages
from moesaic_lab.layer.cells import BEST, SINGLES, all_ep, jobs, most_promising, singles
from moesaic_lab.layer.config import (
    TASK_US,
    Ablation,
    AdaptiveR,
    LayerBenchConfig,
    LayerPlace,
    Orders,
    Pipelining,
    Schedules,
    read_config,
)
from moesaic_lab.layer.same import distinct
from planner.durations import durations
from program.even import even_sizes

GRID = Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2)
PLACE = LayerPlace(
    nodes=2,
    ranks_per_node=2,
    intra="400mbit",
    dim=8,
    hidden=16,
    num_experts=4,
    tokens_per_rank=8,
    gflops=1e3,
)


# Configuration


def test_the_committed_configuration_holds_every_part() -> None:
    config = read_config()
    parts: dict[str, list[Any]] = {}
    for cell in config.cells:
        parts.setdefault(cell.section, []).append(cell)
        assert cell.repeats >= 8
        # nothing near 1 is claimed about r
        assert cell.pairs >= (12 if isinstance(cell, AdaptiveR) else 30)
    assert list(parts) == ["schedules", "adaptive_r", "pipelining", "orders", "codecs", "ablation"]
    (schedules, larger) = parts["schedules"]
    (pipelining,) = parts["pipelining"]
    (codecs,) = parts["codecs"]
    assert larger.tokens_per_rank >= 512 > schedules.tokens_per_rank, (
        "Parm's SAA gains from 512 tokens on"
    )
    assert (schedules.nodes, schedules.ranks_per_node) == (4, 4)
    assert schedules.tp == schedules.etp == (1, 2, 4)
    assert {each.name for each in parts["adaptive_r"]} == {"base", "large"}
    assert {min(each.factors) for each in parts["adaptive_r"]} == {1.0}
    assert {max(each.factors) for each in parts["adaptive_r"]} == {8.0}
    assert pipelining.chunks == (1, 2, 4, 8)
    assert codecs.codecs == ("none", "bf16", "int8", "fp8", "zfp")


# Routing


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(64, 2, 16), (8, 1, 4), (12, 4, 4), (0, 2, 4)]
)
def test_every_choice_is_balanced_and_no_token_chooses_twice(
    tokens: int, top_k: int, experts: int
) -> None:
    choice = balanced_choice(tokens, top_k, experts, seed=3)
    expert = choice.expert.view(tokens, top_k)
    for slot in range(top_k):
        assert (
            torch.bincount(expert[:, slot], minlength=experts).tolist()
            == [tokens // experts] * experts
        )
    assert all(len(set(row)) == top_k for row in expert.tolist())
    assert choice.token.tolist() == [t for t in range(tokens) for _ in range(top_k)]
    assert choice.slot.tolist() == list(range(top_k)) * tokens
    assert choice.per_token == top_k


def test_the_pattern_follows_the_seed() -> None:
    one, again, other = (balanced_choice(64, 2, 16, seed).expert for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    with pytest.raises(InputError, match="10 tokens do not spread evenly over num_experts=4"):
        balanced_choice(10, 2, 4, 0)


def test_visits_are_counted_and_told_to_the_model() -> None:
    """By hand, and in place of what is estimated for drawn experts."""
    expert = balanced_choice(64, 2, 16, seed=0).expert.view(64, 2).tolist()
    known = dict(visits(64, 2, 16, seed=0))
    assert sorted(known) == [1, 2, 4, 8, 16]
    for places in known:
        assert known[places] == pytest.approx(
            sum(len({e * places // 16 for e in row}) for row in expert) / 64
        )
    layer = Workload(
        tokens=64, num_experts=16, top_k=2, dim=8, hidden=8, visits=visits(64, 2, 16, seed=0)
    )
    assert node_tokens_per_node(layer, 4, 1) == pytest.approx(64 * known[4] / 4)
    drawn = node_tokens_per_node(replace(layer, visits=()), 4, 1)
    assert (
        drawn == pytest.approx(64 * (1 - 12 * 11 / (16 * 15))) != pytest.approx(64 * known[4] / 4)
    )


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_visits_in_chunks_are_those_of_the_runtime(chunks: int) -> None:
    grid = Grid(world=8, ep=8, ranks_per_node=2)
    choice = balanced_choice(64, 2, 16, seed=3)
    order = torch.argsort(choice.expert, stable=True)
    found = find_node_tokens(choice.token[order], choice.expert[order], 16, 64, chunks, grid)
    known = dict(visits(64, 2, 16, 3, chunks))
    assert known[4] == pytest.approx(float(found.counts[:4].sum()) / 64)
    assert known[8] == pytest.approx(float(found.counts[4:].sum()) / 64)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "nodes"), [(96, 16, 2, 2), (256, 16, 4, 2), (1024, 64, 8, 8)]
)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_drawn_tokens_in_chunks_visit_as_often_as_is_estimated(
    tokens: int, experts: int, top_k: int, nodes: int, chunks: int
) -> None:
    grid = Grid(world=nodes, ep=nodes, ranks_per_node=1)
    generator = torch.Generator().manual_seed(1)
    counted = []
    for _ in range(20):
        expert = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].reshape(-1)
        order = torch.argsort(expert, stable=True)
        token = torch.arange(tokens).repeat_interleave(top_k)
        counted.append(
            float(
                find_node_tokens(
                    token[order], expert[order], experts, tokens, chunks, grid
                ).counts.sum()
            )
        )
    layer = Workload(tokens=tokens, num_experts=experts, top_k=top_k, dim=8, hidden=8)
    assert nodes * node_tokens_per_node(layer, nodes, chunks) == pytest.approx(
        sum(counted) / 20, rel=0.03
    )


def test_weights_share_a_token() -> None:
    router = BalancedRouter(8, 4, seed=0)
    scores = router.scores(torch.zeros(8, 8), None, None)
    assert router.weigh(scores, router.choose(scores, 2, None, None), 2).tolist() == [0.5] * 16


# Which plans do the same


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_plans_that_do_the_same_send_the_same(tp: int, etp: int) -> None:
    grid = Grid(world=4, tp=tp, ep=4 // etp, etp=etp, ranks_per_node=2)
    plans = singles(grid)
    kept, same = distinct(plans)
    assert {*kept, *same} == set(plans)
    assert not {*kept} & {*same}

    def sent(name: str) -> list[Any]:
        found = plans[name]
        sizes = even_sizes(
            found.grid, redundant=found.is_redundant, tokens=8 * tp, num_experts=4, top_k=2, units=4
        )
        between: list[Counter[tuple[int, int]]] = [Counter(), Counter()]
        for total, program in zip(between, (found.forward, found.backward)):
            for source, target, num_bytes in program_messages(
                program, sizes, dim=8, element_bytes=4, unit_columns=16
            ):
                total[source, target] += int(num_bytes)
        return between

    for name, other in same.items():
        assert sent(name) == sent(other)
    assert (
        set(kept)
        == {
            (1, 1): {"baseline"},
            (1, 2): {"baseline", "s1", "s3"},
            (2, 1): {"baseline", "s1", "s2", "s2, saa"},
            (2, 2): set(SINGLES),
        }[(tp, etp)]
    )


def test_orders_and_chunks_tell_plans_apart() -> None:
    grid = all_ep(PLACE)
    plans = {
        order: compile_plan(Plan(chunks=2, order=order), grid) for order in ("optsche", "fifo")
    }  # type: ignore[arg-type]
    assert set(distinct(plans)[0]) == {"optsche"}
    assert set(distinct(plans, in_order=True)[0]) == {"optsche", "fifo"}
    plans = {str(n): compile_plan(Plan(chunks=n), grid) for n in (1, 2)}
    assert set(distinct(plans)[0]) == {"1", "2"}
    plans = {codec: compile_plan(Plan(codec=codec), grid) for codec in ("bf16", "int8")}  # type: ignore[arg-type]
    assert set(distinct(plans)[0]) == {"bf16", "int8"}


# Predictions


def test_durations_are_bytes_over_the_busiest_link_and_flops_over_the_rate() -> None:
    place = replace(PLACE, gflops=2.0, coded_mb_per_second=1.0)
    grid = all_ep(place)
    plan = Plan(codec="bf16")
    made = compile_plan(plan, grid)
    simulator = Simulator(place.cluster)
    seconds = durations(simulator, made.forward, place.workload(made.grid.tp), made.grid)
    copies = 8 * 2
    row = 8 * 4
    assert seconds["out"] == pytest.approx(2 * copies * 2 * 8 * 16 / 2e9)
    assert seconds["h@pack"] == pytest.approx(copies * row / 1e6)
    assert seconds["h@0"] == pytest.approx(
        2 * copies / 2 * row / 2 / 25e6
    )  # two ranks, half of it leaves, two bytes of four
    step = simulator.layer_seconds(
        made.forward, made.backward, place.workload(made.grid.tp), made.grid
    )
    host = TASK_US * 1e-6 * max(place.world / (os.cpu_count() or 1), 1.0)
    assert step > host * (len(made.forward.tasks) + len(made.backward.tasks))


@pytest.mark.parametrize("r", [None, 1, 0])
def test_computing_does_not_depend_on_r(r: int | None) -> None:
    place = replace(PLACE, gflops=2.0)
    grid = Grid(world=4, ep=2, etp=2, ranks_per_node=2)
    plan = Plan(gather_weights=r)
    made = compile_plan(plan, grid)
    seconds = durations(
        Simulator(place.cluster), made.backward, place.workload(made.grid.tp), made.grid
    )
    (gradient,) = [task.name for task in made.backward.tasks if task.op is Op.EXPERT_GRAD]
    assert seconds[gradient] == pytest.approx(4 * 8 * 2 * 2 * 8 * 16 / 2e9)


def test_promising_plans_are_those_that_should_be_faster() -> None:
    plan = compile_plan(Plan(), GRID)
    plans = {
        name: (seconds, plan) for name, seconds in (("baseline", 3.0), ("s3", 1.0), ("s1", 2.0))
    }
    assert list(most_promising(plans, Schedules(trial_plans=2), at_most=1e9)) == ["s3", "s1"]
    assert list(most_promising(plans, Schedules(trial_plans=3), at_most=1.0)) == ["s3"]


# Jobs


def small(*cells: Any) -> LayerBenchConfig:
    return LayerBenchConfig(cells=cells)


def shaped(kind: Any, **fields: Any) -> Any:
    return replace(kind(), **asdict(PLACE) | fields)


def test_schedules_make_a_job_for_every_mesh() -> None:
    found = list(jobs(small(shaped(Schedules, tp=(1, 2), etp=(1, 2), trial_plans=1))))
    labels = [job.label for job in found]
    assert labels == [
        "tp 1, etp 1",
        "tp 2, etp 1",
        "tp 1, etp 2, etp inside nodes",
        "tp 1, etp 2, ep inside nodes",
        "tp 2, etp 2, etp inside nodes",
        "tp 2, etp 2, ep inside nodes",
    ]
    assert [job.tokens for job in found[:2]] == [8, 16]
    for job in found:
        assert job.reference == BEST
        assert next(iter(job.methods)) == "baseline"
        assert {"s1", "s2", "s3"} <= {*job.methods, *job.same}
        assert {*job.compete} <= {*job.methods}
        assert all(plan.grid.innermost == job.grid.innermost for plan in job.methods.values())
    assert "ted" in found[4].methods
    assert "ted" not in {*found[5].methods, *found[5].same}
    assert set(found[0].same) == {"ted", "s1", "s2", "s2, saa", "s3"}


def test_adaptive_r_makes_a_job_for_every_factor_and_a_method_for_every_r() -> None:
    part = shaped(AdaptiveR, nodes=2, ranks_per_node=4, etp=4, factors=(1.0, 3.0))
    found = list(jobs(small(part)))
    assert [(job.factor, job.counts_switches) for job in found] == [(1.0, True), (3.0, False)]
    assert list(found[0].methods) == ["r=4", "r=2", "r=1", "r=0"]
    assert [plan.plan.gather_weights for plan in found[0].methods.values()] == [None, 2, 1, 0]


def test_the_other_parts_make_their_jobs() -> None:
    found = list(
        jobs(
            small(
                shaped(Pipelining, chunks=(1, 2), codecs=("none", "int8")),
                shaped(Orders, chunks=2, codec="int8"),
                shaped(Ablation, codec="int8"),
            )
        )
    )
    assert [job.label for job in found] == [
        "chunks, no codec",
        "chunks, int8",
        "linear, 2 chunks, int8",
        "int8, 2 chunks",
    ]
    assert found[1].methods["2"].plan == Plan(chunks=2, codec="int8", backward_codec="int8")
    assert {*found[2].methods, *found[2].same} == {"optsche", "fifo", "early"}
    last = [plan.plan for plan in found[3].methods.values()]
    assert last[0] == Plan(order="fifo")
    assert last[1] == replace(last[0], codec="int8", backward_codec="int8")
    assert last[2] == replace(last[1], all_to_all="pipelined")
    assert last[3] == replace(last[2], order="optsche", chunks=2)
