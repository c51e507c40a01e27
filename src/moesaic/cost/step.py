"""A whole training step: attention and dense layers, MoE layers forward and backward, parameters, optimizer; and its memory.

What an MoE layer takes is simulated; everything else of a step is added up here, on one layout. Parameters, gradients and
moments lie in parts on all data-parallel ranks, as `moesaic train` keeps them (FSDP2): dense ones over dp, experts over edp.
They are gathered before a block runs, forward and backward, and gradients are scattered after it, in every micro-batch. So
many copies of the experts cost no memory but traffic, which decides whether ep = 1 wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from moesaic.cost.call_sizes import node_tokens_per_node
from moesaic.cost.cluster import ClusterSpec, Link
from moesaic.cost.compute import rates_of
from moesaic.cost.memory import Memory, layer_memory
from moesaic.cost.simulate import Simulator
from moesaic.cost.timing import Simulated
from moesaic.cost.topology import Topology, check_fit
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.task import Program

Sharded = Literal["parameters", "gradients", "optimizer", "none"]
"""As of `StepModel.sharded`."""


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
    """Each how-many-th block has an MoE layer, counted from the last block; the others are dense."""
    dense_hidden: int = 0
    """Inner width of dense feed-forward layers; 0 for top_k times the experts'."""
    vocab: int = 0
    """Of the embedding and the output; 0 leaves both out."""
    micro_batches: int = 1
    """Accumulated before the optimizer steps."""
    checkpoint_activations: bool = False
    """Keep each block's input only and run its forward pass again in backward."""
    shared_hidden: int = 0
    """Inner width of a shared expert that every token passes in an MoE layer; 0 for none."""
    parameter_bytes: int = 4
    """Of a parameter, of its gradient, and of each of Adam's two moments."""
    sparse_layers: int = 0
    """Blocks with an MoE layer; 0 for those that `moe_every` says."""
    attention_parameters: float = 0.0
    """Of a block's attention, the mean over blocks; 0 for four matrices dim x dim."""
    score_operations: float = 0.0
    """Of a token and block where queries meet keys and values, the mean over blocks; 0 for heads as wide as a token that see
    all tokens before it."""
    embeddings: int = 2
    """Matrices vocab x dim: embedding and output; 1 where they are one."""
    sharded: Sharded = "parameters"
    """What lies in parts on data-parallel ranks. parameters: all that belongs to one (FSDP2, ZeRO-3). The others have
    parameters as wide as activations whole on every rank. optimizer: the float32 master and moments lie in parts (ZeRO-1);
    gradients are reduced and parameters gathered once per step. gradients: they do too, and are reduced in every micro-batch
    (ZeRO-2). none: nothing does, and gradients are all-reduced once per step."""
    outputs: int = 1
    """How often the output is computed for a token: once, and once more for every further token that is predicted."""
    stages: int = 1
    """Pipeline stages; `num_layers` are those of one, and `vocab` its part."""
    virtual_stages: int = 1
    """Runs of layers that a rank has of the pipeline (interleaved 1F1B)."""
    overlapped: bool = False
    """All-to-alls run beside another micro-batch's computing."""
    sequence_parallel: bool = False
    """Norms and residuals see a part of the positions, so that tensor parallelism scatters its sums and gathers them again in
    place of an all-reduce."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "seq_len",
            "moe_every",
            "micro_batches",
            "parameter_bytes",
            "stages",
            "virtual_stages",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("dense_hidden", "vocab", "shared_hidden"):
            if getattr(self, name) < 0:
                raise InputError(f"model.{name}={getattr(self, name)}: must be at least 0")
        if self.layer.tokens % self.seq_len:
            raise InputError(
                f"model.layer.tokens={self.layer.tokens} are no whole sequences of model.seq_len={self.seq_len}: choose a "
                "multiple"
            )

    @property
    def moe_layers(self) -> int:
        """MoE layers; the last block has one."""
        return self.sparse_layers or -(-self.num_layers // self.moe_every)

    @property
    def attention(self) -> float:
        """Parameters of a block's attention."""
        return self.attention_parameters or 4 * self.layer.dim * self.layer.dim

    @property
    def scores(self) -> float:
        """Operations per token and block where queries meet keys and values."""
        return self.score_operations or 2 * 2 * self.seq_len * self.layer.dim / 2

    @property
    def inner(self) -> int:
        """Inner width of dense feed-forward layers."""
        return self.dense_hidden or self.layer.top_k * self.layer.hidden

    @property
    def dense_parameters(self) -> float:
        """Parameters outside the experts; the router's among them."""
        dim = self.layer.dim
        blocks = self.num_layers * self.attention + self.moe_layers * dim * self.layer.num_experts
        dense = (self.num_layers - self.moe_layers) * self.layer.matrices * dim * self.inner
        return blocks + dense + self.embeddings * self.vocab * dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self.moe_layers * self.layer.num_experts * self.layer.matrices * self.layer.dim * self.layer.hidden


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step under a plan."""

    seconds: float
    parts: dict[str, float]
    """Seconds by part; they add up."""
    limits: dict[str, float]
    """Seconds that the step cannot go below for one reason each: computing, a link, gathering parameters."""

    @property
    def bottleneck(self) -> str:
        """The reason that limits it most."""
        return max(self.limits, key=lambda name: self.limits[name])


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of steps under one plan: of their times, parts and limits."""

    def mean(tables: list[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for table in tables for name in table)
        return {name: sum(table.get(name, 0.0) for table in tables) / len(tables) for name in names}

    return Estimate(
        seconds=sum(each.seconds for each in estimates) / len(estimates),
        parts=mean([each.parts for each in estimates]),
        limits=mean([each.limits for each in estimates]),
    )


class StepCostModel:
    """What a step has around its MoE programs, on one layout.

    Args:
        model: what is trained.
        grid: the layout.
        simulator: of the cluster; one of a profile predicts the MoE layers by what was measured.

    Raises:
        InputError: if the layout does not fit the cluster, or the dtype's rate is not known.
    """

    def __init__(self, model: StepModel, grid: Grid, simulator: Simulator) -> None:
        self.model, self.grid, self.simulator, self.cluster = model, grid, simulator, simulator.cluster
        check_fit(self.cluster, grid.world, grid.ranks_per_node)
        self._rates = rates_of(self.cluster, model.layer.dtype)
        self._passes = 4 if model.checkpoint_activations else 3
        attention, dense, unembed = self._block_seconds()
        self.attention = self._all_passes(attention, model.num_layers)
        self.dense = self._all_passes(dense, model.num_layers - model.moe_layers)
        self.unembed = 3 * model.outputs * unembed
        self.shared = self._shared()
        self.routing = simulator.timing.around_seconds
        """Seconds of an MoE layer outside its programs, forward and backward, where they were measured; a recomputed forward
        pass replays its routing and counts nothing."""

    @property
    def again(self) -> int:
        """Forward passes of a block per micro-batch: 2 where backward recomputes."""
        return self._passes - 2

    def estimate(self, there: Simulated, back: Simulated) -> Estimate:
        """Return a step's time.

        Args:
            there: the forward program of an MoE layer.
            back: its backward program.
        """
        count, layers = self.model.micro_batches, self.model.moe_layers
        forward, backward = self.again * self._of_layer(there, 1), self._of_layer(back, 2)
        parts = {
            "attention": count * self.attention,
            "dense": count * self.dense,
            "unembed": count * self.unembed,
            "shared experts": count * self.shared,
            "routing": count * layers * self.routing,
            "moe forward": count * layers * forward,
            "moe backward": count * layers * backward,
            "parameters": count * self._exposed(there, back) if self._in_parts else self._exposed_once(there, back),
            "optimizer": self.optimizer_seconds,
        }
        busy = sum(parts.values()) - parts["parameters"] - parts["optimizer"]
        parts["pipeline"] = busy / count * (self.model.stages - 1) / self.model.virtual_stages
        experts = layers * (self.routing + self.again * there.compute_seconds + back.compute_seconds)
        computing = (
            count * (self.attention + self.dense + self.unembed + self.shared + experts) + self.optimizer_seconds
        )
        limits = {"compute": computing, "gathering parameters": self._gatherings * sum(self.sharding.values())}
        for name in sorted({*there.link_seconds, *back.link_seconds}):
            seconds = self.again * there.link_seconds.get(name, 0.0) + back.link_seconds.get(name, 0.0)
            limits[name] = count * layers * seconds
        return Estimate(
            seconds=sum(parts.values()),
            parts={name: seconds for name, seconds in parts.items() if seconds > 0},
            limits=limits,
        )

    def memory(self, forward: Program, backward: Program, grid: Grid, *, memory_budget: int | None = None) -> Memory:
        """Return what a rank needs.

        Attention with fused scores keeps 15 values of a token's width a layer, a dense feed-forward layer its input and its
        inner activations (Korthikanti et al. 2022, section 4.1, without the scores).

        Args:
            forward: the lowered program of an MoE layer.
            backward: the lowered program of its gradients.
            grid: the layout, etp factored as the plan wants it.
            memory_budget: bytes that a layer holds at most.
        """
        model, layer = self.model, self.model.layer
        tokens, width = layer.tokens, layer.dim * layer.element_bytes
        kept, buffers = layer_memory(forward, backward, self.simulator.volumes(forward, layer, grid), memory_budget)
        inner = tokens * (width + (layer.matrices - 1) * model.inner * layer.element_bytes) / grid.tp
        per_block = 7.5 * tokens * width / grid.tp
        blocks = model.num_layers * per_block + model.moe_layers * kept + (model.num_layers - model.moe_layers) * inner
        if model.checkpoint_activations:
            blocks = model.num_layers * tokens * width / grid.tp + per_block + max(kept, inner)
        size, held = model.parameter_bytes, self._held_parameters
        if not self._in_parts:
            whole, waiting = self._whole_parameters, min(model.stages, model.micro_batches)
            at_once = waiting + (model.stages - 1) / model.virtual_stages * (model.virtual_stages > 1)
            return Memory(
                weights=whole * layer.element_bytes,
                # Of gradients in parts a block's are whole while they are reduced.
                gradients=(held + sum(self._block_parameters) if model.sharded == "gradients" else whole) * size,
                optimizer=self._stepped_parameters * 3 * size,
                activations=blocks * at_once,
                buffers=buffers + (tokens * model.vocab * 4 / grid.tp),
            )
        dense, experts = self._block_parameters
        cast = experts * layer.element_bytes if layer.element_bytes != size else 0.0
        kept_casts = 1 if model.checkpoint_activations else model.moe_layers
        gathered = dense * (grid.dp > 1) + experts * (grid.edp > 1)
        return Memory(
            weights=held * size,
            gradients=held * size,
            optimizer=held * 2 * size,
            activations=blocks + kept_casts * cast,
            # two blocks' parameters, one block's gradients
            buffers=buffers + (tokens * model.vocab * 4 / grid.tp) + 3 * gathered * size,
        )

    @property
    def least_bytes(self) -> float:
        """What a rank needs whatever the plan: parameters, gradients, moments, and the residual stream."""
        stream = self.model.layer.tokens * self.model.layer.dim * self.model.layer.element_bytes / self.grid.tp
        size = self.model.parameter_bytes
        if not self._in_parts:
            gradients = self._held_parameters if self.model.sharded == "gradients" else self._whole_parameters
            whole = self._whole_parameters * self.model.layer.element_bytes + gradients * size
            return whole + self._stepped_parameters * 3 * size + self.model.num_layers * stream
        return self._held_parameters * 4 * size + self.model.num_layers * stream

    @cached_property
    def compute_bound(self) -> float:
        """Seconds of computing of a step, experts in one product each."""
        return self._outside + self.model.micro_batches * self.model.moe_layers * self._passes * self._expert_seconds

    @cached_property
    def link_bound(self) -> float:
        """Seconds of the fullest link of a step if every token crossed it once for all experts behind it, or the weights
        did where they are fewer bytes; parameters and gradients included."""
        count, passes = self.model.micro_batches, 2 * (self.again + 1) * self.model.moe_layers
        if not self._in_parts:
            times = self._gatherings
            return max(
                [0.0, *(count * passes * self._crossing(link) + times * self._sharding(link) for link in self._links)]
            )
        return max([0.0, *(count * (passes * self._crossing(link) + self._sharding(link)) for link in self._links)])

    def floor(self, *, compression: float = 1.0) -> float:
        """Return seconds that no plan on this layout goes below: what is computed outside the MoE layers, and of each of
        their passes computing, crossing, or gathering behind it, whichever is more.

        On a profiled machine crossing does not count: there a part of the bytes may be through before the last rank has come.

        Args:
            compression: bytes of a row over those that a codec sends.
        """
        compute, crossing = self._expert_seconds, 2 * self._crossing_seconds / compression
        if self.simulator.timing.starts_early or self.model.overlapped:
            crossing = 0.0
        attention = self.attention / self._passes / self.model.num_layers
        gathering = [moves * (sum(self._unit_seconds) - attention) * self._in_parts for moves in (1, 2)]
        passes = (self.again - 1) * max(compute, crossing)
        passes += max(compute, crossing, gathering[0]) + max(2 * compute, crossing, gathering[1])
        return self._outside + self.model.micro_batches * self.model.moe_layers * passes

    @cached_property
    def sharding(self) -> dict[str, float]:
        """Seconds per micro-batch of gathering parameters twice and scattering gradients, for each kind of unit, alone."""
        dense, experts = self._unit_seconds
        model = self.model
        ends = reduce_seconds(self.cluster, self.grid, self._root_bytes, self.grid.tp, self.grid.dp) / 2
        return {"dense": 3 * model.num_layers * dense, "experts": 3 * model.moe_layers * experts, "ends": 3 * ends}

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds of reading and writing parameters and moments and reading gradients, each rank its part if it has one."""
        per_parameter = 7 * self.model.parameter_bytes
        return self._stepped_parameters * per_parameter / self._rates.memory

    @property
    def _outside(self) -> float:
        each = self.attention + self.dense + self.unembed + self.shared
        return self.model.micro_batches * each + self.optimizer_seconds

    def _block_seconds(self) -> tuple[float, float, float]:
        """Return the seconds of a forward pass of attention, of a dense feed-forward layer, and of the output."""
        model, grid, layer = self.model, self.grid, self.model.layer
        tokens, dim, size = layer.tokens, layer.dim, layer.element_bytes
        rows = np.array([float(tokens)])
        # The all-reduce that ends a layer which is split over tp (Megatron-LM, Shoeybi et al. 2019).
        values = tokens * dim * size
        over_tp = (
            reduce_seconds(self.cluster, grid, values, 1, grid.tp)
            if model.sequence_parallel
            else all_reduce_seconds(self.cluster, grid, values, grid.tp)
        )

        def product(flops_per_row: float, weights: float) -> float:
            return float(self._rates.product_seconds(rows, flops_per_row / grid.tp, weights * size / grid.tp)[0])

        copies = 10 * tokens * dim * size / grid.tp / self._rates.memory
        inner = layer.matrices * dim * model.inner
        return (
            product(2 * model.attention + model.scores, model.attention) + copies + over_tp,
            product(2 * inner, inner) + copies / 2 + over_tp,
            product(2 * dim * model.vocab, dim * model.vocab) if model.vocab else 0.0,
        )

    def _all_passes(self, seconds: float, layers: int) -> float:
        """Return the seconds of some layers, forward and backward, from those of one forward pass."""
        total = 0.0
        for passes in [1] * layers + ([1, 2] if self.model.checkpoint_activations else [2]) * layers:
            total += passes * seconds
        return total

    def _exposed(self, there: Simulated, back: Simulated) -> float:
        """Return the seconds per micro-batch in which parameters and gradients move and nothing else goes on.

        A block's parameters are gathered while the block before it runs, where its movements leave the links idle; on CPU,
        where one thread issues everything, nothing hides.
        """
        dense, experts = self._unit_seconds
        attention = self.attention / self._passes / self.model.num_layers
        total = self.sharding["ends"]
        for layers, gathered, inner in (
            (self.model.moe_layers, dense + experts, (there, back)),
            (self.model.num_layers - self.model.moe_layers, dense, None),
        ):
            for moves, passes, index in ((1, 1, 0), (2, 2, 1)):
                run = None if inner is None else inner[index]
                idle = passes * attention + (0.0 if run is None else max(run.seconds - run.communication_seconds, 0.0))
                hidden = 0.0 if self.cluster.host.runs_compute else idle
                total += layers * max(moves * gathered - hidden, 0.0)
        return total

    def _of_layer(self, run: Simulated, passes: int) -> float:
        """Return the seconds of a pass of an MoE layer, its movements beside the other computing where they are."""
        if not self.model.overlapped:
            return run.seconds
        beside = run.compute_seconds + passes * self.attention / self._passes / self.model.num_layers
        moving = max(run.seconds - run.compute_seconds, 0.0)
        lost = self.cluster.device.contention * min(moving, beside)
        return run.compute_seconds + max(moving - beside, 0.0) + lost

    def _exposed_once(self, there: Simulated, back: Simulated) -> float:
        """Return the seconds of a step in which gradients or parameters move for the optimizer and nothing else goes on.

        Gradients are reduced behind the last micro-batch's backward pass, or in parts behind each, parameters gathered behind
        the first forward pass; without parts gradients are gathered where they were reduced.
        """
        dense, experts = self._unit_seconds
        units = self.model.num_layers * dense + self.model.moe_layers * experts + self.sharding["ends"] / 3
        total, attention = 0.0, self.attention / self._passes
        whole, each_time = self.model.sharded == "none", self.model.sharded == "gradients"
        # Gradients have parameter_bytes each, parameters element_bytes.
        for run, passes, share, times in (
            (there, 1, 0.0 if whole else self.model.layer.element_bytes / self.model.parameter_bytes, 1),
            (back, 2, 2.0 if whole else 1.0, self.model.micro_batches if each_time else 1),
        ):
            idle = passes * attention + self.model.moe_layers * max(run.seconds - run.communication_seconds, 0.0)
            total += times * max(share * units - (0.0 if self.cluster.host.runs_compute else idle), 0.0)
        return total

    @property
    def _in_parts(self) -> bool:
        """Whether parameters are gathered for every block of every micro-batch."""
        return self.model.sharded == "parameters"

    @property
    def _gatherings(self) -> float:
        """How often per step all parameters are gathered twice and gradients scattered once, float32 all."""
        count = self.model.micro_batches
        return {"parameters": count, "gradients": (count + 0.5) / 3, "optimizer": 0.5, "none": 2 / 3}[
            self.model.sharded
        ]

    @property
    def _stepped_parameters(self) -> float:
        """Parameters that a rank's optimizer steps."""
        return self._whole_parameters if self.model.sharded == "none" else self._held_parameters

    @property
    def _whole_parameters(self) -> float:
        """Parameters of a rank before they are cut over data-parallel ranks."""
        shared = self.model.shared_hidden * self.model.layer.matrices * self.model.layer.dim * self.model.moe_layers
        experts = self.model.expert_parameters / (self.grid.ep * self.grid.etp)
        return self.model.dense_parameters / self.grid.tp + shared + experts

    @cached_property
    def _unit_seconds(self) -> tuple[float, float]:
        """Seconds of gathering a block's dense parameters over dp, and its experts' over edp."""
        dense, experts = (count * self.model.parameter_bytes for count in self._block_parameters)
        over_dp = reduce_seconds(self.cluster, self.grid, dense, self.grid.tp, self.grid.dp)
        over_edp = reduce_seconds(self.cluster, self.grid, experts, self.grid.ep * self.grid.etp, self.grid.edp)
        return over_dp / 2, over_edp / 2

    @property
    def _block_parameters(self) -> tuple[float, float]:
        """Parameters of a block on a rank before they are cut over data-parallel ranks: dense ones, experts'."""
        model, layer = self.model, self.model.layer
        dense = (model.dense_parameters - model.embeddings * model.vocab * layer.dim) / model.num_layers / self.grid.tp
        dense += self.model.shared_hidden * layer.matrices * layer.dim * model.moe_layers / model.num_layers
        return dense, model.expert_parameters / model.moe_layers / (self.grid.ep * self.grid.etp)

    @property
    def _root_bytes(self) -> float:
        """Bytes of the embedding and the output."""
        return (
            self.model.embeddings * self.model.vocab * self.model.layer.dim / self.grid.tp * self.model.parameter_bytes
        )

    @property
    def _held_parameters(self) -> float:
        shared = self.model.shared_hidden * self.model.layer.matrices * self.model.layer.dim * self.model.moe_layers
        dense = self.model.dense_parameters / self.grid.tp + shared
        return dense / self.grid.dp + self.model.expert_parameters / self.grid.world

    def _shared(self) -> float:
        """Return the seconds per micro-batch of shared experts, which every rank of a tensor group computes whole."""
        layer, hidden = self.model.layer, self.model.shared_hidden
        if not hidden:
            return 0.0
        work = layer.matrices * layer.dim * hidden
        once = self._rates.product_seconds(np.array([float(layer.tokens)]), 2.0 * work, work * layer.element_bytes)
        return self.model.moe_layers * self._passes * float(once[0])

    @cached_property
    def _expert_seconds(self) -> float:
        """Seconds of one forward pass of a rank's experts, each in one product."""
        layer, grid = self.model.layer, self.grid
        rows = np.array([grid.dp * layer.copies / layer.num_experts / grid.edp])
        work = layer.matrices * layer.dim * layer.hidden / grid.etp
        each = self._rates.product_seconds(rows, 2.0 * work, work * layer.element_bytes)
        return float(each[0]) * layer.num_experts / grid.ep

    @property
    def _links(self) -> list[Link]:
        """Levels that every message out of a run of devices uses."""
        crosses = self.grid.world > self.cluster.devices_per_node
        return [
            link for link in self.cluster.links
            if not link.shared and link.carries != "inside" and link.devices <= self.cluster.devices_per_node
            and (crosses or link.carries == "all")
            and not (self.cluster.peers and link.devices < self.cluster.devices_per_node)
        ]  # fmt: skip

    @cached_property
    def _crossing_seconds(self) -> float:
        return max([0.0, *map(self._crossing, self._links)])

    def _crossing(self, link: Link) -> float:
        """Return the seconds that a link takes one way, each token crossing it once, or the experts' weights."""
        layer, grid = self.model.layer, self.grid
        where = self._run_of(link)
        runs = grid.ep * grid.etp // where
        elsewhere = runs - max(1, grid.tp // where)
        if elsewhere <= 0 or layer.num_experts < runs:
            return 0.0
        tokens = node_tokens_per_node(layer, runs, 1) * elsewhere * grid.dp * where / grid.world
        weights = layer.matrices * layer.hidden * layer.num_experts * (1 - 1 / runs)
        return min(tokens, weights) * layer.dim * layer.element_bytes * link.devices / where / link.slowest

    def _sharding(self, link: Link) -> float:
        """Return the seconds per micro-batch that gathering parameters and scattering gradients takes of a link."""
        dense, experts = (count * self.model.parameter_bytes for count in self._block_parameters)
        units = (
            (self.model.num_layers * dense, self.grid.tp, self.grid.dp),
            (self.model.moe_layers * experts, self.grid.ep * self.grid.etp, self.grid.edp),
            (self._root_bytes, self.grid.tp, self.grid.dp),
        )
        total, where = 0.0, self._run_of(link)
        for num_bytes, stride, ranks in units:
            inside = min(ranks, max(1, where // stride))
            total += where / inside * num_bytes * (1 - inside / ranks)
        return 3 * total * link.devices / where / link.slowest

    def _run_of(self, link: Link) -> int:
        """Return how many devices leave by a link: of one that only carries what leaves a node, all of the node, evenly."""
        return self.cluster.devices_per_node if link.carries == "outside" else link.devices


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


def all_reduce_seconds(cluster: ClusterSpec, grid: Grid, num_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-reduce in every group of consecutive ranks, by rings or in a switch that adds up.

    In a switch each rank sends its values once and its share of the sums once more to all, and receives as much. A sum comes
    down before it goes up again, so the latency counts twice.

    Args:
        cluster: the links.
        grid: the mesh.
        num_bytes: of one rank's values.
        ranks: of a group.
    """
    by_rings, per_node = reduce_seconds(cluster, grid, num_bytes, 1, ranks), grid.ranks_per_node or grid.world
    if not 2 < ranks <= per_node or num_bytes == 0 or not any(link.adds for link in cluster.links):
        return by_rings
    here = np.arange(per_node)
    sent, messages = np.full(per_node, (1 + 1 / ranks) * num_bytes), np.full(per_node, 2.0)
    topology = Topology(cluster, grid.world, grid.ranks_per_node, block=per_node)
    load = topology.loads(here, here // ranks * ranks + (here + 1) % ranks, sent, messages)
    return min(by_rings, load.alone + load.latency)
