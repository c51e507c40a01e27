"""`moesaic bench small`: splits of a frozen model over small cards, timed in turn on an emulated
cluster with virtual compute.

Virtual compute, real bytes over shaped links in the proportion that PCIe and Ethernet have to the
compute of consumer cards (configs/small.toml derives them). A step of adapters' training: every
layer forward, then forward again and backward under torch's checkpoints, with the rows' gradients
only. All methods compute the same micro-batches, each of a rank's tokens.

Ours, by the code of `moesaic finetune`: experts spread over all ranks, by the plan that the planner
searched; stages (1F1B) of two ranks that share experts, and of one; where there are messages, also
with the two halves of a micro-batch in flight. Others: 1F1B, torch's schedule over the layers of
each rank, which is the code and the messages of our stages of one rank; one by one, a micro-batch
after another through the layers of all ranks, as under accelerate's device_map; all-to-all and
all-reduce, the two of transformers that train, its own code over Gloo; under all-reduce all ranks
hold one batch, so attention ends in an all-reduce too (ep_size = tp_size).

Picked: the fastest of ours by `moesaic plan finetune`, without the gathering of dense weights,
which the bed leaves out. Regret: time of what is picked over the fastest measured of ours, less 1.
Ratios are medians over the repeats in which both ran, claims those of the worst cell, intervals
those of 95 %. 1F1B and the fastest of ours are timed further with what is picked if they are within
1.10 of it. The ratio to 1F1B counts as
1 if its 90 % interval lies within 1.03 on both sides over 30 pairs.

moesaic bench small --json benchmarks/results/small.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from moesaic.comm.mesh import Mesh
from moesaic.comm.process_groups import keep_timeout
from moesaic.layer import MoE
from moesaic.measure.host import BalancedRouter, IdleExperts, balanced_choice
from moesaic.measure.together import latest, start_together
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.finetune import (
    IN_FLIGHT,
    FinetuneJob,
    layer_splits,
    spread_experts,
    spread_in_flight,
    staged_speedup,
    staged_step,
)
from moesaic.planner.hub import HubShape
from moesaic.planner.job import DataShape
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.program.plan import Plan, plan_in_words
from moesaic.shapes import MoEShape
from moesaic.transformers.in_flight import both
from moesaic_lab.across_ranks import in_turn_and_near
from moesaic_lab.beds import BedConfig, read_cells
from moesaic_lab.benchmark import Shown, Told, emulated, notes_of, on_beds
from moesaic_lab.claims import Claim
from moesaic_lab.kept_ranks import KeptRanks
from moesaic_lab.layer.config import LayerPlace
from moesaic_lab.measure import (
    MANY,
    NEAR,
    Ratio,
    Span,
    TimedCell,
    Timing,
    timed,
    without_collections,
)
from moesaic_lab.virtual import Accelerator, virtual_experts

COMMITTED = Path(__file__).parent / "configs" / "small.toml"
OURS = "ours"
"""Our experts spread over all ranks."""
PIPELINE = "1F1B"
ONE_BY_ONE = "one by one"
TRANSFORMERS = ("all-to-all", "all-reduce")
OTHERS = (PIPELINE, ONE_BY_ONE, *TRANSFORMERS)
TWO_STAGES = "2 stages of 2 ranks"
LAYERS = "layers, micro-batches"
"""Names of two splits in the planner."""
OF_OURS = (OURS, OURS + IN_FLIGHT, TWO_STAGES, TWO_STAGES + IN_FLIGHT, LAYERS)
"""Ours on four ranks."""
EQUIVALENT = 1.03
"""Two methods whose ratio is certainly below this, in both directions, take equally long."""


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
    def sequences(self) -> int:
        """Micro-batches of all ranks in a step."""
        return self.world * self.micro_batches

    @property
    def tokens(self) -> tuple[int, int]:
        """Sequences of a micro-batch, which is halved, and their length."""
        return 2, self.tokens_per_rank // 2

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
            seq_len=self.tokens_per_rank // 2,
            moe=moe,
            attention=around,
            checkpoint_activations=True,
            score_width=1e-9,
        )
        return FinetuneJob(
            batch_size=2 * self.world,
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

    @staticmethod
    def repeated(cell: SmallPlace, repeats: int) -> SmallPlace:
        """Return a cell in which no method is timed more often than the others."""
        return replace(cell, repeats=repeats, pairs=repeats)


@dataclass(frozen=True, kw_only=True)
class SmallCell(TimedCell):
    """The times of the splits in one cell."""

    place: SmallPlace
    plan: Plan
    """Of experts that are spread over all ranks."""
    picked: str
    """What the planner picks of ours."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the planner predicts, by split."""

    @property
    def fastest(self) -> str:
        """The fastest of ours, by all repeats."""
        own = [name for name in self.timings if name not in OTHERS]
        return min(own, key=lambda name: self.ratio(name, self.picked).median)

    def over(self, *others: str) -> Ratio:
        """Return the time of what is picked over that of the fastest of some methods."""
        return self.ratio(self.picked, min(others, key=lambda name: self.timings[name].median))

    @property
    def over_pipeline(self) -> Ratio:
        """Time of what is picked over that of 1F1B over layers, 1 if both take equally long."""
        level = 0.9  # two one-sided tests at 5 % (Schuirmann 1987)
        narrow = self.ratio(self.picked, PIPELINE, level)
        found = self.ratio(self.picked, PIPELINE)
        is_equal = narrow.low >= 1 / EQUIVALENT and narrow.high <= EQUIVALENT
        return replace(found, median=1.0) if is_equal and narrow.repeats >= MANY else found

    @property
    def row(self) -> dict[str, Any]:
        """The cell as plain data."""
        ratios = {
            "over_transformers": self.over(*TRANSFORMERS),
            "over_1f1b": self.ratio(self.picked, PIPELINE),
            "over_one_by_one": self.over(ONE_BY_ONE),
            "spread_over_1f1b": self.ratio(OURS, PIPELINE),
            "over_fastest": self.over(self.fastest),
        }
        return {
            "cell": self.place.name,
            "bed": self.place.in_words,
            "gflops": self.place.gflops,
            "sequences": self.place.sequences,
            "computes": bool(self.place.computes),
            "plan": plan_in_words(self.plan),
            **{f"{name}_ms": 1e3 * each.median for name, each in self.timings.items()},
            "predicted_ms": {name: 1e3 * each for name, each in self.predicted.items()},
            "picked": self.picked,
            "fastest": self.fastest,
            "regret": max(ratios["over_fastest"].median - 1, 0.0),
            **{key: value for name, each in ratios.items() for key, value in _shown(name, each)},
            "repeats": self.place.repeats,
        }


def _shown(name: str, ratio: Ratio) -> Iterable[tuple[str, Any]]:
    """Return a ratio as keys of a cell's row."""
    return ((name, ratio.median), (f"{name}_95", [ratio.low, ratio.high]))


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


def planned_splits(place: SmallPlace) -> dict[str, PlannedStep]:
    """Return the planner's steps of the splits that `moesaic finetune` has, by name."""
    job = place.job
    cluster = place.planned_on
    splits = layer_splits(job, cluster, 0.0)
    return {OURS: spread_experts(job, cluster)} | {
        name: staged_step(job, cluster, split.stages, split.stages * place.micro_batches)
        for name, split in splits.items()
        if split.stages is not None and split.in_flight == 1
    }


def predicted_seconds(place: SmallPlace, steps: Mapping[str, PlannedStep]) -> dict[str, float]:
    """Return the seconds that the planner predicts for each split, and for those with halves in
    flight; without the gathering of dense weights, which the bed leaves out."""
    job = place.job
    cluster = place.planned_on
    predicted = {}
    for name, step in steps.items():
        gathering = step.estimate.parts.get("parameters", 0.0)
        stages = place.world // step.grid.world
        if stages == 1:
            flying = spread_in_flight(job, cluster, step)
        else:
            speedup = staged_speedup(job, cluster, stages, stages * place.micro_batches)
            flying = None if speedup is None else step.seconds / speedup
        predicted[name] = step.seconds - gathering
        if flying is not None:
            predicted[name + IN_FLIGHT] = flying - gathering
    return predicted


def measure(config: SmallConfig, ranks: KeptRanks, place: SmallPlace) -> SmallCell:
    """Plan a cell and time its splits on a running cluster."""
    steps = planned_splits(place)
    predicted = predicted_seconds(place, steps)
    picked = min(predicted, key=lambda name: predicted[name])
    splits = {
        name: Split(stages=place.world // step.grid.world, plan=step.plan)
        for name, step in steps.items()
    }
    found = ranks.run(on_rank, place, splits, picked, config.warmup, config.seed)
    return SmallCell(
        place=place,
        plan=steps[OURS].plan,
        picked=picked,
        predicted=predicted,
        **timed(*zip(*found)),
    )


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split that `moesaic finetune` has."""

    stages: int
    """Stages of the layers, whose ranks share experts."""
    plan: Plan
    """Of the MoE layers."""


def on_rank(
    place: SmallPlace, splits: dict[str, Split], picked: str, warmup: int, seed: int
) -> tuple[dict[str, list[Span]], dict[str, list[Span]]]:
    """Time the methods in turn on this rank, then those that are near the picked one; all ranks
    call this together."""
    accelerator = Accelerator(flops_per_second=1e9 * place.gflops)

    def near(seconds: Mapping[str, tuple[float, ...]]) -> list[str]:
        """Return the picked split and, where they take about as long, 1F1B and the fastest of
        ours."""
        medians = {name: Timing.of(each).median for name, each in seconds.items()}
        own = [name for name in medians if name not in OTHERS]
        others = {PIPELINE, min(own, key=lambda name: medians[name])} - {picked}
        close = [name for name in others if 1 / NEAR < medians[name] / medians[picked] < NEAR]
        return [picked, *sorted(close)] if close else []

    with without_collections():
        return in_turn_and_near(
            methods_of(place, splits, accelerator, seed),
            place.repeats,
            place.pairs,
            near,
            barrier=start_together(latest),
            warmup=warmup,
        )


def methods_of(
    place: SmallPlace, splits: Mapping[str, Split], accelerator: Accelerator, seed: int
) -> dict[str, Callable[[], object]]:
    """Return what trains a step on this rank, by name; all ranks call this together.

    Args:
        splits: those of ours.
        accelerator: spends the time of this rank's products.
        seed: of the routing.
    """
    methods: dict[str, Callable[[], object]] = {}
    for name, split in splits.items():
        ours = Ours(place, split, accelerator, seed)
        methods[name] = ours.step
        if split.stages < place.world:
            methods[name + IN_FLIGHT] = partial(ours.step, flies=True)
    layers = PlainLayers(place, accelerator, seed)
    theirs = Theirs(place, accelerator, seed)
    return methods | {
        PIPELINE: layers.step,
        ONE_BY_ONE: layers.step_one_by_one,
        "all-to-all": theirs.step,
        "all-reduce": partial(theirs.step, shares=True),
    }


class _Products(torch.autograd.Function):
    """Products with frozen matrices as virtual time, forward and for the rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spend: Callable[[], object]) -> Tensor:
        ctx.spend = spend
        ctx.save_for_backward(rows)
        spend()
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # which a checkpoint computes again
        ctx.spend()
        return grad, None


def spent(x: Tensor, spend: Callable[[int], object]) -> Tensor:
    """Return tokens, (..., dim), after the time of their products."""
    y: Tensor = _Products.apply(x, partial(spend, x.numel() // x.shape[-1]))
    return y


class Block(nn.Module):
    """A decoder layer, which backward computes again.

    Args:
        around: spends the time of what lies around the experts of a number of tokens, in each pass.
        experts: the layer of experts.
    """

    def __init__(
        self, around: Callable[[int], object], experts: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.around = around
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, as wide as its input."""
        y: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return y

    def _run(self, x: Tensor) -> Tensor:
        return self.experts(spent(x, self.around))


class VirtualModel(nn.Module):
    """Some layers as a causal language model of transformers, as `moesaic finetune` calls it."""

    dtype = torch.float32

    def __init__(self, dim: int, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.Sequential(*blocks)
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(hidden_size=dim, vocab_size=dim)
        )

    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Return hidden states as logits."""
        if input_ids is not None:
            inputs_embeds = torch.zeros(*input_ids.shape, self.dim, requires_grad=True)
        return SimpleNamespace(logits=self.blocks(inputs_embeds))

    def loss_function(self, *, logits: Tensor, **_: object) -> Tensor:
        """Return a loss, ()."""
        return logits.mean()


def block_on(
    mesh: Mesh | None, place: SmallPlace, plan: Plan, accelerator: Accelerator, seed: int
) -> Block:
    """Return a layer with our layer of experts, which the ranks of a mesh share; None for a rank
    with all experts, whose products are spent just before that layer."""

    def spend(tokens: int) -> None:
        """Spend the time of the products of some tokens in the experts, or around them."""
        accelerator.multiply(place.flops * tokens / place.tokens_per_rank)

    experts = MoE(
        place.dim,
        place.hidden,
        place.num_experts,
        place.top_k,
        router=partial(BalancedRouter, seed=seed),
        experts=IdleExperts if mesh is None else virtual_experts(accelerator),
        losses=(),
    )
    experts.requires_grad_(requires_grad=False)
    if mesh is None:
        return Block(spend, lambda x: experts(spent(x, spend)))
    experts.parallelize(mesh, plan)
    return Block(spend, experts)


class Ours:
    """One of our splits."""

    def __init__(
        self, place: SmallPlace, split: Split, accelerator: Accelerator, seed: int
    ) -> None:
        from moesaic.finetune.staged import StagedModel
        from moesaic.train.ranks import Ranks

        self.place = place
        self.plan = split.plan
        sharing = place.world // split.stages
        meshes = keep_timeout(
            init_device_mesh("cpu", (split.stages, sharing), mesh_dim_names=("pp", "stage"))
        )
        mesh = Mesh.create(
            ep=sharing,
            ranks_per_node=min(place.ranks_per_node, sharing),
            device_type="cpu",
            transport="sockets" if sharing > 1 else "auto",
            group=meshes["stage"].get_group(),
        )
        shared = mesh if sharing > 1 else None
        blocks = [
            block_on(shared, place, split.plan, accelerator, seed)
            for _ in range(place.layers // split.stages)
        ]
        self.experts = [block.experts for block in blocks if isinstance(block.experts, MoE)]
        self.model = VirtualModel(place.dim, blocks)
        self.ids = torch.zeros(place.tokens, dtype=torch.int64)
        self.staged: dict[bool, StagedModel] = {}
        if split.stages > 1:
            ranks = Ranks(mesh, meshes)
            count = split.stages * place.micro_batches
            self.ids = self.ids.repeat(count, 1)
            self.staged = {
                flies: StagedModel(
                    self.model, ranks, place.tokens, count=count, device="cpu", flies=flies
                )
                for flies in (False, True)
            }

    def step(self, *, flies: bool = False) -> None:
        """Train one step, with halves of a micro-batch in flight if asked to, which need no
        chunks."""
        for layer in self.experts:
            layer.use_plan(replace(self.plan, chunks=1) if flies else self.plan)
        if self.staged:
            self.staged[flies].step(self.ids)
            return
        for _ in range(self.place.micro_batches):
            y = torch.cat(both(self._run, self.ids.chunk(2))) if flies else self._run(self.ids)
            y.backward(torch.ones_like(y))

    def _run(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids).logits
        return found


class PlainLayers:
    """Layers under torch's own schedules, those of each rank after those of the rank before."""

    def __init__(self, place: SmallPlace, accelerator: Accelerator, seed: int) -> None:
        self.rank = dist.get_rank()
        self.last = place.world - 1
        part = Layers(
            block_on(None, place, Plan(), accelerator, seed)
            for _ in range(place.layers // place.world)
        )
        device = torch.device("cpu")

        def stage() -> PipelineStage:
            """Return this rank's part as torch's schedules take it."""
            return PipelineStage(part, self.rank, place.world, device)

        def loss_of(y: Tensor, _: Tensor) -> Tensor:
            """Return a loss, ()."""
            return y.mean()

        self.schedule = Schedule1F1B(stage(), place.sequences, loss_fn=loss_of, scale_grads=False)
        self.alone = ScheduleGPipe(stage(), 1, loss_fn=loss_of, scale_grads=False)
        sequences, length = place.tokens
        self.one = torch.zeros(sequences, length, place.dim)
        self.all = self.one.repeat(place.sequences, 1, 1)

    def step(self) -> None:
        """Train one step of 1F1B."""
        self._step(self.schedule, self.all)

    def step_one_by_one(self) -> None:
        """Train one step, a micro-batch after another through the layers of all ranks."""
        for _ in range(len(self.all) // len(self.one)):
            self._step(self.alone, self.one)

    def _step(self, schedule: Schedule1F1B | ScheduleGPipe, x: Tensor) -> None:
        """Run some micro-batches through a schedule."""
        inputs = () if self.rank else (x,)
        ends: dict[str, Any] = {"target": x, "losses": []} if self.rank == self.last else {}
        schedule.step(*inputs, return_outputs=False, **ends)


class Layers(nn.Sequential):
    """Layers one after another, the first of which has a gradient for its input."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's output."""
        y: Tensor = super().forward(x if x.requires_grad else x.detach().requires_grad_())
        return y


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

    def __init__(self, place: SmallPlace, accelerator: Accelerator, seed: int) -> None:
        from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP

        self.place = place
        self.accelerator = accelerator
        module = FrozenModule(place, accelerator)
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
        ways = place.world if shares else 1
        chosen = self.chosen.repeat(ways, 1)
        weights = self.weights.repeat(ways, 1)
        implementation = self.all_reduce if shares else self.all_to_all

        def around(tokens: int) -> None:
            self.accelerator.multiply(place.flops)
            if shares:
                dist.all_reduce(torch.zeros(tokens, place.dim))

        block = Block(around, lambda x: implementation(x, chosen, weights))
        layers = Layers([block] * place.layers)
        for _ in range(place.micro_batches):
            y = layers(torch.zeros(ways * place.tokens_per_rank, place.dim))
            y.backward(torch.ones_like(y))


def claims(cells: list[SmallCell]) -> list[Claim]:
    """Return the claims, each of its worst cell: the regret, and the time of what is picked over
    that of every alternative."""
    on_25gbe = [cell for cell in cells if cell.place.name == "25gbe"]
    computing = [cell for cell in cells if cell.place.computes]
    return [
        _worst("over_transformers_ep", 0.7, cells, lambda cell: cell.over(*TRANSFORMERS)),
        _worst("over_transformers_ep_25gbe", 0.4, on_25gbe, lambda cell: cell.over(*TRANSFORMERS)),
        _worst("over_layer_split", 0.6, computing, lambda cell: cell.ratio(OURS, PIPELINE)),
        _worst("over_1f1b", 1.0, cells, lambda cell: cell.over_pipeline),
        _worst("over_one_by_one", 0.7, cells, lambda cell: cell.over(ONE_BY_ONE)),
        _worst("pick_regret", 0.03, cells, lambda cell: cell.over(cell.fastest), less=1.0),
    ]


def _worst(
    name: str,
    target: float,
    cells: Iterable[SmallCell],
    ratio_of: Callable[[SmallCell], Ratio],
    less: float = 0.0,
) -> Claim:
    """Return the claim about the largest ratio of some cells, `less` taken off."""
    name = f"small.{name}"
    found = [(ratio_of(cell), cell.place.name) for cell in cells]
    if not found:
        return Claim(name=name, value=None, target=target, reason="not run")
    worst, case = max(found, key=lambda each: each[0].median)
    return Claim(
        name=name,
        value=worst.median - less,
        target=target,
        interval=(worst.low - less, worst.high - less),
        case=case,
    )


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
            title="a step of ours, ms, virtual compute",
            columns=(
                "cell",
                (f"{OURS}_ms", "spread"),
                (f"{OURS}{IN_FLIGHT}_ms", "in flight"),
                (f"{TWO_STAGES}_ms", "2 stages"),
                (f"{TWO_STAGES}{IN_FLIGHT}_ms", "in flight"),
                (f"{LAYERS}_ms", "4 stages"),
                "picked",
            ),
        ),
        Shown(
            title="a step of others, ms, and of what is picked over them and over the best of ours",
            columns=(
                "cell",
                *((f"{name}_ms", name) for name in OTHERS),
                ("over_1f1b", "/ 1F1B"),
                ("over_one_by_one", "/ one"),
                ("over_transformers", "/ t."),
                ("over_fastest", "/ best"),
            ),
        ),
    ),
    packages=("torch", "transformers"),
)
