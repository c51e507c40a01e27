"""The expert stage on any device: torch operations over all rows at once. The host waits only where
`grouped_matmul` loops over experts, and says so.

The grouped products are arguments. A tier with other products (`pick.TIERS`) is therefore one or
two functions (`by_products`).
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
        return sum_rows(results, work.dispatch, weights=work.result_weights, dtype=out_dtype), pre
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
    hidden = pre.new_empty(len(pre), work.hidden)
    d_pre = torch.empty_like(pre)
    pre_parts = work.halves(pre)
    d_first, *gate = work.halves(d_pre)
    gate_rows = None
    if gate:
        gate_rows = gate[0]
    hidden_rows_into(pre_parts, work.activation, hidden, gate_rows, work.clamp)
    grad = rows_times(dy_rows, work.down, work.ends)
    d_gates = None
    if work.result_weights is not None:
        if wanted.gates:
            d_gates = dot_rows(grad, hidden)
            if work.down_bias is not None:
                d_gates = d_gates + (dy_rows * _bias_per_row(work.down_bias, work)).sum(1)
        torch.mul(grad, work.result_weights.unsqueeze(1), out=d_first)
        dy_rows = dy_rows * work.result_weights.unsqueeze(1)
    else:
        d_first.copy_(grad)
    hidden_gradient_into(pre_parts, work.activation, d_first, gate_rows, work.clamp)
    inputs = _gathered(work.x, work.x_rows)
    d_rows = None
    if wanted.x or (wanted.gates and work.input_weights is not None):
        d_rows = rows_times(d_pre, work.up.flatten(1, 2), work.ends)
    if work.input_weights is not None:
        if d_rows is not None:
            d_gates = dot_rows(d_rows, inputs) if wanted.gates else None
            d_rows = d_rows * work.input_weights.unsqueeze(1)
        inputs = inputs * work.input_weights.unsqueeze(1)
    if d_rows is not None:
        d_rows = (
            _placed(d_rows, work.d_x_rows)
            if work.dispatch is None
            else sum_rows(d_rows, work.dispatch)
        )
    weights = wanted.weights
    return Gradients(
        x=d_rows if wanted.x else None,
        gates=None
        if d_gates is None or work.gates is None
        else of_sent(d_gates, work).to(work.gates.dtype),
        up=outer_products(d_pre, inputs, work.ends).view(work.up.shape) if weights else None,
        up_bias=_sum_per_expert(d_pre, work).view(work.up_bias.shape)
        if weights and work.up_bias is not None
        else None,
        down=outer_products(dy_rows, hidden, work.ends) if weights else None,
        down_bias=_sum_per_expert(dy_rows, work)
        if weights and work.down_bias is not None
        else None,
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
    return x if index is None else x.index_select(0, index)


def _placed(rows: Tensor, places: Tensor | None) -> Tensor:
    """Return the rows in the places that are given for each."""
    return rows if places is None else torch.empty_like(rows).index_copy_(0, places.long(), rows)


def _bias_per_row(biases: Tensor, work: ExpertWork) -> Tensor:
    """Return the bias of each row's expert: (E, width) -> (R, width)."""
    return biases.index_select(0, expert_of_rows(work.ends, work.num_rows))


def _sum_per_expert(rows: Tensor, work: ExpertWork) -> Tensor:
    """Return the sum of each expert's rows, (E, width), in a fixed order."""
    if is_limited(rows.device):
        ones = rows.new_ones(len(rows), 1)
        return outer_products(rows, ones, work.ends).squeeze(2)
    counts = work.ends.long().diff(prepend=work.ends.new_zeros(1).long())
    return torch.segment_reduce(rows, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
