"""The routers of `ROUTERS` as random cases use them: built small, with numbers of experts per token that they train with."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from moesaic.errors import InputError
from moesaic.routing.routers import ROUTERS, CosineTopK, Hash, RouterFactory, SigmoidTopK, group_limited_sigmoid

DIM = 4
"""Width of a token."""


def small_router(name: str, num_experts: int, top_k: int) -> RouterFactory:
    """Return what builds a router of that name, with options that suit few tokens and experts where the usual ones do not.

    Args:
        name: in `ROUTERS`.
        num_experts: of the layer.
        top_k: experts per token.
    """
    groups = {"num_groups": 2, "top_groups": 2 if top_k > num_experts // 2 else 1}
    options: dict[str, RouterFactory] = {
        "cosine": partial(CosineTopK, projection=3, temperature=0.5),
        "hash": partial(Hash, buckets=16),
        "group_limited": partial(group_limited_sigmoid, **groups, bias_rate=0.1),
        "sigmoid": partial(SigmoidTopK, bias_rate=0.1),
    }
    return options.get(name, ROUTERS[name])


@lru_cache(maxsize=1024)
def fitting_top_k(name: str, num_experts: int) -> tuple[int, ...]:
    """Return the numbers of experts per token that a router trains with, ascending; none where it cannot be built."""
    found = []
    with torch.random.fork_rng(devices=[]):
        for top_k in range(1, num_experts + 1):
            try:
                small_router(name, num_experts, top_k)(DIM, num_experts).check(top_k)
            except InputError:
                continue
            found.append(top_k)
    return tuple(found)


@lru_cache(maxsize=64)
def looks_across_tokens(name: str) -> bool:
    """Whether a router's choice for a token depends, in training, on which other tokens its rank has."""
    return _trained(name)[0]


@lru_cache(maxsize=64)
def draws_noise(name: str) -> bool:
    """Whether a router draws random numbers in training."""
    return _trained(name)[1]


def _trained(name: str) -> tuple[bool, bool]:
    num_experts = next(count for count in range(1, 9) if fitting_top_k(name, count))
    with torch.random.fork_rng(devices=[]):
        router = small_router(name, num_experts, fitting_top_k(name, num_experts)[0])(DIM, num_experts).train()
        return router.looks_across_tokens, router.draw(1, torch.device("cpu")) is not None
