"""Stages of torch.distributed.pipelining with MoE layers, one mesh per stage: the results equal
those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor

from moesaic import Mesh, MoE, Plan, average_gradients, clip_grad_norm_, set_loss_scale
from moesaic.parallel import parallelize_layers
from worlds import on_ranks

DIM = 4
TOKENS = 6
BLOCKS = 4
MICRO_BATCHES = 4
RANKS = 4
SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}
CASES: dict[str, tuple[str, int, Plan]] = {
    "gpipe, 2 ranks": ("gpipe", 2, Plan(all_to_all="multicast")),
    "interleaved, 2 ranks": ("interleaved", 2, Plan(chunks=2)),
    "1f1b, 4 ranks": ("1f1b", 4, Plan()),
}
"""Schedule, number of pipeline ranks, and plan. The experts of a stage are split over the other
ranks."""
WORST = 1e-9
"""Largest relative difference."""


class Block(nn.Module):
    """A dense part and an MoE layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.moe = MoE(
            DIM, 8, 4, 2, shared_hidden=4, router="sigmoid" if number % 2 else "softmax", losses=()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.dense(x).tanh())


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(number) for number in range(BLOCKS)).double()


def batch(group: int) -> Tensor:
    generator = torch.Generator().manual_seed(group)
    return torch.randn(MICRO_BATCHES, TOKENS, DIM, generator=generator, dtype=torch.float64)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def stages(name: str, pp: int, plan: Plan) -> dict[str, Any]:
    """Run a step over `pp` pipeline ranks; return losses, gradients by name, and the norm of all
    gradients."""
    world = init_device_mesh("cpu", (pp, RANKS // pp), mesh_dim_names=("pp", "ep"))
    place = world.get_local_rank("pp")
    group = world["pp"].get_group()
    whole = blocks()
    each = 2 if name == "interleaved" else 1
    per_stage = BLOCKS // (pp * each)
    numbers = [place + pp * turn for turn in range(each)]
    mine = {at: nn.Sequential(*whole[at * per_stage : (at + 1) * per_stage]) for at in numbers}
    mesh = Mesh.from_device_mesh(world["ep"])
    for part in mine.values():
        parallelize_layers(part, mesh, plan)
        set_loss_scale(part, 1 / MICRO_BATCHES)
    made = [
        PipelineStage(part, at, pp * each, torch.device("cpu"), group=group)
        for at, part in mine.items()
    ]
    schedule = SCHEDULES[name](made if each > 1 else made[0], MICRO_BATCHES, loss_fn=loss_of)
    x = batch(mesh.rank)
    losses = []
    if place == 0:
        schedule.step(x)
    elif place == pp - 1:
        schedule.step(target=x.flip(-1), losses=losses)
    else:
        schedule.step()
    found: dict[str, Any] = {"losses": [float(loss) for loss in losses]}
    for at, part in mine.items():
        average_gradients(part, mesh)
        for path, parameter in part.named_parameters():
            number, _, inner = path.partition(".")
            gradient = parameter.grad
            found[f"{at * per_stage + int(number)}.{inner}"] = (
                gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            )
    parameters = [parameter for part in mine.values() for parameter in part.parameters()]
    found["norm"] = float(clip_grad_norm_(parameters, 1e9, mesh=mesh, group=dist.group.WORLD))
    return found


def all_schedules() -> dict[str, dict[str, Any]]:
    return {name: stages(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, Any]]]:
    return on_ranks(RANKS, all_schedules)


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_one_process(found, name):
    whole = blocks()
    pp = CASES[name][1]
    losses = {}
    groups = RANKS // pp
    for group in range(groups):
        for micro, x in enumerate(batch(group)):
            y = x.unsqueeze(0)
            for block in whole:
                y = block(y)
            loss = loss_of(y, x.flip(-1).unsqueeze(0))
            losses[group, micro] = float(loss.detach())
            (loss / (groups * MICRO_BATCHES)).backward()
    wanted = {path: parameter.grad for path, parameter in whole.named_parameters()}
    norm = float(nn.utils.get_total_norm(list(wanted.values())))
    seen = set()
    for rank, of_schedules in enumerate(found):
        of_rank = dict(of_schedules[name])
        assert of_rank.pop("norm") == pytest.approx(norm, rel=WORST)
        told = of_rank.pop("losses")
        if rank // groups == pp - 1:
            assert told == pytest.approx(
                [losses[rank % groups, micro] for micro in range(MICRO_BATCHES)], rel=WORST
            )
        for path, gradient in of_rank.items():
            assert relative(gradient, wanted[path]) <= WORST, (name, rank, path)
            seen.add(path)
    assert seen == set(wanted)
