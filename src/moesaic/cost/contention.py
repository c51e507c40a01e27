"""How fast movements run that share links: max-min fair among their messages, and no link idles which somebody could use.

A movement is one fluid: all its messages advance in proportion, and alone it runs at speed 1, its slowest link full. Where a
link is wanted by several, each message on it gets an equal part, as the connections of one TCP link do, unless its movement
wants less (progressive filling: Bertsekas and Gallager, Data Networks, section 6.5.2). Counting messages, not movements, makes
the shares independent of which messages are taken together as one movement.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

FULL = 1.0 + 1e-9
"""A link is overbooked above this demand; sums in another order differ by less."""


class Use(NamedTuple):
    """What a movement wants of a link."""

    part: float
    """Of the link at speed 1."""
    messages: float
    """That share it."""


def speeds(uses: Sequence[Mapping[int, Use]]) -> list[float]:
    """Return the speed of each of several movements, 0 to 1.

    Args:
        uses: of each: by link; the part of its slowest link is 1.
    """
    users: dict[int, list[int]] = {}
    demand: dict[int, float] = {}
    for number, use in enumerate(uses):
        for link, each in use.items():
            users.setdefault(link, []).append(number)
            demand[link] = demand.get(link, 0.0) + each.part
    links = {
        link: _Contested({number: uses[number][link] for number in who})
        for link, who in users.items()
        if demand[link] > FULL
    }
    of = [[link for link in use if link in links] for use in uses]
    found = [1.0] * len(uses)
    coming = [(links[link].speed(number), link, number, 0) for number, on in enumerate(of) for link in on]
    heapq.heapify(coming)
    fixed: set[int] = set()
    while coming:
        speed, link, number, version = heapq.heappop(coming)
        if speed >= 1.0:
            break
        if number in fixed:
            continue
        contested = links[link]
        if version != contested.version:
            heapq.heappush(coming, (contested.speed(number), link, number, contested.version))
            continue
        found[number] = speed
        fixed.add(number)
        for other in of[number]:
            links[other].take(number, speed)
    return _fill_up(uses, of, found)


class _Contested:
    """A link that is wanted by too many, while speeds are settled one after the other, the slowest first.

    Args:
        wants: what each movement wants of it.
    """

    def __init__(self, wants: dict[int, Use]) -> None:
        self._wants = wants
        self._spare = 1.0
        self._level: float | None = None
        self.version = 0
        """Grows when a movement's speed is settled, after which the others may go faster here."""

    def speed(self, number: int) -> float:
        """Return the speed that a movement may have by this link, as far as is settled."""
        if self._level is None:
            self._level = _level(list(self._wants.values()), self._spare)
        want = self._wants[number]
        return min(1.0, self._level * want.messages / want.part)

    def take(self, number: int, speed: float) -> None:
        """Settle a movement's speed."""
        self._spare -= speed * self._wants.pop(number).part
        self._level = None
        self.version += 1


def _level(wants: list[Use], spare: float) -> float:
    """Return the part of a link that no message gets more of, if each movement is to get what it wants up to that."""
    left, messages = max(spare, 0.0), sum(use.messages for use in wants)
    for use in sorted(wants, key=lambda use: use.part / use.messages):
        equal = left / messages
        if use.part > equal * use.messages:
            return equal
        left -= use.part
        messages -= use.messages
    return float("inf")


def _fill_up(uses: Sequence[Mapping[int, Use]], of: list[list[int]], found: list[float]) -> list[float]:
    """Give what is left on every contested link to those that can still use it, the slowest first."""
    spare: dict[int, float] = {}
    for number, on in enumerate(of):
        for link in on:
            spare[link] = spare.get(link, 1.0) - found[number] * uses[number][link].part
    for number in sorted(range(len(uses)), key=lambda number: (found[number], number)):
        room = min((spare[link] / uses[number][link].part for link in of[number]), default=1.0)
        more = min(1.0 - found[number], room)
        if more > 0:
            found[number] += more
            for link in of[number]:
                spare[link] -= more * uses[number][link].part
    return found
