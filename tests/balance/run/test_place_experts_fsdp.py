"""Experts that move under FSDP, which may cut between experts: on four processes, and on six with
an uneven cut."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from helpers import GivenOrders
from moesaic.balance.run.expert_moves import ExpertPlacement
from moesaic.comm.mesh import Mesh
from moesaic.experts import PlainExperts
from moesaic.layer import MoE
from moesaic.parallel import shard_dim
from moesaic.program.plan import Plan
from moesaic.testing.runner import leave
from worlds import start

EXPERTS = 8
DIM = 4
HIDDEN = 6
STEPS = 2
CUTS = ("trainer", "experts")
"""Where FSDP cuts: as in the trainer, or every parameter between experts."""


def build(mesh: Mesh, cut: str) -> MoE:
    torch.manual_seed(0)
    layer = MoE(
        DIM, HIDDEN, EXPERTS, 2, experts=lambda d, h, n: PlainExperts(d, h, n, bias=True), losses=()
    ).double()
    layer.parallelize(mesh, Plan())
    edp = mesh.grid.edp

    def place(parameter: torch.nn.Parameter) -> Shard:
        return Shard(0 if cut == "experts" else shard_dim(parameter, edp))

    fully_shard(layer.experts, mesh=mesh.sparse["edp"], shard_placement_fn=place)
    layer.experts.set_gradient_divide_factor(mesh.grid.dp)  # type: ignore[operator]
    layer.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return layer


def train(mesh: Mesh, cut: str, moves: bool) -> list[Tensor]:
    """Return outputs, and finally all parameters and moments of the experts, gathered, with every
    expert in its own slot."""
    layer = build(mesh, cut)
    optimizer = torch.optim.AdamW(layer.experts.parameters(), lr=0.05, fused=True)
    draw = np.random.default_rng(0)
    placer = GivenOrders([draw.permutation(EXPERTS) for _ in range(STEPS)])
    placement = ExpertPlacement([layer], mesh, optimizer, every=1, placer=placer)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + mesh.rank)
        y = layer(torch.randn(10, DIM, generator=generator, dtype=torch.float64))
        y.sin().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(y.detach())
        if moves:
            moved = placement.after_step()
            assert moved.num_bytes > 0
    with placement.at_home():
        for parameter in layer.experts.parameters():
            for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
                found.append(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    return found


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300)
    )
    mesh = Mesh.create(ep=2)
    torch.save(
        [[train(mesh, cut, moves) for moves in (True, False)] for cut in CUTS],
        Path(folder) / f"{rank}.pt",
    )
    leave()


@pytest.mark.parametrize("world", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_experts_move_between_shards_of_fsdp(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start(world, _process, world, folder)
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
    for of_rank in results:
        for moving, still in of_rank:
            assert len(moving) == STEPS + 4 * 4
            for a, b in zip(moving, still, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
