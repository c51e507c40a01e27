"""Time and memory of a training step: attention and dense layers, MoE layers, parameters, optimizer.

MoE layers are simulated; the rest of a step is added up here, for one layout. Parameters, gradients and moments are
sharded over all data-parallel ranks, as `moesaic train` does with FSDP2: dense ones over dp, experts over edp. In every
micro-batch they are gathered before each block, forward and backward, and gradients are scattered after it. So many
copies of the experts cost no memory but traffic, which decides whether ep = 1 wins.

If the forward pass of one micro-batch overlaps the backward pass of another, `together` joins the two programs of a
layer into one. Neither waits for the other, so one can send while the other computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.call_sizes import node_tokens_per_node
from moesaic.planner.cluster import ELEMENT_BYTES, ClusterSpec, Link
from moesaic.planner.compute import rates_of
from moesaic.planner.memory import Memory, layer_memory
from moesaic.planner.pipeline import PassSeconds
from moesaic.planner.simulate import Simulator
from moesaic.planner.step_model import COSTS, Part, StageRun, StepModel
from moesaic.planner.timing import Simulated
from moesaic.planner.topology import Topology, check_fit
from moesaic.program.grid import Grid
from moesaic.program.order.graph import predecessors
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Kind, Op, Program, Slot, Stage, Task
from moesaic.program.timeline import IDLE, Free, durations, place

BEFORE, BEHIND = "before", "behind"
"""Names of the tasks that stand for the rest of a block. The caller knows their durations."""


def together(forward: Program, backward: Program) -> Program:
    """Return one program that contains both, with slots and tasks kept apart by name prefixes.

    Args:
        forward: forward program of one micro-batch; the task `BEFORE` writes its input tokens.
        backward: backward program of another micro-batch; the task `BEHIND` reads its output tokens.
    """
    first, second = _named(forward, "forward"), _named(backward, "backward")
    entering, leaving = _tokens(first, first.inputs), _tokens(second, second.outputs)
    behind = replace(leaving[0], name=f"{BEHIND} done")
    before = Task(name=BEFORE, op=Op.ADD, reads=(), writes=tuple(slot.name for slot in entering), stage=Stage.ROUTE)
    after = Task(
        name=BEHIND, op=Op.ADD, reads=tuple(slot.name for slot in leaving), writes=(behind.name,), stage=Stage.COMBINE
    )
    return Program(
        name=f"{forward.name} beside {backward.name}",
        slots=(*first.slots, *second.slots, behind),
        tasks=(before, *first.tasks, *second.tasks, after),
        inputs=tuple(name for name in (*first.inputs, *second.inputs) if name not in before.writes),
        outputs=(*first.outputs, *second.outputs, behind.name),
    )


def soonest_first(program: Program, seconds: Mapping[str, float]) -> Program:
    """Return the program in the order of list scheduling: of the tasks that are ready, the one that can start soonest.

    Args:
        program: the program; its order decides among tasks that can start at the same time.
        seconds: duration of each task by name.
    """
    lengths, needs = durations(program, seconds), [set(waits) for waits in predecessors(program)]
    ends, free, order = [0.0] * len(lengths), IDLE, list[int]()
    waiting = list(range(len(lengths)))

    def placed(number: int, free: Free) -> tuple[Free, float]:
        ready = max((ends[other] for other in needs[number]), default=0.0)
        return place(free, program.tasks[number].lane, lengths[number], ready, host_runs_compute=False)

    while waiting:
        ready = [(placed(each, free)[1], each) for each in waiting if needs[each] <= {*order}]
        number = min(ready)[1]
        free, start = placed(number, free)
        ends[number] = start + lengths[number]
        order.append(number)
        waiting.remove(number)
    return replace(program, tasks=tuple(program.tasks[number] for number in order))


def _named(program: Program, prefix: str) -> Program:
    def prefixed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{prefix} {name}" for name in names)

    def renamed(task: Task) -> Task:
        ends = None if task.of is None else (f"{prefix} {task.of[0]}", f"{prefix} {task.of[1]}")
        return replace(
            task, name=f"{prefix} {task.name}", reads=prefixed(task.reads), writes=prefixed(task.writes), of=ends
        )

    slots = tuple(replace(slot, name=f"{prefix} {slot.name}") for slot in program.slots)
    tasks = tuple(map(renamed, program.tasks))
    return replace(
        program, slots=slots, tasks=tasks, inputs=prefixed(program.inputs), outputs=prefixed(program.outputs)
    )


def _tokens(program: Program, names: tuple[str, ...]) -> list[Slot]:
    return [slot for slot in program.slots if slot.name in names and slot.kind is Kind.TOKENS]


ONCE_PER_STEP = ("parameters", "optimizer")
"""Parts of a step that do not depend on the pipeline schedule."""


@dataclass(frozen=True, kw_only=True)
class ForwardSeconds:
    """Seconds of the forward pass of one micro-batch."""

    attention: float
    """Attention part of a block, in total."""
    projections: float
    """Of `attention`: products with parameters."""
    scores: float
    """Of `attention`: products of queries and keys, and of scores and values."""
    up: float
    """The up-projections of low-rank attention."""
    copies: float
    """Of `attention`: norms and residuals."""
    dense: float
    """A dense feed-forward layer, in total."""
    dense_product: float
    """Of `dense`: products."""
    unembed: float
    """The output projection, and a third of the loss's forward and backward seconds."""
    shared: float
    """Shared experts of a layer, which every rank of a tensor-parallel group computes in full."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted time of a step under a plan."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part; the parts sum to `seconds`."""
    limits: dict[str, float]
    """Lower bounds on the seconds of a step, one per resource: computation, a link, gathering parameters."""

    @property
    def bottleneck(self) -> str:
        """Name of the largest limit."""
        return max(self.limits, key=lambda name: self.limits[name])


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of several steps under one plan: of their times, parts and limits."""

    def mean(tables: list[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for table in tables for name in table)
        return {name: sum(table.get(name, 0.0) for table in tables) / len(tables) for name in names}

    return Estimate(
        seconds=sum(estimate.seconds for estimate in estimates) / len(estimates),
        parts=mean([estimate.parts for estimate in estimates]),
        limits=mean([estimate.limits for estimate in estimates]),
    )


class StepCostModel:
    """Predicts the time and memory of steps on one layout.

    Args:
        model: the model and how it is trained.
        grid: the layout.
        simulator: of the cluster. The simulator of a profile predicts MoE layers from measurements.

    Raises:
        InputError: if the layout does not fit the cluster, or the dtype's rate is unknown.
    """

    def __init__(self, model: StepModel, grid: Grid, simulator: Simulator) -> None:
        self.model, self.grid, self.simulator, self.cluster = model, grid, simulator, simulator.cluster
        check_fit(self.cluster, grid.world, grid.ranks_per_node)
        if grid.dp % model.replicas or grid.edp % model.replicas:
            raise InputError(
                f"{model.replicas} replicas of the shards do not divide {grid.dp} data-parallel groups and {grid.edp} replicas "
                "of the experts: choose a divisor of both"
            )
        self._rates = rates_of(self.cluster, model.layer.dtype)
        self.forward = self._block_seconds()
        self._block_stepwise, self._layer_stepwise = self._stepwise_seconds()
        layers, dense = model.num_layers, model.num_layers - model.moe_layers
        self.attention = layers * (3 * self.forward.attention + self._attention_recomputed)
        self.dense = dense * (3 + self._recomputes("mlp")) * self.forward.dense
        self.unembed = 3 * model.outputs * self.forward.unembed
        self.shared = model.moe_layers * (3 + self._recomputes("moe", "shared_experts")) * self.forward.shared
        self.small = layers * self._block_small_kernels + model.moe_layers * self._layer_small_kernels
        """Seconds per micro-batch in small kernels."""
        self.routing = simulator.timing.around_seconds
        """Seconds of an MoE layer outside its programs, forward and backward, if measured. A recomputed forward pass
        replays its routing, which counts nothing."""

    def _recomputes(self, *parts: Part) -> bool:
        """Return whether backward recomputes any of some parts."""
        return any(part in self.model.recomputed for part in ("block", *parts))

    @property
    def _attention_recomputed(self) -> float:
        """Seconds per block for which backward recomputes attention and norms."""
        if self._recomputes():
            return self.forward.attention
        seconds_by_part = {
            "core_attn": self.forward.scores,
            "mla_up_proj": self.forward.up,
            "layernorm": 0.4 * self.forward.copies,
        }
        return sum(seconds for part, seconds in seconds_by_part.items() if part in self.model.recomputed)

    @property
    def _block_small_kernels(self) -> float:
        """Seconds per block in small kernels, including those that backward recomputes."""
        forward, backward = self._block_stepwise
        return (1 + self._recomputes()) * forward + backward

    @property
    def _layer_small_kernels(self) -> float:
        """Seconds per MoE layer in small kernels, including those that backward recomputes."""
        forward, backward = self._layer_stepwise
        return self.forward_passes * forward + backward

    @property
    def forward_passes(self) -> int:
        """Forward passes of an MoE layer per micro-batch: 2 if backward recomputes."""
        return 1 + self._recomputes("moe")

    def estimate(self, forward: Simulated, backward: Simulated, overlapped: Simulated | None = None) -> Estimate:
        """Return a step's predicted time.

        Args:
            forward: the forward program of an MoE layer.
            backward: its backward program.
            overlapped: both programs overlapped, of two micro-batches, from `simulate_overlapped`. Read only if the
                model is `overlapped`.
        """
        count, layers = self.model.micro_batches, self.model.moe_layers
        overlap_factor = 1.0
        if self.model.overlapped and overlapped is not None:
            overlap_factor = (overlapped.seconds - 3 * self.forward.attention) / (forward.seconds + backward.seconds)
        forward_seconds, backward_seconds = (
            (self.forward_passes - 1 + overlap_factor) * forward.seconds,
            overlap_factor * backward.seconds,
        )
        parts = {
            "attention": count * self.attention,
            "dense": count * self.dense,
            "unembed": count * self.unembed,
            "shared experts": count * self.shared,
            "small kernels": count * self.small,
            "routing": count * layers * self.routing,
            "moe forward": count * layers * forward_seconds,
            "moe backward": count * layers * (backward_seconds + self._activation_recomputed),
            "parameters": count * self._exposed_seconds(forward, backward)
            if self._gathers_per_block
            else self._exposed_seconds_once(forward, backward),
            "optimizer": self.optimizer_seconds,
        }
        pipeline_factor = 1.0
        if self.model.pipeline.ranks > 1:
            busy = sum(parts.values()) - parts["parameters"] - parts["optimizer"]
            separate = busy + count * layers * (1 - overlap_factor) * (forward.seconds + backward.seconds)
            laid_out = self.model.pipeline.laid_out(
                count, self._pass_seconds(forward, backward, separate / count, busy / count)
            )
            # Ranks with fewer blocks than `num_layers` are busy for less. If almost nothing waits, no rank is busy that long.
            pipeline_factor = min(laid_out.seconds / busy, 1.0)
            parts = {
                name: seconds * (1.0 if name in ONCE_PER_STEP else pipeline_factor) for name, seconds in parts.items()
            }
            parts["pipeline"] = max(laid_out.seconds - busy, 0.0)
        experts = layers * (self.routing + self.forward_passes * forward.compute_seconds + backward.compute_seconds)
        computing = pipeline_factor * count * (self._around_seconds + experts) + self.optimizer_seconds
        limits = {"compute": computing, "gathering parameters": self._num_gatherings * sum(self.sharding.values())}
        for name in sorted({*forward.link_seconds, *backward.link_seconds}):
            seconds = self.forward_passes * forward.link_seconds.get(name, 0.0) + backward.link_seconds.get(name, 0.0)
            limits[name] = pipeline_factor * count * layers * seconds
        return Estimate(
            seconds=sum(parts.values()),
            parts={name: seconds for name, seconds in parts.items() if seconds > 0},
            limits=limits,
        )

    def simulate_overlapped(self, forward: Program, backward: Program, grid: Grid) -> Simulated:
        """Simulate the MoE programs of two micro-batches at once.

        Attention precedes the forward program and follows the backward program. All tasks form one program in which
        the task that can start soonest comes next, so one micro-batch can send while the other computes, as in DualPipe
        (DeepSeek-V3, section 3.2.1) and Megatron.

        Args:
            forward: the lowered program of an MoE layer.
            backward: the lowered program of its gradients.
            grid: the layout, with etp factored as the plan requires.
        """
        joined, layer = together(forward, backward), self.model.layer
        known = {BEFORE: self.forward.attention, BEHIND: 2 * self.forward.attention}
        seconds = self.simulator.durations(joined, layer, grid) | known
        return self.simulator.run(soonest_first(joined, seconds), layer, grid, known=known)

    def _run_seconds(self, run: StageRun, forward: Simulated, backward: Simulated) -> float:
        """Return the seconds of a micro-batch in a run of layers, forward and backward."""
        model, seconds = self.model, self.forward
        dense = (run.blocks - run.sparse) * (3 + self._recomputes("mlp")) * seconds.dense
        sparse = self.forward_passes * forward.seconds + backward.seconds + self._activation_recomputed + self.routing
        sparse += (3 + self._recomputes("moe", "shared_experts")) * seconds.shared
        sparse += self._layer_small_kernels
        around = run.blocks * (3 * seconds.attention + self._attention_recomputed + self._block_small_kernels) + dense
        # `model` gives every rank of the pipeline an equal part of the output.
        return around + run.sparse * sparse + 3 * run.outputs * seconds.unembed * model.pipeline.ranks

    def _pass_seconds(self, forward: Simulated, backward: Simulated, separate: float, overlapped: float) -> PassSeconds:
        """Return the seconds of the passes of one run of layers.

        Args:
            forward: the forward program of an MoE layer.
            backward: its backward program.
            separate: seconds of a micro-batch by itself, forward and backward.
            overlapped: the same while overlapped with another micro-batch.
        """
        model, seconds = self.model, self.forward
        dense = model.num_layers - model.moe_layers
        ends = model.outputs * seconds.unembed
        forward_seconds = model.num_layers * seconds.attention + dense * seconds.dense + ends
        forward_seconds += model.moe_layers * (seconds.shared + forward.seconds + self.routing / 3)
        forward_seconds += model.num_layers * self._block_stepwise[0] + model.moe_layers * self._layer_stepwise[0]
        weight_seconds = model.num_layers * seconds.projections + dense * seconds.dense_product + ends
        weight_seconds += model.moe_layers * (seconds.shared + self._expert_seconds)
        # If a schedule does not pair passes, the time saved by overlapping is spread over all passes.
        factor = (1.0 if model.pipeline.pairs else overlapped / separate) / model.pipeline.parts
        separate_run = separate / model.pipeline.parts
        values = model.layer.tokens * model.layer.dim * model.layer.element_bytes
        return PassSeconds(
            forward=factor * forward_seconds,
            inputs=factor * max(separate - forward_seconds - weight_seconds, 0.0),
            weights=factor * weight_seconds,
            together=overlapped / model.pipeline.parts,
            shares=tuple(self._run_seconds(run, forward, backward) / separate_run for run in model.runs),
            hop=self._hop_seconds(values / (self.grid.tp if model.sequence_parallel else 1)),
        )

    def _hop_seconds(self, num_bytes: float) -> float:
        """Return the seconds in which all ranks of a stage send `num_bytes` each to the ranks of the next stage."""
        inside = self.grid.world < self.cluster.devices_per_node
        links = [link for link in self.cluster.links if link.carries in ("all", "inside" if inside else "outside")]
        seconds = (
            num_bytes * min(link.devices, self.grid.world) / link.slowest(self.cluster.nodes) + link.latency_us * 1e-6
            for link in links
        )
        return max(seconds, default=0.0)

    def memory(
        self,
        forward: Program,
        backward: Program,
        grid: Grid,
        *,
        memory_budget: int | None = None,
        sizes: CallSizes | None = None,
    ) -> Memory:
        """Return the memory of a rank.

        Besides its feed-forward layer, a block keeps what attention keeps and the inputs of two norms (Korthikanti et
        al. 2022, section 4.1, with fused scores). A recomputed part keeps only its input. Narrow products read weights
        by rows and by columns, which takes two copies besides the wide ones. They keep their inputs by columns only, in
        place of wide values that nothing else needs (Transformer Engine, "FP8 weight caching" and "Handling
        transposes").

        Args:
            forward: the lowered program of an MoE layer.
            backward: the lowered program of its gradients.
            grid: the layout, with etp factored as the plan requires.
            memory_budget: most bytes that a layer may hold.
            sizes: of a call of the forward program; the rank with the most rows counts. None: even routing.
        """
        model, layer = self.model, self.model.layer
        volumes = self.simulator.volumes(forward, layer, grid, sizes=sizes)
        kept_bytes, buffers = layer_memory(forward, backward, volumes, memory_budget)
        activations = self._kept_bytes(kept_bytes)
        narrow = 2 * self._narrow_bytes
        logits = layer.tokens * model.vocab * 4 / grid.tp if model.outputs else 0.0
        size, held_parameters = model.parameter_bytes, self._held_parameters
        if not self._gathers_per_block:
            whole_parameters = self._whole_parameters
            return Memory(
                weights=whole_parameters * layer.element_bytes + narrow * self._multiplied_parameters,
                # Sharded gradients of one block are whole while they are reduced.
                gradients=(
                    held_parameters + sum(self._block_parameters) if model.sharded == "gradients" else whole_parameters
                )
                * size,
                optimizer=self._stepped_parameters * 3 * size,
                activations=activations,
                buffers=buffers + logits,
            )
        dense, experts = self._block_parameters
        cast = experts * layer.element_bytes if layer.element_bytes != size else 0.0
        kept_casts = 1 if self._recomputes() else model.moe_layers
        gathered = dense * (self._num_shards[0] > 1) + experts * (self._num_shards[1] > 1)
        return Memory(
            weights=held_parameters * size,
            gradients=held_parameters * size,
            optimizer=held_parameters * 2 * size,
            activations=activations + kept_casts * cast,
            # two blocks' parameters, one block's gradients, and one block's narrow weights
            buffers=buffers + logits + 3 * gathered * size + narrow * (dense + experts),
        )

    def _kept_bytes(self, moe_bytes: float) -> float:
        """Return the bytes that a rank keeps from forward to backward passes.

        Args:
            moe_bytes: bytes that one MoE layer's program keeps.
        """
        model, layer, recomputed = self.model, self.model.layer, self.model.recomputed
        row, dim = layer.tokens * layer.element_bytes / self.grid.tp, layer.dim
        # Bytes of a product's kept input over those of a wide value: normed inputs, experts' rows, activations' results.
        read = self._narrow_bytes / layer.element_bytes or 1.0
        attention = (model.attention_kept or 5.5 * dim) - model.attention_up_kept * ("mla_up_proj" in recomputed)
        around = (attention + 2 * dim - dim * ("layernorm" in recomputed) - dim * (1 - read)) * row
        inner = layer.matrices - 1 + model.keeps_activated * read
        dense = (dim + inner * model.inner * ("mlp" not in recomputed)) * row
        shared = inner * model.shared_hidden * layer.tokens * layer.element_bytes * ("shared_experts" not in recomputed)
        activated = (
            self._activated_values
            * layer.element_bytes
            * (model.keeps_activated and "moe_act" not in recomputed)
            * read
        )
        activated -= self._activated_values / layer.hidden * self.grid.etp * dim * layer.element_bytes * (1 - read)
        sparse = dim * row if "moe" in recomputed else moe_bytes + activated + shared
        recomputed_norms = dim * row * ("layernorm" in recomputed)
        alive = model.alive or model.pipeline.copies * max(model.pipeline.alive(model.micro_batches))
        if "block" in recomputed:
            return alive * model.num_layers * dim * row + around + max(sparse, dense)
        dense_layers = model.num_layers - model.moe_layers
        blocks = model.num_layers * (around - recomputed_norms) + model.moe_layers * sparse + dense_layers * dense
        return alive * blocks

    @property
    def _narrow_bytes(self) -> float:
        """Bytes of a value that narrow products read, including its share of a scale; 0 if products are not narrow."""
        products = self.model.layer.products
        if products is None or ELEMENT_BYTES[products] >= self.model.layer.element_bytes:
            return 0.0
        return ELEMENT_BYTES[products] * (1 + (1 / 32 if products == "mxfp8" else 0.0))

    @property
    def _multiplied_parameters(self) -> float:
        """Parameters of a rank that narrow products read: all but embeddings, output and routers."""
        model = self.model
        wide = (
            model.embeddings * model.vocab * model.layer.dim
            + model.moe_layers * model.layer.dim * model.layer.num_experts
        )
        return self._whole_parameters - model.pipeline.copies * wide / self.grid.tp

    @property
    def _activated_values(self) -> float:
        """Values of a rank's experts between activation and last matrix, in one MoE layer."""
        layer, grid = self.model.layer, self.grid
        return grid.dp * layer.copies / (grid.ep * grid.edp) * layer.hidden / grid.etp

    @property
    def _activation_recomputed(self) -> float:
        """Seconds of recomputing only the activation of an MoE layer: for SwiGLU two values are read and one is written."""
        values = self._activated_values * ("moe_act" in self.model.recomputed and self.forward_passes == 1)
        return self.model.layer.matrices * values * self.model.layer.element_bytes / self._rates.memory

    @property
    def least_bytes(self) -> float:
        """Bytes that a rank needs under any plan: parameters, gradients, moments, and the residual stream."""
        stream = self.model.layer.tokens * self.model.layer.dim * self.model.layer.element_bytes / self.grid.tp
        size = self.model.parameter_bytes
        if not self._gathers_per_block:
            gradients = self._held_parameters if self.model.sharded == "gradients" else self._whole_parameters
            whole_bytes = self._whole_parameters * self.model.layer.element_bytes + gradients * size
            return whole_bytes + self._stepped_parameters * 3 * size + self.model.num_layers * stream
        return self._held_parameters * 4 * size + self.model.num_layers * stream

    @cached_property
    def compute_bound(self) -> float:
        """Seconds of computation of a step, with each expert in one product."""
        passes = (self.forward_passes + 2) * self.model.moe_layers
        return self._outside_seconds + self.model.micro_batches * passes * self._expert_seconds

    @cached_property
    def link_bound(self) -> float:
        """Seconds of the busiest link of a step, parameters and gradients included, if every token crossed the link
        once for all experts behind it, or the weights did if they are fewer bytes."""
        count, passes = self.model.micro_batches, 2 * (self.forward_passes + 1) * self.model.moe_layers
        if not self._gathers_per_block:
            times = self._num_gatherings
            return max(
                [
                    0.0,
                    *(
                        count * passes * self._crossing_seconds(link) + times * self._sharding_seconds(link)
                        for link in self._links
                    ),
                ]
            )
        return max(
            [
                0.0,
                *(
                    count * (passes * self._crossing_seconds(link) + self._sharding_seconds(link))
                    for link in self._links
                ),
            ]
        )

    def floor(self, *, compression: float = 1.0) -> float:
        """Return a lower bound on the seconds of any plan on this layout.

        It sums the computation outside MoE layers, and for each pass of an MoE layer the largest of computing, crossing
        a link, and gathering parameters behind the pass.

        Crossing does not count on a profiled machine, where some bytes may pass a link before the last rank has reached
        the movement.

        Args:
            compression: bytes of a row over the bytes that a codec sends for it.
        """
        compute, crossing = self._expert_seconds, 0.0
        if not self.simulator.timing.starts_early and not self.model.overlapped:
            crossing = 2 * max([0.0, *map(self._crossing_seconds, self._links)]) / compression
        attention = self.forward.attention
        gathering = [
            (moves * sum(self._unit_seconds) - passes * attention) * self._gathers_per_block
            for passes, moves in ((1, self._gather_ratio), (2, self._gather_ratio + 1))
        ]
        passes = (self.forward_passes - 1) * max(compute, crossing)
        passes += max(compute, crossing, gathering[0]) + max(2 * compute, crossing, gathering[1])
        return self._outside_seconds + self.model.micro_batches * self.model.moe_layers * passes

    @cached_property
    def sharding(self) -> dict[str, float]:
        """Seconds per micro-batch of gathering parameters twice and scattering gradients, by kind of unit, without
        overlap."""
        (dense, experts), (dense_copies, expert_copies) = self._unit_seconds, self._copy_seconds
        model, moves = self.model, 2 * self._gather_ratio + 1
        ends = reduce_seconds(self.cluster, self.grid, self._root_bytes, self.grid.tp, self._num_shards[0]) / 2
        return {
            "dense": model.num_layers * (moves * dense + dense_copies),
            "experts": model.moe_layers * (moves * experts + expert_copies),
            "ends": moves * ends,
        }

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds in which an optimizer step reads and writes memory.

        For the parameters that a rank steps, gradients are read for their norm, read and written to clip them, and read
        together with parameters and two moments, which are written. If products read separate copies of the parameters,
        these are written from the masters. Whole gradients then lie in a buffer, which is averaged, checked for
        non-finite numbers, and zeroed (Megatron-LM, `core/optimizer` and `core/distributed/param_and_grad_buffer.py`).
        """
        size, stepped = self.model.parameter_bytes, self._stepped_parameters
        moved = stepped * 10 * size
        if not self._gathers_per_block:
            moved += stepped * (size + self.model.layer.element_bytes) + self._whole_parameters * 4 * size
        return moved / self._rates.memory

    @property
    def _outside_seconds(self) -> float:
        return self.model.micro_batches * self._around_seconds + self.optimizer_seconds

    @property
    def _around_seconds(self) -> float:
        """Seconds of computation of a micro-batch outside the programs of MoE layers."""
        return self.attention + self.dense + self.unembed + self.shared + self.small

    def _block_seconds(self) -> ForwardSeconds:
        """Return the seconds of one forward pass of each part of a block."""
        model, grid, layer = self.model, self.grid, self.model.layer
        tokens, dim, size = layer.tokens, layer.dim, layer.element_bytes
        rates, rows = rates_of(self.cluster, layer.products or layer.dtype), np.array([float(layer.tokens)])
        # The all-reduce at the end of a layer that is split over tp (Megatron-LM, Shoeybi et al. 2019).
        values = tokens * dim * size
        over_tp = (
            reduce_seconds(self.cluster, grid, values, 1, grid.tp)
            if model.sequence_parallel
            else all_reduce_seconds(self.cluster, grid, values, grid.tp)
        )

        def product(weights: float, num_parts: int, read: float) -> float:
            """Return the seconds of products with some parameters; `read` values of each row are cast if products are
            narrower."""
            seconds = rates.product_seconds(rows, 2 * weights / num_parts, weights * size / num_parts)
            return float(seconds[0]) + tokens * read * rates.cast_bytes / num_parts / rates.memory

        inner, hidden, logits = layer.matrices * dim * model.inner, model.shared_hidden, model.vocab / grid.tp
        copies = 10 * tokens * dim * size / grid.tp / self._rates.memory
        between = tokens * model.attention_copied * size / grid.tp / self._rates.memory
        scores = float(self._rates.product_seconds(rows, model.scores / grid.tp, 0.0)[0])
        scores /= self.cluster.device.scores.of(model.score_kernel, model.head_dim)
        # Keys and values of every other part of a sequence pass by behind the scores, once forward, and once backward with
        # their gradients (ring attention, Liu et al. 2023).
        other_values = tokens * (model.key_values or 2 * dim) * size * model.shares_sequence / grid.tp
        scores = max(scores, reduce_seconds(self.cluster, grid, other_values, grid.tp, model.shares_sequence) / 2)
        loss = tokens * logits * model.loss_bytes / self._rates.memory / 3
        output = float(self._rates.product_seconds(rows, 2 * dim * logits, dim * logits * size)[0])
        projections, dense = product(model.attention, grid.tp, 2 * dim), product(inner, grid.tp, dim + model.inner)
        return ForwardSeconds(
            attention=projections + scores + copies + between + over_tp,
            projections=projections,
            scores=scores,
            up=product(model.attention_up, grid.tp, 0.0) if model.attention_up else 0.0,
            copies=copies,
            dense=dense + copies / 2 + over_tp,
            dense_product=dense,
            unembed=loss + output if logits else 0.0,
            shared=product(layer.matrices * dim * hidden, 1, dim + hidden) if hidden else 0.0,
        )

    def _stepwise_seconds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the seconds per micro-batch that unfused small kernels take beyond fused ones (`planner/step_model.py`),
        forward and backward: of a block, and of an MoE layer."""
        model, grid, layer = self.model, self.grid, self.model.layer
        tokens, copies = layer.tokens / grid.tp, grid.dp * layer.copies / (grid.ep * grid.edp)
        launch, experts = self.cluster.host.task_us * 1e-6, layer.num_experts / grid.ep

        rotated = tokens * model.attention_rotated
        of_block = {
            "norms": tokens * (2 * layer.dim + model.attention_normed),
            **dict.fromkeys(("rotation", "float32_rotation", "complex_rotation"), rotated),
            "sinks": tokens * (model.attention_result or layer.dim),
        }
        of_layer = {
            "activation": self._activated_values,
            "permutation": copies * layer.dim,
            "first_bias": (layer.matrices - 1) * self._activated_values,
            "last_bias": copies * layer.dim,
        }

        def total(values: dict[str, float]) -> tuple[float, float]:
            names = [name for name in model.stepwise if name in values]
            seconds = [COSTS[name].seconds(values[name], self._rates.memory, launch, experts) for name in names]
            return sum(forward for forward, _ in seconds), sum(backward for _, backward in seconds)

        return total(of_block), total(of_layer)

    def _exposed_seconds(self, forward: Simulated, backward: Simulated) -> float:
        """Return the seconds per micro-batch in which parameters and gradients move and nothing else runs.

        A block's parameters are gathered while the previous block runs, whenever its movements leave the links idle. On
        a CPU, where one thread issues everything, nothing is hidden.
        """
        (dense, experts), (dense_copies, expert_copies) = self._unit_seconds, self._copy_seconds
        total = self.sharding["ends"]
        for layers, gathered, copied, passes_of_layer in (
            (self.model.moe_layers, dense + experts, dense_copies + expert_copies, (forward, backward)),
            (self.model.num_layers - self.model.moe_layers, dense, dense_copies, None),
        ):
            ratio = self._gather_ratio
            for passes, move_seconds, which in ((1, ratio * gathered, 0), (2, (ratio + 1) * gathered + copied, 1)):
                simulated = None if passes_of_layer is None else passes_of_layer[which]
                idle = 0.0 if simulated is None else max(simulated.seconds - simulated.communication_seconds, 0.0)
                hidden_seconds = 0.0 if self.cluster.host.runs_compute else idle + passes * self.forward.attention
                total += layers * max(move_seconds - hidden_seconds, 0.0)
        return total

    def _exposed_seconds_once(self, forward: Simulated, backward: Simulated) -> float:
        """Return the seconds of a step in which gradients or parameters move for the optimizer and nothing else runs.

        If the system hides them, gradients are reduced behind the last micro-batch's backward pass (sharded gradients
        behind each), and parameters are gathered behind the first forward pass. With nothing sharded, an all-gather of
        the gradients replaces the one of the parameters.
        """
        (dense, experts), (dense_copies, expert_copies) = self._unit_seconds, self._copy_seconds
        copies = self.model.pipeline.copies
        units = copies * (self.model.num_layers * dense + self.model.moe_layers * experts)
        units += self.sharding["ends"] / (2 * self._gather_ratio + 1)
        copied = copies * (self.model.num_layers * dense_copies + self.model.moe_layers * expert_copies)
        total, attention = 0.0, self.model.num_layers * self.forward.attention
        is_whole, each_time = self.model.sharded == "none", self.model.sharded == "gradients"
        # Each gradient takes parameter_bytes, each parameter element_bytes.
        model, narrow = self.model, self.model.layer.element_bytes / self.model.parameter_bytes
        for hides, run, passes, share, times in (
            (model.hides_parameters, forward, 1, 0.0 if is_whole else narrow, 1),
            (model.hides_gradients, backward, 2, 2.0 if is_whole else 1.0, model.micro_batches if each_time else 1),
        ):
            idle = passes * attention + self.model.moe_layers * max(run.seconds - run.communication_seconds, 0.0)
            moved = share * units + (copied if run is backward else 0.0)
            total += times * max(moved - (hides and not self.cluster.host.runs_compute) * idle, 0.0)
        return total

    @property
    def _gathers_per_block(self) -> bool:
        """Whether parameters are gathered for every block of every micro-batch."""
        return self.model.sharded == "parameters"

    @property
    def _gather_ratio(self) -> float:
        """Bytes of a gathered parameter over the bytes of its gradient."""
        return (self.model.gathered_bytes or self.model.parameter_bytes) / self.model.parameter_bytes

    @property
    def _num_gatherings(self) -> float:
        """How many times per step all parameters are gathered twice and gradients scattered once, or an equal number of
        bytes moves."""
        count, gathered = self.model.micro_batches, self._gather_ratio
        moves = {"gradients": count + gathered, "optimizer": 1 + gathered, "none": 2.0}
        return moves[self.model.sharded] / (2 * gathered + 1) if self.model.sharded in moves else count

    @property
    def _stepped_parameters(self) -> float:
        """Parameters that a rank's optimizer updates."""
        return self._whole_parameters if self.model.sharded == "none" else self._held_parameters

    @property
    def _whole_parameters(self) -> float:
        """Parameters of a rank before sharding over data-parallel ranks."""
        experts = self.model.expert_parameters / (self.grid.ep * self.grid.etp)
        return self.model.pipeline.copies * (
            self.model.dense_parameters / self.grid.tp + self._shared_parameters + experts
        )

    @cached_property
    def _unit_seconds(self) -> tuple[float, float]:
        """Seconds of gathering a block's dense parameters over dp, and its experts' over edp."""
        dense, experts = (
            reduce_seconds(self.cluster, self.grid, count * self.model.parameter_bytes, stride, shards) / 2
            for count, stride, shards in zip(self._block_parameters, self._strides, self._num_shards)
        )
        return dense, experts

    @property
    def _strides(self) -> tuple[int, int]:
        """Distance between the ranks that share the shards of dense parameters, and of experts."""
        return self.grid.tp, self.grid.ep * self.grid.etp

    @property
    def _num_shards(self) -> tuple[int, int]:
        """Number of ranks over which dense parameters, and experts, are sharded."""
        return self.grid.dp // self.model.replicas, self.grid.edp // self.model.replicas

    @cached_property
    def _copy_seconds(self) -> tuple[float, float]:
        """Seconds in which the replicas of shards all-reduce a block's dense gradients, and its experts'."""
        size, copies = self.model.parameter_bytes, self.model.replicas
        dense, experts = (
            reduce_seconds(self.cluster, self.grid, count * size / shards, stride * shards, copies)
            for count, stride, shards in zip(self._block_parameters, self._strides, self._num_shards)
        )
        return dense, experts

    @property
    def _block_parameters(self) -> tuple[float, float]:
        """Parameters of a block on a rank before sharding over data-parallel ranks: dense ones, and experts'."""
        model, layer = self.model, self.model.layer
        dense = (model.dense_parameters - model.embeddings * model.vocab * layer.dim) / model.num_layers / self.grid.tp
        dense += self._shared_parameters / model.num_layers
        # A stage of dense blocks alone has no experts.
        return dense, model.expert_parameters / max(model.moe_layers, 1) / (self.grid.ep * self.grid.etp)

    @property
    def _root_bytes(self) -> float:
        """Bytes of a rank's parameters of embedding and output."""
        return (
            self.model.embeddings * self.model.vocab * self.model.layer.dim / self.grid.tp * self.model.parameter_bytes
        )

    @property
    def _shared_parameters(self) -> int:
        """Parameters of all shared experts, which every rank of a tensor-parallel group holds in full."""
        layer = self.model.layer
        return self.model.shared_hidden * layer.matrices * layer.dim * self.model.moe_layers

    @property
    def _held_parameters(self) -> float:
        dense = self.model.dense_parameters / self.grid.tp + self._shared_parameters
        per_replica = dense / self.grid.dp + self.model.expert_parameters / self.grid.world
        return self.model.pipeline.copies * self.model.replicas * per_replica

    @cached_property
    def _expert_seconds(self) -> float:
        """Seconds of one forward pass of a rank's experts, each in one product."""
        layer, grid = self.model.layer, self.grid
        rows = np.array([grid.dp * layer.copies / layer.num_experts / grid.edp])
        work = layer.matrices * layer.dim * layer.hidden / grid.etp
        rates = rates_of(self.cluster, layer.products or layer.dtype)
        seconds = rates.product_seconds(rows, 2.0 * work, work * layer.element_bytes)
        return float(seconds[0]) * layer.num_experts / grid.ep

    @property
    def _links(self) -> list[Link]:
        """Levels that every message out of a run of devices crosses."""
        crosses = self.grid.world > self.cluster.devices_per_node
        return [
            link for link in self.cluster.links
            if not link.shared and link.carries != "inside" and link.devices <= self.cluster.devices_per_node
            and (crosses or link.carries == "all")
            and not (self.cluster.peers and link.devices < self.cluster.devices_per_node)
        ]  # fmt: skip

    def _crossing_seconds(self, link: Link) -> float:
        """Return the seconds for which a link is busy in one direction if each token crosses it once, or the experts'
        weights do."""
        layer, grid = self.model.layer, self.grid
        devices = self._devices_behind(link)
        runs = grid.ep * grid.etp // devices
        elsewhere = runs - max(1, grid.tp // devices)
        if elsewhere <= 0 or layer.num_experts < runs:
            return 0.0
        tokens = node_tokens_per_node(layer, runs, 1) * elsewhere * grid.dp * devices / grid.world
        weights = layer.matrices * layer.hidden * layer.num_experts * (1 - 1 / runs)
        num_bytes = min(tokens, weights) * layer.dim * layer.element_bytes * link.devices / devices
        return num_bytes / link.slowest(self.cluster.nodes)

    def _sharding_seconds(self, link: Link) -> float:
        """Return the seconds per micro-batch for which gathering parameters and scattering gradients keep a link busy."""
        dense, experts = (count * self.model.parameter_bytes for count in self._block_parameters)
        over_dp, over_edp = zip(self._strides, (self.grid.dp, self.grid.edp))
        units = (
            (self.model.num_layers * dense, *over_dp),
            (self.model.moe_layers * experts, *over_edp),
            (self._root_bytes, *over_dp),
        )
        total, devices = 0.0, self._devices_behind(link)
        for num_bytes, stride, ranks in units:
            inside = min(ranks, max(1, devices // stride))
            total += devices / inside * num_bytes * (1 - inside / ranks)
        return (2 * self._gather_ratio + 1) * total * link.devices / devices / link.slowest(self.cluster.nodes)

    def _devices_behind(self, link: Link) -> int:
        """Return the number of devices that share a link. A link that only carries messages out of a node counts for
        the whole node, evenly."""
        return self.cluster.devices_per_node if link.carries == "outside" else link.devices


def reduce_seconds(cluster: ClusterSpec, grid: Grid, num_bytes: float, stride: int, ranks: int) -> float:
    """Return the seconds of an all-reduce in every group of ranks that are `stride` apart, all groups at once.

    It consists of a reduce-scatter inside nodes, an all-reduce between ranks of equal place, and an all-gather inside
    nodes, all three overlapping.

    Args:
        cluster: gives the links.
        grid: the mesh.
        num_bytes: bytes of one rank's gradients.
        stride: distance from one rank of a group to the next.
        ranks: ranks of a group.
    """
    if ranks == 1 or num_bytes == 0:
        return 0.0
    per_node = grid.ranks_per_node or grid.world
    topology = Topology(cluster, grid.world, grid.ranks_per_node, block=per_node)
    inside = min(ranks, max(1, per_node // stride))
    nodes = ranks // inside
    devices = np.arange(per_node)
    mates = devices // (stride * inside) * (stride * inside) + (devices + stride) % (stride * inside)
    rings = [
        (target, 2 * (count - 1) / count * num_bytes / parts, 2.0 * (count - 1))
        for target, count, parts in ((mates, inside, 1), (devices + max(per_node, stride), nodes, inside))
        if count > 1
    ]
    targets, sent, messages = zip(*rings)
    return topology.loads(
        np.tile(devices, len(rings)), np.concatenate(targets), np.repeat(sent, per_node), np.repeat(messages, per_node)
    ).alone


def all_reduce_seconds(cluster: ClusterSpec, grid: Grid, num_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-reduce in every group of consecutive ranks, by rings or in a switch that sums.

    With a switch, each rank sends its values once and its share of the sums once to all ranks, and receives as much. A
    sum comes down before it goes up again, so the latency counts twice.

    Args:
        cluster: gives the links.
        grid: the mesh.
        num_bytes: bytes of one rank's values.
        ranks: ranks of a group.
    """
    by_rings, per_node = reduce_seconds(cluster, grid, num_bytes, 1, ranks), grid.ranks_per_node or grid.world
    if not 2 < ranks <= per_node or num_bytes == 0 or not any(link.adds for link in cluster.links):
        return by_rings
    devices = np.arange(per_node)
    sent, messages = np.full(per_node, (1 + 1 / ranks) * num_bytes), np.full(per_node, 2.0)
    topology = Topology(cluster, grid.world, grid.ranks_per_node, block=per_node)
    load = topology.loads(devices, devices // ranks * ranks + (devices + 1) % ranks, sent, messages)
    return min(by_rings, load.alone + load.latency)
