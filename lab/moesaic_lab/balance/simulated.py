"""The same methods and loads on larger clusters, by the cost simulator: the programs that would run, with the rows that they
would send, every rank apart; and decisions of the arbiter by themselves, for which no ranks are needed: all decide alike, from
the same counts. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.balance.selector.arbiter import Arbiter, Arbitration
from moesaic.cost.cluster import ClusterSpec, Machine, read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.topology import Topology
from moesaic.cost.workload import Workload
from moesaic.plan import Compiled, compile_plan
from moesaic.plan.compile import for_call, moving
from moesaic.plan.loads import arbiter_for
from moesaic.plan.plan import Plan
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic_lab.balance.methods import OURS, OURS_PLACED, BalanceMethod, methods, placed_by, policy_of

BEST = {"best option": OURS, "best option, experts placed": OURS_PLACED}
"""What nobody can have, to hold the arbiter against: of its options the one that is fastest by simulation, from the call's own
counts. By name: the method whose options these are."""
SKEW, PERSISTENCE, COPIES, BEGIN = 0.6, 0.999, 8192, 8
"""Exponent of Zipf's law, correlation of what makes experts popular from call to call, copies of a rank, and calls before
anything counts. 2 % of the copies change their expert from call to call."""
RATIO = 1.05
"""Measured over modelled seconds that the arbiter is told of every call."""


class Larger:
    """All methods on one cluster.

    Args:
        layer: of a rank of it; how many tokens a rank has is told with every call.
        spec: the cluster, all of whose devices are ranks.
        like: a cluster of as many ranks and nodes, whose programs are taken; None to compile them.
    """

    def __init__(self, layer: Workload, spec: ClusterSpec, like: Larger | None = None) -> None:
        self.layer, self.spec = layer, spec
        self.grid = Grid(world=spec.world, ep=spec.world, ranks_per_node=spec.devices_per_node)
        self.methods = methods(self.grid)
        self._simulator = Simulator(spec)
        self._costs = ReplicationCosts(
            machine=machine_of(spec, self.layer.dtype), cluster=spec, element_bytes=self.layer.element_bytes,
            matrices=self.layer.matrices,
        )  # fmt: skip
        self._plans: dict[str, Compiled] = (
            like._plans if like is not None and like.grid == self.grid else compiled_once(self.methods, self.grid)
        )
        self._known: dict[tuple[int, int, bytes, bytes], float] = {}
        self._arbiters: dict[int, Arbiter] = {}

    def _arbiter(self, tokens: int) -> Arbiter:
        """Return what a run with so many tokens of a rank would have: its model held against a simulation of every program."""
        if tokens not in self._arbiters:
            self._arbiters[tokens] = arbiter_for(self._simulator, self._plans[OURS], replace(self.layer, tokens=tokens))
        return self._arbiters[tokens]

    def _policy(self, method: BalanceMethod, tokens: int) -> AbstractReplicationPolicy | None:
        """Return what decides for a method; None where nothing is replicated."""
        return self._arbiter(tokens) if method.plan.replication == "arbiter" else policy_of(method, self._costs)

    def seconds(
        self, name: str, calls: Sequence[np.ndarray], history: np.ndarray, tokens: int
    ) -> list[tuple[float, float, int]]:
        """Return what each call but the first takes, forward and backward, what deciding it takes, and the experts that are
        replicated. Policies that decide a call ahead begin with the first one.

        Args:
            name: of the method, or one of `BEST`.
            calls: (ranks, num_experts) int64 copies of each, one after the other.
            history: (num_experts,) what expert placement knows.
            tokens: of a rank.
        """
        method = self.methods[BEST.get(name, name)]
        loads = [
            CallLoad(self.grid, copies, self.layer.num_experts, self.layer.hidden, self.layer.dim)
            for copies in self._copies(calls, history, method)
        ]
        if name in BEST:
            return [self._best(load, tokens) for load in loads[1:]]
        policy = self._policy(method, tokens)
        deciding, found = Deciding(policy, self._plans[name]), []
        if isinstance(policy, Arbiter):
            deciding(loads[0])
        for load in loads[1:]:
            compiled, table = deciding(load)
            found.append((self._took(compiled, load, table, tokens), deciding.seconds, _helped(table)))
        return found

    def moving_seconds(self, name: str, history: np.ndarray, moved_bytes: int) -> float:
        """Return what it takes to move experts from where they began to where a method has them: one message from each rank to
        each other that gets experts of it, all at once and alone on the links. 0 where experts stay.

        Args:
            name: of the method, or one of `BEST`.
            history: (num_experts,) what expert placement knows.
            moved_bytes: of a parameter.
        """
        if not self.methods[BEST.get(name, name)].places_experts:
            return 0.0
        each, slot = self.layer.num_experts // self.grid.world, placed_by(history, self.grid)
        source, target = np.arange(len(slot)) // each, slot // each
        pairs, experts = np.unique(np.stack([source, target])[:, source != target], axis=1, return_counts=True)
        of_expert = self.layer.matrices * self.layer.dim * self.layer.hidden * moved_bytes
        topology = Topology(self.spec, self.grid.world, self.grid.ranks_per_node)
        return topology.loads(pairs[0], pairs[1], experts * float(of_expert), np.ones(len(experts))).alone

    def _best(self, load: CallLoad, tokens: int) -> tuple[float, float, int]:
        """Return what a call takes under the option of the arbiter that is fastest by simulation, its counts known."""
        compiled = self._plans[OURS]
        offers = self._arbiter(tokens).start(compiled.plan, [each.plan for each in compiled.options]).offers(load)
        took = [
            (self._took(compiled.options[option.choice.program], load, table, tokens), 0.0, _helped(table))
            for option, table in offers
        ]
        return min(took)

    def _took(self, compiled: Compiled, load: CallLoad, replicated: np.ndarray | None, tokens: int) -> float:
        """Return what a call takes, forward and backward; the same programs and counts are simulated once."""
        cells = (
            b"" if replicated is None else np.flatnonzero(replicated).tobytes() + replicated[replicated > 0].tobytes()
        )
        key = (id(compiled), tokens, load.copies.tobytes(), cells)
        if key not in self._known:
            self._known[key] = self._seconds_of(compiled, load.copies, replicated, tokens)
        return self._known[key]

    def _copies(self, calls: Iterable[np.ndarray], history: np.ndarray, method: BalanceMethod) -> list[np.ndarray]:
        """Return the copies that each rank has for each place of an expert, (ranks, num_experts) int64, call by call."""
        if not method.places_experts:
            return list(calls)
        order = np.argsort(placed_by(history, self.grid))
        return [counts[:, order] for counts in calls]

    def _seconds_of(
        self, compiled: Compiled, copies: np.ndarray, replicated: np.ndarray | None, tokens: int
    ) -> float:  # fmt: skip
        """Simulate one call, forward and backward."""
        sizes = CallSizes(
            compiled.grid, copies, np.full(self.grid.world, tokens), compiled.plan.chunks, units=self.layer.hidden,
            replicated=replicated, shapes=compiled.shapes(self.layer.num_experts),
        )  # fmt: skip
        layer = replace(self.layer, tokens=tokens)
        there, back = (
            self._simulator.run(each, layer, compiled.grid, sizes=sizes)
            for each in (compiled.forward, compiled.backward)
        )
        return there.seconds + back.seconds


def _helped(replicated: np.ndarray | None) -> int:
    """Return how many experts some other rank computes."""
    return 0 if replicated is None else int(replicated.any(axis=(0, 2)).sum())


def compiled_once(methods: Mapping[str, BalanceMethod], grid: Grid) -> dict[str, Compiled]:
    """Return every method's programs; policies that replicate by one table each run the same ones."""
    made: dict[tuple[Plan, bool], Compiled] = {}  # the layouts of a program take a minute at 64 ranks
    found = {}
    for name, method in methods.items():
        plan = method.plan
        if plan.replicates and plan.replication != "arbiter":
            plan = replace(plan, replication="spill")
        key = (plan, method.moves_samples)
        if key not in made:
            stays = compile_plan(plan, grid)
            made[key] = moving(stays) if method.moves_samples else stays
        found[name] = made[key]
    return found


class Deciding:
    """What runs in each call of a method: its plan, or what its policy decides. The arbiter decides a call ahead, by its model.

    Args:
        policy: of the method; None for none.
        compiled: its plan.
    """

    def __init__(self, policy: AbstractReplicationPolicy | None, compiled: Compiled) -> None:
        self._policy, self._compiled = policy, compiled
        self._arbitration: Arbitration | None = None
        if isinstance(policy, Arbiter):
            self._arbitration = policy.start(compiled.plan, [option.plan for option in compiled.options])
        self.seconds = 0.0
        """What the last decision kept a rank from going on, on this machine."""

    def __call__(self, load: CallLoad) -> tuple[Compiled, np.ndarray | None]:
        """Return the programs of a call, and its replicated copies."""
        if self._arbitration is not None:
            started = time.perf_counter()
            pick = self._arbitration.pick(load)
            self.seconds = time.perf_counter() - started
            self._arbitration.weigh(pick, call=None)
            return self._compiled.options[pick.choice.program], pick.table
        if self._policy is None:
            return self._compiled, None
        started = time.perf_counter()
        replicated = self._policy.decide(load)
        self.seconds = time.perf_counter() - started
        compiled = for_call(self._compiled, replicated)
        return compiled, replicated if compiled.replicates else None


def machine_of(spec: ClusterSpec, dtype: str) -> Machine:
    """Return a cluster as policies see it: one rate inside nodes and one between, a device's share of each."""

    def slowest(where: str) -> tuple[float, float]:
        used = [link for link in spec.links if link.carries in ("all", where)]
        return min(min(link.gbps) / link.devices for link in used), sum(
            link.latency_us + link.message_us for link in used
        )

    inside, outside = slowest("inside"), slowest("outside")
    return Machine(
        intra_gbps=inside[0], inter_gbps=outside[0], intra_latency_us=inside[1], inter_latency_us=outside[1],
        tflops=spec.device.tflops.of(dtype) / 1e12,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TimedDecision:
    """One call's decision."""

    ranks: int
    experts: int
    seconds: float
    """In the way of the call."""
    weighing_seconds: float
    """Beside it, on a thread: processor time."""
    replicates: bool


def decisions(ranks: int = 64, experts: int = 256, calls: int = 120, seed: int = 0) -> list[TimedDecision]:
    """Return the decisions of calls that follow each other, on `dgx-h100`."""
    grid = Grid(world=ranks, ep=ranks, ranks_per_node=8)
    spec, plan = read_cluster("dgx-h100", nodes=ranks // 8), Plan(replication="arbiter")
    arbiter = Arbiter(costs=ReplicationCosts(machine=machine_of(spec, "bf16"), cluster=spec))
    arbitration = arbiter.start(plan, list(arbiter.option_plans(plan, grid)))
    found = []
    for number, copies in enumerate(_drifting(ranks, experts, calls, seed), start=1):
        load = CallLoad(grid, copies, experts, 1024, 2048)
        started = time.perf_counter()
        pick = arbitration.pick(load)
        seconds = time.perf_counter() - started
        verdict = arbitration.weigh(pick, call=number)
        arbitration.hear({number: RATIO * verdict.seconds[verdict.option]})
        if number > BEGIN:
            found.append(
                TimedDecision(
                    ranks=ranks, experts=experts, seconds=seconds, weighing_seconds=verdict.weighing_seconds,
                    replicates=pick.table is not None,
                )
            )  # fmt: skip
    return found


def _drifting(ranks: int, experts: int, calls: int, seed: int) -> Sequence[np.ndarray]:
    """Return the copies that each rank has for each expert, (ranks, experts) int64 for each call."""
    rng = np.random.default_rng(seed)
    lasting, found = rng.normal(size=experts), []
    for _ in range(calls):
        mixed = np.sqrt(PERSISTENCE) * lasting + np.sqrt(1 - PERSISTENCE) * rng.normal(size=experts)
        shares = (1.0 + np.argsort(np.argsort(-mixed))) ** -SKEW
        found.append(rng.multinomial(COPIES, shares / shares.sum(), size=ranks))
    return found
