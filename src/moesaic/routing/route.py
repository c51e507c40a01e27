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
    """What a recomputation replays: random numbers, chosen experts, admitted copies and the step's counts before."""

    noise: Tensor | None
    choice: Choice
    kept: Tensor | None
    capacity: Tensor | None
    earlier_counts: Tensor | None


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
        choice = router.choose(scores, top_k, valid_T, noise) if replay is None else replay.choice
        weight_N = router.weigh(scores, choice, top_k)
        alive_N = _alive(choice, valid_T)
        requested = count(choice.expert, alive_N, router.num_experts)
        num_valid = torch.full((), len(x), device=x.device) if valid_T is None else valid_T.sum()
        if replay is None:
            rows = capacity.rows(requested, num_valid, top_k)
            best_T = _best_weight(weight_N, choice, len(x)) if capacity.order == "score" and rows is not None else None
            kept = admit(choice, alive_N, rows, best_T, router.num_experts)
            earlier = None if earlier_counts is None else earlier_counts.clone()
            replay = RoutingRecord(noise, choice, kept, rows, earlier)
        earlier = replay.earlier_counts
        loss, values = _evaluate(losses, scores, choice, weight_N, alive_N, valid_T, num_sequences, earlier)
    kept = replay.kept
    expert = choice.expert if kept is None else choice.expert[kept]
    routing = Routing(
        token=choice.token if kept is None else choice.token[kept],
        expert=expert,
        weight=weight_N if kept is None else weight_N[kept],
        num_tokens=len(x),
        num_experts=router.num_experts,
        counts=requested if kept is None else count(expert, None, router.num_experts),
        requested=requested,
        num_valid=num_valid,
        capacity=replay.capacity,
        rows_per_token=choice.per_token if kept is None else None,
        losses=values,
    )
    return Routed(routing, replay, loss)


def count(expert_N: Tensor, alive_N: Tensor | None, num_experts: int) -> Tensor:
    """Return the copies per expert, (num_experts,) int64, without a host sync; `alive_N` (N,) bool says which count."""
    ones = torch.ones_like(expert_N) if alive_N is None else alive_N.to(expert_N.dtype)
    return torch.zeros(num_experts, dtype=torch.int64, device=expert_N.device).scatter_add_(0, expert_N, ones)


def _router_input(x_TD: Tensor, valid_T: Tensor | None) -> Tensor:
    """Return the tokens in float32 at least, padding as zeros: it may hold anything, and 0 * nan is nan."""
    x = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    return x if valid_T is None else x.masked_fill(~valid_T.unsqueeze(1), 0.0)


def _alive(choice: Choice, valid_T: Tensor | None) -> Tensor | None:
    """Combine padding with what the router held back; None when every copy is alive."""
    if valid_T is None:
        return choice.sent
    alive = valid_T[choice.token]
    return alive if choice.sent is None else alive & choice.sent


def _best_weight(weight_N: Tensor, choice: Choice, num_tokens: int) -> Tensor:
    """Return each token's largest weight, (tokens,); 0 for a token that nobody chose."""
    zeros = torch.zeros(num_tokens, dtype=weight_N.dtype, device=weight_N.device)
    return zeros.scatter_reduce(0, choice.token, weight_N.detach(), "amax")


def _evaluate(
    losses: Sequence[AbstractLoss],
    scores: Scores,
    choice: Choice,
    weight_N: Tensor,
    alive_N: Tensor | None,
    valid_T: Tensor | None,
    num_sequences: int,
    earlier_counts: Tensor | None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the weighted sum of the losses and each one's detached value."""
    if not losses:
        return None, {}
    sequences = num_sequences if any(loss.needs_sequences for loss in losses) else 1
    statistics = RouterStatistics.of(scores, choice, weight_N, alive_N, valid_T, sequences, earlier_counts)
    values = [loss.value(statistics) for loss in losses]
    total = torch.stack([loss.coefficient * value for loss, value in zip(losses, values)]).sum()
    return total, {loss.name: value.detach() for loss, value in zip(losses, values)}
