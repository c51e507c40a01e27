"""What a layer's options really take: measured seconds over modelled ones, option by option, and what is worth a trial.

Loads differ from call to call, so what is remembered is a ratio to the model. A ratio is an option's own, times what the
machine makes everything take just now: how fast a machine is drifts, and an option that ran an hour ago must not look
faster than the one that runs for that. An option counts as known only under about the load at which it ran.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

KEPT = 32
"""Measured calls of an option that are remembered; their median counts, so that one slow call decides nothing."""
SETTLED = 8
"""Measured calls after which an option's ratio is taken for its own, and what it deviates from it for the machine's doing."""
NEAR = 0.25
"""Loads whose seconds per copy differ by no more than this share are about the same."""
FOLLOW = 0.2
"""How much of a call's surprise the machine is given the blame for."""
SAME = 0.05
"""Loads that differ by no more than this share are not told apart at all."""
LEAP = 0.2
"""Largest surprise, as a logarithm, that the machine is given any blame for."""
OUTLIER = 0.4
"""Largest bad surprise, as a logarithm, that is believed of one call; nothing makes a call faster than it can be."""
TRUST = 1.0
"""Measured calls of an option that weigh as much as what options like it were off by."""
SPREAD = 1.4
"""Over the margin: what one call is taken to deviate by, as a share, while that is not known."""
ENOUGH = 4
"""Measured calls of an option from which on their deviations say how noisy calls are."""
DEVIATION = 1.4826
"""Standard deviation over median absolute deviation, of normal noise."""
DOUBT = 2.0
"""Standard errors by which a measured option may be faster than it is thought to be."""
LEAST = 0.5
"""Share of the margin that is left between options that were measured often."""
MOST_TRIALS = 8
"""Calls of an option under a load after which trying tells no more."""


@dataclass
class _Known:
    program: int
    measured: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Load, and logarithm of the ratio to the model, less that of the machine."""
    tried: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Loads under which it was tried, whether or not anything was measured."""
    summed: tuple[float, int, float] | None = None
    """A load, how often it ran or was tried under about that, and the median of the logarithms; None after a change."""
    off: list[float] | None = None
    """What each measured call deviates by from the median of those under about its load; None after a change."""

    def deviations(self) -> list[float]:
        """Return what each measured call deviates by, as a logarithm, from the median of those under about its load."""
        if self.off is None:
            by_load = sorted(self.measured)
            loads, ratios = [load for load, _ in by_load], [ratio for _, ratio in by_load]
            off, ends = [], (0, 0, 0.0)
            for load, ratio in by_load:
                first, last = bisect_left(loads, load * (1 - NEAR)), bisect_right(loads, load / (1 - NEAR))
                if (first, last) != ends[:2]:
                    ends = first, last, median(ratios[first:last])
                off.append(abs(ratio - ends[2]))
            self.off = off
        return self.off

    def change(self) -> None:
        """Forget what followed from the calls so far."""
        self.summed = self.off = None

    def at(self, load: float) -> tuple[int, float]:
        """Return how often it ran or was tried under about a load, and the median of its logarithms."""
        if self.summed is None or abs(self.summed[0] - load) > SAME * load:
            near = [ratio for at, ratio in self.measured if _is_near(at, load)]
            ratios = near or [ratio for _, ratio in self.measured] or [0.0]
            count = max(len(near), sum(_is_near(at, load) for at in self.tried))
            self.summed = (load, count, median(ratios))
        return self.summed[1:]


class Times:
    """Of one layer.

    Args:
        optimism: by how much an option that never ran may be faster than it is thought to be, as a share.
    """

    def __init__(self, optimism: float) -> None:
        self._optimism, self._machine = optimism, 0.0
        self._known: dict[str, _Known] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not any(each.measured for each in self._known.values())

    def note(self, name: str, program: int, load: float, modelled: float, measured: float) -> None:
        """Take down how long a call took.

        Args:
            name: of its option.
            program: that ran.
            load: of the call: modelled seconds per copy if it had been left alone.
            modelled: seconds.
            measured: seconds, of the slowest rank.
        """
        if modelled <= 0 or measured <= 0:
            return
        ratio = math.log(measured / modelled)
        if self.is_empty:
            self._machine = ratio
        surprise = ratio - self._machine - self._log_factor(name, program, load)
        known = self._known.setdefault(name, _Known(program))
        if len(known.measured) >= SETTLED:  # before that the surprise is the option's own
            self._machine += FOLLOW * min(max(surprise, -LEAP), LEAP)
        known.measured.append((load, ratio - self._machine - surprise + min(surprise, OUTLIER)))
        known.change()

    def try_out(self, name: str, program: int, load: float) -> None:
        """Take down that an option is being tried, so that one whose calls are never measured is not tried for ever."""
        known = self._known.setdefault(name, _Known(program))
        known.tried.append(load)
        known.summed = None

    def count(self, name: str, load: float) -> int:
        """Return how often an option ran, or was tried, under about a load."""
        known = self._known.get(name)
        return 0 if known is None else known.at(load)[0]

    def ran(self, name: str) -> bool:
        """Return whether an option ever ran, or was tried."""
        return name in self._known

    def factor(self, name: str, program: int, load: float) -> float:
        """Return what an option's modelled seconds are to be multiplied by, to compare it with others.

        Of an option that never ran it is what others of its program were off by, the less the fewer they are, or else all
        others; one that ran a few times only is not quite believed.
        """
        return math.exp(self._log_factor(name, program, load))

    def _believed(self, name: str, load: float) -> float:
        """Return how much faster an option would be if the few calls that were measured of it were quite believed."""
        known = self._known.get(name)
        if known is None or not known.measured:
            return 1.0
        return math.exp(min(known.at(load)[1] - self._log_factor(name, known.program, load), 0.0))

    def _log_factor(self, name: str, program: int, load: float) -> float:
        known = self._known.get(name)
        count = 0 if known is None else len(known.measured)
        if known is not None and count >= SETTLED:
            return known.at(load)[1]
        others = [each for other, each in self._known.items() if each.measured and other != name]
        alike = [each.at(load)[1] for each in others if each.program == program]
        rest = [each.at(load)[1] for each in others if each.program != program]
        prior = median(alike or rest) if others else None
        if alike and rest:  # where one option is off, its program need not be
            prior = (len(alike) * median(alike) + TRUST * median(rest)) / (len(alike) + TRUST)
        if known is None or not count:
            return prior or 0.0
        own = known.at(load)[1]
        return own if prior is None else (count * own + TRUST * prior) / (count + TRUST)

    def machine(self) -> float:
        """Return measured over modelled seconds that all options have in common of late."""
        return math.exp(self._machine)

    def noise(self) -> float | None:
        """Return by which share one call deviates from the median of its option; None while no option was measured enough."""
        enough = (known for known in self._known.values() if len(known.measured) >= ENOUGH)
        found = [each for known in enough for each in known.deviations()]
        return DEVIATION * median(found) if found else None

    def margin(self, margin: float, name: str, other: str, load: float) -> float:
        """Return by how much one option must be faster than another to replace it: the standard error of their difference.

        Before anything was measured it is the margin itself, and it is never below `LEAST` of it.
        """
        if self.is_empty:
            return margin
        noise = self.noise()
        spread = SPREAD * margin if noise is None else noise
        return max(spread * self._error(name, other, load), LEAST * margin)

    def _error(self, name: str, other: str, load: float) -> float:
        """Return the standard error of the difference of two options, over the deviation of one call."""
        return math.sqrt(sum(1 / max(self.count(each, load), 0.5) for each in (name, other)))

    def worth_trying(self, seconds: Mapping[str, float], best: str, load: float) -> str | None:
        """Return the option that may well be faster than the one that seems best; None if there is none.

        One that never ran may be faster by the optimism; one that was measured by two standard errors of what calls deviate by,
        so that quiet machines are done with trials early, and noisy ones do not take a lucky call for an answer.

        Args:
            seconds: that options are thought to take.
            best: of them.
            load: of the call.
        """
        hopes, noise = {}, self.noise()
        for name, each in seconds.items():
            count = self.count(name, load)
            doubt = self._optimism / (1 + count)
            if count and noise is not None:
                doubt = min(DOUBT * noise * self._error(name, best, load), self._optimism)
            hope = each * self._believed(name, load) * (1 - doubt)
            if name != best and count < MOST_TRIALS and hope < seconds[best]:
                hopes[name] = hope
        return min(hopes, key=lambda name: (hopes[name], name), default=None)


def _is_near(load: float, other: float) -> bool:
    return abs(load - other) <= NEAR * max(load, other)
