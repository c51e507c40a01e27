"""What the ranks of a benchmark do alike: they tell each other what they measured, take down what they sent, step a layer, and
route as they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.layer import MoE
from moesaic.plan import Compiled
from moesaic.routing.router import AbstractRouter, token_choice
from moesaic.routing.routing import Choice, Scores
from moesaic_lab.bounds import Message
from moesaic_lab.measure import Span, in_turn, over_ranks
from moesaic_lab.recorder import Recorder

Spans = dict[str, list[Span]]
"""By method, one per repeat."""


def gathered(spans: Mapping[str, list[Span]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of every method over all ranks, the same on each of them."""
    everyone: list[Mapping[str, list[Span]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(spans))
    return over_ranks([each for each in everyone if each is not None])


def in_turn_and_near(
    methods: Mapping[str, Callable[[], object]],
    repeats: int,
    pairs: int,
    near: Callable[[Mapping[str, tuple[float, ...]]], list[str]],
    **options: Any,
) -> tuple[Spans, Spans]:
    """Time methods in turn, then those near each other in further rounds of their own, so that each has so many pairs.

    Args:
        methods: as for `in_turn`.
        repeats: rounds of all of them.
        pairs: rounds of those near each other, all in all.
        near: from the seconds of all methods to the names of these.
        options: of `in_turn`.

    Returns:
        this rank's spans of all methods; and those of the further rounds, {} for none.
    """
    spans = in_turn(methods, repeats, **options)
    names, more = near(gathered(spans)), max(pairs - repeats, 0)
    again = {name: methods[name] for name in names} if more else {}
    return spans, in_turn(again, more, **options | {"warmup": 0})


def sent(recorder: Recorder, first: int = 0) -> list[Message]:
    """Return what this rank sent, from the first-th range of tags on."""
    return [(m.source, m.target, float(m.num_bytes)) for held in recorder.ranges[first:] for m in held.messages]


class SteppedLayer:
    """A layer on a mesh with its input; runs steps.

    Args:
        layer: on its mesh.
        tokens: of this rank's tensor group.
        seed: of the input, the same on ranks of a tensor group.
    """

    def __init__(self, layer: MoE, tokens: int, seed: int) -> None:
        self.layer = layer
        self.x = torch.randn(tokens, layer.dim, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        self._dy = torch.ones(tokens, layer.dim)

    def step(self, compiled: Compiled | None) -> None:
        """Run forward and backward under a plan; None for the one that the layer has."""
        if compiled is not None:
            self.layer.use_plan(compiled)
        self.layer(self.x).backward(self._dy)
        self.x.grad = None
        self.layer.zero_grad()


class ToldRouter(AbstractRouter):
    """Sends every token to the experts that it is told; a token's weights fall with their place, and sum to one.

    Args:
        dim: width of a token (not read).
        num_experts: how many experts there are.
    """

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self._choice: Choice | None = None

    def tell(self, experts_TK: Tensor) -> None:
        """Say which experts the tokens of the next calls go to.

        Args:
            experts_TK: (tokens, top_k) int64.
        """
        self._choice = token_choice(experts_TK)

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        even = x_TD.new_full((len(x_TD), self.num_experts), 1 / self.num_experts)
        return Scores(even, even, even, even)

    def choose(self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        assert self._choice is not None, "nobody told the router"
        return self._choice

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        falling = torch.arange(top_k, 0, -1, dtype=scores.gates.dtype)
        return (falling / falling.sum())[choice.slot]
