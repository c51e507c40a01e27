"""Plain float64 reference implementations of the Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.activation import ACTIVATIONS


def rows_times_reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix, of (E, N, K), in float64."""
    rows = x.double()
    starts = [0, *ends.tolist()[:-1]]
    parts = [rows[a:b] @ w[e].double().T for e, (a, b) in enumerate(zip(starts, ends.tolist()))]
    return torch.cat(parts)


def down_grad_reference(
    dy: Tensor, down: Tensor, pre: Tensor, ends: Tensor, *, activation: str, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (d_pre, hidden, d_weight) of rows in expert order by autograd in float64; `pre` is
    (R, I) or (R, 2 I)."""
    with torch.enable_grad():
        pre, weight = (each.detach().double().requires_grad_() for each in (pre, weight))
        first, *other = pre.split(down.shape[2], 1)
        hidden = ACTIVATIONS[activation](first) * (other[0] if other else 1.0) * weight[:, None]
        d_hidden = rows_times_reference(dy, down.transpose(1, 2), ends)
        d_pre, d_weight = torch.autograd.grad(hidden, (pre, weight), d_hidden)
    return d_pre, hidden.detach(), d_weight


def outer_products_reference(p: Tensor, q: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows of one side with those of the other, in float64; both are in
    expert order."""
    starts = [0, *ends.tolist()[:-1]]
    return torch.stack([p[a:b].double().T @ q[a:b].double() for a, b in zip(starts, ends.tolist())])


def row_tiles_reference(ends: Tensor, height: int) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end of the expert's rows) for each tile, in order."""
    tiles = []
    start = 0
    for expert, end in enumerate(ends.tolist()):
        tiles += [(expert, row, end) for row in range(start, end, height)]
        start = end
    return tiles


class RowOrder(NamedTuple):
    """What `sort` returns."""

    copy: Tensor
    row: Tensor
    ends: Tensor


def sort_reference(expert: Tensor, num_experts: int) -> RowOrder:
    """Sort copies with a list per expert."""
    copies = [
        [i for i, e in enumerate(expert.tolist()) if e == own_expert]
        for own_expert in range(num_experts)
    ]
    order = [i for own_copies in copies for i in own_copies]
    row = [-1] * len(expert)
    for place, i in enumerate(order):
        row[i] = place
    ends = torch.tensor([len(own_copies) for own_copies in copies], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    filled = order + [0] * (len(expert) - len(order))
    return RowOrder(
        torch.tensor(filled, dtype=torch.int32), torch.tensor(row, dtype=torch.int32), ends
    )


def up_reference(
    x: Tensor, matrices: Tensor, ends: Tensor, *, activation: str, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `up` in float64 for rows in expert order; matrices are (E, 1 or 2, I, D)."""
    pre = [rows_times_reference(x, matrix, ends) for matrix in matrices.unbind(1)]
    hidden = ACTIVATIONS[activation](pre[0]) * (pre[1] if len(pre) == 2 else 1.0)
    return torch.cat(pre, 1), hidden if weight is None else hidden * weight.double()[:, None]
