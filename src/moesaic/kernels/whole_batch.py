"""The expert stage on any device: torch operations over all rows at once. The host waits only where
`grouped_matmul` loops over experts, and says so.

The grouped products are arguments. A tier, an opt-in implementation with other products
(`pick.TIERS`), is therefore one or two functions (`by_products`).

`pre` are the pre-activations; the other words and the letters of the shapes are those of
`ExpertWork`. Input and result weights are the routing weights, one of them None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moesaic.kernels.activation import hidden_gradient_into, hidden_rows, hidden_rows_into
from moesaic.kernels.grouped_matmul import outer_products, rows_times
from moesaic.kernels.permute import dot_rows, expert_of_rows, sum_rows
from moesaic.kernels.pick import is_limited, require
from moesaic.kernels.work import ExpertWork, Gradients, Wanted

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function with the signature of `grouped_matmul.rows_times` or
`grouped_matmul.outer_products`."""


@torch.no_grad()
def forward(
    work: ExpertWork, out_dtype: torch.dtype, rows_times: GroupedProduct = rows_times
) -> tuple[Tensor, Tensor]:
    """Run the experts; see `ExpertKernel.forward`."""
    inputs = _gathered(work.x, work.x_rows)
    if work.input_weights is not None:
        inputs = inputs * work.input_weights.unsqueeze(1)
    pre = rows_times(inputs, work.up.flatten(1, 2).transpose(1, 2), work.ends)
    if work.up_bias is not None:
        pre += _bias_per_row(work.up_bias.flatten(1), work)

    hidden = hidden_rows(work.halves(pre), work.activation, work.clamp)
    results = rows_times(hidden, work.down.transpose(1, 2), work.ends)
    if work.down_bias is not None:
        results = results + _bias_per_row(work.down_bias, work)

    if work.dispatch is not None:
        tokens = sum_rows(results, work.dispatch, weights=work.result_weights, dtype=out_dtype)
        return tokens, pre
    if work.result_weights is not None:
        results = results * work.result_weights.unsqueeze(1)
    return _placed(results, work.out_rows).to(out_dtype), pre


@torch.no_grad()
def backward(
    work: ExpertWork,
    pre: Tensor,
    dy: Tensor,
    wanted: Wanted,
    rows_times: GroupedProduct = rows_times,
    outer_products: GroupedProduct = outer_products,
) -> Gradients:
    """Compute the gradients; see `ExpertKernel.backward`."""
    dy_rows = _gathered(dy, work.y_rows).contiguous()
    pre_parts = work.halves(pre)
    # d_parts first hold the gradient of `hidden` and, of a gated expert, the activated gate;
    # `hidden_gradient_into` replaces both by the gradients of the pre-activations
    d_pre = torch.empty_like(pre)
    d_parts = work.halves(d_pre)
    d_first = d_parts[0]
    d_second = d_parts[1] if len(d_parts) > 1 else None

    hidden = pre.new_empty(len(pre), work.hidden)
    hidden_rows_into(pre_parts, work.activation, hidden, d_second, work.clamp)
    d_hidden = rows_times(dy_rows, work.down, work.ends)
    d_gates = None
    if work.result_weights is not None:
        if wanted.gates:
            # dy times the result, which is hidden @ down.T + bias
            d_gates = dot_rows(d_hidden, hidden)
            if work.down_bias is not None:
                d_gates = d_gates + (dy_rows * _bias_per_row(work.down_bias, work)).sum(1)
        column = work.result_weights.unsqueeze(1)
        torch.mul(d_hidden, column, out=d_first)
        dy_rows = dy_rows * column
    else:
        d_first.copy_(d_hidden)
    hidden_gradient_into(pre_parts, work.activation, d_first, d_second, work.clamp)

    inputs = _gathered(work.x, work.x_rows)
    d_x = None  # by rows until they are summed or placed
    if wanted.x or (wanted.gates and work.input_weights is not None):
        d_x = rows_times(d_pre, work.up.flatten(1, 2), work.ends)
    if work.input_weights is not None:
        column = work.input_weights.unsqueeze(1)
        if d_x is not None:
            d_gates = dot_rows(d_x, inputs) if wanted.gates else None
            d_x = d_x * column
        inputs = inputs * column
    if d_x is not None and work.dispatch is not None:
        d_x = sum_rows(d_x, work.dispatch)
    elif d_x is not None:
        d_x = _placed(d_x, work.d_x_rows)
    if d_gates is not None and work.gates is not None:
        d_gates = of_sent(d_gates, work).to(work.gates.dtype)
    wants = wanted.weights
    return Gradients(
        x=d_x if wanted.x else None,
        gates=d_gates,
        up=outer_products(d_pre, inputs, work.ends).view(work.up.shape) if wants else None,
        up_bias=_bias_gradient(work.up_bias, d_pre, work) if wants else None,
        down=outer_products(dy_rows, hidden, work.ends) if wants else None,
        down_bias=_bias_gradient(work.down_bias, dy_rows, work) if wants else None,
    )


def by_products(
    name: str,
    majors: tuple[int, ...],
    multiple: int,
    rows_times: GroupedProduct,
    outer_products: GroupedProduct = outer_products,
) -> tuple[Callable[[ExpertWork, torch.dtype], tuple[Tensor, Tensor]], Callable[..., Gradients]]:
    """Return `ExpertKernel.forward` and `ExpertKernel.backward` of a tier with its own grouped
    products.

    Args:
        name, majors, multiple: the tier's requirements, as for `require`.
        rows_times: the tier's product of rows and matrices.
        outer_products: the tier's wgrad product.
    """

    def checked_forward(work: ExpertWork, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        require(work, name, majors, multiple)
        return forward(work, out_dtype, rows_times)

    return checked_forward, partial(backward, rows_times=rows_times, outer_products=outer_products)


def of_sent(d_gates: Tensor, work: ExpertWork) -> Tensor:
    """Set the routing-weight gradients of unsent copies, whose rows hold arbitrary values, to
    zero."""
    if work.dispatch is None or not work.dispatch.has_unsent:
        return d_gates
    row = torch.arange(len(d_gates), device=d_gates.device)
    return d_gates.masked_fill(row >= work.ends[-1], 0.0)


def _gathered(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the rows of `x` with these indices; None for all in order."""
    return x if index is None else x.index_select(0, index)


def _placed(rows: Tensor, places: Tensor | None) -> Tensor:
    """Return the rows in the places that are given for each."""
    return rows if places is None else torch.empty_like(rows).index_copy_(0, places.long(), rows)


def _bias_per_row(biases: Tensor, work: ExpertWork) -> Tensor:
    """Return the bias of each row's expert: (E, width) -> (R, width)."""
    return biases.index_select(0, expert_of_rows(work.ends, work.num_rows))


def _bias_gradient(bias: Tensor | None, d_rows: Tensor, work: ExpertWork) -> Tensor | None:
    """Return the gradient of a bias, given that of the rows it is added to; None for no bias."""
    return None if bias is None else _sum_per_expert(d_rows, work).view(bias.shape)


def _sum_per_expert(rows: Tensor, work: ExpertWork) -> Tensor:
    """Return the sum of each expert's rows, (E, width), in a fixed order."""
    if is_limited(rows.device):
        ones = rows.new_ones(len(rows), 1)
        return outer_products(rows, ones, work.ends).squeeze(2)
    counts = work.ends.long().diff(prepend=work.ends.new_zeros(1).long())
    return torch.segment_reduce(rows, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
