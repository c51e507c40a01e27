"""Measures the time of whole layers on the real transport.

A calibration layer is one shape of a layer under one plan, whose measured time later calibrates the
simulator (`costs.py`). A visit is a token with at least one expert on an ep rank: under multicast a
token is sent once per visit.

The layers that calibrate the host have small shapes and every kind of task; they are never the
layers of a benchmark. Two stand-ins isolate parts of a layer: experts that compute nothing, so that
times contain everything but matrix products, and a router with forced balance, under which plans
differ and loads do not. A few layers have real experts, whose products run beside messages: they
show what the two cost each other.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts, PlainExperts
from moesaic.experts.experts import DeferredWgrad, ExpertCall, ExpertGradients, Weights
from moesaic.initial_values import Draw, draw_globally
from moesaic.layer import MoE
from moesaic.measure.together import elapsed, gathered
from moesaic.planner.workload import Workload
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Choice, Scores


def _ignore(flops: float) -> None:
    """Do nothing: nobody wants to know what `IdleExperts` skip."""


@final
class IdleExperts(AbstractExperts):
    """Experts with two real matrices that compute nothing. Plans that gather weights really send
    these matrices.

    The result is the rows themselves. Gradients of rows are those of the result; all other
    gradients are zero.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        on_flops: called in every forward and backward pass with the floating-point operations that
            it skips: 2 per row and matrix element forward, 4 backward, 2 if the matrices are
            frozen.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        on_flops: Callable[[float], object] = _ignore,
    ) -> None:
        super().__init__(dim, num_experts)
        self.w1 = nn.Parameter(torch.zeros(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.zeros(num_experts, dim, hidden))
        self._on_flops = on_flops
        # Plain experts have the same two matrices: they tell names, shards and packed rows. They
        # have no memory, and are in a tuple, so that they do not become a submodule.
        with torch.device("meta"):
            plain = PlainExperts(dim, hidden, num_experts)
        self._plain = (plain,)

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._plain[0].names

    def shard_dim(self, name: str) -> int | None:
        return self._plain[0].shard_dim(name)

    def init_normal(self, std: float, out_std: float, draw: Draw = draw_globally) -> None:
        """Set the weights to zero, since no product reads them."""
        nn.init.zeros_(self.w1)
        nn.init.zeros_(self.w2)

    def num_units(self, sharded: Weights) -> int:
        return self._plain[0].num_units(sharded)

    def pack(self, sharded: Weights) -> Tensor:
        return self._plain[0].pack(sharded)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        return self._plain[0].unpack(rows, num_experts)

    def compute(self, call: ExpertCall) -> Tensor:
        self._on_flops(2 * self._products(call))
        return call.rows

    def run(self, call: ExpertCall) -> tuple[Tensor, Weights]:
        """Return the rows unchanged, and nothing to keep for backward."""
        return self.compute(call), ()

    def gradients(
        self,
        call: ExpertCall,
        kept: Weights,
        dy: Tensor,
        deferred_wgrad: DeferredWgrad | None = None,
    ) -> ExpertGradients:
        """Return the result's gradients as the rows' gradients. A backward pass counts twice the
        operations of a forward pass, and as many if the matrices are frozen."""
        self._on_flops((4 if self.w1.requires_grad else 2) * self._products(call))
        d_gates = None if call.gates is None else torch.zeros_like(call.gates)
        d_sharded = tuple(torch.zeros_like(weight) for weight in call.sharded)
        return ExpertGradients(dy, gates=d_gates, sharded=d_sharded, common=())

    def _products(self, call: ExpertCall) -> float:
        """Return the number of multiplications for all rows, by every matrix of an expert or of a
        shard of one."""
        return len(call.rows) * sum(matrix[0].numel() for matrix in call.sharded)


class BalancedRouter(AbstractRouter):
    """Routes copies by a random pattern that depends only on the number of tokens; all routing
    weights are `1 / top_k`.

    Tokens form blocks of `num_experts`. Within a block the first choices are a permutation of the
    experts. The other choices are the same permutation shifted by offsets drawn per block. So every
    choice is balanced, no token chooses an expert twice, and over many blocks each pair of experts
    meets equally often.

    Args:
        dim: width of a token (not read).
    """

    def __init__(self, dim: int, num_experts: int, *, seed: int = 0) -> None:
        super().__init__(dim, num_experts)
        self._seed = seed
        self._choices: dict[tuple[int, int], Choice] = {}
        """By (number of tokens, top_k), the choice of the pattern."""

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        even = x_TD.new_full((len(x_TD), self.num_experts), 1 / self.num_experts)
        return Scores(logits=even, probs=even, gates=even, rank_by=even)

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose as a balanced router would, without looking at the scores."""
        key = (len(scores.logits), top_k)
        if key not in self._choices:
            self._choices[key] = balanced_choice(*key, self.num_experts, self._seed)
        return self._choices[key]

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        return torch.full_like(choice.expert, 1 / top_k, dtype=scores.gates.dtype)


@functools.lru_cache
def visits(
    num_tokens: int, top_k: int, num_experts: int, seed: int, chunks: int = 1
) -> tuple[tuple[int, float], ...]:
    """Return the mean number of ep ranks on which a token of the pattern has an expert, as in
    `Workload.visits`.

    The mean is given for every number of ep ranks that divides the number of experts.

    Args:
        num_tokens, top_k, num_experts, seed: as in `balanced_choice`.
        chunks: number of parts into which each expert's copies are cut; a token counts once per
            part.
    """
    choice = balanced_choice(num_tokens, top_k, num_experts, seed)
    expert_TK = choice.expert.view(num_tokens, top_k)
    is_chosen_TE = torch.zeros(num_tokens, num_experts, dtype=torch.int64).scatter_(1, expert_TK, 1)
    # Each copy's position among those of its expert, and with it the chunk that it is in.
    position_TK = is_chosen_TE.cumsum(0).gather(1, expert_TK) - 1
    copies_per_expert = num_tokens * top_k // num_experts
    chunk_TK = position_TK * chunks // copies_per_expert
    means = []
    for ep in range(1, num_experts + 1):
        if num_experts % ep:
            continue
        ep_rank_TK = expert_TK // (num_experts // ep)
        is_visited = torch.zeros(num_tokens, ep * chunks)  # 1 for each ep rank and chunk
        is_visited.scatter_(1, ep_rank_TK * chunks + chunk_TK, 1.0)
        means.append((ep, float(is_visited.sum(1).mean())))
    return tuple(means)


def balanced_choice(num_tokens: int, top_k: int, num_experts: int, seed: int) -> Choice:
    """Return the copies of `num_tokens` tokens in the pattern of `BalancedRouter`, token after
    token.

    Raises:
        InputError: if `num_tokens` is not a multiple of `num_experts`.
    """
    blocks, remainder = divmod(num_tokens, num_experts)
    if remainder:
        raise InputError(
            f"{num_tokens} tokens do not spread evenly over num_experts={num_experts}: give a "
            "multiple of it"
        )
    generator = torch.Generator().manual_seed(seed)
    # The argsort of random numbers is a random permutation.
    first = torch.rand(blocks, num_experts, generator=generator).argsort(1)
    order = torch.rand(blocks, num_experts - 1, generator=generator).argsort(1)
    shifts = order[:, : top_k - 1] + 1  # different ones, from 1 to num_experts - 1
    offsets = torch.cat([torch.zeros(blocks, 1, dtype=torch.int64), shifts], dim=1)
    # (blocks, tokens of a block, choices of a token)
    expert = (first.unsqueeze(2) + offsets.unsqueeze(1)) % num_experts
    return Choice(
        token=torch.arange(num_tokens).repeat_interleave(top_k),
        expert=expert.reshape(-1),
        slot=torch.arange(top_k).repeat(num_tokens),
        per_token=top_k,
    )


def timed(
    layers: Sequence[Calibration],
    transport: AbstractTransport,
    repeats: int,
    barrier: Callable[[], object],
    progress: Callable[[float], object],
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Calibration, float]]:
    """Time layers in turns. All ranks call it together and get the same result.

    Args:
        transport: between the ranks.
        repeats: timed steps per layer, after a first step that computes the layouts.
        barrier: releases all ranks at one moment.
        progress: called with the share that is done.
        clock: a clock that all ranks share.

    Returns:
        each layer with the median seconds from the first rank's start to the last one's end.
    """
    # Plans of one shape are timed on one layer.
    built: dict[object, _Layer] = {}
    for calibration in layers:
        if calibration.shape not in built:
            built[calibration.shape] = _Layer(calibration, transport)
    spans: list[list[tuple[float, float]]] = [[] for _ in layers]  # (start, end) of each repeat
    gc.collect()
    for repeat in range(-1, repeats):  # -1 is not timed
        for number, calibration in enumerate(layers):
            # of `repeats + 1` rounds, `repeat + 1` are done, and a part of this one
            progress((repeat + 1 + number / len(layers)) / (repeats + 1))
            layer = built[calibration.shape]
            barrier()
            start = clock()
            layer.step(calibration)
            if repeat >= 0:
                spans[number].append((start, clock()))
    spans_by_layer = zip(*gathered(spans))  # of each layer, those of all ranks
    return [
        (calibration, statistics.median(elapsed(spans_of_ranks)))
        for calibration, spans_of_ranks in zip(layers, spans_by_layer)
    ]


class _Layer:
    """A real layer, and one step of it under any plan.

    Args:
        first: a calibration layer of the shape, whose plan is the first.
    """

    def __init__(self, first: Calibration, transport: AbstractTransport) -> None:
        workload = first.workload
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # processes that no one parent forked draw the same weights
            self.layer = MoE(
                workload.dim,
                workload.hidden,
                workload.num_experts,
                workload.top_k,
                router=BalancedRouter,
                experts=PlainExperts if first.computes else IdleExperts,
                losses=(),
            )
        self.layer.parallelize(Mesh(first.mesh, transport), first.compiled)
        self.x = torch.ones(first.tokens, workload.dim).requires_grad_()
        self._dy = torch.ones(first.tokens, workload.dim)

    def step(self, calibration: Calibration) -> None:
        """Run one forward and backward pass under a calibration layer's plan; the gradients are
        dropped."""
        self.layer.use_plan(calibration.compiled)
        self.layer(self.x).backward(self._dy)
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None


EXPERTS_PER_RANK = 2
SHAPES = ((32, 32, 2), (256, 32, 4), (256, 32, 16))
"""(dim, hidden, tokens per rank and expert): everything small; wide rows; many wide rows."""
PLANS = (
    Plan(),
    Plan(chunks=4),
    Plan(chunks=2, all_to_all="hier2d"),
    Plan(chunks=4, all_to_all="naive"),
    Plan(schedule="baseline", all_to_all="pipelined"),
    Plan(schedule="baseline", chunks=2),
    Plan(schedule="s2", all_to_all="hier1d"),
    Plan(schedule="s2", chunks=4, all_to_all="pipelined"),
    Plan(schedule="s3", chunks=2, all_to_all="hier3d"),
    Plan(all_to_all="multicast", chunks=2),
)
"""Plans with tasks of all kinds in different proportions. Plans that do not fit a mesh are
skipped."""
COMPUTING_SHAPE = (256, 512, 16)
"""Shape of the layers with real experts, whose products take about as long as their messages."""
COMPUTING_PLANS = (Plan(), Plan(chunks=2), Plan(chunks=4), Plan(chunks=2, all_to_all="multicast"))
"""Plans of the layers with real experts, with products before, beside and after messages."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A calibration layer: one workload under one plan."""

    name: str
    """Name, for error messages and files."""
    compiled: Compiled
    mesh: Grid
    """Mesh of the layer; the plan's own grid may factor etp."""
    workload: Workload
    computes: bool = False
    """Whether its experts compute."""

    @property
    def shape(self) -> tuple[Grid, Workload, bool]:
        """What the layer itself depends on: not the plan."""
        return self.mesh, self.workload, self.computes

    @property
    def tokens(self) -> int:
        """Tokens of a tensor-parallel group."""
        return self.workload.tokens

    @property
    def routed(self) -> Workload:
        """The workload with the known visits of the balanced router."""
        workload = self.workload
        # tokens that a rank routes: its slice of its group's, or all of them
        num_routed = self.tokens // self.mesh.tp if self.compiled.routes_slices else self.tokens
        chunks = self.compiled.plan.chunks
        known_visits = visits(
            num_routed, workload.top_k, workload.num_experts, seed=0, chunks=chunks
        )
        return replace(workload, visits=known_visits)


def calibrations(world: int, ranks_per_node: int) -> Iterator[Calibration]:
    """Yield the calibration layers for a number of ranks, shape by shape."""
    grids = _grids(world, ranks_per_node)
    for shape, grid in itertools.product(SHAPES, grids):
        yield from _calibrations_of(shape, grid, PLANS, computes=False)
    for grid in grids:
        yield from _calibrations_of(COMPUTING_SHAPE, grid, COMPUTING_PLANS, computes=True)


def _calibrations_of(
    shape: tuple[int, int, int], grid: Grid, plans: Sequence[Plan], *, computes: bool
) -> Iterator[Calibration]:
    """Yield the calibration layers of one shape, as in `SHAPES`, on a mesh: one for each of the
    plans that fit it and give different programs."""
    dim, hidden, tokens_per_expert = shape
    num_experts = EXPERTS_PER_RANK * grid.world
    workload = Workload(
        tokens=tokens_per_expert * num_experts * grid.tp,
        num_experts=num_experts,
        top_k=min(2, num_experts),
        dim=dim,
        hidden=hidden,
        matrices=2,
        dtype="fp32",
    )
    digests: set[bytes] = set()
    for plan in plans:
        try:
            compiled = compile_plan(plan, grid)
        except InputError:
            continue
        if compiled.digest in digests:
            continue
        digests.add(compiled.digest)
        name = f"tp {grid.tp}, etp {grid.etp}, dim {dim}, hidden {hidden}, {plan}"
        yield Calibration(
            name=name, compiled=compiled, mesh=grid, workload=workload, computes=computes
        )


def _grids(world: int, ranks_per_node: int) -> list[Grid]:
    """Return the meshes on which the host's times are measured."""
    if world % 2:  # tp and etp of two split only an even number of ranks
        return [Grid(world=world, ep=world, ranks_per_node=ranks_per_node)]
    return [
        Grid(world=world, tp=2, ep=world, ranks_per_node=ranks_per_node),
        Grid(world=world, ep=world // 2, etp=2, ranks_per_node=ranks_per_node),
    ]
