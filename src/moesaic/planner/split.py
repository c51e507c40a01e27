"""How a job is split over ranks beyond the layout of one pipeline stage, and what a step under a
split costs.

A split says into how many stages the blocks are cut, and what data-parallel ranks share of
parameters, gradients and optimizer states: the fields `pp`, `parts_per_stage`, `shard` and `hold`
of the trainer's mesh.

A part is a run of consecutive blocks. Part i belongs to stage i modulo pp, so a stage of several
parts has runs that are not adjacent. All ranks of a stage do the same, so "rank" stands for its
stage here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from moesaic.errors import InputError
from moesaic.planner.candidates import name_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.in_flight import InFlight, layers_in_flight
from moesaic.planner.job import Job
from moesaic.planner.pipeline import Timed, simulate_pipeline
from moesaic.planner.rank_memory import Memory
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import (
    Estimate,
    Held,
    Passes,
    StepCostModel,
    StepModel,
    alive_micro_batches,
    hop_seconds,
)
from moesaic.planner.step_memory import layer_bytes, least_bytes_of_plans, rank_memory
from moesaic.planner.task_times import Simulated
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.program.stage_cuts import cut
from moesaic.program.task import Program

Sharding = Literal["all", "node", "none"]
"""Over which data-parallel ranks parameters are sharded: all, those of a node, or none."""


@dataclass(frozen=True, kw_only=True)
class JobSplit:
    """How a job is split beyond the layout of a stage."""

    pp: int = 1
    """Pipeline stages."""
    parts: int = 1
    """Parts of the model on each stage's ranks; above 1 the schedule is interleaved 1F1B."""
    shard: Sharding = "all"
    """Over which data-parallel ranks parameters, gradients and optimizer states are sharded."""
    hold: Held = "nothing"
    """What a rank holds whole between the micro-batches of a step."""
    finer: int = 1
    """Micro-batches into which each of the job's is cut: more of them fill a pipeline, and the
    sequences of a step stay the same."""
    in_flight: int = 1
    """Micro-batches in flight without stages, 1 or 2: the trainer's `micro_batches_in_flight`."""

    def fits(self, job: Job) -> bool:
        """Return whether the model and the micro-batches of a job have so many stages and parts."""
        if self.pp * self.parts > job.model.num_layers or job.batch_size % self.finer:
            return False
        count = job.accumulation * self.finer
        if self.parts > 1:
            # interleaved 1F1B sends micro-batches in rounds of equal size, of about pp each
            rounds = max(1, count // self.pp)
            if count % rounds:
                return False
        if self.in_flight > 1:
            return self.pp == 1 and count >= self.in_flight
        return True

    def of(self, job: Job) -> Job:
        """Return the job with its micro-batches cut."""
        return replace(
            job, batch_size=job.batch_size // self.finer, accumulation=job.accumulation * self.finer
        )


WHOLE = JobSplit()
"""No stages; everything is sharded over all data-parallel ranks and gathered when it is needed."""


def layout_in_words(grid: Grid, split: JobSplit) -> str:
    """Return a layout and its split in words, such as "pp 2, tp 1, ep 2, etp 1"."""
    words = [name_of(grid)]
    if split.pp > 1:
        words.insert(0, f"pp {split.pp}")
    if split.parts > 1:
        words.append(f"{split.parts} parts a stage")
    if split.finer > 1:
        words.append(f"micro-batches cut in {split.finer}")
    if split.in_flight > 1:
        words.append("two micro-batches in flight")
    if grid.dp > 1 or grid.edp > 1:
        if split.shard == "node":
            words.append("sharded in nodes")
        if split.shard == "none":
            words.append("not sharded")
        elif split.hold != "nothing":
            words.append(f"{split.hold} held")
    return ", ".join(words)


def holdings(grid: Grid, split: JobSplit) -> Iterator[JobSplit]:
    """Yield the ways in which the data-parallel ranks of a layout can hold the model.

    Stages hold gradients at least, which their schedules reduce once.
    """
    # what a rank keeps whole between micro-batches
    holds: list[Held] = ["parameters", "gradients"]
    if split.pp == 1:
        holds.append("nothing")
    if grid.dp == 1 and grid.edp == 1:  # nobody to share with: all ways are the same, one will do
        yield replace(split, hold=holds[-1])
        return
    shards: list[Sharding] = ["all"]
    has_several_nodes = (grid.ranks_per_node or grid.world) < grid.world
    # over how many data-parallel ranks of a node dense parameters would be sharded
    shards_in_node, _ = _node_shards(grid)
    if has_several_nodes and shards_in_node > 1:
        shards.append("node")
    for shard in shards:
        for hold in holds:
            yield replace(split, shard=shard, hold=hold)
    yield replace(split, shard="none", hold="gradients")  # which are whole if not sharded


def _node_shards(grid: Grid) -> tuple[int, int]:
    """Return over how many ranks of a node dense parameters, and experts, are sharded."""
    per_node = grid.ranks_per_node or grid.world

    def inside_node(stride: int, size: int) -> int:
        """Return how many of `size` ranks that are `stride` apart are on one node; 1 if strides do
        not fit nodes."""
        return min(per_node // stride, size) if per_node % stride == 0 else 1

    return inside_node(grid.tp, grid.dp), inside_node(grid.ep * grid.etp, grid.edp)


class SplitCostModel:
    """Predicts the time and the memory of steps on one layout under one split.

    Args:
        job: the training job.
        grid: the layout of the ranks of a stage.
        split: the split.
        simulator: of the cluster.
        model: of a step of the split's micro-batches on `grid.dp` data-parallel groups, if it is
            known.

    Raises:
        InputError: if the job has too few blocks or does not split, or as `StepCostModel` does.
    """

    def __init__(
        self,
        job: Job,
        grid: Grid,
        split: JobSplit,
        simulator: Simulator,
        model: StepModel | None = None,
    ) -> None:
        if not split.fits(job):
            raise InputError(
                f"{split.pp} stages of {split.parts} parts do not fit {job.model.num_layers} "
                f"blocks and {job.accumulation} micro-batches"
            )
        self.grid = grid
        self.split = split
        self.simulator = simulator
        self.cluster = simulator.cluster
        self._known: dict[_Blocks, StepCostModel] = {}
        """Results of `_costs`."""
        if model is None:
            model = split.of(job).step_model(self.cluster, grid.dp)
        self.model = _sharded(model, grid, split)
        """Of all blocks."""
        is_sparse = tuple(map(job.model.is_sparse, range(model.num_layers)))
        self._parts = _parts_of(model, is_sparse, split.pp, split.parts)
        """The blocks of each part, in the order of the model."""
        self._ranks = [_joined(self._parts[rank :: split.pp]) for rank in range(split.pp)]
        """All blocks of a rank of each stage."""

    def held(self, split: JobSplit) -> SplitCostModel:
        """Return the cost model under a split that holds the model in another way."""
        changed = copy(self)
        changed.split = split
        changed.model = _sharded(self.model, self.grid, split)
        changed._known = {}
        return changed

    def on(self, grid: Grid) -> SplitCostModel:
        """Return this cost model for a layout with another axis innermost, which changes no cost;
        both share what has been computed."""
        changed = copy(self)
        changed.grid = grid
        return changed

    @cached_property
    def _distinct(self) -> list[StepCostModel]:
        """The cost models of the ranks that differ by more than the micro-batches that they
        keep."""
        return [self._costs(blocks) for blocks in dict.fromkeys(self._ranks)]

    @property
    def ranks(self) -> tuple[StepCostModel, ...]:
        """The cost model of a rank of each stage."""
        return tuple(map(self._of_rank, range(self.split.pp)))

    @cached_property
    def _fullest(self) -> list[StepCostModel]:
        """The cost model of the first rank of each kind, which keeps the most micro-batches."""
        return [self._of_rank(self._ranks.index(blocks)) for blocks in dict.fromkeys(self._ranks)]

    def _of_rank(self, rank: int) -> StepCostModel:
        """Return the cost model of a rank of a stage."""
        return self._costs(self._ranks[rank]).keeping(self._alive(rank))

    def _costs(self, blocks: _Blocks) -> StepCostModel:
        """Return the cost model of some blocks; equal blocks share one."""
        if blocks not in self._known:
            model = self.model if self.split.pp == 1 else _of_blocks(self.model, blocks)
            self._known[blocks] = StepCostModel(model, self.grid, self.simulator)
        return self._known[blocks]

    def _alive(self, stage: int) -> float:
        """Return the micro-batches whose activations a rank of a stage keeps at once."""
        split = self.split
        count = self.model.micro_batches
        if split.pp == 1:
            return float(split.in_flight)
        if count < split.pp:  # the schedule is GPipe, which keeps all
            return float(count)
        return alive_micro_batches("1f1b", split.pp, split.parts, count, stage)

    def estimate(self, forward: Passes, backward: Passes) -> Estimate:
        """Return a step's predicted time.

        Args:
            forward: the forward pass of an MoE layer.
            backward: its backward pass.
        """
        if self.split.pp == 1:
            return self._distinct[0].estimate(forward, backward)
        estimates = [rank.estimate(forward, backward) for rank in self._distinct]
        busy = [rank.busy_seconds(forward, backward) for rank in self._distinct]
        slowest = estimates[busy.index(max(busy))]

        # the slowest rank waits while the pipeline fills and drains
        timed = self.timed(forward, backward)
        waits = max(timed.seconds - self.model.micro_batches * max(busy), 0.0)
        # all stages reduce and step; the slowest of them ends the step
        last_after = max(
            each.parts.get("parameters", 0.0) + each.parts.get("optimizer", 0.0)
            for each in estimates
        )
        waits += last_after - slowest.parts.get("parameters", 0.0) - slowest.parts["optimizer"]
        return Estimate(
            seconds=slowest.seconds + waits,
            parts={**slowest.parts, "pipeline": waits},
            limits=slowest.limits,
        )

    def estimate_of(self, compiled: Compiled, forward: Simulated, backward: Simulated) -> Estimate:
        """Return a step's predicted time, with the split's micro-batches in flight.

        Args:
            compiled: the plan of MoE layers.
            forward, backward: its simulated passes.
        """
        in_turn = self.estimate(forward, backward)
        if self.split.in_flight == 1:
            return in_turn
        layers = self.model.moe_layers
        pairs = self.model.micro_batches // 2
        before_forward, before_backward = self._distinct[0].between_seconds(forward, backward)
        forward_flight, backward_flight = self.flights(compiled, forward, backward)
        # What two micro-batches take in turn, less what they take in flight. In turn, each runs a
        # program and what lies before it in every layer.
        forward_saved = 2 * layers * (before_forward + forward.seconds) - forward_flight.seconds
        backward_saved = 2 * layers * (before_backward + backward.seconds) - backward_flight.seconds
        parts = dict(in_turn.parts)
        parts["moe forward"] -= pairs * forward_saved
        parts["moe backward"] -= pairs * backward_saved
        return Estimate(seconds=sum(parts.values()), parts=parts, limits=in_turn.limits)

    def flights(
        self, compiled: Compiled, forward: Simulated, backward: Simulated
    ) -> tuple[InFlight, InFlight]:
        """Return the forward and backward passes of two micro-batches in flight; arguments as of
        `estimate_of`."""
        layer = self.model.layer

        def flight(program: Program, between: float) -> InFlight:
            """Return the pass of a program, with `between` seconds of other work per layer."""
            return layers_in_flight(
                self.simulator,
                program,
                layer,
                compiled.grid,
                between=between,
                layers=self.model.moe_layers,
            )

        before_forward, before_backward = self._distinct[0].between_seconds(forward, backward)
        return flight(compiled.forward, before_forward), flight(compiled.backward, before_backward)

    def timed(self, forward: Passes, backward: Passes) -> Timed:
        """Return the passes of a step's micro-batches through the stages; arguments as of
        `estimate`."""
        # (forward, backward) seconds of each part; equal parts are computed once
        seconds_of = {
            part: self._costs(part).pass_seconds(forward, backward) for part in {*self._parts}
        }
        forward_seconds, backward_seconds = zip(*(seconds_of[part] for part in self._parts))
        return simulate_pipeline(
            self.split.pp,
            self.model.micro_batches,
            forward_seconds,
            backward_seconds,
            tuple(map(self._hop_seconds, range(len(self._parts)))),
            blocks_sender=self.cluster.host.runs_compute,
        )

    def _hop_seconds(self, part: int) -> float:
        """Return the seconds in which the ranks of a part send a micro-batch's activations to those
        of the next one.

        Stages have consecutive ranks. Activations between blocks have the bytes of parameters.
        """
        if part == len(self._parts) - 1:
            return 0.0
        ranks = self.grid.world
        per_node = self.cluster.devices_per_node
        stage = part % self.split.pp
        next_stage = (stage + 1) % self.split.pp
        # the nodes of the first ranks of both stages
        node = stage * ranks // per_node
        next_node = next_stage * ranks // per_node
        model = self.model
        return hop_seconds(
            self.cluster,
            model.layer.tokens * model.layer.dim * model.parameter_bytes,
            ranks,
            is_inside=node == next_node and ranks < per_node,
            message_us=self.cluster.host.message_us,
        )

    def memory(self, compiled: Compiled, sizes: CallSizes | None = None) -> Memory:
        """Return the memory of the rank that needs most; arguments as of `step_memory`."""
        return self.rank_memory(*layer_bytes(self.simulator, self.model.layer, compiled, sizes))

    def rank_memory(self, kept_bytes: float, buffers: float) -> Memory:
        """Return the memory of the rank that needs most, from the bytes of one MoE layer.

        Args:
            kept_bytes: bytes that the layer keeps for backward.
            buffers: bytes that it needs while it runs.
        """
        memories = [rank_memory(rank, kept_bytes, buffers) for rank in self._fullest]
        most = max(memories, key=lambda memory: memory.total)
        # of two micro-batches in flight, two calls and two losses are alive, and FSDP2 gathers two
        # blocks
        return replace(most, buffers=self.split.in_flight * most.buffers)

    @cached_property
    def least_bytes(self) -> float:
        """Bytes that a rank needs under any lossless plan."""
        return max(map(least_bytes_of_plans, self._fullest))

    @cached_property
    def bound_seconds(self) -> float:
        """Step time of a perfect plan: the computing of the busiest stage, or
        `StepCostModel.link_bound`, whichever is longer."""
        return max(max(rank.compute_bound, rank.link_bound) for rank in self._distinct)

    @cached_property
    def moving_seconds(self) -> float:
        """Seconds per step in which parameters and gradients move, without overlap."""
        return max(rank.moving_seconds for rank in self._distinct)

    def floor(self, *, compression: float = 1.0) -> float:
        """Return a lower bound on the seconds of any plan on this layout; see
        `StepCostModel.floor`."""
        floors = {rank: rank.floor(compression=compression) for rank in self._distinct}
        if self.split.parts > 1:  # only the work of each rank itself
            return max(floors.values())
        # The first micro-batch passes the stages before a rank, and its gradients pass them again
        # after the rank's last micro-batch.
        count = self.model.micro_batches
        before = 0.0  # seconds of one micro-batch in the stages before the rank, there and back
        most = 0.0
        for rank in map(self._costs, self._ranks):
            most = max(most, before + floors[rank])
            before += (floors[rank] - rank.optimizer_seconds) / count
        return most


def _sharded(model: StepModel, grid: Grid, split: JobSplit) -> StepModel:
    """Return a model whose parameters are shared and held as a split says."""
    num_shards = (1, 1)  # of dense parameters, and of experts; "none": everything whole
    if split.shard == "all":
        num_shards = (grid.dp, grid.edp)
    elif split.shard == "node":
        num_shards = _node_shards(grid)
    dense_shards, expert_shards = num_shards
    return _held_as(
        model,
        split.hold,
        replicas=grid.dp // dense_shards,
        expert_replicas=grid.edp // expert_shards,
    )


@lru_cache(maxsize=1024)
def _held_as(model: StepModel, held: Held, replicas: int, expert_replicas: int) -> StepModel:
    """Return a model that is held in another way; layouts share the results."""
    return replace(model, held=held, replicas=replicas, expert_replicas=expert_replicas)


class _Blocks(NamedTuple):
    """Blocks of a stage, or of a part of it."""

    layers: int
    """Number of blocks."""
    sparse: int
    """Number of these that have an MoE layer."""
    has_table: bool
    """Whether the embedding or the output belongs to them."""
    is_last: bool
    """Whether the output does."""


@lru_cache(maxsize=1024)
def _of_blocks(whole: StepModel, blocks: _Blocks) -> StepModel:
    """Return the model of some blocks of a whole model; layouts share the results."""
    return replace(
        whole,
        num_layers=blocks.layers,
        sparse_layers=blocks.sparse,
        vocab=whole.vocab if blocks.has_table else 0,
        embeddings=1,  # the embedding or the output: they are on different stages
        outputs=whole.outputs if blocks.is_last else 0,
    )


def _joined(parts: Sequence[_Blocks]) -> _Blocks:
    """Return the blocks of several parts as one."""
    return _Blocks(
        layers=sum(part.layers for part in parts),
        sparse=sum(part.sparse for part in parts),
        has_table=any(part.has_table for part in parts),
        is_last=any(part.is_last for part in parts),
    )


@lru_cache(maxsize=256)
def _parts_of(
    whole: StepModel, is_sparse: tuple[bool, ...], pp: int, parts_per_stage: int
) -> list[_Blocks]:
    """Return the blocks of each part, in their order, cut as the trainer does; layouts share the
    results.

    Args:
        whole: the model of a step with all blocks.
        is_sparse: whether each block has an MoE layer.
        pp: stages.
        parts_per_stage: parts of each of them.
    """
    if pp == 1:
        return [_Blocks(whole.num_layers, whole.moe_layers, has_table=True, is_last=True)]
    operations, parameters = _operations_and_parameters(whole, is_sparse)
    cuts = _cuts(operations, parameters, count=pp * parts_per_stage)
    last = len(cuts) - 1
    parts = []
    for number, blocks in enumerate(cuts):
        sparse = sum(is_sparse[blocks.start : blocks.stop])
        has_table = number in (0, last)
        parts.append(_Blocks(len(blocks), sparse, has_table, is_last=number == last))
    return parts


class _Loads(NamedTuple):
    """Operations or parameters of a model."""

    blocks: tuple[float, ...]
    """Of each block."""
    ends: tuple[float, float]
    """Of the embedding, and of the output."""


def _operations_and_parameters(
    whole: StepModel, is_sparse: Sequence[bool]
) -> tuple[_Loads, _Loads]:
    """Return the operations per token and the parameters of a whole model; they do not depend on
    the layout. `is_sparse` says of each block whether it has an MoE layer."""
    layer = whole.layer
    expert = layer.matrices * layer.dim * layer.hidden
    shared = layer.matrices * layer.dim * whole.shared_hidden
    router = layer.dim * layer.num_experts
    dense = layer.matrices * layer.dim * whole.inner

    # parameters of a block: those that a token uses, and all
    used_by_sparse = whole.attention + (router + shared + layer.top_k * expert)
    all_of_sparse = whole.attention + (router + shared + layer.num_experts * expert)
    all_of_dense = whole.attention + dense
    used = [used_by_sparse if sparse else all_of_dense for sparse in is_sparse]
    parameters = [all_of_sparse if sparse else all_of_dense for sparse in is_sparse]

    table = whole.vocab * layer.dim
    operations = _Loads(
        blocks=tuple(2.0 * each + whole.scores for each in used),
        ends=(0.0, 2.0 * table * whole.outputs),
    )
    return operations, _Loads(blocks=tuple(parameters), ends=(table, table))


@lru_cache(maxsize=64)
def _cuts(operations: _Loads, parameters: _Loads, count: int) -> list[range]:
    """Return which blocks each part has, by the operations and the parameters of each block."""
    return cut(operations.blocks, parameters.blocks, count, operations.ends, parameters.ends)


def split_choices(
    job: Job, cluster: ClusterSpec, most_stages: int, pp: int | None = None
) -> list[JobSplit]:
    """Return the splits into stages of one part that fit a job and a cluster: `pp`, or the powers
    of two up to `most_stages`.

    Raises:
        InputError: if a given number of stages does not fit.
    """
    powers_of_two = [1 << power for power in range(most_stages.bit_length())]  # up to `most_stages`
    counts = [pp] if pp is not None else powers_of_two
    fitting = []
    for count in counts:
        # a rank of a stage then has as many sequences of a micro-batch as without stages
        split = JobSplit(pp=count, finer=math.gcd(count, job.batch_size))
        if cluster.world % count == 0 and split.fits(job):
            fitting.append(split)
    if not fitting:
        raise InputError(
            f"pp {pp} does not divide {cluster.world} devices, or is more than the "
            f"{job.model.num_layers} blocks of the model: choose another number of stages"
        )
    return fitting


def near_splits(split: JobSplit, job: Job) -> Iterator[JobSplit]:
    """Yield the splits that differ in the parts of a stage or in the size of micro-batches, by a
    factor of two."""
    if split.pp == 1:
        return
    changed = [replace(split, parts=split.parts * 2)]
    if split.parts > 1:
        changed.append(replace(split, parts=split.parts // 2))
    changed.append(replace(split, finer=split.finer * 2))
    if split.finer > 1:
        changed.append(replace(split, finer=split.finer // 2))
    for each in changed:
        if each.fits(job):
            yield each
