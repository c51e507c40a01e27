"""Whether another split of the ranks would spare a slow link between machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from moesaic.comm.collectives import all_to_all
from moesaic.comm.mesh import open_transport
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.measure.together import gathered
from moesaic.planner.candidates import Pins, SearchSpace
from moesaic.planner.job import job_of
from moesaic.planner.predicted_plans import assumed_cluster
from moesaic.planner.search import GIVE_UP, Settings, search
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.program.grid import Grid
from moesaic.train.config import TrainConfig

SLOW_GBPS = 10.0
"""A faster link between CPU machines is not asked about."""
WORTH = 1.3
"""How many times as fast another split must be to be named."""
FEW = SearchSpace(schedules=("s1",), chunks=(1, 2), overlap_gather=(False,), orders=("optsche",))
"""The plans by which splits are compared, in a second of processor time on four ranks."""
BYTES = 1 << 17
"""Bytes that each rank exchanges with the other nodes to time the link between them."""
REPEATS = 4
"""How often they are exchanged."""


def about_slow_link(config: TrainConfig, world: int, per_node: int, most_stages: int) -> str | None:
    """Time the link between machines if tokens of a configuration cross it, and return a line about
    a faster split; None on other ranks than the first, and if there is none. All ranks call it
    together.

    Args:
        config: the configuration; its mesh fits the ranks.
        world: number of ranks, which compute on CPUs.
        per_node: number of ranks per node.
        most_stages: most pipeline stages that the configuration may have.
    """
    mesh = config.mesh
    ranks_per_stage = world // mesh.pp
    ranks_that_share = max(mesh.ep * mesh.etp, mesh.tp)
    if ranks_per_stage <= per_node or ranks_that_share <= per_node:  # no tokens leave a node
        return None
    gbps = outside_gbps(open_transport(name=mesh.transport), per_node)
    if gbps >= SLOW_GBPS:
        return None
    if dist.get_rank() != 0:
        return None
    grid = Grid(world=world, ranks_per_node=per_node)
    cluster = assumed_cluster(grid, gbps, on_cpu=True)
    job = job_of(asdict(config), source="train")
    # settings that leave the split open, and search quickly
    free = Settings(space=FEW, give_up=GIVE_UP, refine=2, paired=0, most_stages=most_stages)
    # the configured split
    pins = Pins(tp=mesh.tp, ep=mesh.ep, etp=mesh.etp)
    try:
        configured = search(job, cluster, replace(free, pins=pins, pp=mesh.pp)).best
        best = search(job, cluster, free).best
    except InputError:  # the run says what does not fit
        return None
    return _line(gbps, configured, best)


def _line(gbps: float, configured: PlannedStep, best: PlannedStep) -> str | None:
    """Return the line about a split that is faster than the configured one with its best plan; None
    if it is not worth it. `gbps` is the rate of the link between machines, in gigabits per
    second."""
    times = configured.seconds / best.seconds
    if times < WORTH:
        return None
    return (
        f"tokens cross a link between machines that carries {gbps:.2g} Gbit/s, and {best.layout} "
        f"is predicted to be {times:.1f} times as fast as {configured.layout} with its best plan: "
        "--planner.plan search takes it"
    )


def outside_gbps(
    transport: AbstractTransport, per_node: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the rate of a node's link to the others in gigabits per second, each way, while all
    its ranks send. All ranks call it together and get the same rate.

    Args:
        transport: this rank's transport.
        per_node: number of ranks per node.
        clock: returns seconds.
    """
    # the ranks at this rank's place in every node
    peers = tuple(range(transport.rank % per_node, transport.world, per_node))
    num_elements = BYTES // 4 // len(peers) * len(peers)  # float32, in equal parts
    rows = torch.zeros(num_elements, device=transport.device)
    own_seconds = []
    for _ in range(REPEATS):
        start = clock()
        all_to_all(transport, peers, rows)
        own_seconds.append(clock() - start)

    seconds_of_ranks = gathered(own_seconds)
    slowest = [max(seconds_of_repeat) for seconds_of_repeat in zip(*seconds_of_ranks)]
    seconds = min(slowest[1:])  # ranks enter the first one at different moments
    share_that_leaves = (len(peers) - 1) / len(peers)
    # by all ranks of a node together, to other nodes
    sent_bytes = per_node * rows.nbytes * share_that_leaves
    gigabits = 8e-9 * sent_bytes
    return gigabits / max(seconds, 1e-9)
