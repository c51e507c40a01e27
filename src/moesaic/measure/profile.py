"""`moesaic profile`: measures the machine that its ranks run on, and describes it as a cluster.

It times products, copies and codecs, then collectives over the links inside and between nodes, then
whole layers, which show what the parts do not. A node is a group of `ranks_per_node` ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.distributed as dist

from moesaic.comm.mesh import open_transport
from moesaic.kernels.codecs import missing_codecs
from moesaic.measure.compute import device
from moesaic.measure.costs import fit_layers
from moesaic.measure.here import machine, versions
from moesaic.measure.host import calibrations, timed
from moesaic.measure.links import collectives, rate_of
from moesaic.measure.together import gathered, latest, shared_clock, start_together
from moesaic.planner.cluster import ClusterSpec, Host, Link
from moesaic.planner.fit import Fit

SHARED_FROM = 1.5
"""Senders of a node share one link if together they reach less than this multiple of the rate of a
single sender."""
REPEATS_OF_LAYERS = 3
"""Factor on the number of repeats for layers, since their time varies by a tenth when ranks share
cores."""
LIMIT = 0.5
"""Largest median error on held-out layers; a profile with a larger one predicts nothing."""
Progress = Callable[[str, float], None]
"""Called with the current measurement's name and the share of all measurements that is done."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured cluster."""

    cluster: ClusterSpec
    errors: np.ndarray
    """(layers,) errors of the times of held-out layers, as shares."""

    @property
    def median_error(self) -> float:
        """Median size of the errors."""
        return float(np.median(np.abs(self.errors)))

    @property
    def troubles(self) -> list[str]:
        """The checks that the profile fails, in words; [] if it fails none."""
        troubles = [line.trouble for line in self.cluster.collectives if line.trouble]
        if self.median_error > LIMIT:
            troubles.insert(0, f"whole layers {self.median_error:.0%} off, at most {LIMIT:.0%}")
        return troubles


def measure(
    ranks_per_node: int,
    repeats: int,
    dtypes: tuple[str, ...],
    progress: Progress,
    transport_name: str = "auto",
) -> Profile:
    """Measure this machine. All ranks call it together and get the same profile.

    Args:
        repeats: repeats of every measurement.
        dtypes: dtypes of the products: fp32, bf16.
        progress: called on every rank.
        transport_name: transport of the messages.

    Raises:
        InputError: if times do not grow with bytes.
    """
    transport = open_transport(name=transport_name)
    clock = shared_clock()
    barrier = start_together(latest, clock=clock) if dist.is_initialized() else lambda: None
    # The second argument is the share that is done, by the time that each part usually takes.
    progress("products, copies and codecs", 0.0)
    all_dtypes = tuple(dict.fromkeys((*dtypes, "fp32")))  # each once
    measured_device = device(all_dtypes, ranks_per_node, repeats, barrier)
    progress("collectives", 0.15)
    lines = collectives(transport, ranks_per_node, repeats, barrier, clock)
    nodes = transport.world // ranks_per_node
    here = machine()
    described = ClusterSpec(
        name="profile",
        description=f"{here['processor']}, {here['cores']} cores, {nodes} x {ranks_per_node} ranks",
        source=source_of_here(),
        nodes=nodes,
        devices_per_node=ranks_per_node,
        device=measured_device,
        links=links_of(lines, nodes, ranks_per_node),
        host=Host(runs_compute=True, messages="eager"),
        collectives=tuple(lines.values()),
    )
    layers = timed(
        list(calibrations(transport.world, ranks_per_node)),
        transport,
        REPEATS_OF_LAYERS * repeats,
        barrier,
        lambda share: progress("layers", 0.3 + 0.6 * share),
        clock,
    )
    progress("fit", 0.9)
    # One rank fits: ranks share cores, and all would find the same.
    fitted = fit_layers(described, layers) if transport.rank == 0 else None
    fitted_by_ranks = [of_rank for (of_rank,) in gathered([fitted])]
    cluster, errors = fitted_by_ranks[0]
    return Profile(cluster=cluster, errors=errors)


def source_of_here() -> str:
    """Return where the numbers of a profile come from: today, these versions, and the codecs that
    they lack."""
    today = f"{datetime.datetime.now(datetime.timezone.utc):%F}"
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    lacking = [f"; without the codec {name}, not installed here" for name in missing_codecs()]
    return f"moesaic profile, {today}, {software}{''.join(lacking)}"


def links_of(lines: Mapping[str, Fit], nodes: int, ranks_per_node: int) -> tuple[Link, ...]:
    """Return the links inside nodes and between them, with the rates that all ranks reach at once
    in an all-to-all.

    Args:
        lines: fitted times of collectives, by "all_to_all inside", "send outside" and the like.
        nodes: number of nodes.
        ranks_per_node: number of ranks on each.

    Raises:
        InputError: if times do not grow with bytes.
    """
    links = []
    spans: tuple[tuple[Literal["inside", "outside"], int], ...] = (
        ("inside", ranks_per_node),
        ("outside", nodes),
    )
    for span, num_ranks in spans:  # `num_ranks` exchange with one another in an all-to-all
        if num_ranks == 1:  # there is no such link
            continue
        all_to_all_rate = rate_of(lines[f"all_to_all {span}"])  # bytes/s of a rank, all sending
        lone_rate = rate_of(lines[f"send {span}"])  # bytes/s of a rank that sends alone
        rank_rate = (num_ranks - 1) / num_ranks * all_to_all_rate  # a rank keeps its own part
        node_rate = rank_rate * ranks_per_node
        # if all ranks of a node together are hardly faster than one alone, they share one link
        is_shared = ranks_per_node == 1 or node_rate < SHARED_FROM * lone_rate
        link_rate = node_rate if is_shared else rank_rate
        links.append(
            Link(
                name=span,
                devices=ranks_per_node if is_shared else 1,
                gbps=(link_rate * 8e-9,),  # gigabits
                carries=span,
                # inside a node, a shared link is a bus; between nodes it is the node's way out
                shared=span == "inside" and is_shared,
            )
        )
    return tuple(links)
