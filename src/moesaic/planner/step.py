"""The time of a training step as one closed form: ours, or that of another system (docs/planning.md
prints the formula).

A step is the sum of its terms: products by their rows, traffic, scores of attention, MoE layers,
and a cost of every MoE layer and micro-batch that grows with the experts of a rank; times the
micro-batches; plus the bubble of the pipeline, parameters and gradients that move while nothing
else runs, and the optimizer. MoE layers of our plans are simulated (`simulator.py`), those of other
systems follow from their collectives (`layer_passes`). The docstring of each term names its source.

A pass is the forward or the backward pass of one MoE layer for one micro-batch (`Passes`).
What moves during a pass is hidden behind it as far as the pass takes longer. Dense parameters,
shared experts included, are sharded over dp and experts over edp. The root is embedding and output,
which FSDP2 gathers around all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.call_sizes import node_tokens_per_node
from moesaic.planner.cluster import ELEMENT_BYTES, ClusterSpec, Link, ScoreKernel
from moesaic.planner.compute import frozen_seconds, rates_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.topology import Topology, check_fit, one_node
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid

LAUNCHES = (1.3e-3, 0.04e-3)
"""Seconds of an MoE layer and micro-batch, forward and backward, in launches, counts, sorting and
the router; and more for each expert of a rank. Fitted to the published steps of docs/ledger.md
(`moesaic_lab.ledger.fitting`), equal for all systems."""
NARROW_LAUNCHES = 2.0
"""Factor on the seconds of each expert with fp8 products: each expert's rows are cast by a kernel
of their own, forward and backward (Transformer Engine, `GroupedLinear`)."""
Part = Literal[
    "block", "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"
]
PARTS: tuple[Part, ...] = get_args(Part)
"""What backward can recompute: a whole block, or a part of it under Megatron's name."""
Sharded = Literal["parameters", "gradients", "optimizer", "none"]
"""As in `StepModel.sharded`."""
Held = Literal["parameters", "gradients", "nothing"]
"""As in `StepModel.held`."""
Schedule = Literal["1f1b", "zb-h1", "zb-v", "dualpipev"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
"""Pipeline schedules: 1F1B, interleaved if a rank has several runs of layers (Narayanan et al.
2021), ZB-H1 and ZB-V (Qi et al. 2023), DualPipeV (DeepSeek's DualPipe), which overlaps forward with
backward passes."""

STEPWISE: dict[str, tuple[float, float]] = {
    # transformers' RMSNorm: cast 6, square 8, mean 4, product 8, cast 6, weights 4; its gradient
    # 92; fused 4 and 8.
    "norms": (32, 84),
    # Automodel's GroupedExpertsDeepEP._apply_bias of the first product's results: sums 4, joined 4;
    # back 2 and 4.
    "first_bias": (8, 6),
    # The same and Megatron's TEGroupedMLP._apply_bias of the last one's, whose weights are float32:
    # products 4, sums 10, joined 8, cast 6; back 6, 6, 12, 12 and 4.
    "last_bias": (28, 40),
    # PyTorch's cross entropy is counted by its bytes per logit (`StepModel.loss_bytes`).
    "loss": (0, 0),
}
"""Operations that a system runs step by step in eager PyTorch: bytes that they move per value of
two bytes beyond one fused kernel, forward and backward, counted in the sources named here. Their
values are, in this order: those of a block's norms and of norms of queries and keys; both halves of
experts' first results; copies of tokens. Rows that need them, by the error of a source left out:
norms, transformers on 64 H100 (0.16 more without) and pith-train (0.13); first_bias, gpt-oss-20b of
Automodel (0.04); last_bias, gpt-oss-120b of Megatron-Bridge (0.13). Others that were counted
(rotations, sinks, activations, permutations) changed none (docs/log.md)."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The layers that a rank runs for each micro-batch, and how they are trained."""

    num_layers: int
    """Blocks of attention and a feed-forward layer."""
    layer: Workload
    """The MoE layers; its tokens are those of a micro-batch of one data-parallel group."""
    seq_len: int
    """Tokens per sequence."""
    sparse_layers: int | None = None
    """Number of blocks with an MoE layer; None: all."""
    dense_hidden: int = 0
    """Inner width of dense feed-forward layers; 0 for `top_k` times the experts' width."""
    shared_hidden: int = 0
    """Inner width of a shared expert that every token passes in an MoE layer; 0 for none."""
    vocab: int = 0
    """Vocabulary of the embedding and the output; 0 leaves both out."""
    embeddings: int = 2
    """Number of matrices vocab x dim: embedding and output; 1 if they are tied or the rank has
    one."""
    outputs: int = 1
    """How many times the output is computed per token: once, plus once per further token that is
    predicted."""
    micro_batches: int = 1
    """Micro-batches per optimizer step."""
    recomputed: tuple[Part, ...] = ()
    """What backward recomputes; "block": each block keeps its input only."""
    recomputed_blocks: int | None = None
    """Blocks of which `recomputed` says "block"; None for all. The others keep everything."""
    recomputed_together: int = 1
    """Consecutive blocks that are recomputed as one: of these, only the first one's input is
    kept."""
    attention_parameters: float = 0.0
    """Parameters of a block's attention, mean over blocks; 0 for four matrices dim x dim."""
    score_operations: float = 0.0
    """Operations per token and block of the scores, mean over blocks; 0 for heads as wide as a
    token, causal."""
    key_values: float = 0.0
    """Values per token of a block's keys and values; 0 for twice a token's width."""
    shares_sequence: int = 1
    """Ranks that share each sequence and pass keys and values round (context parallelism)."""
    attention_kept: float = 0.0
    """Values per token that attention keeps, input included; 0 for 5.5 widths (Korthikanti et al.
    2022, section 4.1)."""
    attention_up_kept: float = 0.0
    """Of `attention_kept`: results of the up-projections of low-rank attention, which `mla_up_proj`
    recomputes."""
    attention_copied: float = 0.0
    """Values per token that norms, rotations and joins between projections and scores read and
    write."""
    attention_up: float = 0.0
    """Parameters of a block's up-projections of low-rank attention."""
    attention_normed: float = 0.0
    """Values per token and block that norms inside attention read."""
    attention_result: float = 0.0
    """Values per token and block of the result of attention; 0 for a token's width."""
    head_dim: float = 0.0
    """Width of a head's queries; 0 for the largest width for which the cluster gives the speed of
    scores."""
    score_kernel: ScoreKernel = "best"
    """Kernel that computes the scores."""
    stepwise: tuple[str, ...] = ()
    """Operations that run step by step rather than as fused kernels: keys of `STEPWISE`."""
    launches: tuple[float, float] = LAUNCHES
    """Seconds of an MoE layer and micro-batch, and more for each expert of a rank."""
    loss_bytes: int = 36
    """Bytes of the loss per logit. PyTorch's of a float32 copy: the copy and its gradient 6 each,
    log-softmax 20, zeros 4."""
    loss_kept: float = 4.0
    """Bytes per logit that are alive at the loss: float32 logits, from which fused kernels make the
    gradient in place."""
    loss_chunks: int = 1
    """Parts of the tokens whose logits and loss are computed one after the other."""
    logits_kept: float = 0.0
    """Bytes per logit that stay alive through the backward pass."""
    sequence_parallel: bool = False
    """Tensor parallelism uses a reduce-scatter and an all-gather, between which ranks work on parts
    of the positions."""
    keeps_activated: bool = False
    """Feed-forward layers also keep the results of their activation, as they do unless a product
    recomputes them."""
    table_bytes: float = 0.0
    """Bytes of an MoE layer's router besides its parameters, whole on every rank."""
    parameter_bytes: int = 4
    """Bytes of a parameter, of its gradient, and of each of Adam's two moments."""
    gradient_bytes: int = 0
    """Bytes of a gradient while it is reduced; 0 for `parameter_bytes`."""
    gathered_bytes: int = 0
    """Bytes of a sharded parameter while it is gathered; 0 for `parameter_bytes`."""
    sharded: Sharded = "parameters"
    """What is sharded over data-parallel ranks: everything (FSDP2, ZeRO-3); gradients and
    optimizer, gradients reduced in every micro-batch (ZeRO-2); the optimizer's master and moments
    (ZeRO-1); nothing. But for the first, parameters are whole."""
    held: Held = "nothing"
    """With sharded parameters, what a rank holds whole between the micro-batches of a step:
    parameters and gradients, so that parameters are gathered and gradients reduced once a step;
    gradients alone; or neither."""
    replicas: int = 1
    """Number of copies of each shard, which all-reduce their gradients: HSDP, or instances of a
    distributed optimizer."""
    expert_replicas: int = 0
    """The same of the experts' shards; 0 for `replicas`."""
    hides_parameters: bool = True
    """Parameters gathered once per step hide behind the first forward pass."""
    hides_gradients: bool = True
    """Gradients reduced once per step hide behind the last backward pass."""
    overlapped: bool = False
    """All-to-alls overlap with the computation of another micro-batch."""
    graphs: bool = False
    """A whole step is one CUDA graph, in which nothing is launched from the host."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule."""
    stages: int = 1
    """Number of ranks along the pipeline."""
    runs: int = 1
    """Runs of consecutive layers of a rank."""
    alive: float = 1.0
    """Micro-batches whose activations the rank keeps at once."""
    adapters: tuple[float, float] = (0.0, 0.0)
    """Parameters of adapters on a rank, which are then all that is trained: those that all ranks
    have, and those of its experts."""

    def __post_init__(self) -> None:
        at_least_one = (
            "num_layers",
            "seq_len",
            "micro_batches",
            "parameter_bytes",
            "replicas",
            "stages",
            "runs",
            "recomputed_together",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("dense_hidden", "vocab", "shared_hidden"):
            if getattr(self, name) < 0:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 0")
        for name, chosen, known in (
            ("recomputed", self.recomputed, PARTS),
            ("stepwise", self.stepwise, tuple(STEPWISE)),
            ("schedule", (self.schedule,), SCHEDULES),
        ):
            for word in chosen:
                if word not in known:
                    raise InputError(f"model.{name}={word!r}: choose of {', '.join(known)}")
        if self.layer.tokens % self.seq_len:
            raise InputError(
                f"model.layer.tokens={self.layer.tokens} are not whole sequences of "
                f"model.seq_len={self.seq_len}: choose a multiple"
            )

    @cached_property
    def moe_layers(self) -> int:
        """Number of MoE layers."""
        return self.num_layers if self.sparse_layers is None else self.sparse_layers

    @cached_property
    def attention(self) -> float:
        """Parameters of a block's attention."""
        return self.attention_parameters or 4 * self.layer.dim * self.layer.dim

    @cached_property
    def scores(self) -> float:
        """Operations per token and block between queries, keys and values."""
        # two products, each of a multiplication and an addition; half of them, since causal
        return self.score_operations or 2 * 2 * self.seq_len * self.layer.dim / 2

    @cached_property
    def inner(self) -> int:
        """Inner width of dense feed-forward layers."""
        return self.dense_hidden or self.layer.top_k * self.layer.hidden

    @cached_property
    def dense_parameters(self) -> float:
        """Parameters outside the experts, routers included."""
        dim = self.layer.dim
        blocks = self.num_layers * self.attention + self.moe_layers * dim * self.layer.num_experts
        dense = (self.num_layers - self.moe_layers) * self.layer.matrices * dim * self.inner
        return blocks + dense + self.embeddings * self.vocab * dim

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return (
            self.moe_layers
            * self.layer.num_experts
            * self.layer.matrices
            * self.layer.dim
            * self.layer.hidden
        )

    @cached_property
    def shared_parameters(self) -> int:
        """Parameters of all shared experts, which every rank of a tensor-parallel group holds in
        full."""
        return self.shared_hidden * self.layer.matrices * self.layer.dim * self.moe_layers

    @cached_property
    def is_frozen(self) -> bool:
        """Whether adapters alone are trained."""
        return sum(self.adapters) > 0

    @property
    def gathers_per_block(self) -> bool:
        """Whether parameters are gathered for every block of every micro-batch."""
        return self.sharded == "parameters"

    @cached_property
    def narrow_bytes(self) -> float:
        """Bytes of a value that narrow products read, including its share of a scale; 0 if products
        are not narrow."""
        products = self.layer.products
        if products is None or ELEMENT_BYTES[products] >= self.layer.element_bytes:
            return 0.0
        # mxfp8 has a scale of one byte for each 32 numbers
        return ELEMENT_BYTES[products] * (1 + (1 / 32 if products == "mxfp8" else 0.0))

    @property
    def recomputed_share(self) -> float:
        """Share of the blocks that backward recomputes as a whole."""
        if "block" not in self.recomputed:
            return 0.0
        return 1.0 if self.recomputed_blocks is None else self.recomputed_blocks / self.num_layers

    def recomputes(self, *parts: Part) -> float:
        """Return the share of the blocks in which backward recomputes any of some parts."""
        return 1.0 if any(part in self.recomputed for part in parts) else self.recomputed_share


class LayerPass(NamedTuple):
    """A pass of an MoE layer by the closed form: its movements follow each other and its
    computation."""

    compute_seconds: float
    communication_seconds: float
    link_seconds: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        return self.compute_seconds + self.communication_seconds


Passes = Simulated | LayerPass
"""What the closed form reads of a forward or backward pass of an MoE layer."""


class Moving(NamedTuple):
    """Parameters or gradients that move between data-parallel ranks."""

    times: int
    """How often per step."""
    seconds: float
    """Seconds of each time, without overlap."""
    behind: Literal["forward", "backward", "nothing"]
    """The pass behind which they move."""


_BLOCK_FIELDS = (
    "layer",
    "attention",
    "attention_up",
    "attention_copied",
    "scores",
    "score_kernel",
    "head_dim",
    "key_values",
    "shares_sequence",
    "sequence_parallel",
    "inner",
    "shared_hidden",
    "vocab",
    "loss_bytes",
)
"""What `StepCostModel.forward` reads of a model."""


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
    output: float
    """Of `unembed`: the product."""
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
    """Lower bounds on the seconds of a step, one per resource: computation, a link, gathering
    parameters."""

    @property
    def bottleneck(self) -> str:
        """Name of the largest limit."""
        return max(self.limits, key=lambda name: self.limits[name])


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of several steps under one plan: of their times, parts and limits."""

    def mean(tables: list[dict[str, float]]) -> dict[str, float]:
        """Return the mean of each entry, in order of first occurrence; a table that lacks an entry
        counts 0 for it."""
        names = dict.fromkeys(name for table in tables for name in table)
        means = {}
        for name in names:
            total = sum(table.get(name, 0.0) for table in tables)
            means[name] = total / len(tables)
        return means

    return Estimate(
        seconds=sum(estimate.seconds for estimate in estimates) / len(estimates),
        parts=mean([estimate.parts for estimate in estimates]),
        limits=mean([estimate.limits for estimate in estimates]),
    )


def bubble_seconds(
    schedule: Schedule, stages: int, runs: int, forward: float, inputs: float, weights: float
) -> float:
    """Return the seconds in which a rank of a pipeline waits per step.

    1F1B waits for (p - 1)(F + B + W) / v (Narayanan et al. 2021, section 2.2), ZB-H1 for (p -
    1)(F + B - W) and ZB-V for (p - 1)(F + B - 2 W) (Qi et al. 2023, table 2), DualPipeV for half of
    (p - 1)(FB + B + W - 3 W), since its chunks are half of a rank's layers. FB, a forward pass
    beside a backward pass, is taken as their sum F + B + W (DeepSeek-V3, table 2), which leaves
    (p - 1)(F + 2 B - W) / 2.

    Args:
        schedule: the schedule.
        stages: p, ranks of the pipeline.
        runs: v, runs of layers per rank; ZB-V and DualPipeV have two whatever it says.
        forward, inputs, weights: F, B and W, seconds of a micro-batch on a rank: forward pass,
            backward pass for inputs, backward pass for weights.
    """
    seconds_per_stage = {
        "1f1b": (forward + inputs + weights) / runs,
        "zb-h1": forward + inputs - weights,
        "zb-v": forward + inputs - 2 * weights,
        "dualpipev": (forward + 2 * inputs - weights) / 2,
    }
    return (stages - 1) * max(seconds_per_stage[schedule], 0.0)


def alive_micro_batches(schedule: Schedule, stages: int, runs: int, count: int, rank: int) -> float:
    """Return the micro-batches whose activations a rank of a pipeline keeps at once.

    1F1B: p - rank, one for each later stage and the current one. Interleaved 1F1B: the forward
    passes of Megatron's warm-up are 2 for each later stage, p for each part but the last, and the
    current one; each is of one part, 1 / v of a micro-batch: ((v - 1) p + 2 (p - rank) - 1) / v
    (Narayanan et al. 2021). ZB-H1 and ZB-V: p (Qi et al. 2023); DualPipeV: p + 1/2 (DeepSeek's
    DualPipe, README).

    Args:
        schedule: name of the schedule.
        stages: p, stages of the pipeline.
        runs: v, parts of the model on each rank.
        count: micro-batches of a step.
        rank: the stage, from 0 on.
    """
    if stages == 1:
        return 1.0
    one_f_one_b: float = stages - rank
    if runs > 1:
        one_f_one_b = ((runs - 1) * stages + 2 * (stages - rank) - 1) / runs
    alive = {"1f1b": one_f_one_b, "zb-h1": stages, "zb-v": stages, "dualpipev": stages + 0.5}
    return float(min(alive[schedule], count))


class StepCostModel:
    """Predicts the time of steps on one layout; `step_memory` predicts their memory.

    Args:
        model: the model and how it is trained.
        grid: the layout.
        simulator: of the cluster.

    Raises:
        InputError: if the layout does not fit the cluster, or the dtype's rate is unknown.
    """

    def __init__(self, model: StepModel, grid: Grid, simulator: Simulator) -> None:
        self.model = model
        self.grid = grid
        self.simulator = simulator
        self.cluster = simulator.cluster
        check_fit(self.cluster, grid.world, grid.ranks_per_node)
        dense_replicas, expert_replicas = self.replicas
        if grid.dp % dense_replicas or grid.edp % expert_replicas:
            raise InputError(
                f"{model.replicas} replicas of the shards do not divide {grid.dp} data-parallel "
                f"groups and {grid.edp} replicas of the experts: choose a divisor of both"
            )
        self.alive = model.alive
        """Micro-batches whose activations the rank keeps at once."""
        self._rates = simulator.rates_of(model.layer.dtype)
        self.routing = self.cluster.host.layer_us * 1e-6
        """Seconds of an MoE layer outside its programs, forward and backward, if measured. A
        recomputed forward pass replays its routing, which counts nothing."""
        self.launches = self._launch_seconds()
        """Seconds of an MoE layer and micro-batch that grow with the experts of a rank, forward and
        backward."""

    def keeping(self, alive: float) -> StepCostModel:
        """Return this cost model of a rank that keeps the activations of `alive` micro-batches."""
        changed = copy(self)
        changed.alive = alive
        return changed

    @cached_property
    def _node(self) -> Topology:
        """The links of one node, which stands for all nodes."""
        return self.simulator.one_node(self.grid.world, self.grid.ranks_per_node)

    @property
    def forward_passes(self) -> float:
        """Forward passes of an MoE layer per micro-batch, mean over layers: 2 if backward
        recomputes all of them."""
        return 1 + self.model.recomputes("moe")

    def estimate(
        self, forward: Passes, backward: Passes, *, mean_busy: float | None = None
    ) -> Estimate:
        """Return a step's predicted time.

        Args:
            forward: the forward pass of an MoE layer.
            backward: its backward pass.
            mean_busy: `busy_seconds`, mean over the ranks of the pipeline, which fill and drain it;
                None: as long as this rank.
        """
        count = self.model.micro_batches
        parts = {name: count * seconds for name, seconds in self._parts(forward, backward).items()}
        busy = sum(parts.values()) / count
        if mean_busy is None:
            mean_busy = busy
        parts["pipeline"] = self._bubble(forward, backward, busy, mean_busy)
        parts["parameters"] = sum(
            moved.times * self._exposed_seconds(moved, forward, backward)
            for moved in self._movements
        )
        parts["optimizer"] = self.optimizer_seconds
        return Estimate(
            seconds=sum(parts.values()),
            parts={name: seconds for name, seconds in parts.items() if seconds > 0},
            limits=self._limits(forward, backward),
        )

    def _limits(self, forward: Passes, backward: Passes) -> dict[str, float]:
        """Return the seconds of a step for which each resource is busy (`Estimate.limits`)."""
        count = self.model.micro_batches
        layers = self.model.moe_layers
        experts = layers * (
            self.routing + self.forward_passes * forward.compute_seconds + backward.compute_seconds
        )
        limits = {
            "compute": count * (self._around_seconds + experts) + self.optimizer_seconds,
            "gathering parameters": self.moving_seconds,
        }
        for link in sorted({*forward.link_seconds, *backward.link_seconds}):
            forward_busy = forward.link_seconds.get(link, 0.0)
            backward_busy = backward.link_seconds.get(link, 0.0)
            limits[link] = count * layers * (self.forward_passes * forward_busy + backward_busy)
        return limits

    def busy_seconds(self, forward: Passes, backward: Passes) -> float:
        """Return the seconds for which a micro-batch keeps a rank of the pipeline busy."""
        return sum(self._parts(forward, backward).values())

    def pass_seconds(self, forward: Passes, backward: Passes) -> tuple[float, float]:
        """Return the seconds of a micro-batch's forward pass, and those of its backward pass with
        what it recomputes."""
        forward_seconds = self._forward_seconds(forward)
        busy = self.busy_seconds(forward, backward)
        # overlap may save so much of `busy` that the forward pass alone, without overlap, is longer
        return min(forward_seconds, busy), max(busy - forward_seconds, 0.0)

    def between_seconds(self, forward: Passes, backward: Passes) -> tuple[float, float]:
        """Return the seconds of a micro-batch between its MoE layers, per layer, forward and
        backward; without the output and the loss, which come once."""
        layers = self.model.moe_layers
        output = self.model.outputs * self.forward.unembed
        forward_between = self._forward_seconds(forward) - layers * forward.seconds - output
        parts = self._parts(forward, backward)
        # the output takes twice as long backward as forward
        both = sum(parts.values()) - parts["moe forward"] - parts["moe backward"] - 3 * output
        backward_between = max(both - forward_between, 0.0)
        return forward_between / layers, backward_between / layers

    def _forward_seconds(self, forward: Passes) -> float:
        """Return the seconds of a micro-batch's forward pass."""
        model = self.model
        block = self.forward
        dense_layers = model.num_layers - model.moe_layers
        output = model.outputs * block.unembed
        around = model.num_layers * block.attention + dense_layers * block.dense + output
        launches = (self.routing + self.launches) / 3  # a third of both is forward
        return around + model.moe_layers * (block.shared + forward.seconds + launches)

    def _parts(self, forward: Passes, backward: Passes) -> dict[str, float]:
        """Return the seconds of a micro-batch by part."""
        layers = self.model.moe_layers
        # Overlap saves the same share of both passes. A forward pass that is recomputed inside the
        # backward pass overlaps with nothing, so the share is taken from one forward pass.
        saved_seconds = self._overlap_saves(forward, backward)
        saved_share = saved_seconds / (forward.seconds + backward.seconds)
        moe_forward = self.forward_passes * forward.seconds - saved_share * forward.seconds
        moe_backward = backward.seconds - saved_share * backward.seconds
        return {
            **self.around,
            "routing": layers * self.routing,
            "moe forward": layers * moe_forward,
            "moe backward": layers * moe_backward,
        }

    def _overlap_saves(self, forward: Passes, backward: Passes) -> float:
        """Return the seconds per MoE layer that are saved if its all-to-alls overlap with the
        computation of another micro-batch: both take the longer of the two, plus the share of the
        shorter that contention costs (`Device.contention`; the overlap is that of DeepSeek-V3,
        section 3.2.1, and of Megatron's combined 1F1B)."""
        if not self.model.overlapped:
            return 0.0
        attention = 3 * self.forward.attention  # backward takes twice as long as forward
        computing = attention + forward.compute_seconds + backward.compute_seconds
        moving = forward.communication_seconds + backward.communication_seconds
        contention = self.cluster.device.contention * min(computing, moving)
        overlapped = max(computing, moving) + contention
        in_turn = attention + forward.seconds + backward.seconds
        return max(in_turn - overlapped, 0.0)

    def _bubble(self, forward: Passes, backward: Passes, busy: float, mean_busy: float) -> float:
        """Return the seconds per step in which the pipeline fills and drains, its messages
        included.

        Args:
            forward, backward: the passes of an MoE layer.
            busy: seconds for which a micro-batch keeps this rank busy.
            mean_busy: the same, mean over the ranks of the pipeline.
        """
        model = self.model
        block = self.forward
        if model.stages == 1:
            return 0.0
        forward_seconds = self._forward_seconds(forward)

        # gradients of weights take as long as the forward products with these weights
        dense_layers = model.num_layers - model.moe_layers
        output = model.outputs * block.unembed
        weights = model.num_layers * block.projections + dense_layers * block.dense_product + output
        weights += model.moe_layers * (block.shared + self._expert_seconds)
        inputs = max(busy - forward_seconds - weights, 0.0)  # the rest of the backward pass

        scale = mean_busy / busy  # the pipeline fills and drains at the pace of all its ranks
        waits = bubble_seconds(
            model.schedule,
            model.stages,
            model.runs,
            forward=scale * forward_seconds,
            inputs=scale * inputs,
            weights=scale * weights,
        )
        # a micro-batch passes every border between runs of layers, forward and backward
        return waits + 2 * (model.stages * model.runs - 1) * self._hop_seconds

    @property
    def _hop_seconds(self) -> float:
        """Seconds in which all ranks of a stage send a micro-batch's tokens to the ranks of the
        next stage."""
        model = self.model
        world = self.grid.world
        # with sequence parallelism each tp rank sends its positions only
        senders = self.grid.tp if model.sequence_parallel else 1
        num_bytes = model.layer.tokens * model.layer.dim * model.layer.element_bytes / senders

        is_inside = world < self.cluster.devices_per_node
        return hop_seconds(self.cluster, num_bytes, world, is_inside=is_inside)

    @cached_property
    def around(self) -> dict[str, float]:
        """Seconds of a micro-batch outside the programs of MoE layers, by part."""
        model = self.model
        block = self.forward
        dense_layers = model.num_layers - model.moe_layers

        # A part takes its forward seconds once forward and twice backward: once for the gradients
        # of its inputs, and once for those of its weights, which frozen weights do not have. A
        # third of the launches is forward.
        frozen = 1 if model.is_frozen else 0
        attention = 3 * block.attention + self._attention_recomputed - frozen * block.projections
        dense = (3 + model.recomputes("mlp")) * block.dense - frozen * block.dense_product
        shared_passes = 3 + model.recomputes("moe", "shared_experts") - frozen
        return {
            "attention": model.num_layers * attention,
            "dense": dense_layers * dense,
            "unembed": model.outputs * (3 * block.unembed - frozen * block.output),
            "shared experts": model.moe_layers * shared_passes * block.shared,
            "small kernels": self._stepwise_seconds(),
            "launches": model.moe_layers * self.launches * (2 + self.forward_passes) / 3,
        }

    @property
    def _around_seconds(self) -> float:
        """Seconds of a micro-batch outside the programs of MoE layers."""
        return sum(self.around.values())

    @property
    def _attention_recomputed(self) -> float:
        """Seconds per block, mean over blocks, for which backward recomputes attention and
        norms."""
        if "block" in self.model.recomputed:
            return self.model.recomputed_share * self.forward.attention
        seconds_by_part = {
            "core_attn": self.forward.scores,
            "mla_up_proj": self.forward.up,
            # of ten accesses of a token by norms and residuals (`forward`), norms are four
            "layernorm": 0.4 * self.forward.copies,
        }
        return sum(
            seconds for part, seconds in seconds_by_part.items() if part in self.model.recomputed
        )

    def _launch_seconds(self) -> float:
        """Return the seconds of an MoE layer and micro-batch in launches, counts, sorting and the
        router (`LAUNCHES`).

        A machine whose layers were measured, or that computes on the issuing thread, has them in
        its own numbers. A CUDA graph of the whole step has none.
        """
        if self.routing or self.cluster.host.runs_compute or self.model.graphs:
            return 0.0
        of_layer, of_expert = self.model.launches
        experts = self.model.layer.num_experts / self.grid.ep
        casts = NARROW_LAUNCHES if self.model.narrow_bytes else 1.0
        return of_layer + of_expert * experts * casts

    def _stepwise_seconds(self) -> float:
        """Return the seconds of a micro-batch that unfused operations take beyond fused ones
        (`STEPWISE`)."""
        model = self.model
        grid = self.grid
        layer = self.model.layer
        tokens = layer.tokens / grid.tp
        copies = grid.dp * layer.copies / (grid.ep * grid.edp)  # that a rank computes

        # Each kind of layer: how many there are, and its forward passes per micro-batch.
        # `recomputes` of no part is the share of blocks that are recomputed as a whole.
        blocks = (model.num_layers, 1 + model.recomputes())
        sparse = (model.moe_layers, self.forward_passes)
        # Each operation: the layers that have it, and the values that it handles in one of them. A
        # block has two norms, and those inside its attention.
        operations = {
            "norms": (blocks, tokens * (2 * layer.dim + model.attention_normed)),
            "first_bias": (sparse, (layer.matrices - 1) * self.activated_values),
            "last_bias": (sparse, copies * layer.dim),
            "loss": (blocks, 0.0),  # counted by `loss_bytes`
        }

        moved_bytes = 0.0
        for name in model.stepwise:
            (layers, passes), values = operations[name]
            forward_bytes, backward_bytes = STEPWISE[name]
            moved_bytes += layers * values * (passes * forward_bytes + backward_bytes)
        return moved_bytes / self._rates.memory

    @cached_property
    def forward(self) -> ForwardSeconds:
        """The seconds of one forward pass of each part of a block, which layouts share."""
        grid = self.grid
        block = tuple(getattr(self.model, name) for name in _BLOCK_FIELDS)
        key = (block, grid.tp, grid.world, grid.ranks_per_node)
        known = self.simulator.forwards
        if key not in known:
            known[key] = self._find_forward()
        return known[key]

    def _find_forward(self) -> ForwardSeconds:
        """Return `forward`. It reads of the model what `_BLOCK_FIELDS` names.

        Products take their operations over the rate that their rows reach (`compute.py`), norms and
        residuals ten accesses of a token in the attention part of a block and five more in a dense
        layer, scores their operations over the rate of the attention kernel (`Device.scores`). A
        layer that is split over tp ends in an all-reduce (Megatron-LM, Shoeybi et al. 2019). Keys
        and values of the other parts of a sequence pass behind the scores, once forward and once
        backward with their gradients (ring attention, Liu et al. 2023).
        """
        model = self.model
        layer = model.layer
        tokens = layer.tokens
        dim = layer.dim
        tp = self.grid.tp
        token_bytes = tokens * dim * layer.element_bytes
        over_tp = self._over_tp_seconds(token_bytes)

        scores = self._scores_seconds()
        # read: the normed input, and the result of attention before the last product
        projections = self._product_seconds(model.attention, tp, read=2 * dim)
        # a part of the projections, whose casts are counted above
        up = self._product_seconds(model.attention_up, tp, read=0.0) if model.attention_up else 0.0
        norms = 10 * token_bytes / tp / self._rates.memory  # and residuals
        copied_bytes = tokens * model.attention_copied * layer.element_bytes
        copied = copied_bytes / tp / self._rates.memory

        dense_weights = layer.matrices * dim * model.inner
        dense = self._product_seconds(dense_weights, tp, read=dim + model.inner)
        shared = 0.0
        if model.shared_hidden:
            shared_weights = layer.matrices * dim * model.shared_hidden
            shared = self._product_seconds(
                shared_weights, num_parts=1, read=dim + model.shared_hidden
            )
        output, loss = self._output_seconds()
        return ForwardSeconds(
            attention=projections + scores + norms + copied + over_tp,
            projections=projections,
            scores=scores,
            up=up,
            copies=norms,
            dense=dense + norms / 2 + over_tp,
            dense_product=dense,
            output=output,
            unembed=loss + output,
            shared=shared,
        )

    def _over_tp_seconds(self, num_bytes: float) -> float:
        """Return the seconds of summing a layer's results over tp: an all-reduce, or, where each
        rank keeps its part of the sequence, a reduce-scatter and an all-gather, which take as long
        as an all-reduce by rings."""
        if self.model.sequence_parallel:
            return self._node.all_reduce_seconds(num_bytes, stride=1, ranks=self.grid.tp)
        return all_reduce_seconds(self.cluster, self.grid, num_bytes, self.grid.tp)

    def _product_seconds(self, weights: float, num_parts: int, read: float) -> float:
        """Return the seconds of a micro-batch's dense products, one row per token.

        Args:
            weights: parameters of the matrices, which `num_parts` ranks divide.
            num_parts: number of these ranks.
            read: values of a row that are cast if products are narrower than activations.
        """
        layer = self.model.layer
        rates = self.simulator.rates_of(layer.products or layer.dtype)
        rows = np.array([float(layer.tokens)])
        operations_per_row = 2 * weights / num_parts
        weight_bytes = weights * layer.element_bytes / num_parts
        seconds = rates.product_seconds(rows, operations_per_row, weight_bytes)
        cast = layer.tokens * read * rates.cast_bytes / num_parts / rates.memory
        return float(seconds[0]) + cast

    def _scores_seconds(self) -> float:
        """Return the seconds of attention's scores, or of passing keys and values if that is
        slower."""
        model = self.model
        layer = model.layer
        tp = self.grid.tp
        rows = np.array([float(layer.tokens)])
        at_full_rate = float(
            self._rates.product_seconds(rows, model.scores / tp, weight_bytes=0.0)[0]
        )
        scores = at_full_rate / self.cluster.device.scores.of(model.score_kernel, model.head_dim)

        width = model.key_values or 2 * layer.dim
        # of the whole sequence, of which a rank has one of `shares_sequence` parts
        passed_bytes = layer.tokens * width * layer.element_bytes * model.shares_sequence / tp
        # an all-gather of keys and values round the ring is half of an all-reduce
        ring_seconds = self._node.all_reduce_seconds(
            passed_bytes, stride=tp, ranks=model.shares_sequence
        )
        passing = ring_seconds / 2
        return max(scores, passing)

    def _output_seconds(self) -> tuple[float, float]:
        """Return the seconds of the product with the output matrix, and a third of those of the
        loss, forward and backward."""
        model = self.model
        layer = model.layer
        logits = model.vocab / self.grid.tp
        if not logits:
            return 0.0, 0.0
        rows = np.array([float(layer.tokens)])
        operations_per_row = 2 * layer.dim * logits
        weight_bytes = layer.dim * logits * layer.element_bytes
        output = float(self._rates.product_seconds(rows, operations_per_row, weight_bytes)[0])
        # callers count this three times, as they do the product
        loss = layer.tokens * logits * model.loss_bytes / self._rates.memory / 3
        return output, loss

    @cached_property
    def _movements(self) -> tuple[Moving, ...]:
        """What moves of parameters and gradients.

        With FSDP2 every block is gathered before its passes, and its gradients are scattered after
        them, behind the other blocks of the pass; those of embedding and output are not hidden.
        Else gradients are reduced behind the last micro-batch's backward pass (sharded gradients
        behind each) and parameters gathered behind the first forward pass, if the system hides
        them; with nothing sharded, an all-gather of the gradients replaces the one of the
        parameters. Of a frozen model the gradients of the adapters that all ranks have are reduced,
        in float32, at the end.
        """
        model = self.model
        # seconds of scattering the gradients of all blocks, and of the root
        blocks = self._scatter_seconds
        root_bytes = self.root_parameters * self._gradient_bytes
        dense_shards = self.num_shards[0]
        # a scatter is half of an all-reduce
        root = self._node.all_reduce_seconds(root_bytes, self.grid.tp, dense_shards) / 2
        if not model.gathers_per_block:
            return self._whole_movements(blocks + root)
        # scattered over the ranks of a copy of the shards, and summed between the copies
        reduced = 0.0 if model.is_frozen else blocks + self._copy_seconds
        if model.held != "nothing":
            return self._held_movements(blocks, root, reduced)

        count = model.micro_batches
        gather_ratio = self._gather_ratio  # gathering parameters over scattering their gradients
        # the root is gathered in both passes, and its gradients are scattered
        root_scatters = 2 * gather_ratio + (0 if model.is_frozen else 1)
        shared_adapters, _ = model.adapters
        adapter_bytes = 4 * shared_adapters  # in float32
        adapters = self._node.all_reduce_seconds(adapter_bytes, stride=1, ranks=self.grid.world)
        # (how often per step, seconds of each time, behind which pass)
        return (
            Moving(count, root_scatters * root, "nothing"),
            Moving(count, gather_ratio * blocks, "forward"),
            Moving(count, gather_ratio * blocks + reduced, "backward"),
            Moving(1, adapters, "nothing"),
        )

    def _whole_movements(self, scattered: float) -> tuple[Moving, ...]:
        """What moves if parameters are whole during a step.

        Args:
            scattered: seconds of scattering the gradients of all blocks and of the root.
        """
        model = self.model
        gathered = 0.0
        reduced = 2.0 * scattered + self._copy_seconds  # an all-reduce: a scatter and a gathering
        if model.sharded != "none":
            # parameters are gathered in the dtype of activations
            gather_ratio = model.layer.element_bytes / self._gradient_bytes
            gathered = gather_ratio * scattered
            reduced = scattered + self._copy_seconds
        reductions = model.micro_batches if model.sharded == "gradients" else 1
        return (
            Moving(1, gathered, "forward" if model.hides_parameters else "nothing"),
            Moving(reductions, reduced, "backward" if model.hides_gradients else "nothing"),
        )

    def _held_movements(self, blocks: float, root: float, reduced: float) -> tuple[Moving, ...]:
        """What moves if a rank holds whole gradients between micro-batches, or parameters too.

        Args:
            blocks: seconds of scattering the gradients of all blocks.
            root: the same of embedding and output.
            reduced: seconds in which the gradients of blocks are reduced, between replicas too.
        """
        count = self.model.micro_batches
        gather_ratio = self._gather_ratio  # gathering parameters over scattering their gradients
        copies, _ = self.replicas
        shards, _ = self.num_shards
        shard_bytes = self.root_parameters * self._gradient_bytes / shards
        between_copies = self._node.all_reduce_seconds(
            shard_bytes, stride=self.grid.tp * shards, ranks=copies
        )
        root_reduced = 0.0 if self.model.is_frozen else root + between_copies
        # (how often per step, seconds of each time, behind which pass)
        if self.model.held == "parameters":
            return (
                Moving(1, gather_ratio * root, "nothing"),
                Moving(1, gather_ratio * blocks, "forward"),
                Moving(1, reduced, "backward"),
                Moving(1, root_reduced, "nothing"),
            )
        return (
            Moving(count, 2 * gather_ratio * root, "nothing"),
            Moving(count, gather_ratio * blocks, "forward"),
            # the last micro-batch's backward pass reduces the gradients too
            Moving(count - 1, gather_ratio * blocks, "backward"),
            Moving(1, gather_ratio * blocks + reduced, "backward"),
            Moving(1, root_reduced, "nothing"),
        )

    @cached_property
    def _moving_shares(self) -> dict[str, float]:
        """By level of links: of the seconds in which parameters and gradients move behind a pass,
        the share for which the level is busy with them."""
        dense, experts = self.block_parameters
        # a root that is gathered around all blocks moves behind no pass
        root = 0.0 if self.model.gathers_per_block else self.root_parameters
        # (how often, parameters, distance between the ranks that share them, number of these ranks)
        kinds = [
            (self.model.num_layers, dense, self._strides[0], self.num_shards[0]),
            (self.model.moe_layers, experts, self._strides[1], self.num_shards[1]),
            (1, root, self._strides[0], self.num_shards[0]),
        ]
        names = self._node.names
        busy: dict[str, float] = {}
        total = 0.0
        for count, parameters, stride, shards in kinds:
            if shards == 1 or not count * parameters:
                continue
            # a scatter or a gathering takes half as long as an all-reduce
            load = self._node.all_reduce_load(parameters * self._gradient_bytes, stride, shards)
            total += count * load.alone / 2
            level_busy: dict[str, float] = {}
            for link, seconds in zip(load.links, load.seconds):  # the busiest of a level counts
                level = self.simulator.level_of(names[int(link)])
                level_busy[level] = max(level_busy.get(level, 0.0), float(seconds) / 2)
            for level, seconds in level_busy.items():
                busy[level] = busy.get(level, 0.0) + count * seconds
        return {level: seconds / total for level, seconds in busy.items()}

    def _level_seconds(self, run: Passes) -> dict[str, float]:
        """Return the seconds for which a pass of an MoE layer keeps the busiest link of each level
        busy."""
        busy: dict[str, float] = {}
        for name, seconds in run.link_seconds.items():
            level = self.simulator.level_of(name)
            busy[level] = max(busy.get(level, 0.0), seconds)
        return busy

    def _exposed_seconds(self, moved: Moving, forward: Passes, backward: Passes) -> float:
        """Return the seconds of a transfer that the pass behind which it moves does not hide.

        Transfer and pass together take as long as the longest of the pass, of the transfer alone,
        and of what each level of links carries for both. What exceeds the pass is exposed. On a CPU
        nothing is hidden, since one thread issues everything.

        Args:
            moved: the transfer.
            forward, backward: the passes of one MoE layer.
        """
        if self.cluster.host.runs_compute or moved.behind == "nothing":
            return moved.seconds
        # a layer's programs in the pass: one, and before a backward one maybe the forward one again
        program = forward
        repeated = 0.0  # share of the layers that run their forward program again
        if moved.behind == "backward":
            program = backward
            repeated = self.model.recomputes("moe")
        layers = self.model.moe_layers
        layer_seconds = program.seconds + repeated * forward.seconds
        pass_seconds = self._around_moves(moved.behind) + layers * layer_seconds

        program_busy = self._level_seconds(program)
        repeated_busy = self._level_seconds(forward) if repeated else {}
        longest = max(pass_seconds, moved.seconds)
        for level, share in self._moving_shares.items():
            layer_busy = program_busy.get(level, 0.0) + repeated * repeated_busy.get(level, 0.0)
            level_seconds = moved.seconds * share + layers * layer_busy
            longest = max(longest, level_seconds)
        return longest - pass_seconds

    def _around_moves(self, behind: str) -> float:
        """Return the seconds of a pass ("forward" or "backward") outside the programs of MoE
        layers, behind which parameters or gradients move; what is recomputed belongs to the
        backward pass."""
        model = self.model
        dense = (model.num_layers - model.moe_layers) * self.forward.dense
        shared = model.moe_layers * self.forward.shared
        forward_seconds = model.num_layers * self.forward.attention + dense + shared
        if behind == "forward":
            return forward_seconds
        recomputed = model.num_layers * self._attention_recomputed + model.recomputes("mlp") * dense
        recomputed += model.recomputes("moe", "shared_experts") * shared
        return 2 * forward_seconds + recomputed

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds in which an optimizer step reads and writes memory.

        For the parameters that a rank steps, gradients are read for their norm, read and written to
        clip them, and read together with parameters and two moments, which are written: ten values
        a parameter. If products read separate copies of the parameters, these are written from the
        masters. Whole gradients then lie in a buffer, which is averaged, checked for non-finite
        numbers, and zeroed (Megatron-LM, `core/optimizer` and
        `core/distributed/param_and_grad_buffer.py`).
        """
        size = self.model.parameter_bytes
        stepped = self.stepped_parameters
        moved = stepped * 10 * size
        if not self.model.gathers_per_block:
            # the masters are read, and their copies written
            copied = stepped * (size + self.model.layer.element_bytes)
            # read and written by the average, read by the check, written by zeroing
            buffer = self.whole_parameters * 4 * size
            moved += copied + buffer
        return moved / self._rates.memory

    @cached_property
    def activated_values(self) -> float:
        """Values of a rank's experts between activation and last matrix, in one MoE layer."""
        layer = self.model.layer
        grid = self.grid
        # the copies of all data-parallel groups are spread over ep ranks and replicas of experts
        rows = grid.dp * layer.copies / (grid.ep * grid.edp)
        return rows * layer.hidden / grid.etp

    @cached_property
    def compute_bound(self) -> float:
        """Seconds of computation of a step, with each expert in one product."""
        passes_per_layer = self.forward_passes + self.model.layer.backward_products
        passes = passes_per_layer * self.model.moe_layers
        return self._outside_seconds + self.model.micro_batches * passes * self._expert_seconds

    @property
    def moving_seconds(self) -> float:
        """Seconds per step in which parameters and gradients move, without overlap."""
        return sum(moved.times * moved.seconds for moved in self._movements)

    @cached_property
    def link_bound(self) -> float:
        """Lower bound on the seconds of a step: those of its busiest link if no pass sent more than
        it must (`_crossing_seconds`), or of moving parameters and gradients, if these are
        longer."""
        passes_per_layer = self.forward_passes + 1  # and one backward
        passes = self.model.micro_batches * passes_per_layer * self.model.moe_layers
        bounds = [passes * self._crossing_seconds(link) for link in self._links]
        return max([self.moving_seconds, *bounds])

    def floor(self, *, compression: float = 1.0) -> float:
        """Return a lower bound on the seconds of any plan on this layout.

        It sums the computation outside MoE layers, and for each pass through them the largest of
        computing, crossing a link, and gathering parameters behind the pass.

        Args:
            compression: bytes of a row over the bytes that a codec sends for it.
        """
        model = self.model
        compute = model.moe_layers * self._expert_seconds
        crossing = self._least_crossing_seconds(compression)
        forward = max(compute, crossing)
        recomputed = (self.forward_passes - 1) * forward
        backward = recomputed + max(model.layer.backward_products * compute, crossing)

        forward = max(forward, self._uncovered_moves("forward"))
        backward = max(backward, self._uncovered_moves("backward"))
        return self._outside_seconds + model.micro_batches * (forward + backward)

    def _least_crossing_seconds(self, compression: float) -> float:
        """Return the seconds for which the busiest link carries tokens in a pass through all MoE
        layers, at least; 0 if another micro-batch's computation hides them. `compression` is that
        of `floor`."""
        if self.model.overlapped:
            return 0.0
        slowest = max([0.0, *map(self._crossing_seconds, self._links)])
        return self.model.moe_layers * slowest / compression

    def _uncovered_moves(self, behind: Literal["forward", "backward"]) -> float:
        """Return the seconds in which parameters and gradients move behind a pass, less those that
        its work outside MoE layers covers; 0 or less if all are covered."""
        model = self.model
        if not model.gathers_per_block or model.held != "nothing":
            return 0.0  # they do not move in every pass
        # a gathering of the parameters takes as long as so many scatterings of their gradients
        scatterings = self._gather_ratio
        if behind == "backward" and not model.is_frozen:
            scatterings += 1  # backward gathers again, and scatters the gradients
        return scatterings * self._scatter_seconds - self._around_moves(behind)

    @property
    def _outside_seconds(self) -> float:
        """Seconds of a step outside MoE layers."""
        return self.model.micro_batches * self._around_seconds + self.optimizer_seconds

    @property
    def _gradient_bytes(self) -> int:
        return self.model.gradient_bytes or self.model.parameter_bytes

    @property
    def _gather_ratio(self) -> float:
        """Bytes of a gathered parameter over the bytes of its gradient."""
        return (self.model.gathered_bytes or self.model.parameter_bytes) / self._gradient_bytes

    @cached_property
    def whole_parameters(self) -> float:
        """Parameters of a rank before sharding over data-parallel ranks."""
        model = self.model
        experts = self.model.expert_parameters / (self.grid.ep * self.grid.etp)
        return model.dense_parameters / self.grid.tp + model.shared_parameters + experts

    @cached_property
    def held_parameters(self) -> float:
        """Parameters of a rank's shards."""
        dense = self.model.dense_parameters / self.grid.tp + self.model.shared_parameters
        # if there are several copies of the shards, each is sharded over so many fewer ranks
        copies, expert_copies = self.replicas
        # cut by ep and etp, and sharded over edp: all ranks together
        experts = self.model.expert_parameters / self.grid.world
        return copies * dense / self.grid.dp + expert_copies * experts

    @property
    def stepped_parameters(self) -> float:
        """Parameters that a rank's optimizer updates."""
        if self.model.is_frozen:
            return sum(self.model.adapters)
        return self.whole_parameters if self.model.sharded == "none" else self.held_parameters

    @cached_property
    def block_parameters(self) -> tuple[float, float]:
        """Parameters of a block on a rank before sharding over data-parallel ranks: dense ones, and
        experts'."""
        model = self.model
        table = model.embeddings * model.vocab * model.layer.dim
        dense_per_block = (model.dense_parameters - table) / model.num_layers
        dense = dense_per_block / self.grid.tp + model.shared_parameters / model.num_layers
        # A stage of dense blocks alone has no experts.
        experts_per_layer = model.expert_parameters / max(model.moe_layers, 1)
        return dense, experts_per_layer / (self.grid.ep * self.grid.etp)

    @cached_property
    def root_parameters(self) -> float:
        """Parameters of a rank's embedding and output, before sharding over data-parallel ranks."""
        return self.model.embeddings * self.model.vocab * self.model.layer.dim / self.grid.tp

    @property
    def _strides(self) -> tuple[int, int]:
        """Distance between the ranks that share the shards of dense parameters, and of experts."""
        return self.grid.tp, self.grid.ep * self.grid.etp

    @cached_property
    def replicas(self) -> tuple[int, int]:
        """Number of copies of each shard of dense parameters, and of experts."""
        return self.model.replicas, self.model.expert_replicas or self.model.replicas

    @cached_property
    def num_shards(self) -> tuple[int, int]:
        """Number of ranks over which dense parameters, and experts, are sharded."""
        copies, expert_copies = self.replicas
        return self.grid.dp // copies, self.grid.edp // expert_copies

    @cached_property
    def _scatter_seconds(self) -> float:
        """Seconds of scattering the gradients of all blocks: dense ones over dp, experts' over edp.
        A scatter is half of an all-reduce."""
        parameters, expert_parameters = self.block_parameters
        stride, expert_stride = self._strides
        shards, expert_shards = self.num_shards
        size = self._gradient_bytes
        dense = self._node.all_reduce_seconds(parameters * size, stride, shards) / 2
        experts = (
            self._node.all_reduce_seconds(expert_parameters * size, expert_stride, expert_shards)
            / 2
        )
        return self.model.num_layers * dense + self.model.moe_layers * experts

    @cached_property
    def _copy_seconds(self) -> float:
        """Seconds in which the replicas of shards all-reduce the gradients of all blocks."""
        parameters, expert_parameters = self.block_parameters
        stride, expert_stride = self._strides
        shards, expert_shards = self.num_shards
        copies, expert_copies = self.replicas
        size = self._gradient_bytes
        # replicas of a shard are as far apart as the ranks of one replica reach
        dense = self._node.all_reduce_seconds(parameters * size / shards, stride * shards, copies)
        experts = self._node.all_reduce_seconds(
            expert_parameters * size / expert_shards, expert_stride * expert_shards, expert_copies
        )
        return self.model.num_layers * dense + self.model.moe_layers * experts

    @cached_property
    def _expert_seconds(self) -> float:
        """Seconds of one forward pass of a rank's experts, each in one product."""
        layer = self.model.layer
        grid = self.grid
        rows_per_expert = grid.dp * layer.copies / layer.num_experts / grid.edp
        parameters = layer.matrices * layer.dim * layer.hidden / grid.etp
        rates = self.simulator.rates_of(layer.products or layer.dtype)
        seconds_per_expert = rates.product_seconds(
            np.array([rows_per_expert]),
            2.0 * parameters,
            parameters * layer.weight_bytes,
            grouped=True,
        )
        return float(seconds_per_expert[0]) * layer.num_experts / grid.ep

    @property
    def _links(self) -> list[Link]:
        """Levels that every message out of a run of devices crosses."""
        per_node = self.cluster.devices_per_node
        spans_nodes = self.grid.world > per_node
        links = []
        for link in self.cluster.links:
            is_inner = link.devices < per_node
            bypassed = self.cluster.peers and is_inner  # by direct links between devices
            carries_some = link.carries == "all" or (link.carries == "outside" and spans_nodes)
            # a shared medium has no links out of a run
            if carries_some and not link.shared and link.devices <= per_node and not bypassed:
                links.append(link)
        return links

    def _crossing_seconds(self, link: Link) -> float:
        """Return the seconds for which a pass of an MoE layer keeps a link busy in one direction,
        at least."""
        layer = self.model.layer
        per_node = self.cluster.devices_per_node
        # Of a link that only carries messages out of a node, what leaves the node is spread evenly
        # over the node's links. Any other carries what leaves the devices behind it.
        run_devices = per_node if link.carries == "outside" else link.devices
        rows = _rows_out_of_run(layer, self.grid, run_devices)
        link_bytes = rows * layer.dim * layer.element_bytes * link.devices / run_devices
        return link_bytes / link.slowest(self.cluster.nodes)


def _rows_out_of_run(layer: Workload, grid: Grid, run_devices: int) -> float:
    """Return the least rows of `dim` that must leave a run of `run_devices` consecutive devices in
    a pass of a layer: each token once for each other run that has one of its experts, and as many
    results for the others' tokens; or, if these are fewer, the experts' weights once (backward,
    their gradients). 0 if none need to, or if an expert is in several runs."""
    num_runs = grid.ep * grid.etp // run_devices  # over which a replica of the experts is spread
    num_own_runs = max(1, grid.tp // run_devices)  # those that have the tokens: of a tp group
    num_other_runs = num_runs - num_own_runs
    if num_other_runs <= 0 or layer.num_experts < num_runs:
        return 0.0
    tokens_per_run = node_tokens_per_node(layer, num_runs, chunks=1)  # of one dp group's tokens
    # dp * run_devices / world: number of dp groups in a run
    tokens = tokens_per_run * num_other_runs * grid.dp * run_devices / grid.world
    # weights in rows too: a matrix of an expert has `hidden` of them
    weights = layer.matrices * layer.hidden * layer.num_experts * (1 - 1 / num_runs)
    return min(2 * tokens, weights)


def hop_seconds(
    cluster: ClusterSpec, num_bytes: float, ranks: int, *, is_inside: bool, message_us: float = 0.0
) -> float:
    """Return the seconds in which all ranks of a stage send to those of the next one.

    Args:
        cluster: gives the links.
        num_bytes: bytes that each rank sends.
        ranks: ranks of a stage.
        is_inside: whether both stages are on one node.
        message_us: microseconds of each message on the host.
    """
    carried = ("all", "inside" if is_inside else "outside")
    slowest = 0.0
    for link in cluster.links:
        if link.carries in carried:
            rate = link.slowest(cluster.nodes)
            # all ranks behind the link send over it at once
            latency = (link.latency_us + message_us) * 1e-6
            slowest = max(slowest, num_bytes * min(link.devices, ranks) / rate + latency)
    return slowest


def layer_passes(
    cluster: ClusterSpec, grid: Grid, layer: Workload, *, deepep: bool
) -> tuple[LayerPass, LayerPass]:
    """Return the forward and the backward pass of an MoE layer of another system under even
    routing.

    Experts take their products and their activations' traffic (`compute.py`), twice as long
    backward. Their rows are sorted before and after each all-to-all (Megatron's dispatchers).
    DeepEP and HybridEP send a token once to a node and once to each rank there, both at the same
    time, and need no sorting on the side of the tokens, only on that of the experts.

    Args:
        cluster: the cluster.
        grid: the layout of a pipeline stage.
        layer: the layer.
        deepep: whether kernels forward tokens between and inside nodes.
    """
    experts = layer.num_experts // grid.ep
    # copies are those of a data-parallel group; edp replicas of an expert share all groups' copies
    rows_per_expert = grid.dp * layer.copies / layer.num_experts / grid.edp
    rates = rates_of(cluster, layer.products or layer.dtype)
    rows = np.array([rows_per_expert])  # one expert stands for all
    parameters = layer.matrices * layer.dim * layer.hidden / grid.etp
    units = layer.hidden / grid.etp  # of an expert's hidden width, on a rank
    seconds = rates.product_seconds(
        rows, 2.0 * parameters, parameters * layer.weight_bytes, grouped=True
    )
    seconds += rates.traffic_seconds(rows, layer.dim, units, layer.matrices, layer.element_bytes)
    products = float(seconds[0]) * experts

    frozen_forward = 0.0
    frozen_backward = 0.0
    if layer.frozen_bytes:
        further = frozen_seconds(rows, units, layer, rates, is_backward=False)
        further_backward = frozen_seconds(rows, units, layer, rates, is_backward=True)
        frozen_forward = float(further[0]) * experts
        frozen_backward = float(further_backward[0]) * experts

    # Rows are sorted before and behind both all-to-alls; with DeepEP, or without any all-to-all,
    # only before and behind the experts. Sorting reads and writes each row.
    sorts = 2 if deepep or grid.ep == 1 else 4
    sorting = sorts * 2 * rows_per_expert * experts * layer.dim * layer.element_bytes / rates.memory
    links, latency = _all_to_all(cluster, grid, layer, deepep)
    all_to_all = max(links.values(), default=0.0) + latency
    link_seconds = {name: 2 * busy for name, busy in links.items()}  # there and back
    forward = products + frozen_forward + sorting
    backward = layer.backward_products * products + frozen_backward + sorting
    return (
        LayerPass(forward, 2 * all_to_all, link_seconds),
        LayerPass(backward, 2 * all_to_all, link_seconds),
    )


def _all_to_all(
    cluster: ClusterSpec, grid: Grid, layer: Workload, deepep: bool
) -> tuple[dict[str, float], float]:
    """Return the seconds for which each link is busy with an all-to-all, by its name, and the
    latency of the all-to-all."""
    group = grid.ep * grid.etp  # ranks that exchange rows
    per_node = grid.ranks_per_node or grid.world
    if group == 1:
        return {}, 0.0
    topology = one_node(cluster, grid.world, grid.ranks_per_node)
    # one message from each rank of a node to each rank of its group
    source = np.repeat(np.arange(per_node), group)
    position_in_group = np.tile(np.arange(group), per_node)
    target = source // group * group + position_in_group
    # a rank sends one of tp parts of its group's tokens
    row_bytes = layer.dim * layer.element_bytes / grid.tp
    message_bytes = np.full(len(source), layer.copies / grid.ep * row_bytes)
    if deepep:
        nodes = max(group // per_node, 1)  # of a group
        ranks_inside = min(group, per_node)  # ranks of a group on each of them
        message_bytes = np.where(
            target // per_node != source // per_node,
            # a rank's part of what goes to a node, spread evenly over the node's ranks
            node_tokens_per_node(layer, nodes, chunks=1) / ranks_inside * row_bytes,
            # inside a node, ranks pass on the tokens that came from all nodes
            node_tokens_per_node(layer, grid.ep, chunks=1) * nodes * row_bytes,
        )
    apart = source != target
    messages = np.ones(int(apart.sum()))
    load = topology.loads(source[apart], target[apart], message_bytes[apart], messages)
    link_seconds = {
        topology.names[link]: float(busy) for link, busy in zip(load.links, load.seconds)
    }
    return link_seconds, load.latency


def reduce_seconds(
    cluster: ClusterSpec, grid: Grid, num_bytes: float, stride: int, ranks: int
) -> float:
    """Return the seconds of an all-reduce in every group of ranks that are `stride` apart, all
    groups at once, on a cluster's links (`Topology.all_reduce_load`)."""
    topology = one_node(cluster, grid.world, grid.ranks_per_node)
    return topology.all_reduce_seconds(num_bytes, stride, ranks)


def all_reduce_seconds(cluster: ClusterSpec, grid: Grid, num_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-reduce in every group of consecutive ranks, by rings or in a
    switch that sums.

    With a switch, each rank sends its values once and its share of the sums once to all ranks, and
    receives as much. A sum comes down before it goes up again, so the latency counts twice.

    Args:
        cluster: gives the links.
        grid: the mesh.
        num_bytes: bytes of one rank's values.
        ranks: ranks of a group.
    """
    by_rings = reduce_seconds(cluster, grid, num_bytes, stride=1, ranks=ranks)
    per_node = grid.ranks_per_node or grid.world
    has_switch = any(link.adds for link in cluster.links)
    # it sums for more than two devices of one node
    if not has_switch or not 2 < ranks <= per_node or num_bytes == 0:
        return by_rings
    devices = np.arange(per_node)
    # what a rank sends to the switch loads its links as a message to the next rank of its group
    next_devices = devices // ranks * ranks + (devices + 1) % ranks
    sent_bytes = np.full(per_node, (1 + 1 / ranks) * num_bytes)  # values, and a share of the sums
    messages = np.full(per_node, 2.0)  # one for each of these
    topology = one_node(cluster, grid.world, grid.ranks_per_node)
    load = topology.loads(devices, next_devices, sent_bytes, messages)
    return min(by_rings, load.alone + load.latency)  # `alone` has the latency once
