"""Predicts steps of systems that the fit has not seen, and counts how often the interval holds and
the order is right.

The closed form has one fitted term, `LAUNCHES` (`moesaic.planner.step`): seconds of an MoE layer
and micro-batch, and more for each expert of a rank. It is fitted to the published steps, with equal
weight for every system. For each system it is fitted again without that system's steps, and so are
the quartiles of the interval. A step lies inside its interval if the ratio of its published to its
predicted speed lies between these quartiles, which are those of the other systems' ratios.

    python -m moesaic_lab.ledger.held_out
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import beta

from moesaic.planner.cluster import ClusterSpec
from moesaic_lab.ledger.parts import cluster_of, predicted_step
from moesaic_lab.ledger.records import read_published

LAYER = np.arange(0.0, 3.05, 0.1) * 1e-3
EXPERT = np.arange(0.0, 0.1025, 0.005) * 1e-3
"""Seconds of a layer, and of an expert, that the fit tries."""
CLASSES = ("hopper", "blackwell", "nvl72")
"""Classes of machines, of which coverage is told apart."""
APART = 0.03
"""Share by which two speeds must differ to count as a pair."""
NARROW_ENOUGH = 0.15
"""Farthest that either end of a coverage's binomial interval may lie from it."""
CONFIDENCE = 0.9
"""Confidence of a binomial interval."""


def class_of(cluster: ClusterSpec) -> str:
    """Return a cluster's class of machines, by the data-sheet rate of bfloat16 products and by
    whether several hosts share a switch; "" for none of `CLASSES`."""
    peak = cluster.device.peak_tflops
    if not 2000 < peak < 3000:
        return "hopper" if 900 < peak < 1000 else ""
    return "nvl72" if cluster.devices_per_host else "blackwell"


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A published step, with its prediction as a function of the fitted term."""

    what: str
    system: str
    setting: tuple[Any, ...]
    """What two steps must have in common to be compared: model, machine, number of GPUs, length of
    sequences, precision."""
    layout: str
    """The layout without the number of sequences per step, which is no choice of layouts."""
    machines: str
    """Of `CLASSES`."""
    measured: float
    """Published tokens per second and device."""
    tokens: float
    """Tokens of a step per device."""
    seconds: float
    """Predicted seconds of a step without the fitted term."""
    of_layer: float
    """More seconds of the step for each second of a layer."""
    of_expert: float
    """More seconds of the step for each second of an expert."""

    def speed(self, launches: tuple[float, float]) -> float:
        """Return the predicted tokens per second and device."""
        return self.tokens / (
            self.seconds + self.of_layer * launches[0] + self.of_expert * launches[1]
        )


@functools.cache
def published_steps() -> tuple[PublishedStep, ...]:
    """Return the published steps of the ledger. Predicted seconds are linear in the fitted term, so
    three predictions of a step give its coefficients."""
    published = read_published()
    steps = []
    for row in published["step"]:
        models = published["model"]
        base, speed = predicted_step(row, models, launches=(0.0, 0.0))
        layer, _ = predicted_step(row, models, launches=(LAYER[-1], 0.0))
        expert, _ = predicted_step(row, models, launches=(0.0, EXPERT[-1]))
        precision = row["layout"].get("precision", "bf16")
        steps.append(
            PublishedStep(
                what=row["what"],
                system=row["system"],
                setting=(row["model"], row["machine"], row["gpus"], row["seq_len"], precision),
                layout=str(row["layout"] | {"global_batch": 0}),
                machines=class_of(cluster_of(row["machine"])),
                measured=row["tokens_per_second"],
                tokens=speed * base.seconds,
                seconds=base.seconds,
                of_layer=(layer.seconds - base.seconds) / LAYER[-1],
                of_expert=(expert.seconds - base.seconds) / EXPERT[-1],
            )
        )
    return tuple(steps)


def fitted_launches(steps: Sequence[PublishedStep]) -> tuple[float, float]:
    """Return the term (seconds of a layer, of an expert) that minimizes the mean absolute log ratio
    of predicted and published speed, the mean over systems."""
    # all pairs of the two grids, as two long vectors
    layer, expert = (each.ravel() for each in np.meshgrid(LAYER, EXPERT, indexing="ij"))
    counts = Counter(step.system for step in steps)
    distance = np.zeros(layer.size)
    for step in steps:
        seconds = step.seconds + step.of_layer * layer + step.of_expert * expert
        log_ratio = np.log(step.tokens / seconds / step.measured)
        distance += np.abs(log_ratio) / counts[step.system]
    best = int(np.argmin(distance))
    return float(layer[best]), float(expert[best])


def held_out_ratios(steps: Sequence[PublishedStep]) -> np.ndarray:
    """Return the ratios of published to predicted speed, each predicted by a fit without the step's
    system, (n,)."""
    launches = {
        system: fitted_launches([step for step in steps if step.system != system])
        for system in {step.system for step in steps}
    }
    return np.array([step.measured / step.speed(launches[step.system]) for step in steps])


def spread(steps: Sequence[PublishedStep], ratios: np.ndarray) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile of ratios; systems have equal
    weight."""
    counts = Counter(step.system for step in steps)
    weights = np.array([1 / counts[step.system] for step in steps])
    order = np.argsort(ratios)
    # the share of the weight below each ratio, half of its own included
    ordered = weights[order]
    weight_below = np.cumsum(ordered) - ordered / 2
    share_below = weight_below / weights.sum()
    low, middle, high = np.interp((0.25, 0.5, 0.75), share_below, ratios[order])
    return float(low), float(middle), float(high)


def inside(steps: Sequence[PublishedStep]) -> dict[str, list[bool]]:
    """Return by system whether each of its steps lies inside the interval, with the fit and the
    interval from other systems."""
    is_inside: dict[str, list[bool]] = {step.system: [] for step in steps}
    for system, of_system in is_inside.items():
        others = [step for step in steps if step.system != system]
        launches = fitted_launches(others)
        low, _, high = spread(others, held_out_ratios(others))
        for step in steps:
            if step.system == system:
                ratio = step.measured / step.speed(launches)
                of_system.append(bool(low <= ratio <= high))
    return is_inside


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How often intervals hold that were made without the sources that they are tried on."""

    share: float
    """Share of steps inside; sources have equal weight."""
    sources: int
    low: float
    high: float
    """Binomial interval of the share, as of so many independent sources (Clopper and Pearson)."""

    @property
    def is_known(self) -> bool:
        """Whether there are enough sources to tell the share."""
        return max(self.share - self.low, self.high - self.share) <= NARROW_ENOUGH


def coverage(steps: Sequence[PublishedStep], kind: str = "") -> Coverage:
    """Return the coverage of steps on a class of machines ("" for all)."""
    shares = []
    for system, is_inside in inside(steps).items():
        steps_of_system = [step for step in steps if step.system == system]
        chosen = [
            holds for step, holds in zip(steps_of_system, is_inside) if kind in ("", step.machines)
        ]
        if chosen:
            shares.append(sum(chosen) / len(chosen))
    count = len(shares)
    share = sum(shares) / count
    # the binomial interval of Clopper and Pearson for `successes` of `count` trials
    successes = share * count
    tail = (1 - CONFIDENCE) / 2
    low = 0.0
    high = 1.0
    if successes:
        low = float(beta.ppf(tail, successes, count - successes + 1))
    if successes < count:
        high = float(beta.ppf(1 - tail, successes + 1, count - successes))
    return Coverage(share=share, sources=count, low=low, high=high)


Pair = tuple[PublishedStep, PublishedStep]


def pairs(steps: Sequence[PublishedStep]) -> list[Pair]:
    """Return the pairs of different layouts in one setting whose published speeds are more than
    `APART` apart."""
    found = []
    for one, other in itertools.combinations(steps, 2):
        is_same_layout = one.system == other.system and one.layout == other.layout
        is_apart = abs(one.measured / other.measured - 1) > APART
        if one.setting == other.setting and not is_same_layout and is_apart:
            found.append((one, other))
    return found


def ordered_right(steps: Sequence[PublishedStep]) -> dict[str, float]:
    """Return by source the share of `pairs` whose predicted speeds, each by a fit without its
    system, have the published order.

    A source is a system, or two systems whose steps are compared. Pairs of the same two layouts,
    which differ in their number of micro-batches, together count as one.
    """
    predicted_speed = {
        id(step): step.measured / ratio for step, ratio in zip(steps, held_out_ratios(steps))
    }
    is_right: dict[tuple[str, str], list[bool]] = {}  # by source and pair of layouts
    for one, other in pairs(steps):
        source = " and ".join(sorted({one.system, other.system}))
        layouts = str((one.setting, sorted((one.layout, other.layout))))
        is_predicted_faster = bool(predicted_speed[id(one)] > predicted_speed[id(other)])
        is_faster = one.measured > other.measured
        is_right.setdefault((source, layouts), []).append(is_predicted_faster == is_faster)

    shares_by_source: dict[str, list[float]] = {}
    for (source, _), of_layouts in is_right.items():
        shares_by_source.setdefault(source, []).append(statistics.mean(of_layouts))
    return {source: statistics.mean(shares) for source, shares in shares_by_source.items()}


def main() -> None:
    """Print the fit, the interval, and what they are worth on systems that they have not seen."""
    steps = published_steps()
    ratios = held_out_ratios(steps)
    print("launches:", *fitted_launches(steps))
    for step, ratio in sorted(zip(steps, ratios), key=lambda pair: pair[1]):
        print(f"  {ratio:.3f} {step.system}: {step.what}")
    errors = np.abs(1 / ratios - 1)
    print(f"errors: median {np.median(errors):.3f}, worst {errors.max():.2f}")
    print("spread:", spread(steps, ratios))
    for kind in ("", *CLASSES):
        print("coverage", kind or "all", coverage(steps, kind))
    print(f"{len(pairs(steps))} pairs, ordered right:", ordered_right(steps))


if __name__ == "__main__":
    main()
