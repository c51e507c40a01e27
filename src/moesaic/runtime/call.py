"""What one rank brings to one run of a program, and the values that the run has: no transport, no interpreter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor

from moesaic.experts.experts import AbstractExperts, DeferredWgrad, Weights
from moesaic.kernels.codecs import AbstractCodec, codec_named
from moesaic.program.sizes import CallSizes

Value = Tensor | Weights
"""Of a slot: rows, or parameters of experts."""
Environment = dict[str, Value]
"""Slots by name. What an expert task keeps for its gradient stands under `kept(task)`."""
Codecs = Callable[[str], AbstractCodec]
"""From a codec's name to what encodes."""


@lru_cache(maxsize=64)
def known_codec(name: str) -> AbstractCodec:
    """Return the codec of that name with its default options, made once."""
    return codec_named(name)


@dataclass
class Call:
    """What one rank brings to one run of a program."""

    rank: int
    sizes: CallSizes
    experts: AbstractExperts
    """Computes; the weights come through the program."""
    first_tag: int = 0
    """Tags of this run's movements start here; runs in flight at once need ranges apart."""
    weight_first: bool = False
    """Multiply by the routing weight before the expert rather than after it."""
    has_empty_rows: bool = False
    """Some rows have no token: their index is negative."""
    may_defer_wgrad: bool = True
    """Products for weights may wait until the rows' gradient is on its way, and what they read is held until then."""
    codecs: Codecs = known_codec
    """What encodes, by name; whatever it returns lays messages out as the codec of that name does."""
    known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What tasks have worked out from counts and indices, for those that come after them, the backward pass among them. A
    call that is made from another one by `replace` starts without."""
    deferred_wgrad: dict[str, DeferredWgrad] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By slots of weights' gradients: what is left to do before they are read."""

    def finish(self, names: Iterable[str] | None = None) -> None:
        """Do what is left for some slots, or for all."""
        for name in list(self.deferred_wgrad) if names is None else names:
            for work in self.deferred_wgrad.pop(name, ()):
                work()


def kept(task_name: str) -> str:
    """Return where an expert task's activations stand in the environment; a gradient task has the same place."""
    return f"{task_name.removesuffix(_COTANGENT)}*"


def rows(value: Value) -> Tensor:
    """Return a slot's value as rows.

    Raises:
        TypeError: if it holds parameters.
    """
    if not isinstance(value, Tensor):
        raise TypeError("a task reads rows where the slot holds parameters")
    return value


_COTANGENT = "'"
