"""Times collectives with the library's own transport, over sizes and spans of ranks.

The spans are the ranks inside nodes, the ranks between nodes, and all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moesaic.comm.collectives import all_gather_rows, all_reduce_sum, all_to_all, reduce_scatter_sum
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.errors import InputError
from moesaic.measure.together import elapsed, gathered
from moesaic.planner.fit import Fit, fit

SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 21)
"""Bytes as nccl-tests counts them: of a rank's input tensor, or of its output tensor in an
all-gather."""
MORE_REPEATS = (3, 9)
"""How many times as many repeats are made, one after the other, where a neighbour on the machine
hid the links' rate."""
Peers = tuple[int, ...]


def _all_gather(transport: AbstractTransport, peers: Peers, whole: Tensor) -> object:
    """Gather the first part of a tensor from all peers, so that the output is as long as the
    tensor, by which `SIZES` counts an all-gather."""
    rows = len(whole) // len(peers)
    return all_gather_rows(transport, peers, whole[:rows], rows * len(peers))


def _send(transport: AbstractTransport, peers: Peers, whole: Tensor) -> object:
    """Send from rank 0 to the next rank of its group, while all other ranks are silent."""
    tag = transport.take_tags(1)
    rank = transport.rank
    target = peers[1]
    if peers[0] != 0 or rank not in (0, target):  # another group, or a silent rank of this one
        return None
    sends = {target: whole} if rank == 0 else {}
    receives = {0: whole} if rank == target else {}
    return transport.wait(transport.issue(Transfer(rank, tag, sends, receives)))


COLLECTIVES: dict[str, Callable[[AbstractTransport, Peers, Tensor], object]] = {
    "all_to_all": all_to_all,
    "all_gather": _all_gather,
    "reduce_scatter": reduce_scatter_sum,
    "all_reduce": all_reduce_sum,
    "send": _send,
}
"""Collectives that are timed over every span of ranks."""


def spans(rank: int, world: int, ranks_per_node: int) -> dict[str, Peers]:
    """Return a rank's groups by what they span: its node, the ranks with its place on every node,
    and all ranks.

    Groups of one rank are left out. So is "everywhere" if it equals another group.
    """
    node, place = divmod(rank, ranks_per_node)
    groups = {
        "inside": tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node)),
        # every `ranks_per_node`-th rank
        "outside": tuple(range(place, world, ranks_per_node)),
        "everywhere": tuple(range(world)),
    }
    if ranks_per_node in (1, world):
        del groups["everywhere"]
    return {span: peers for span, peers in groups.items() if len(peers) > 1}


def all_to_all_gathered(transport: AbstractTransport, inside: Peers, tensor: Tensor) -> Tensor:
    """Run an all-to-all over all ranks, node by node, overlapped with an all-gather inside this
    node (SAA).

    While one node's shares arrive, those of the node before are gathered inside this node: the
    simultaneous all-to-all and all-gather of Pan et al. (Parm, INFOCOM 2024), section III-D,
    without the sums and the experts.

    Args:
        transport: this rank's transport.
        inside: ranks of this rank's node, over which the all-gather runs; all nodes have equally
            many.
        tensor: one-dimensional, of equal length on all ranks, divisible by the number of ranks.

    Returns:
        (ranks of the node, world, n): the share that each rank (second dim) sent to each rank of
        this node.
    """
    ranks_per_node = len(inside)
    nodes = transport.world // ranks_per_node
    rank = transport.rank
    own_node = rank // ranks_per_node
    tag = transport.take_tags(2 * nodes)  # of the exchanges by phase, then of the gathers
    shares = tensor.view(transport.world, -1)
    whole = shares.new_empty(ranks_per_node, *shares.shape)
    received = whole[rank % ranks_per_node]  # a view of this rank's part
    received[rank] = shares[rank]
    # In each phase a rank sends to the ranks of one node and receives from those of one, first its
    # own.
    exchanges = []
    for phase in range(nodes):
        targets = _ranks_of_node(own_node + phase, nodes, ranks_per_node)
        sources = _ranks_of_node(own_node - phase, nodes, ranks_per_node)
        transfer = Transfer(
            rank,
            tag=tag + phase,
            sends={peer: shares[peer] for peer in targets if peer != rank},
            receives={peer: received[peer] for peer in sources if peer != rank},
        )
        exchanges.append((sources, transport.issue(transfer)))
    gathers = []
    others = [peer for peer in inside if peer != rank]
    for phase, (sources, exchange) in enumerate(exchanges):
        transport.wait(exchange)
        # By rank of this node, what it got from the ranks of one node.
        arrived = {
            peer: whole[peer % ranks_per_node, sources.start : sources.stop] for peer in inside
        }
        transfer = Transfer(
            rank,
            tag=tag + nodes + phase,
            sends=dict.fromkeys(others, arrived[rank]),
            receives={peer: arrived[peer] for peer in others},
            lane="intra",
        )
        gathers.append(transport.issue(transfer))
    for gather in gathers:
        transport.wait(gather)
    return whole


def _ranks_of_node(node: int, nodes: int, ranks_per_node: int) -> range:
    """Return the ranks of a node; nodes are counted modulo their number."""
    first = node % nodes * ranks_per_node
    return range(first, first + ranks_per_node)


def rate_of(line: Fit) -> float:
    """Return the bytes per second of long transfers, from the two ends of the last three sizes.

    A link whose rate is limited passes the first kilobytes at once, which a line through all sizes
    takes for a higher rate.

    Raises:
        InputError: if longer transfers take no longer.
    """
    more_seconds = _more_seconds(line)
    if not more_seconds > 0:
        raise InputError(
            f"{line.what}: longer transfers take no longer, measured {1 + len(MORE_REPEATS)} times"
            ": measure again while nothing else runs, or with more --repeats"
        )
    return (SIZES[-1] - SIZES[-3]) / more_seconds


def _more_seconds(line: Fit) -> float:
    """Return by how many seconds the last of the three largest sizes took longer than the first."""
    # The measured times: those of the line, and the residuals as shares of them.
    shorter = line.seconds(SIZES[-3]) * (1 + line.residuals[-3])
    longer = line.seconds(SIZES[-1]) * (1 + line.residuals[-1])
    return longer - shorter


def collectives(
    transport: AbstractTransport,
    ranks_per_node: int,
    repeats: int,
    barrier: Callable[[], object],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Fit]:
    """Time every collective over every span and fit a line to its times.

    All ranks call it together and get the same result.

    Args:
        transport: this rank's transport.
        ranks_per_node: ranks of each machine.
        repeats: timed repeats of each size, after one untimed; `MORE_REPEATS` times as many where
            longer transfers took no longer, since something else ran.
        barrier: releases all ranks at one moment.
        clock: a clock that all ranks share.

    Returns:
        a line over `SIZES` by collective and span, such as "all_gather inside"; with "saa
        everywhere" if several nodes
            have several ranks each.
    """
    groups = spans(transport.rank, transport.world, ranks_per_node)
    timed: dict[str, Callable[[Tensor], object]] = {
        f"{name} {span}": partial(run, transport, peers)
        for span, peers in groups.items()
        for name, run in COLLECTIVES.items()
    }
    if "everywhere" in groups:
        timed["saa everywhere"] = partial(all_to_all_gathered, transport, groups["inside"])
    everybody = tuple(range(transport.world))
    lines = {}
    for name, run in timed.items():
        for factor in (1, *MORE_REPEATS):
            seconds = _seconds_by_size(transport, run, factor * repeats, barrier, clock)
            lines[name] = fit(SIZES, seconds, what=name)
            # All ranks measure again if one of them has to.
            is_noise = torch.tensor([float(not _more_seconds(lines[name]) > 0)])
            if not all_reduce_sum(transport, everybody, is_noise.to(transport.device)).any():
                break
    return lines


def _seconds_by_size(
    transport: AbstractTransport,
    run: Callable[[Tensor], object],
    repeats: int,
    barrier: Callable[[], object],
    clock: Callable[[], float],
) -> list[tuple[float, ...]]:
    """Return the seconds of each repeat of a collective, by size."""
    seconds = []
    for size in SIZES:
        # float32 numbers of 4 bytes, as many of them as split over the ranks
        length = size // 4 // transport.world * transport.world
        tensor = torch.zeros(length, device=transport.device)
        own_spans = []
        for repeat in range(-1, repeats):
            barrier()
            start = clock()
            run(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            if repeat >= 0:  # the first one is not timed
                own_spans.append((start, clock()))
        seconds.append(elapsed(gathered(own_spans)))
    return seconds
