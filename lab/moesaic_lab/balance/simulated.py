"""Simulates the same methods and loads on larger clusters, and times the arbiter's decisions on
their own.

The cost simulator runs the programs that the ranks would run, with the rows that each rank would
send. Decisions need no ranks, since all ranks decide identically from the same counts. This module
does not need torch.

A call is one run of the layer, forward and backward. Copies are tokens sent to an expert, top-k of
each; a call is given as a (ranks, num_experts) array of each rank's copies for each expert.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import (
    AbstractChooser,
    AbstractReplicationPolicy,
    programs_of,
)
from moesaic.balance.replication.tables import spread
from moesaic.balance.selector.arbiter import Arbiter
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.policy_rates import seen_by
from moesaic.planner.simulator import Simulator
from moesaic.planner.topology import Topology
from moesaic.planner.workload import Workload
from moesaic.program.compile import Compiled, compile_plan, moving
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications
from moesaic.program.sizes import CallSizes
from moesaic_lab.balance.methods import (
    OURS,
    OURS_PLACED,
    BalanceMethod,
    methods,
    placed_by,
    policy_of,
)

BEST = {"best option": OURS, "best option, experts placed": OURS_PLACED}
"""Unattainable references for the arbiter: in each call, the option that is fastest in simulation
with known counts. Maps the name of each reference to the method that has these options."""
SKEW = 0.6
PERSISTENCE = 0.999
COPIES = 8192
BEGIN = 8
"""Exponent of Zipf's law; correlation of the experts' popularity between calls; copies of a rank;
calls before timing starts. From call to call, 2 % of the copies change their expert."""


class Larger:
    """All methods on one cluster, larger than those that are emulated, in simulation.

    Args:
        layer: the workload of a rank. Its number of tokens is replaced in every call.
        spec: the cluster; each of its devices is a rank.
        like: a cluster with equally many ranks and nodes, whose compiled programs are reused; None
            to compile them.
    """

    def __init__(self, layer: Workload, spec: ClusterSpec, like: Larger | None = None) -> None:
        self.layer = layer
        self.spec = spec
        self.grid = Grid(world=spec.world, ep=spec.world, ranks_per_node=spec.devices_per_node)
        self.methods = methods(self.grid)
        self._simulator = Simulator(spec)
        self._costs: dict[int, Rates] = {}
        """What policies know of the cluster, by tokens per rank."""
        self._plans: dict[str, Compiled] = {}
        """Compiled programs by method."""
        if like is not None and like.grid == self.grid:
            self._plans = like._plans
        else:
            self._plans = compiled_once(self.methods, self.grid)
        self._known: dict[tuple[int, int, bytes, bytes], float] = {}
        """Simulated seconds by the key of `_cached_seconds`."""

    def _policy(self, method: BalanceMethod, tokens: int) -> AbstractReplicationPolicy | None:
        """Return the policy of a method in a run with this many tokens per rank; None if the method
        replicates nothing."""
        if tokens not in self._costs:
            self._costs[tokens] = seen_by(self.spec, self.grid, replace(self.layer, tokens=tokens))
        return policy_of(method, self._costs[tokens])

    def seconds(
        self, name: str, calls: Sequence[np.ndarray], history: np.ndarray, tokens: int
    ) -> list[tuple[float, float, int]]:
        """Return a tuple for each call except the first: seconds of forward and backward, seconds
        of the decision, and the number of replicated experts. The first call only gives a history
        to methods that place experts.

        Args:
            name: name of the method, or one of `BEST`.
            calls: (ranks, num_experts) int64 copies of each call, in order.
            history: (num_experts,) copies that expert placement learns from.
            tokens: tokens per rank.
        """
        method = self.methods[BEST.get(name, name)]  # for a reference, the method of its options
        loads = [
            CallLoad(self.grid, copies, self.layer.num_experts, self.layer.hidden, self.layer.dim)
            for copies in self._copies(calls, history, method)
        ]
        if name in BEST:
            return [self._best(load, tokens) for load in loads[1:]]
        policy = self._policy(method, tokens)
        decide = Deciding(policy, self._plans[name])
        results = []
        for load in loads[1:]:
            compiled, replicated = decide(load)
            seconds = self._cached_seconds(compiled, load, replicated, tokens)
            results.append((seconds, decide.seconds, len(np.unique(replicated.expert))))
        return results

    def moving_seconds(self, name: str, history: np.ndarray, moved_bytes: int) -> float:
        """Return the seconds that it takes to move experts from their initial ranks to a method's
        placement; 0 if none move.

        Each rank sends one message to every rank that gets experts from it. All messages run at
        once, alone on the links.

        Args:
            name: name of the method, or one of `BEST`.
            history: (num_experts,) copies that expert placement learns from.
            moved_bytes: bytes per parameter.
        """
        if not self.methods[BEST.get(name, name)].places_experts:
            return 0.0
        per_rank = self.layer.num_experts // self.grid.world
        slot = placed_by(history, self.grid)
        source = np.arange(len(slot)) // per_rank  # each expert's rank before and after
        target = slot // per_rank
        moves = np.stack([source, target])[:, source != target]
        # one message for each pair of ranks, with all experts that move between them
        (sources, targets), num_experts = np.unique(moves, axis=1, return_counts=True)
        expert_bytes = self.layer.matrices * self.layer.dim * self.layer.hidden * moved_bytes
        topology = Topology(self.spec, self.grid.world, self.grid.ranks_per_node)
        num_bytes = num_experts * float(expert_bytes)
        return topology.loads(sources, targets, num_bytes, np.ones(len(num_bytes))).alone

    def _best(self, load: CallLoad, tokens: int) -> tuple[float, float, int]:
        """Return the result of a call, as `seconds` does, under the arbiter's fastest option in
        simulation, with the call's own counts."""
        policy = self._policy(self.methods[OURS], tokens)
        assert isinstance(policy, Arbiter)
        programs = programs_of(self._plans[OURS], policy)
        weigher = policy.start({name: each.plan for name, each in programs.items()}).weigher
        replicas = weigher.replica_loads(load)
        results = []
        for option in weigher.all(replicas):
            replicated = spread(replicas, option.replicated)
            compiled = programs[option.program]
            seconds = self._cached_seconds(compiled, load, replicated, tokens)
            results.append((seconds, 0.0, len(np.unique(replicated.expert))))
        return min(results)  # the fastest

    def _cached_seconds(
        self, compiled: Compiled, load: CallLoad, replicated: Replications, tokens: int
    ) -> float:
        """Return the seconds of forward and backward of a call. Equal programs and counts are
        simulated once."""
        key = (id(compiled), tokens, load.copies.tobytes(), np.stack(replicated).tobytes())
        if key not in self._known:
            self._known[key] = self._simulate(compiled, load.copies, replicated, tokens)
        return self._known[key]

    def _copies(
        self, calls: Iterable[np.ndarray], history: np.ndarray, method: BalanceMethod
    ) -> list[np.ndarray]:
        """Return each rank's copies for each slot of an expert, (ranks, num_experts) int64, for
        each call."""
        if not method.places_experts:
            return list(calls)
        expert_of_slot = np.argsort(placed_by(history, self.grid))  # the inverse permutation
        return [counts[:, expert_of_slot] for counts in calls]

    def _simulate(
        self, compiled: Compiled, copies: np.ndarray, replicated: Replications, tokens: int
    ) -> float:
        """Simulate forward and backward of one call; return the seconds."""
        sizes = CallSizes(
            compiled.grid,
            copies,
            np.full(self.grid.world, tokens),
            compiled.plan.chunks,
            units=self.layer.hidden,
            replicated=replicated,
            shapes=compiled.shapes(self.layer.num_experts),
        )
        layer = replace(self.layer, tokens=tokens)
        forward, backward = (
            self._simulator.run(program, layer, compiled.grid, sizes=sizes)
            for program in (compiled.forward, compiled.backward)
        )
        return forward.seconds + backward.seconds


def compiled_once(methods: Mapping[str, BalanceMethod], grid: Grid) -> dict[str, Compiled]:
    """Return the compiled programs of every method. Policies that replicate by a single table share
    theirs."""
    # the layouts of a program take a minute at 64 ranks
    programs: dict[tuple[Plan, bool], Compiled] = {}
    by_method = {}
    for name, method in methods.items():
        plan = method.plan
        if plan.replicates and plan.replication != "arbiter":
            plan = replace(plan, replication="spill")
        key = (plan, method.moves_samples)
        if key not in programs:
            stays = compile_plan(plan, grid)
            programs[key] = moving(stays) if method.moves_samples else stays
        by_method[name] = programs[key]
    return by_method


class Deciding:
    """Chooses the programs of each call of a method: those of its plan, or those that its policy
    decides on.

    Args:
        policy: the method's replication policy; None if it replicates nothing.
        compiled: the method's compiled plan.
    """

    def __init__(self, policy: AbstractReplicationPolicy | None, compiled: Compiled) -> None:
        self._compiled = compiled
        self._chooser: AbstractChooser | None = None
        if policy is not None:
            self._programs = programs_of(compiled, policy)
            self._chooser = policy.start({name: each.plan for name, each in self._programs.items()})
        self.seconds = 0.0
        """Time by which the last decision delays a rank, measured on this machine."""

    def __call__(self, load: CallLoad) -> tuple[Compiled, Replications]:
        """Return the programs of a call, and the table of its replicated copies."""
        if self._chooser is None:
            return self._compiled, NOTHING
        started = time.perf_counter()
        decision = self._chooser.choose(load)
        self.seconds = time.perf_counter() - started
        return self._programs[decision.program], decision.replicated or NOTHING


@dataclass(frozen=True, kw_only=True)
class TimedDecision:
    """Time of one call's decision."""

    ranks: int
    experts: int
    seconds: float
    """Time by which the decision delays the call."""
    replicates: bool


def decisions(
    ranks: int = 64, experts: int = 256, calls: int = 120, seed: int = 0
) -> list[TimedDecision]:
    """Time the arbiter's decisions for consecutive calls on `dgx-h100`."""
    grid = Grid(world=ranks, ep=ranks, ranks_per_node=8)
    spec = read_cluster("dgx-h100", nodes=ranks // 8)
    plan = Plan(replication="arbiter")
    arbiter = Arbiter(
        costs=seen_by(
            spec, grid, Workload(tokens=4096, num_experts=experts, top_k=2, dim=2048, hidden=1024)
        )
    )
    arbitration = arbiter.start(arbiter.option_plans(plan, grid))
    timed = []
    for number, copies in enumerate(_drifting(ranks, experts, calls, seed), start=1):
        load = CallLoad(grid, copies, num_experts=experts, units=1024, dim=2048)
        started = time.perf_counter()
        decision = arbitration.choose(load)
        seconds = time.perf_counter() - started
        if number > BEGIN:
            replicates = decision.replicated is not None
            timed.append(
                TimedDecision(ranks=ranks, experts=experts, seconds=seconds, replicates=replicates)
            )
    return timed


def _drifting(ranks: int, experts: int, calls: int, seed: int) -> Sequence[np.ndarray]:
    """Return each rank's copies for each expert, a (ranks, experts) int64 array for each call, in
    which the popularity of experts drifts."""
    rng = np.random.default_rng(seed)
    lasting = rng.normal(size=experts)
    copies = []
    for _ in range(calls):
        mixed = np.sqrt(PERSISTENCE) * lasting + np.sqrt(1 - PERSISTENCE) * rng.normal(size=experts)
        place = np.argsort(np.argsort(-mixed))  # 0 for the most popular expert
        shares = (1.0 + place) ** -SKEW
        copies.append(rng.multinomial(COPIES, shares / shares.sum(), size=ranks))
    return copies
