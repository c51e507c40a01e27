"""Reads a run folder and summarises it: series, headline numbers, and the ranks or links that slow
the run down.

Reads config.json and metrics.jsonl only, and needs neither torch nor plotly.

To find stragglers, each line of metrics has three times per rank, since the previous line:
`seconds` of the training steps, `compute` seconds in which the rank's programs worked, and `waited`
seconds in which they waited for each other rank.

- A rank that computes longer than the others is slow.
- A rank that does not, but for which all others wait, is delayed by something outside the programs.
- If only one rank waits for another, the link between the two is slow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from moesaic.configfile import read_table
from moesaic.errors import InputError
from moesaic.program.notebook import html_table
from moesaic.train.metrics import read_metrics

LINES = 20
"""Number of lines of metrics, the last ones, that are used to find stragglers."""
SLOWER = 1.2
"""A slow rank's compute time is more than this, relative to the median of the others."""
WAITS = 0.1
"""A wait counts if it takes more than this share of the steps."""
APART = 3.0
"""A slow link's wait is longer than this, relative to the median of the other links."""


def stragglers(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return a phrase for each slow rank, late rank and slow link."""
    tables = [line["ranks"] for line in lines if has_rank_times(line.get("ranks"))]
    if not tables:
        return []
    world = len(tables[-1]["compute"])
    if world < 2:
        return []
    tables = [table for table in tables if len(table["compute"]) == world][-LINES:]
    # sums over these lines: the mean rank's seconds, (world,) of working, (world, world) of waiting
    seconds = float(np.mean(np.sum([table["seconds"] for table in tables], 0)))
    compute = np.sum([table["compute"] for table in tables], 0)
    waited = np.sum([table["waited"] for table in tables], 0)

    slow = _slow_ranks(seconds, compute)
    late = _late_ranks(seconds, waited, set(slow))
    links = _slow_links(seconds, waited, {*slow, *late})
    return [*slow.values(), *late.values(), *links]


def _slow_ranks(seconds: float, compute: np.ndarray) -> dict[int, str]:
    """Return a phrase for each rank whose programs work longer than those of others.

    Args:
        seconds: the seconds of the steps.
        compute: (world,), the seconds in which each rank's programs worked.
    """
    phrases = {}
    for rank in range(len(compute)):
        usual = median(np.delete(compute, rank))  # of the other ranks
        # longer by `SLOWER`, and by half of a wait that counts
        if compute[rank] > SLOWER * usual and compute[rank] - usual > WAITS / 2 * seconds:
            phrases[rank] = (
                f"rank {rank} is slow: its programs work {compute[rank] / usual:.1f} times as "
                "long as those of other ranks, because its experts get more tokens or its "
                "processor is slower"
            )
    return phrases


def _late_ranks(seconds: float, waited: np.ndarray, slow: set[int]) -> dict[int, str]:
    """Return a phrase for each rank that is not slow, but for which all others wait.

    Args:
        seconds: the seconds of the steps.
        waited: (world, world), the seconds for which the first rank waited for the second.
        slow: the slow ranks.
    """
    world = len(waited)
    phrases: dict[int, str] = {}
    if world <= 2:  # one wait does not tell a late rank from a slow link
        return phrases
    for awaited in range(world):
        # of all waits for this rank
        shortest = min(waited[rank, awaited] for rank in range(world) if rank != awaited)
        if awaited not in slow and shortest > WAITS * seconds:
            phrases[awaited] = (
                f"rank {awaited} comes late: all others wait for it for "
                f"{shortest / seconds:.0%} of the steps, though its programs work no longer "
                "than theirs"
            )
    return phrases


def _slow_links(seconds: float, waited: np.ndarray, slow: set[int]) -> Iterator[str]:
    """Yield a phrase for each link over which one rank waits for another, neither of which is slow
    or late; arguments as for `_late_ranks`."""
    for rank, peer in permutations(range(len(waited)), 2):
        if rank in slow or peer in slow:
            continue
        # over all links but the one between these two, in both directions
        other_waits = [
            waited[pair] for pair in permutations(range(len(waited)), 2) if {*pair} != {rank, peer}
        ]
        usual = median(other_waits) if other_waits else 0.0
        wait = waited[rank, peer]
        # of the two directions, only the one that waits longer
        if wait > max(WAITS * seconds, APART * usual) and wait >= waited[peer, rank]:
            yield (
                f"the link from rank {peer} to rank {rank} is slow: rank {rank} waits for its "
                f"messages for {wait / seconds:.0%} of the steps"
            )


def has_rank_times(ranks: Any) -> bool:
    """Return whether the times in a line are numbers, for the same number of ranks each."""
    try:
        seconds = np.asarray(ranks["seconds"], dtype=float)
        compute = np.asarray(ranks["compute"], dtype=float)
        waited = np.asarray(ranks["waited"], dtype=float)
    except (KeyError, TypeError, ValueError):
        return False
    if seconds.ndim != 1:
        return False
    world = len(seconds)
    return compute.shape == (world,) and waited.shape == (world, world)


_TRAIN_KEYS = ("kind", "step", "loss", "grad_norm", "lr", "tokens_per_second", "mfu", "seconds")


@dataclass(frozen=True)
class Series:
    """A number over optimizer steps. Lines of metrics without the number are left out."""

    steps: tuple[int, ...] = ()
    """The steps."""
    values: tuple[float, ...] = ()
    """The number at each of them."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """The last value, None for an empty series."""
        return self.values[-1] if self.values else None

    @property
    def median(self) -> float | None:
        """The median value, None for an empty series."""
        return median(self.values) if self.values else None


@dataclass(frozen=True, kw_only=True)
class LayerSeries:
    """One MoE layer. Each value covers the steps since the previous line of metrics."""

    numbers: dict[str, Series]
    """The layer's numbers in the metrics by name (docs/training.md), and the `dropped_share` of its
    copies."""
    load_steps: tuple[int, ...]
    """The steps at which loads were written."""
    loads: tuple[tuple[int, ...], ...]
    """Copies per expert at each of `load_steps`."""
    dropped: int
    """Copies that were dropped over the whole run."""

    def over_steps(self, name: str) -> Series:
        """Return a number over the steps; empty if the layer has none of this name."""
        return self.numbers.get(name, Series())


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run: its numbers over the steps, and its headline."""

    name: str
    """The folder's name, with as many parent folders as make it unique among the runs."""
    folder: Path
    """The run folder."""
    config: dict[str, Any]
    """The run's config.json."""
    lines: list[dict[str, Any]]
    """The run's lines of metrics."""
    steps: int
    """The last step that was logged."""
    training_seconds: float
    """Time spent training, evaluation not counted."""
    numbers: dict[str, Series]
    """The numbers of training lines and of evaluations, by name. `val_seconds` are the training
    seconds at evaluations."""
    layers: tuple[LayerSeries, ...]
    """The MoE layers; empty for a dense run."""
    stragglers: tuple[str, ...]
    """A phrase for each rank and each link that slows the run down."""

    def over_steps(self, name: str) -> Series:
        """Return a number over the steps; empty if the run has none of this name."""
        return self.numbers.get(name, Series())

    @property
    def auxiliary(self) -> list[str]:
        """Names of the auxiliary losses, which are averaged over the layers, before their
        coefficients."""
        known = (*_TRAIN_KEYS, "val_loss", "val_nats_per_byte", "val_seconds")
        return [name for name in self.numbers if name not in known]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the headline cards of the report."""
        rows = []
        for card in cards([self]):
            rows.append((card.title, *card.values, card.note))
        return html_table(f"run {self.name}", ("figure", "value", "note"), rows)

    def headline(self) -> dict[str, Any]:
        """Return the headline numbers as data for JSON, with None for numbers that the run does not
        have."""
        violations = [layer.over_steps("max_violation").last for layer in self.layers]
        dead = [layer.over_steps("dead_experts").last for layer in self.layers]
        copies = 0
        dropped = 0
        for layer in self.layers:
            copies += sum(sum(load) for load in layer.loads)
            dropped += layer.dropped
        validations = self.over_steps("val_nats_per_byte")
        numbers = {
            "name": self.name,
            "folder": str(self.folder),
            "steps": self.steps,
            "tokens": self._tokens(),
            "training_seconds": self.training_seconds,
            "last_train_loss": self.over_steps("loss").last,
            "last_val_nats_per_byte": validations.last,
            "best_val_nats_per_byte": min(validations.values, default=None),
            "tokens_per_second_median": self.over_steps("tokens_per_second").median,
            "mfu_median": self.over_steps("mfu").median,
            "max_violation_per_layer": violations,
            "max_violation_mean": _mean(violations),
            "dead_experts": sum(int(number or 0) for number in dead) if self.layers else None,
            "dropped_copies": dropped if self.layers else None,
            "dropped_share": dropped / copies if copies else None,
        }
        return {name: _finite_or_none(value) for name, value in numbers.items()}

    def _tokens(self) -> int | None:
        """Return the tokens of all steps; None if the configuration lacks a size."""
        try:
            sequences = self.config["batch_size"] * self.config["accumulation"]
            tokens_per_step = sequences * self.config["model"]["seq_len"]
            return int(self.steps * tokens_per_step)
        except (KeyError, TypeError):
            return None


def read_runs(folders: Sequence[Path]) -> list[RunSummary]:
    """Summarise runs, in the given order, with unique names.

    Raises:
        InputError: a folder is missing, holds no run, is given twice, or its files are damaged.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, resolved):
        if resolved.count(path) > 1:
            raise InputError(f"{folder}: given twice: name each run once")
    return [summarise(folder, name) for folder, name in zip(folders, distinct_names(resolved))]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return for each path its last component, preceded by as many further ones as make the name
    unique."""
    names = []
    for folder in folders:
        others = [other.parts for other in folders if other != folder]
        parts = folder.parts
        length = 1
        while length < len(parts):
            endings = [other[-length:] for other in others]
            if parts[-length:] not in endings:  # no other path ends like this
                break
            length += 1
        name = "/".join(part.strip("/") for part in parts[-length:])
        names.append(name or str(folder))  # the root has no name
    return names


def summarise(folder: Path, name: str) -> RunSummary:
    """Read and summarise one run folder.

    Args:
        name: the name to show for the run.

    Raises:
        InputError: the folder is missing, holds no run, or its files are damaged.
    """
    try:
        is_there = folder.is_dir()
    except OSError:  # the name is not valid for a folder
        is_there = False
    if not is_there:
        raise InputError(f"{folder}: no such folder: name the folder that moesaic train wrote")
    if not (folder / "config.json").exists():
        raise InputError(
            f"{folder}: no run there (config.json is missing): name the folder of a run"
        )

    config = read_table(folder / "config.json")
    lines = read_metrics(folder)
    if not lines:
        raise InputError(
            f"{folder / 'metrics.jsonl'}: holds no line yet: wait for the run's first "
            "log_every steps"
        )
    with damage_as_input_error(folder):
        return _summary(folder, name, config, lines)


@contextmanager
def damage_as_input_error(folder: Path) -> Iterator[None]:
    """Turn errors from damaged values in a run's files into InputError.

    The files are only known to be JSON, with lines that have a kind and a step.

    Raises:
        InputError: the code inside the context failed on a value of an unexpected kind.
    """
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        # the message of the error is put on one line and cut to 100 characters
        raise InputError(
            f"{folder}: metrics.jsonl or config.json holds a value that no run writes "
            f"({' '.join(str(error).split()):.100}): take them from a backup, or leave this run "
            "out"
        ) from error


def _summary(
    folder: Path, name: str, config: dict[str, Any], lines: list[dict[str, Any]]
) -> RunSummary:
    """Return a run's summary from its lines of metrics."""
    train = [line for line in lines if line["kind"] == "train"]
    evals = [line for line in lines if line["kind"] == "eval"]
    with_layers = [line for line in train if line.get("layers")]
    num_layers = max((len(line["layers"]) for line in with_layers), default=0)

    numbers = _all_series(train)
    numbers["val_loss"] = _series(evals, "val_loss")
    numbers["val_nats_per_byte"] = _series(evals, "val_nats_per_byte")
    numbers["val_seconds"] = _series(evals, "seconds")
    return RunSummary(
        name=name,
        folder=folder,
        config=config,
        lines=lines,
        steps=max(line["step"] for line in lines),
        training_seconds=max(_series(lines, "seconds").values, default=0.0),
        numbers=numbers,
        layers=tuple(_layer(with_layers, index) for index in range(num_layers)),
        stragglers=tuple(stragglers(train)),
    )


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that fits into a float."""
    if type(value) is int:  # and not bool
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def _series(lines: Sequence[dict[str, Any]], key: str) -> Series:
    """Return a number of the metrics over steps, where the lines have it."""
    steps = []
    values = []
    for line in lines:
        if _is_number(line.get(key)):
            steps.append(line["step"])
            values.append(float(line[key]))
    return Series(tuple(steps), tuple(values))


def _all_series(lines: Sequence[dict[str, Any]]) -> dict[str, Series]:
    """Return every number of some lines over the steps, by name."""
    series = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and name not in series and _is_number(value):
                series[name] = _series(lines, name)
    return series


def _layer(with_layers: Sequence[dict[str, Any]], index: int) -> LayerSeries:
    """Return the numbers of one MoE layer over steps, from the lines of metrics that have
    layers."""
    rows = [
        {"step": line["step"], **line["layers"][index]}
        for line in with_layers
        if index < len(line["layers"])
    ]
    for row in rows:
        copies = sum(row.get("tokens_per_expert", ()))
        row["dropped_share"] = row.get("dropped", 0) / copies if copies else 0.0
    with_load = [row for row in rows if row.get("tokens_per_expert")]
    return LayerSeries(
        numbers=_all_series(rows),
        load_steps=tuple(row["step"] for row in with_load),
        loads=tuple(tuple(row["tokens_per_expert"]) for row in with_load),
        dropped=sum(row.get("dropped", 0) for row in rows),
    )


def mean_over_layers(series: Sequence[Series]) -> Series:
    """Return the mean of several series, at the steps that all of them have."""
    if not series:
        return Series()
    values_by_step = [dict(zip(layer.steps, layer.values)) for layer in series]
    steps = []
    means = []
    for step in series[0].steps:
        if all(step in values for values in values_by_step):
            steps.append(step)
            means.append(fmean(values[step] for values in values_by_step))
    return Series(tuple(steps), tuple(means))


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _finite_or_none(value: Any) -> Any:
    """Return a value of JSON with None in place of infinities and NaN."""
    if isinstance(value, list):
        return [_finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


NONE = "—"
"""Shown instead of a number that a run does not have."""


@dataclass(frozen=True)
class Card:
    """One headline number, with its value for each run in order."""

    title: str
    values: tuple[str, ...]
    note: str


def cards(runs: Sequence[RunSummary]) -> list[Card]:
    """Return the headline cards. A card is left out if no run has its number."""
    fewest = min(run.steps for run in runs)
    most = max(run.steps for run in runs)
    trained = f"in {fewest:,} steps" if fewest == most else f"in {fewest:,} to {most:,} steps"
    # the number of `RunSummary.headline`, the card's title and note, and how to show the number
    rows: list[tuple[str, str, str, Callable[[Any], str]]] = [
        ("last_val_nats_per_byte", "Validation loss", "nats/byte, last", "{:.3f}".format),
        ("best_val_nats_per_byte", "Best validation", "nats/byte, lowest", "{:.3f}".format),
        ("training_seconds", "Trained for", "evaluation not counted", duration),
        ("tokens", "Tokens", trained, amount),
        ("tokens_per_second_median", "Throughput", "tokens/s, median", amount),
        ("mfu_median", "MFU", "of the matmul peak, median", percent),
        ("max_violation_mean", "MaxVio", "mean over layers, at the end", "{:.2f}".format),
        ("dead_experts", "Dead experts", "at the end, over all layers", "{}".format),
        ("dropped_share", "Dropped", "share of copies", percent),
    ]

    shown = []
    headlines = [run.headline() for run in runs]
    for name, title, note, in_words in rows:
        values = [headline[name] for headline in headlines]
        if any(value is not None for value in values):
            texts = tuple(NONE if value is None else in_words(value) for value in values)
            shown.append(Card(title, texts, note))
    return shown


def percent(share: float) -> str:
    """Return a share as a percentage with two or three significant digits: 31 %, 3.1 %, 0.31 %."""
    value = 100 * share
    if value >= 10 or value == 0:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 1 else f"{value:.2f} %"


def amount(value: float) -> str:
    """Return a count with three significant digits: 812, 9.21 k, 2.05 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            short = value / size
            if short < 10:
                return f"{short:.2f}{unit}"
            return f"{short:.1f}{unit}" if short < 100 else f"{short:.0f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return a duration in readable units: 48 s, 2 min 11 s, 5 h 03 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
