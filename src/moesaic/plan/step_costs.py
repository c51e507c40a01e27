"""What a training step takes and needs outside the programs of its MoE layers, on one layout.

`moesaic train` keeps parameters, gradients and moments in parts on all data-parallel ranks (FSDP2): dense ones over dp,
experts over edp. They are gathered before a block runs, forward and backward, and gradients are scattered after it, in
every micro-batch. So many copies of the experts cost no memory but traffic, which decides whether ep = 1 wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.cost.call_sizes import node_tokens_per_node
from moesaic.cost.cluster import ClusterSpec, Link
from moesaic.cost.compute import Rates, rates_of
from moesaic.cost.memory import Memory
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import reduce_seconds, simulate_step, step_memory
from moesaic.cost.timing import Simulated
from moesaic.plan.compile import Compiled, compile_plan
from moesaic.plan.layouts import replica_of
from moesaic.plan.model import Job
from moesaic.plan.plan import Plan
from moesaic.program.grid import Grid


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
        job: what is trained.
        cluster: on what.
        grid: the layout.
        simulator: of the cluster; one of a profile predicts the MoE layers by what was measured.

    Raises:
        InputError: if the cluster cannot run the job.
    """

    def __init__(self, job: Job, cluster: ClusterSpec, grid: Grid, simulator: Simulator) -> None:
        self.job, self.cluster, self.grid, self.simulator = job, cluster, grid, simulator
        self.model = job.step_model(cluster, grid.dp)
        probe = compile_plan(Plan(schedule="s1"), replica_of(grid))
        parts = simulate_step(self.model, probe.forward, probe.backward, cluster, grid, simulator=simulator).parts
        self._passes = 4 if self.model.checkpoint_activations else 3
        self.attention, self.dense, self.unembed = (parts.get(name, 0.0) for name in ("attention", "dense", "unembed"))
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
        count, layers = self.job.accumulation, self.model.moe_layers
        forward, backward = self.again * there.seconds, back.seconds
        parts = {
            "attention": count * self.attention,
            "dense": count * self.dense,
            "unembed": count * self.unembed,
            "shared experts": count * self.shared,
            "routing": count * layers * self.routing,
            "moe forward": count * layers * forward,
            "moe backward": count * layers * backward,
            "parameters": count * self._exposed(there, back),
            "optimizer": self.optimizer_seconds,
        }
        experts = layers * (self.routing + self.again * there.compute_seconds + back.compute_seconds)
        computing = (
            count * (self.attention + self.dense + self.unembed + self.shared + experts) + self.optimizer_seconds
        )
        limits = {"compute": computing, "gathering parameters": count * sum(self.sharding.values())}
        for name in sorted({*there.link_seconds, *back.link_seconds}):
            seconds = self.again * there.link_seconds.get(name, 0.0) + back.link_seconds.get(name, 0.0)
            limits[name] = count * layers * seconds
        return Estimate(
            seconds=sum(parts.values()),
            parts={name: seconds for name, seconds in parts.items() if seconds > 0},
            limits=limits,
        )

    def memory(self, compiled: Compiled) -> Memory:
        """Return what a rank needs."""
        found = step_memory(
            self.model, compiled.forward, compiled.backward, self.simulator, compiled.grid,
            token_budget=compiled.plan.token_budget,
        )  # fmt: skip
        size, held = self.job.parameter_bytes, self._held_parameters
        dense, experts = self._block_parameters
        cast = experts * self.model.layer.element_bytes if self.model.layer.element_bytes != size else 0.0
        kept_casts = 1 if self.model.checkpoint_activations else self.model.moe_layers
        gathered = dense * (self.grid.dp > 1) + experts * (self.grid.edp > 1)
        return Memory(
            weights=held * size,
            gradients=held * size,
            optimizer=held * 2 * size,
            activations=found.activations + kept_casts * cast,
            buffers=found.buffers + 3 * gathered * size,  # two blocks' parameters, one block's gradients
        )

    @property
    def least_bytes(self) -> float:
        """What a rank needs whatever the plan: parameters, gradients, moments, and the residual stream."""
        stream = self.model.layer.tokens * self.model.layer.dim * self.model.layer.element_bytes / self.grid.tp
        return self._held_parameters * 4 * self.job.parameter_bytes + self.model.num_layers * stream

    @cached_property
    def compute_bound(self) -> float:
        """Seconds of computing of a step, experts in one product each."""
        return self._outside + self.job.accumulation * self.model.moe_layers * self._passes * self._expert_seconds

    @cached_property
    def link_bound(self) -> float:
        """Seconds of the fullest link of a step if every token crossed it once for all experts behind it, or the weights
        did where they are fewer bytes; parameters and gradients included."""
        count, passes = self.job.accumulation, 2 * (self.again + 1) * self.model.moe_layers
        return max([0.0, *(count * (passes * self._crossing(link) + self._sharding(link)) for link in self._links)])

    def floor(self, *, compression: float = 1.0) -> float:
        """Return seconds that no plan on this layout goes below: what is computed outside the MoE layers, and of each of
        their passes computing, crossing, or gathering behind it, whichever is more.

        On a profiled machine crossing does not count: there a part of the bytes may be through before the last rank has come.

        Args:
            compression: bytes of a row over those that a codec sends.
        """
        compute, crossing = self._expert_seconds, 2 * self._crossing_seconds / compression
        if self.simulator.timing.starts_early:
            crossing = 0.0
        attention = self.attention / self._passes / self.model.num_layers
        gathering = [moves * (sum(self._unit_seconds) - attention) for moves in (1, 2)]
        passes = (self.again - 1) * max(compute, crossing)
        passes += max(compute, crossing, gathering[0]) + max(2 * compute, crossing, gathering[1])
        return self._outside + self.job.accumulation * self.model.moe_layers * passes

    @cached_property
    def sharding(self) -> dict[str, float]:
        """Seconds per micro-batch of gathering parameters twice and scattering gradients, for each kind of unit, alone."""
        dense, experts = self._unit_seconds
        model = self.model
        ends = reduce_seconds(self.cluster, self.grid, self._root_bytes, self.grid.tp, self.grid.dp) / 2
        return {"dense": 3 * model.num_layers * dense, "experts": 3 * model.moe_layers * experts, "ends": 3 * ends}

    @cached_property
    def optimizer_seconds(self) -> float:
        """Seconds of reading and writing parameters and moments and reading gradients, each rank its part."""
        per_parameter = 7 * self.job.parameter_bytes
        return self._held_parameters * per_parameter / (self.cluster.device.memory_gigabytes_per_second * 1e9)

    @property
    def _outside(self) -> float:
        each = self.attention + self.dense + self.unembed + self.shared
        return self.job.accumulation * each + self.optimizer_seconds

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

    @cached_property
    def _unit_seconds(self) -> tuple[float, float]:
        """Seconds of gathering a block's dense parameters over dp, and its experts' over edp."""
        dense, experts = (count * self.job.parameter_bytes for count in self._block_parameters)
        over_dp = reduce_seconds(self.cluster, self.grid, dense, self.grid.tp, self.grid.dp)
        over_edp = reduce_seconds(self.cluster, self.grid, experts, self.grid.ep * self.grid.etp, self.grid.edp)
        return over_dp / 2, over_edp / 2

    @property
    def _block_parameters(self) -> tuple[float, float]:
        """Parameters of a block on a rank before they are cut over data-parallel ranks: dense ones, experts'."""
        model, layer = self.model, self.model.layer
        dense = (model.dense_parameters - 2 * model.vocab * layer.dim) / model.num_layers / self.grid.tp
        dense += self.job.model.moe.shared_hidden * layer.matrices * layer.dim * model.moe_layers / model.num_layers
        return dense, model.expert_parameters / model.moe_layers / (self.grid.ep * self.grid.etp)

    @property
    def _root_bytes(self) -> float:
        """Bytes of the embedding and the output."""
        return 2 * self.model.vocab * self.model.layer.dim / self.grid.tp * self.job.parameter_bytes

    @property
    def _held_parameters(self) -> float:
        shared = (
            self.job.model.moe.shared_hidden * self.model.layer.matrices * self.model.layer.dim * self.model.moe_layers
        )
        dense = self.model.dense_parameters / self.grid.tp + shared
        return dense / self.grid.dp + self.model.expert_parameters / self.grid.world

    def _shared(self) -> float:
        """Return the seconds per micro-batch of shared experts, which every rank of a tensor group computes whole."""
        layer, hidden = self.model.layer, self.job.model.moe.shared_hidden
        if not hidden:
            return 0.0
        work = layer.matrices * layer.dim * hidden
        once = self._rates.product_seconds(np.array([float(layer.tokens)]), 2.0 * work, work * layer.element_bytes)
        return self.model.moe_layers * self._passes * float(once[0])

    @cached_property
    def _rates(self) -> Rates:
        return rates_of(self.cluster, self.model.layer.dtype)

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
        dense, experts = (count * self.job.parameter_bytes for count in self._block_parameters)
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
