"""`moesaic bench model`: predicted times of layers beside measured ones, on an emulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic_lab.benchmark import Benchmark, DrawnOptions, Told, require_cluster, words_of
from moesaic_lab.model.claims import NOTES, case_rows, case_table, claims, panels, rows_of
from moesaic_lab.model.config import COMMITTED, ModelBenchConfig, narrowed, read_config
from moesaic_lab.model.run import ModelFound, kept, kept_earlier, run


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DrawnOptions):
    """What to measure."""

    config: str | None = None
    """Beds and layers from this TOML file; the committed one if not given."""
    keep: str = "model-times"
    """Folder for what was measured. What is there is not measured again: a run can be split and taken up."""
    only: str | None = None
    """Only these: profile, plans, real, a bed or a case; several as "2x2,real". The others are read from the folder if they
    are there."""
    earlier: str | None = None
    """Folder with profiles of the same beds, taken an hour before with --only profile: they predict the cases too."""


Timed = tuple[list[ModelFound], list[ModelFound]]
"""The cases, and the same ones by the earlier profiles."""


def cases(options: ModelOptions) -> tuple[ModelBenchConfig, ModelBenchConfig]:
    """Return the whole configuration, and what of it is to be measured."""
    only = words_of(options.only)
    config = read_config(Path(options.config) if options.config else COMMITTED)
    wanted = narrowed(config, only)
    if wanted.cases or "profile" in only:
        require_cluster()
    return config, wanted


def measure(options: ModelOptions, cases: tuple[ModelBenchConfig, ModelBenchConfig], told: Told) -> Timed:
    """Measure what is not kept yet, and predict it."""
    (config, wanted), folder, only = cases, Path(options.keep), words_of(options.only)
    earlier = Path(options.earlier) if options.earlier else None
    if wanted.cases or "profile" in only:
        run(wanted, folder, told, profiles="profile" in only, earlier=earlier)
    return kept(config, folder), kept_earlier(config, folder, earlier) if earlier else []


BENCHMARK = Benchmark(
    name="model", description="Predict the times of MoE layers from a profile of an emulated cluster, and measure them there.",
    options=ModelOptions, notes=NOTES, cases=cases, measure=measure,
    rows=lambda timed: [*case_rows(timed[0]), *rows_of(timed[0])], claims=lambda timed: claims(*timed),
    columns=lambda timed: [case_table(timed[0])] if timed[0] else [], panels=lambda timed: panels(timed[0]),
    title="One MoE layer over emulated links: predicted and measured",
)  # fmt: skip
