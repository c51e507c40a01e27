"""Switching plans between steps changes no result and moves no weight; ranks with different plans
detect it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from meshes import DIM, HIDDEN, every_rank, make_layer, on_mesh, tokens_of
from torch import Tensor

from helpers import refused
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.losses import LoadBalance
from moesaic.runtime.data_parallel import average_gradients
from moesaic.runtime.routing_cache import checkpoint
from moesaic_lab.recorder import Recorder

GRID = Grid(world=4, tp=2, ep=1, etp=4, ranks_per_node=2)
FLAT = Grid(world=4, ep=2, etp=2, ranks_per_node=2)
SHARDS = [Plan(schedule="s2", gather_weights=r) for r in (0, 1, 2, 4)]
MIXED = [
    Plan(),
    Plan(schedule="s3", chunks=2),
    Plan(schedule="baseline"),
    Plan(schedule="s2", gather_weights=0, all_to_all="pipelined"),
    Plan(schedule="s1", gather_weights=1, order="early", chunks=2),
    Plan(),
]
PADDED = Capacity.fixed(2.0, scope="rank", padded=True)


def steps(
    whole: MoE,
    grid: Grid,
    transport: AbstractTransport,
    plans: Sequence[Plan],
    switch: bool,
    capacity: AbstractCapacity,
) -> list[Tensor]:
    """Return outputs and all gradients of one step per plan; the weights change after each step."""
    layer = on_mesh(whole, grid, transport, plans[0] if switch else Plan(schedule="s2"))
    found = []
    for number, plan in enumerate(plans):
        if switch:
            layer.use_plan(plan)
        x = tokens_of(grid.coordinate(transport.rank, "dp"), seed=number).requires_grad_()
        y = layer(x, capacity=capacity)
        y.sin().sum().backward()
        average_gradients(layer, Mesh(grid, transport))
        assert x.grad is not None
        found += [y.detach(), x.grad]
        for parameter in layer.parameters():
            found.append(parameter.grad.clone())
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return found


@pytest.mark.parametrize(
    ("grid", "plans", "capacity"),
    [
        (GRID, [*SHARDS, SHARDS[1]], Dropless()),
        (GRID, MIXED, PADDED),
        (FLAT, [Plan(all_to_all="multicast"), *MIXED[:3]], Dropless()),
    ],
    ids=["r", "schedules", "multicast"],
)
def test_a_layer_that_switches_equals_one_that_does_not(grid, plans, capacity):
    whole = make_layer(losses=(LoadBalance(0.1),))

    def rank(transport: AbstractTransport) -> list[tuple[Tensor, Tensor]]:
        switched = steps(whole, grid, transport, plans, True, capacity)
        return list(
            zip(switched, steps(whole, grid, transport, plans, False, capacity), strict=True)
        )

    for pairs in run_ranks(grid.world, rank):
        assert len(pairs) == len(plans) * 5
        for number, (switched, plain) in enumerate(pairs):
            torch.testing.assert_close(
                switched, plain, rtol=1e-9, atol=1e-10, msg=lambda m, n=number: f"{n}: {m}"
            )


def test_a_backward_pass_keeps_the_plan_of_its_forward_pass() -> None:
    whole = make_layer()

    def rank(transport: AbstractTransport, x: Tensor) -> tuple[Tensor, Tensor]:
        gradients = []
        for later in (None, Plan(schedule="s3", chunks=2)):
            layer = on_mesh(whole, GRID, transport, SHARDS[1])
            y = layer(x)
            if later is not None:
                layer.use_plan(later)
            (gradient,) = torch.autograd.grad(y.sin().sum(), x)
            gradients.append(gradient)
        return gradients[0], gradients[1]

    for plain, switched in every_rank(GRID, rank):  # type: ignore[misc]
        assert torch.equal(plain, switched)


def test_a_switch_sends_nothing_and_keeps_weights_and_caches() -> None:
    whole = make_layer()

    def rank(transport: AbstractTransport) -> tuple[int, bool, list[bool], int]:
        recorder = Recorder(transport)
        layer = on_mesh(whole, GRID, recorder, SHARDS[0])  # type: ignore[arg-type]
        on = layer.on_mesh
        before = len(recorder.ranges)
        places = [p.data_ptr() for p in layer.parameters()]
        seen = []
        for plan in [*SHARDS, *SHARDS]:
            layer.use_plan(plan)
            seen.append(
                (
                    id(on.compiled),
                    id(on.compiled.shapes(on.num_experts)),
                    on.compiled.plan.gather_weights,
                )
            )
        sent = (
            sum(len(each.messages) for each in recorder.ranges[before:])
            + len(recorder.ranges)
            - before
        )
        same = [one == two for one, two in zip(seen[:4], seen[4:])]
        return (
            sent,
            places == [p.data_ptr() for p in layer.parameters()],
            same,
            len({number for number, *_ in seen}),
        )

    assert run_ranks(4, rank) == [(0, True, [True] * 4, 4)] * 4


def test_only_the_first_call_after_a_switch_tells_all_ranks() -> None:
    """Under S2 the ranks of a tensor-parallel group do not exchange counts; after a switch they do
    so once."""
    whole = make_layer()

    def rank(transport: AbstractTransport) -> list[int]:
        recorder = Recorder(transport)
        layer = on_mesh(whole, GRID, recorder, Plan(schedule="s2"))  # type: ignore[arg-type]
        told = []
        for plan in (Plan(schedule="s2"), SHARDS[1], SHARDS[1], SHARDS[1]):
            layer.use_plan(plan)
            first = len(recorder.ranges)
            layer(tokens_of(GRID.coordinate(transport.rank, "dp")))
            told.append(len(recorder.ranges[first].messages))
        return told

    assert run_ranks(4, rank) == [[1, 3, 1, 1]] * 4


@pytest.mark.parametrize(
    ("plans", "grid", "wrong", "capacity"),
    [
        # who routes with whom differs
        ([Plan(), Plan(schedule="s2"), Plan(), Plan()], GRID, [1], Dropless()),
        # inside tensor groups, which exchange no counts
        ([Plan(schedule="s2"), Plan(schedule="s3")] * 2, GRID, [1, 3], Dropless()),
        ([Plan(chunks=2)] * 3 + [Plan()], FLAT, [3], PADDED),
    ],
    ids=["slices", "tensor group", "tp=1"],
)
def test_ranks_that_switch_to_different_plans_all_say_so(plans, grid, wrong, capacity):
    whole = make_layer()

    def rank(transport: AbstractTransport) -> str:
        layer = on_mesh(whole, grid, transport, Plan(schedule="s2", chunks=4))
        layer(tokens_of(0), capacity=capacity)
        layer.use_plan(plans[transport.rank])
        return refused(lambda: layer(tokens_of(0), capacity=capacity))

    said = run_ranks(grid.world, rank)
    assert said == [said[0]] * grid.world
    advice = (
        "than rank 0: give every rank the same plan, and its replication policy the same settings"
    )
    calls = ", or call the layer with another call.dtype, call.top_k, call.capacity, call.losses,"
    lines = [f"ranks {wrong} run another plan or mesh{more} {advice}" for more in ("", calls)]
    # Under a padded capacity, a rank that changed nothing may not check again; then the ranks
    # compare no more.
    assert said[0] in (lines if capacity is PADDED else lines[:1])


def test_a_switch_before_a_recomputation_is_refused() -> None:
    whole = make_layer()

    def rank(transport: AbstractTransport) -> None:
        layer = on_mesh(whole, FLAT, transport, Plan())
        y = checkpoint(layer, tokens_of(transport.rank).requires_grad_())
        layer.use_plan(Plan(chunks=2))
        with pytest.raises(
            InputError,
            match=r"between a forward pass and its recomputation: call MoE\.use_plan between",
        ):
            y.sum().backward()
        layer.use_plan(Plan())
        y.sum().backward()

    run_ranks(4, rank)


REFUSED = [
    (
        Plan(gather_weights=3),
        "plan.gather_weights=3 does not divide mesh.etp=4: choose 0 or one of",
    ),
    (Plan(schedule="ted"), "plan.schedule=ted needs mesh.tp and mesh.etp over the same ranks"),
    (
        Plan(all_to_all="deepep"),
        "plan.all_to_all=deepep needs process groups, which only MoE.parallelize makes: ",
    ),
    (compile_plan(Plan(), Grid(world=4)), "the plan was compiled for "),
    (
        compile_plan(Plan(), GRID, bias=True),
        "the plan was compiled with bias=True, which does not fit GatedExperts",
    ),
]
"""Plans that do not fit a layer on GRID, each with the start of the message."""


def test_plans_that_do_not_fit_are_refused_and_the_layer_goes_on() -> None:
    whole = make_layer()

    def rank(transport: AbstractTransport, x: Tensor) -> tuple[str, ...]:
        layer = on_mesh(whole, GRID, transport, Plan(schedule="s2"))
        said = []
        y = layer(x)
        for plan, _ in REFUSED:
            said.append(refused(layer.use_plan, plan))
        assert torch.equal(layer(x), y)
        return tuple(said)

    (lines,) = set(every_rank(GRID, rank))
    for line, (_, words) in zip(lines, REFUSED, strict=True):  # type: ignore[call-overload]
        assert line.startswith(words)
        assert "\n" not in line


def test_a_layer_on_no_mesh_has_no_plan() -> None:
    with pytest.raises(
        InputError,
        match=r"MoE\.use_plan: the layer is on no mesh: call parallelize\(mesh, plan\) first",
    ):
        MoE(DIM, HIDDEN, 4).use_plan(Plan())
