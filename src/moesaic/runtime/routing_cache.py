"""Activation checkpointing that replays the recorded routing instead of routing again.

A recomputed router may choose other experts than the first pass, because of noise, nondeterministic
kernels, or a bias that changed in between. Then shapes differ, or gradients are silently wrong. So
the first pass writes each layer's discrete decisions to a routing cache, and the recomputation
reads them. Use `checkpoint(block, x)` instead of torch's, or pass
`context_fn=partial(replay_contexts, block)` to any code that calls torch's non-reentrant
checkpoint.

Under `torch.compile` a checkpointed call is a graph break: the block runs eagerly, and the code
around it is compiled. (A lambda as `context_fn`, and `fullgraph=True`, make dynamo raise.) Inside
the block, compile only parts without MoE layers, such as attention. A compiled MoE layer has one
graph that records and another that replays. They save different tensors, which torch's checkpoint
refuses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moesaic.comm.transport import TURN, AbstractSuspended, AbstractTurn
from moesaic.kernels.operator import operator
from moesaic.routing.route import RoutingRecord


class Cached(NamedTuple):
    """A routing record, with the states of the random generators before and after its call."""

    record: RoutingRecord
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]


class RoutingCache:
    """The routing records of one checkpointed call: per layer, in call order.

    A replay draws no noise, so code after the layer (dropout, for example) would draw other random
    numbers than in the first pass. If the checkpoint has restored the generators, as torch's does
    by default, a replay therefore advances them.

    Args:
        outer: for each layer inside another checkpoint, the routing cache of that checkpoint.
    """

    def __init__(self, outer: dict[RoutingCached, RoutingCache]) -> None:
        self._outer = outer
        self._records: dict[RoutingCached, list[Cached]] = {}
        """By layer, its records in call order."""
        self._before: dict[RoutingCached, tuple[Tensor, ...]] = {}
        """By layer, the generators' states before its last call of the first pass."""
        self._position: dict[RoutingCached, int] | None = None
        """By layer, how many records the present replay has read; None outside a replay."""

    @property
    def is_replaying(self) -> bool:
        """Whether a recomputation is running."""
        return self._position is not None

    def write(self, layer: RoutingCached, record: RoutingRecord) -> None:
        """Append a record of the first pass, here and to those surrounding routing caches that are
        recording."""
        self._records.setdefault(layer, []).append(
            Cached(record, self._before[layer], generators())
        )
        outer = self._outer.get(layer)
        if outer is not None and not outer.is_replaying:
            outer.write(layer, record)

    def read(self, layer: RoutingCached) -> RoutingRecord | None:
        """Return the layer's next record from the innermost routing cache that is replaying; None
        in a first pass."""
        if self._position is None:  # a first pass here, maybe a replay of the checkpoint around it
            self._before[layer] = generators()
            outer = self._outer.get(layer)
            return None if outer is None else outer.read(layer)
        position = self._position.get(layer, 0)
        self._position[layer] = position + 1
        record, before, after = self._records[layer][position]
        present = generators()
        are_restored = all(torch.equal(one, other) for one, other in zip(before, present))
        if are_restored:  # advance them as the first pass did
            set_generators(after)
        return record

    def start_replay(self) -> None:
        """Rewind. A routing cache may be replayed any number of times (`retain_graph`, several
        backward passes)."""
        self._position = {}

    def stop_replay(self) -> None:
        """End the replay."""
        self._position = None


class RoutingCached(nn.Module):
    """A module that records its routing on `routing_cache` while one is set, which is only the case
    inside a context."""

    def __init__(self) -> None:
        super().__init__()
        self.routing_cache: RoutingCache | None = None
        """Where it records its routing, or from which it replays it."""


def replay_contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass and of the recomputation, for `context_fn` of torch's
    checkpoint.

    Args:
        module: the checkpointed module; every MoE layer in it records and replays.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, RoutingCached)]
    routing_cache = RoutingCache(
        {layer: layer.routing_cache for layer in layers if layer.routing_cache is not None}
    )
    first_pass = _Caching(layers, routing_cache, replays=False)
    recomputation = _Caching(layers, routing_cache, replays=True)
    return first_pass, recomputation


def checkpoint(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run `module(*args, **kwargs)` without keeping its activations; backward recomputes it with
    the same routing.

    Under `torch.compile` the block runs eagerly, between two graphs; see the docstring of this
    file.

    Args:
        module: the block to checkpoint.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        The module's result.
    """
    return torch_checkpoint(
        module, *args, use_reentrant=False, context_fn=partial(replay_contexts, module), **kwargs
    )


def is_recomputing() -> bool:
    """Return whether torch's non-reentrant checkpoint is recomputing a forward pass, for the
    current backward pass.

    (The first pass of a reentrant checkpoint has no gradients; the one in the backward pass is the
    first with gradients.)
    """
    if torch._C._current_graph_task_id() == -1:  # no backward pass runs
        return False
    # The checkpoint recomputes with hooks of its own on saved tensors.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch_checkpoint.__module__


@operator("count_in_graph", mutates_args=("counts",))
def count_in_graph(counts: Tensor, requested: Tensor) -> None:
    """Add a call's copies per expert to the step's counts, (num_experts,) int64, unless the graph
    runs in a recomputation."""
    if not is_recomputing():
        counts += requested


def generators() -> tuple[Tensor, ...]:
    """Return the states of the default generators: the CPU's, and the current GPU's if CUDA is in
    use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(states)


def set_generators(states: tuple[Tensor, ...]) -> None:
    """Set the default generators to these states."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


class _Caching(AbstractContextManager[None], AbstractSuspended):
    """Makes layers record on a routing cache, or replay it. It is reentrant: each autograd graph
    task runs a recomputation.

    Args:
        layers: all checkpointed layers.
        routing_cache: the routing cache of the checkpointed call.
        replays: replay instead of recording.
    """

    def __init__(
        self, layers: list[RoutingCached], routing_cache: RoutingCache, *, replays: bool
    ) -> None:
        self._layers = layers
        self._routing_cache = routing_cache
        self._replays = replays
        self._before: list[list[RoutingCache | None]] = []
        """For each time it was entered and not left, the caches that the layers had before; none
        while it is suspended."""
        self._turn: AbstractTurn | None = None
        """The micro-batch in flight that records, if one does."""

    def __enter__(self) -> None:
        if self._replays:
            self._routing_cache.start_replay()
        self.resume()
        if not self._replays:  # is suspended while another micro-batch computes
            self._turn = TURN.get()
        if self._turn is not None:
            self._turn.contexts.append(self)

    def __exit__(self, *exception: Any) -> None:
        # Where a micro-batch is ended from outside, Python may leave its contexts later: when it
        # frees the generator of torch's checkpoint, in the context of whoever runs then.
        if self._turn is not None:
            self._turn.contexts.remove(self)
            self._turn = None
        if self._before:
            self.suspend()
        if self._replays:
            self._routing_cache.stop_replay()

    def resume(self) -> None:
        """Set the layers' routing cache."""
        self._before.append([layer.routing_cache for layer in self._layers])
        for layer in self._layers:
            layer.routing_cache = self._routing_cache

    def suspend(self) -> None:
        """Restore the layers' routing caches."""
        for layer, previous in zip(self._layers, self._before.pop()):
            layer.routing_cache = previous
