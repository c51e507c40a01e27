"""FasterMoE's equations 1 to 10: as printed, and with their errors corrected. And its choice of shadows by equation 8.

He et al. (PPoPP 2022), sections 3 and 4. Printed, equations 2, 7 and 8 divide elements by bytes per second, 7 sends tokens that
stay at home, 8 forgets the tokens that still travel, and 6 counts passes otherwise than 4 (errata F1 to F4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.balance.replication.published import ShadowRates, shadows_of

Rule = Literal["printed", "corrected"]


@dataclass(frozen=True, kw_only=True)
class FasterMoEMachine:
    """What the equations know of a layer on a cluster: one expert per worker."""

    flops: float
    """P: operations per second of a worker."""
    bandwidth: float
    """Wn: bytes per second of a worker's network."""
    dim: int
    """H in the paper."""
    alpha: float = 2.0
    """F / D."""
    element_bytes: int = 4

    @property
    def rates(self) -> ShadowRates:
        """Of equations 7 and 8: three passes of products, four all-to-alls, weights there and gradients back."""
        return ShadowRates(
            copy=3 * self.compute_seconds(1), trip=4 * self.move_seconds(1), weights=2 * self.weight_seconds()
        )

    def compute_seconds(self, rows: float) -> float:
        """Eq. 1: one pass of the busiest worker's experts, two products of 2 B D alpha D operations."""
        return 4 * rows * self.alpha * self.dim**2 / self.flops

    def move_seconds(self, rows: float) -> float:
        """Eq. 2: one all-to-all by the rows on its busiest link, in bytes."""
        return rows * self.dim * self.element_bytes / self.bandwidth

    def weight_seconds(self) -> float:
        """One expert's weights over the network."""
        return 2 * self.alpha * self.dim**2 * self.element_bytes / self.bandwidth


def ratio(compute: float, move: float) -> float:
    """Return R_CC of totals (eq. 3): three passes of products over four all-to-alls."""
    return 3 * compute / (4 * move)


def throughput(machine: FasterMoEMachine, rows: float, workers: int, compute: float, move: float) -> float:
    """Return operations per second of a worker without overlap (eq. 4).

    Args:
        machine: rates.
        rows: that all workers compute together.
        workers: N.
        compute: seconds of eq. 1.
        move: seconds of eq. 2.
    """
    operations = 12 * machine.alpha * machine.dim**2 * rows
    return operations / (workers * (3 * compute + 4 * move))


def ideal(peak: float, r: float) -> float:
    """Return the throughput if everything that can be hidden is (eq. 5)."""
    return peak * min(1.0, r)


def semi_ideal(peak: float, r: float, rule: Rule = "corrected") -> float:
    """Return the throughput if nothing is hidden (eq. 6); printed, of the ratio of one pass to one all-to-all (errata F4)."""
    return peak * r / (r + (4 / 3 if rule == "printed" else 1.0))


def unshadowed_seconds(machine: FasterMoEMachine, counts: np.ndarray, rule: Rule) -> float:
    """Return the time of a layer without shadows (eq. 7).

    Args:
        machine: rates.
        counts: (workers, workers) copies from a worker to an expert.
        rule: printed counts tokens that stay at home, corrected only those that leave a worker.
    """
    received = counts.sum(0)
    if rule == "printed":
        return machine.rates.unshadowed(received)
    return 3 * machine.compute_seconds(float(received.max())) + 4 * machine.move_seconds(_remote(counts))


def shadowed_seconds(machine: FasterMoEMachine, counts: np.ndarray, experts: list[int], rule: Rule) -> float:
    """Return the time of a layer with shadows (eq. 8): twice their weights; corrected, and the tokens that still travel."""
    kept = stay_home(counts, experts)
    seconds = machine.rates.shadowed(kept.sum(0), len(experts))
    return seconds + (4 * machine.move_seconds(_remote(kept)) if rule == "corrected" else 0.0)


def worth_by_size(machine: FasterMoEMachine, most: float, shadows: int) -> bool:
    """Eq. 9: the weights of the shadows are less than the copies of the busiest expert."""
    return most > shadows * machine.alpha * machine.dim


def worth_by_time(machine: FasterMoEMachine, most: float, most_after: float, shadows: int) -> bool:
    """Eq. 10, in printed units: what shadows save of computing outweighs what their weights cost beyond the tokens."""
    extra = shadows * machine.alpha * machine.dim - most
    if extra <= 0:
        return True
    per_byte = machine.bandwidth / machine.element_bytes
    return 3 * (most - most_after) * machine.alpha * machine.dim / extra > machine.flops / per_byte


def stay_home(counts: np.ndarray, experts: list[int]) -> np.ndarray:
    """Return counts in which the copies for some experts are computed where they come from.

    Args:
        counts: (workers, workers) copies from a worker to an expert; expert i lives on worker i.
        experts: that are shadowed.
    """
    kept = counts.copy()
    for expert in experts:
        here = kept[:, expert].copy()
        kept[:, expert] -= here
        kept[np.arange(len(kept)), np.arange(len(kept))] += here
    return kept


def shadows(machine: FasterMoEMachine, counts: np.ndarray, rule: Rule) -> list[int]:
    """Return the experts to shadow, hottest first.

    Printed: Algorithm 1 with equation 8, while it falls, and only if it ends below equation 7. Corrected: the best of all
    prefixes by the corrected equations, none among them.
    """
    if rule == "printed":
        return shadows_of(counts, np.arange(len(counts)), machine.rates)
    order = np.argsort(-counts.sum(0), kind="stable").tolist()
    best, found = unshadowed_seconds(machine, counts, rule), []
    for number in range(1, len(order) + 1):
        seconds = shadowed_seconds(machine, counts, order[:number], rule)
        if seconds < best:
            best, found = seconds, order[:number]
    return found


def _remote(counts: np.ndarray) -> float:
    away = counts * (1 - np.eye(len(counts), dtype=counts.dtype))
    return float(max(away.sum(0).max(), away.sum(1).max()))
