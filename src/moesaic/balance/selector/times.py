"""Measured times of a layer's options, as ratios to the modelled times, and the choice of options that are worth a trial.

Loads differ from call to call, so ratios to the model are stored instead of seconds. A ratio is the product of the option's own
factor and of a factor of the machine, common to all options. The speed of a machine drifts, and without the second factor an
option that ran an hour ago might look faster for that reason alone. An option counts as known only for loads close to those
under which it ran.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

KEPT = 32
"""Number of measured calls that are kept per option; their median counts, which a single slow call hardly changes."""
SETTLED = 8
"""Number of measured calls from which an option's ratio is taken as known, and deviations are attributed to the machine."""
NEAR = 0.25
"""Loads count as close if their seconds per copy differ by no more than this share."""
FOLLOW = 0.2
"""Share of a call's deviation by which the factor of the machine is updated."""
SAME = 0.05
"""Loads count as equal if their seconds per copy differ by no more than this share."""
LEAP = 0.2
"""Largest deviation, as a logarithm, that may update the factor of the machine; larger ones are clipped to it."""
OUTLIER = 0.4
"""Largest slowdown, as a logarithm, that is stored for one call. Speedups are not limited, since no disturbance speeds up a
call."""
TRUST = 1.0
"""The weight of the estimate from similar options, as a number of measured calls of the option itself."""
SPREAD = 1.4
"""Assumed deviation of one call, relative to the margin, before enough calls have been measured."""
ENOUGH = 4
"""Number of measured calls from which the deviations of an option are used to estimate the noise."""
DEVIATION = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of normal noise."""
DOUBT = 2.0
"""Number of standard errors by which a measured option may be faster than estimated."""
LEAST = 0.5
"""Smallest margin between options, relative to the configured margin, however often they were measured."""
MOST_TRIALS = 8
"""Number of calls of an option under a load from which the option is not tried again."""


@dataclass
class _OptionHistory:
    """The measured and tried calls of one option."""

    program: int
    measured: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """For each measured call: its load, and the logarithm of its ratio to the model without the factor of the machine."""
    tried: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """The loads of the option's trials, whether or not they were measured."""
    cached_summary: tuple[float, int, float] | None = None
    """A load, the number of runs or trials under close loads, and the median of their logarithms; None if outdated."""
    cached_deviations: list[float] | None = None
    """The return value of `deviations`; None if outdated."""

    def deviations(self) -> list[float]:
        """Return the deviation of each measured call, as a logarithm, from the median of the calls under close loads."""
        if self.cached_deviations is None:
            by_load = sorted(self.measured)
            loads, ratios = [load for load, _ in by_load], [ratio for _, ratio in by_load]
            deviations, ends = [], (0, 0, 0.0)
            for load, ratio in by_load:
                first, last = bisect_left(loads, load * (1 - NEAR)), bisect_right(loads, load / (1 - NEAR))
                if (first, last) != ends[:2]:
                    ends = first, last, median(ratios[first:last])
                deviations.append(abs(ratio - ends[2]))
            self.cached_deviations = deviations
        return self.cached_deviations

    def invalidate(self) -> None:
        """Discard the cached results after a change of `measured`."""
        self.cached_summary = self.cached_deviations = None

    def summary(self, load: float) -> tuple[int, float]:
        """Return the number of runs or trials of the option under loads close to `load`, and the median of their logarithms."""
        if self.cached_summary is None or abs(self.cached_summary[0] - load) > SAME * load:
            close = [ratio for other, ratio in self.measured if _is_near(other, load)]
            ratios = close or [ratio for _, ratio in self.measured] or [0.0]
            count = max(len(close), sum(_is_near(other, load) for other in self.tried))
            self.cached_summary = (load, count, median(ratios))
        return self.cached_summary[1:]


class Times:
    """The measured times of the options of one layer.

    Args:
        optimism: the share by which an option that never ran may be faster than estimated.
    """

    def __init__(self, optimism: float) -> None:
        self._optimism, self._machine = optimism, 0.0
        self._known: dict[str, _OptionHistory] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured yet."""
        return not any(record.measured for record in self._known.values())

    def note(self, name: str, program: int, load: float, modelled: float, measured: float) -> None:
        """Record the time of a call.

        Args:
            name: name of the option that ran.
            program: index of the program that ran.
            load: the load of the call, as the modelled seconds per copy if the call had been left alone.
            modelled: modelled seconds.
            measured: measured seconds on the slowest rank.
        """
        if modelled <= 0 or measured <= 0:
            return
        ratio = math.log(measured / modelled)
        if self.is_empty:
            self._machine = ratio
        deviation = ratio - self._machine - self._log_factor(name, program, load)
        record = self._known.setdefault(name, _OptionHistory(program))
        if len(record.measured) >= SETTLED:  # before that, the deviation is attributed to the option
            self._machine += FOLLOW * min(max(deviation, -LEAP), LEAP)
        record.measured.append((load, ratio - self._machine - deviation + min(deviation, OUTLIER)))
        record.invalidate()

    def try_out(self, name: str, program: int, load: float) -> None:
        """Record a trial of an option. Otherwise an option whose calls are never measured would be tried for ever."""
        record = self._known.setdefault(name, _OptionHistory(program))
        record.tried.append(load)
        record.cached_summary = None

    def count(self, name: str, load: float) -> int:
        """Return how often an option ran or was tried under loads close to `load`."""
        record = self._known.get(name)
        return 0 if record is None else record.summary(load)[0]

    def ran(self, name: str) -> bool:
        """Return whether an option ever ran or was tried."""
        return name in self._known

    def factor(self, name: str, program: int, load: float) -> float:
        """Return the factor on an option's modelled seconds for comparison with other options.

        For an option that never ran, the factor is estimated from other options: those with the same program, mixed with all
        others if there are few. For an option with few measured calls, that estimate is mixed with the option's own ratio.
        """
        return math.exp(self._log_factor(name, program, load))

    def _own_speedup(self, name: str, load: float) -> float:
        """Return the factor, at most 1, by which an option is faster if only its own measured calls count."""
        record = self._known.get(name)
        if record is None or not record.measured:
            return 1.0
        return math.exp(min(record.summary(load)[1] - self._log_factor(name, record.program, load), 0.0))

    def _log_factor(self, name: str, program: int, load: float) -> float:
        record = self._known.get(name)
        count = 0 if record is None else len(record.measured)
        if record is not None and count >= SETTLED:
            return record.summary(load)[1]
        others = [each for option, each in self._known.items() if each.measured and option != name]
        same_program = [each.summary(load)[1] for each in others if each.program == program]
        other_programs = [each.summary(load)[1] for each in others if each.program != program]
        prior = median(same_program or other_programs) if others else None
        if same_program and other_programs:  # a few options that are off need not mean that their program is
            weight = len(same_program)
            prior = (weight * median(same_program) + TRUST * median(other_programs)) / (weight + TRUST)
        if record is None or not count:
            return prior or 0.0
        own_ratio = record.summary(load)[1]
        return own_ratio if prior is None else (count * own_ratio + TRUST * prior) / (count + TRUST)

    def machine(self) -> float:
        """Return the factor of the machine: the recent ratio of measured to modelled seconds that all options share."""
        return math.exp(self._machine)

    def noise(self) -> float | None:
        """Return the standard deviation of one call from the median of its option, as a share; None before an option has
        `ENOUGH` measured calls."""
        enough = (record for record in self._known.values() if len(record.measured) >= ENOUGH)
        deviations = [deviation for record in enough for deviation in record.deviations()]
        return DEVIATION * median(deviations) if deviations else None

    def margin(self, margin: float, name: str, other: str, load: float) -> float:
        """Return the share by which one option must be faster than another to replace it: the standard error of the difference.

        Before anything has been measured this is `margin`, and it is never below `LEAST * margin`.
        """
        if self.is_empty:
            return margin
        noise = self.noise()
        spread = SPREAD * margin if noise is None else noise
        return max(spread * self._error(name, other, load), LEAST * margin)

    def _error(self, name: str, other: str, load: float) -> float:
        """Return the standard error of the difference of two options, relative to the deviation of one call."""
        return math.sqrt(sum(1 / max(self.count(option, load), 0.5) for option in (name, other)))

    def worth_trying(self, seconds: Mapping[str, float], best: str, load: float) -> str | None:
        """Return the option that is most likely to be faster than the best known one; None if no option may be.

        An option that never ran may be faster by the optimism, a measured one by two standard errors of the noise. Quiet
        machines thus finish their trials early, and noisy ones do not conclude anything from a single lucky call.

        Args:
            seconds: the predicted seconds of each option.
            best: the name of the best option.
            load: the load of the call.
        """
        hopes, noise = {}, self.noise()
        for name, predicted in seconds.items():
            count = self.count(name, load)
            doubt = self._optimism / (1 + count)
            if count and noise is not None:
                doubt = min(DOUBT * noise * self._error(name, best, load), self._optimism)
            hope = predicted * self._own_speedup(name, load) * (1 - doubt)
            if name != best and count < MOST_TRIALS and hope < seconds[best]:
                hopes[name] = hope
        return min(hopes, key=lambda name: (hopes[name], name), default=None)


def _is_near(load: float, other: float) -> bool:
    return abs(load - other) <= NEAR * max(load, other)
