"""Changing the plan while a run trains: the plan table, shared by all ranks. It costs nothing when off.

If a cluster is described or was profiled, all ranks choose a plan before each step by the last step's load. After the
step they agree on its time, that of the slowest rank. If no cluster is known, the layers find their plan themselves
(`runtime/auto_plan.py`). A switch moves no weights, and lossless plans compute the same up to the order of sums, so the
loss curve does not depend on the chosen plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moesaic.balance.replication.cost import LinkKind
from moesaic.balance.run.calls import hear_links
from moesaic.comm.mesh import ranks_of_a_node
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.planner.algorithm1 import choose
from moesaic.planner.candidates import name_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.files import MESH, read_planned
from moesaic.planner.predict import Predictor, find_layout
from moesaic.planner.rates import is_measured
from moesaic.planner.table import PlanTable, TableSettings
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.plan import Crossing, Plan, plan_in_words
from moesaic.runtime.auto_plan import AutoPlan
from moesaic.train.balance import DecisionMeter, known_cluster
from moesaic.train.checkpoint import PLAN_TABLE
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.link_rates import KINDS, LinkRates
from moesaic.train.ranks import Ranks
from moesaic.train.state import RunState

PLANS = 8
"""Number of candidates: the plans with the best predictions, in addition to the configured one."""
PROBE_STEPS = 50
"""Steps between two probes of the links, if a cluster is described."""
TABLE = TableSettings()
"""Settings by which a run's plan table learns."""


def with_planned(config: TrainConfig, say: Callable[[str], None] = lambda _: None) -> TrainConfig:
    """Return the configuration with the mesh and plan that `planner.plan` selects: from a file, a search, or a rule.

    A search runs for `search`, and for `auto` if the configured mesh does not fit the available ranks. If only one rank
    of several is left, it trains without a mesh.

    Raises:
        InputError: if the file holds no plan, fields of `mesh` and `plan` contradict the selected ones, no mesh fits
            the ranks, or the ranks do not fit the cluster.
    """
    if config.planner.rule:
        return _by_rule(config)
    if config.planner.file:
        return _with_file(config, Path(config.planner.file))
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings, configured = config.planner, config.mesh
    fits = not (
        world % configured.tp
        or world % (configured.ep * configured.etp)
        or config.batch_size % (world // configured.tp)
    )
    is_last_rank = world == 1 and dist.is_initialized()
    if not (settings.searches or (settings.is_auto and (is_last_rank or not fits))):
        return config
    if settings.searches and (configured.tp, configured.ep, configured.etp, config.layer_plan) != (1, 1, 1, Plan()):
        raise InputError(
            "planner.plan=search finds mesh.tp, mesh.ep, mesh.etp and plan, and predicts without balance.replication and "
            "balance.memory_budget: leave them out"
        )
    if world == 1:
        return replace(config, mesh=replace(configured, tp=1, ep=1, etp=1), planner=replace(settings, plan=""))
    on_cpu = config.device.startswith("cpu") or not torch.cuda.is_available()
    layout = find_layout(
        asdict(config), world, ranks_of_a_node(configured.ranks_per_node),
        cluster=settings.cluster, on_cpu=on_cpu,
    )  # fmt: skip
    say(
        f"planner: {world} ranks take {name_of(layout.grid)} and {plan_in_words(layout.plan)}, a predicted step of "
        f"{1e3 * layout.seconds:.1f} ms"
    )
    mesh = replace(configured, **{name: getattr(layout.grid, name) for name in MESH})
    plan = replace(layout.plan, replication=config.balance.policy, memory_budget=config.balance.memory_budget)
    planner_plan = "" if settings.searches else settings.plan
    return replace(config, mesh=mesh, planner=replace(settings, plan=planner_plan)).with_layer_plan(plan)


def _with_file(config: TrainConfig, path: Path) -> TrainConfig:
    table, plan = read_planned(path)
    mesh = override(config.mesh, table, source=str(path), prefix="mesh.")
    for name in MESH:
        configured, planned = getattr(config.mesh, name), getattr(mesh, name)
        if configured not in (planned, getattr(MeshConfig(), name)):
            raise InputError(f"mesh.{name}={configured} and {path} with {planned} contradict each other: leave one out")
    if config.layer_plan not in (plan, Plan()):
        raise InputError(f"plan or balance and planner.plan={path} contradict each other: leave one out")
    return replace(config, mesh=mesh, planner=replace(config.planner, plan="")).with_layer_plan(plan)


def _by_rule(config: TrainConfig) -> TrainConfig:
    """Return the configuration with S1 or S2, as Algorithm 1 chooses. A single process has no schedule, so nothing
    changes."""
    mesh, planner = Ranks.of(config, "cpu").mesh, config.planner
    if mesh is None:
        return config
    simulator, layer = known_cluster(config, mesh.grid)
    chosen = choose(simulator, layer, mesh.grid)
    plan = replace(config.layer_plan, schedule=chosen.schedule, overlap_gather=chosen.overlap_gather)
    return replace(config, planner=replace(planner, plan="")).with_layer_plan(plan)


@dataclass(frozen=True)
class Candidates:
    """Plans to switch between, identical on all ranks, and the predictor of their step times."""

    plans: tuple[Plan, ...]
    predictor: Predictor | None
    """Predicts step times; None on all ranks but the first."""


def find_candidates(config: TrainConfig) -> Candidates | None:
    """Return the plans that a run may switch between, chosen for the cluster that it names. All ranks call it together.

    It runs before the run folder is created, so a refused run leaves nothing behind.

    Returns:
        None if plans do not change, or no cluster is named.

    Raises:
        InputError: on every rank, if the run cannot be planned: it has one process, a capacity with plan-dependent
            drops, a cluster that the ranks do not fit, or a model that does not fit the cluster.
    """
    settings = config.planner
    if not settings.is_auto:
        return None
    ranks = Ranks.of(config, "cpu")
    with ranks.together():
        _require_plannable(config, ranks)
    return _search_candidates(config, ranks, config.layer_plan, {}) if settings.cluster else None


def _search_candidates(config: TrainConfig, ranks: Ranks, first: Plan, times: Mapping[LinkKind, float]) -> Candidates:
    """Return the candidates that the first rank finds for a described or measured cluster; see `Predictor.of`."""
    predictor: Predictor | None = None
    tables: list[dict[str, Any]] = []
    with ranks.together():
        if ranks.is_first:
            assert ranks.mesh is not None
            predictor = Predictor.of(
                asdict(config), ranks.mesh.grid, first,
                cluster=config.planner.cluster, plans=PLANS, times=times,
            )  # fmt: skip
            tables = [asdict(plan) for plan in predictor.plans]
    plan_tables = ranks.from_first(tables)
    return Candidates(tuple(override(Plan(), table, source="planner") for table in plan_tables), predictor)


def link_changes(kind: LinkKind, times: Sequence[float]) -> str:
    """Return words for which links became faster or slower, and by what factor on each node."""
    nodes_by_factor: dict[float, list[int]] = {}
    for node, factor in enumerate(times):
        nodes_by_factor.setdefault(factor, []).append(node)
    if len(nodes_by_factor) == 1:
        return f"links {KINDS[kind]} are {times[0]:.2f} times as fast as they were"
    of_nodes = (
        f"those of node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))} are {factor:.2f} times as fast as they were"
        for factor, nodes in nodes_by_factor.items()
        if factor != 1
    )
    return f"of links {KINDS[kind]}, {', '.join(of_nodes)}"


def _named_cluster(run: RunState) -> ClusterSpec | None:
    """Return the cluster that a run names; None if it names none."""
    mesh = run.ranks.mesh
    named = mesh is not None and run.config.planner.cluster and not run.config.model.is_dense
    return known_cluster(run.config, mesh.grid)[0].cluster if named and mesh is not None else None


class AutoPlanner:
    """Switches the plan of a run's MoE layers between steps. All ranks create it and call its methods together.

    Args:
        run: the run.
        candidates: the plans to switch between; None to keep the configured plan, or to let the layers find their own.
        say: called with a line if plans are searched again.
    """

    def __init__(
        self, run: RunState, candidates: Candidates | None, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._run, self._ranks, self._say = run, run.ranks, say
        self._lost_table = ""
        self._times: dict[LinkKind, tuple[float, ...]] = {}
        self._layers = [module for module in run.model.modules() if isinstance(module, MoE)]
        watches = candidates is not None and not is_measured(run.config.planner.cluster)
        self._rates = LinkRates(run.ranks, _named_cluster(run)) if self._update_arbiters() or watches else None
        self._steps = 0
        self._compiled: dict[tuple[int, bool], Compiled] = {}
        self._reported = 0
        model, moe = run.config.model, run.config.model.moe
        self._load = (
            run.config.batch_size * model.seq_len * moe.top_k / moe.num_experts
        )  # copies per expert under even routing
        self.table = None if candidates is None else self._make_table(candidates)
        self._auto: AutoPlan | None = None
        if run.config.planner.is_auto and candidates is None:
            assert run.ranks.mesh is not None
            self._auto = AutoPlan.of(run.ranks.mesh)
            for layer in self._layers:
                assert layer.on_mesh is not None
                self._auto.join(layer.on_mesh, layer.experts, layer.hidden, layer.parameters)
        self.decisions = DecisionMeter(run.model, run.dtype.itemsize)

    def before_step(self) -> None:
        """Choose the plan of the next step, and switch to it."""
        self.decisions.drop()
        if self.table is None:
            return
        before, chosen = self.table.running, self.table.choose(self._load)
        if chosen != before:
            for layer in self._layers:
                layer.use_plan(self._compile(chosen, layer))
            self._update_arbiters()

    def _update_arbiters(self) -> bool:
        """Give the current link speeds to arbiters that learn. Return whether there are any."""
        learns = [hear_links(layer.on_mesh.calls, self._times) for layer in self._layers if layer.on_mesh is not None]
        return any(learns)

    def note_load(self) -> None:
        """Note the load of the step. Call it before the optimizer step, while the layers still hold their counts."""
        self.decisions.take()
        if self.table is not None:
            busiest = torch.stack([layer.step_counts.max() for layer in self._layers]).double().mean()
            self._load = float(busiest) / self._run.config.accumulation

    def after_step(self, seconds: float) -> None:
        """Record the time that the step took on the slowest rank, and probe the links if they are due."""
        self.decisions.add_seconds(seconds)
        if self.table is not None:
            slowest = self._ranks.largest(torch.tensor([seconds, self._load], dtype=torch.float64))
            self._load = float(slowest[1])
            self.table.record(float(slowest[0]), self._load)
        if self._rates is not None:
            if self._steps % PROBE_STEPS == 0:
                self._probe_links(self._rates)
            self._steps += 1

    def _probe_links(self, rates: LinkRates) -> None:
        """If link speeds changed, pass them to the arbiters and search plans again, since earlier timings no longer
        hold."""
        drift = rates.drift()
        if not drift:
            return
        for kind, times in drift.items():
            earlier = self._times.get(kind, (1.0,) * len(times))
            self._times[kind] = tuple(before * change for before, change in zip(earlier, times))
        changes = " and ".join(link_changes(kind, times) for kind, times in drift.items())
        if self._update_arbiters():
            self._say(f"balance: {changes}: the arbiter uses the new speeds")
        if self.table is None or self.table.running is None:
            return
        running = self.table.plans[self.table.running]
        # The search assumes identical nodes.
        slowest = {kind: min(times) for kind, times in self._times.items()}
        candidates = _search_candidates(self._run.config, self._ranks, running, slowest)
        self.table, self._reported = self._predicted_table(candidates), 0
        self._compiled.clear()
        self._say(f"planner: {changes}: plans are searched again; {self.describe()[-1]}")

    def values(self) -> dict[str, Any]:
        """Return the metrics of plans and of balance decisions since the previous call; empty if both are off."""
        return self._plan_values() | self.decisions.values()

    def _plan_values(self) -> dict[str, Any]:
        table = self.table if self._auto is None else self._auto.table
        if table is None or table.running is None:
            return {}
        running, new = table.running, table.decisions[self._reported :]
        self._reported = len(table.decisions)
        estimates = table.estimates(table.bucket_of(self._load))
        return {
            "plan": {
                "running": plan_in_words(table.plans[running]),
                "load": self._load,
                "estimated_seconds": estimates[running],
                "switches": table.switches,
                "explored_share": table.explored / table.steps,
                "decisions": [
                    [decision.step, decision.why, decision.bucket, plan_in_words(table.plans[decision.plan])]
                    for decision in new
                ],
            }
        }

    def describe(self) -> list[str]:
        """Return lines about the candidates, to be printed."""
        if self._auto is not None:
            return ["planner: plans are found and timed during the first 60 steps or so"]
        if self.table is None:
            return []
        first = self.table.estimates(self.table.bucket_of(self._load))
        words = [
            f"{plan_in_words(plan)} ({1e3 * first[number]:.1f} ms)" for number, plan in enumerate(self.table.plans)
        ]
        line = f"planner: {len(words)} plans, predicted steps: {'; '.join(words)}"
        return [self._lost_table, line] if self._lost_table else [line]

    def files(self) -> dict[str, str]:
        """Return the plan table as a file of a checkpoint, on the first rank; empty on the others."""
        if self.table is None or not self._ranks.is_first:
            return {}
        return {PLAN_TABLE: json.dumps({"mesh": self._mesh(), **self.table.state()}) + "\n"}

    def _make_table(self, candidates: Candidates) -> PlanTable:
        """Return a plan table, restored from the checkpoint if the checkpoint's table is for the same mesh."""
        ranks = self._ranks
        table, saved, reason = self._predicted_table(candidates), None, ""
        if ranks.is_first and self._run.saved is not None:
            try:
                saved = read_plan_table(self._run.saved.folder / PLAN_TABLE)
            except InputError as error:
                reason = str(error)
        saved, reason = ranks.from_first((saved, reason))
        try:
            if saved is not None and saved.pop("mesh", None) == self._mesh():  # a table of another mesh is useless
                table.restore(saved)
        except InputError as error:
            table, reason = self._predicted_table(candidates), str(error)
        if reason:
            self._lost_table = f"planner: the checkpoint's plan table is unusable ({reason}), so plans are timed anew"
        return table

    def _predicted_table(self, candidates: Candidates) -> PlanTable:
        """Return a plan table that holds only predictions."""
        plan, predictor = self._run.config.plan, candidates.predictor

        def predict(load: float) -> list[float]:
            seconds: list[float] = self._ranks.from_first(None if predictor is None else predictor(load))
            return seconds

        return PlanTable(candidates.plans, predict, TABLE, tested={(plan.codec, plan.backward_codec)})

    def _mesh(self) -> dict[str, Any]:
        assert self._ranks.mesh is not None
        return asdict(self._ranks.mesh.grid)

    def _compile(self, number: int, layer: MoE) -> Compiled:
        """Return a plan compiled for a layer; layers that differ only in their weights share the result."""
        assert self.table is not None
        assert self._ranks.mesh is not None
        key = (number, bool(layer.experts.names[1]))
        if key not in self._compiled:
            self._compiled[key] = compile_plan(self.table.plans[number], self._ranks.mesh.grid, bias=key[1])
        return self._compiled[key]


def _require_plannable(config: TrainConfig, ranks: Ranks) -> None:
    """Raise InputError if a run's plan cannot be changed while it trains."""
    moe = config.model.moe
    if ranks.mesh is None:
        raise InputError(
            "planner.plan=auto: one process has no plan to choose: start several ranks with torchrun, or leave it off"
        )
    if config.model.is_dense:
        raise InputError('planner.plan=auto: model.ffn="dense" has no MoE layers to plan: leave it off')
    if moe.capacity_rule.by_rank:
        raise InputError(
            "planner.plan=auto clashes with a capacity per rank "
            f"(model.moe.capacity={moe.capacity}): which tokens it drops would depend on the plan. "
            "Choose dropless, or fixed or fitted without :rank"
        )
    if config.plan.crossing is Crossing.DEEPEP:
        raise InputError(
            "planner.plan=auto clashes with plan.all_to_all=deepep, which cannot be switched to: choose multicast"
        )


def read_plan_table(path: Path) -> dict[str, Any] | None:
    """Return the saved plan table of a resumed run; None if it has none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise TypeError("it holds no table")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return table
