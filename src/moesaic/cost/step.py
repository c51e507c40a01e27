"""A whole training step: attention and dense layers, MoE layers forward and backward, gradient reduction, optimizer.

Layers follow one another, so a step is laid out layer by layer; equal layers are simulated once. Gradients are reduced in
the background where the links between nodes are idle: dense ones over the data-parallel ranks, experts' over the copies of
the experts, both as reduce-scatter inside nodes, all-reduce between, all-gather inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.compute import rates_of
from moesaic.cost.memory import Memory, layer_memory
from moesaic.cost.simulate import Simulator
from moesaic.cost.timing import Simulated
from moesaic.cost.topology import Topology
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Lane, Program, Stage
from moesaic.program.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """A transformer with MoE layers, and how it is trained."""

    num_layers: int
    """Blocks of attention and a feed-forward layer."""
    layer: Workload
    """Of the MoE layers; its tokens are those of a micro-batch of one data-parallel group."""
    seq_len: int
    """Tokens of a sequence."""
    moe_every: int = 1
    """Each how-many-th block has an MoE layer; the others are dense."""
    dense_hidden: int = 0
    """Inner width of dense feed-forward layers; 0 for top_k times the experts'."""
    vocab: int = 0
    """Of the embedding and the output; 0 leaves both out."""
    micro_batches: int = 1
    """Accumulated before the optimizer steps."""
    checkpoint_activations: bool = False
    """Keep each block's input only and run its forward pass again in backward."""
    overlap_gradients: bool = True
    """Reduce gradients while backward runs; False: after it."""
    gradient_bytes: int = 4
    """Of an element, as it is reduced."""
    optimizer_bytes: int = 12
    """Per parameter: 12 for Adam with a float32 copy of the weights, 8 without."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "seq_len", "moe_every", "micro_batches", "gradient_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("dense_hidden", "vocab", "optimizer_bytes"):
            if getattr(self, name) < 0:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 0")
        if self.layer.tokens % self.seq_len:
            raise InputError(
                f"model.layer.tokens={self.layer.tokens} are no whole sequences of model.seq_len={self.seq_len}: choose a "
                "multiple"
            )

    @property
    def moe_layers(self) -> int:
        """MoE layers."""
        return self.num_layers // self.moe_every

    @property
    def inner(self) -> int:
        """Inner width of dense feed-forward layers."""
        return self.dense_hidden or self.layer.top_k * self.layer.hidden

    @property
    def dense_parameters(self) -> int:
        """Parameters outside the experts; the router's among them."""
        dim = self.layer.dim
        blocks = self.num_layers * 4 * dim * dim + self.moe_layers * dim * self.layer.num_experts
        dense = (self.num_layers - self.moe_layers) * self.layer.matrices * dim * self.inner
        return blocks + dense + 2 * self.vocab * dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.layer.num_experts * self.layer.matrices * self.layer.dim * self.layer.hidden


@dataclass(frozen=True)
class Step:
    """A step laid out in time."""

    timeline: Timeline
    """Of one rank, micro-batch after micro-batch, tasks of a pass as they were simulated."""
    seconds: float
    parts: dict[str, float]
    """Seconds by part: attention, dense, moe forward, moe backward, gradients (what is not hidden), optimizer."""
    memory: Memory


def simulate_step(
    model: StepModel,
    forward: Program,
    backward: Program,
    cluster: ClusterSpec,
    grid: Grid,
    *,
    sizes: tuple[CallSizes, CallSizes] | None = None,
    simulator: Simulator | None = None,
) -> Step:
    """Simulate a training step.

    Args:
        model: what is trained.
        forward: program of its MoE layers, lowered and in order.
        backward: of their gradients.
        cluster: what it runs on.
        grid: the mesh, etp factored as the plan wants it.
        sizes: of the two programs, for skewed counts; the same in every layer.
        simulator: of the cluster, to share what it has worked out.

    Raises:
        InputError: as `simulate` does.
    """
    simulator = simulator or Simulator(cluster)
    there = simulator.run(forward, model.layer, grid, sizes=sizes[0] if sizes else None)
    back = simulator.run(backward, model.layer, grid, sizes=sizes[1] if sizes else None)
    block = _Blocks(model, cluster, grid)
    written = _Writer(model.num_layers)
    for _ in range(model.micro_batches):
        for layer in range(model.num_layers):
            _forward(written, model, block, there, layer)
        if model.vocab:
            written.compute("unembed", 3 * block.unembed, Stage.ROUTE)
        for layer in reversed(range(model.num_layers)):
            if model.checkpoint_activations:
                _forward(written, model, block, there, layer)
            if _is_sparse(model, layer):
                written.simulated(f"layer{layer}'", back, "moe backward")
            else:
                written.compute(f"dense{layer}'", 2 * block.dense, Stage.EXPERT)
            written.compute(f"attention{layer}'", 2 * block.attention, Stage.ROUTE)
            written.done_backward(layer)
    hidden_from = written.now
    _reduce(written, model, cluster, grid)
    written.parts["gradients"] = written.now - hidden_from
    written.compute("optimizer", _optimizer(model, cluster, grid), Stage.ROUTE, "optimizer")
    return Step(
        timeline=Timeline(
            f"step of {forward.name}", tuple(sorted(written.spans, key=lambda span: (span.start, span.end)))
        ),
        seconds=written.now,
        parts=written.parts,
        memory=step_memory(model, forward, backward, simulator, grid, sizes=sizes[0] if sizes else None),
    )


def step_memory(
    model: StepModel,
    forward: Program,
    backward: Program,
    simulator: Simulator,
    grid: Grid,
    *,
    sizes: CallSizes | None = None,
    token_budget: int | None = None,
) -> Memory:
    """Return what a rank needs, at most `token_budget` rows at its experts at once.

    Attention with fused scores keeps 15 values of a token's width a layer, a dense feed-forward layer its input and its
    inner activations (Korthikanti et al. 2022, section 4.1, without the scores).
    """
    layer = model.layer
    tokens, width = layer.tokens, layer.dim * layer.element_bytes
    volumes = simulator.volumes(forward, layer, grid, sizes=sizes)
    kept, buffers = layer_memory(forward, backward, volumes, token_budget)
    dense = tokens * (width + (layer.matrices - 1) * model.inner * layer.element_bytes) / grid.tp
    per_block = 7.5 * tokens * width / grid.tp
    blocks = model.num_layers * per_block + model.moe_layers * kept + (model.num_layers - model.moe_layers) * dense
    if model.checkpoint_activations:
        blocks = model.num_layers * tokens * width / grid.tp + per_block + max(kept, dense)
    parameters = _parameters(model, grid)
    return Memory(
        weights=parameters * layer.element_bytes,
        gradients=parameters * model.gradient_bytes,
        optimizer=parameters * model.optimizer_bytes,
        activations=blocks,
        buffers=buffers + (tokens * model.vocab * 4 / grid.tp),
    )


class _Blocks:
    """Seconds of the parts of a block outside the MoE layer, forward."""

    def __init__(self, model: StepModel, cluster: ClusterSpec, grid: Grid) -> None:
        rates = rates_of(cluster, model.layer.dtype)
        tokens, dim, size = model.layer.tokens, model.layer.dim, model.layer.element_bytes
        rows = np.array([float(tokens)])

        def product(flops_per_row: float, weights: float) -> float:
            return float(rates.product_seconds(rows, flops_per_row / grid.tp, weights * size / grid.tp)[0])

        scores = 2 * 2 * model.seq_len * dim / 2
        copies = 10 * tokens * dim * size / grid.tp / rates.memory
        self.attention = product(8 * dim * dim + scores, 4 * dim * dim) + copies + _sum_over_tp(model, cluster, grid)
        inner = model.layer.matrices * dim * model.inner
        self.dense = product(2 * inner, inner) + copies / 2 + _sum_over_tp(model, cluster, grid)
        self.unembed = product(2 * dim * model.vocab, dim * model.vocab) if model.vocab else 0.0


class _Writer:
    """The step while it grows."""

    def __init__(self, num_layers: int) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.parts: dict[str, float] = {}
        self.crossings: list[tuple[float, float]] = []
        self.backward_ends: dict[int, float] = dict.fromkeys(range(num_layers), 0.0)

    def compute(self, name: str, seconds: float, stage: Stage, part: str | None = None) -> None:
        """Append a stretch of computing."""
        if seconds > 0:
            self.spans.append(Span(name, Lane.COMPUTE, None, stage, self.now, self.now + seconds))
            key = part or name.rstrip("'0123456789")
            self.parts[key] = self.parts.get(key, 0.0) + seconds
            self.now += seconds

    def simulated(self, prefix: str, done: Simulated, part: str) -> None:
        """Append a simulated program."""
        for span in done.timeline.spans:
            moved = replace(span, task=f"{prefix}:{span.task}", start=self.now + span.start, end=self.now + span.end)
            self.spans.append(moved)
            if span.lane is Lane.INTER and span.end > span.start:
                self.crossings.append((moved.start, moved.end))
        self.parts[part] = self.parts.get(part, 0.0) + done.seconds
        self.now += done.seconds

    def done_backward(self, layer: int) -> None:
        """Note when a layer's gradients are there; the last micro-batch counts."""
        self.backward_ends[layer] = self.now


def _forward(written: _Writer, model: StepModel, block: _Blocks, there: Simulated, layer: int) -> None:
    written.compute(f"attention{layer}", block.attention, Stage.ROUTE)
    if _is_sparse(model, layer):
        written.simulated(f"layer{layer}", there, "moe forward")
    else:
        written.compute(f"dense{layer}", block.dense, Stage.EXPERT)


def _is_sparse(model: StepModel, layer: int) -> bool:
    return (model.num_layers - 1 - layer) % model.moe_every == 0


def _reduce(written: _Writer, model: StepModel, cluster: ClusterSpec, grid: Grid) -> None:
    """Append the reduction of each layer's gradients, into idle time between crossings where it may overlap."""
    dense = model.dense_parameters / model.num_layers / grid.tp * model.gradient_bytes
    experts = model.expert_parameters / max(model.moe_layers, 1) / (grid.ep * grid.etp) * model.gradient_bytes
    over_dp = reduce_seconds(cluster, grid, dense, grid.tp, grid.dp)
    over_edp = reduce_seconds(cluster, grid, experts, grid.ep * grid.etp, grid.edp)
    free = 0.0
    for layer in reversed(range(model.num_layers)):
        needed = over_dp + (over_edp if _is_sparse(model, layer) else 0.0)
        if needed == 0:
            continue
        ready = max(free, written.backward_ends[layer] if model.overlap_gradients else written.now)
        start, free = fill_gaps(written.crossings, ready, needed)
        written.spans.append(Span(f"gradients{layer}", Lane.INTER, None, Stage.COMBINE, start, free))
    written.now = max(written.now, free)


def fill_gaps(busy: list[tuple[float, float]], ready: float, seconds: float) -> tuple[float, float]:
    """Return when work starts and ends that runs only while nothing else does.

    Args:
        busy: (start, end) of what goes first, in order, none overlapping another.
        ready: from when on it may run.
        seconds: that it takes.
    """
    start, now, left = None, ready, seconds
    for begins, ends in busy:
        if ends <= now:
            continue
        if begins > now:
            start = now if start is None else start
            if begins - now >= left:
                return start, now + left
            left -= begins - now
        now = max(now, ends)
    return (now if start is None else start), now + left


def reduce_seconds(cluster: ClusterSpec, grid: Grid, num_bytes: float, stride: int, ranks: int) -> float:
    """Return the seconds of an all-reduce in every group of ranks that stand `stride` apart, all groups at once.

    Reduce-scatter inside nodes, all-reduce between ranks of equal place, all-gather inside, the three overlapping.

    Args:
        cluster: the links.
        grid: the mesh.
        num_bytes: of one rank's gradients.
        stride: from one rank of a group to the next.
        ranks: of a group.
    """
    if ranks == 1 or num_bytes == 0:
        return 0.0
    per_node = grid.ranks_per_node or grid.world
    topology = Topology(cluster, grid.world, grid.ranks_per_node, block=per_node)
    inside = min(ranks, max(1, per_node // stride))
    nodes = ranks // inside
    here = np.arange(per_node)
    mates = here // (stride * inside) * (stride * inside) + (here + stride) % (stride * inside)
    source, target, sent = [here] * 2, [mates, here + max(per_node, stride)], []
    sent.append(np.full(per_node, 2 * (inside - 1) / inside * num_bytes))
    sent.append(np.full(per_node, 2 * (nodes - 1) / nodes * num_bytes / inside))
    steps = [2 * (inside - 1), 2 * (nodes - 1)]
    keep = [number for number, count in enumerate(steps) if count]
    load = topology.loads(
        np.concatenate([source[number] for number in keep]),
        np.concatenate([target[number] for number in keep]),
        np.concatenate([sent[number] for number in keep]),
        np.concatenate([np.full(per_node, float(steps[number])) for number in keep]),
    )
    return load.alone


def _sum_over_tp(model: StepModel, cluster: ClusterSpec, grid: Grid) -> float:
    """Return the seconds of the all-reduce that ends a layer split over tp (Megatron-LM, Shoeybi et al. 2019)."""
    return reduce_seconds(cluster, grid, model.layer.tokens * model.layer.dim * model.layer.element_bytes, 1, grid.tp)


def _parameters(model: StepModel, grid: Grid) -> float:
    return model.dense_parameters / grid.tp + model.expert_parameters / (grid.ep * grid.etp)


def _optimizer(model: StepModel, cluster: ClusterSpec, grid: Grid) -> float:
    """Reads and writes weights and state once, reads gradients."""
    per_parameter = 2 * (model.layer.element_bytes + model.optimizer_bytes) + model.gradient_bytes
    return _parameters(model, grid) * per_parameter / (cluster.device.memory_gigabytes_per_second * 1e9)
