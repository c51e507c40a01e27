"""`moesaic bench model`: predicted times of layers compared with measured ones, on an emulated
cluster.

A layer on the library's runtime over emulated links, forward and backward. compute virtual: experts
sleep for as long as an accelerator of the given rate would take; real: they multiply. Ranks are
bound to cores, under the batch policy. Predictions use the cluster's own profile, measured on the
same bed before and brought to the wall times of other layers; no constant is fitted to these
points. Claims named hour_later use profiles that were taken at least an hour before the last case
was timed. Regret: the plan that is predicted to be fastest, over the fastest of those that were
timed again (the fastest of all plans by the first times, and the first ones by prediction), medians
of repeats in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic_lab.benchmark import Benchmark, DrawnOptions, Told, notes_of, require_cluster, words_of
from moesaic_lab.model.claims import case_rows, case_table, claims, panels, rows_of
from moesaic_lab.model.config import COMMITTED, ModelBenchConfig, ModelCase, read_config
from moesaic_lab.model.run import ModelFound, kept, kept_earlier, run


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DrawnOptions):
    """Options of the benchmark."""

    config: str | None = None
    """TOML file of beds and layers; the committed file by default."""
    keep: str = "model-times"
    """Folder of measured times. Times in this folder are not measured again, so a run can be
    interrupted and continued."""
    only: str | None = None
    """Measure only these: profile, plans, real, a bed or a case; several as "2x2,real". Results of
    the others are read from the folder if it has them."""
    earlier: str | None = None
    """Folder of profiles of the same beds, measured an hour before with --only profile. The cases
    are predicted from these profiles as well."""


Timed = tuple[list[ModelFound], list[ModelFound]]
"""The cases predicted from their own profiles, and the same cases predicted from earlier
profiles."""


def cases(options: ModelOptions) -> tuple[ModelBenchConfig, tuple[ModelCase, ...]]:
    """Return the whole configuration, and the cases to measure."""
    only = words_of(options.only)
    config = read_config(Path(options.config) if options.config else COMMITTED)
    chosen = (
        ()
        if only == ("profile",)
        else config.narrowed(only=tuple(w for w in only if w != "profile")).cells
    )
    require_cluster()
    return config, chosen


def measure(
    options: ModelOptions, cases: tuple[ModelBenchConfig, tuple[ModelCase, ...]], told: Told
) -> Timed:
    """Measure the cases whose times are not in the folder yet, and predict all cases."""
    config, chosen = cases
    folder = Path(options.keep)
    only = words_of(options.only)
    earlier = Path(options.earlier) if options.earlier else None
    run(config, chosen, folder, told, profiles="profile" in only, earlier=earlier)
    return kept(config, folder), kept_earlier(config, folder, earlier) if earlier else []


BENCHMARK = Benchmark(
    name="model",
    description=(
        "Predict the times of MoE layers from a profile of an emulated cluster, and measure them "
        "there."
    ),
    options=ModelOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    rows=lambda timed: [*case_rows(timed[0]), *rows_of(timed[0])],
    claims=lambda timed: claims(*timed),
    columns=lambda timed: [case_table(timed[0])] if timed[0] else [],
    panels=lambda timed: panels(timed[0]),
    title="One MoE layer over emulated links: predicted and measured",
)
