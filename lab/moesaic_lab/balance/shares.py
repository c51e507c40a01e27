"""Simulates shares of forced balance on larger clusters.

A method's share is its throughput over that of plain expert parallelism under forced even routing.
Loads are recorded or synthetic, and the experts' weights heavy or light.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moesaic.planner.cluster import read_cluster
from moesaic.program.grid import Grid
from moesaic.traces.trace import Trace
from moesaic_lab.balance.config import SharesOfForced
from moesaic_lab.balance.loads import (
    Skew,
    identical_counts,
    made_up_totals,
    max_vio,
    recorded_shares,
)
from moesaic_lab.balance.methods import NETMOE, PLAIN, methods
from moesaic_lab.balance.simulated import BEST, Larger
from moesaic_lab.benchmark import Told
from moesaic_lab.claims import write_whole

RECORDED = "recorded"
MADE_UP = "made up"
SLOW = "slow rank"
"""Kinds of loads. Under `SLOW`, all experts get equally many copies and the last rank is slower."""
SYNTHETIC = "synthetic"
"""Name of `MADE_UP` loads on pages and in pictures."""
WHOLE = 128
"""Ranks up to which everything is simulated. Beyond it, one call of a method takes seconds, so only
the middle layer of the recorded loads runs. Best options (some ten programs each) and the slow rank
are skipped."""
UNASKED = (NETMOE, "smart + shadow")
"""Methods that are skipped: these loads do not distinguish samples, and a combination of two
techniques is no baseline."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Simulated result of one method in one call."""

    cluster: str
    ranks: int
    load: str
    """`RECORDED`, `MADE_UP` or `SLOW`."""
    layer: int
    """MoE layer of a recorded load; -1 for other loads."""
    step: int
    """Iteration of the recording; for other loads, the number of the call."""
    max_vio: float
    """MaxVio of ranks."""
    ratio: float
    """Weight rows of an expert over the rows that a rank routes."""
    method: str
    seconds: float
    """Time of forward and backward."""
    moving_seconds: float
    """Time to move experts, with their optimizer state, from their initial ranks to their placement
    before this call; 0 if the method does not move experts. Weights that a call replicates are sent
    within the call and counted in `seconds`."""
    moves_every: int
    """Calls between two such moves."""
    forced_seconds: float
    """Time of the plain layer under forced balance."""
    own_forced_seconds: float
    """Time of the method itself under forced balance."""
    decision_seconds: float
    """Time by which the decision delays a rank, measured on this machine."""
    replicated_experts: int
    """Number of experts that a helper rank computed."""

    @property
    def whole_seconds(self) -> float:
        """Time of a call, including its part of the preceding move."""
        return self.seconds + self.moving_seconds / self.moves_every

    @property
    def of_forced(self) -> float:
        """Throughput over that of the plain layer under forced balance, with moves included."""
        return self.forced_seconds / self.whole_seconds


def shares_of_forced(
    config: SharesOfForced, folder: Path, seed: int, told: Told, keep: Path
) -> list[Share]:
    """Simulate every method under every load.

    Args:
        config: what to simulate.
        folder: folder of the configuration's trace.
        seed: seed of the synthetic loads.
        told: called with a progress message for each case.
        keep: folder with a file for each case that is simulated already; the others are added.
    """
    trace = Trace.open(folder / config.trace)
    shares: list[Share] = []
    for ranks in config.ranks:
        simulated = None  # the last cluster, whose compiled programs the next one reuses
        for cluster in config.clusters:
            cases = _cases_on(config, cluster, ranks)
            if not all(case.file(keep).exists() for case in cases):
                nodes = ranks // read_cluster(cluster).devices_per_node
                spec = read_cluster(cluster, nodes=nodes)
                simulated = Larger(config.layer(ranks), spec, simulated)
            forced: dict[tuple[float, str], float] = {}
            for case in cases:
                path = case.file(keep)
                if not path.exists():
                    assert simulated is not None
                    told(
                        f"{cluster}, {ranks} ranks, weights {case.ratio:g} of the rows, "
                        f"{case.load} {case.which:g}"
                    )
                    names = names_of(ranks)
                    if case.load == SLOW:
                        case_shares = _shares_with_slow_rank(config, simulated, cluster, names)
                    else:
                        case_shares = _shares_under(
                            config,
                            simulated,
                            trace=trace,
                            case=case,
                            seed=seed,
                            names=names,
                            forced=forced,
                        )
                    write_whole(path, json.dumps([asdict(share) for share in case_shares]))
                rows = json.loads(path.read_text(encoding="utf-8"))
                shares += [Share(**row) for row in rows]
    return shares


def _cases_on(config: SharesOfForced, cluster: str, ranks: int) -> list[LoadCase]:
    """Return the cases to simulate on a cluster: all loads with the default weight ratio and, on
    the first cluster with the first number of ranks, the recorded loads with all ratios."""
    default = config.ratio
    loads = list(loads_on(config, ranks))
    cases = [LoadCase(cluster, ranks, default, load, which) for load, which in loads]
    if cluster == config.clusters[0] and ranks == config.ranks[0]:
        for ratio in dict.fromkeys(config.ratios):
            for load, which in loads:
                if load == RECORDED and ratio != default:
                    cases.append(LoadCase(cluster, ranks, ratio, load, which))
    return cases


class LoadCase(NamedTuple):
    """One load on one cluster."""

    cluster: str
    ranks: int
    ratio: float
    load: str
    which: float
    """Layer of a recorded load; the configured MaxVio of other loads."""

    def file(self, folder: Path) -> Path:
        """Return the file that keeps the case's results."""
        words = (
            Path(self.cluster).stem,
            self.ranks,
            f"{self.ratio:g}",
            self.load,
            f"{self.which:g}",
        )
        return folder / f"shares-{'-'.join(map(str, words)).replace(' ', '_')}.json"


def loads_on(config: SharesOfForced, ranks: int) -> Iterator[tuple[str, float]]:
    """Yield the loads to simulate on this many ranks, as (kind, layer or MaxVio)."""
    is_whole = ranks <= WHOLE
    middle = len(config.layers) // 2
    layers = config.layers if is_whole else config.layers[middle : middle + 1]
    for layer in layers:
        yield RECORDED, layer
    for skew in config.max_vio:
        yield MADE_UP, skew
    if is_whole:
        yield SLOW, 0.0


def names_of(ranks: int) -> list[str]:
    """Return the names of the methods to simulate on this many ranks."""
    names = [name for name in methods(Grid(world=ranks, ep=ranks)) if name not in UNASKED]
    if ranks <= WHOLE:
        names += BEST
    return names


def _shares_under(
    config: SharesOfForced,
    larger: Larger,
    trace: Trace,
    case: LoadCase,
    seed: int,
    names: Sequence[str],
    forced: dict[tuple[float, str], float],
) -> Iterator[Share]:
    """Yield the shares of methods under one load on one cluster, for one weight ratio.

    `forced` caches times under forced balance by (ratio, method), and is extended.
    """
    cluster, ranks, ratio, load, _ = case
    tokens = config.tokens(ratio)
    copies = tokens * config.top_k
    experts = ranks * config.experts_per_rank
    even = identical_counts(np.full(experts, 1 / experts), ranks, copies)
    for name in dict.fromkeys((PLAIN, *names)):
        if (ratio, name) not in forced:
            # of two equal calls, the first only starts policies that decide ahead
            *_, (seconds, _, _) = larger.seconds(name, [even, even], even.sum(0), tokens)
            forced[ratio, name] = seconds

    layer, steps, calls = calls_of(config, trace, case, copies, seed)
    history = calls[0].sum(0)
    for name in names:
        results = larger.seconds(name, calls, history, tokens)
        moving = larger.moving_seconds(name, history, config.moved_bytes)
        for step, counts, (seconds, deciding, replicated) in zip(steps[1:], calls[1:], results):
            yield Share(
                cluster=cluster,
                ranks=ranks,
                load=load,
                layer=layer,
                step=step,
                max_vio=max_vio(counts, ranks),
                ratio=ratio,
                method=name,
                seconds=seconds,
                moving_seconds=moving,
                moves_every=config.moves_every,
                forced_seconds=forced[ratio, PLAIN],
                own_forced_seconds=forced[ratio, name],
                decision_seconds=deciding,
                replicated_experts=replicated,
            )


def _shares_with_slow_rank(
    config: SharesOfForced, larger: Larger, cluster: str, names: Sequence[str]
) -> Iterator[Share]:
    """Yield the shares with even loads and a slow last rank. Policies with a cost model know its
    speed."""
    ranks = larger.grid.world
    tokens = config.tokens(config.ratio)
    spec = replace(larger.spec, speeds=(*(1.0,) * (ranks - 1), config.slow_rank))
    slowed = Larger(larger.layer, spec, larger)
    experts = ranks * config.experts_per_rank
    copies = tokens * config.top_k
    even = identical_counts(np.full(experts, 1 / experts), ranks, copies)
    calls = [even, even]
    history = even.sum(0)
    *_, (plain, _, _) = larger.seconds(PLAIN, calls, history, tokens)
    for name in names:
        *_, (own, _, _) = larger.seconds(name, calls, history, tokens)
        *_, (seconds, deciding, replicated) = slowed.seconds(name, calls, history, tokens)
        moving = slowed.moving_seconds(name, history, config.moved_bytes)
        yield Share(
            cluster=cluster,
            ranks=ranks,
            load=SLOW,
            layer=-1,
            step=1,
            max_vio=0.0,
            ratio=config.ratio,
            method=name,
            seconds=seconds,
            moving_seconds=moving,
            moves_every=config.moves_every,
            forced_seconds=plain,
            own_forced_seconds=own,
            decision_seconds=deciding,
            replicated_experts=replicated,
        )


def calls_of(
    config: SharesOfForced, trace: Trace, case: LoadCase, copies: int, seed: int
) -> tuple[int, Sequence[int], list[np.ndarray]]:
    """Return a load as (layer, steps, consecutive calls). The first call only initialises policies
    that decide ahead.

    Args:
        copies: copies of each rank in a call.

    Returns:
        `Share.layer`, the `Share.step` of each call, and each rank's copies for each expert in each
        call, (ranks, num_experts) int64.
    """
    ranks = case.ranks
    per_rank = config.experts_per_rank
    if case.load == RECORDED:
        layer = int(case.which)
        shares = [recorded_shares(trace, layer, step, ranks, per_rank) for step in config.steps]
        calls = [identical_counts(step_shares, ranks, copies) for step_shares in shares]
        return layer, config.steps, calls
    samples = -(-copies // (config.top_k * 512))  # of 512 tokens each, rounded up
    totals = made_up_totals(
        Skew(
            ranks=ranks,
            num_experts=ranks * per_rank,
            top_k=config.top_k,
            samples=samples * ranks,
            sample_tokens=512,
            max_vio=case.which,
            calls=2,
            persistence=config.persistence,
            locality=0.0,
            seed=seed,
        )
    )
    calls = [identical_counts(total / total.sum(), ranks, copies) for total in totals]
    return -1, (0, 1), calls
