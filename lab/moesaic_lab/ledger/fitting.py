"""The numbers of presets that rest on others' measurements, found again from the entries that are marked as fitted.

A link has a rate, a start-up and a share of the rate by the bytes of a movement (by users, of a shared medium); a device has a
rate of products, a share of it by the rows of an expert, and how much of the activations' traffic takes time. Nothing else is
fitted, and never to a single figure: all fitted entries of a machine weigh the same, by the logarithm of the ratio.

    python -m moesaic_lab.ledger.fitting
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from moesaic.cost.cluster import ClusterSpec
from moesaic_lab.ledger.parts import cluster_of, expert_stages, grouped_products, nccl
from moesaic_lab.ledger.records import Entry

SIZES = (1e6, 16e6, 64e6, 256e6)
"""Bytes at which a link's share is fitted; it is 1 at the last."""
ROWS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
"""Rows of an expert at which a device's share is known: fitted from 64, 1 at the last. Fewer rows than a tile of 64 take as
long as the tile."""
Make = Callable[[ClusterSpec, np.ndarray], ClusterSpec]


def switched_links(cluster: ClusterSpec, at: np.ndarray) -> ClusterSpec:
    """Return a cluster whose first link has a rate (Gb/s), a latency (us) and shares by size."""
    link = replace(cluster.links[0], gbps=(at[0],), latency_us=at[1], sizes=SIZES, size_share=(*at[2:], 1.0))
    return replace(cluster, links=(link, *cluster.links[1:]))


def shared_bus(cluster: ClusterSpec, at: np.ndarray) -> ClusterSpec:
    """Return a cluster whose second link is a bus of a rate (Gb/s) that four and eight users get less of."""
    link = replace(cluster.links[1], gbps=(at[0],), users=(2.0, 4.0, 8.0), users_share=(1.0, *at[1:]))
    return replace(cluster, links=(cluster.links[0], link, *cluster.links[2:]))


def device(cluster: ClusterSpec, at: np.ndarray) -> ClusterSpec:
    """Return a cluster whose devices have a rate of bfloat16 products (TFLOP/s), a part of traffic, and shares by rows."""
    rates = replace(cluster.device.tflops, bf16=float(at[0]))
    shares = (at[2] / 64, at[2] / 4, *at[2:], 1.0)
    each = replace(cluster.device, tflops=rates, activation_traffic=at[1], gemm_rows=ROWS, gemm_share=shares)
    return replace(cluster, device=each)


GROUPED_ROWS = (128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
"""As `ROWS`, of grouped products; fewer rows than the first take as long."""


def grouped(cluster: ClusterSpec, at: np.ndarray) -> ClusterSpec:
    """Return a cluster whose devices have shares by rows."""
    return replace(cluster, device=replace(cluster.device, gemm_rows=GROUPED_ROWS, gemm_share=(*at, 1.0)))


def fit(
    make: Make, cluster: ClusterSpec, entries: Callable[[ClusterSpec], Iterable[Entry]], start: Sequence[float]
) -> np.ndarray:
    """Return the numbers with the least squares of the fitted entries' logarithms.

    Args:
        make: a cluster of numbers.
        cluster: that has all others.
        entries: of a cluster; those of other machines and those that are not marked are passed over.
        start: where to begin; also which numbers there are. What begins at 1 or below is a share and stays there.
    """

    def off(logs: np.ndarray) -> np.ndarray:
        tried = make(cluster, np.exp(logs))
        return np.array([np.log(each.ratio) for each in entries(tried) if each.machine == cluster.name and each.fitted])

    most = [0.0 if each <= 1 else np.inf for each in start]
    found = least_squares(off, np.log(start), bounds=(-np.inf, most), loss="soft_l1", f_scale=0.1, diff_step=1e-3)
    return np.exp(found.x)


FITS: dict[str, tuple[tuple[Make, Callable[[ClusterSpec], Iterable[Entry]], tuple[float, ...]], ...]] = {
    "dgx-h200": (
        (switched_links, lambda cluster: nccl(lambda _: cluster), (2500, 5, 0.6, 0.75, 0.9)),
        (device, lambda cluster: expert_stages(lambda _: cluster), (800, 0.5, 0.35, 0.7, 0.9)),
    ),
    "dgx-b200": ((grouped, lambda cluster: grouped_products(lambda _: cluster), (0.3, 0.4, 0.6, 0.75, 0.9)),),
    "8xl40s-pcie": ((shared_bus, lambda cluster: nccl(lambda _: cluster), (360, 0.4, 0.3)),),
}
"""By preset: what is fitted to which entries, and from where the search begins."""


def fitted(name: str) -> ClusterSpec:
    """Return a preset with all its fitted numbers found anew."""
    cluster = cluster_of(name)
    for make, entries, start in FITS[name]:
        cluster = make(cluster, fit(make, cluster, entries, start))
    return cluster


def main() -> None:
    """Print the numbers as found from the entries."""
    for name in FITS:
        found = fitted(name)
        print(name, *found.links[:2], found.device, sep="\n  ")


if __name__ == "__main__":
    main()
