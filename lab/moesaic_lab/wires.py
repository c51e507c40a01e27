"""What a message costs over sockets and over Gloo: all-to-alls on an emulated cluster, both transports in turn.

Every rank sends every other rank messages of one size, several exchanges one after the other. Time is from the first rank's
start to the last rank's end, processor time is of all threads of a rank, the mean over ranks.

    python -m moesaic_lab.wires --json benchmarks/results/wires.json
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from rich.console import Console

from moesaic.comm.gloo import Gloo
from moesaic.comm.sockets import Sockets
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.profiling.together import latest, start_together
from moesaic.testbed.cluster import cluster
from moesaic_lab.across_ranks import gathered
from moesaic_lab.claims import Measurement
from moesaic_lab.measure import in_turn, paired
from moesaic_lab.tables import Column, byte_size, milliseconds, table

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
class Options:
    """What to measure."""

    nodes: int = 2
    ranks_per_node: int = 2
    inter: str = "1gbit"
    """Rate between nodes."""
    repeats: int = 30
    json: Path | None = None
    """Write the table here."""


@dataclass(frozen=True, kw_only=True)
class Row:
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


def measure(repeats: int) -> list[Row]:
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
            Row(
                message_bytes=size, sockets_seconds=medians[0], gloo_seconds=medians[1], sockets_over_gloo=ratio.median,
                sockets_over_gloo_95=(ratio.low, ratio.high), sockets_processor_ms=float(used_by[0]) / dist.get_world_size(),
                gloo_processor_ms=float(used_by[1]) / dist.get_world_size(),
            )
        )  # fmt: skip
    return rows


def main(options: Options) -> None:
    """Measure, print the table, write."""
    with cluster(options.nodes, options.ranks_per_node, inter=options.inter) as ranks:
        rows = [asdict(row) for row in ranks.run(measure, options.repeats)[0]]
    beds = {"bed": f"{options.nodes}x{options.ranks_per_node}", "inter": options.inter}
    rows = [{**beds, **row} for row in rows]
    Console(stderr=True).print(table("Wires", rows, COLUMNS))
    if options.json is not None:
        Measurement(rows=rows, claims=[], notes=NOTES, packages=("torch", "numpy")).write(str(options.json))


COLUMNS = (
    Column(key="message_bytes", title="message", show=byte_size),
    Column(key="sockets_seconds", title="sockets ms", show=milliseconds),
    Column(key="gloo_seconds", title="Gloo ms", show=milliseconds),
    Column(key="sockets_over_gloo", title="over Gloo", show="{:.2f}".format),
    Column(key="sockets_processor_ms", title="processor, sockets ms", show="{:.2f}".format),
    Column(key="gloo_processor_ms", title="Gloo ms", show="{:.2f}".format),
)

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
