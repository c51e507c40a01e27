"""Arbiters of several ranks that measure different times: they decide identically, and raise an error if decisions differ."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from meshes import make_layer, step, tokens_of
from torch import Tensor

from helpers import thinned
from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.replication.shadow import Shadow
from moesaic.balance.run import clock as arbiter_clock
from moesaic.balance.run.calls import hear_links
from moesaic.balance.run.clock import OPEN, CallClock, TimedCall
from moesaic.balance.selector import prepared
from moesaic.balance.selector.arbiter import Arbiter
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.planner.cluster import Machine
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.runtime.expert_parallel import PlainCalls

GRIDS = {
    "ep": Grid(world=4, ep=4, ranks_per_node=2),
    "copies": Grid(world=4, ep=2, ranks_per_node=2),
    "tp": Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2),
}
DEAR = ReplicationCosts(machine=Machine(tflops=1e-6, inter_gbps=1e-3, intra_gbps=1e-3, inter_latency_us=0))
CPU = torch.device("cpu")


def layer_on(transport: AbstractTransport, grid: Grid, policy: Any, plan: Plan | None = None) -> MoE:
    layer = copy.deepcopy(make_layer())
    with torch.no_grad():
        next(layer.router.parameters())[0] += 3.0
    layer.parallelize(Mesh(grid, transport), plan or Plan(replication="arbiter"), policy)
    return layer


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's measured times are scaled by a random factor from 0.3 to 3."""
    seconds = TimedCall.seconds
    rng = random.Random(0)

    def other(self: TimedCall) -> float | None:
        found = seconds(self)
        return None if found is None else found * rng.uniform(0.3, 3)

    monkeypatch.setattr(TimedCall, "seconds", other)


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize(("grid", "recompute"), thinned(itertools.product(GRIDS, (False, True)), every=3))
def test_ranks_that_measure_different_times_decide_alike_and_compute_the_same(
    grid: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, calls = GRIDS[grid], 30
    monkeypatch.setattr(prepared, "SMALL", 0 if recompute else 1024)

    def rank(transport: AbstractTransport) -> tuple[list[tuple[str, bool]], float]:
        layer = layer_on(transport, mesh, Arbiter(costs=DEAR, optimism=0.9))
        plain = layer_on(transport, mesh, None, Plan())
        worst = 0.0
        for number in range(calls):
            x = tokens_of(mesh.coordinate(transport.rank, "dp"), count=8, seed=number).abs()
            for one, other in zip(step(layer, x, recompute), step(plain, x), strict=True):
                worst = max(worst, float((one - other).abs().max()))
        assert layer.on_mesh is not None
        return [(each.option, each.is_trial) for each in layer.on_mesh.calls.take()], worst

    found = run_ranks(4, rank)
    assert all(decisions == found[0][0] for decisions, _ in found)
    assert max(worst for _, worst in found) < 1e-10
    assert len(found[0][0]) == calls, "a recomputation decides nothing"
    assert len({option for option, _ in found[0][0]}) >= 3
    assert sum(trial for _, trial in found[0][0]) > 3


def test_ranks_that_decided_otherwise_are_refused_on_every_rank() -> None:
    def rank(transport: AbstractTransport) -> str:
        layer = layer_on(transport, GRIDS["ep"], Arbiter(costs=DEAR))
        step(layer, tokens_of(transport.rank, 8))
        assert layer.on_mesh is not None
        selector = layer.on_mesh.calls
        made = selector._weighings[1].result()[1]
        made.digest += transport.rank == 2
        try:
            step(layer, tokens_of(transport.rank, 8))
        except RuntimeError as error:
            return str(error)
        return ""

    said = run_ranks(4, rank)
    assert said == ["arbiter: after call 1 of a layer, ranks [2] decided differently from the first rank"] * 4


def test_links_are_heard_of_from_the_same_call_on_by_all_ranks() -> None:
    mesh, calls = GRIDS["ep"], 8

    def rank(transport: AbstractTransport) -> tuple[list[str], list[float]]:
        layer = layer_on(transport, mesh, Arbiter(costs=DEAR, optimism=0.9))
        assert layer.on_mesh is not None
        for number in range(calls):
            step(layer, tokens_of(transport.rank, count=8, seed=number).abs())
            if number == 3:
                assert hear_links(layer.on_mesh.calls, {"outside": (0.5,), "inside": (4.0,)})
        selector = layer.on_mesh.calls
        made = selector.take()
        load = CallLoad(mesh, torch.ones(4, 8, dtype=torch.int64).numpy(), 8, 8, 8)
        (found,) = selector._arbitration.weigher.replica_loads(load)
        return [each.option for each in made], [found.costs.machine.inter_gbps, found.costs.machine.intra_gbps]

    found = run_ranks(4, rank)
    assert all(each == found[0] for each in found)
    assert found[0][1] == [0.5e-3, 4e-3]
    assert not hear_links(PlainCalls(compile_plan(Plan(), mesh)), {})


def test_evaluation_and_inference_are_not_timed_try_nothing_and_change_nothing() -> None:
    mesh = GRIDS["ep"]

    def rank(transport: AbstractTransport) -> tuple[int, int, bool]:
        layer = layer_on(transport, mesh, Arbiter(costs=DEAR, optimism=0.9))
        for number in range(6):
            step(layer, tokens_of(transport.rank, 8, seed=number))
        assert layer.on_mesh is not None
        chooser = layer.on_mesh.calls
        assert chooser._arbitration is not None
        known = chooser._arbitration.times._known
        chooser.take()
        next_one = chooser._arbitration.last, chooser._arbitration._trial, chooser._arbitration._calls_until
        before = {name: len(each.measured) for name, each in known.items()}
        with torch.no_grad():
            for number in range(20):
                layer(tokens_of(transport.rank, 8, seed=7 + number))
        trials = sum(each.is_trial for each in chooser.take())
        after = chooser._arbitration.last, chooser._arbitration._trial, chooser._arbitration._calls_until
        return trials, sum(len(each.measured) for each in known.values()) - sum(before.values()), after == next_one

    for trials, learned, is_unchanged in run_ranks(4, rank):
        assert is_unchanged, "the next training call runs what the last one decided"
        assert trials == 0
        assert learned <= 1, "the last step's time may still come in"


def test_ranks_with_other_settings_are_refused() -> None:
    def refused(policies: list[Any], plan: Plan) -> None:
        def rank(transport: AbstractTransport) -> None:
            step(layer_on(transport, GRIDS["ep"], policies[transport.rank], plan), tokens_of(transport.rank, 8))

        with pytest.raises(InputError, match=r"ranks \[2\] run another plan"):
            run_ranks(4, rank)

    usual, arbiter = Arbiter(costs=DEAR), Plan(replication="arbiter")
    for other in (Arbiter(costs=DEAR, margin=0.2), Arbiter(), Arbiter(costs=DEAR, learn=False)):
        refused([usual, usual, other, usual], arbiter)
    refused([Shadow(), Shadow(), Shadow(DEAR), Shadow()], Plan(replication="shadow"))
    refused([Shadow(), Shadow(), Shadow(at_most=3), Shadow()], Plan(replication="shadow"))


def test_a_call_is_timed_from_its_counts_to_the_end_of_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(arbiter_clock.time, "perf_counter", lambda: now[0])
    call = TimedCall(1, CPU)
    x = torch.ones(3, requires_grad=True)
    now[0] = 2.0
    y = call.ran(x * 2)
    assert call.seconds() is None
    now[0] = 50.0
    z = y.sin()

    def backward(_: Tensor) -> None:
        now[0] = 100.0

    z.register_hook(backward)
    y.register_hook(lambda grad: None)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: now.__setitem__(0, 107.0))
    z.sum().backward()
    assert call.seconds() == 9.0
    call.ran_again()
    assert call.seconds() == 9.0, "nothing changes afterwards"


def test_a_recomputation_inside_the_backward_pass_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(arbiter_clock.time, "perf_counter", lambda: now[0])
    call = TimedCall(1, CPU)
    now[0] = 1.0
    y = call.ran(torch.ones(3, requires_grad=True) * 2)
    node = y.grad_fn
    assert node is not None

    def recomputed(_: Any) -> None:
        now[0] += 40.0
        call.ran_again()
        now[0] += 5.0

    node.register_prehook(recomputed)
    y.sum().backward()
    assert call.seconds() == 6.0


def test_what_needs_no_gradient_is_never_told() -> None:
    clock = CallClock(1)
    for _ in range(3 * OPEN):
        clock.start(CPU).ran(torch.ones(2))
    assert clock.tell()[:2] == [0.0, 0.0]
    assert len(clock._open) == OPEN
    with torch.no_grad():
        assert clock.tell()[2] == 0.0
    assert clock.tell()[2] == 1.0


def test_a_time_counts_when_all_ranks_have_told_it_and_then_the_slowest_one() -> None:
    clock = CallClock(3)
    assert clock.hear([[7, 0.3, 1], [7, 0.5, 1], [6, 0.4, 1]]) == {}
    assert clock.hear([[8, 0.2, 1], [8, 0.1, 0], [7, 0.4, 1]]) == {7: 0.5}
    assert clock.hear([[0, 0.0, 1], [0, 0.0, 1], [8, 0.9, 1]]) == {8: 0.9}
    assert clock.is_timed([[7, 0.3, 1], [7, 0.5, 1]])
    assert not clock.is_timed([[8, 0.2, 1], [8, 0.1, 0]])
    for number in range(10, 300):
        clock.hear([[number, 1.0, 1], [0, 0.0, 1], [0, 0.0, 1]])
    assert len(clock._rank_seconds) <= OPEN


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_times_are_those_of_events_and_nothing_waits() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device, requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()
    clock = CallClock(1)
    call = clock.start(device)
    torch.cuda._sleep(200_000_000)
    y = call.ran(x @ x)
    y.sum().backward()
    assert call.seconds() is None, "the device is still at it"
    torch.cuda.synchronize()
    seconds = call.seconds()
    assert seconds is not None
    assert seconds > 0.02
    assert clock.tell()[:2] == [1.0, seconds]
