"""`moesaic bench model`: predicted times of layers compared with measured ones, on an emulated
cluster.

A layer on the library's runtime over emulated links, forward and backward. compute virtual: experts
sleep for as long as an accelerator of the given rate would take; real: they multiply. Ranks are
bound to cores, under the batch policy. Predictions use the cluster's own profile, measured on the
same bed before and brought to the wall times of other layers; no constant is fitted to these
points. Regret: the plan that is predicted to be fastest, over the fastest of those that were timed
again (the fastest of all plans by the first times, and the first ones by prediction), medians of
repeats in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic_lab.benchmark import Benchmark, DrawnOptions, Told, notes_of, require_cluster, words_of
from moesaic_lab.model.claims import case_rows, case_table, claims, panels, rows_of
from moesaic_lab.model.config import COMMITTED, ModelBenchConfig, ModelCase, read_config
from moesaic_lab.model.run import ModelFound, kept, run


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


def cases(options: ModelOptions) -> tuple[ModelBenchConfig, tuple[ModelCase, ...]]:
    """Return the whole configuration, and the cases to measure."""
    only = words_of(options.only)
    config = read_config(Path(options.config) if options.config else COMMITTED)
    chosen: tuple[ModelCase, ...] = ()
    if only != ("profile",):
        cells_only = tuple(word for word in only if word != "profile")
        chosen = config.narrowed(only=cells_only).cells
    require_cluster()
    return config, chosen


def measure(
    options: ModelOptions, cases: tuple[ModelBenchConfig, tuple[ModelCase, ...]], told: Told
) -> list[ModelFound]:
    """Measure the cases whose times are not in the folder yet, and predict all cases."""
    config, chosen = cases
    folder = Path(options.keep)
    run(config, chosen, folder, told, profiles="profile" in words_of(options.only))
    return kept(config, folder)


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
    rows=lambda found: [*case_rows(found), *rows_of(found)],
    claims=claims,
    columns=lambda found: [case_table(found)] if found else [],
    panels=panels,
    title="One MoE layer over emulated links: predicted and measured",
)
