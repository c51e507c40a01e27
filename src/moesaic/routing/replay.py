"""Replay of recorded choices: routers use recorded experts, and compute the routing weights from
their current scores.

Only the discrete choice comes from the record, so gradients still reach the router. Auxiliary
losses, capacities and the bias of `sigmoid` follow from the recorded choice just as from a router's
own. The routing cache of `runtime/routing_cache.py` differs: it repeats a whole call of the layer,
including everything that the ranks exchanged in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.routing.router import AbstractRouter, Recorded, token_choice
from moesaic.routing.routing import Choice, Scores


def encoded(choice: Choice, top_k: int) -> Tensor:
    """Return each token's experts, (tokens, top_k) int64, best first; -1 - expert for a copy that
    the router held back.

    Args:
        choice: the choice of a token-choice router.
        top_k: experts per token.
    """
    assert choice.per_token == top_k
    expert = choice.expert
    if choice.sent is not None:
        expert = torch.where(choice.sent, expert, -1 - expert)
    return expert.view(-1, top_k)


def decoded(experts_TK: Tensor) -> Choice:
    """Return the choice from which `encoded` made this table."""
    is_held_back = experts_TK < 0
    choice = token_choice(torch.where(is_held_back, -1 - experts_TK, experts_TK))
    if not bool(is_held_back.any()):
        return choice
    return choice._replace(sent=~is_held_back.reshape(-1))


@contextmanager
def replayed(routers: Sequence[AbstractRouter], experts: Callable[[int], Tensor]) -> Iterator[None]:
    """Make routers choose given experts inside this context.

    The method `choose` of the modules themselves is replaced and later restored. A wrapper would
    give the parameters other names, in checkpoints too.

    Args:
        routers: token-choice routers (any but `expert_choice`).
        experts: maps a router's index in `routers` to the experts of its tokens, (tokens, top_k)
            int64 as returned by `encoded`; called each time the router chooses.
    """
    try:
        for index, router in enumerate(routers):
            recorded = _recorded(router, index, experts)
            router.recorded = recorded
            # hides the method of the class until `finally`; by `setattr` for the type checker
            setattr(router, "choose", _chooser(recorded))  # noqa: B010
        yield
    finally:
        for router in routers:
            router.recorded = None
            router.__dict__.pop("choose", None)


def own_choice(
    router: AbstractRouter,
) -> Callable[[Scores, int, Tensor | None, Tensor | None], Choice]:
    """Return a router's own `choose`, even inside `replayed`; predictions of its choices use this
    method.

    A prediction from recorded choices would be right more often than in the recorded run, and
    decisions that depend on the prediction would differ from those of that run.
    """
    return partial(type(router).choose, router)


def _chooser(recorded: Recorded) -> Callable[[Scores, int, Tensor | None, Tensor | None], Choice]:
    """Return a function with the signature of `choose` that returns recorded choices."""

    def choose(scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        return recorded(len(scores.logits), top_k, scores.logits.device)

    return choose


def _recorded(router: AbstractRouter, index: int, experts: Callable[[int], Tensor]) -> Recorded:
    """Return a function that decodes the choices recorded for the router with this index; `experts`
    returns their tables as `encoded` makes them."""

    def recorded_choice(num_tokens: int, top_k: int, device: torch.device) -> Choice:
        """Return the next recorded choice, after a check that it fits the call."""
        table = experts(index).to(device)
        if table.shape != (num_tokens, top_k):
            raise InputError(
                f"replay: {tuple(table.shape)} recorded choices for {num_tokens} tokens with "
                f"top_k={top_k}: replay a trace of the same model and batch"
            )
        choice = decoded(table)
        if table.numel() and int(choice.expert.max()) >= router.num_experts:
            raise InputError(
                f"replay: a recorded expert is not among the {router.num_experts}: replay "
                "another trace"
            )
        return choice

    return recorded_choice
