"""`moe_mlp`: the experts of a layer, from tokens to weighted sums, as one differentiable function.

The steps are those of `kernels/triton/expert_stage.py`, which lists their bytes and FLOPs. Forward
keeps x, the routing and the pre-activations for backward: T D + R C I elements and 12 R + 4 E
bytes, where C is 2 with a gate and otherwise 1. The layer of the library runs the same steps
through `kernels/expert_ffn.py`. In addition `moe_mlp` accepts tiles from a search and copies that
are not sent to any expert. It never makes the host wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.kernels.activation import ACTIVATIONS, Clamp
from moesaic.kernels.triton import expert_stage
from moesaic.kernels.triton.rows.tiles import Tile
from moesaic.kernels.work import Dispatch, ExpertWork, Wanted


def moe_mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    weight: Tensor,
    copy: Tensor,
    row: Tensor,
    ends: Tensor,
    *,
    top_k: int,
    activation: str,
    biases: tuple[Tensor, ...] = (),
    clamp: Clamp | None = None,
    tiles: Mapping[str, Tile] | None = None,
) -> Tensor:
    """Run the experts of each token and return the weighted sums, differentiable in x, the
    parameters and the routing weights.

    Args:
        x: (T, D) tokens.
        up: (E, C, I, D), one up matrix, or a gate matrix and an up matrix.
        down: (E, D, I).
        weight: (T K,) float32 routing weights, token after token.
        copy: (T K,) int32, from `sort`: the copy in each row.
        row: (T K,) int32, from `sort`: the row of each copy; negative for copies that are not sent.
        ends: (E,) int32, from `sort`: the end of each expert's rows.
        top_k: K, copies per token.
        activation: "silu", "gelu" or "relu".
        biases: (E, C, I) and (E, D); empty for none.
        clamp: the constants of clamped SwiGLU; None for no clamping.
        tiles: tiles by names of products, from `Tuned.tiles`; None for the defaults.

    Returns:
        (T, D) in the dtype of `x`.
    """
    assert activation in ACTIVATIONS, activation
    assert x.dtype == up.dtype == down.dtype, (x.dtype, up.dtype, down.dtype)
    assert len(weight) == len(copy) == len(row) == len(x) * top_k, (
        weight.shape,
        copy.shape,
        x.shape,
        top_k,
    )
    order = _Order(copy=copy, row=row, ends=ends)
    form = _Form(top_k=top_k, activation=activation, clamp=clamp, tiles=tiles)
    parameters = (up, down, *biases)
    y: Tensor = _Mlp.apply(x, weight, order, form, *parameters)
    return y


class _Order(NamedTuple):
    """Where each copy goes; see `moe_mlp`."""

    copy: Tensor
    row: Tensor
    ends: Tensor


class _Form(NamedTuple):
    """How the experts compute; see `moe_mlp`."""

    top_k: int
    activation: str
    clamp: Clamp | None
    tiles: Mapping[str, Tile] | None


class _Mlp(torch.autograd.Function):
    """`moe_mlp` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, order: _Order, form: _Form, *parameters: Tensor
    ) -> Tensor:
        work = _work(x, weight, order, form, parameters)
        y, pre = expert_stage.forward(work, x.dtype, form.tiles)
        ctx.save_for_backward(pre, *order, x, weight, *parameters)
        ctx.form = form
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return a gradient for each argument of `forward`; None for the order and the form."""
        pre, copy, row, ends, x, weight, *parameters = ctx.saved_tensors
        order = _Order(copy=copy, row=row, ends=ends)
        work = _work(x, weight, order, ctx.form, parameters)
        grads = expert_stage.backward(work, pre, dy.contiguous(), Wanted(), ctx.form.tiles)
        assert grads.gates is not None
        # from the order of rows to that of copies; a copy that is not sent (row < 0) gets 0
        any_row = row.clamp(0, max(len(row) - 1, 0))
        d_weight = grads.gates.index_select(0, any_row)
        d_weight = d_weight.masked_fill(row < 0, 0.0).to(weight.dtype)
        d_biases = (grads.up_bias, grads.down_bias) if work.up_bias is not None else ()
        return grads.x, d_weight, None, None, grads.up, grads.down, *d_biases


def _work(
    x: Tensor, weight: Tensor, order: _Order, form: _Form, parameters: Sequence[Tensor]
) -> ExpertWork:
    """Return the argument of `expert_stage`: routing weights in expert order, rows of each token in
    the order of its copies."""
    up, down, *biases = parameters
    up_bias, down_bias = biases or (None, None)
    starts = torch.arange(0, len(order.row), form.top_k, device=order.row.device)
    dispatch = Dispatch(
        token=order.copy // form.top_k, by_token=order.row, starts=starts, per_token=form.top_k
    )
    return ExpertWork(
        x=x,
        dispatch=dispatch,
        gates=weight.index_select(0, order.copy),
        gates_first=False,
        ends=order.ends,
        up=up,
        up_bias=up_bias,
        down=down,
        down_bias=down_bias,
        activation=form.activation,
        clamp=form.clamp,
    )
