"""What the Triton kernels must compute, written plainly in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.kernels.activation import ACTIVATIONS
from moesaic.kernels.triton.rows.sort import Order


def rows_times_reference(x: Tensor, w: Tensor, ends: Tensor, token: Tensor | None = None) -> Tensor:
    """Multiply one expert's rows after the other by (E, N, K) matrices, in float64."""
    rows = (x if token is None else x[token.long()]).double()
    starts = [0, *ends.tolist()[:-1]]
    parts = [rows[a:b] @ w[e].double().T for e, (a, b) in enumerate(zip(starts, ends.tolist()))]
    return torch.cat(parts)


def down_grad_reference(
    dy: Tensor, down: Tensor, pre: Sequence[Tensor], ends: Tensor, *, activation: str, weight: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return (d_pre, hidden, d_weight) of rows in expert order by autograd, in float64."""
    with torch.enable_grad():
        *pre, weight = (each.detach().double().requires_grad_() for each in (*pre, weight))
        hidden = ACTIVATIONS[activation](pre[0]) * (pre[1] if len(pre) == 2 else 1.0) * weight[:, None]
        d_hidden = rows_times_reference(dy, down.transpose(1, 2), ends)
        *d_pre, d_weight = torch.autograd.grad(hidden, (*pre, weight), d_hidden)
    return d_pre, hidden.detach(), d_weight


def outer_products_reference(p: Tensor, q: Tensor, ends: Tensor) -> Tensor:
    """Multiply one expert's rows after the other, all in expert order, in float64."""
    starts = [0, *ends.tolist()[:-1]]
    return torch.stack([p[a:b].double().T @ q[a:b].double() for a, b in zip(starts, ends.tolist())])


def row_tiles_reference(ends: Tensor, height: int) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end of the expert's rows) of each tile, in order."""
    tiles, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        tiles += [(expert, row, end) for row in range(start, end, height)]
        start = end
    return tiles


def sort_reference(expert: Tensor, num_experts: int) -> Order:
    """Sort with a list per expert."""
    copies = [[i for i, e in enumerate(expert.tolist()) if e == wanted] for wanted in range(num_experts)]
    order = [i for of_one in copies for i in of_one]
    row = [-1] * len(expert)
    for place, i in enumerate(order):
        row[i] = place
    ends = torch.tensor([len(of_one) for of_one in copies], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    filled = order + [0] * (len(expert) - len(order))
    return Order(torch.tensor(filled, dtype=torch.int32), torch.tensor(row, dtype=torch.int32), ends)


def up_reference(
    x: Tensor, matrices: Sequence[Tensor], ends: Tensor, *, activation: str, weight: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return what `up` must, of rows that stand in expert order, in float64."""
    pre = [rows_times_reference(x, each, ends) for each in matrices]
    hidden = ACTIVATIONS[activation](pre[0]) * (pre[1] if len(pre) == 2 else 1.0)
    return pre, hidden if weight is None else hidden * weight.double()[:, None]
