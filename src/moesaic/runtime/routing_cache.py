"""Activation checkpointing that replays the recorded routing and never routes again.

A recomputed router may pick another expert than the first pass did: noise, nondeterministic kernels, a bias that moved
in between. Shapes then differ, or gradients are silently wrong. So the first pass writes each layer's discrete decisions
to a routing cache and the recomputation reads them back. Use `checkpoint(block, x)` in place of torch's, or pass
`context_fn=partial(replay_contexts, block)` to any code that calls torch's non-reentrant checkpoint.

Under `torch.compile` a checkpointed call is a graph break: the block runs eagerly, what surrounds it is compiled.
(A lambda as `context_fn`, and `fullgraph=True`, make dynamo raise.) In the block, compile what holds no MoE layer, such as
attention: a compiled MoE layer has one graph that records and one that replays, which save different tensors, and
torch's checkpoint refuses that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moesaic.routing.route import RoutingRecord


class Cached(NamedTuple):
    """A record, and the random generators around the call it is of."""

    record: RoutingRecord
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]


class RoutingCache:
    """The routing records of one checkpointed call: per layer, in call order.

    A replay draws no noise, so what draws after the layer (dropout, say) would find the generators elsewhere than in the
    first pass. Where the checkpoint has put them back, as torch's does by default, a replay moves them on.

    Args:
        outer: the routing cache of the surrounding checkpoint, for each layer that is in one.
    """

    def __init__(self, outer: dict[RoutingCached, RoutingCache]) -> None:
        self._outer = outer
        self._records: dict[RoutingCached, list[Cached]] = {}
        self._before: dict[RoutingCached, tuple[Tensor, ...]] = {}
        self._position: dict[RoutingCached, int] | None = None

    @property
    def is_replaying(self) -> bool:
        """True during a recomputation."""
        return self._position is not None

    def write(self, layer: RoutingCached, record: RoutingRecord) -> None:
        """Append a record of the first pass, to the surrounding routing caches that record too."""
        self._records.setdefault(layer, []).append(Cached(record, self._before[layer], _generators()))
        outer = self._outer.get(layer)
        if outer is not None and not outer.is_replaying:
            outer.write(layer, record)

    def read(self, layer: RoutingCached) -> RoutingRecord | None:
        """Return the layer's next record, from the innermost routing cache that replays; None in a first pass."""
        if self._position is None:
            self._before[layer] = _generators()
            outer = self._outer.get(layer)
            return None if outer is None else outer.read(layer)
        position = self._position.get(layer, 0)
        self._position[layer] = position + 1
        record, before, after = self._records[layer][position]
        if all(map(torch.equal, before, _generators())):
            _set_generators(after)
        return record

    def start_replay(self) -> None:
        """Rewind; a routing cache may be replayed any number of times (`retain_graph`, several backward passes)."""
        self._position = {}

    def stop_replay(self) -> None:
        """Leave the replay."""
        self._position = None


class RoutingCached(nn.Module):
    """A module whose routing goes onto a routing cache while one is set, which is for the length of a context only."""

    def __init__(self) -> None:
        super().__init__()
        self.routing_cache: RoutingCache | None = None


def replay_contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass and of the recomputation, for `context_fn` of torch's checkpoint.

    Args:
        module: what is checkpointed; every MoE layer in it records and replays.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, RoutingCached)]
    routing_cache = RoutingCache({layer: layer.routing_cache for layer in layers if layer.routing_cache is not None})
    return _Caching(layers, routing_cache, replays=False), _Caching(layers, routing_cache, replays=True)


def checkpoint(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run `module(*args, **kwargs)` without keeping its activations; backward runs it again, with the same routing.

    Under `torch.compile` the block runs eagerly, between two graphs; see the module's docstring.

    Args:
        module: the block to checkpoint.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        What the module returns.
    """
    return torch_checkpoint(module, *args, use_reentrant=False, context_fn=partial(replay_contexts, module), **kwargs)


def is_recomputing() -> bool:
    """Return whether torch's non-reentrant checkpoint runs a forward pass once more, for the backward pass under way.

    A reentrant checkpoint has no gradients in its first pass, and computes with them in backward for the first time.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch_checkpoint.__module__


@torch.library.custom_op("moesaic::count_in_graph", mutates_args=("counts",))
def count_in_graph(counts: Tensor, requested: Tensor) -> None:
    """Add a call's copies per expert to those of the step, (num_experts,) int64, unless the graph runs in a recomputation."""
    if not is_recomputing():
        counts += requested


def _generators() -> tuple[Tensor, ...]:
    """Return the states of the random generators: the CPU's, and the current GPU's where one is in use."""
    return (torch.get_rng_state(), *((torch.cuda.get_rng_state(),) if torch.cuda.is_initialized() else ()))


def _set_generators(states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


class _Caching(AbstractContextManager[None]):
    """Layers record on a routing cache, or replay it. It can be entered again: one recomputation runs per autograd graph task.

    Args:
        layers: every one that is checkpointed.
        routing_cache: of the checkpointed call.
        replays: they replay.
    """

    def __init__(self, layers: list[RoutingCached], routing_cache: RoutingCache, *, replays: bool) -> None:
        self._layers, self._routing_cache, self._replays = layers, routing_cache, replays
        self._before: list[list[RoutingCache | None]] = []

    def __enter__(self) -> None:
        if self._replays:
            self._routing_cache.start_replay()
        self._before.append([layer.routing_cache for layer in self._layers])
        for layer in self._layers:
            layer.routing_cache = self._routing_cache

    def __exit__(self, *exception: Any) -> None:
        for layer, previous in zip(self._layers, self._before.pop()):
            layer.routing_cache = previous
        if self._replays:
            self._routing_cache.stop_replay()
