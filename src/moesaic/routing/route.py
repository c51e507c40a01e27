"""The route stage, which turns tokens into a `Routing`. All discrete results go into a
`RoutingRecord` that can be replayed.

Shape letters are those of `routing.py`: T tokens, E experts, K per token, N copies, P ranks. Copies
are alive if they are neither padding nor held back by the router, and sent if the capacity admits
them too. Peers are the ranks that route the other tokens of a call. Scoring, choosing and weighing
are one operation (fused) for some routers, and the router's own methods for others. Losses are
reduced if they follow from this rank's tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moesaic.comm.collectives import with_gradient
from moesaic.kernels.choice import balance_slope, choose
from moesaic.kernels.choice_call import WantedSums
from moesaic.routing.capacity import AbstractCapacity, Dropless, admit, count
from moesaic.routing.losses import AbstractLoss, LoadBalance, RouterStatistics, Sequences, ZLoss
from moesaic.routing.peers import Gathered, Peers, kept_copies, places_before
from moesaic.routing.router import AbstractRouter, FusedChoice
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
    """(tokens, dim): a view of `x`. All stages read the input through this one view, and its
    gradients add up in place."""
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
    """(tokens,) bool: False for padding, which is neither routed nor counted; None if no token is
    padding."""
    token_ids: Tensor | None = None
    """(tokens,) int64: vocabulary ids, for routers that read them."""
    num_sequences: int = 1
    """Number of sequences in the whole batch, all of equal length, for losses per sequence."""
    earlier_counts: Tensor | None = None
    """(num_experts,): copies per expert since the last optimizer step, over all ranks, for losses
    over the global batch."""
    step_total: Callable[[Tensor], Tensor] | None = None
    """Sums the step's counts over the ranks that train the layer on other tokens and are not among
    the peers of the route stage; None if no such ranks exist."""
    noise: Tensor | None = None
    """The random numbers from the router's `draw` for these tokens; None to draw them in this
    call."""
    first_token: int = 0
    """Position of the first of these tokens in the whole batch, if these tokens are a slice of the
    batch."""
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
    """Route tokens: score and choose experts, admit copies, compute routing weights and auxiliary
    losses.

    All computation is in float32 (float64 for float64 inputs), whatever the autocast state.

    Args:
        router: scores and chooses the experts.
        x_TD: (tokens, dim), any floating dtype.
        top_k: experts per token.
        capacity: limits the rows per expert.
        losses: the auxiliary losses to evaluate.
        batch: padding, token ids and sequences.
        replay: the record of an earlier run of the same call, whose discrete results are used
            instead of new ones.
        peers: the ranks that route the other tokens of the call; None on one rank.
    """
    num_tokens = len(x_TD)
    num_experts = router.num_experts
    kind = x_TD.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        scored = _scored(router, x_TD, top_k, losses, batch, replay=replay, reduced=peers is None)
        record = replay
        if record is None:
            rules = _Rules(
                top_k,
                capacity,
                num_tokens=num_tokens,
                num_experts=num_experts,
                valid_T=batch.valid_T,
                peers=peers,
            )
            # a copy, since the layer adds to the step's counts in place
            earlier = None if scored.earlier is None else scored.earlier.clone()
            record = _decide(rules, scored)._replace(noise=scored.noise, earlier_counts=earlier)
        loss_values = _loss_values(losses, scored, record, peers) if losses else []
        total_loss = _weighted_sum(losses, loss_values)
    named_values = {loss.name: value.detach() for loss, value in zip(losses, loss_values)}
    routing = _routing(
        record, scored.weight_N, num_tokens, num_experts, named_values, scored.logits
    )
    return Routed(routing, record, total_loss)


def _scored(
    router: AbstractRouter,
    x_TD: Tensor,
    top_k: int,
    losses: Sequence[AbstractLoss],
    batch: TokenInfo,
    *,
    replay: RoutingRecord | None,
    reduced: bool,
) -> _Scored:
    """Choose and weigh the experts of all tokens, in one operation if the router and the losses
    allow it; `reduced` says whether the losses follow from this rank's tokens alone."""
    fused = fused_of(router, top_k, losses)
    if fused is None:
        return _choose_in_steps(router, x_TD, top_k, losses, batch, replay)
    given = None  # an earlier choice to use again: of a record, or of a replayed trace
    if replay is not None:
        given = replay.choice
    elif router.recorded is not None:
        given = router.recorded(len(x_TD), top_k, x_TD.device)
    # the one operation sends every copy, so that it cannot use a choice that holds some back
    if given is not None and given.sent is not None:
        return _choose_in_steps(router, x_TD, top_k, losses, batch, replay)
    return choose_at_once(fused, x_TD, losses, batch.valid_T, given, reduced=reduced)


def route_chosen(
    expert_TK: Tensor, weight_TK: Tensor, num_experts: int, peers: Peers | None = None
) -> Routed:
    """Return the dropless routing of tokens whose experts and weights the caller has chosen;
    exchanges counts with the peers.

    Args:
        expert_TK: (tokens, K) int64, the distinct experts of each token.
        weight_TK: (tokens, K) routing weights, differentiable.
        peers: as for `route`.
    """
    num_tokens, top_k = expert_TK.shape
    copy = torch.arange(num_tokens * top_k, device=expert_TK.device)
    per_token = max(top_k, 1)  # a divisor, also of no copies
    choice = Choice(
        token=copy // per_token,
        expert=expert_TK.reshape(-1),
        slot=copy % per_token,
        per_token=top_k,
    )
    weight_N = weight_TK.reshape(-1).to(torch.promote_types(weight_TK.dtype, torch.float32))

    detached = weight_N.detach()
    counted = _Counted.of(
        choice, detached, alive_N=None, valid_T=None, num_tokens=num_tokens, num_experts=num_experts
    )
    scored = _Scored(
        choice, weight_N=detached, alive_N=None, counted=counted, sums=None, logits=None
    )
    rules = _Rules(
        top_k,
        capacity=Dropless(),
        num_tokens=num_tokens,
        num_experts=num_experts,
        valid_T=None,
        peers=peers,
    )
    record = _decide(rules, scored)
    routing = _routing(record, weight_N, num_tokens, num_experts, losses={}, logits=None)
    return Routed(routing, record, None)


def _padding_zeroed(x_TD: Tensor, valid_T: Tensor | None) -> Tensor:
    """Return all tokens, (tokens, dim), with padding, which may hold NaN, set to zero."""
    return x_TD if valid_T is None else x_TD.masked_fill(~valid_T.unsqueeze(1), 0.0)


def _scores(
    router: AbstractRouter, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None
) -> Scores:
    """Return a router's scores. Backward computes those of 16-bit tokens again: no float32 copy of
    the tokens is kept."""
    if x_TD.dtype.itemsize >= 4:
        return router.scores(x_TD, noise, token_ids)

    def scores_in_float32(x_TD: Tensor) -> Scores:
        return router.scores(x_TD.float(), noise, token_ids)

    if not torch.is_grad_enabled():
        return scores_in_float32(x_TD)
    scores: Scores = checkpoint(
        scores_in_float32, x_TD, use_reentrant=False, preserve_rng_state=False
    )
    return scores


class _Counted(NamedTuple):
    """Numbers of this rank's copies and tokens, int64."""

    requested: Tensor
    """(E,): copies per expert before capacity."""
    nonfinite: Tensor
    """(): copies whose routing weight is NaN or infinite."""
    num_valid: Tensor
    """(): tokens that are not padding."""

    @classmethod
    def of(
        cls,
        choice: Choice,
        weight_N: Tensor,
        alive_N: Tensor | None,
        valid_T: Tensor | None,
        num_tokens: int,
        num_experts: int,
    ) -> _Counted:
        """Count the copies of each expert, weights that are not finite, and valid tokens."""
        is_wrong = ~weight_N.isfinite()
        requested = count(choice.expert, alive_N, num_experts)
        if alive_N is not None:
            is_wrong = is_wrong & alive_N
        nonfinite = is_wrong.sum()
        if valid_T is None:
            num_valid = torch.full((), num_tokens, device=weight_N.device)
        else:
            num_valid = valid_T.sum()
        return cls(requested, nonfinite, num_valid)


class _Scored(NamedTuple):
    """The tokens of a call with their experts chosen and weighed, before capacity."""

    choice: Choice
    """The N chosen copies."""
    weight_N: Tensor
    """(N,), differentiable: the routing weight of each copy."""
    alive_N: Tensor | None
    """(N,) bool: the copies that are neither padding nor held back by the router; None for all
    copies."""
    counted: _Counted
    """This rank's numbers of copies and tokens."""
    sums: RouterStatistics | None
    """This rank's statistics, from which the losses are computed; None without losses, or if
    `values` has what they need."""
    logits: Tensor | None
    """(T, E), differentiable; None if the experts were chosen outside the router."""
    values: Sequence[Tensor] = ()
    """The losses of one operation, () each, differentiable; over several ranks, this rank's part of
    the sums in which they are linear, (n,) each."""
    earlier: Tensor | None = None
    """(E,) int64: copies of the optimizer step before this call; None if no loss reads them."""
    noise: Tensor | None = None
    """The random numbers from the router's `draw`; None if it uses none."""


def _fused_sum(loss: AbstractLoss) -> str | None:
    """Return the field of `ChoiceResult` that a loss reads; None for a loss that needs other
    statistics."""
    if type(loss) is LoadBalance and loss.level == "micro_batch":
        return "balance"
    if type(loss) is ZLoss:
        return "z"
    return None


def fused_of(
    router: AbstractRouter, top_k: int, losses: Sequence[AbstractLoss]
) -> FusedChoice | None:
    """Return a router as one operation, if it is one and every loss reads only sums that this
    operation returns; else None."""
    if any(_fused_sum(loss) is None for loss in losses):
        return None
    return router.fused(top_k)


def choose_at_once(
    fused: FusedChoice,
    x_TD: Tensor,
    losses: Sequence[AbstractLoss],
    valid_T: Tensor | None,
    given: Choice | None,
    *,
    reduced: bool,
) -> _Scored:
    """Score, choose and weigh in one operation.

    Args:
        fused: the router as one operation.
        x_TD: (tokens, dim).
        losses: those that `_fused_sum` knows.
        valid_T: as in `TokenInfo`.
        given: an earlier choice to use again; None to choose.
        reduced: whether the losses follow from this rank's tokens alone; else the result has sums
            for the ranks to exchange.
    """
    logits = fused.logits(_padding_zeroed(x_TD, valid_T))
    fields = [_fused_sum(loss) for loss in losses]  # "balance" or "z"
    wanted = WantedSums(balance="balance" in fields, z="z" in fields, reduced=reduced)
    expert = None if given is None else given.expert
    chosen = choose(logits, fused.rule, wanted, bias=fused.bias, valid_T=valid_T, expert=expert)
    choice = given
    if choice is None:
        choice = Choice(chosen.token, chosen.expert, chosen.slot, per_token=fused.rule.top_k)

    counted = _Counted(chosen.counts, chosen.nonfinite, chosen.num_valid)
    return _Scored(
        choice,
        weight_N=chosen.weight,
        alive_N=_alive(choice, valid_T),
        counted=counted,
        sums=None,
        logits=logits,
        # `_fused_sum` names a field for each of these losses
        values=[getattr(chosen, str(field)) for field in fields],
    )


def _choose_in_steps(
    router: AbstractRouter,
    x_TD: Tensor,
    top_k: int,
    losses: Sequence[AbstractLoss],
    batch: TokenInfo,
    replay: RoutingRecord | None,
) -> _Scored:
    """Score, choose and weigh by the router's own methods."""
    x_TD = _padding_zeroed(x_TD, batch.valid_T)
    if replay is not None:
        noise = replay.noise
    elif batch.noise is not None:
        noise = batch.noise
    else:
        noise = router.draw(len(x_TD), x_TD.device)
    scores = _scores(router, x_TD, noise, batch.token_ids)
    if replay is not None:
        choice = replay.choice
    else:
        choice = router.choose(scores, top_k, batch.valid_T, noise)
    weight_N = router.weigh(scores, choice, top_k)

    alive_N = _alive(choice, batch.valid_T)
    counted = _Counted.of(
        choice, weight_N.detach(), alive_N, batch.valid_T, len(x_TD), router.num_experts
    )
    earlier = _earlier_counts(batch, counted) if replay is None else replay.earlier_counts
    sums = _sums(
        losses,
        scores,
        choice=choice,
        weight_N=weight_N,
        alive_N=alive_N,
        batch=batch,
        earlier_counts=earlier,
    )
    return _Scored(
        choice, weight_N, alive_N, counted, sums, scores.logits, earlier=earlier, noise=noise
    )


def _earlier_counts(batch: TokenInfo, counted: _Counted) -> Tensor | None:
    """Return the copies per expert of the optimizer step before this call, (E,), over all ranks
    that train the layer; None if no loss reads them."""
    earlier = batch.earlier_counts
    if earlier is None or batch.step_total is None:
        return earlier
    # Ranks that are no peers route other tokens at the same time, whose copies count as earlier
    # ones. Their counts of this call are in the total, as are this rank's.
    return batch.step_total(earlier + counted.requested) - counted.requested


class _Rules(NamedTuple):
    """What decides, besides choices and weights, which copies of a call are sent; the fields are
    those of `route`."""

    top_k: int
    capacity: AbstractCapacity
    num_tokens: int
    num_experts: int
    valid_T: Tensor | None
    peers: Peers | None


def _decide(rules: _Rules, scored: _Scored) -> RoutingRecord:
    """Exchange the counts of copies with the other ranks and admit copies. The record is not
    differentiable."""
    capacity = rules.capacity
    top_k = rules.top_k
    choice = scored.choice
    requested, nonfinite, num_valid = scored.counted
    gathered = None
    before_KE = None  # where this rank's copies of each choice start in the queues of all ranks
    rows = None  # the most that an expert takes; None for no limit
    if rules.peers is None:
        rows = capacity.rows(requested, num_valid, top_k)
    else:
        gathered = _exchanged(rules, scored, rules.peers)
        place = rules.peers.place  # this rank among the peers
        own_requested = requested
        requested, nonfinite, num_valid = gathered.counted  # from here on of all ranks
        if capacity.spans_mesh:  # one limit for the copies of all ranks together
            rows = capacity.rows(requested, num_valid, top_k)
            before_KE = places_before(gathered.counts)[place]
        elif not capacity.never_drops:  # a limit of this rank's own
            rows = capacity.rows(own_requested, _limiting_tokens(gathered, capacity)[place], top_k)
        if not capacity.never_drops:
            gathered.sent = _by_rank(gathered, capacity, top_k)

    best_weight_T = None  # of each token; None to admit by position
    if capacity.admits_by_score and rows is not None:
        best_weight_T = _best_weight(scored.weight_N.detach(), choice, rules.num_tokens)
    sent = admit(
        choice,
        scored.alive_N,
        rows=rows,
        best_weight_T=best_weight_T,
        num_experts=rules.num_experts,
        before_KE=before_KE,
    )
    return RoutingRecord(
        noise=None,
        choice=choice,
        requested=requested,
        num_valid=num_valid,
        nonfinite=nonfinite,
        capacity=rows,
        sent=sent,
        earlier_counts=None,
        gathered=gathered,
    )


def _exchanged(rules: _Rules, scored: _Scored, peers: Peers) -> Gathered:
    """Exchange the counts and sums of this rank's copies with the peers."""
    _, nonfinite, num_valid = scored.counted
    extras = peers.extras(
        scored.choice,
        scored.alive_N,
        rules.num_tokens,
        rules.num_experts,
        may_drop=not rules.capacity.never_drops,
    )
    return Gathered.exchange(
        peers,
        _counts_to_exchange(rules, scored),
        num_experts=rules.num_experts,
        num_valid=num_valid,
        num_tokens=None if rules.valid_T is None else rules.num_tokens,
        nonfinite=nonfinite,
        sums=scored.values if scored.sums is None else scored.sums.parts(),
        extras=extras,
    )


def _counts_to_exchange(rules: _Rules, scored: _Scored) -> Tensor:
    """Return this rank's copies per expert before capacity, (K E,) int64: of each of the top_k
    choices if copies of all ranks queue, first choices first; else of all together, with K = 1."""
    num_experts = rules.num_experts
    if not rules.capacity.spans_mesh or rules.top_k == 1:
        return scored.counted.requested
    # one number for each pair of choice (0 for first choices) and expert
    choice_and_expert = scored.choice.slot * num_experts + scored.choice.expert
    return count(choice_and_expert, scored.alive_N, rules.top_k * num_experts)


def _limiting_tokens(gathered: Gathered, capacity: AbstractCapacity) -> Tensor:
    """Return the tokens of each rank from which a limit of its own follows, (P,) int64: those that
    are not padding; all of them under a padded capacity, whose limit depends on sizes alone."""
    return gathered.tokens if capacity.is_padded else gathered.valid


def _by_rank(gathered: Gathered, capacity: AbstractCapacity, top_k: int) -> Tensor:
    """Return the copies that each rank sends to each expert under a capacity, (P, E) int64."""
    if capacity.spans_mesh:  # one limit for the copies of all ranks together
        requested, _, num_valid = gathered.counted
        return kept_copies(gathered, capacity.rows(requested, num_valid, top_k))

    limits = []  # () each, one for every rank; empty if the capacity sets none
    for counts_E, num_tokens in zip(gathered.by_rank, _limiting_tokens(gathered, capacity)):
        rows = capacity.rows(counts_E, num_tokens, top_k)
        if rows is not None:
            limits.append(rows)
    return kept_copies(gathered, rows=torch.stack(limits) if limits else None)


def _routing(
    record: RoutingRecord,
    weight_N: Tensor,
    num_tokens: int,
    num_experts: int,
    losses: dict[str, Tensor],
    logits: Tensor | None,
) -> Routing:
    """Return the routing that a record and the routing weights describe: the rows that this rank
    sends.

    Args:
        losses: the values of the auxiliary losses by name, detached.
        logits: the router's, as in `Routing`.
    """
    choice = record.choice
    sent = record.sent
    token = choice.token
    expert = choice.expert
    weight = weight_N
    # a CPU removes copies that are not sent; elsewhere they stay, marked by expert number E
    has_unsent = sent is not None and expert.device.type != "cpu"
    if sent is not None and has_unsent:
        expert = expert.masked_fill(~sent, num_experts)
    elif sent is not None:
        indices = sent.nonzero().squeeze(1)
        token = token[indices]
        expert = expert[indices]
        weight = weight[indices]

    gathered = record.gathered
    if record.capacity is None and (sent is None or gathered is not None):
        counts = record.requested  # of all ranks: nothing is dropped
    elif gathered is not None:
        counts = gathered.by_rank.sum(0)  # of all ranks: what each sends
    else:
        # on one rank, without the last count, of copies that are not sent
        counts = count(expert, alive_N=None, num_experts=num_experts + 1)[:num_experts]
    # copies that were removed leave tokens with different numbers of rows
    rows_per_token = choice.per_token if sent is None or has_unsent else None
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
        rows_per_token=rows_per_token,
        has_unsent=has_unsent,
        logits=logits,
        losses=losses,
    )


def _alive(choice: Choice, valid_T: Tensor | None) -> Tensor | None:
    """Return the copies that are neither padding nor held back by the router, (N,) bool; None for
    all copies."""
    if valid_T is None:
        return choice.sent
    alive = valid_T[choice.token]
    return alive if choice.sent is None else alive & choice.sent


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
    sequences = Sequences()
    if any(loss.needs_sequences for loss in losses):
        sequences = Sequences(batch.num_sequences, batch.first_token, batch.sequence_length)
    return RouterStatistics.of(
        scores,
        choice,
        weight_N,
        alive_N,
        batch.valid_T,
        sequences=sequences,
        earlier_counts_E=earlier_counts,
        with_importance=any(loss.needs_importance for loss in losses),
        with_logsumexp=any(loss.needs_logsumexp for loss in losses),
    )


def _linear(own: Tensor, total: Tensor, factors: Tensor) -> Tensor:
    """Return the dot product of `factors` and `total`, the sums over all ranks' tokens;
    differentiable in `own`, this rank's part of the sums; (n,) each."""
    return with_gradient(own, lambda _: total.dot(factors), lambda grad: grad * factors)


def _values_over_ranks(
    losses: Sequence[AbstractLoss],
    parts: Sequence[Tensor],
    record: RoutingRecord,
    gathered: Gathered,
) -> list[Tensor]:
    """Return the losses of all ranks' tokens, which `_fused_sum` knows: each is linear in a sum
    over the tokens, of which this rank has a part."""
    top_k = record.choice.per_token or 1  # a fused choice has equally many copies of each token
    values = list[Tensor]()
    for loss, own, total in zip(losses, parts, gathered.totals(parts)):
        if _fused_sum(loss) == "balance":
            # num_tokens=None: the number of tokens is read from `num_valid`
            factors = balance_slope(
                record.requested, record.num_valid, top_k, num_tokens=None, dtype=own.dtype
            )
        else:  # the mean of the squares
            factors = record.num_valid.clamp_min(1).to(own.dtype).reciprocal().view(1)
        values.append(_linear(own, total, factors))
    return values


def _loss_values(
    losses: Sequence[AbstractLoss], scored: _Scored, record: RoutingRecord, peers: Peers | None
) -> list[Tensor]:
    """Return the value of each loss over the tokens of all ranks, differentiable."""
    sums = scored.sums
    gathered = None if peers is None else record.gathered
    if sums is None:
        if gathered is None:
            return list(scored.values)
        return _values_over_ranks(losses, scored.values, record, gathered)
    if peers is not None and gathered is not None:
        sums = gathered.statistics(sums, peers, record.earlier_counts)
    return [loss.value(sums) for loss in losses]


def _weighted_sum(losses: Sequence[AbstractLoss], values: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of the losses' values times their coefficients; None without losses."""
    total: Tensor | None = None
    for loss, value in zip(losses, values):
        weighted = loss.coefficient * value
        total = weighted if total is None else total + weighted
    return total
