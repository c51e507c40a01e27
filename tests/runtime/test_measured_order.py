"""An exact order without a cluster or profile: searched by times measured in the run, the same on all ranks, with the same
results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from meshes import DIM, make_layer, tokens_of
from torch import Tensor, nn

from helpers import thinned
from moesaic import Mesh, MoE, Plan, average_gradients
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.parallel import parallelize_layers
from moesaic.plan import Compiled, compile_plan
from moesaic.plan.compile import Durations
from moesaic.program.grid import Grid
from moesaic.program.task import Lane, Program, Task
from moesaic.program.timeline import lay_out
from moesaic.runtime import auto_plan
from moesaic.runtime.auto_plan import TIMED, UNTIMED
from moesaic.runtime.tasks import TaskClock

GRID = Grid(world=4, ep=4, ranks_per_node=2)
EXACT = Plan(order="exact", chunks=2, all_to_all="hier2d")


def made_up(program: Program, _: Grid) -> Mapping[str, float]:
    """Return durations unlike a medium-sized layer's: short between nodes, long inside them."""
    taken = {Lane.COMPUTE: 2e-3, Lane.INTRA: 5e-3, Lane.INTER: 1e-5, Lane.HOST: 0.0}
    return {task.name: taken[task.lane] + 1e-6 * number for number, task in enumerate(program.tasks)}


class MadeUpClock(TaskClock):
    """Records made-up times: those of `made_up` on the last rank, half of them on the others."""

    def stop(self, program: Program, tasks: Sequence[Task], since: float) -> None:
        super().stop(program, tasks, since)
        for task in tasks:
            seconds = FOUND[program.name][task.name] * (1 if self._transport.rank == GRID.world - 1 else 0.5)
            self.seconds[program.name, task.name][-1] = seconds


FOUND = {
    program.name: made_up(program, GRID)
    for compiled in [compile_plan(EXACT, GRID, durations=made_up, host_runs_compute=True)]
    for program in (compiled.forward, compiled.backward)
}
"""Seconds of tasks, by the names of programs."""


def train(
    mesh: Mesh, plan: Plan, steps: int, durations: Durations | None = None
) -> tuple[list[Compiled], list[Tensor]]:
    """Train two layers; return the programs before each step, and the losses."""
    model = nn.Sequential(make_layer(seed=0), nn.Linear(DIM, DIM).double(), make_layer(seed=1))
    torch.manual_seed(0)
    nn.init.normal_(model[1].weight)  # type: ignore[arg-type]
    parallelize_layers(model, mesh, plan, durations=durations)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ran, losses = [], []
    for step in range(steps):
        x = tokens_of(mesh.grid.coordinate(mesh.rank, "dp"), seed=step)
        loss = model(x).square().mean() + model(x + 1).square().mean()
        ran += [layer.on_mesh.compiled for layer in (model[0], model[2])]  # type: ignore[union-attr]
        loss.backward()
        losses.append(loss.detach())
        average_gradients(model, mesh)
        optimizer.step()
        optimizer.zero_grad()
    assert all(layer.on_mesh.clock is None for layer in model if isinstance(layer, MoE) and layer.on_mesh is not None)
    return ran, losses


def seconds_of(compiled: Compiled) -> float:
    return sum(
        lay_out(p, FOUND[p.name], host_runs_compute=True).makespan for p in (compiled.forward, compiled.backward)
    )


def test_the_order_is_the_best_by_the_slowest_ranks_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_plan, "TaskClock", MadeUpClock)
    steps = UNTIMED + TIMED + 2
    found = run_ranks(4, lambda transport: train(Mesh(GRID, transport), EXACT, steps))
    best = compile_plan(EXACT, GRID, host_runs_compute=True, durations=lambda p, _: FOUND[p.name])
    assumed = compile_plan(EXACT, GRID, host_runs_compute=True)
    assert assumed.is_assumed
    assert not best.is_assumed
    assert best.digest != assumed.digest
    assert seconds_of(best) < seconds_of(assumed)
    for ran, _ in found:
        digests = [compiled.digest for compiled in ran]
        assert digests[: 2 * (UNTIMED + TIMED)] == [assumed.digest] * 2 * (UNTIMED + TIMED)
        assert digests[2 * (UNTIMED + TIMED) :] == [best.digest] * 4


@pytest.mark.parametrize(
    ("plan", "grid"),
    thinned(
        [
            (EXACT, GRID),
            (Plan(order="exact", schedule="s2", chunks=2, overlap_gather=True), Grid(world=4, tp=2, ep=2, etp=2)),
            (Plan(order="exact", chunks=2, all_to_all="multicast"), GRID),
        ],
        every=3,
    ),
    ids=["hier2d", "s2", "multicast"],
)
def test_real_times_are_the_same_on_all_ranks_and_change_no_result(plan: Plan, grid: Grid) -> None:
    def rank(transport: AbstractTransport) -> tuple[list[Compiled], list[Tensor], list[Tensor]]:
        ran, losses = train(Mesh(grid, transport), plan, UNTIMED + TIMED + 2)
        _, others = train(Mesh(grid, transport), Plan(schedule=plan.schedule), UNTIMED + TIMED + 2)
        return ran, losses, others

    found = run_ranks(grid.world, rank)
    for ran, losses, others in found:
        assert [compiled.digest for compiled in ran] == [compiled.digest for compiled in found[0][0]]
        assert ran[0].is_assumed
        assert not ran[-1].is_assumed
        torch.testing.assert_close(torch.stack(losses), torch.stack(others), rtol=0, atol=1e-12)


def test_durations_that_are_known_are_not_measured() -> None:
    def rank(transport: AbstractTransport) -> list[Compiled]:
        return train(Mesh(GRID, transport), EXACT, UNTIMED + TIMED + 1, durations=made_up)[0]

    for ran in run_ranks(4, rank):
        assert len({compiled.digest for compiled in ran}) == 1


def test_plans_whose_programs_change_keep_their_order() -> None:
    def rank(transport: AbstractTransport) -> list[Compiled]:
        plan = Plan(order="exact", chunks=2, memory_budget=1 << 30)
        return train(Mesh(GRID, transport), plan, UNTIMED + TIMED + 1)[0]

    for ran in run_ranks(4, rank):
        assert len({compiled.digest for compiled in ran}) == 1
