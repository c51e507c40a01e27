"""Runs the model benchmark bed by bed: first a profile, then all plans of all cases, measured and
predicted.

Measured times are kept in a folder: a file per case, and per bed its profile. So a run can be
interrupted and continued, and a changed cost model can be compared with the same times. A file is
used again only for exactly the same case, bed and repeats.

A case is one layer on one bed, an emulated cluster; a profile is the measured `ClusterSpec` of a
bed. The parameter `keep` is the folder.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from moesaic.configfile import as_toml
from moesaic.errors import InputError
from moesaic.planner.candidates import SearchSpace, candidates
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.plan import plan_in_words
from moesaic_lab.benchmark import kept as kept_json
from moesaic_lab.layer.same import distinct
from moesaic_lab.model.config import ModelBenchConfig, ModelCase
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Launcher

SPACE = SearchSpace(orders=("optsche",))
"""All schedules, all-to-alls and values of r, SAA or not, and 1, 2 and 4 chunks, in one order, all
without a codec."""
PROFILE_REPEATS = 5
Progress = Callable[[str], object]
"""Called with the name of each measurement before it starts."""


@dataclass(frozen=True, kw_only=True)
class ModelFound:
    """Measured and predicted times of one case."""

    case: ModelCase
    predicted: Mapping[str, float]
    """Predicted seconds by plan."""
    screened: Mapping[str, tuple[float, ...]]
    """Seconds of each repeat by plan, all plans in turn."""
    confirmed: Mapping[str, tuple[float, ...]]
    """Seconds of each repeat of the plans that were timed again, in turn among themselves."""

    @property
    def measured(self) -> dict[str, float]:
        """Median seconds of all repeats, by plan."""
        return {
            name: statistics.median((*times, *self.confirmed.get(name, ())))
            for name, times in self.screened.items()
        }

    @property
    def pick(self) -> str:
        """The plan that is predicted to be the fastest."""
        return min(self.predicted, key=lambda name: self.predicted[name])

    @property
    def regret(self) -> float:
        """Additional time of the picked plan over the fastest plan that was timed again, as a
        share; 0 if it is the fastest."""
        again = {name: statistics.median(times) for name, times in self.confirmed.items()}
        if self.pick not in again:  # these times were measured for the pick of another cost model
            again = self.measured
        return again[self.pick] / min(again.values()) - 1


def run(
    config: ModelBenchConfig,
    cases: Sequence[ModelCase],
    keep: Path,
    progress: Progress,
    *,
    profiles: bool = False,
) -> None:
    """Measure the cases and profiles that the folder does not have yet.

    Args:
        config: beds and cases.
        keep: folder of measured times and profiles.
        progress: called with the name of each measurement.
        profiles: whether to profile beds without cases to measure as well.

    Raises:
        InputError: this machine cannot create the beds, or a profile would be noise.
    """
    keep.mkdir(parents=True, exist_ok=True)
    with Launcher() as launcher:
        for bed, of_bed in config.beds.items():
            chosen = [case for case in of_bed if case in cases]
            to_measure = [case for case in chosen if not _path(keep, config, case).exists()]
            needs_profile = profiles and not _profile_path(keep, bed).exists()
            if not to_measure and not needs_profile:
                continue
            with launcher.open(bed) as ranks:
                profile = _profile(keep, bed, ranks, progress)
                for case in to_measure:
                    progress(f"{case.shape}: {case.name}")
                    _measure(keep, config, case, profile, ranks)


def kept(config: ModelBenchConfig, keep: Path) -> list[ModelFound]:
    """Return the cases that have times in a folder and a profile of their bed, with their
    predictions."""
    results = []
    for case in config.cells:
        profile_path = _profile_path(keep, case.bed)
        if _path(keep, config, case).exists() and profile_path.exists():
            profile = read_cluster(str(profile_path))
            results.append(_predicted_case(keep, config, case, profile))
    return results


def plans_of(case: ModelCase) -> dict[str, Compiled]:
    """Return the distinct plans of a case by name; only some of them if `case.plans` limits their
    number."""
    plans = _plans_on(case.grid)
    if not case.plans or case.plans >= len(plans):
        return plans
    names = sorted(plans)
    step = len(names) / case.plans
    evenly_spaced = [names[int(number * step)] for number in range(case.plans)]
    return {name: plans[name] for name in evenly_spaced}


@lru_cache(maxsize=16)
def _plans_on(grid: Grid) -> dict[str, Compiled]:
    """Return the distinct plans on a mesh by name. Cases share meshes, and compiling all plans
    takes seconds."""
    plans = {plan_in_words(compiled.plan): compiled for compiled in candidates(grid, SPACE)}
    different, _ = distinct(plans)
    return different


def predict(
    case: ModelCase, plans: Mapping[str, Compiled], profile: ClusterSpec, seed: int = 0
) -> dict[str, float]:
    """Return the predicted seconds of each plan.

    Args:
        case: the layer.
        plans: plans of the layer, by name.
        profile: profile of the bed.
        seed: seed of the routing pattern, which determines the number of ranks that each token
            visits.
    """
    device = profile.device
    if case.compute == "virtual":  # experts that sleep leave the cores to messages
        device = replace(device.with_flops(1e9 * case.gflops), contention=0.0)
    simulator = Simulator(replace(profile, device=device))
    predicted = {}
    for name, compiled in plans.items():
        workload = _workload_of(case, compiled, seed)
        predicted[name] = simulator.layer_seconds(
            compiled.forward, compiled.backward, workload, compiled.grid
        )
    return predicted


def _workload_of(case: ModelCase, compiled: Compiled, seed: int) -> Workload:
    """Return the simulator's description of a case's layer under a plan, including the visits of
    its routing pattern."""
    from moesaic.measure.host import visits

    layer = case.workload(compiled.grid.tp)
    # tokens that one rank routes: its slice, or all of its tensor-parallel group
    tokens = case.tokens_per_rank if compiled.routes_slices else layer.tokens
    rank_visits = visits(tokens, case.top_k, case.num_experts, seed, compiled.plan.chunks)
    return replace(layer, visits=rank_visits)


def _measure(
    keep: Path, config: ModelBenchConfig, case: ModelCase, profile: ClusterSpec, ranks: object
) -> None:
    """Measure a case and keep its times."""
    from moesaic_lab.model import ranks as model_ranks
    from moesaic_testbed.cluster import Cluster

    assert isinstance(ranks, Cluster)
    plans = plans_of(case)
    predicted = predict(case, plans, profile, config.seed)
    favourites = sorted(predicted, key=lambda name: predicted[name])[: config.favourites]
    job = model_ranks.ModelJob(
        case=case,
        grid=case.grid,
        plans=plans,
        favourites=tuple(favourites),
        repeats=case.repeats,
        leaders=config.leaders,
        leader_repeats=config.leader_repeats,
        seed=config.seed,
    )
    times, *_ = ranks.run(model_ranks.measure, job)  # the same on all ranks
    kept_json(_path(keep, config, case), lambda: asdict(times))


def _profile(keep: Path, bed: Bed, ranks: object, progress: Progress) -> ClusterSpec:
    """Return the profile of a bed, measured if it is not kept."""
    from moesaic_lab.model import ranks as model_ranks
    from moesaic_testbed.cluster import Cluster

    assert isinstance(ranks, Cluster)
    path = _profile_path(keep, bed)
    if not path.exists():
        progress(f"{bed.nodes}x{bed.ranks_per_node}: profile")
        measured, *_ = ranks.run(model_ranks.profiled, bed.ranks_per_node, PROFILE_REPEATS)
        path.write_text(as_toml(measured), encoding="utf-8")
    return read_cluster(str(path))


def _predicted_case(
    keep: Path, config: ModelBenchConfig, case: ModelCase, profile: ClusterSpec
) -> ModelFound:
    """Return the kept times of a case with their predictions."""
    content = json.loads(_path(keep, config, case).read_text(encoding="utf-8"))
    screened = {name: tuple(times) for name, times in content["screened"].items()}
    confirmed = {name: tuple(times) for name, times in content["confirmed"].items()}
    plans = plans_of(case)
    if set(screened) != set(plans):
        raise InputError(
            f"{_path(keep, config, case)} has other plans than this version: measure again in "
            "a new folder"
        )
    predicted = predict(case, plans, profile, config.seed)
    return ModelFound(case=case, predicted=predicted, screened=screened, confirmed=confirmed)


def _path(keep: Path, config: ModelBenchConfig, case: ModelCase) -> Path:
    """Return the file of a case's times."""
    measured = [asdict(case), asdict(replace(config, cells=()))]
    key = json.dumps(measured, sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    name = case.name.replace(" ", "_").replace(",", "")
    return keep / f"case-{name}-{digest}.json"


def _profile_path(keep: Path, bed: Bed) -> Path:
    """Return the file of a bed's profile."""
    key = json.dumps(asdict(bed), sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return keep / f"profile-{bed.nodes}x{bed.ranks_per_node}-{digest}.toml"


def points(results: Sequence[ModelFound]) -> list[tuple[float, float]]:
    """Return measured and predicted seconds of every plan of every case."""
    return [
        (measured, result.predicted[name])
        for result in results
        for name, measured in result.measured.items()
    ]
