"""The executor frees values after their last use, and a layer call is one differentiable
function."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from meshes import DIM, compiled, every_rank, make_layer, on_mesh, part_of, tokens_of
from torch import Tensor

from helpers import thinned
from moesaic.balance.run import sliced_calls as slices_module
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, NoTransport
from moesaic.errors import InputError
from moesaic.planner.candidates import SearchSpace
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.joined_messages import bundles
from moesaic.program.plan import Plan
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Op, Program
from moesaic.runtime import executor as executor_module
from moesaic.runtime.data_parallel import average_gradients
from moesaic.runtime.executor import LayerRun, Script, drive, inputs_of, interpret, script_of
from moesaic.runtime.tasks import Call
from moesaic_lab.recorder import Recorder

FOUR = Grid(world=4, ep=4, ranks_per_node=2)


def program_of(grid: Grid = FOUR, bias: bool = False, **options: object) -> Program:
    return compile_plan(Plan(**options), grid, bias=bias).forward  # type: ignore[arg-type]


def test_a_script_is_made_once_and_has_the_programs_bundles() -> None:
    program = program_of()
    script = script_of(program, frozenset({"y"}))
    assert script_of(program, frozenset({"y"})) is script
    assert [step.number for step in script.steps] == [bundle[0] for bundle in bundles(program)]
    assert [task for step in script.steps for task in step.tasks] == list(program.tasks)


def test_programs_of_one_name_and_length_have_scripts_of_their_own() -> None:
    program = program_of()
    renamed = replace(
        program, tasks=tuple(replace(task, name=f"{task.name}2") for task in program.tasks)
    )
    assert hash(renamed) == hash(program)
    assert script_of(renamed, None) is not script_of(program, None)
    assert script_of(renamed, None).steps[0].tasks[0].name == f"{program.tasks[0].name}2"


def freed(script: Script) -> list[str]:
    return [name for step in script.steps for name in step.dies]


def test_every_slot_is_freed_once_after_its_last_reading() -> None:
    program = program_of()
    names = freed(script_of(program, frozenset({"y", "h"})))
    assert len(names) == len(set(names))
    kept = {"y", "h", "w"}  # weights are stored anyway
    assert set(names) == {s.name for s in program.slots} - kept | {"out*"}
    assert freed(script_of(program, None)) == []
    for step in script_of(program, frozenset({"y"})).steps:
        later = [
            name
            for s in script_of(program, None).steps
            if s.number > step.number
            for name in s.reads
        ]
        assert not set(step.dies).intersection(later)


def test_a_layer_call_sends_its_counts_then_two_messages_to_each_peer() -> None:
    """Rows are sent with their weights, and results return; nothing else is sent, not even
    biases."""
    layer = make_layer("biases")

    def sent(transport: AbstractTransport) -> list[int]:
        recorder = Recorder(transport)
        here = make_layer("biases")
        here.load_state_dict(layer.state_dict())
        here.parallelize(Mesh(FOUR, recorder), Plan())
        with torch.no_grad():
            # ranks agree on the length of the message of counts
            here(tokens_of(transport.rank, 40))
            recorder.ranges.clear()
            here(tokens_of(transport.rank, 40))
        return [len(held.messages) for held in recorder.ranges]

    assert run_ranks(4, sent) == [[3, 6]] * 4


ONE = Grid(world=1)


@pytest.mark.parametrize("budget", [None, 3])
def test_without_gradients_nothing_is_kept_for_a_backward_pass(budget, monkeypatch):
    kept: list[set[str]] = []
    for module in (executor_module, slices_module):
        interpret = module.interpret
        monkeypatch.setattr(
            module,
            "interpret",
            lambda program, inputs, call, wanted, then=interpret: (
                kept.append(set(wanted)),
                then(program, inputs, call, wanted),
            )[1],
        )
    layer = on_mesh(make_layer(), ONE, NoTransport(), Plan(memory_budget=budget))
    layer(tokens_of(0))
    assert any(names > {"y"} for names in kept)
    kept.clear()
    with torch.no_grad():
        layer(tokens_of(0))
    assert kept
    assert all(names == {"y"} for names in kept)


def test_rows_that_stay_on_a_rank_are_not_copied() -> None:
    experts = make_layer(num_experts=2).experts
    sharded, common = experts.weights()
    work = compile_plan(Plan(), ONE)
    sizes = CallSizes(ONE, np.array([[2, 1]]), np.array([3]), 1, units=experts.num_units(sharded))
    call = LayerRun(
        work,
        NoTransport(),
        Call(rank=0, sizes=sizes, experts=experts),
        {"index": torch.tensor([[1], [0], [1]])},
    )
    x = torch.randn(3, DIM, dtype=torch.float64)
    gates = torch.rand(3, 1, dtype=torch.float64)
    with torch.no_grad():
        found = drive(
            interpret(work.forward, inputs_of(call, x, gates, sharded, common), call.call),
            call.transport,
        )
    moves = [task for task in work.forward.tasks if task.op is Op.MOVE]
    assert len(moves) >= 3
    assert all(found[task.writes[0]] is found[task.reads[0]] for task in moves)


def test_the_number_of_saved_tensors_does_not_depend_on_the_data() -> None:
    """Checkpointing compares the metadata of saved tensors between the first pass and the
    recomputation."""
    grid = Grid(world=2, ep=2)
    whole = make_layer("modules")

    def rank(transport: AbstractTransport) -> list[int]:
        counts = []
        layer = on_mesh(whole, grid, transport, Plan(chunks=2))
        for count in (0, 1, 7):
            saved: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, to=saved: to.append(t) or t, lambda t: t
            ):  # type: ignore[func-returns-value]
                layer(tokens_of(transport.rank, count).requires_grad_()).sum()
            counts.append(len(saved))
        return counts

    for counts in run_ranks(2, rank):
        assert len(set(counts)) == 1


@pytest.mark.parametrize("frozen", ["experts", "router", "input"])
def test_ranks_take_part_whatever_needs_no_gradient(frozen: str) -> None:
    grid = Grid(world=4, tp=2, ep=2, etp=2)
    whole = make_layer("biases")
    if frozen != "input":
        getattr(whole, frozen).requires_grad_(False)

    def rank(transport: AbstractTransport) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        x = tokens_of(grid.coordinate(transport.rank, "dp")).requires_grad_(frozen != "input")
        layer = on_mesh(whole, grid, transport, Plan(schedule="s1"))
        layer(x).sin().sum().backward()
        return x.grad, {name: p.grad for name, p in layer.named_parameters()}

    for at, (dx, grads) in enumerate(run_ranks(4, rank)):
        for name, grad in grads.items():
            assert (grad is None) == name.startswith(frozen), name
        assert (dx is None) == (frozen == "input")
        if dx is not None:
            x = tokens_of(grid.coordinate(at, "dp")).requires_grad_()
            torch.testing.assert_close(dx, torch.autograd.grad(whole(x).sin().sum(), x)[0])


def draw(rng: random.Random) -> tuple[Plan, Grid]:
    while True:
        world = rng.choice([2, 4, 8])
        sizes = [size for size in (1, 2, 4) if world % size == 0]
        ep, etp = rng.choice([(p, s) for p in sizes for s in sizes if world % (p * s) == 0])
        grid = Grid(
            world=world,
            tp=rng.choice(sizes),
            ep=ep,
            etp=etp,
            ranks_per_node=rng.choice([1, 2, world]),
        )
        plan = Plan(
            schedule=rng.choice([*SCHEDULES]),
            gather_weights=rng.choice([None, None, 0, 1, 2]),
            chunks=rng.choice([1, 2, 3]),
            peer_groups=rng.choice([1, 1, 2]),
            overlap_gather=rng.random() < 0.3,
            all_to_all=rng.choice(SearchSpace().all_to_alls),
            order=rng.choice(["fifo", "early", "optsche"]),  # type: ignore[arg-type]
        )
        try:
            compile_plan(plan, grid, bias=True)
        except InputError:
            continue
        return plan, grid


@pytest.mark.parametrize("seed", thinned(range(20), every=4))
def test_any_plan_runs_without_tags_too(seed: int) -> None:
    """Like NCCL, this matches batches of a lane in issue order. What would swap data or hang there
    raises an error here."""
    plan, grid = draw(random.Random(seed))
    whole = make_layer("biases")
    work = compiled(plan, grid, "biases")
    x = [tokens_of(g, count=3 + g, seed=seed) for g in range(grid.dp)]

    def rank(transport: AbstractTransport) -> tuple[Tensor, Tensor | None]:
        layer = on_mesh(whole, grid, transport, work)
        y = layer(x[grid.coordinate(transport.rank, "dp")])
        y.sin().sum().backward()
        average_gradients(layer, Mesh(grid, transport))
        return y.detach(), layer.experts.w1.grad

    found = run_ranks(grid.world, rank, seed=seed, in_order=True)
    expected = [whole(part) for part in x]
    torch.stack([y.sin().sum() for y in expected]).mean().backward()
    for at, (y, dw) in enumerate(found):
        torch.testing.assert_close(y, expected[grid.coordinate(at, "dp")].detach())
        assert whole.experts.w1.grad is not None
        torch.testing.assert_close(dw, part_of(whole, whole.experts.w1.grad, "w1", grid, at))


def test_the_same_call_gives_the_same_bits_whoever_runs_first() -> None:
    grid = Grid(world=4, tp=2, ep=4, ranks_per_node=2)
    whole = make_layer().float()

    def rank(transport: AbstractTransport, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().float().requires_grad_()
        layer = on_mesh(
            whole,
            grid,
            transport,
            Plan(schedule="s2", all_to_all="hier2d", chunks=2, overlap_gather=True),
        )
        y = layer(x)
        y.sin().sum().backward()
        assert x.grad is not None
        return torch.cat([y.detach(), x.grad]), layer.experts.w13.grad  # type: ignore[return-value]

    runs = [every_rank(grid, rank, seed=seed) for seed in range(2)]
    for one, two in zip(*runs):
        assert all(torch.equal(a, b) for a, b in zip(one, two))  # type: ignore[call-overload]
