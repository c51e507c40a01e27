"""Synthetic routing with a given skew or MaxVio, drift and locality. It is seeded, for benchmarks
and for comparing plans.

popularity  Zipf: the i-th most popular expert has a share proportional to 1 / i^skew, but at most 1
            / top_k, since a token chooses an expert at most once. Experts are ranked by latent
            values that follow a stationary autoregressive process. Drift therefore changes which
            experts are popular, not how popular they are.
locality    every sequence draws its own shares from Dirichlet(c * popularity). They are scaled to
            the given popularity over all sequences. c is chosen for `load.locality` to measure the
            given locality.
tokens      systematic sampling (Madow 1949) gives each token top_k distinct experts, each with
            exactly its share.

A share is an expert's part of the copies of a step or of a sequence, a number in 0 to 1 / top_k;
shares add up to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.load import locality
from moesaic.traces.trace import Holds, Trace, TraceSegment, TraceShape

TINY = 1e-4
"""The part of each sequence's shares that follows the popularity: no share is 0, so scaling can
reach any popularity."""
SOFTNESS = 0.1
"""How gradually drifting experts swap ranks, in standard deviations of the latent values: a swap
takes several steps."""
AT_ONCE = 1 << 16
"""Largest number of shares that the search for a concentration scales together: they stay in the
processor's cache."""
STEEPEST = 60.0
"""The largest Zipf exponent: with it only the top_k most popular experts get any copies."""


@dataclass(frozen=True, kw_only=True)
class SyntheticRouting:
    """The parameters of a synthetic trace."""

    steps: int = 100
    """Optimizer steps."""
    num_layers: int = 1
    """MoE layers; popularity is drawn separately for each."""
    num_experts: int = 16
    """Experts per layer."""
    top_k: int = 2
    """Experts per token."""
    sequences: int = 16
    """Sequences per micro-batch, over all ranks."""
    seq_len: int = 256
    """Tokens per sequence."""
    groups: int = 1
    """Data-parallel groups; their number must divide the number of sequences."""
    skew: float = 0.0
    """Exponent of Zipf's law: 0 is even, 1 gives the most popular of 16 experts 4.7 times the mean
    load."""
    max_vio: float | None = None
    """Largest load over mean load minus 1, in place of a skew; the exponent that gives it is
    computed in every step."""
    drift: float = 0.0
    """How fast popularity changes: 0 for never, 1 for an independent order of experts in every
    step."""
    locality: float = 0.0
    """How much the choice of experts depends on the sequence: at 0 all sequences choose alike, near
    1 each sequence has its own `top_k` experts. Few sequences may not reach a high locality
    together with the given popularity."""
    tokens: bool = False
    """Record every token's experts instead of counts only."""
    seed: int = 0
    """Seed of all random draws."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups < 1 or self.sequences % self.groups:
            raise InputError(
                f"synthetic: steps={self.steps}, groups={self.groups}: give at least one step, "
                f"and groups that divide the {self.sequences} sequences"
            )
        if self.seed < 0:
            raise InputError(f"synthetic: seed={self.seed}: must be at least 0")
        for name, most in (("drift", 1.0), ("locality", 0.99)):
            if not 0 <= getattr(self, name) <= most:
                raise InputError(f"synthetic: {name}={getattr(self, name)}: choose 0 to {most:g}")
        if self.max_vio is None:
            if not 0 <= self.skew <= STEEPEST:
                raise InputError(
                    f"skew={self.skew}: choose an exponent from 0 (even) to {STEEPEST:g}; 1 "
                    "is already steep"
                )
        elif self.skew:
            raise InputError(
                f"synthetic: skew={self.skew} and max_vio={self.max_vio}: give one of them"
            )
        else:
            # an expert has at most 1 / top_k of the copies, and the mean is 1 / num_experts
            most = min(self.num_experts / self.shape.top_k, self.num_experts) - 1
            if not 0 <= self.max_vio <= most + 1e-9:
                raise InputError(
                    f"max_vio={self.max_vio}: these numbers of experts and experts per token "
                    f"allow 0 to {most:.4g}"
                )

    @property
    def shape(self) -> TraceShape:
        """The sizes of the trace."""
        return TraceShape(
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            sequences=self.sequences,
            seq_len=self.seq_len,
        )


def make_trace(config: SyntheticRouting) -> Trace:
    """Make a synthetic trace in memory."""
    return Trace.of(make_segment(config), "synthetic")


def make_segment(config: SyntheticRouting) -> TraceSegment:
    """Make a synthetic trace as one segment, for `write_segment`."""
    shape = config.shape
    holds: Holds = "tokens" if config.tokens else "counts"
    table = np.zeros((config.steps, *shape.table(holds)), dtype=shape.dtype(holds))
    spreads: dict[bytes, float] = {}  # by popularity: layers often share one
    for layer in range(config.num_layers):
        random = np.random.default_rng([config.seed, layer])
        spread = None
        for step, shares in enumerate(_popularities(config, random)):
            if config.locality and spread is None:
                key = shares.tobytes()
                if key not in spreads:
                    spreads[key] = concentration(
                        shares, config.sequences, config.locality, config.top_k, config.seed
                    )
                spread = spreads[key]
            of_sequences = draw_sequence_shares(
                shares, config.sequences, spread, config.top_k, random
            )
            _fill(table[step, 0, layer], config, of_sequences, random)
    names = ("skew", "max_vio", "drift", "locality", "seed")
    source = {"synthetic": {name: getattr(config, name) for name in names}}
    return TraceSegment(shape, holds, np.arange(config.steps), table, config.groups, source)


def _fill(
    table: np.ndarray, config: SyntheticRouting, shares: np.ndarray, random: np.random.Generator
) -> None:
    """Draw the experts of a layer's tokens and write them, or their counts, into its part of the
    trace's table; `shares` are those of each sequence, (sequences, num_experts)."""
    length = config.seq_len
    for number, sequence_shares in enumerate(shares):
        experts = draw_tokens(sequence_shares, length, config.top_k, random)
        if config.tokens:
            table[number * length : (number + 1) * length] = experts
        else:
            table[number] = np.bincount(experts.reshape(-1), minlength=config.num_experts)


def popularity(places: np.ndarray, skew: float, top_k: int) -> np.ndarray:
    """Return the experts' shares of the copies, (num_experts,), none above 1 / top_k.

    Args:
        places: (num_experts,) each expert's rank by popularity, from 0; fractional while experts
            swap ranks.
        skew: exponent of Zipf's law.
        top_k: experts per token.
    """
    weights = np.exp(-skew * np.log1p(places - places.min()))  # 1 / i^skew, i from 1
    return capped(weights[None], top_k)[0]


def capped(shares: np.ndarray, top_k: int) -> np.ndarray:
    """Scale each row to a sum of 1, and cap its entries at 1 / top_k; the other entries get the
    excess in proportion.

    Args:
        shares: (..., rows, num_experts), not negative, with at least `top_k` positive entries in
            each row.
        top_k: experts per token.
    """
    limit = 1 / top_k
    is_capped = np.zeros(shares.shape, dtype=bool)
    # each pass caps an entry or ends, and at most top_k entries reach the cap
    for _ in range(top_k):
        free_shares = np.where(is_capped, 0.0, shares)
        free_sum = 1 - is_capped.sum(axis=-1, keepdims=True) * limit
        total = free_shares.sum(axis=-1, keepdims=True)
        factor = free_sum / np.where(total > 0, total, 1)  # of no use where all are capped
        scaled = np.where(is_capped, limit, free_shares * factor)
        is_above = scaled > limit
        if not is_above.any():
            break
        is_capped |= is_above
    return np.minimum(scaled, limit)


def concentration(
    shares: np.ndarray, sequences: int, wanted: float, top_k: int, seed: int
) -> float:
    """Return the concentration of the Dirichlet distribution with which sequences come nearest to a
    given locality.

    Args:
        shares: (num_experts,) the shares of all sequences together.
        sequences: sequences per micro-batch.
        wanted: the wanted value of `load.locality`.
        top_k: experts per token.
        seed: seed of the draws on which concentrations are tried.
    """

    # A grid instead of bisection: with few sequences a concentration near 0 may give less locality
    # than a larger one.
    spreads = np.geomspace(0.01, 1000, 48)
    tries = -(-64 // sequences)  # enough for at least 64 sequences
    num_shares = 48 * tries * sequences * len(shares)
    mean_localities: list[float] = []
    for part in np.array_split(spreads, min(48, 1 + num_shares // AT_ONCE)):
        drawn = []
        for spread in part.tolist():
            random = np.random.default_rng(seed)
            for _ in range(tries):
                drawn.append(dirichlet_capped(spread * shares, sequences, top_k, random))
        # `locality` expects counts, so shares are scaled to large ones
        localities = [
            locality(each * 1e9, top_k) for each in fitted(np.stack(drawn), shares, top_k)
        ]
        by_spread = np.reshape(localities, (len(part), tries))
        mean_localities += by_spread.mean(axis=1).tolist()
    nearest = np.argmin(np.abs(np.array(mean_localities) - wanted))
    return float(spreads[nearest])


def draw_sequence_shares(
    shares: np.ndarray,
    sequences: int,
    spread: float | None,
    top_k: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Draw the shares of each sequence, (sequences, num_experts). Their mean is `shares`.

    Args:
        shares: (num_experts,) the shares of all sequences together.
        sequences: the number of sequences.
        spread: concentration of the Dirichlet distribution; None to give every sequence the same
            shares.
        top_k: experts per token; no share exceeds 1 / top_k.
        random: the random number generator.
    """
    if spread is None:
        return np.tile(shares, (sequences, 1))
    return fitted(dirichlet_capped(spread * shares, sequences, top_k, random), shares, top_k)


def fitted(drawn: np.ndarray, shares: np.ndarray, top_k: int) -> np.ndarray:
    """Scale draws of sequences, (..., sequences, num_experts), so that their mean is `shares`,
    (num_experts,)."""
    drawn = (1 - TINY) * drawn + TINY * shares
    for _ in range(60):  # iterative proportional fitting
        means = drawn.mean(axis=-2, keepdims=True)
        # an expert without shares has draws of 0 after the first pass
        drawn = capped(drawn * (shares / np.maximum(means, 1e-300)), top_k)
    return drawn


def dirichlet_capped(
    alpha: np.ndarray, rows: int, top_k: int, random: np.random.Generator
) -> np.ndarray:
    """Return draws from a Dirichlet distribution, (rows, num_experts), capped like `capped`.

    They are computed from logarithms: with small parameters all entries but the largest would be 0
    in floating point, and the cap needs the next ones. log Gamma(a) is drawn as log Gamma(a + 1) +
    log(uniform) / a.

    Args:
        alpha: (num_experts,) parameters of the distribution.
        rows: the number of draws.
        top_k: experts per token.
        random: the random number generator.
    """
    alpha = np.tile(np.maximum(alpha, 1e-12), (rows, 1))  # the logarithms divide by it
    logs = np.log(random.standard_gamma(alpha + 1))
    uniform = random.random(alpha.shape)
    logs = logs + np.log(uniform) / alpha
    is_capped = np.zeros(logs.shape, dtype=bool)
    shares = np.zeros(logs.shape)
    # as in `capped`: the entries below the cap share what the capped ones leave
    for place in range(top_k):
        free_logs = np.where(is_capped, -np.inf, logs)
        parts = np.exp(free_logs - free_logs.max(axis=1, keepdims=True))
        free_sum = 1 - is_capped.sum(axis=1, keepdims=True) / top_k
        free_shares = parts / parts.sum(axis=1, keepdims=True) * free_sum
        shares = np.where(is_capped, 1 / top_k, free_shares)
        if place + 1 < top_k:
            is_capped |= shares > 1 / top_k
    return np.minimum(shares, 1 / top_k)


def draw_tokens(
    shares: np.ndarray, tokens: int, top_k: int, random: np.random.Generator
) -> np.ndarray:
    """Draw the experts of a sequence's tokens, (tokens, top_k) int64, distinct within a token.

    The tokens' starting points are evenly spread, so an expert's count differs from its share by
    less than two copies.

    Args:
        shares: (num_experts,) the shares of the sequence, none above 1 / top_k.
        tokens: the number of tokens.
        top_k: experts per token.
        random: the random number generator.
    """
    # the experts lie in a random order on a line of length top_k, each with its share, at most 1
    order = random.permutation(len(shares))
    ends = np.cumsum(shares[order]) * top_k
    ends *= top_k / ends[-1]
    # a token takes the experts at top_k points whose distance is 1, so they are distinct
    start = (random.permutation(tokens) + random.random(tokens)) / tokens
    points = start[:, None] + np.arange(top_k)
    index = np.searchsorted(ends, points, side="right")
    index = np.minimum(index, len(shares) - 1)
    chosen: np.ndarray = random.permuted(order[index], axis=1)
    return chosen


def _popularities(config: SyntheticRouting, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the experts' shares of the copies in every step, (num_experts,) each."""
    latent = random.normal(size=config.num_experts)
    keep = np.sqrt(1 - config.drift**2)  # keeps the latent values' variance at 1
    for _ in range(config.steps):
        if config.drift == 0:  # places by popularity, from 0
            places = np.argsort(np.argsort(-latent)).astype(np.float64)
        else:  # a soft rank: how many experts are ahead, where near ones count in part
            ahead = (latent[None, :] - latent[:, None]) / SOFTNESS
            is_ahead = 1 / (1 + np.exp(-np.clip(ahead, -50, 50)))
            places = is_ahead.sum(axis=1) - 0.5  # without the expert's own half
        if config.max_vio is None:
            yield popularity(places, config.skew, config.top_k)
        else:
            yield _shares_with_max_vio(places, config.top_k, config.max_vio)
        latent = keep * latent + config.drift * random.normal(size=config.num_experts)


def _shares_with_max_vio(places: np.ndarray, top_k: int, max_vio: float) -> np.ndarray:
    """Return Zipf shares with the given MaxVio, or the nearest if some experts are swapping
    ranks."""

    def violation(skew: float) -> float:
        return float(popularity(places, skew, top_k).max() * len(places) - 1)

    low = 0.0
    high = STEEPEST
    if violation(high) < max_vio:  # max_vio is the limit itself, or experts swap ranks in this step
        return popularity(places, high, top_k)
    for _ in range(60):
        middle = (low + high) / 2
        if violation(middle) < max_vio:
            low = middle
        else:
            high = middle
    return popularity(places, high, top_k)
