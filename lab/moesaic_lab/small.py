"""`moesaic bench small`: splits of a frozen model over small cards, timed in turn on an emulated
cluster with virtual compute.

Virtual compute, real bytes over shaped links in the proportion that PCIe and Ethernet have to the
compute of consumer cards (configs/small.toml derives them). A step of adapters' training: every
layer forward, then forward again and backward, with the rows' gradients only. ours: experts spread,
by the plan that the planner searched. all-to-all and all-reduce: the two of transformers that
train, its own code over Gloo; under all-reduce all ranks hold one batch, so attention ends in an
all-reduce too (ep_size = tp_size). layers: a split of layers over ranks, forward passes of all
micro-batches, then backward passes; a micro-batch has the tokens of a rank. Regret: time of what
the planner picks of ours and layers over the faster, less 1.

moesaic bench small --json benchmarks/results/small.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from moesaic.comm.mesh import Mesh, open_transport
from moesaic.layer import MoE
from moesaic.measure.host import BalancedRouter, balanced_choice
from moesaic.measure.together import latest, start_together
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.finetune import FinetuneJob, layer_splits, spread_experts
from moesaic.planner.hub import HubShape
from moesaic.planner.job import DataShape
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan, plan_in_words
from moesaic.shapes import MoEShape
from moesaic_lab.beds import BedConfig, read_cells
from moesaic_lab.benchmark import Shown, Told, emulated, notes_of, on_beds
from moesaic_lab.claims import Claim, claimed, figures
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.layer.config import LayerPlace
from moesaic_lab.measure import Span, TimedCell, in_turn, timed, without_collections
from moesaic_lab.virtual import Accelerator, virtual_experts

COMMITTED = Path(__file__).parent / "configs" / "small.toml"
OURS = "ours"
LAYERS = "layers"
TRANSFORMERS = ("all-to-all", "all-reduce")
PIPELINE = "layers, micro-batches"
"""Name of that split in the planner."""


@dataclass(frozen=True, kw_only=True)
class SmallPlace(LayerPlace):
    """A bed in proportion to some cards, and the frozen model on it."""

    name: str = ""
    hidden: int = 128
    num_experts: int = 32
    top_k: int = 8
    tokens_per_rank: int = 512
    layers: int = 4
    """Layers of the model; a multiple of the ranks."""
    micro_batches: int = 1
    """Micro-batches of a rank in a step."""
    computes: int = 0
    """1 if computing binds on the cards that this stands for, 0 if the wire does."""
    repeats: int = 6

    @property
    def part(self) -> str:
        """The name by which --only chooses the cell."""
        return self.name

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Names of the numbers that need not be above 0."""
        return (*super().may_be_zero, "computes")

    @property
    def flops(self) -> float:
        """FLOPs of the experts of one layer for a rank's tokens, in a forward pass; those around
        the experts are as many."""
        return 2.0 * self.tokens_per_rank * self.top_k * self.matrices * self.dim * self.hidden

    @property
    def job(self) -> FinetuneJob:
        """The step as the planner sees it."""
        around = {
            "attention_parameters": self.flops / 2 / self.tokens_per_rank,
            "attention_kept": 4.0 * self.dim,
        }
        moe = MoEShape(
            num_experts=self.num_experts, top_k=self.top_k, hidden=self.hidden, experts="gelu"
        )
        shape = HubShape(
            dim=self.dim,
            num_layers=self.layers,
            num_heads=1,
            seq_len=self.tokens_per_rank,
            moe=moe,
            attention=around,
            checkpoint_activations=True,
            score_width=1e-9,
        )
        return FinetuneJob(
            batch_size=self.world,
            accumulation=self.micro_batches,
            precision="float32",
            method="lora",
            model=shape,
            data=DataShape(vocab_size=1),
        )

    @property
    def planned_on(self) -> ClusterSpec:
        """The bed for the planner. Virtual compute charges products alone, so memory is as good as
        free."""
        cluster = super().cluster
        return replace(cluster, device=replace(cluster.device, memory_gigabytes_per_second=1e3))


@dataclass(frozen=True, kw_only=True)
class SmallConfig(BedConfig[SmallPlace]):
    """All cells."""


@dataclass(frozen=True, kw_only=True)
class SmallCell(TimedCell):
    """The times of the splits in one cell."""

    place: SmallPlace
    plan: Plan
    picked: str
    """What the planner picks of ours and layers."""

    @property
    def row(self) -> dict[str, Any]:
        """The cell as plain data."""
        fastest = min((OURS, LAYERS), key=lambda name: self.timings[name].median)
        ratios = [self.ratio(OURS, name).median for name in TRANSFORMERS]
        return {
            "cell": self.place.name,
            "bed": self.place.in_words,
            "gflops": self.place.gflops,
            "sequences": self.place.world * self.place.micro_batches,
            "computes": bool(self.place.computes),
            "plan": plan_in_words(self.plan),
            **{f"{name}_ms": 1e3 * each.median for name, each in self.timings.items()},
            "over_transformers": max(ratios),
            "over_layers": self.ratio(OURS, LAYERS).median,
            "picked": self.picked,
            "regret": max(self.ratio(self.picked, fastest).median - 1, 0.0),
            "repeats": self.place.repeats,
        }


def read_config(path: Path = COMMITTED) -> SmallConfig:
    """Read a configuration."""
    return read_cells(path, SmallConfig(), {"cells": SmallPlace()})


def run(config: SmallConfig, told: Told, keep: str | None) -> list[SmallCell]:
    """Measure all cells. This starts clusters, one after another."""
    return on_beds(
        config.cells,
        lambda cell: cell.bed,
        lambda cell: cell.name,
        partial(measure, config),
        told=told,
        keep=keep,
    )


def measure(config: SmallConfig, ranks: KeptRanks, place: SmallPlace) -> SmallCell:
    """Plan a cell and time its splits on a running cluster."""
    step = spread_experts(place.job, place.planned_on)
    tokens = place.world * place.micro_batches * place.tokens_per_rank
    of_layers = layer_splits(place.job, place.planned_on, 0.0)[PIPELINE].tokens_per_second
    # on the bed no dense weights are gathered
    seconds = step.seconds - step.estimate.parts.get("parameters", 0.0)
    picked = OURS if tokens / seconds >= of_layers else LAYERS
    spans = ranks.run(on_rank, place, step.plan, config.warmup, config.seed)
    return SmallCell(place=place, plan=step.plan, picked=picked, **timed(spans))


def on_rank(place: SmallPlace, plan: Plan, warmup: int, seed: int) -> dict[str, list[Span]]:
    """Time the splits in turn on this rank; all ranks call this together."""
    ours = Ours(place, plan, seed)
    theirs = Theirs(place, seed)
    of_layers = SplitLayers(place)
    methods: dict[str, Callable[[], object]] = {
        OURS: ours.step,
        "all-to-all": theirs.step,
        "all-reduce": partial(theirs.step, shares=True),
        LAYERS: of_layers.step,
    }
    with without_collections():
        return in_turn(methods, place.repeats, barrier=start_together(latest), warmup=warmup)


@dataclass
class Virtual:
    """A rank's accelerator, whose backward passes of frozen weights count half of what trained
    weights take."""

    place: SmallPlace
    share: float = 1.0
    accelerator: Accelerator = field(init=False)

    def __post_init__(self) -> None:
        self.accelerator = Accelerator(flops_per_second=1e9 * self.place.gflops)

    def multiply(self, flops: float) -> None:
        """Spend the time of products."""
        self.accelerator.multiply(self.share * flops)

    def train(
        self, run: Callable[[Tensor], Tensor], around: Callable[[], object], tokens: int
    ) -> None:
        """Run a step of a micro-batch: every layer forward; then, last to first, again and
        backward."""
        x = torch.zeros(tokens, self.place.dim)
        for _ in range(self.place.layers):
            around()
            with torch.no_grad():
                run(x)
        for _ in range(self.place.layers):
            around()
            y = run(x.clone().requires_grad_())
            self.share = 0.5
            y.backward(torch.ones_like(y))
            self.share = 1.0
            around()


class Ours:
    """Our layer with its experts spread over all ranks."""

    def __init__(self, place: SmallPlace, plan: Plan, seed: int) -> None:
        self.place = place
        self.virtual = Virtual(place)
        experts = virtual_experts(self.virtual)  # type: ignore[arg-type]  # has `multiply`
        self.layer = MoE(
            place.dim,
            place.hidden,
            place.num_experts,
            place.top_k,
            router=partial(BalancedRouter, seed=seed),
            experts=experts,
            losses=(),
        )
        self.layer.requires_grad_(requires_grad=False)
        grid = Grid(world=place.world, ep=place.world, ranks_per_node=place.ranks_per_node)
        self.layer.parallelize(Mesh(grid, open_transport(name="sockets")), plan)

    def step(self) -> None:
        """Train one step."""
        for _ in range(self.place.micro_batches):
            around = partial(self.virtual.multiply, self.place.flops)
            self.virtual.train(self.layer, around, self.place.tokens_per_rank)


class _Products(torch.autograd.Function):
    """The experts' products as virtual time, forward and for the rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spend: Callable[[], None]) -> Tensor:
        ctx.spend = spend
        spend()
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.spend()
        return grad, None


class FrozenModule(nn.Module):
    """An experts module of transformers with this rank's experts, which spends virtual time."""

    def __init__(self, place: SmallPlace, accelerator: Accelerator) -> None:
        super().__init__()
        self.num_experts = place.num_experts // place.world
        self.place = place
        self.accelerator = accelerator

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return a row for each token after the time of the products of this rank's experts."""
        rows = int((top_k_index < self.num_experts).sum())
        flops = 2.0 * rows * self.place.matrices * self.place.dim * self.place.hidden
        out: Tensor = _Products.apply(hidden_states, partial(self.accelerator.multiply, flops))
        return out * top_k_weights.sum(1, keepdim=True)


class Theirs:
    """The two ways in which transformers trains experts on several ranks."""

    def __init__(self, place: SmallPlace, seed: int) -> None:
        from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP

        self.place = place
        self.virtual = Virtual(place)
        module = FrozenModule(place, self.virtual.accelerator)
        world = place.world
        whole = init_device_mesh("cpu", (world,))
        alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
        self.all_to_all = AllToAllEP(module, alone["ep"], alone["tp"])
        self.all_reduce = AllReduceEP(module, whole, whole)
        choice = balanced_choice(place.tokens_per_rank, place.top_k, place.num_experts, seed)
        self.chosen = choice.expert.view(-1, place.top_k)
        self.weights = torch.full(self.chosen.shape, 1 / place.top_k)

    def step(self, *, shares: bool = False) -> None:
        """Train one step; `shares`: all ranks hold one batch, and an all-reduce sums what their
        experts add."""
        place = self.place
        world = self.place.world
        ways = world if shares else 1
        chosen = self.chosen.repeat(ways, 1)
        weights = self.weights.repeat(ways, 1)
        implementation = self.all_reduce if shares else self.all_to_all

        def around() -> None:
            self.virtual.multiply(place.flops)
            if shares:
                dist.all_reduce(torch.zeros(world * place.tokens_per_rank, place.dim))

        for _ in range(place.micro_batches):
            self.virtual.train(
                lambda x: implementation(x, chosen, weights), around, ways * place.tokens_per_rank
            )


class SplitLayers:
    """A part of the layers on each rank, between which micro-batches pass."""

    def __init__(self, place: SmallPlace) -> None:
        self.place = place
        self.virtual = Virtual(place)
        self.rank = dist.get_rank()

    def step(self) -> None:
        """Train one step: forward passes of all micro-batches, then backward passes with their
        recomputation."""
        place = self.place
        last = self.place.world - 1
        count = place.world * place.micro_batches
        flops = place.layers / place.world * 2 * place.flops
        self._pass(count, flops, self.rank - 1, self.rank + 1)
        self._pass(
            count,
            2 * flops,
            self.rank + 1 if self.rank < last else -1,
            self.rank - 1 if self.rank else last + 1,
        )

    def _pass(self, count: int, flops: float, source: int, target: int) -> None:
        """Take rows from a rank, compute and pass them on, several times."""
        sent = []
        shape = (self.place.tokens_per_rank, self.place.dim)
        for _ in range(count):
            rows = torch.zeros(shape)
            if 0 <= source < self.place.world:
                dist.recv(rows, source)
            self.virtual.multiply(flops)
            if 0 <= target < self.place.world:
                sent.append(dist.isend(rows, target))
        for each in sent:
            if each is not None:
                each.wait()


def claims(cells: list[SmallCell]) -> list[Claim]:
    """Return the claims: the worst ratio to transformers, to a split of layers where computing
    binds, and the worst regret."""
    rows = [cell.row for cell in cells]
    return [
        claimed("small.over_transformers_ep", lambda: max(figures(rows, "over_transformers")), 0.7),
        claimed(
            "small.over_layer_split", lambda: max(figures(rows, "over_layers", computes=True)), 0.6
        ),
        claimed("small.pick_regret", lambda: max(figures(rows, "regret")), 0.05),
    ]


BENCHMARK = emulated(
    name="small",
    description="Compare splits of a frozen model over small cards, on emulated clusters.",
    read_config=read_config,
    run=run,
    notes=notes_of(__doc__),
    rows=lambda cells: [cell.row for cell in cells],
    claims=claims,
    columns=(
        Shown(
            title="a step, ms, virtual compute",
            columns=(
                "cell",
                "ours_ms",
                "all-to-all_ms",
                "all-reduce_ms",
                "layers_ms",
                "over_transformers",
                "over_layers",
                "picked",
                "regret",
            ),
        ),
    ),
    packages=("torch", "transformers"),
)
