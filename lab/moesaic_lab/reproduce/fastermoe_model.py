"""FasterMoE's equations 1 to 10, as printed and with their errors corrected, and its choice of
shadows by equation 8.

He et al. (PPoPP 2022), sections 3 and 4. As printed, equations 2, 7 and 8 divide elements by bytes
per second. Equation 7 counts tokens as sent that stay at home, and 8 omits the tokens that are
still sent. Equation 6 counts passes differently from equation 4. These are errata F1 to F4.

A worker is a GPU, the home of one expert. The copies of a token go to its top-k experts. A shadow
is a copy of an expert on every worker, which then computes its own tokens' copies for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.balance.replication.published import ShadowRates, shadows_of

Rule = Literal["printed", "corrected"]


@dataclass(frozen=True, kw_only=True)
class FasterMoEMachine:
    """Parameters of a layer on a cluster in the equations, which have one expert per worker."""

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
        """Rates for equations 7 and 8: three passes of products, four all-to-alls, weights out and
        gradients back."""
        return ShadowRates(
            copy=3 * self.compute_seconds(1),
            trip=4 * self.move_seconds(1),
            weights=2 * self.weight_seconds(),
        )

    def compute_seconds(self, rows: float) -> float:
        """Return the seconds of one pass of the busiest worker's experts (eq. 1): two products of 2
        B D alpha D operations."""
        return 4 * rows * self.alpha * self.dim**2 / self.flops

    def move_seconds(self, rows: float) -> float:
        """Return the seconds of one all-to-all (eq. 2, corrected to bytes) from the rows on its
        busiest link."""
        return rows * self.dim * self.element_bytes / self.bandwidth

    def weight_seconds(self) -> float:
        """Return the seconds that one expert's weights take over the network."""
        return 2 * self.alpha * self.dim**2 * self.element_bytes / self.bandwidth


def ratio(compute: float, move: float) -> float:
    """Return R_CC, the ratio of computation to communication (eq. 3): three passes of products over
    four all-to-alls."""
    return 3 * compute / (4 * move)


def throughput(
    machine: FasterMoEMachine, rows: float, workers: int, compute: float, move: float
) -> float:
    """Return the operations per second of a worker without overlap (eq. 4).

    Args:
        machine: the parameters of the layer and cluster.
        rows: rows that all workers compute together.
        workers: number of workers, N.
        compute: seconds of one pass of products (eq. 1).
        move: seconds of one all-to-all (eq. 2).
    """
    operations = 12 * machine.alpha * machine.dim**2 * rows
    return operations / (workers * (3 * compute + 4 * move))


def ideal(peak: float, r: float) -> float:
    """Return the throughput if computation and communication overlap fully (eq. 5); `r` is their
    ratio."""
    return peak * min(1.0, r)


def semi_ideal(peak: float, r: float, rule: Rule = "corrected") -> float:
    """Return the throughput without overlap (eq. 6).

    As printed, `r` is the ratio of one pass to one all-to-all (errata F4); corrected, it is that of
    eq. 3.
    """
    communication = 4 / 3 if rule == "printed" else 1.0  # in units in which computation is r
    return peak * r / (r + communication)


def unshadowed_seconds(machine: FasterMoEMachine, counts: np.ndarray, rule: Rule) -> float:
    """Return the time of a layer without shadows (eq. 7).

    Args:
        machine: the parameters of the layer and cluster.
        counts: (workers, workers) copies from a worker to an expert.
        rule: "printed" also counts tokens that stay at home as sent, "corrected" only those that
            leave a worker.
    """
    received = counts.sum(0)
    if rule == "printed":
        return machine.rates.unshadowed(received)
    computing = 3 * machine.compute_seconds(float(received.max()))
    return computing + 4 * machine.move_seconds(_remote(counts))


def shadowed_seconds(
    machine: FasterMoEMachine, counts: np.ndarray, experts: list[int], rule: Rule
) -> float:
    """Return the time of a layer with shadows (eq. 8), which moves their weights twice.

    Corrected, it also includes the all-to-alls of the tokens that are still sent.
    """
    remaining = stay_home(counts, experts)
    seconds = machine.rates.shadowed(remaining.sum(0), len(experts))
    if rule == "printed":
        return seconds
    return seconds + 4 * machine.move_seconds(_remote(remaining))


def stay_home(counts: np.ndarray, experts: list[int]) -> np.ndarray:
    """Return the counts after shadowing, when copies for shadowed experts are computed on the
    workers that they come from.

    Args:
        counts: (workers, workers) copies from a worker to an expert; the home of expert i is worker
            i.
    """
    remaining = counts.copy()
    workers = np.arange(len(counts))
    for expert in experts:
        copies = remaining[:, expert].copy()
        remaining[:, expert] = 0
        remaining[workers, workers] += copies  # the diagonal: copies that stay at home
    return remaining


def shadows(machine: FasterMoEMachine, counts: np.ndarray, rule: Rule) -> list[int]:
    """Return the experts to shadow, hottest first.

    "printed" is Algorithm 1: shadows are added while equation 8 falls, and used only if it ends
    below equation 7. "corrected" takes the best number of hottest experts by the corrected
    equations, zero included.
    """
    if rule == "printed":
        home = np.arange(len(counts))  # expert i is at home on worker i
        return shadows_of(counts, home, machine.rates)
    order = np.argsort(-counts.sum(0), kind="stable").tolist()
    best = unshadowed_seconds(machine, counts, rule)
    chosen = []
    for number in range(1, len(order) + 1):
        seconds = shadowed_seconds(machine, counts, order[:number], rule)
        if seconds < best:
            best = seconds
            chosen = order[:number]
    return chosen


def _remote(counts: np.ndarray) -> float:
    """Return the most copies that a GPU sends to others or receives from them."""
    away = counts * (1 - np.eye(len(counts), dtype=counts.dtype))
    return float(max(away.sum(0).max(), away.sum(1).max()))
