"""The route stage, which turns tokens into a `Routing`. All discrete results go into a `RoutingRecord` that can be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.routing.capacity import AbstractCapacity, Dropless, admit, count
from moesaic.routing.losses import AbstractLoss, RouterStatistics
from moesaic.routing.peers import Gathered, Peers, kept_copies, places_before
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Choice, Routing, Scores


class RoutingRecord(NamedTuple):
    """All discrete results of one call, which a recomputation replays instead of deciding again."""

    noise: Tensor | None
    """The random numbers from the router's `draw`."""
    choice: Choice
    """The chosen copies."""
    requested: Tensor
    """(E,) int64: copies per expert before capacity, summed over all ranks."""
    num_valid: Tensor
    """() int64: tokens that are not padding, summed over all ranks."""
    nonfinite: Tensor
    """() int64: copies whose routing weight is NaN or infinite, summed over all ranks."""
    capacity: Tensor | None
    """() int64: the most rows that an expert takes; None if dropless."""
    sent: Tensor | None
    """(N,) bool: the copies that are sent; None for all copies."""
    earlier_counts: Tensor | None
    """(E,) int64: copies of the optimizer step before this call; None if no loss reads them."""
    gathered: Gathered | None
    """The counts and sums that the ranks exchanged; None on one rank."""
    by_rank: Tensor | None
    """(P, E) int64: copies that each rank sends to each expert; None on one rank."""


class Routed(NamedTuple):
    """The result of the route stage for one call."""

    routing: Routing
    record: RoutingRecord
    loss: Tensor | None
    """(), differentiable: the sum of coefficient * loss; None without auxiliary losses."""


class RoutedCall(NamedTuple):
    """A call of a layer whose tokens have been routed: the input of the later stages."""

    x: Tensor
    """(..., dim): the input of the layer."""
    x_TD: Tensor
    """(tokens, dim): a view of `x`. All stages read the input through this one view, and its gradients add up in place."""
    mask: Tensor | None
    """bool, in the shape of `x` without dim, False for padding; None if no token is padding."""
    token_ids: Tensor | None
    """int64, in the shape of `x` without dim; None if the caller gave no ids."""
    routed: Routed
    """The result of the route stage for all tokens of `x`."""
    padded_rows: int | None
    """Rows that each expert is sent under a padded capacity; None under other capacities."""


@dataclass(frozen=True)
class TokenInfo:
    """Data about the tokens of a call, besides their activations, that the route stage reads."""

    valid_T: Tensor | None = None
    """(tokens,) bool: False for padding, which is neither routed nor counted; None if no token is padding."""
    token_ids: Tensor | None = None
    """(tokens,) int64: vocabulary ids, for routers that read them."""
    num_sequences: int = 1
    """Number of sequences in the whole batch, all of equal length, for losses per sequence."""
    earlier_counts: Tensor | None = None
    """(num_experts,): copies per expert since the last optimizer step, over all ranks, for losses over the global batch."""
    step_total: Callable[[Tensor], Tensor] | None = None
    """Sums the step's counts over the ranks that train the layer on other tokens and are not among the peers of the route
    stage; None if no such ranks exist."""
    noise: Tensor | None = None
    """The random numbers from the router's `draw` for these tokens; None to draw them in this call."""
    first_token: int = 0
    """Position of the first of these tokens in the whole batch, if these tokens are a slice of the batch."""
    sequence_length: int | None = None
    """Sequence length of the whole batch; None if these tokens are the whole batch."""


def route(
    router: AbstractRouter,
    x_TD: Tensor,
    *,
    top_k: int,
    capacity: AbstractCapacity,
    losses: Sequence[AbstractLoss] = (),
    batch: TokenInfo = TokenInfo(),
    replay: RoutingRecord | None = None,
    peers: Peers | None = None,
) -> Routed:
    """Route tokens: score and choose experts, admit copies, compute routing weights and auxiliary losses.

    All computation is in float32 (float64 for float64 inputs), whatever the autocast state.

    Args:
        router: scores and chooses the experts.
        x_TD: (tokens, dim), any floating dtype.
        top_k: experts per token.
        capacity: limits the rows per expert.
        losses: the auxiliary losses to evaluate.
        batch: padding, token ids and sequences.
        replay: the record of an earlier run of the same call, whose discrete results are used instead of new ones.
        peers: the ranks that route the other tokens of the call; None on one rank.
    """
    with torch.autocast(device_type=x_TD.device.type, enabled=False):
        x = _router_input(x_TD, batch.valid_T)
        noise = batch.noise if replay is None else replay.noise
        if replay is None and noise is None:
            noise = router.draw(len(x), x.device)
        scores = router.scores(x, noise, batch.token_ids)
        choice = router.choose(scores, top_k, batch.valid_T, noise) if replay is None else replay.choice
        weight_N = router.weigh(scores, choice, top_k)
        alive_N = _alive(choice, batch.valid_T)
        earlier = batch.earlier_counts if replay is None else replay.earlier_counts
        if replay is None and earlier is not None and batch.step_total is not None:
            own_counts = count(choice.expert, alive_N, router.num_experts)
            earlier = batch.step_total(earlier + own_counts) - own_counts
        sums = _sums(losses, scores, choice, weight_N, alive_N, batch, earlier)
        record = replay
        if record is None:
            rules = _Rules(top_k, capacity, len(x), router.num_experts, batch.valid_T, peers)
            record = _decide(rules, choice, weight_N.detach(), alive_N, sums)
            record = record._replace(noise=noise, earlier_counts=None if earlier is None else earlier.clone())
        if sums is not None and peers is not None and record.gathered is not None:
            sums = record.gathered.statistics(sums, peers, record.earlier_counts)
        loss, values = _evaluate(losses, sums)
    routing = _routing(record, weight_N, len(x), router.num_experts, values, scores.logits)
    return Routed(routing, record, loss)


def route_chosen(expert_TK: Tensor, weight_TK: Tensor, num_experts: int, peers: Peers | None = None) -> Routed:
    """Return the dropless routing of tokens whose experts and weights the caller has chosen; exchanges counts with the peers.

    Args:
        expert_TK: (tokens, K) int64, the distinct experts of each token.
        weight_TK: (tokens, K) routing weights, differentiable.
        peers: as for `route`.
    """
    num_tokens, top_k = expert_TK.shape
    index = torch.arange(num_tokens * top_k, device=expert_TK.device)
    choice = Choice(index // max(top_k, 1), expert_TK.reshape(-1), index % max(top_k, 1), per_token=top_k)
    weight_N = weight_TK.reshape(-1).to(torch.promote_types(weight_TK.dtype, torch.float32))
    detached = weight_N.detach()
    rules = _Rules(top_k, Dropless(), num_tokens, num_experts, None, peers)
    record = _decide(rules, choice, detached, None, None)
    return Routed(_routing(record, weight_N, num_tokens, num_experts, {}, None), record, None)


def _router_input(x_TD: Tensor, valid_T: Tensor | None) -> Tensor:
    """Return the tokens in float32 or float64, with padding set to zero: padding may hold NaN, and 0 * NaN is NaN."""
    x = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    return x if valid_T is None else x.masked_fill(~valid_T.unsqueeze(1), 0.0)


class _Rules(NamedTuple):
    """What decides, besides choices and weights, which copies of a call are sent; the fields are those of `route`."""

    top_k: int
    capacity: AbstractCapacity
    num_tokens: int
    num_experts: int
    valid_T: Tensor | None
    peers: Peers | None


def _decide(
    rules: _Rules, choice: Choice, weight_N: Tensor, alive_N: Tensor | None, sums: RouterStatistics | None
) -> RoutingRecord:
    """Count the copies, exchange the counts with the other ranks and admit copies. The record is not differentiable."""
    top_k, capacity, num_tokens, num_experts, valid, peers = rules
    nonfinite = _nonfinite(weight_N, alive_N)
    gathered = before_KE = rows = None
    if peers is None:
        num_valid = torch.full((), num_tokens, device=weight_N.device) if valid is None else valid.sum()
        requested = count(choice.expert, alive_N, num_experts)
        rows = capacity.rows(requested, num_valid, top_k)
    else:
        choices = top_k if capacity.spans_mesh else 1
        cell = choice.slot * num_experts + choice.expert if choices > 1 else choice.expert
        counts_KE = count(cell, alive_N, choices * num_experts).view(choices, -1)
        extras = peers.extras(choice, alive_N, num_tokens, num_experts, may_drop=not capacity.never_drops)
        gathered = Gathered.exchange(
            peers, counts_KE, None if valid is None else valid.sum(), num_tokens, nonfinite, sums, extras
        )
        requested, num_valid, nonfinite = gathered.counts.sum((0, 1)), gathered.valid.sum(), gathered.nonfinite.sum()
        if capacity.spans_mesh:
            rows = capacity.rows(requested, num_valid, top_k)
            before_KE = places_before(gathered.counts)[peers.place]
        elif not capacity.never_drops:
            limited = gathered.tokens if capacity.is_padded else gathered.valid
            rows = capacity.rows(counts_KE.sum(0), limited[peers.place], top_k)
    best_T = None
    if capacity.admits_by_score and rows is not None:
        best_T = _best_weight(weight_N, choice, num_tokens)
    sent = admit(choice, alive_N, rows, best_T, num_experts, before_KE)
    by_rank = _by_rank(gathered, capacity, top_k)
    if gathered is not None:
        gathered = replace(gathered, sent=by_rank)
    return RoutingRecord(None, choice, requested, num_valid, nonfinite, rows, sent, None, gathered, by_rank)


def _by_rank(gathered: Gathered | None, capacity: AbstractCapacity, top_k: int) -> Tensor | None:
    """Return the copies that each rank sends to each expert, (P, E) int64; None on one rank."""
    if gathered is None:
        return None
    counts_PKE = gathered.counts
    if capacity.never_drops:
        return kept_copies(counts_PKE, None)
    if capacity.spans_mesh:
        rows = capacity.rows(counts_PKE.sum((0, 1)), gathered.valid.sum(), top_k)
        return kept_copies(counts_PKE, rows)
    limited = gathered.tokens if capacity.is_padded else gathered.valid
    of_ranks = [capacity.rows(counts_E, tokens, top_k) for counts_E, tokens in zip(counts_PKE.sum(1), limited)]
    limits = [rows for rows in of_ranks if rows is not None]
    return kept_copies(counts_PKE, torch.stack(limits) if limits else None)


def _routing(
    record: RoutingRecord,
    weight_N: Tensor,
    num_tokens: int,
    num_experts: int,
    losses: dict[str, Tensor],
    logits: Tensor | None,
) -> Routing:
    """Return the routing that a record and the routing weights describe: the rows that this rank sends."""
    choice, sent = record.choice, record.sent
    token, expert, weight = choice.token, choice.expert, weight_N
    has_unsent = sent is not None and expert.device.type != "cpu"
    if sent is not None and has_unsent:
        expert = expert.masked_fill(~sent, num_experts)
    elif sent is not None:
        indices = sent.nonzero().squeeze(1)
        token, expert, weight = token[indices], expert[indices], weight[indices]
    if record.capacity is None and (sent is None or record.by_rank is not None):
        counts = record.requested  # nothing is dropped
    else:
        counts_here = count(expert, None, num_experts + 1)[:num_experts]
        counts = counts_here if record.by_rank is None else record.by_rank.sum(0)
    return Routing(
        token=token,
        expert=expert,
        weight=weight,
        num_tokens=num_tokens,
        num_experts=num_experts,
        counts=counts,
        requested=record.requested,
        num_valid=record.num_valid,
        nonfinite=record.nonfinite,
        capacity=record.capacity,
        rows_per_token=choice.per_token if sent is None or has_unsent else None,
        has_unsent=has_unsent,
        logits=logits,
        losses=losses,
    )


def _alive(choice: Choice, valid_T: Tensor | None) -> Tensor | None:
    """Return the copies that are neither padding nor held back by the router, (N,) bool; None for all copies."""
    if valid_T is None:
        return choice.sent
    alive = valid_T[choice.token]
    return alive if choice.sent is None else alive & choice.sent


def _nonfinite(weight_N: Tensor, alive_N: Tensor | None) -> Tensor:
    """Return the number of copies whose routing weight is NaN or infinite, () int64, without a host sync."""
    is_wrong = ~weight_N.isfinite()
    return (is_wrong if alive_N is None else is_wrong & alive_N).sum()


def _best_weight(weight_N: Tensor, choice: Choice, num_tokens: int) -> Tensor:
    """Return each token's largest weight, (tokens,); 0 for a token that no expert chose."""
    zeros = torch.zeros(num_tokens, dtype=weight_N.dtype, device=weight_N.device)
    return zeros.scatter_reduce(0, choice.token, weight_N, "amax")


def _sums(
    losses: Sequence[AbstractLoss],
    scores: Scores,
    choice: Choice,
    weight_N: Tensor,
    alive_N: Tensor | None,
    batch: TokenInfo,
    earlier_counts: Tensor | None,
) -> RouterStatistics | None:
    """Return the statistics of this rank's tokens that the losses read; None without losses."""
    if not losses:
        return None
    by_sequence = any(loss.needs_sequences for loss in losses)
    return RouterStatistics.of(
        scores,
        choice,
        weight_N,
        alive_N,
        batch.valid_T,
        num_sequences=batch.num_sequences if by_sequence else 1,
        earlier_counts_E=earlier_counts,
        with_importance=any(loss.needs_importance for loss in losses),
        with_logsumexp=any(loss.needs_logsumexp for loss in losses),
        first_token=batch.first_token if by_sequence else 0,
        sequence_length=batch.sequence_length if by_sequence else None,
    )


def _evaluate(losses: Sequence[AbstractLoss], sums: RouterStatistics | None) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the weighted sum of the losses and each one's detached value."""
    if sums is None:
        return None, {}
    values = [loss.value(sums) for loss in losses]
    total = reduce(add, [loss.coefficient * value for loss, value in zip(losses, values)])
    return total, {loss.name: value.detach() for loss, value in zip(losses, values)}
