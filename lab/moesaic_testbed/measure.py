"""Measures how exact emulated links are on this machine: the rates that they reach, compared with the configured ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Cluster

REPEATS = 8
MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Measured times of one exchange, with the least time that its links allow."""

    name: str
    limit_seconds: float | None
    """Bytes over the rate of the busiest link, without headers; None if no link is limited."""
    seconds: tuple[float, ...]
    """Seconds of each repeat, from the first rank's start to the last rank's end."""
    bytes: int
    """Bytes that cross the busiest link in one direction; inside a node, in both."""

    @property
    def median_seconds(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.seconds)

    @property
    def of_limit(self) -> float | None:
        """Share of the links' rate that the median reaches; headers alone cost about 0.01. None if no link is limited."""
        return None if self.limit_seconds is None else self.limit_seconds / self.median_seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second over the busiest link, by the median."""
        return self.bytes / self.median_seconds


def measure_stream(cluster: Cluster, megabytes: int = 4, repeats: int = REPEATS) -> Transferred:
    """Send from the first rank of node 0 to the first of node 1.

    Args:
        cluster: a cluster of at least two nodes.
        megabytes: MiB to send.
        repeats: number of timed exchanges, after one to warm up.
    """
    size = megabytes * MEBIBYTE
    limit = size / min(cluster.bed.inter_bytes_per_second(node) for node in (0, 1))
    spans = cluster.run(_timed, _stream_parts, (size, cluster.bed.ranks_per_node), repeats)
    return Transferred(name=f"stream {megabytes} MiB", limit_seconds=limit, seconds=_durations(spans), bytes=size)


def measure_inside(cluster: Cluster, megabytes: int = 4, repeats: int = REPEATS) -> Transferred:
    """Exchange data between the first two ranks of each node: each sends `megabytes` MiB; both directions share the rate."""
    size, rate = megabytes * MEBIBYTE, cluster.bed.intra_bytes_per_second
    spans = cluster.run(_timed, _inside_parts, (size, cluster.bed.ranks_per_node), repeats)
    limit = None if rate is None else 2 * size / rate
    return Transferred(
        name=f"inside a node {megabytes} MiB", limit_seconds=limit, seconds=_durations(spans), bytes=2 * size
    )


def measure_all_to_all(cluster: Cluster, megabytes: int = 4, repeats: int = REPEATS) -> Transferred:
    """Run an all-to-all in which every rank splits `megabytes` MiB over all ranks. Receives are posted first."""
    bed = cluster.bed
    part = megabytes * MEBIBYTE // bed.world
    spans = cluster.run(_timed, _all_to_all_parts, (part,), repeats)
    name = f"all-to-all {bed.nodes}x{bed.ranks_per_node} {megabytes} MiB"
    crossing = part * bed.ranks_per_node * (bed.world - bed.ranks_per_node)
    return Transferred(name=name, limit_seconds=_limit(bed, part), seconds=_durations(spans), bytes=crossing)


def _limit(bed: Bed, part: int) -> float:
    """Return the least seconds of an all-to-all with `part` bytes for each pair of ranks."""
    per_node = bed.ranks_per_node
    slowest = min(bed.inter_bytes_per_second(node) for node in range(bed.nodes))
    limits = [part * per_node * (bed.world - per_node) / slowest]
    if bed.intra_bytes_per_second is not None:
        limits.append(part * per_node * (per_node - 1) / bed.intra_bytes_per_second)
    return max(limits)


def _timed(
    parts: Callable[..., dict[int, tuple[int, int]]], arguments: tuple[int, ...], repeats: int
) -> list[tuple[float, float]]:
    """Exchange once to warm up and then `repeats` times; called on every rank.

    Args:
        parts: returns by peer how many bytes this rank sends to it and receives from it.
        arguments: the arguments of `parts`.
        repeats: number of timed exchanges.

    Returns:
        start and end of each repeat, on the clock that all ranks share.
    """
    peers = parts(*arguments)
    sends = {peer: torch.ones(out, dtype=torch.uint8) for peer, (out, _) in peers.items() if out}
    receives = {peer: torch.empty(into, dtype=torch.uint8) for peer, (_, into) in peers.items() if into}
    spans = []
    for repeat in range(repeats + 1):
        dist.barrier()
        start = time.monotonic()
        works = [dist.irecv(into, peer, tag=repeat) for peer, into in receives.items()]
        works += [dist.isend(out, peer, tag=repeat) for peer, out in sends.items()]
        for work in works:
            assert work is not None
            work.wait()
        spans.append((start, time.monotonic()))
    return spans[1:]


def _stream_parts(size: int, ranks_per_node: int) -> dict[int, tuple[int, int]]:
    rank = dist.get_rank()
    if rank == 0:
        return {ranks_per_node: (size, 0)}
    return {0: (0, size)} if rank == ranks_per_node else {}


def _inside_parts(size: int, ranks_per_node: int) -> dict[int, tuple[int, int]]:
    node, local = divmod(dist.get_rank(), ranks_per_node)
    return {node * ranks_per_node + 1 - local: (size, size)} if local < 2 and ranks_per_node > 1 else {}


def _all_to_all_parts(part: int) -> dict[int, tuple[int, int]]:
    return {peer: (part, part) for peer in range(dist.get_world_size()) if peer != dist.get_rank()}


def _durations(spans: list[list[tuple[float, float]]]) -> tuple[float, ...]:
    """Return how long each repeat took, over all ranks."""
    return tuple(max(end for _, end in repeat) - min(start for start, _ in repeat) for repeat in zip(*spans))
