"""The whole step under every split of the ranks, on emulated clusters, beside what others do and
what the planner chooses. A cell takes at most 12 minutes and its profiles 2 each; each part is
kept, and a later call goes on.

`moesaic train --preset demo` on the ranks of a bed, one split after another: steps after a first
one, from the end of an optimizer step to the end of the next, on the slowest rank. virtual compute:
attention and experts sleep for as long as a core of their own would take, so that waiting ranks
lend nobody their core; routing is even. real compute: the demo itself, whose ranks share the cores.
A split whose first step takes more than four times the best step so far stops there, and counts
with this step. The chosen split is that of `planner.plan=search` from a profile measured on the
bed, whose device is the virtual accelerator. Intervals are from the smallest to the largest ratio
of two timed steps. again is the first split, run once more at the end of its cell. Expert
parallelism as in torchtitan sends rows through one all-to-all without overlap and shards the rest
with FSDP2, which gathers and reduces in each micro-batch; its layers are ours (`moesaic bench
train` times layers of others). Bytes are those that the first node's device sent in a step.

A bed is an emulated cluster, a cell one bed with a model, and a split a mesh and a plan for its
ranks. A split *by hand* is one that `cells.splits_of` lists; others are chosen by the planner.

    moesaic bench step --json benchmarks/results/step.json
    python -m moesaic_lab.step.page
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moesaic.planner.simulator import Simulator
from moesaic.train.config import TrainConfig
from moesaic_lab.benchmark import (
    Benchmark,
    KeptOptions,
    Shown,
    Told,
    keeping,
    kept,
    notes_of,
    require_cluster,
    words_of,
)
from moesaic_lab.claims import describe_machine, today
from moesaic_lab.measure import Timing
from moesaic_lab.step.cells import AGAIN, BedSplit, StepCell, StepConfig, read_config, splits_of
from moesaic_lab.step.claims import claims
from moesaic_lab.step.predict import chosen_split, cluster_of, predicted_seconds, text_of
from moesaic_lab.step.ranks import profile_on_rank, search_on_rank, train_on_rank
from moesaic_testbed.cluster import Cluster, Launcher

REPEATS_OF_PROFILE = 3
TOO_SLOW = 4.0
"""A first step that takes this many times the best step so far is the only one."""


@dataclass(frozen=True, kw_only=True)
class StepOptions(KeptOptions):
    """Options of the benchmark."""

    config: str | None = None
    """Read beds from this TOML file; by default from the one in the repository."""
    only: str | None = None
    """Run only these cells, separated by commas; the others are shown if their parts are kept."""
    keep: str | None = "runs/step"
    """Store the result of each run in this folder, and skip runs that already have a result
    there."""


class _CellRun:
    """Runs the splits of a cell, or reads what is kept of them.

    Args:
        folder: where results are kept.
        ranks: the bed; None to read only.
    """

    def __init__(
        self, config: StepConfig, cell: StepCell, folder: Path, told: Told, ranks: Cluster | None
    ) -> None:
        self.config = config
        self.cell = cell
        self._folder = folder
        self._told = told
        self._ranks = ranks
        self._runs: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each split; fewer if some are neither kept nor can be run."""
        profiles = self._profiles()
        chosen = self._chosen(profiles)
        first, *others = splits_of(self.config, self.cell)
        # the first split is often the fastest, and then spares the slow ones their further steps
        splits = [first, *dict.fromkeys(chosen), *others]
        left_out = []
        for number, split in enumerate(splits):
            if split.role or self._minutes < self.config.minutes:
                self._run(split, f"split {number + 1} of {len(splits)}")
            else:
                left_out.append(split)
        self._run(replace(first, role=AGAIN), "the first one again")
        if not self._runs:
            return []
        rows = rows_of(self.config, self.cell, self._runs, chosen, profiles)
        return rows + [unmeasured_row(self.config, self.cell, split) for split in left_out]

    @property
    def _minutes(self) -> float:
        """Minutes that the runs so far took."""
        return sum(run["run_seconds"] for run in self._runs) / 60

    def _profiles(self) -> list[str]:
        """Return the profiles of the bed; cells on one bed share them."""
        cell = self.cell

        def profile(ranks: Cluster) -> str:
            """Return a profile as a file has it; that of any rank."""
            return ranks.run(profile_on_rank, cell.ranks_per_node, REPEATS_OF_PROFILE)[0]

        bed = f"{cell.shape} {cell.inter} {cell.intra}"
        texts = []
        for number in range(cell.profiles):
            name = f"profile {number + 1} of {bed}"
            text = self._kept(name, name, profile)
            if text is not None:
                texts.append(text)
        return texts

    def _chosen(self, profiles: Sequence[str]) -> list[BedSplit]:
        """Return the split that a search chooses from each profile; of those that are kept or can
        be run."""
        run = self.config.run_of(self.cell, BedSplit())
        chosen = []
        for number, profile in enumerate(profiles):
            text = text_of(profile, self.config, self.cell)
            what = f"search {number + 1}"
            name = f"{self.cell.name}, {what} {self.config.digest(self.cell)}"
            found = self._kept(name, what, partial(_searched, run=run, profile=text))
            if found is not None:
                chosen.append(chosen_split(self.config, found))
        return chosen

    def _run(self, split: BedSplit, what: str) -> None:
        """Train under a split, unless a result is kept."""
        medians = [statistics.median(run["seconds"]) for run in self._runs if run["seconds"]]
        most_seconds = TOO_SLOW * min(medians, default=math.inf)
        name = f"{self.cell.name}, {split.key} {self.config.digest(self.cell)}"
        words = f"{what}, {split.role or 'by hand'}: {split.flags(self.config)}"
        make = partial(
            one_run, config=self.config, cell=self.cell, split=split, most_seconds=most_seconds
        )
        run = self._kept(name, words, make)
        if run is not None:
            self._runs.append(run)

    def _kept(self, name: str, what: str, make: Callable[[Cluster], Any]) -> Any:
        """Return a kept part, or make it on the bed; None if there is neither.

        Args:
            name: of the part's file.
            what: what is made, for the line that shows progress.
            make: makes it, given the ranks.
        """
        path = self._folder / f"{name}.json"
        ranks = self._ranks
        self._told(f"{self.cell.name}: {what}; {self._minutes:.0f} minutes of runs so far")
        if path.exists() or ranks is not None:
            return kept(path, lambda: make(ranks))  # type: ignore[arg-type]
        return None


def _searched(ranks: Cluster, run: TrainConfig, profile: str) -> dict[str, Any]:
    """Search on all ranks, which find the same."""
    first, *others = ranks.run(search_on_rank, run, profile)
    assert all(other == first for other in others)
    return first


def one_run(
    ranks: Cluster, config: StepConfig, cell: StepCell, split: BedSplit, most_seconds: float
) -> dict[str, Any]:
    """Train under a split, and return seconds and bytes of each step, and the last loss.

    Args:
        most_seconds: a first step that takes longer is the only one.
    """
    started = time.monotonic()
    gflops = config.gflops if cell.compute == "virtual" else None
    with tempfile.TemporaryDirectory() as out:
        run = config.run_of(cell, split, f"{out}/run")
        trained = ranks.run(train_on_rank, run, gflops, most_seconds)
    # a step ends with its slowest rank
    ends_of_steps = zip(*(of_rank.ends for of_rank in trained))
    ends = [max(end.at for end in of_ranks) for of_ranks in ends_of_steps]
    sent_bytes = [end.sent_bytes for end in trained[0].ends]
    return {
        "key": split.key,
        "first_seconds": trained[0].first_seconds,
        "seconds": [later - earlier for earlier, later in itertools.pairwise(ends)],
        "bytes": [later - earlier for earlier, later in itertools.pairwise(sent_bytes)],
        "loss": trained[0].loss,
        "run_seconds": time.monotonic() - started,
        "cpu": describe_machine()["cpu"],
        "date": today(),
    }


def unmeasured_row(config: StepConfig, cell: StepCell, split: BedSplit) -> dict[str, Any]:
    """Return the row of a split for which no minutes were left."""
    return {
        "cell": cell.name,
        "compute": cell.compute,
        "role": split.role,
        "split": split.words,
        "flags": split.flags(config),
        "pp": split.mesh.pp,
        "ep": split.mesh.ep,
        "state": "no minutes left",
    }


def rows_of(
    config: StepConfig,
    cell: StepCell,
    runs: Sequence[Mapping[str, Any]],
    chosen: Sequence[BedSplit],
    profiles: Sequence[str],
) -> list[dict[str, Any]]:
    """Return a row for each run of a cell.

    Args:
        chosen: the split that each profile chooses.
        profiles: the profiles of the bed.
    """
    simulators = [Simulator(cluster_of(text, config, cell)) for text in profiles]
    by_hand = splits_of(config, cell)
    splits = {split.key: split for split in (*by_hand, *chosen, replace(by_hand[0], role=AGAIN))}
    rows = []
    for run in runs:
        split = splits[run["key"]]
        is_timed = bool(run["seconds"])
        seconds = run["seconds"] or [run["first_seconds"]]
        predictions = [
            predicted_seconds(config, cell, split, simulator) for simulator in simulators
        ]
        chosen_by = [number for number, each in enumerate(chosen) if each == split]
        measured = {
            "chosen_by": chosen_by,
            "state": "timed" if is_timed else "stopped after a step",
            "seconds": seconds,
            **Timing.of(seconds).row(),
            "first_seconds": run["first_seconds"],
            "predicted_seconds": [each for each in predictions if each is not None],
            "node_bytes": statistics.median_high(run["bytes"]) if is_timed else None,
            "loss": run["loss"],
            "cpu": run["cpu"],
            "date": run["date"],
        }
        rows.append(unmeasured_row(config, cell, split) | measured)
    return rows


def measure(options: StepOptions, config: StepConfig, told: Told) -> list[dict[str, Any]]:
    """Train under every split on the chosen beds, in turn, and return a row for each split of
    each bed, those included that are kept."""
    chosen = config.narrowed(only=words_of(options.only)).cells
    rows: list[dict[str, Any]] = []
    with keeping(options.keep) as folder, Launcher() as launcher:
        for cell in config.cells:
            if cell not in chosen:
                rows += _CellRun(config, cell, folder, told, None).rows()
                continue
            with launcher.open(cell.bed) as ranks:
                rows += _CellRun(config, cell, folder, told, ranks).rows()
    return rows


COLUMNS = (
    *("cell", "role", "split", "median_seconds", "low_seconds", "high_seconds"),
    *("first_seconds", "node_bytes", "loss", "state"),
)


def cases(options: StepOptions) -> StepConfig:
    """Return the configuration."""
    config = read_config(Path(options.config)) if options.config else read_config()
    config.narrowed(only=words_of(options.only))
    require_cluster()
    return config


BENCHMARK = Benchmark(
    name="step",
    description=(
        "Time the whole step under every split of the ranks of emulated clusters, beside what "
        "others do and what the planner chooses. A cell takes at most 12 minutes, and 2 for each "
        "of its profiles; --only chooses cells."
    ),
    options=StepOptions,
    notes=notes_of(__doc__),
    cases=cases,
    measure=measure,
    claims=claims,
    columns=(Shown(title="Steps by split", columns=COLUMNS, group_by=("cell",)),),
)
