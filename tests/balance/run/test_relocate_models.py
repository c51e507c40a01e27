"""A model with samples that move between ranks has the same loss and gradients as without moves, in
float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers import pairwise, thinned
from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import (
    Following,
    Relocator,
    SampleMove,
    sample_dropout,
    samples_of,
)
from moesaic.balance.run.residual import Residual
from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad, TwoStage
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import GatedExperts
from moesaic.layer import MoE
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.losses import LoadBalance, ZLoss
from moesaic.routing.routers import SoftmaxTopK
from moesaic.runtime.data_parallel import average_gradients
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.equivalence import budget_by_rows

DIM = 4
LENGTH = 3
SLOTS = 3
EXPERTS = 4
FOUR = Grid(world=4, ep=4, ranks_per_node=2)
SHARDS = Grid(world=4, ep=2, etp=2, ranks_per_node=2)
COPIES = Grid(world=4, ep=2, ranks_per_node=2)
TENSOR = Grid(world=4, tp=2, ep=4, ranks_per_node=2)
HOME_FIRST = [
    (TENSOR, Plan()),
    (TENSOR, Plan(schedule="s2")),
    (TENSOR, Plan(schedule="s2", overlap_gather=True)),
    (Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2), Plan(schedule="s3", chunks=2)),
    (Grid(world=4, tp=2, ep=2, etp=2), Plan(schedule="ted")),
    (Grid(world=4, tp=2, ep=2, etp=2), Plan(schedule="baseline")),
    (FOUR, Plan(schedule="s2")),
    (FOUR, Plan(all_to_all="multicast", chunks=2)),
    (TENSOR, Plan(all_to_all="multicast")),
    (FOUR, Plan(replication="shadow")),
    (FOUR, Plan(memory_budget=5)),
    (SHARDS, Plan(gather_weights=1)),
]
"""Plans under which results return home first, and S1 with tensor-parallel groups, under which they
need not."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings that a test varies."""

    grid: Grid = FOUR
    plan: Plan = field(default_factory=Plan)
    placer: str = "random"
    norm: str = "before"
    dropout: float = 0.0
    top_k: int = 2
    shared: int = 0
    weight: str = "after"
    recompute: bool = False
    ends_home: bool = True
    masked: bool = False
    sequences: bool = False
    rides: bool = False
    """Send the residual with the results; only possible without dropout."""
    bias: bool = False


class Block(nn.Module):
    """Attention and an MoE layer, with norms before or after, and dropout after each."""

    def __init__(self, case: Case, number: int) -> None:
        super().__init__()
        self.case = case
        self.number = number
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        normalize = "after" if case.top_k > 1 else "before"
        level = "sequence" if case.sequences else "micro_batch"
        self.moe = MoE(
            DIM,
            8,
            EXPERTS,
            case.top_k,
            router=lambda dim, count: SoftmaxTopK(dim, count, normalize=normalize),  # type: ignore[arg-type]
            losses=(LoadBalance(0.1, level=level), ZLoss(0.1)),  # type: ignore[arg-type]
            experts=partial(GatedExperts, bias=case.bias),
            shared_hidden=case.shared,
            apply_weight=case.weight,  # type: ignore[arg-type]
        )

    def forward(
        self, x: Tensor, mask: Tensor | None, before: Tensor, move: SampleMove | None
    ) -> Tensor:
        """Run the block. `before` has the samples that are here; after the layer, `move` knows the
        new ones."""
        pre = self.case.norm == "before"
        q, k, v = self.qkv(self.norms[0](x) if pre else x).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + sample_dropout(attended, self.case.dropout, before, 2 * self.number)
        x = x if pre else self.norms[0](x)
        if self.case.rides and move is not None:
            residual = Residual(x, self.norms[1] if pre else None)
            x = MovingMoE(self.moe)(
                self.norms[1](x) if pre else x, mask=mask, move=move, residual=residual
            )
            direct = move.load is not None and move.load.is_direct
            assert move.rides == (direct and self.case.weight == "after" and not self.case.shared)
            return x if pre else self.norms[1](x)
        y = MovingMoE(self.moe)(self.norms[1](x) if pre else x, mask=mask, move=move)
        after = before
        if move is not None:
            x = move.carry(x)
            after = samples_of(move.relocator, move.after)
        x = x + sample_dropout(y, self.case.dropout, after, 2 * self.number + 1)
        return x if pre else self.norms[1](x)


class Model(nn.Module):
    """Two blocks and a loss per sample; with a relocator, samples move."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(Block(case, number) for number in range(2))

    def forward(
        self, x: Tensor, goal: Tensor, mask: Tensor | None, relocator: Relocator | None = None
    ) -> Tensor:
        """Return the loss of each sample that is here at the end."""
        if relocator is None:
            samples = torch.arange(len(x))
            for block in self.blocks:
                x = block(x, mask, samples, None)
            return ((x - goal).sin() ** 2).mean((1, 2))
        layers = [block.moe for block in self.blocks]
        trip = relocator.start(
            [Following(layer.router, layer.top_k) for layer in layers], len(x), x.shape[1]
        )
        for block in self.blocks:
            given = (x, None if mask is None else trip.bring(mask), trip.samples, trip.next())
            x = checkpoint(block, *given) if self.case.recompute else block(*given)
        return ((x - trip.bring(goal)).sin() ** 2).mean((1, 2))


class RandomHomes(AbstractPlacer):
    """A random placement within the replicas, the same on all ranks."""

    def decide(self, load: SampleLoad) -> Homes:
        random = np.random.default_rng(int(load.copies[0].sum()))
        rank = load.homes.rank.copy()
        for ranks in load.replicas:
            members = np.flatnonzero(np.isin(rank, ranks))
            rank[members] = random.permutation(rank[members])
        homes = Homes.of_ranks(rank, load.grid.world)
        return Homes(np.stack([random.permutation(row) for row in homes.samples]))


SAMPLE_PLACERS = {"random": RandomHomes, "two_stage": partial(TwoStage, least_gain=0.0)}


def batch(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    samples = case.grid.world * SLOTS  # a tensor group has those of all its ranks
    x, goal = (
        torch.randn(samples, LENGTH, DIM, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    mask = torch.rand(samples, LENGTH, generator=generator) > 0.3 if case.masked else None
    return x, goal, mask


def run_case(case: Case, *, seed: int = 0) -> list[dict[str, Any]]:
    """Run with moving samples on loopback; return per rank: loss, input gradient, parameter
    gradients, samples moved."""
    torch.manual_seed(0)
    whole = Model(case).double()
    compiled = compile_plan(case.plan, case.grid, bias=case.bias)
    x, goal, mask = batch(case)

    def rank(transport: AbstractTransport) -> dict[str, Any]:
        model = copy.deepcopy(whole)
        mesh = Mesh(case.grid, transport)
        for block in model.blocks:
            block.moe.parallelize(mesh, compiled)
            budget_by_rows(block.moe)
        relocator = Relocator(mesh, SAMPLE_PLACERS[case.placer](), ends_home=case.ends_home)
        share = SLOTS * case.grid.tp
        first = transport.rank // case.grid.tp * share
        mine = slice(first, first + share)
        leaf = x[mine].clone().requires_grad_()
        loss = model(leaf, goal[mine], None if mask is None else mask[mine], relocator).mean()
        loss.backward()
        average_gradients(model, mesh)
        return {
            "loss": loss.detach(),
            "dx": leaf.grad,
            **{name: p.grad for name, p in model.named_parameters()},
        }

    return run_ranks(case.grid.world, rank, seed=seed)


def check(case: Case, *, seed: int = 0) -> None:
    torch.manual_seed(0)
    alone = Model(case).double()
    x, goal, mask = batch(case)
    x.requires_grad_()
    loss = alone(x, goal, mask).mean()
    loss.backward()
    found = run_case(case, seed=seed)
    grid = case.grid
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(
        torch.stack([each["loss"] for each in found]).mean(), loss.detach(), **close
    )
    of_groups = torch.cat([each["dx"] for each in found[:: grid.tp]])
    torch.testing.assert_close(of_groups / grid.dp, x.grad, **close)
    for name, parameter in alone.named_parameters():
        for rank, each in enumerate(found):
            expected = parameter.grad
            if ".experts." in name and ".shared." not in name:
                count = EXPERTS // grid.ep
                first = grid.coordinate(rank, "ep") * count
                dim = alone.blocks[0].moe.experts.shard_dim(name.rpartition(".")[2])
                expected = expected[first : first + count]
                expected = (
                    expected
                    if dim is None
                    else expected.chunk(grid.etp, dim)[grid.coordinate(rank, "etp")]
                )
            torch.testing.assert_close(
                each[name], expected, **close, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize(
    ("placer", "dropout", "norm", "top_k"),
    pairwise(SAMPLE_PLACERS, (0.0, 0.4), ("before", "after"), (1, 2)),
)
def test_moving_samples_changes_nothing(placer: str, dropout: float, norm: str, top_k: int) -> None:
    check(Case(placer=placer, dropout=dropout, norm=norm, top_k=top_k))


@pytest.mark.parametrize(
    "case",
    thinned(
        [
            Case(grid=replace(SHARDS, innermost="ep"), plan=Plan(chunks=2, all_to_all="hier1d")),
            Case(grid=COPIES, placer="two_stage"),
            Case(plan=Plan(chunks=2, peer_groups=2, all_to_all="hier2d", order="early")),
            Case(recompute=True, dropout=0.4, plan=Plan(chunks=2)),
            Case(recompute=True, placer="two_stage", shared=4, norm="after"),
            Case(ends_home=False, placer="two_stage", dropout=0.4, grid=SHARDS),
            Case(masked=True, ends_home=False, sequences=True),
            Case(rides=True, norm="after", placer="two_stage"),
            Case(rides=True, bias=True, recompute=True),
            Case(rides=True, grid=SHARDS, plan=Plan(chunks=2), norm="after", bias=True),
            Case(rides=True, grid=COPIES, shared=4),
            Case(rides=True, weight="before", top_k=1),
            Case(rides=True, masked=True, recompute=True, grid=SHARDS, placer="two_stage"),
            *(
                Case(
                    grid=grid,
                    plan=plan,
                    rides=bool(n % 2),
                    dropout=0.4 * (1 - n % 2),
                    ends_home=bool(n % 2),
                )
                for n, (grid, plan) in enumerate(HOME_FIRST)
            ),
            Case(grid=TENSOR, placer="two_stage", masked=True, recompute=True, rides=True),
            Case(
                grid=Grid(world=4, tp=4, ep=4, ranks_per_node=2), rides=True, masked=True, shared=4
            ),
        ],
        every=4,
    ),
    ids=str,
)
def test_so_it_is_with_every_option(case: Case) -> None:
    check(case, seed=1)


def test_masks_of_dropout_belong_to_samples() -> None:
    x = torch.ones(3, 50, dtype=torch.float64)
    one = sample_dropout(x, 0.3, torch.tensor([4, 7, 9]), 5)
    other = sample_dropout(x, 0.3, torch.tensor([9, 4, 7]), 5)
    assert torch.equal(one, other[[1, 2, 0]])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, sample_dropout(x, 0.3, torch.tensor([4, 7, 9]), 6))
    values = sorted(set(one.flatten().tolist()))
    assert values == pytest.approx([0, 1 / 0.7])
    kept = sample_dropout(torch.ones(200, 100), 0.3, torch.arange(200), 0).count_nonzero() / 20_000
    assert float(kept) == pytest.approx(0.7, abs=0.02)
    assert sample_dropout(x, 0.0, torch.arange(3), 0) is x
