"""The expert stage as one differentiable operation: dispatch, two or three grouped products, combine.

Backward keeps the input, the routing, the weights and the pre-activations, R * H numbers per matrix that reads the token:
it gathers the rows and computes the activation again (docs/kernels.md has the bytes). Both passes are custom ops with fake
implementations, so that `torch.compile` and export see one node each, whatever runs behind it (`pick.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.kernels.activation import Clamp
from moesaic.kernels.pick import expert_kernel
from moesaic.kernels.work import Dispatch, ExpertWork, Gradients, Wanted


def expert_ffn(work: ExpertWork, out_dtype: torch.dtype | None = None) -> Tensor:
    """Run the experts, differentiable in x, gates and the weights.

    Args:
        work: the call.
        out_dtype: of the result; None for that of `work.x`.

    Returns:
        (T, D), or (R, D) without `work.dispatch`.
    """
    form = _Form.of(work, work.x.dtype if out_dtype is None else out_dtype)
    y: Tensor = _ExpertFfn.apply(form, *_tensors(work))
    return y


def run_experts(work: ExpertWork) -> tuple[Tensor, Tensor]:
    """Run the experts without autograd; returns the result and what `expert_gradients` reads: (R, C H), what `up` gives."""
    return expert_kernel(work.x.device, work.kernel).forward(work, work.x.dtype)


def expert_gradients(work: ExpertWork, pre: Tensor, dy: Tensor, *, deferred_wgrad: bool = False) -> Gradients:
    """Return all gradients without autograd.

    Args:
        work: the call.
        pre: what `run_experts` returned beside its result.
        dy: gradient of the result.
        late: some of the weights' gradients may be left for `Gradients.finish`.
    """
    return expert_kernel(work.x.device, work.kernel).backward(
        work, pre, dy.to(work.x.dtype).contiguous(), Wanted(deferred_wgrad=deferred_wgrad)
    )


@torch.library.custom_op("moesaic::expert_forward", mutates_args=())
def expert_forward(
    x: Tensor, gates: Tensor | None, token: Tensor | None, by_token: Tensor | None, starts: Tensor | None,
    per_token: int, has_unsent: bool, ends: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, activation: str, clamp: Sequence[float], gates_first: bool, kernel: str, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and the pre-activations; the arguments are an `ExpertWork`, flat."""
    work = _work(
        x, gates, token, by_token, starts, per_token, has_unsent, ends, up, up_bias, down, down_bias, activation, clamp,
        gates_first, kernel,
    )  # fmt: skip
    return expert_kernel(x.device, kernel).forward(work, out_dtype)


@expert_forward.register_fake
def _(
    x: Tensor, gates: Tensor | None, token: Tensor | None, by_token: Tensor | None, starts: Tensor | None,
    per_token: int, has_unsent: bool, ends: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, activation: str, clamp: Sequence[float], gates_first: bool, kernel: str, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows = x.shape[0] if token is None else token.shape[0]
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(num_rows, up.shape[1] * up.shape[2])


@register_flop_formula(torch.ops.moesaic.expert_forward)
def _(x, gates, token, by_token, starts, per_token, has_unsent, ends, up, up_bias, down, *_, **__) -> int:  # type: ignore[no-untyped-def]
    """One product per matrix, of all rows; arguments are shapes."""
    return (up[1] + 1) * _product_flops(x, token, down)


@torch.library.custom_op("moesaic::expert_backward", mutates_args=())
def expert_backward(
    x: Tensor, gates: Tensor | None, token: Tensor | None, by_token: Tensor | None, starts: Tensor | None,
    per_token: int, has_unsent: bool, ends: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, activation: str, clamp: Sequence[float], gates_first: bool, kernel: str,
    pre: Tensor, dy: Tensor, wants_x: bool, wants_gates: bool, wants_weights: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x, gates, up, its bias, down and its bias; empty ones for what is not wanted."""
    work = _work(
        x, gates, token, by_token, starts, per_token, has_unsent, ends, up, up_bias, down, down_bias, activation, clamp,
        gates_first, kernel,
    )  # fmt: skip
    wanted = Wanted(x=wants_x, gates=wants_gates, weights=wants_weights)
    found = expert_kernel(x.device, kernel).backward(work, pre, dy.to(x.dtype).contiguous(), wanted)
    d_x, d_gates = (x.new_empty(0) if each is None else each for each in (found.x, found.gates))
    return [d_x, d_gates, *found.weights]


@expert_backward.register_fake
def _(
    x: Tensor, gates: Tensor | None, token: Tensor | None, by_token: Tensor | None, starts: Tensor | None,
    per_token: int, has_unsent: bool, ends: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, activation: str, clamp: Sequence[float], gates_first: bool, kernel: str,
    pre: Tensor, dy: Tensor, wants_x: bool, wants_gates: bool, wants_weights: bool,
) -> list[Tensor]:  # fmt: skip
    d_x = x.new_empty(x.shape if wants_x else (0,))
    d_gates = gates.new_empty(gates.shape) if gates is not None and wants_gates else x.new_empty(0)
    weights = [each for each in (up, up_bias, down, down_bias) if each is not None] if wants_weights else []
    return [d_x, d_gates, *(each.new_empty(each.shape) for each in weights)]


@register_flop_formula(torch.ops.moesaic.expert_backward)
def _(
    x: Any, gates: Any, token: Any, by_token: Any, starts: Any, per_token: Any, has_unsent: Any, ends: Any, up: Any,
    up_bias: Any, down: Any, down_bias: Any, activation: Any, clamp: Any, gates_first: Any, kernel: Any, pre: Any, dy: Any,
    wants_x: Any, wants_gates: Any, wants_weights: Any, **_: Any,
) -> int:  # fmt: skip
    """One product for the hidden rows, and per matrix one for its own gradient and, of those that read, one for the rows'."""
    reaches_rows = wants_x or (wants_gates and gates is not None and gates_first)
    products = 1 + wants_weights * (up[1] + 1) + reaches_rows * up[1]
    return products * _product_flops(x, token, down)


def _product_flops(x: Sequence[int], token: Sequence[int] | None, down: Sequence[int]) -> int:
    """Return the FLOPs of multiplying every row by its expert's matrix once; arguments are shapes."""
    num_rows = x[0] if token is None else token[0]
    return 2 * num_rows * down[1] * down[2]


def _work(
    x: Tensor, gates: Tensor | None, token: Tensor | None, by_token: Tensor | None, starts: Tensor | None,
    per_token: int, has_unsent: bool, ends: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
    down_bias: Tensor | None, activation: str, clamp: Sequence[float], gates_first: bool, kernel: str,
) -> ExpertWork:  # fmt: skip
    dispatch = None
    if token is not None:
        assert by_token is not None
        assert starts is not None
        dispatch = Dispatch(
            token=token, by_token=by_token, starts=starts, per_token=per_token or None, has_unsent=has_unsent
        )
    return ExpertWork(
        x=x, dispatch=dispatch, gates=gates, gates_first=gates_first, ends=ends, up=up, up_bias=up_bias,
        down=down, down_bias=down_bias, activation=activation, clamp=Clamp(*clamp) if clamp else None,
        kernel=kernel,
    )  # fmt: skip


def _tensors(work: ExpertWork) -> list[Tensor | None]:
    """Return all tensors of a call, in the order that `_Form` reads."""
    sent = work.dispatch
    indices = [None] * 3 if sent is None else [sent.token, sent.by_token, sent.starts]
    return [work.x, work.gates, *indices, work.ends, work.up, work.up_bias, work.down, work.down_bias]


@dataclass(frozen=True)
class _Form:
    """What a call is besides its tensors."""

    per_token: int
    """0 where it varies."""
    has_unsent: bool
    activation: str
    clamp: Clamp | None
    gates_first: bool
    kernel: str
    out_dtype: torch.dtype

    @classmethod
    def of(cls, work: ExpertWork, out_dtype: torch.dtype) -> _Form:
        per_token = 0 if work.dispatch is None else work.dispatch.per_token or 0
        return cls(
            per_token, work.dispatch is not None and work.dispatch.has_unsent,
            work.activation, work.clamp, work.gates_first, work.kernel, out_dtype,
        )  # fmt: skip

    def arguments(self, *tensors: Tensor | None) -> list[Any]:
        """Return the arguments of `expert_forward`."""
        return [*self._shared(*tensors), self.out_dtype]

    def backward(self, pre: Tensor, dy: Tensor, wanted: Wanted, *tensors: Tensor | None) -> list[Tensor]:
        """Call `expert_backward`."""
        found: list[Tensor] = expert_backward(*self._shared(*tensors), pre, dy, wanted.x, wanted.gates, wanted.weights)
        return found

    def _shared(self, *tensors: Tensor | None) -> list[Any]:
        x, gates, token, by_token, starts, *weights = tensors
        routing = [x, gates, token, by_token, starts, self.per_token, self.has_unsent]
        clamp = [] if self.clamp is None else self.clamp.numbers
        return [*routing, *weights, self.activation, clamp, self.gates_first, self.kernel]


class _ExpertFfn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, *tensors: Tensor | None) -> Tensor:
        y, pre = expert_forward(*form.arguments(*tensors))
        ctx.form = form
        ctx.save_for_backward(*tensors, pre)
        found: Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, pre = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        wanted = Wanted(x=needs[0], gates=needs[1], weights=any(needs[6:]))
        d_x, d_gates, *d_weights = ctx.form.backward(pre, dy, wanted, *tensors)
        weights = iter(d_weights)
        of_weights = [next(weights) if wanted.weights and each is not None else None for each in tensors[6:]]
        d_inputs = [d_x if needs[0] else None, d_gates if needs[1] else None, None, None, None, None]
        return None, *d_inputs, *of_weights
