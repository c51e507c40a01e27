"""Recorded choices in place of a router's own, weights from its scores of today: to run again what was routed once.

Only the discrete part comes from the record, so the gradient still reaches the router, and auxiliary losses, capacities
and the bias of `sigmoid` follow from the recorded choice as they would from the router's. (Unlike the routing cache of
`runtime/routing_cache.py`, which repeats one call of the layer whole, with all that the ranks told each other in it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.routing.router import AbstractRouter, token_choice
from moesaic.routing.routing import Choice, Scores


def encoded(choice: Choice, top_k: int) -> Tensor:
    """Return each token's experts, (tokens, top_k) int64, best first; -1 - expert for a copy that the router held back.

    Args:
        choice: the choice of a router by which tokens choose.
        top_k: experts per token.
    """
    assert choice.per_token == top_k
    expert = choice.expert if choice.sent is None else torch.where(choice.sent, choice.expert, -1 - choice.expert)
    return expert.view(-1, top_k)


def decoded(experts_TK: Tensor) -> Choice:
    """Return the choice that `encoded` wrote down."""
    choice = token_choice(torch.where(experts_TK < 0, -1 - experts_TK, experts_TK))
    held_back = experts_TK.reshape(-1) < 0
    return choice._replace(sent=~held_back) if bool(held_back.any()) else choice


@contextmanager
def replayed(routers: Sequence[AbstractRouter], experts: Callable[[int], Tensor]) -> Iterator[None]:
    """A stretch in which routers choose what they are told.

    The choosing of these very modules is replaced, and put back: a router wrapped in another would have its parameters
    under other names, in checkpoints too.

    Args:
        routers: all of them such by which tokens choose (any but `expert_choice`).
        experts: from a router's place in `routers` to its tokens' experts, (tokens, top_k) int64 as of `encoded`; asked
            each time the router chooses.
    """
    try:
        for place, router in enumerate(routers):
            setattr(router, "choose", _chooser(router, place, experts))  # noqa: B010  (a method, to the type checker)
        yield
    finally:
        for router in routers:
            router.__dict__.pop("choose", None)


def own_choice(router: AbstractRouter) -> Callable[[Scores, int, Tensor | None, Tensor | None], Choice]:
    """Return how a router chooses by itself, within `replayed` too: what a prediction of its choices asks.

    A prediction that read the recorded choices would be right more often than that of the run that was recorded, and
    what is decided from it would be something else.
    """
    return partial(type(router).choose, router)


def _chooser(
    router: AbstractRouter, place: int, experts: Callable[[int], Tensor]
) -> Callable[[Scores, int, Tensor | None, Tensor | None], Choice]:
    def choose(scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        told = experts(place).to(scores.logits.device)
        if told.shape != (len(scores.logits), top_k):
            raise InputError(
                f"replay: {tuple(told.shape)} recorded choices for {len(scores.logits)} tokens with top_k={top_k}: "
                "replay a trace of the same model and batch"
            )
        if told.numel() and int(torch.where(told < 0, -1 - told, told).max()) >= router.num_experts:
            raise InputError(f"replay: a recorded expert is not among the {router.num_experts}: replay another trace")
        return decoded(told)

    return choose
