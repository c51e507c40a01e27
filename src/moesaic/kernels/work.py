"""What the expert stage works on: the one argument of every implementation of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.activation import Clamp


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """How tokens become rows in expert order and rows become tokens again. T tokens, R rows."""

    token: Tensor
    """(R,) int64: each row's token. A token has at most one row at an expert."""
    by_token: Tensor
    """(R,) int64: the rows of token 0, then those of token 1 and so on; -1 for a copy that is not sent."""
    starts: Tensor
    """(T,) int64: where each token's rows start in `by_token`."""
    per_token: int | None
    """How many rows every token has; None if that varies."""
    has_unsent: bool = False
    """Some copies may not be sent: they stand behind the rows of all experts, from `ExpertWork.ends[-1]` on, and hold anything.
    A GPU keeps them there, since to take them out the host would have to wait for their number."""


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """One call of the experts. T tokens, R rows, D dim, H hidden, E experts, C matrices that read the token."""

    x: Tensor
    """(T, D) tokens, or (R, D) rows in expert order where there is no `dispatch`."""
    dispatch: Dispatch | None
    """None: rows come and leave as rows."""
    gates: Tensor | None
    """(R,) routing weights in expert order; None for weights of 1."""
    gates_first: bool
    """Whether the routing weight multiplies the expert's input rather than its result."""
    ends: Tensor
    """(E,) int32: one past the last row of each expert; the last is R, or less where `dispatch.has_unsent`."""
    up: Tensor
    """(E, C, H, D): what reads the token, C matrices of an expert: one, or two, where the first gates the second."""
    up_bias: Tensor | None
    """(E, C, H) or None."""
    down: Tensor
    """(E, D, H): writes the result."""
    down_bias: Tensor | None
    """(E, D) or None."""
    activation: str
    """A key of `ACTIVATIONS`; of two matrices that read the token, that of the first."""
    clamp: Clamp | None = None
    """Of clamped SwiGLU, whose activation is silu; None for others."""
    kernel: str = "auto"
    """What computes it: a name in `pick.TIERS`, or auto."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.x) if self.dispatch is None else len(self.dispatch.token)

    @property
    def hidden(self) -> int:
        """H."""
        return self.down.shape[2]

    def halves(self, pre: Tensor) -> Sequence[Tensor]:
        """Return the C parts, (R, H) each, of what `up` gives, (R, C H), as views."""
        return pre.chunk(self.up.shape[1], 1)

    @property
    def before(self) -> Tensor | None:
        """(R,) weights of the experts' inputs, in the rows' dtype."""
        return self._weights() if self.gates_first else None

    @property
    def after(self) -> Tensor | None:
        """(R,) weights of the experts' results, in the rows' dtype."""
        return None if self.gates_first else self._weights()

    def _weights(self) -> Tensor | None:
        return None if self.gates is None else self.gates.to(self.x.dtype)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which gradients backward computes."""

    x: bool = True
    gates: bool = True
    weights: bool = True
    deferred_wgrad: bool = False
    """Products for the weights' gradients may be left for `Gradients.finish`, where that takes no further memory."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What backward found; a gradient that was not wanted, or whose input is not there, is None."""

    x: Tensor | None
    gates: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    finish: Callable[[], None] | None = None
    """Writes what is left of the gradients of `up` and `down`; None where nothing is."""

    @property
    def weights(self) -> list[Tensor]:
        """The gradients of all parameters that were found, in the order of `ExpertWork`."""
        found = [self.up, self.up_bias, self.down, self.down_bias]
        return [gradient for gradient in found if gradient is not None]


def counts(ends: Tensor) -> list[int]:
    """Return each expert's rows, on the host."""
    stops: list[int] = ends.tolist()
    return [stop - start for start, stop in zip([0, *stops], stops)]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that rows are summed in: float32 for 16-bit ones."""
    return torch.promote_types(dtype, torch.float32)
