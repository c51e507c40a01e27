"""Layouts of other training systems: their predicted steps, and the search for the fastest one that
a system can run.

The search starts from every combination of tensor parallelism, pipeline stages, parts of a sequence
and sizes of ep that fits the ranks. From the best of these with each number of stages it changes
one choice at a time, of those that the system has: the micro-batch, what is recomputed, the
schedule, overlapped all-to-alls, DeepEP and the precision.

A run is a group of consecutive blocks on one rank of the pipeline (Megatron's virtual stage); a
rank has several of them if the schedule is interleaved or has the shape of a V.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.cluster import ELEMENT_BYTES, ClusterSpec, ScoreKernel
from moesaic.planner.job import Job
from moesaic.planner.rank_memory import Memory, layer_memory, usable_bytes
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import (
    LAUNCHES,
    PARTS,
    SCHEDULES,
    STEPWISE,
    Estimate,
    Part,
    Schedule,
    Sharded,
    StepCostModel,
    StepModel,
    alive_micro_batches,
    layer_passes,
)
from moesaic.planner.step_memory import least_bytes_of_plans, rank_memory
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import AllToAll, Crossing, Plan

FUSED_LOSS_BYTES = 10
LOSS_BYTES = 52
TORCH_LOSS_BYTES = 36
"""Bytes read and written per logit of two bytes by three losses: that of Transformer Engine, in
five passes; that of Megatron alone, in eight steps on a float32 copy; and PyTorch's cross entropy
of a float32 copy (see `StepModel.loss_bytes`)."""
LONG = 16384
"""Shortest sequences, in tokens, that ranks share; each rank keeps at least a quarter of this many
tokens."""
RecomputeMethod = Literal["uniform", "block"]
"""Which whole blocks are recomputed, by Megatron's names."""
Precision = Literal["bf16", "fp8", "mxfp8"]
"""Precision of matrix products with parameters."""


@dataclass(frozen=True, kw_only=True)
class OthersLayout:
    """A layout of another training system: how it splits a model over ranks, and what it overlaps
    and fuses."""

    tp: int = 1
    """Tensor parallelism of attention."""
    pp: int = 1
    """Pipeline stages."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule."""
    virtual_pp: int = 1
    """Runs of consecutive layers (virtual stages) that each pipeline rank has."""
    virtual_layers: int = 0
    """Layers per run, if given instead of `virtual_pp`; else 0."""
    mtp: int = 0
    """Number of further tokens that are predicted (multi-token prediction). Each has a block of its
    own, preceded by a projection from twice the width of a token."""
    cp: int = 1
    """Context parallelism: number of ranks that share a sequence."""
    ep: int = 1
    """Expert parallelism."""
    etp: int = 1
    """Tensor parallelism of experts."""
    micro_batch: int = 1
    """Sequences per micro-batch of a data-parallel group."""
    local_batch: int = 0
    """Sequences of a data-parallel group that a pipeline cuts into micro-batches; 0 for one
    micro-batch."""
    global_batch: int = 0
    """Sequences per optimizer step; 0 for one local batch of every data-parallel group."""
    recompute: tuple[Part, ...] = ()
    """Parts of blocks that backward recomputes; "block" for whole blocks."""
    recompute_method: RecomputeMethod = "uniform"
    """Which whole blocks are recomputed: all of them (uniform), or the first `recompute_layers` of
    each run (block)."""
    recompute_layers: int = 1
    """Under uniform, blocks that are recomputed as one, of which only the first one's input is
    kept; under block, blocks of each run that are recomputed, each by itself."""
    sharded: Sharded = "optimizer"
    """See `StepModel.sharded`."""
    replicas: int = 1
    """See `StepModel.replicas`."""
    shards: int = 0
    """Ranks over which a replica is sharded, besides tp, cp and pp; 0: all that these leave."""
    precision: Precision = "bf16"
    """Precision of matrix products with parameters."""
    all_to_all: AllToAll = "linear"
    """Our all-to-all that is most similar to the dispatcher of the system; deepep for kernels that
    forward tokens between and inside nodes at the same time (DeepEP, HybridEP)."""
    overlapped: bool = False
    """Whether all-to-alls overlap with the computing of another micro-batch."""
    graphs: bool = False
    """Whether a whole step is one CUDA graph, as with Megatron's `full_iteration`."""
    hides_parameters: bool = True
    """See `StepModel.hides_parameters`."""
    hides_gradients: bool = True
    """See `StepModel.hides_gradients`."""
    fused_loss: bool = True
    """Whether one or a few kernels compute the loss, without a float32 copy of the logits."""
    loss_chunks: int = 1
    """Parts of the tokens whose output and loss are computed one after the other."""
    float32_states: bool = True
    """Whether gradients and moments have four bytes per element."""
    float32_reduced: bool = True
    """Whether gradients of float32 states are reduced in float32, rather than in bfloat16."""
    stepwise: tuple[str, ...] = ()
    """Operations that run step by step in eager PyTorch instead of in fused or compiled kernels:
    keys of `STEPWISE`."""
    score_kernel: ScoreKernel = "best"
    """Kernel of the attention scores: the fastest one of the device, FlashAttention-2, or
    FlexAttention."""

    @property
    def is_narrow(self) -> bool:
        """Whether matrix products read elements of less than two bytes."""
        return ELEMENT_BYTES[self.precision] < 2

    @property
    def by_deepep(self) -> bool:
        """Whether kernels send each token once to a node and once to a rank."""
        return self.ep > 1 and Plan(all_to_all=self.all_to_all).crossing is not Crossing.LINK

    @property
    def needs_deepep(self) -> bool:
        """Whether these kernels are DeepEP's or HybridEP's."""
        return self.ep > 1 and Plan(all_to_all=self.all_to_all).crossing is Crossing.DEEPEP

    def sequences(self, world: int) -> int:
        """Return the number of sequences per optimizer step on `world` ranks."""
        groups = world // (self.tp * self.cp * self.pp)
        return self.global_batch or groups * max(self.local_batch, self.micro_batch)

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
            ("recompute", self.recompute, PARTS),
            ("stepwise", self.stepwise, tuple(STEPWISE)),
            ("schedule", (self.schedule,), SCHEDULES),
        )
        for name, chosen, known in choices:
            for word in chosen:
                if word not in known:
                    raise InputError(f"layout: {name}={word!r}: choose from {', '.join(known)}")
        may_be_zero = ("global_batch", "local_batch", "shards", "virtual_layers", "mtp")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in may_be_zero else 1
            # a type is the text of its annotation
            if field.type == "int" and value < least:
                raise InputError(f"layout: {field.name}={value}: must be at least {least}")
        if self.schedule != "1f1b" and self.virtual_pp not in (1, 2):
            raise InputError(
                f"layout: schedule {self.schedule} has a fixed number of runs of layers per rank, "
                f"not {self.virtual_pp}: leave virtual_pp at 1"
            )


def predict(
    job: Job,
    cluster: ClusterSpec,
    layout: OthersLayout,
    *,
    launches: tuple[float, float] = LAUNCHES,
) -> PlannedStep:
    """Return the predicted step under a layout of another system, with our most similar plan.

    Blocks are split over the pipeline stages in runs; if the split is uneven, the first runs are
    longer. The last run has the output. Ranks that share a sequence each have a part of its tokens
    and an average share of its scores. They pass keys and values around in a ring, overlapped with
    the scores. The busiest rank of the pipeline sets the pace.

    Args:
        job: the training job; its batch is ignored.
        cluster: the cluster; the layout uses all of its ranks.
        layout: the layout.
        launches: as in `StepModel`.

    Raises:
        InputError: if the layout does not fit the model or the cluster.
    """
    return _Ranks(job, simulator=Simulator(cluster), layout=layout, launches=launches).step()


class _Ranks:
    """The distinct ranks of a pipeline under a layout of another system; arguments and errors as of
    `predict`, the simulator being that of the cluster."""

    def __init__(
        self,
        job: Job,
        simulator: Simulator,
        layout: OthersLayout,
        launches: tuple[float, float] = LAUNCHES,
    ) -> None:
        cluster = simulator.cluster
        count = _micro_batches(job, cluster, layout)  # per step
        ranks_per_stage = cluster.world // layout.pp
        self.layout = layout
        self.grid = Grid(
            world=ranks_per_stage,
            tp=layout.tp,
            ep=layout.ep,
            etp=layout.etp,
            ranks_per_node=min(cluster.devices_per_node, ranks_per_stage),
        )
        groups = ranks_per_stage // (layout.tp * layout.cp)  # data-parallel ones
        whole = replace(job, batch_size=groups * layout.micro_batch).step_model(cluster, groups)
        whole = replace(whole, launches=launches)
        self.ranks = [
            StepCostModel(each, self.grid, simulator)
            for each in rank_models(job, whole, layout, count)
        ]

    @cached_property
    def compiled(self) -> Compiled:
        """Our plan that is most similar to the system's layers."""
        return _compiled(self.layout.all_to_all if self.layout.ep > 1 else "linear", self.grid)

    @property
    def least_bytes(self) -> float:
        """A lower bound on the bytes of `memory`, for which no plan is compiled."""
        return max(map(least_bytes_of_plans, self.ranks))

    @cached_property
    def memory(self) -> Memory:
        """The memory of the rank that needs most."""
        compiled = self.compiled
        rank = self.ranks[0]  # all ranks have the same MoE layers
        volumes = rank.simulator.volumes(compiled.forward, rank.model.layer, compiled.grid)
        # grouped products, behind which the activation runs as a kernel of its own
        kept_bytes, buffers = layer_memory(
            compiled.forward, compiled.backward, volumes, kernel="products"
        )
        memories = [rank_memory(rank, kept_bytes, buffers) for rank in self.ranks]
        return max(memories, key=lambda memory: memory.total)

    @cached_property
    def _slowest(self) -> tuple[StepCostModel, Estimate]:
        """The busiest rank, and its predicted time."""
        first = self.ranks[0]
        forward, backward = layer_passes(
            first.cluster, self.grid, first.model.layer, deepep=self.layout.by_deepep
        )
        busy = [rank.busy_seconds(forward, backward) for rank in self.ranks]
        slowest = self.ranks[busy.index(max(busy))]
        estimate = slowest.estimate(forward, backward, mean_busy=sum(busy) / len(busy))
        return slowest, estimate

    @property
    def seconds(self) -> float:
        """The predicted step time."""
        _, estimate = self._slowest
        return estimate.seconds

    def step(self) -> PlannedStep:
        """Return the predicted step: the time of the busiest rank, and the memory of the rank that
        needs most, which may be another one."""
        slowest, estimate = self._slowest
        return PlannedStep(
            plan=self.compiled.plan,
            grid=self.grid,
            estimate=estimate,
            memory=self.memory,
            bound_seconds=max(slowest.compute_bound, slowest.link_bound),
        )


@lru_cache(maxsize=64)
def _compiled(all_to_all: AllToAll, grid: Grid) -> Compiled:
    """Return our plan without chunks that is most similar to a system's layers."""
    if Plan(all_to_all=all_to_all).crossing is Crossing.DEEPEP:
        all_to_all = "multicast"  # sends each token as often as DeepEP does
    return compile_plan(Plan(all_to_all=all_to_all, order="fifo"), grid)


def _micro_batches(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> int:
    """Return the micro-batches per step; raises InputError if the layout does not fit the model or
    the cluster."""
    world = cluster.world
    model = job.model
    if layout.needs_deepep and not cluster.carries_deepep:
        raise InputError(
            f"layout: DeepEP needs NVLink inside nodes and RDMA between them, and not all links of "
            f"{cluster.name} are said to carry it (deepep = true): use the all-to-all dispatcher"
        )
    split = layout.tp * layout.cp * layout.pp
    if world % split or (world // layout.pp) % (layout.ep * layout.etp):
        raise InputError(
            f"{world} ranks do not split into tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, ep "
            f"{layout.ep}, etp {layout.etp}: their products must divide the ranks"
        )
    groups = world // split
    if layout.shards and layout.shards * layout.replicas != groups:
        raise InputError(
            f"data_parallel_shard_degree {layout.shards}: tp, cp and pp leave {groups} of {world} "
            f"ranks to {layout.replicas} replicas: give {groups // layout.replicas}, or -1"
        )
    batch = layout.sequences(world)
    if batch % (groups * layout.micro_batch):
        raise InputError(
            f"a global batch of {batch} does not split over {groups} data-parallel groups of "
            f"micro-batches of {layout.micro_batch}: choose a multiple of "
            f"{groups * layout.micro_batch}"
        )
    if (
        model.num_layers < layout.pp
        or model.moe.num_experts % layout.ep
        or model.moe.hidden % layout.etp
    ):
        raise InputError(
            f"pp {layout.pp}, ep {layout.ep} and etp {layout.etp} do not split the model's "
            "layers and experts"
        )
    count = batch // (groups * layout.micro_batch)
    if layout.schedule == "dualpipev" and count < 2 * layout.pp:
        raise InputError(
            f"{count} micro-batches do not fill a pipeline of {2 * layout.pp} stages that "
            f"overlaps forward and backward passes: choose at least {2 * layout.pp}, or another "
            "schedule"
        )
    return count


def fills_pipeline(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> bool:
    """Return whether a step has at least as many micro-batches as its pipeline has stages."""
    return _micro_batches(job, cluster, layout) >= layout.pp


def _runs(layout: OthersLayout, blocks: int) -> int:
    """Return the runs of layers per rank of a pipeline for a model of some blocks."""
    if layout.schedule in ("zb-v", "dualpipev"):
        return 2  # one on each arm of the V
    if not layout.virtual_layers:
        return layout.virtual_pp
    layers_per_rank = math.ceil(blocks / layout.pp)
    if layers_per_rank % layout.virtual_layers:
        raise InputError(
            f"a stage of {layers_per_rank} layers does not split into runs of "
            f"{layout.virtual_layers}: choose a divisor"
        )
    return layers_per_rank // layout.virtual_layers


def rank_models(job: Job, whole: StepModel, layout: OthersLayout, count: int) -> list[StepModel]:
    """Return the model of every distinct rank of the pipeline: its blocks, and the embedding or the
    output if it has them.

    All runs have equally many blocks, or the first ones have one more. The blocks of multi-token
    prediction come last, followed by the output. In a V, the second run of a rank is as far from
    the end as its first one is from the start.

    Args:
        job: says which blocks have MoE layers.
        whole: the model of all blocks.
        layout: the layout.
        count: micro-batches per step.
    """
    pp = layout.pp
    blocks = whole.num_layers + layout.mtp
    runs = _runs(layout, blocks)
    last_run = pp * runs - 1
    is_v = layout.schedule in ("zb-v", "dualpipev")
    is_sparse = [job.model.is_sparse(block) for block in range(whole.num_layers)]
    is_sparse += [True] * layout.mtp
    # of each run, in the order of the model, whether its blocks have an MoE layer
    blocks_of_runs = np.array_split(np.array(is_sparse), pp * runs)

    model = _step_model(whole, layout, blocks, count)
    models = []
    for rank in range(pp):
        # numbers of the rank's runs
        numbers = [rank, last_run - rank] if is_v else list(range(rank, pp * runs, pp))
        lengths = [len(blocks_of_runs[number]) for number in numbers]
        recomputed_blocks = None  # all
        if layout.recompute_method == "block":
            recomputed_blocks = sum(min(length, layout.recompute_layers) for length in lengths)
        has_embedding = 0 in numbers
        has_output = last_run in numbers
        models.append(
            replace(
                model,
                num_layers=max(sum(lengths), 1),  # as `StepModel` requires
                recomputed_blocks=recomputed_blocks,
                sparse_layers=int(sum(blocks_of_runs[number].sum() for number in numbers)),
                vocab=whole.vocab if has_embedding or has_output else 0,
                embeddings=whole.embeddings if has_embedding and has_output else 1,
                outputs=1 + layout.mtp if has_output else 0,
                stages=pp,
                runs=runs,
                alive=alive_micro_batches(layout.schedule, pp, runs, count, rank),
            )
        )
    return list(dict.fromkeys(models))


def _step_model(whole: StepModel, layout: OthersLayout, blocks: int, count: int) -> StepModel:
    """Return the model of all layers under what the system overlaps, shards and fuses; arguments as
    of `rank_models`, and the number of blocks with those of multi-token prediction."""
    # each further token's projection from twice the width, as if all blocks shared it
    projected = layout.mtp * 2 * whole.layer.dim**2
    attention_parameters = (blocks * whole.attention + projected) / blocks
    layer = replace(
        whole.layer,
        tokens=whole.layer.tokens // layout.cp,
        products=layout.precision if layout.is_narrow else None,
    )
    # PyTorch's loss keeps float32 logits, their log-softmax, and the gradients of both, of which
    # that of the logits has two bytes
    has_torch_loss = "loss" in layout.stepwise
    loss_bytes = FUSED_LOSS_BYTES if layout.fused_loss else LOSS_BYTES
    has_float32_gradients = layout.float32_states and layout.float32_reduced
    return replace(
        whole,
        micro_batches=count,
        attention_parameters=attention_parameters,
        layer=layer,
        seq_len=whole.seq_len // layout.cp,
        shares_sequence=layout.cp,
        score_operations=whole.scores,
        recomputed=layout.recompute,
        recomputed_together=layout.recompute_layers if layout.recompute_method == "uniform" else 1,
        keeps_activated=True,
        replicas=layout.replicas,
        overlapped=layout.overlapped or layout.schedule == "dualpipev",
        graphs=layout.graphs,
        schedule=layout.schedule,
        hides_parameters=layout.hides_parameters,
        hides_gradients=layout.hides_gradients,
        loss_bytes=TORCH_LOSS_BYTES if has_torch_loss else loss_bytes,
        loss_kept=2 + 3 * 4 if has_torch_loss else 4,
        logits_kept=2 if has_torch_loss else 0,
        loss_chunks=layout.loss_chunks,
        stepwise=layout.stepwise,
        score_kernel=layout.score_kernel,
        # Megatron requires sequence parallelism if a model has experts and tensor parallelism.
        sequence_parallel=layout.tp > 1,
        sharded=layout.sharded,
        parameter_bytes=4 if layout.float32_states else 2,
        gradient_bytes=4 if has_float32_gradients else 2,
        # The FSDP of PyTorch and that of Megatron gather parameters in the precision of products,
        # not the float32 master.
        gathered_bytes=whole.layer.element_bytes,
    )


def longer_by_narrow_rate(
    job: Job, cluster: ClusterSpec, layout: OthersLayout
) -> tuple[float, float]:
    """Return the range of factors by which a step may take longer because the rate of narrow
    products is uncertain.

    The range is (1, 1) if products are not narrow, or if their rate was measured in training
    (`Device.narrow_between`).

    Args:
        job, cluster, layout: the arguments of `predict`.
    """
    device = cluster.device
    if not layout.is_narrow or not device.narrow_between:
        return 1.0, 1.0
    at_usual_rate = predict(job, cluster, layout).seconds

    def seconds(times: float) -> float:
        """Return the step's seconds if narrow products are `times` as fast."""
        faster = device.with_products(times, (layout.precision,))
        return predict(job, replace(cluster, device=faster), layout).seconds

    low_rate, high_rate = device.narrow_between
    return seconds(high_rate) / at_usual_rate, seconds(low_rate) / at_usual_rate


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What a training system has, of the choices that the search changes."""

    schedules: tuple[tuple[Schedule, int], ...] = (("1f1b", 1),)
    """Pipeline schedules, with the runs of layers of a rank."""
    recompute: tuple[tuple[Part, ...], ...] = ((), ("block",))
    """Parts that backward recomputes."""
    all_to_alls: tuple[AllToAll, ...] = ("linear",)
    """Dispatchers."""
    overlaps: bool = False
    """Whether all-to-alls of one micro-batch overlap with another's computation; with a pipeline,
    only if ranks have several runs, and never with whole blocks recomputed."""
    precisions: tuple[Precision, ...] = ("bf16",)
    """Precisions of products."""
    sharded: Sharded = "optimizer"
    """What is sharded over data-parallel ranks."""


Tried = tuple[OthersLayout, PlannedStep]
"""A layout that fits the memory, and its predicted step."""


def best_layout(
    job: Job,
    cluster: ClusterSpec,
    offers: Offers,
    *,
    stages: int | None = None,
    reserve_gib: float = 1.0,
) -> Tried | None:
    """Return the layout with the shortest predicted step, and that step; None if no layout fits the
    memory.

    Args:
        job: the training job; its batch and accumulation give the sequences of a step.
        cluster: the cluster; layouts use all of its ranks.
        offers: what the system has.
        stages: number of pipeline stages; None tries powers of two.
        reserve_gib: device memory set aside for the framework.
    """
    most = usable_bytes(cluster, reserve_gib)
    simulator = Simulator(cluster)
    tried = set[OthersLayout]()
    """Layouts that were no faster than the best one so far, so that they are not than a later
    one."""

    def improved(layout: OthersLayout, best: Tried | None) -> Tried | None:
        """Return a layout with its step; None unless it fits and is faster than the best one."""
        if layout in tried:
            return None
        tried.add(layout)
        try:
            ranks = _Ranks(job, simulator, layout)
            if best is not None and ranks.seconds >= best[1].seconds:
                return None
            fits = ranks.least_bytes <= most and ranks.memory.total <= most
            return (layout, ranks.step()) if fits else None
        except InputError:
            return None

    best_starts: dict[int, Tried] = {}  # by the number of stages
    for layout in _starts(job, cluster, offers, stages):
        # blocks are recomputed only if the layout does not get better without that
        for recompute in ((), ("block",)):
            found = improved(replace(layout, recompute=recompute), best_starts.get(layout.pp))
            if found is not None:
                best_starts[layout.pp] = found
                break
    climbed = []
    for best in best_starts.values():
        before = None
        while best is not before:  # until no neighbour is faster
            before = best
            for layout in _neighbours(before[0], offers):
                best = improved(layout, best) or best
        climbed.append(best)
    return min(climbed, key=lambda each: each[1].seconds, default=None)


WE_LACK: tuple[tuple[str, str, Any, Callable[[OthersLayout], bool]], ...] = (
    ("sequences shared by ranks", "cp", 1, lambda layout: layout.cp > 1),
    ("DeepEP", "all_to_all", "linear", lambda layout: layout.needs_deepep),
    ("micro-batches in flight with stages", "overlapped", False, lambda layout: layout.pp > 1),
    (
        "recomputing parts of blocks",
        "recompute",
        (),
        lambda layout: layout.recompute not in ((), ("block",)),
    ),
)
"""What another system may run and `moesaic train` does not: its name, the choice of a layout that
takes it away, and the layouts to which that applies."""


def without_what_we_lack(job: Job, cluster: ClusterSpec, layout: OthersLayout) -> dict[str, float]:
    """Return how many times as fast a layout is as the same one without each thing that
    `moesaic train` lacks, whether or not memory then suffices.

    Args:
        job, cluster, layout: the arguments of `predict`.
    """
    seconds = predict(job, cluster, layout).seconds
    times_as_fast = {}
    for name, field, value, applies in WE_LACK:
        # the layout with the value that does without that thing
        without = replace(layout, **{field: value})
        if applies(layout) and without != layout:
            times_as_fast[name] = predict(job, cluster, without).seconds / seconds
    return times_as_fast


def _starts(
    job: Job, cluster: ClusterSpec, offers: Offers, stages: int | None
) -> Iterator[OthersLayout]:
    """Yield layouts under the plainest choices, whose sizes are powers of two."""
    model = job.model
    # where a system offers DeepEP, it is the last one
    all_to_all = offers.all_to_alls[-1 if cluster.carries_deepep else 0]
    stage_counts = (1, 2, 4, 8, 16) if stages is None else (stages,)
    sequence_parts = [1]
    if model.seq_len >= LONG:
        # each rank keeps at least a quarter of LONG tokens
        sequence_parts += [part for part in (2, 4, 8) if 4 * model.seq_len // part >= LONG]
    for pp, cp, tp in itertools.product(stage_counts, sequence_parts, (1, 2, 4, 8)):
        if cluster.world % (pp * cp * tp):
            continue
        if model.num_heads % tp or tp > cluster.devices_per_node:
            continue
        sharded = offers.sharded
        if pp > 1 and sharded == "parameters":
            # PyTorch's pipelines keep parameters whole between micro-batches.
            sharded = "gradients"
        stage_ranks = cluster.world // pp
        for power in range(stage_ranks.bit_length()):
            ep = 2**power
            if model.moe.num_experts % ep == 0 and stage_ranks % ep == 0:
                yield OthersLayout(
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=ep,
                    global_batch=job.batch_size * job.accumulation,
                    sharded=sharded,
                    all_to_all=all_to_all,
                )


def _neighbours(layout: OthersLayout, offers: Offers) -> Iterator[OthersLayout]:
    """Yield the layouts of a system that differ in one choice."""
    changes: list[dict[str, Any]] = [
        {"micro_batch": size}
        for size in (2 * layout.micro_batch, layout.micro_batch // 2)
        if 1 <= size <= 16
    ]
    changes += [{"recompute": parts} for parts in offers.recompute]
    changes += [{"all_to_all": name} for name in offers.all_to_alls]
    changes += [{"precision": name} for name in offers.precisions]
    if offers.overlaps:
        changes.append({"overlapped": not layout.overlapped})
    if layout.pp > 1:
        changes += [{"schedule": name, "virtual_pp": runs} for name, runs in offers.schedules]
        if offers.overlaps:  # which needs several runs, so both change together
            changes += [
                {"schedule": "1f1b", "virtual_pp": runs, "overlapped": True}
                for name, runs in offers.schedules
                if name == "1f1b" and runs > 1
            ]
    for change in changes:
        changed = replace(layout, **change)
        has_one_run = changed.pp > 1 and changed.virtual_pp == 1
        cannot_overlap = "block" in changed.recompute or has_one_run
        if changed != layout and not (changed.overlapped and cannot_overlap):
            yield changed
