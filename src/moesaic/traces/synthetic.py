"""Routing made up: skewed, drifting, local to sequences, or of a given MaxVio. Seeded; for benchmarks and for trying plans.

popularity  Zipf: the i-th most popular expert has a share of 1 / i^skew, but no more than 1 / top_k, since a token
            chooses an expert at most once. Which expert is the i-th follows from a latent value per expert that keeps
            its distribution while it moves (an autoregressive process), so drift changes who is hot, not how hot.
locality    every sequence draws its own shares from Dirichlet(c * popularity), scaled so that all sequences together have
            the popularity that was asked for; c is solved for, so that `trace_load.locality` finds what was asked for.
tokens      systematic sampling (Madow 1949): a token's top_k distinct experts, each with exactly its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.load import locality
from moesaic.traces.trace import Holds, Trace, TraceSegment, TraceShape

TINY = 1e-4
"""Of each sequence's shares, spread as the popularity is: so that shares can be scaled to any popularity."""
SOFTNESS = 0.1
"""Of the ranks of drifting experts, in standard deviations of the latent values: neighbours change places over some steps."""
STEEPEST = 60.0
"""Largest exponent that is tried: all but the top_k most popular experts get nothing then."""


@dataclass(frozen=True, kw_only=True)
class SyntheticRouting:
    """What routing to make up."""

    steps: int = 100
    """Optimizer steps."""
    num_layers: int = 1
    """MoE layers; each has a popularity of its own."""
    num_experts: int = 16
    """Experts per layer."""
    top_k: int = 2
    """Experts per token."""
    sequences: int = 16
    """Sequences per micro-batch, over all ranks."""
    seq_len: int = 256
    """Tokens per sequence."""
    groups: int = 1
    """Data-parallel groups; must divide the sequences."""
    skew: float = 0.0
    """Exponent of Zipf's law: 0 is even, 1 gives the most popular of 16 experts 4.7 times the mean."""
    max_vio: float | None = None
    """Largest load over mean load minus 1, instead of a skew: the exponent is solved for, in every step."""
    drift: float = 0.0
    """How far popularity moves in a step: 0 never, 1 a fresh order of experts in every step."""
    locality: float = 0.0
    """How much of the choice is a matter of the sequence: 0 all have the same taste, towards 1 each has `top_k` experts of
    its own; as far as few sequences can have that and the popularity too."""
    tokens: bool = False
    """Hold every token's experts, not only counts."""
    seed: int = 0
    """Of all draws."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups < 1 or self.sequences % self.groups:
            raise InputError(
                f"synthetic: steps={self.steps}, groups={self.groups}: give at least one step, and groups that divide the "
                f"{self.sequences} sequences"
            )
        if self.seed < 0:
            raise InputError(f"synthetic: seed={self.seed}: must be at least 0")
        for name, most in (("drift", 1.0), ("locality", 0.99)):
            if not 0 <= getattr(self, name) <= most:
                raise InputError(f"synthetic: {name}={getattr(self, name)}: choose 0 to {most:g}")
        if self.max_vio is None:
            if not 0 <= self.skew <= STEEPEST:
                raise InputError(
                    f"skew={self.skew}: choose an exponent from 0 (even) to {STEEPEST:g}; 1 is already steep"
                )
        elif self.skew:
            raise InputError(f"synthetic: skew={self.skew} and max_vio={self.max_vio}: give one of them")
        else:
            most = min(self.num_experts / self.shape.top_k, self.num_experts) - 1
            if not 0 <= self.max_vio <= most + 1e-9:
                raise InputError(f"max_vio={self.max_vio}: so many experts and experts per token allow 0 to {most:.4g}")

    @property
    def shape(self) -> TraceShape:
        """Of the trace."""
        return TraceShape(
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            sequences=self.sequences,
            seq_len=self.seq_len,
        )


def make_trace(config: SyntheticRouting) -> Trace:
    """Make a trace in memory."""
    return Trace.of(make_segment(config), "synthetic")


def make_segment(config: SyntheticRouting) -> TraceSegment:
    """Make the one segment of a trace, for `write_segment`."""
    shape = config.shape
    holds: Holds = "tokens" if config.tokens else "counts"
    table = np.zeros((config.steps, *shape.table(holds)), dtype=shape.dtype(holds))
    for layer in range(config.num_layers):
        random = np.random.default_rng([config.seed, layer])
        spread = None
        for step, shares in enumerate(_popularities(config, random)):
            if config.locality and spread is None:
                spread = concentration(shares, config.sequences, config.locality, config.top_k, config.seed)
            for number, own in enumerate(tastes(shares, config.sequences, spread, config.top_k, random)):
                experts = draw_tokens(own, config.seq_len, config.top_k, random)
                if config.tokens:
                    table[step, 0, layer, number * config.seq_len : (number + 1) * config.seq_len] = experts
                else:
                    table[step, 0, layer, number] = np.bincount(experts.reshape(-1), minlength=config.num_experts)
    source = {"synthetic": {name: getattr(config, name) for name in ("skew", "max_vio", "drift", "locality", "seed")}}
    return TraceSegment(shape, holds, np.arange(config.steps), table, config.groups, source)


def popularity(places: np.ndarray, skew: float, top_k: int) -> np.ndarray:
    """Return the experts' shares of the copies, (num_experts,), none above 1 / top_k.

    Args:
        places: (num_experts,) each expert's place in popularity, from 0; not whole where experts change places.
        skew: exponent of Zipf's law.
        top_k: experts per token.
    """
    return capped(np.exp(-skew * np.log1p(places - places.min()))[None], top_k)[0]


def capped(shares: np.ndarray, top_k: int) -> np.ndarray:
    """Return each row scaled to add up to 1 with no entry above 1 / top_k: what is above goes to the others in proportion.

    Args:
        shares: (rows, num_experts), not negative, at least `top_k` above 0 in each row.
        top_k: experts per token.
    """
    limit = 1 / top_k
    full = np.zeros(shares.shape, dtype=bool)
    for _ in range(top_k):
        rest = np.where(full, 0.0, shares)
        left = 1 - full.sum(axis=1, keepdims=True) * limit
        total = rest.sum(axis=1, keepdims=True)
        scaled = np.where(full, limit, rest * (left / np.where(total > 0, total, 1)))
        above = scaled > limit
        if not above.any():
            break
        full |= above
    return np.minimum(scaled, limit)


def concentration(shares: np.ndarray, sequences: int, local: float, top_k: int, seed: int) -> float:
    """Return the concentration of the Dirichlet distribution by which sequences have a locality; the nearest there is.

    Args:
        shares: (num_experts,) of all sequences together.
        sequences: of a micro-batch.
        local: as `trace_load.locality` measures it.
        top_k: experts per token.
        seed: of the draws that it is tried on.
    """

    def found(spread: float) -> float:
        random = np.random.default_rng(seed)
        draws = range(-(-64 // sequences))
        return float(np.mean([locality(tastes(shares, sequences, spread, top_k, random) * 1e9, top_k) for _ in draws]))

    # No bisection: with few sequences a concentration near 0 leaves none of the locality that a larger one has.
    return min(np.geomspace(0.01, 1000, 48).tolist(), key=lambda spread: abs(found(spread) - local))


def tastes(
    shares: np.ndarray, sequences: int, spread: float | None, top_k: int, random: np.random.Generator
) -> np.ndarray:
    """Return every sequence's shares, (sequences, num_experts), whose mean is `shares`.

    Args:
        shares: (num_experts,) of all sequences together.
        sequences: how many.
        spread: concentration of the Dirichlet distribution; None for the same taste everywhere.
        top_k: experts per token; no share exceeds 1 / top_k.
        random: draws them.
    """
    if spread is None:
        return np.tile(shares, (sequences, 1))
    own = (1 - TINY) * dirichlet_capped(spread * shares, sequences, top_k, random) + TINY * shares
    for _ in range(60):  # iterative proportional fitting
        own = capped(own * (shares / np.maximum(own.mean(axis=0), 1e-300)), top_k)
    return own


def dirichlet_capped(alpha: np.ndarray, rows: int, top_k: int, random: np.random.Generator) -> np.ndarray:
    """Return draws from a Dirichlet distribution, (rows, num_experts), capped as `capped` does.

    In logarithms, since of small parameters all draws but the largest are 0 in floating point, and a cap needs the next
    ones: log Gamma(a) is drawn as log Gamma(a + 1) + log(uniform) / a.

    Args:
        alpha: (num_experts,) parameters.
        rows: how many draws.
        top_k: experts per token.
        random: draws them.
    """
    alpha = np.tile(np.maximum(alpha, 1e-12), (rows, 1))
    logs = np.log(random.standard_gamma(alpha + 1)) + np.log(random.random(alpha.shape)) / alpha
    full = np.zeros(logs.shape, dtype=bool)
    shares = np.zeros(logs.shape)
    for place in range(top_k):
        rest = np.where(full, -np.inf, logs)
        parts = np.exp(rest - rest.max(axis=1, keepdims=True))
        left = 1 - full.sum(axis=1, keepdims=True) / top_k
        shares = np.where(full, 1 / top_k, parts / parts.sum(axis=1, keepdims=True) * left)
        if place + 1 < top_k:
            full |= shares > 1 / top_k
    return np.minimum(shares, 1 / top_k)


def draw_tokens(shares: np.ndarray, tokens: int, top_k: int, random: np.random.Generator) -> np.ndarray:
    """Return a sequence's choices, (tokens, top_k) int64, distinct within a token.

    Tokens' starting points are spread evenly, so that counts follow the shares to within a copy per expert and pair.

    Args:
        shares: (num_experts,) of the sequence, none above 1 / top_k.
        tokens: how many.
        top_k: experts per token.
        random: draws them.
    """
    order = random.permutation(len(shares))
    ends = np.cumsum(shares[order]) * top_k
    ends *= top_k / ends[-1]
    start = (random.permutation(tokens) + random.random(tokens)) / tokens
    points = start[:, None] + np.arange(top_k)
    found = np.minimum(np.searchsorted(ends, points, side="right"), len(shares) - 1)
    chosen: np.ndarray = random.permuted(order[found], axis=1)
    return chosen


def _popularities(config: SyntheticRouting, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the shares of every step."""
    latent = random.normal(size=config.num_experts)
    keep = np.sqrt(1 - config.drift**2)
    for _ in range(config.steps):
        if config.drift == 0:
            places = np.argsort(np.argsort(-latent)).astype(np.float64)
        else:
            ahead = (latent[None, :] - latent[:, None]) / SOFTNESS
            places = (1 / (1 + np.exp(-np.clip(ahead, -50, 50)))).sum(axis=1) - 0.5
        if config.max_vio is None:
            yield popularity(places, config.skew, config.top_k)
        else:
            yield _solved(places, config.top_k, config.max_vio)
        latent = keep * latent + config.drift * random.normal(size=config.num_experts)


def _solved(places: np.ndarray, top_k: int, max_vio: float) -> np.ndarray:
    """Return the shares of which the largest is `max_vio` above the mean."""

    def violation(skew: float) -> float:
        return float(popularity(places, skew, top_k).max() * len(places) - 1)

    low, high = 0.0, STEEPEST
    if violation(high) < max_vio:  # the limit itself, or experts that change places in this very step
        return popularity(places, high, top_k)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if violation(middle) < max_vio else (low, middle)
    return popularity(places, high, top_k)
