"""Predicts steps of systems that the fit has not seen, and counts how often the interval holds and the order is right.

The closed form has one fitted term, `LAUNCHES` (`moesaic.planner.step`): seconds of an MoE layer and micro-batch, and more for
each expert of a rank. It is fitted to the published steps, with equal weight for every system. For each system it is fitted
again without that system's steps, and so are the quartiles of the interval.

    python -m moesaic_lab.ledger.held_out
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.planner.answer import SPREADS, generation
from moesaic_lab.ledger.parts import cluster_of, predicted_step
from moesaic_lab.ledger.records import read_published

LAYER, EXPERT = np.arange(0.0, 3.05, 0.1) * 1e-3, np.arange(0.0, 0.1025, 0.005) * 1e-3
"""Seconds of a layer, and of an expert, that the fit tries."""
APART = 0.03
"""Share by which two speeds must differ to count as a pair."""


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A published step, with its prediction as a function of the fitted term."""

    what: str
    system: str
    model: str
    machine: str
    generation: str
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
    """Return the published steps of the ledger."""
    published, steps = read_published(), []
    for row in published["step"]:
        (base, speed), (layer, _), (expert, _) = (
            predicted_step(row, published["model"], launches=launches)
            for launches in ((0.0, 0.0), (LAYER[-1], 0.0), (0.0, EXPERT[-1]))
        )
        steps.append(
            PublishedStep(
                what=row["what"], system=row["system"], model=row["model"],
                machine=row["machine"] + (" with other links" if "inside" in row else ""),
                generation=generation(cluster_of(row["machine"])),
                measured=row["tokens_per_second"],
                tokens=speed * base.seconds,
                seconds=base.seconds,
                of_layer=(layer.seconds - base.seconds) / LAYER[-1],
                of_expert=(expert.seconds - base.seconds) / EXPERT[-1],
            )
        )  # fmt: skip
    return tuple(steps)


def fitted_launches(steps: Sequence[PublishedStep]) -> tuple[float, float]:
    """Return the term that minimizes the mean absolute log ratio of predicted and published speed, the mean over systems."""
    layer, expert = (each.ravel() for each in np.meshgrid(LAYER, EXPERT, indexing="ij"))
    counts, distance = Counter(step.system for step in steps), np.zeros(layer.size)
    for step in steps:
        seconds = step.seconds + step.of_layer * layer + step.of_expert * expert
        distance += np.abs(np.log(step.tokens / seconds / step.measured)) / counts[step.system]
    best = int(np.argmin(distance))
    return float(layer[best]), float(expert[best])


def held_out_ratios(steps: Sequence[PublishedStep]) -> np.ndarray:
    """Return the ratios of published to predicted speed, each predicted by a fit without the step's system, (n,)."""
    launches = {
        system: fitted_launches([step for step in steps if step.system != system])
        for system in {step.system for step in steps}
    }
    return np.array([step.measured / step.speed(launches[step.system]) for step in steps])


def spread(steps: Sequence[PublishedStep], ratios: np.ndarray, kind: str) -> tuple[float, float]:
    """Return the quartiles of ratios on a generation of GPUs ("" for all), widened to include 1; systems have equal weight."""
    chosen = [place for place, step in enumerate(steps) if kind in ("", step.generation)]
    systems = [steps[place].system for place in chosen]
    weights = np.array([1 / systems.count(system) for system in systems])
    order = np.argsort(ratios[chosen])
    reached = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    low, high = np.interp((0.25, 0.75), reached, ratios[chosen][order])
    return min(float(low), 1.0), max(float(high), 1.0)


def inside(steps: Sequence[PublishedStep]) -> dict[str, list[bool]]:
    """Return whether each step of a system lies inside the interval, with the fit and the interval from other systems."""
    found: dict[str, list[bool]] = {}
    for system in dict.fromkeys(step.system for step in steps):
        others = [step for step in steps if step.system != system]
        launches, ratios = fitted_launches(others), held_out_ratios(others)
        found[system] = []
        for step in (each for each in steps if each.system == system):
            low, high = spread(others, ratios, step.generation)
            found[system].append(low <= step.measured / step.speed(launches) <= high)
    return found


def coverage(steps: Sequence[PublishedStep]) -> float:
    """Return the share of steps inside the interval; systems have equal weight, as in the fit and the interval."""
    shares = [sum(steps) / len(steps) for steps in inside(steps).values()]
    return sum(shares) / len(shares)


def pairs(steps: Sequence[PublishedStep]) -> list[tuple[PublishedStep, PublishedStep]]:
    """Return the pairs of layouts of one model on one machine whose published speeds are more than `APART` apart."""
    return [
        (one, other)
        for one, other in itertools.combinations(steps, 2)
        if (one.model, one.machine) == (other.model, other.machine)
        and abs(one.measured / other.measured - 1) > APART
    ]


def ordered_right(steps: Sequence[PublishedStep]) -> float:
    """Return the share of `pairs` whose predicted speeds, each by a fit without its system, have the published order."""
    predicted = {
        id(step): step.measured / ratio for step, ratio in zip(steps, held_out_ratios(steps))
    }
    right = [
        (predicted[id(one)] > predicted[id(other)]) == (one.measured > other.measured)
        for one, other in pairs(steps)
    ]
    return sum(right) / len(right)


def main() -> None:
    """Print the fit, the interval, and what they are worth on systems that they have not seen."""
    steps = published_steps()
    ratios = held_out_ratios(steps)
    print("launches:", *fitted_launches(steps))
    for step, ratio in sorted(zip(steps, ratios), key=lambda pair: pair[1]):
        print(f"  {ratio:.3f} {step.system}: {step.what}")
    print("spreads:", {kind: spread(steps, ratios, kind) for kind in SPREADS})
    single = list(itertools.chain(*inside(steps).values()))
    print(
        f"coverage {coverage(steps):.2f} with equal weight for systems, {sum(single)} of {len(single)} steps"
    )
    print(f"{len(pairs(steps))} pairs, ordered right {ordered_right(steps):.2f}")


if __name__ == "__main__":
    main()
