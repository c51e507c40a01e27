"""What a message costs over sockets and over Gloo: all-to-alls on an emulated cluster, both transports in turn.

Every rank sends every other rank messages of one size, several exchanges one after the other. Time is from the first rank's
start to the last rank's end, processor time is of all threads of a rank, the mean over ranks.

    moesaic bench transports --json benchmarks/results/transports.json
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moesaic.comm.process_groups import Gloo
from moesaic.comm.sockets import Sockets
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.profiling.together import latest, start_together
from moesaic_lab.across_ranks import gathered
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, no_claims, once, same
from moesaic_lab.measure import in_turn, paired
from moesaic_lab.tables import Column, byte_size, milliseconds
from moesaic_testbed.cluster import cluster

SIZES = (512, 1 << 14, 1 << 17, 1 << 20)
"""Bytes of a message."""
EXCHANGES = 4
"""Of a repeat, one after the other."""
NOTES = (
    "All-to-alls of all ranks, messages of one size. Seconds of one exchange, from the first rank's start to the last "
    "rank's end; processor milliseconds of a rank in one exchange, the kernel's included, all threads, the mean over ranks. "
    "Real bytes over emulated links; links inside a node are those of the loopback device."
)


@dataclass(frozen=True, kw_only=True)
class TransportsOptions(BenchmarkOptions):
    """What to measure."""

    nodes: int = 2
    ranks_per_node: int = 2
    inter: str = "1gbit"
    """Rate between nodes."""
    repeats: int = 30


@dataclass(frozen=True, kw_only=True)
class TransportRow:
    """Messages of one size."""

    message_bytes: int
    sockets_seconds: float
    gloo_seconds: float
    sockets_over_gloo: float
    sockets_over_gloo_95: tuple[float, float]
    sockets_processor_ms: float
    gloo_processor_ms: float


def exchange(transport: AbstractTransport, size: int) -> None:
    """Send everybody `size` bytes, several times."""
    others = [peer for peer in range(transport.world) if peer != transport.rank]
    data = torch.ones(size, dtype=torch.uint8)
    for _ in range(EXCHANGES):
        buffers = {peer: torch.empty(size, dtype=torch.uint8) for peer in others}
        transport.wait(
            transport.issue(Transfer(transport.rank, transport.take_tags(1), dict.fromkeys(others, data), buffers))
        )


@contextmanager
def counted(found: list[float]) -> Iterator[None]:
    """Add the processor milliseconds of one exchange to a list."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found.append(1e3 * seconds / EXCHANGES)


def measure(repeats: int) -> list[TransportRow]:
    """Return a row per size; on every rank."""
    group = dist.group.WORLD
    assert group is not None
    transports = {"sockets": Sockets.create(group), "gloo": Gloo(group)}
    rows = []
    for size in SIZES:
        used: dict[str, list[float]] = {name: [] for name in transports}

        def run(name: str, size: int = size, used: dict[str, list[float]] = used) -> None:
            with counted(used[name]):
                exchange(transports[name], size)

        methods: dict[str, Callable[[], object]] = {name: partial(run, name) for name in transports}
        found = gathered(in_turn(methods, repeats, barrier=start_together(latest)))
        used_by = torch.tensor([sum(used[name][1:]) / repeats for name in transports])
        dist.all_reduce(used_by)
        ratio = paired(found["sockets"], found["gloo"])
        medians = [float(torch.tensor(found[name]).median()) / EXCHANGES for name in transports]
        rows.append(
            TransportRow(
                message_bytes=size, sockets_seconds=medians[0], gloo_seconds=medians[1], sockets_over_gloo=ratio.median,
                sockets_over_gloo_95=(ratio.low, ratio.high), sockets_processor_ms=float(used_by[0]) / dist.get_world_size(),
                gloo_processor_ms=float(used_by[1]) / dist.get_world_size(),
            )
        )  # fmt: skip
    return rows


COLUMNS = (
    Column(key="message_bytes", title="message", show=byte_size),
    Column(key="sockets_seconds", title="sockets ms", show=milliseconds),
    Column(key="gloo_seconds", title="Gloo ms", show=milliseconds),
    Column(key="sockets_over_gloo", title="over Gloo", show="{:.2f}".format),
    Column(key="sockets_processor_ms", title="processor, sockets ms", show="{:.2f}".format),
    Column(key="gloo_processor_ms", title="Gloo ms", show="{:.2f}".format),
)


def measure_all(options: TransportsOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Measure on one bed."""
    told("exchanges of all sizes")
    with cluster(options.nodes, options.ranks_per_node, inter=options.inter) as ranks:
        rows = [asdict(row) for row in ranks.run(measure, options.repeats)[0]]
    return [{"bed": f"{options.nodes}x{options.ranks_per_node}", "inter": options.inter, **row} for row in rows]


BENCHMARK = Benchmark(
    name="transports", description="Time exchanges over sockets and over Gloo.", options=TransportsOptions, notes=NOTES,
    cases=once, measure=measure_all, rows=same, claims=no_claims, columns=(Shown(title="Transports", columns=COLUMNS),),
)  # fmt: skip
