"""The plan of a run: from a file, a search or a rule before it starts, or chosen while it trains
(`auto.py`).

If a cluster is described, its predictions prefill the plan table of the layers, which is kept in
checkpoints. Lossless plans compute the same up to the order of sums, so the loss curve does not
depend on them.

A plan says how an MoE layer runs on a mesh, and a layout is a mesh with a plan. The plan table has
for each candidate plan the time that is expected of it, by prediction and by measured steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moesaic.auto import AutoPlan
from moesaic.comm.mesh import open_transport, ranks_of_a_node
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.files import read_text
from moesaic.layer import MoE
from moesaic.planner.algorithm1 import choose
from moesaic.planner.candidates import name_of
from moesaic.planner.cluster import ELEMENT_BYTES
from moesaic.planner.fewer_machines import fewer_machines
from moesaic.planner.job import Job
from moesaic.planner.plan_files import MESH, SPLIT, mesh_table, read_planned, read_step
from moesaic.planner.plan_table import TableSettings
from moesaic.planner.predicted_plans import Predictor, find_layouts
from moesaic.planner.search import Result
from moesaic.program.plan import Crossing, Plan, plan_in_words
from moesaic.train.balance import known_cluster
from moesaic.train.better_split import about_slow_link, outside_gbps
from moesaic.train.checkpoint import PLAN_TABLE
from moesaic.train.config import UNMOVED, MeshConfig, TrainConfig
from moesaic.train.ranks import Ranks
from moesaic.train.state import RunState

MOST_STAGES = 16
"""Most pipeline stages that a search tries."""
PLANS = 8
"""Number of candidates: the plans with the best predictions, in addition to the configured one."""
TABLE = TableSettings()
"""Settings by which a run's plan table learns."""


def with_planned(config: TrainConfig, say: Callable[[str], None] = lambda _: None) -> TrainConfig:
    """Return the configuration with the mesh and plan that `planner.plan` selects: from a file, a
    search, or a rule.

    A search runs for `search`, and for `auto` if the configured mesh does not fit the available
    ranks. If only one rank of several is left, it trains without a mesh.

    Raises:
        InputError: if the file holds no plan, fields of `mesh` and `plan` contradict the selected
            ones, no mesh fits the ranks, or the ranks do not fit the cluster.
    """
    if config.planner.rule:
        return _by_rule(config, say)
    if config.planner.file:
        return _with_file(config, Path(config.planner.file))
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings = config.planner
    if settings.searches and _has_own_plan(config):
        raise InputError(
            "planner.plan=search finds mesh.tp, mesh.ep, mesh.etp and plan, and predicts without "
            "balance.replication and balance.memory_budget: leave them out"
        )
    is_last_rank = world == 1 and dist.is_initialized()  # a launcher started it, as one of several
    auto_needs_mesh = settings.is_auto and (is_last_rank or not _fits(config, world))
    if not settings.searches and not auto_needs_mesh:
        return config
    if world == 1:  # one rank has no mesh and no plan to find
        say(
            "planner: one process has nothing to split, so nothing is searched: torchrun starts "
            "several"
        )
        mesh = replace(config.mesh, tp=1, ep=1, etp=1)
        return replace(config, mesh=mesh, planner=replace(settings, plan=""))
    return _searched(config, world, say)


def name_better_split(config: TrainConfig, say: Callable[[str], None]) -> None:
    """Say whether another split of the ranks would spare a slow link, if tokens of a run on CPUs
    cross one. All ranks call it together."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    on_cpu = config.device.startswith("cpu") or not torch.cuda.is_available()
    mesh = config.mesh
    is_split = max(mesh.ep, mesh.etp, mesh.tp) > 1
    if world == 1 or not is_split or not on_cpu:
        return
    per_node = ranks_of_a_node(config.mesh.ranks_per_node)
    most_stages = MOST_STAGES if _can_have_stages(config) else 1
    line = about_slow_link(config, world, per_node, most_stages)
    if line is not None:
        say(f"planner: {line}")


def _fits(config: TrainConfig, world: int) -> bool:
    """Return whether the configured mesh can be built of that many ranks, and its data-parallel
    groups share a micro-batch evenly."""
    mesh = config.mesh
    if world % mesh.tp or world % (mesh.ep * mesh.etp):
        return False
    num_groups = world // mesh.tp  # data-parallel ones
    return config.batch_size % num_groups == 0


def _has_own_plan(config: TrainConfig) -> bool:
    """Return whether the configuration sets fields that a search finds, or that it predicts
    without."""
    mesh = config.mesh
    # `layer_plan` also has replication and the memory budget, which a search predicts without
    return (mesh.tp, mesh.ep, mesh.etp, config.layer_plan) != (1, 1, 1, Plan())


def _searched(config: TrainConfig, world: int, say: Callable[[str], None]) -> TrainConfig:
    """Return the configuration with the mesh and plan that are predicted to be fastest on `world`
    ranks."""
    settings = config.planner
    on_cpu = config.device.startswith("cpu") or not torch.cuda.is_available()
    per_node = ranks_of_a_node(config.mesh.ranks_per_node)
    gbps = None  # measured where CPU machines are linked and no cluster says how fast
    if on_cpu and not settings.cluster and world > per_node:
        gbps = outside_gbps(open_transport(name=config.mesh.transport), per_node)
        say(f"planner: the link between machines carries {gbps:.2g} Gbit/s")

    def found_for(ranks: int) -> tuple[Job, Result]:
        """Return what `find_layouts` does for a number of ranks."""
        return find_layouts(
            asdict(config),
            ranks,
            per_node,
            cluster=settings.cluster,
            on_cpu=on_cpu,
            most_stages=MOST_STAGES if settings.searches and _can_have_stages(config) else 1,
            may_fly=settings.searches and _can_fly(config),
            gbps=gbps,
        )

    job, result = found_for(world)
    layout = result.best
    line = (
        f"planner: {world} ranks take {layout.layout} and {plan_in_words(layout.plan)}, a "
        f"predicted step of {1e3 * layout.seconds:.1f} ms, limited by {layout.estimate.bottleneck}"
    )
    line = "; ".join([line, *result.why_recomputed])
    for other in result.ranking[1:3]:
        line += f"; {other.layout}: {other.seconds / layout.seconds:.2f} times as long"
    say(line)
    if settings.cluster:  # an assumed one does not say how fast the ranks compute
        fewer = fewer_machines(
            machines=world // per_node,
            ranks=world,
            seconds=layout.seconds,
            best_of=lambda machines: found_for(machines * per_node)[1].best,
        )
        if fewer is not None:
            say(f"planner: {fewer}")
    plan = replace(
        layout.plan,
        replication=config.balance.replication,
        memory_budget=config.balance.memory_budget,
    )
    planner_plan = "" if settings.searches else settings.plan  # auto goes on while training
    # the layout may cut micro-batches finer, and have two of them in flight
    found = _cut_finer(config, layout.split.finer)
    return replace(
        found,
        micro_batches_in_flight=max(config.micro_batches_in_flight, layout.split.in_flight),
        model=replace(config.model, checkpoint_activations=job.model.checkpoint_activations),
        mesh=_with_mesh(config.mesh, mesh_table(layout)),
        planner=replace(settings, plan=planner_plan),
    ).with_layer_plan(plan)


def _can_have_stages(config: TrainConfig) -> bool:
    """Return whether nothing in a configuration clashes with pipeline stages."""
    is_moved = config.balance.samples != UNMOVED or config.balance.moves_experts
    in_flight = config.micro_batches_in_flight > 1
    holds_nothing = config.mesh.hold == "nothing"
    return not (is_moved or config.adapters.base or in_flight or holds_nothing)


def _can_fly(config: TrainConfig) -> bool:
    """Return whether two micro-batches of a configuration may be in flight."""
    # recording and replaying set a router for one micro-batch at a time
    records = config.record_routing != "none" or bool(config.replay_routing)
    return config.accumulation > 1 and not records


def _with_mesh(configured: MeshConfig, table: dict[str, Any]) -> MeshConfig:
    """Return a mesh with the values of a table, but for what the configuration says of sharding."""
    values = dict(table)
    for name in ("shard", "hold"):
        if getattr(configured, name) != "auto":
            values.pop(name, None)
    return replace(configured, **values)


def _cut_finer(config: TrainConfig, finer: int) -> TrainConfig:
    """Return a configuration whose micro-batches are cut in `finer` each; the sequences of a step
    stay the same."""
    if config.batch_size % finer:
        raise InputError(
            f"batch_size={config.batch_size}: the plan cuts micro-batches in {finer}, which does "
            "not divide it: choose a multiple, or plan again"
        )
    return replace(
        config, batch_size=config.batch_size // finer, accumulation=config.accumulation * finer
    )


def _with_file(config: TrainConfig, path: Path) -> TrainConfig:
    """Return the configuration with the mesh and plan of a file; what both set must be the same."""
    table, plan = read_planned(path)
    mesh = override(config.mesh, table, source=str(path), prefix="mesh.")
    default_mesh = MeshConfig()
    for name in (*MESH, *SPLIT):  # the fields of `mesh` that a file may set
        configured = getattr(config.mesh, name)
        planned = getattr(mesh, name)
        # a field at its default is not set
        if configured not in (planned, getattr(default_mesh, name)):
            raise InputError(
                f"mesh.{name}={configured} and {path} with {planned} contradict each other: "
                "leave one out"
            )
    if config.layer_plan not in (plan, Plan()):
        raise InputError(
            f"plan or balance and planner.plan={path} contradict each other: leave one out"
        )
    finer, in_flight, recomputes = read_step(path)
    recomputes |= config.model.checkpoint_activations
    return replace(
        _cut_finer(config, finer),
        micro_batches_in_flight=max(config.micro_batches_in_flight, in_flight),
        model=replace(config.model, checkpoint_activations=recomputes),
        mesh=mesh,
        planner=replace(config.planner, plan=""),
    ).with_layer_plan(plan)


def _by_rule(config: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """Return the configuration with S1 or S2, as Algorithm 1 chooses. A single process has no
    schedule, so nothing changes.

    Algorithm 1 reads bytes only. Clusters rarely give a rate of float64, so its rows stand as wider
    ones of a known dtype.
    """
    mesh = Ranks.of(config, "cpu").mesh
    planner = config.planner
    if mesh is None:
        return config
    if config.precision == "float64":
        simulator, layer = known_cluster(replace(config, precision="auto"), mesh.grid)
        row_bytes = layer.dim * ELEMENT_BYTES["fp64"]
        layer = replace(layer, dim=row_bytes // ELEMENT_BYTES[layer.dtype])
    else:
        simulator, layer = known_cluster(config, mesh.grid)
    chosen = choose(simulator, layer, mesh.grid)
    say(f"plan parm: Algorithm 1 chooses {plan_in_words(chosen)} on {name_of(mesh.grid)}")
    plan = replace(
        config.layer_plan, schedule=chosen.schedule, overlap_gather=chosen.overlap_gather
    )
    return replace(config, planner=replace(planner, plan="")).with_layer_plan(plan)


@dataclass(frozen=True)
class Candidates:
    """Plans to switch between, identical on all ranks, and the predictor of their step times."""

    plans: tuple[Plan, ...]
    predictor: Predictor | None
    """Predicts step times; None on all ranks but the first."""


def find_candidates(config: TrainConfig) -> Candidates | None:
    """Return the plans that a run may switch between, chosen for the cluster that it names. All
    ranks call it together.

    It runs before the run folder is created, so a refused run leaves nothing behind.

    Returns:
        None if plans do not change, or no cluster is named.

    Raises:
        InputError: on every rank, if the run cannot be planned: it has one process, a capacity with
            plan-dependent drops, a cluster that the ranks do not fit, or a model that does not fit
            the cluster.
    """
    if not config.planner.is_auto:
        return None
    ranks = Ranks.of(config, "cpu")
    with ranks.together():
        _require_plannable(config, ranks)
    if not config.planner.cluster:
        return None
    predictor: Predictor | None = None
    plans: tuple[Plan, ...] | None = None
    with ranks.together():
        if ranks.is_first:
            assert ranks.mesh is not None
            predictor = Predictor.of(
                asdict(config),
                ranks.mesh.grid,
                config.layer_plan,
                cluster=config.planner.cluster,
                plans=PLANS,
            )
            plans = predictor.plans
    return Candidates(ranks.from_first(plans), predictor)


def start_auto(
    run: RunState,
    candidates: Candidates | None,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> AutoPlan | None:
    """Let a run's MoE layers choose their plan while they train, if it is configured. All ranks
    call it together.

    Args:
        run: the run.
        candidates: the plans to switch between; None to let the layers find them.
        clock: returns the seconds spent in training so far.
        say: called on the first rank with every line about the choice.
    """
    mesh = run.ranks.mesh
    if not run.config.planner.is_auto or mesh is None:
        return None
    layers = [module for module in run.model.modules() if isinstance(module, MoE)]
    auto = AutoPlan.of(mesh)
    auto.clock = clock
    auto.say = say
    for layer in layers:
        assert layer.on_mesh is not None
        auto.join(layer.on_mesh, layer.experts, layer.hidden, layer.parameters)
    auto.saved = _saved_table(run, say)
    if candidates is None:
        say("planner: plans are found and timed during the first 80 steps or so")
        return auto

    def busiest_load() -> float:
        """Return the copies of the busiest expert, mean over layers and micro-batches."""
        busiest = torch.stack([layer.step_counts.max() for layer in layers]).double().mean()
        return float(busiest) / run.config.accumulation

    moe = run.config.model.moe
    # of all ranks, in a micro-batch
    num_copies = run.config.batch_size * run.config.model.seq_len * moe.top_k
    even_load = num_copies / moe.num_experts
    auto.prefill(
        candidates.plans,
        candidates.predictor,
        load=busiest_load,
        expected_load=even_load,
        settings=TABLE,
    )
    seconds_of_plans = auto.table.estimates() if auto.table is not None else []
    words = [
        f"{plan_in_words(plan)} ({1e3 * seconds:.1f} ms)"
        for plan, seconds in zip(candidates.plans, seconds_of_plans)
    ]
    say(f"planner: {len(candidates.plans)} plans, predicted steps: {'; '.join(words)}")
    return auto


def _saved_table(run: RunState, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the plan table in the checkpoint from which a run goes on, the same on all ranks; None
    without one."""
    saved = None
    reason = ""
    if run.ranks.is_first and run.saved is not None:
        try:
            saved = read_plan_table(run.saved.folder / PLAN_TABLE)
        except InputError as error:
            reason = str(error)
    saved, reason = run.ranks.from_first((saved, reason))
    if reason:
        say(
            f"plan auto: the checkpoint's plan table is unusable ({reason}), so plans are "
            "timed anew"
        )
    return saved


def _require_plannable(config: TrainConfig, ranks: Ranks) -> None:
    """Raise InputError if a run's plan cannot be changed while it trains."""
    moe = config.model.moe
    if ranks.mesh is None:
        raise InputError(
            "planner.plan=auto: one process has no plan to choose: start several ranks with "
            "torchrun, or leave it off"
        )
    if config.model.is_dense:
        raise InputError(
            'planner.plan=auto: model.ffn="dense" has no MoE layers to plan: leave it off'
        )
    if moe.limits_each_rank:
        raise InputError(
            "planner.plan=auto clashes with a capacity per rank "
            f"(model.moe.capacity={moe.capacity}): which tokens it drops would depend on the "
            "plan: choose dropless, or fixed or fitted with capacity_scope=mesh"
        )
    if config.plan.crossing is Crossing.DEEPEP:
        raise InputError(
            "planner.plan=auto clashes with plan.all_to_all=deepep, which cannot be switched "
            "to: choose multicast"
        )


def read_plan_table(path: Path) -> dict[str, Any] | None:
    """Return the saved plan table of a resumed run; None if it has none."""
    try:
        table = json.loads(read_text(path))
        if not isinstance(table, dict):
            raise TypeError("it holds no table")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return table
