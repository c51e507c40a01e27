"""Runs the model benchmark bed by bed: a profile first, then every plan of every case, measured and predicted.

What is measured is kept in a folder, a file per case, and per bed its profile and the times that this was fitted to: a run
can be split and taken up again, and another model can be held against the same times (a profile that is removed is fitted anew
to the times beside it). A file is used again only for the very same case, bed and repeats.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moesaic.cost.profile import ClusterProfile, read_profile
from moesaic.cost.profile_simulate import profiled_simulator
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan import Compiled, Plan
from moesaic.plan.candidates import SearchSpace, candidates
from moesaic_lab.benchmark import kept as kept_json
from moesaic_lab.layer.same import distinct
from moesaic_lab.model.config import BedFields, ModelBenchConfig, ModelCase
from moesaic_testbed.cluster import Launcher

SPACE = SearchSpace(gather_weights=(), overlap_gather=(False,))
"""Every schedule, 1, 2 and 4 chunks, every all-to-all; all of them lossless."""
PROFILE_REPEATS = 5
EARLIER_SECONDS = 3600.0
"""By which a profile is older than what it predicts, where it stands for one that was not taken just before."""
Progress = Callable[[str], object]
"""Told what is measured now."""


@dataclass(frozen=True, kw_only=True)
class ModelFound:
    """One case: measured and predicted."""

    case: ModelCase
    bed: BedFields
    predicted: Mapping[str, float]
    """Seconds by plan."""
    screened: Mapping[str, tuple[float, ...]]
    """Seconds of each repeat by plan, all in turn."""
    confirmed: Mapping[str, tuple[float, ...]]
    """Of the fastest plans and the one that is predicted to be, in turn with one another."""

    @property
    def measured(self) -> dict[str, float]:
        """Median seconds by plan, of all its repeats."""
        return {
            name: statistics.median((*times, *self.confirmed.get(name, ()))) for name, times in self.screened.items()
        }

    @property
    def pick(self) -> str:
        """The plan that is predicted to be the fastest."""
        return min(self.predicted, key=lambda name: self.predicted[name])

    @property
    def regret(self) -> float:
        """How much longer the picked plan takes than the best of those that were timed again; 0 if it is the best."""
        again = {name: statistics.median(times) for name, times in self.confirmed.items()}
        if self.pick not in again:  # another model picked then
            again = self.measured
        return again[self.pick] / min(again.values()) - 1


def run(
    config: ModelBenchConfig, keep: Path, progress: Progress, *, profiles: bool = False, earlier: Path | None = None
) -> None:
    """Measure what is not kept yet.

    Args:
        config: what to measure.
        keep: folder of what was measured.
        progress: told what goes on.
        profiles: also profile the beds on which nothing is to be measured.
        earlier: folder of earlier profiles, whose first plans are timed again too.

    Raises:
        InputError: if this machine cannot make the beds, or a profile would be noise.
    """
    keep.mkdir(parents=True, exist_ok=True)
    with Launcher() as launcher:
        for bed in config.beds:
            jobs = [case for case in config.cases if case.bed == bed.name]
            jobs = [case for case in jobs if not _path(keep, config, bed, case).exists()]
            if not jobs and (not profiles or _profiled(keep, bed)):
                continue
            with launcher.open(bed.bed) as ranks:
                known = [_profile(keep, bed, ranks, progress)]
                if earlier is not None and _profiled(earlier, bed):
                    known.append(_kept_profile(earlier, bed))
                for case in jobs:
                    progress(f"{bed.name}: {case.name}")
                    _measure(keep, config, bed, case, known, ranks)


def kept(config: ModelBenchConfig, keep: Path, profiles: Path | None = None) -> list[ModelFound]:
    """Return the cases that a folder has times of, with what profiles predict.

    Args:
        config: what is measured.
        keep: folder of what was measured.
        profiles: folder of the profiles; None: the same.
    """
    beds = [(config.bed_of(case), case) for case in config.cases]
    profiles = profiles or keep
    return [
        _found(keep, config, bed, case, _kept_profile(profiles, bed))
        for bed, case in beds
        if _path(keep, config, bed, case).exists() and _profiled(profiles, bed)
    ]


def kept_earlier(config: ModelBenchConfig, keep: Path, profiles: Path) -> list[ModelFound]:
    """Return the cases that a folder has times of, with what profiles of another folder predict.

    Raises:
        InputError: if a profile is missing there, or is not an hour older than the case that was timed last.
    """
    times = [_path(keep, config, config.bed_of(case), case) for case in config.cases]
    last = max((path.stat().st_mtime for path in times if path.exists()), default=0.0)
    for bed in config.beds:
        path = _profiled(profiles, bed)
        if path is None:
            raise InputError(
                f"--earlier {profiles}: has no profile of {bed.name}: take one with --only profile --keep {profiles}"
            )
        if last - path.stat().st_mtime < EARLIER_SECONDS:
            raise InputError(
                f"--earlier {profiles}: the profile of {bed.name} is not an hour older than what was timed: wait"
            )
    return kept(config, keep, profiles)


def plans_of(case: ModelCase, bed: BedFields) -> dict[str, Compiled]:
    """Return the different plans of a case by name."""
    grid = case.grid(bed.bed)
    found = distinct({described(each.plan): each for each in candidates(grid, SPACE)})[0]
    if case.plans and case.plans < len(found):
        step = len(found) / case.plans
        names = sorted(found)
        found = {names[int(n * step)]: found[names[int(n * step)]] for n in range(case.plans)}
    return found


def predict(case: ModelCase, plans: Mapping[str, Compiled], profile: ClusterProfile, seed: int = 0) -> dict[str, float]:
    """Return the predicted seconds of every plan; on how many nodes tokens have experts is told, by the seed's pattern."""
    virtual = 1e9 * case.gflops if case.compute == "virtual" else None
    simulator = profiled_simulator(profile, virtual_flops=virtual)
    return {
        name: simulator.layer_seconds(each.forward, each.backward, _routed(case, each, seed), each.grid)
        for name, each in plans.items()
    }


def _routed(case: ModelCase, compiled: Compiled, seed: int) -> Workload:
    """Return the layer of a case under a plan, as it is routed."""
    from moesaic.profiling.host import visits

    layer = case.layer(compiled.grid.tp)
    tokens = case.tokens_per_rank if compiled.routes_slices else layer.tokens
    return replace(layer, visits=visits(tokens, case.top_k, case.num_experts, seed, compiled.plan.chunks))


def described(plan: Plan) -> str:
    """Return a plan as words."""
    words = [plan.schedule, plan.all_to_all]
    return ", ".join([*words, f"{plan.chunks} chunks"] if plan.chunks > 1 else words)


def _measure(
    keep: Path,
    config: ModelBenchConfig,
    bed: BedFields,
    case: ModelCase,
    profiles: Sequence[ClusterProfile],
    ranks: object,
) -> None:
    from moesaic_lab.model import ranks as model_ranks
    from moesaic_testbed.cluster import Cluster

    assert isinstance(ranks, Cluster)
    plans = plans_of(case, bed)
    favourites: dict[str, None] = {}
    for profile in profiles:
        predicted = predict(case, plans, profile, config.seed)
        favourites |= dict.fromkeys(sorted(predicted, key=lambda name: predicted[name])[: config.favourites])
    job = model_ranks.ModelJob(
        case=case, grid=case.grid(bed.bed), plans=plans, favourites=tuple(favourites), repeats=config.repeats,
        leaders=config.leaders, leader_repeats=config.leader_repeats, seed=config.seed,
    )  # fmt: skip
    times = ranks.run(model_ranks.measure, job)[0]
    kept_json(_path(keep, config, bed, case), lambda: asdict(times))


def _profile(keep: Path, bed: BedFields, ranks: object, progress: Progress) -> ClusterProfile:
    from moesaic.profiling import profile as measuring
    from moesaic.profiling.profile import write_measured
    from moesaic_testbed.cluster import Cluster

    assert isinstance(ranks, Cluster)
    if not _profiled(keep, bed):
        progress(f"{bed.name}: profile")
        measured = ranks.run(measuring.measure_still, bed.ranks_per_node, PROFILE_REPEATS, ("fp32",), "sockets")[0]
        write_measured(measured, _times_path(keep, bed))
    return _kept_profile(keep, bed)


def _kept_profile(keep: Path, bed: BedFields) -> ClusterProfile:
    """Return a bed's profile, fitted to the times beside it where it is not there yet."""
    from moesaic.profiling.profile import profile_of, read_measured

    path = _profile_path(keep, bed)
    if not path.exists():
        profile_of(read_measured(_times_path(keep, bed))).write(path)
    return read_profile(path)


def _profiled(keep: Path, bed: BedFields) -> Path | None:
    """Return the file that tells when a bed was profiled: its times, or its profile alone; None if there is neither."""
    paths = (_times_path(keep, bed), _profile_path(keep, bed))
    return next((path for path in paths if path.exists()), None)


def _found(
    keep: Path, config: ModelBenchConfig, bed: BedFields, case: ModelCase, profile: ClusterProfile
) -> ModelFound:
    table = json.loads(_path(keep, config, bed, case).read_text(encoding="utf-8"))
    plans = plans_of(case, bed)
    timed = {part: {name: tuple(times) for name, times in table[part].items()} for part in ("screened", "confirmed")}
    if set(timed["screened"]) != set(plans):
        raise InputError(
            f"{_path(keep, config, bed, case)} has other plans than this version: measure again in a new folder"
        )
    predicted = predict(case, plans, profile, config.seed)
    return ModelFound(case=case, bed=bed, predicted=predicted, screened=timed["screened"], confirmed=timed["confirmed"])


def _path(keep: Path, config: ModelBenchConfig, bed: BedFields, case: ModelCase) -> Path:
    asked = [asdict(case), asdict(bed), asdict(replace(config, beds=(), cases=()))]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    return keep / f"case-{case.name.replace(' ', '_').replace(',', '')}-{digest}.json"


def _profile_path(keep: Path, bed: BedFields) -> Path:
    digest = hashlib.sha256(json.dumps(asdict(bed), sort_keys=True).encode()).hexdigest()[:12]
    return keep / f"profile-{bed.name}-{digest}.json"


def _times_path(keep: Path, bed: BedFields) -> Path:
    return _profile_path(keep, bed).with_suffix(".times.json")


def points(found: Sequence[ModelFound]) -> list[tuple[float, float]]:
    """Return measured and predicted seconds of every plan of every case."""
    return [(measured, each.predicted[name]) for each in found for name, measured in each.measured.items()]
