"""The routing of a case, token by token: synthetic with an exact MaxVio of ranks, or from a
recorded trace.

A case has several calls, and a history from which a policy that decides ahead (expert placement)
may learn. Synthetic calls share a lasting popularity of the experts; `persistence` is the
correlation of popularity ranks between calls. Counts are exact: the busiest rank has (1 + MaxVio)
times the mean, to within one copy. Otherwise the benchmark's own axis would be wrong.

A copy is a token sent to one of its `top_k` experts. MaxVio is the load of the busiest rank over
the mean load, minus 1. A sample is a sequence of tokens. A popularity rank, `places`, is an
expert's place when the experts are sorted by popularity: 0 for the most popular one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.trace import Trace
from moesaic_lab.traces.synthetic import capped, concentration, draw_sequence_shares, popularity

STEEPEST = 60.0
"""Largest exponent of popularity that the search tries."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Routing decisions of all calls of a case."""

    experts: np.ndarray
    """(calls, samples, sample_tokens, top_k) int64 expert ids, distinct within a token. Samples are
    in the order of their ranks."""
    history: np.ndarray
    """(num_experts,) copies for each expert in an earlier call."""

    def counts(self, call: int, ranks: int, num_experts: int) -> np.ndarray:
        """Return each rank's number of copies for each expert, (ranks, num_experts) int64."""
        by_rank = self.experts[call].reshape(ranks, -1)
        return np.stack([np.bincount(experts, minlength=num_experts) for experts in by_rank])

    def samples(self, call: int, num_experts: int) -> np.ndarray:
        """Return each sample's number of copies for each expert, (samples, num_experts) int64."""
        return np.stack(
            [
                np.bincount(experts.reshape(-1), minlength=num_experts)
                for experts in self.experts[call]
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Skew:
    """Parameters of synthetic routing."""

    ranks: int
    """Ranks; each holds num_experts / ranks consecutive experts."""
    num_experts: int
    top_k: int
    samples: int
    """Samples of all ranks together."""
    sample_tokens: int
    """Tokens of a sample."""
    max_vio: float
    """Load of the busiest rank over the mean, minus 1."""
    calls: int = 4
    persistence: float = 0.98
    """Correlation between the popularity ranks of the experts in two calls, or in the history and a
    call."""
    locality: float = 0.2
    """How strongly the choice of experts depends on the sample, as `trace_load.locality` measures
    it."""
    seed: int = 0


def made_up(skew: Skew) -> Routes:
    """Generate synthetic routing for a case.

    Raises:
        InputError: if no routing has this MaxVio.
    """
    spread = None  # how much samples differ; found for the history, then kept
    tables = []
    for shares, random in _popularities(skew):
        if skew.locality and spread is None:
            spread = concentration(shares, skew.samples, skew.locality, skew.top_k, skew.seed)
        sample_shares = draw_sequence_shares(shares, skew.samples, spread, skew.top_k, random)
        tables.append(integer_counts(sample_shares, shares, skew))
    history, *calls = tables
    experts = np.stack([deal(table, skew.sample_tokens, skew.top_k) for table in calls])
    return Routes(experts=experts, history=history.sum(axis=0))


def made_up_totals(skew: Skew) -> list[np.ndarray]:
    """Return each expert's copies, (num_experts,) int64, in the calls of `made_up` without
    locality, without dealing them."""
    assert not skew.locality, "the popularity of later calls depends on what samples draw"
    copies = skew.sample_tokens * skew.top_k * skew.samples
    _, *calls = [_rounded(shares * copies) for shares, _ in _popularities(skew)]
    return calls


def _popularities(skew: Skew) -> Iterator[tuple[np.ndarray, np.random.Generator]]:
    """Yield each expert's share of the copies, (num_experts,), in the history and then in each
    call, and what draws them."""
    per_rank = skew.num_experts // skew.ranks
    # a token sends at most one copy to each of the busiest rank's experts
    most_on_one_rank = min(1.0, per_rank / skew.top_k)
    most = skew.ranks * most_on_one_rank - 1
    if not 0 <= skew.max_vio <= most:
        raise InputError(
            f"max_vio={skew.max_vio:g}: {skew.ranks} ranks of {per_rank} experts with "
            f"top_k={skew.top_k} allow 0 to {most:g}"
        )
    random = np.random.default_rng([skew.seed, round(1000 * skew.max_vio)])
    lasting = random.normal(size=skew.num_experts)
    for _ in range(skew.calls + 1):
        fresh = random.normal(size=len(lasting))
        mixed = np.sqrt(skew.persistence) * lasting + np.sqrt(1 - skew.persistence) * fresh
        places = np.argsort(np.argsort(-mixed))  # the largest value is in place 0
        yield zipf_shares(hot_experts_on_one_rank(places, skew), skew), random


def recorded(
    trace: Trace, layer: int, steps: tuple[int, ...], history_step: int, samples: int
) -> Routes:
    """Return the routing of some steps of a trace.

    Args:
        trace: holds counts, or the experts of each token. In both cases a sample's copies are dealt
            to its tokens anew.
        layer: MoE layer, counted from 0.
        steps: steps of the trace, one call each.
        history_step: the step from which an expert placement may learn.
        samples: how many of a step's samples to use, the first ones.
    """
    shape = trace.shape
    tables = [trace.samples(layer, step)[:samples] for step in steps]
    experts = np.stack([deal(table, shape.seq_len, shape.top_k) for table in tables])
    return Routes(experts=experts, history=trace.samples(layer, history_step).sum(axis=0))


def recorded_shares(
    trace: Trace, layer: int, step: int, ranks: int, experts_per_rank: int
) -> np.ndarray:
    """Return each expert's share of the copies, (ranks * experts_per_rank,), from a trace of the
    copies that each rank computed.

    If `ranks` is larger than the recorded number, the recorded loads are repeated; if it is
    smaller, the first ones are used. How a rank's load splits over its experts is not recorded, so
    it is split evenly.

    Args:
        trace: counts per rank, stored as one expert per rank (`moesaic_lab.traces.published`).
        layer: MoE layer, counted from 0.
        ranks: number of ranks that hold experts.
        experts_per_rank: experts per rank.
    """
    loads = trace.samples(layer, step).sum(axis=0)
    rank_loads = np.resize(loads, ranks)  # repeated or cut
    expert_shares = rank_loads / (rank_loads.sum() * experts_per_rank)
    return np.repeat(expert_shares, experts_per_rank)


def identical_counts(shares: np.ndarray, ranks: int, copies: int) -> np.ndarray:
    """Return the number of copies of each rank for each expert, (ranks, num_experts) int64, if all
    ranks route identically.

    Args:
        shares: (num_experts,) share of the copies for each expert.
        ranks: number of ranks with tokens.
    """
    return np.tile(_rounded(shares * copies), (ranks, 1))


def by_shares(shares: np.ndarray, skew: Skew) -> Routes:
    """Return routing with given shares of the experts, which are the same in all samples.

    Args:
        shares: (calls + 1, num_experts) share of each expert; the first row is for the history.
            Shares above 1 / top_k are capped, since a token chooses an expert once.
        skew: the sizes. Its popularity parameters are not read.
    """
    tables = []
    for call_shares in shares:
        sample_shares = capped(call_shares[None], skew.top_k)  # (1, num_experts)
        all_samples = np.tile(sample_shares, (skew.samples, 1))
        tables.append(integer_counts(all_samples, sample_shares[0], skew))
    history, *calls = tables
    experts = np.stack([deal(table, skew.sample_tokens, skew.top_k) for table in calls])
    return Routes(experts=experts, history=history.sum(axis=0))


def hot_experts_on_one_rank(places: np.ndarray, skew: Skew) -> np.ndarray:
    """Return popularity ranks in which one rank holds the `top_k` most popular experts, or as many
    as fit on it.

    A token may not choose an expert twice. If these experts were on different ranks, one rank could
    get no more than 1 / top_k of all copies.

    Args:
        places: (num_experts,) int64 popularity rank of each expert.
        skew: the sizes.
    """
    per_rank = skew.num_experts // skew.ranks
    places = places.copy()
    hottest = int(places.argmin())
    first = hottest // per_rank * per_rank  # of the experts on the hottest one's rank
    on_hot_rank = range(first, first + per_rank)
    for place in range(1, min(skew.top_k, per_rank)):
        (holder,) = np.flatnonzero(places == place).tolist()
        if holder not in on_hot_rank:
            coldest = max(on_hot_rank, key=lambda expert: places[expert])
            places[[coldest, holder]] = places[[holder, coldest]]  # swaps them
    return places


def zipf_shares(places: np.ndarray, skew: Skew) -> np.ndarray:
    """Return each expert's share of the copies, (num_experts,), by Zipf's law with the exponent
    that gives the MaxVio, found by bisection."""

    def max_vio_at(exponent: float) -> float:
        loads = popularity(places, exponent, skew.top_k).reshape(skew.ranks, -1).sum(axis=1)
        return float(loads.max() * skew.ranks - 1)

    low = 0.0
    high = STEEPEST
    for _ in range(60):
        middle = (low + high) / 2
        if max_vio_at(middle) < skew.max_vio:
            low = middle
        else:
            high = middle
    return popularity(places, high, skew.top_k)


def integer_counts(own: np.ndarray, shares: np.ndarray, skew: Skew) -> np.ndarray:
    """Return integer counts close to every sample's shares, (samples, num_experts) int64, with
    exact row and column sums.

    Args:
        own: (samples, num_experts) shares of each sample.
        shares: (num_experts,) shares over all samples.
        skew: gives the number of copies.
    """
    copies = skew.sample_tokens * skew.top_k  # of a sample
    totals = _rounded(shares * copies * skew.samples)
    table = np.stack([_rounded(row * copies, skew.sample_tokens) for row in own])
    exact = own * copies
    excess = table.sum(axis=0) - totals
    # Rows sum up already. In one sample after another, a copy for the expert with most excess goes
    # to the one that lacks most, where that moves the sample's counts closest to the exact ones.
    while excess.any():
        down = int(excess.argmax())
        up = int(excess.argmin())
        is_possible = (table[:, down] > 0) & (table[:, up] < skew.sample_tokens)
        gain = (table[:, down] - exact[:, down]) - (table[:, up] - exact[:, up])
        assert is_possible.any(), "no sample can exchange a copy"
        sample = int(np.where(is_possible, gain, -np.inf).argmax())
        table[sample, down] -= 1
        table[sample, up] += 1
        excess[down] -= 1
        excess[up] += 1
    return table


def deal(table: np.ndarray, tokens: int, top_k: int) -> np.ndarray:
    """Deal each sample's copies to its tokens, (samples, tokens, top_k) int64, so that no token
    gets an expert twice.

    Args:
        table: (samples, num_experts) copies. Each row sums to `tokens * top_k`, and no entry
            exceeds `tokens`.
        tokens: tokens per sample.
        top_k: experts per token.
    """
    assert (table.sum(axis=1) == tokens * top_k).all(), (
        "a token of a sample was not sent to top_k experts"
    )
    assert table.max() <= tokens, "a sample has more copies for an expert than tokens"
    experts = np.arange(table.shape[1])
    # Copies are sorted by expert and dealt one per token in turn, so two copies of an expert never
    # meet in one token.
    return np.stack([np.repeat(experts, row).reshape(top_k, tokens).T for row in table])


def max_vio(counts: np.ndarray, ranks: int) -> float:
    """Return the load of the busiest rank over the mean, minus 1.

    Args:
        counts: (origins, num_experts) copies.
        ranks: number of ranks; each holds num_experts / ranks consecutive experts.
    """
    loads = counts.sum(axis=0).reshape(ranks, -1).sum(axis=1)
    return float(loads.max() / loads.mean() - 1)


def _rounded(exact: np.ndarray, most: int | None = None) -> np.ndarray:
    """Return the integers closest to `exact` with the same sum and none above `most`, by the method
    of largest remainders."""
    rounded = np.floor(exact + 1e-9).astype(np.int64)
    missing = round(float(exact.sum())) - int(rounded.sum())
    while missing > 0:  # more than once if few entries have room
        has_room = np.ones(len(exact), dtype=bool) if most is None else rounded < most
        assert has_room.any(), "more copies than may be"
        # one more for the entries that were rounded down most
        order = np.argsort(np.where(has_room, rounded - exact, np.inf), kind="stable")
        chosen = order[: min(missing, int(has_room.sum()))]
        rounded[chosen] += 1
        missing -= len(chosen)
    return rounded
