"""Fit those numbers of presets that rest on measurements, from the ledger entries that are marked
as fitted.

A link has a rate, a start-up and a share of the rate by the bytes of a movement; a shared medium
has a share by its users. A device has a rate of matrix products, a share of that rate by the rows
of an expert, and the part of the activations' memory traffic that takes time. Nothing else is
fitted, and nothing to a single figure. All fitted entries of a machine have the same weight; the
residual is the logarithm of predicted over measured.

    python -m moesaic_lab.ledger.fitting
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from moesaic.planner.cluster import ClusterSpec
from moesaic_lab.ledger.parts import cluster_of, expert_stages, grouped_products, nccl, own_products
from moesaic_lab.ledger.records import Entry

SIZES = (1e6, 16e6, 64e6, 256e6)
"""Bytes at which a link's share of its rate is fitted. The share is 1 at the last size."""
ROWS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
"""Rows of an expert at which a device's share of its rate is set. It is fitted from 64 rows on, and
1 at the last. Fewer rows than a tile of 64 take as long as the whole tile."""
Make = Callable[[ClusterSpec, np.ndarray], ClusterSpec]
"""Called with (cluster, numbers); returns the cluster with these numbers in place."""


def switched_links(cluster: ClusterSpec, numbers: np.ndarray) -> ClusterSpec:
    """Return the cluster with another first link: `numbers` holds a rate (Gb/s), a latency (us) and
    shares of the rate by size."""
    link = replace(
        cluster.links[0],
        gbps=(numbers[0],),
        latency_us=numbers[1],
        sizes=SIZES,
        size_share=(*numbers[2:], 1.0),
    )
    return replace(cluster, links=(link, *cluster.links[1:]))


def shared_bus(cluster: ClusterSpec, numbers: np.ndarray) -> ClusterSpec:
    """Return the cluster with another bus as second link: `numbers` holds a rate (Gb/s) and its
    shares for four and eight users."""
    link = replace(
        cluster.links[1], gbps=(numbers[0],), users=(2.0, 4.0, 8.0), users_share=(1.0, *numbers[1:])
    )
    return replace(cluster, links=(cluster.links[0], link, *cluster.links[2:]))


def experts(cluster: ClusterSpec, numbers: np.ndarray) -> ClusterSpec:
    """Return the cluster with other devices: `numbers` holds the rate of grouped bfloat16 products
    (TFLOP/s), and the part of the activation traffic that takes time."""
    rates = replace(cluster.device.grouped_tflops or cluster.device.tflops, bf16=float(numbers[0]))
    return replace(
        cluster, device=replace(cluster.device, grouped_tflops=rates, activation_traffic=numbers[1])
    )


def few_rows(cluster: ClusterSpec, numbers: np.ndarray) -> ClusterSpec:
    """Return the cluster with the shares `numbers` of its devices' rate by `ROWS` from 64 rows on,
    except for the last."""
    # 1 and 16 rows take as long as a tile of 64
    shares = (numbers[0] / 64, numbers[0] / 4, *numbers, 1.0)
    return replace(cluster, device=replace(cluster.device, gemm_rows=ROWS, gemm_share=shares))


GROUPED_ROWS = (128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
"""Like `ROWS`, for grouped products. Fewer rows than the first take as long as the first."""


def grouped(cluster: ClusterSpec, numbers: np.ndarray) -> ClusterSpec:
    """Return the cluster with the shares `numbers` of its devices' rate at `GROUPED_ROWS`, except
    for the last, whose share is 1."""
    return replace(
        cluster, device=replace(cluster.device, gemm_rows=GROUPED_ROWS, gemm_share=(*numbers, 1.0))
    )


def fit(
    make: Make,
    cluster: ClusterSpec,
    entries: Callable[[ClusterSpec], Iterable[Entry]],
    start: Sequence[float],
) -> np.ndarray:
    """Return the numbers that minimize the squared log ratios of predicted over measured, under a
    soft L1 loss.

    Args:
        make: puts numbers into a cluster.
        cluster: the cluster, which gives everything that is not fitted.
        entries: returns the ledger entries as predicted with a cluster. Entries of other machines
            and entries that are not marked as fitted are skipped.
        start: initial values, one per number. A number with an initial value of at most 1 is a
            share and stays at most 1.
    """

    def residuals(logs: np.ndarray) -> np.ndarray:
        tried = make(cluster, np.exp(logs))
        counted = [each for each in entries(tried) if each.machine == cluster.name and each.fitted]
        return np.array([np.log(each.ratio) for each in counted])

    # the solver varies logarithms, so a share of at most 1 is at most 0
    upper = [0.0 if each <= 1 else np.inf for each in start]
    solution = least_squares(
        residuals,
        np.log(start),
        bounds=(-np.inf, upper),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
    )
    return np.exp(solution.x)


FITS: dict[
    str, tuple[tuple[Make, Callable[[ClusterSpec], Iterable[Entry]], tuple[float, ...]], ...]
] = {
    "dgx-h200": (
        (
            switched_links,
            lambda cluster: nccl(lambda _: cluster, cluster.name),
            (2500, 5, 0.6, 0.75, 0.9),
        ),
        (experts, lambda cluster: own_products(lambda _: cluster), (650, 0.7)),
        (few_rows, lambda cluster: expert_stages(lambda _: cluster), (0.35, 0.7, 0.9)),
    ),
    "dgx-b200": (
        (grouped, lambda cluster: grouped_products(lambda _: cluster), (0.3, 0.4, 0.6, 0.75, 0.9)),
    ),
    "8xl40s-pcie": (
        (shared_bus, lambda cluster: nccl(lambda _: cluster, cluster.name), (360, 0.4, 0.3)),
    ),
}
"""By preset, the fits in their order: (function that sets the numbers, entries, initial values)."""


def fitted(name: str) -> ClusterSpec:
    """Return a preset with all its fitted numbers fitted again."""
    cluster = cluster_of(name)
    for make, entries, start in FITS[name]:
        cluster = make(cluster, fit(make, cluster, entries, start))
    return cluster


def main() -> None:
    """Print the fitted numbers of all presets in `FITS`."""
    for name in FITS:
        cluster = fitted(name)
        print(name, *cluster.links[:2], cluster.device, sep="\n  ")


if __name__ == "__main__":
    main()
