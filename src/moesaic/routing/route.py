"""The route stage: from tokens to `Routing`. Everything discrete goes into a `RoutingRecord`, so it can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.routing.capacity import AbstractCapacity, admit
from moesaic.routing.losses import AbstractLoss, RouterStatistics
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Choice, Routing, Scores


class RoutingRecord(NamedTuple):
    """Everything discrete about one call: what a recomputation replays instead of deciding again."""

    noise: Tensor | None
    """What the router's `draw` returned."""
    choice: Choice
    """The chosen copies."""
    requested: Tensor
    """(E,) int64: copies per expert before capacity."""
    num_valid: Tensor
    """() int64: tokens that are not padding."""
    capacity: Tensor | None
    """() int64: rows an expert may take; None when dropless."""
    kept: Tensor | None
    """Ascending indices of the copies that are sent; None for all of them."""
    earlier_counts: Tensor | None
    """(E,) int64: copies of the optimizer step before this call; None where no loss asks for them."""


class Routed(NamedTuple):
    """What the route stage returns."""

    routing: Routing
    record: RoutingRecord
    loss: Tensor | None
    """(): the sum of coefficient * loss, differentiable; None without auxiliary losses."""


def route(
    router: AbstractRouter,
    x_TD: Tensor,
    *,
    top_k: int,
    capacity: AbstractCapacity,
    losses: Sequence[AbstractLoss] = (),
    valid_T: Tensor | None = None,
    token_ids: Tensor | None = None,
    num_sequences: int = 1,
    earlier_counts: Tensor | None = None,
    replay: RoutingRecord | None = None,
) -> Routed:
    """Score, choose, admit, weigh; in float32 (float64 for float64 inputs) whatever the autocast state.

    Args:
        router: scores and chooses.
        x_TD: (tokens, dim), any floating dtype.
        top_k: experts per token.
        capacity: rows per expert.
        losses: auxiliary losses to evaluate.
        valid_T: (tokens,) bool, False for padding, which is neither routed nor counted.
        token_ids: (tokens,) int64, for routers that read them.
        num_sequences: the tokens are this many sequences of equal length, for losses per sequence.
        earlier_counts: (num_experts,) copies since the last optimizer step, for losses over the global batch.
        replay: a record of the same call; nothing is drawn, chosen or admitted anew.
    """
    with torch.autocast(device_type=x_TD.device.type, enabled=False):
        x = _router_input(x_TD, valid_T)
        noise = router.draw(len(x), x.device) if replay is None else replay.noise
        scores = router.scores(x, noise, token_ids)
        record = _decide(router, scores, noise, top_k, capacity, valid_T, earlier_counts) if replay is None else replay
        weight_N = router.weigh(scores, record.choice, top_k)
        loss, values = _evaluate(losses, scores, record, weight_N, valid_T, num_sequences)
    choice, kept = record.choice, record.kept
    expert = choice.expert if kept is None else choice.expert[kept]
    routing = Routing(
        token=choice.token if kept is None else choice.token[kept],
        expert=expert,
        weight=weight_N if kept is None else weight_N[kept],
        num_tokens=len(x),
        num_experts=router.num_experts,
        counts=record.requested if kept is None else count(expert, None, router.num_experts),
        requested=record.requested,
        num_valid=record.num_valid,
        capacity=record.capacity,
        rows_per_token=choice.per_token if kept is None else None,
        losses=values,
    )
    return Routed(routing, record, loss)


def count(expert_N: Tensor, alive_N: Tensor | None, num_experts: int) -> Tensor:
    """Return the copies per expert, (num_experts,) int64, without a host sync; `alive_N` (N,) bool says which count."""
    ones = torch.ones_like(expert_N) if alive_N is None else alive_N.to(expert_N.dtype)
    return torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device).scatter_add_(0, expert_N, ones)


def _router_input(x_TD: Tensor, valid_T: Tensor | None) -> Tensor:
    """Return the tokens in float32 at least, padding as zeros: it may hold anything, and 0 * nan is nan."""
    x = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    return x if valid_T is None else x.masked_fill(~valid_T.unsqueeze(1), 0.0)


def _decide(
    router: AbstractRouter,
    scores: Scores,
    noise: Tensor | None,
    top_k: int,
    capacity: AbstractCapacity,
    valid_T: Tensor | None,
    earlier_counts: Tensor | None,
) -> RoutingRecord:
    """Choose experts and admit copies; nothing here is differentiable. For the arguments see `route`."""
    choice = router.choose(scores, top_k, valid_T, noise)
    alive_N = _alive(choice, valid_T)
    requested = count(choice.expert, alive_N, router.num_experts)
    num_tokens = len(scores.logits)
    num_valid = torch.full((), num_tokens, device=scores.logits.device) if valid_T is None else valid_T.sum()
    rows = capacity.rows(requested, num_valid, top_k)
    best_T = None
    if capacity.admits_by_score and rows is not None:
        with torch.no_grad():
            best_T = _best_weight(router.weigh(scores, choice, top_k), choice, num_tokens)
    kept = admit(choice, alive_N, rows, best_T, router.num_experts)
    earlier = None if earlier_counts is None else earlier_counts.clone()
    return RoutingRecord(noise, choice, requested, num_valid, rows, kept, earlier)


def _alive(choice: Choice, valid_T: Tensor | None) -> Tensor | None:
    """Combine padding with what the router held back; None when every copy is alive."""
    if valid_T is None:
        return choice.sent
    alive = valid_T[choice.token]
    return alive if choice.sent is None else alive & choice.sent


def _best_weight(weight_N: Tensor, choice: Choice, num_tokens: int) -> Tensor:
    """Return each token's largest weight, (tokens,); 0 for a token that nobody chose."""
    zeros = torch.zeros(num_tokens, dtype=weight_N.dtype, device=weight_N.device)
    return zeros.scatter_reduce(0, choice.token, weight_N, "amax")


def _evaluate(
    losses: Sequence[AbstractLoss],
    scores: Scores,
    record: RoutingRecord,
    weight_N: Tensor,
    valid_T: Tensor | None,
    num_sequences: int,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the weighted sum of the losses and each one's detached value."""
    if not losses:
        return None, {}
    sequences = num_sequences if any(loss.needs_sequences for loss in losses) else 1
    statistics = RouterStatistics.of(
        scores,
        record.choice,
        weight_N,
        _alive(record.choice, valid_T),
        valid_T,
        num_sequences=sequences,
        earlier_counts_E=record.earlier_counts,
        with_importance=any(loss.needs_importance for loss in losses),
    )
    values = [loss.value(statistics) for loss in losses]
    total = torch.stack([loss.coefficient * value for loss, value in zip(losses, values)]).sum()
    return total, {loss.name: value.detach() for loss, value in zip(losses, values)}
