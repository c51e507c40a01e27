"""Shares of forced balance on larger clusters, simulated: what of the throughput of plain expert parallelism under forced even
routing each method keeps, under loads that others recorded, under made-up ones, and with experts' weights heavy and light."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moesaic.cost.cluster_file import read_cluster
from moesaic.program.grid import Grid
from moesaic.traces.trace import Trace
from moesaic_lab.balance.config import SharesOfForced, SimulatedLoads
from moesaic_lab.balance.loads import Skew, alike, made_up, max_vio, recorded_shares
from moesaic_lab.balance.methods import NETMOE, PLAIN, methods
from moesaic_lab.balance.simulated import BEST, Larger
from moesaic_lab.benchmark import Told

RECORDED, MADE_UP, SLOW = "recorded", "made up", "slow rank"
"""Kinds of loads; under the last all experts get alike, and the last rank is slower."""
MOST_APART = 128
"""Ranks up to which methods that replicate are simulated: their programs tell copies apart by origin, expert and helper, and
that is half a gigabyte a call at 256 ranks. Beyond, no such table is built, and the others are simulated alone."""
UNASKED = (NETMOE, "smart + shadow")
"""Methods that are left out: samples are not told apart in these loads, and two techniques together are no baseline."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One method in one call."""

    cluster: str
    ranks: int
    load: str
    """`RECORDED`, `MADE_UP` or `SLOW`."""
    layer: int
    """Of a recorded load; -1 of others."""
    step: int
    """Iteration that was recorded; the number of the call of others."""
    max_vio: float
    """Of ranks."""
    ratio: float
    """Weight rows of an expert over the rows that a rank routes."""
    method: str
    seconds: float
    """Forward and backward."""
    forced_seconds: float
    """Of the plain layer under forced balance."""
    own_forced_seconds: float
    """Of the method itself."""
    decision_seconds: float
    """What deciding kept a rank from going on, on this machine."""
    replicated_experts: int
    """Experts that some other rank computed."""

    @property
    def of_forced(self) -> float:
        """Throughput over that under forced balance."""
        return self.forced_seconds / self.seconds


def shares_of_forced(
    config: SharesOfForced, folder: Path, seed: int, told: Told, made: Sequence[Share] = ()
) -> list[Share]:  # fmt: skip
    """Simulate every method under every load, but for what is made already.

    Args:
        config: what to simulate.
        folder: where its trace is.
        seed: of made-up loads.
        told: hears what is simulated.
        made: shares that were simulated before.
    """
    trace, found = Trace.open(folder / config.trace), list(made)
    known = {(each.cluster, each.ranks, each.ratio, each.load, each.method) for each in made}
    for ranks in config.ranks:
        larger = None
        for cluster in config.clusters:
            first = cluster == config.clusters[0] and ranks == config.ranks[0]
            ratios = dict.fromkeys((config.ratio, *(config.ratios if first else ())))
            left = {
                (ratio, load): [name for name in names_of(ranks) if (cluster, ranks, ratio, load, name) not in known]
                for ratio in ratios
                for load in ((RECORDED, MADE_UP, SLOW) if ratio == config.ratio else (RECORDED,))
            }
            if not any(left.values()):
                continue
            spec = read_cluster(cluster)
            larger = Larger(
                SimulatedLoads(
                    cluster=cluster, ranks=(ranks,), dim=config.dim, hidden=config.hidden, top_k=config.top_k,
                    experts_per_rank=config.experts_per_rank, samples_per_rank=1, sample_tokens=config.tokens(config.ratio),
                ),
                read_cluster(cluster, nodes=ranks // spec.devices_per_node), ranks, larger,
            )  # fmt: skip
            for (ratio, load), names in left.items():
                if names:
                    told(f"{cluster}, {ranks} ranks, weights {ratio:g} of the rows, {load}")
                if names and load == SLOW:
                    found += list(_slow(config, larger, cluster, names))
                elif names:
                    found += list(_of(config, larger, trace, cluster, ratio, load, seed, names))
    return found


def names_of(ranks: int) -> list[str]:
    """Return the methods that are simulated on so many ranks."""
    every = {name: method for name, method in methods(Grid(world=ranks, ep=ranks)).items() if name not in UNASKED}
    found = [name for name, method in every.items() if ranks <= MOST_APART or not method.plan.replicates]
    return [*found, *(name for name, ours in BEST.items() if ours in found)]


def _of(
    config: SharesOfForced, larger: Larger, trace: Trace, cluster: str, ratio: float, load: str, seed: int,
    names: Sequence[str],
) -> Iterator[Share]:  # fmt: skip
    """Yield the shares of methods under all loads of a kind on one cluster, with one weight of experts."""
    ranks, each = larger.grid.world, config.experts_per_rank
    tokens = config.tokens(ratio)
    copies = tokens * config.top_k
    even = [alike(np.full(ranks * each, 1 / (ranks * each)), ranks, copies)] * 2
    forced = {
        name: larger.seconds(name, even, even[0].sum(0), tokens)[-1][0] for name in dict.fromkeys((PLAIN, *names))
    }
    for layer, steps, calls in loads_of(config, trace, ranks, copies, load, seed):
        for name in names:
            found = larger.seconds(name, calls, calls[0].sum(0), tokens)
            for step, counts, (seconds, deciding, replicated) in zip(steps[1:], calls[1:], found):
                yield Share(
                    cluster=cluster, ranks=ranks, load=load, layer=layer, step=step, max_vio=max_vio(counts, ranks),
                    ratio=ratio, method=name, seconds=seconds, forced_seconds=forced[PLAIN], own_forced_seconds=forced[name],
                    decision_seconds=deciding, replicated_experts=replicated,
                )  # fmt: skip


def _slow(config: SharesOfForced, larger: Larger, cluster: str, names: Sequence[str]) -> Iterator[Share]:
    """Yield the shares where loads are even and the last rank is slower; the policies that know rates know that."""
    ranks, tokens = larger.grid.world, config.tokens(config.ratio)
    spec = replace(larger.spec, speeds=(*(1.0,) * (ranks - 1), config.slow_rank))
    unlike = Larger(larger.config, spec, ranks, larger)
    experts, copies = ranks * config.experts_per_rank, tokens * config.top_k
    even = [alike(np.full(experts, 1 / experts), ranks, copies)] * 2
    plain = larger.seconds(PLAIN, even, even[0].sum(0), tokens)[-1][0]
    for name in names:
        forced = [one.seconds(name, even, even[0].sum(0), tokens) for one in (larger, unlike)]
        (own, _, _), (seconds, deciding, replicated) = forced[0][-1], forced[1][-1]
        yield Share(
            cluster=cluster, ranks=ranks, load=SLOW, layer=-1, step=1, max_vio=0.0, ratio=config.ratio, method=name,
            seconds=seconds, forced_seconds=plain, own_forced_seconds=own, decision_seconds=deciding,
            replicated_experts=replicated,
        )  # fmt: skip


def loads_of(
    config: SharesOfForced, trace: Trace, ranks: int, copies: int, load: str, seed: int
) -> Iterator[tuple[int, Sequence[int], list[np.ndarray]]]:
    """Yield loads of a kind: layer, steps, and calls that follow each other, of which the first only begins."""
    each = config.experts_per_rank
    if load == RECORDED:
        for layer in config.layers:
            shares = [recorded_shares(trace, layer, step, ranks, each) for step in config.steps]
            yield layer, config.steps, [alike(of_step, ranks, copies) for of_step in shares]
        return
    for skew in config.max_vio:
        samples = -(-copies // (config.top_k * 512))
        routes = made_up(
            Skew(
                ranks=ranks, num_experts=ranks * each, top_k=config.top_k, samples=samples * ranks, sample_tokens=512,
                max_vio=skew, calls=2, persistence=config.persistence, locality=0.0, seed=seed,
            )
        )  # fmt: skip
        totals = [routes.counts(call, ranks, ranks * each).sum(0) for call in range(2)]
        yield -1, (0, 1), [alike(total / total.sum(), ranks, copies) for total in totals]
