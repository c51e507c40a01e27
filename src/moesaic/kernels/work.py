"""The input and the gradients of the expert stage, shared by all of its implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.activation import Clamp


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Maps T tokens to R rows in expert order, and rows back to tokens."""

    token: Tensor
    """(R,) int64, int32 by Triton: each row's token. A token has at most one row per expert."""
    by_token: Tensor
    """(R,) int64, int32 by Triton: the rows of token 0, then the rows of token 1, and so on; -1 for
    a copy that is not sent."""
    starts: Tensor
    """(T,) int64: where each token's rows start in `by_token`."""
    per_token: int | None
    """The number of rows of every token; None if tokens have different numbers of rows."""
    has_unsent: bool = False
    """Whether some copies may be unsent. The rows of unsent copies come after those of all experts,
    from `ExpertWork.ends[-1]` on, and hold arbitrary values. On a GPU they stay there, since
    removing them would make the host wait for their number."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the rows of a call lie if they are not in expert order: (R,) indices each, None for
    expert order."""

    x: Tensor | None = None
    """The row of `ExpertWork.x` that each row is."""
    y: Tensor | None = None
    """The row of the result that each row becomes, and the row of the result's gradient that each
    row reads."""
    d_x: Tensor | None = None
    """The row of the gradient of `x` that each row becomes."""


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """One call of the experts. T tokens, R rows, D dim, H hidden, E experts, C matrices that read
    the token."""

    x: Tensor
    """(T, D) tokens, or (R, D) rows in expert order if `dispatch` is None; with `places` any number
    of rows."""
    dispatch: Dispatch | None
    """None if input and result are rows rather than tokens."""
    gates: Tensor | None
    """(R,) routing weights in expert order; None for weights of 1."""
    gates_first: bool
    """Whether the routing weight multiplies the expert's input instead of the expert's result."""
    ends: Tensor
    """(E,) int32: one past the last row of each expert. The last entry is R, or less if
    `dispatch.has_unsent`."""
    up: Tensor
    """(E, C, H, D): the up projection, C matrices per expert. Of two matrices the first is the gate
    of the second."""
    up_bias: Tensor | None
    """(E, C, H) or None."""
    down: Tensor
    """(E, D, H): the down projection."""
    down_bias: Tensor | None
    """(E, D) or None."""
    activation: str
    """A key of `ACTIVATIONS`; with two up matrices it is applied to the output of the first."""
    clamp: Clamp | None = None
    """The constants of clamped SwiGLU, which needs the activation silu; None for no clamping."""
    kernel: str = "auto"
    """The implementation that computes the call: a key of `pick.TIERS`, or "auto"."""
    places: Places | None = None
    """Where rows of a call without dispatch lie; None for expert order. Only `run_experts` and
    `expert_gradients` take it."""

    @property
    def num_rows(self) -> int:
        """The number of rows, R."""
        return len(self.x if self.x_rows is None else self.x_rows)

    @property
    def x_rows(self) -> Tensor | None:
        """(R,): the row of `x` that each row is; None if `x` is in expert order."""
        return self._places.x if self.dispatch is None else self.dispatch.token

    @property
    def y_rows(self) -> Tensor | None:
        """(R,): the row of the result's gradient that each row reads; None if it is in expert
        order."""
        return self.out_rows if self.dispatch is None else self.dispatch.token

    @property
    def out_rows(self) -> Tensor | None:
        """(R,): the row of the result that each row becomes, without dispatch; None for expert
        order."""
        return self._places.y

    @property
    def d_x_rows(self) -> Tensor | None:
        """(R,): the row of the gradient of `x` that each row becomes, without dispatch; None for
        expert order."""
        return self._places.d_x

    @property
    def _places(self) -> Places:
        """The places of the rows, those of expert order by default."""
        return Places() if self.places is None else self.places

    @property
    def hidden(self) -> int:
        """The inner width of an expert, H."""
        return self.down.shape[2]

    def halves(self, pre: Tensor) -> Sequence[Tensor]:
        """Split the output of `up`, (R, C H), into the outputs of its C matrices, (R, H) views."""
        return pre.chunk(self.up.shape[1], 1)

    @property
    def input_weights(self) -> Tensor | None:
        """(R,) weights that multiply the experts' inputs, in the rows' dtype; None if no weights
        do."""
        return self._weights() if self.gates_first else None

    @property
    def result_weights(self) -> Tensor | None:
        """(R,) weights that multiply the experts' results, in the rows' dtype; None if no weights
        do."""
        return None if self.gates_first else self._weights()

    def _weights(self) -> Tensor | None:
        """Return the routing weights in the rows' dtype."""
        return None if self.gates is None else self.gates.to(self.x.dtype)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which gradients backward computes."""

    x: bool = True
    gates: bool = True
    weights: bool = True
    deferred_wgrad: bool = False
    """Whether backward may leave weight-gradient products to `Gradients.finish`; it does so if that
    needs no more memory."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The results of backward. A gradient is None if it was not wanted or if its input is None."""

    x: Tensor | None
    gates: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    finish: Callable[[], None] | None = None
    """Completes the gradients of `up` and `down`, which are incomplete until it has run; None if
    they are complete."""

    @property
    def weights(self) -> list[Tensor]:
        """The computed gradients of parameters, in the order of `ExpertWork`."""
        gradients = [self.up, self.up_bias, self.down, self.down_bias]
        return [gradient for gradient in gradients if gradient is not None]


def counts(ends: Tensor) -> list[int]:
    """Return the number of rows of each expert, on the host."""
    stops: list[int] = ends.tolist()
    starts = [0, *stops[:-1]]
    return [stop - start for start, stop in zip(starts, stops)]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of `dtype` are summed: float32 for 16-bit rows, else their
    own."""
    return dtype if dtype.itemsize >= 4 else torch.float32
