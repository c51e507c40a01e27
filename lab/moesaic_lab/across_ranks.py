"""Helpers that run on the ranks of benchmarks: gathering times, listing sent messages, layer steps,
prescribed routing.

A span is the start and the end of one run of a method, by a clock that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.layer import MoE
from moesaic.measure.together import hold_still, latest, start_together
from moesaic.program.compile import Compiled
from moesaic.routing.router import AbstractRouter, token_choice
from moesaic.routing.routing import Choice, Scores
from moesaic_lab.bounds import Message
from moesaic_lab.measure import Span, in_turn, over_ranks, without_collections
from moesaic_lab.recorder import Recorder

Spans = dict[str, list[Span]]
"""Spans by method, one per repeat."""


def gathered(spans: Mapping[str, list[Span]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of every method over all ranks, identically on all ranks."""
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
    """Time interleaved methods, then repeat only those with similar times until they have enough
    repeats.

    Args:
        methods: as for `in_turn`.
        repeats: repeats of all methods.
        pairs: total repeats of the methods that `near` selects.
        near: returns the names of the methods to repeat further, from the seconds of all methods.
        options: further arguments of `in_turn`.

    Returns:
        this rank's spans of all methods, and the spans of the further repeats ({} if there are
        none).
    """
    spans = in_turn(methods, repeats, **options)
    similar = near(gathered(spans))
    further = max(pairs - repeats, 0)
    again = {name: methods[name] for name in similar} if further else {}

    # The first rounds have warmed the methods up.
    return spans, in_turn(again, further, **options | {"warmup": 0})


def sent(recorder: Recorder, first: int = 0) -> list[Message]:
    """Return the messages that this rank sent, from the range of tags with index `first` on."""
    return [
        (m.source, m.target, float(m.num_bytes))
        for tags in recorder.ranges[first:]
        for m in tags.messages
    ]


def timed_still(methods: Mapping[str, Callable[[], object]], repeats: int) -> Spans:
    """Bind this rank to a core and time interleaved methods; return its spans."""
    hold_still(dist.get_rank())
    with without_collections():
        return in_turn(methods, repeats, barrier=start_together(latest))


class SteppedLayer:
    """A layer on a mesh with random input, which runs forward and backward steps.

    Args:
        layer: the layer, already on its mesh.
        tokens: number of tokens of this rank's tensor group.
        seed: seed of the input, the same on all ranks of a tensor group.
    """

    def __init__(self, layer: MoE, tokens: int, seed: int) -> None:
        self.layer = layer
        self.x = torch.randn(
            tokens, layer.dim, generator=torch.Generator().manual_seed(seed)
        ).requires_grad_()
        self._dy = torch.ones(tokens, layer.dim)

    def step(self, compiled: Compiled | None) -> None:
        """Run forward and backward under a plan; None keeps the layer's current plan."""
        if compiled is not None:
            self.layer.use_plan(compiled)
        self.layer(self.x).backward(self._dy)
        self.x.grad = None
        self.layer.zero_grad()


class ToldRouter(AbstractRouter):
    """A router that sends every token to prescribed experts. Routing weights decrease from slot to
    slot and sum to one.

    Args:
        dim: width of a token (unused).
    """

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self._choice: Choice | None = None

    def tell(self, experts_TK: Tensor) -> None:
        """Set the experts of the tokens of the next calls.

        Args:
            experts_TK: the experts of each token, (tokens, top_k) int64.
        """
        self._choice = token_choice(experts_TK)

    def scores(self, x_TD: Tensor, noise: Tensor | None, token_ids: Tensor | None) -> Scores:
        """Return equal scores, since `choose` reads none."""
        even = x_TD.new_full((len(x_TD), self.num_experts), 1 / self.num_experts)
        return Scores(even, even, even, even)

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Return what `tell` was told."""
        assert self._choice is not None, "nobody told the router"
        return self._choice

    def weigh(self, scores: Scores, choice: Choice, top_k: int) -> Tensor:
        """Return weights that depend only on the slot of the choice."""
        falling = torch.arange(top_k, 0, -1, dtype=scores.gates.dtype)
        return (falling / falling.sum())[choice.slot]
