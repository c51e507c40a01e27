"""The expert stage in Triton kernels, with the signatures of `ExpertKernel`; `kernels/pick.py`
chooses it on GPUs.

    up         hidden = act(x[token] @ up[e].T) * gate           product "up"
    down       rows = hidden @ down[e].T, y[token] += rows       product "down", then a sum of rows
    down_grad  d(pre), hidden again, d(gate)                     product "down_grad"
    d(down)    dy[token].T @ hidden                              product "weight_grad_down"
    d(up)      d(pre).T @ x[token]                               product "weight_grad"
    d(x)       d(pre) @ up[e], then the sum                      product "rows_grad"

Saved for backward are x, the routing and the pre-activations. Backward gathers the tokens and
computes the hidden rows again; it does not need the experts' output (SonicMoE, Guo et al. 2025,
section 4). FLOPs: 6 R D I forward and 12 R D I backward with a gate, 4 and 8 without. Biases are
the initial sums of `up` and `down`; `bias_grad` sums their gradients. Calls that these kernels do
not support run in `whole_batch`: routing weights before the expert, and float64.

R token copies, D the width of a token, I the inner width of an expert. A tile is the part of a
product that one program computes at a time; each product has a tile of its own. `parts` are partial
sums of the routing weights' gradients, (R, column tiles).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels import whole_batch
from moesaic.kernels.triton.bias_grad import bias_grad
from moesaic.kernels.triton.down_grad import down_grad
from moesaic.kernels.triton.grouped import rows_times
from moesaic.kernels.triton.outer import longest_first, outer_products
from moesaic.kernels.triton.parts import Schedules
from moesaic.kernels.triton.rows.launch import device_of
from moesaic.kernels.triton.rows.measured import tile_for
from moesaic.kernels.triton.rows.permute import sum_tokens
from moesaic.kernels.triton.rows.tiles import Shape, Tile, TileDevice, is_odd_width
from moesaic.kernels.triton.self_check import check_products
from moesaic.kernels.triton.up import up
from moesaic.kernels.work import ExpertWork, Gradients, Wanted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILES = ("up", "down", "down_grad", "rows_grad", "weight_grad", "weight_grad_down")
"""The names of a layer's grouped products, each with a tile of its own."""


def shapes(
    num_rows: int, num_experts: int, dim: int, hidden: int, itemsize: int, *, gated: bool
) -> dict[str, Shape]:
    """Return the sizes of a layer's grouped products, by their names in `TILES`.

    Args:
        num_rows: R, token copies.
        num_experts: E.
        dim: D, width of a token.
        hidden: I, inner width of an expert.
        itemsize: bytes of an element.
        gated: whether there are two up matrices, of which the first is the gate.
    """
    per_expert = max(1, num_rows // max(1, num_experts))
    is_odd = is_odd_width(dim, itemsize) or is_odd_width(hidden, itemsize)
    num_ups = 2 if gated else 1
    # the kind of the product, the columns of its result, and the depth of its sums
    sizes = {
        "up": ("up", hidden, dim),
        "down": ("down", dim, hidden),
        "down_grad": ("down_grad", hidden, dim),
        "rows_grad": ("rows_grad", dim, num_ups * hidden),
        "weight_grad": ("weight_grad", dim, per_expert),
        "weight_grad_down": ("weight_grad", hidden, per_expert),
    }
    shape_by_name = {}
    for name, (product, columns, depth) in sizes.items():
        shape_by_name[name] = Shape(
            product=product,
            rows=num_rows,
            num_experts=num_experts,
            columns=columns,
            depth=depth,
            itemsize=itemsize,
            gated=gated,
            is_odd=is_odd,
        )
    return shape_by_name


def default_tiles(work: ExpertWork) -> Mapping[str, Tile]:
    """Return the default tiles of a call, by the names in `TILES`."""
    sizes = (work.num_rows, len(work.ends), work.x.shape[1], work.hidden, work.x.itemsize)
    return _tiles_of(sizes, work.up.shape[1] == 2, device_of(work.x.device))


@lru_cache(maxsize=256)
def _tiles_of(
    sizes: tuple[int, int, int, int, int], gated: bool, device: TileDevice
) -> Mapping[str, Tile]:
    """Return the tiles for the positional arguments of `shapes`, by the names in `TILES`."""
    shape_by_name = shapes(*sizes, gated=gated)
    return {name: tile_for(shape, device) for name, shape in shape_by_name.items()}


def supports(work: ExpertWork) -> bool:
    """Return whether these kernels support this call."""
    return work.x.dtype in DTYPES and not work.gates_first


@torch.no_grad()
def forward(
    work: ExpertWork, out_dtype: torch.dtype, tiles: Mapping[str, Tile] | None = None
) -> tuple[Tensor, Tensor]:
    """Run the experts; see `ExpertKernel.forward`.

    Args:
        work: the call.
        out_dtype: dtype of the result.
        tiles: tiles by the names in `TILES`; None for the defaults.
    """
    if not supports(work):
        return whole_batch.forward(work, out_dtype)
    check_products(work.x.device)
    tile = default_tiles(work) if tiles is None else tiles
    token = _narrow(work.x_rows)
    y_places = _narrow(work.out_rows)
    schedules = Schedules(work.ends, work.num_rows)
    pre, hidden = up(
        work.x, work.up, schedules, tile["up"], **_form(work), bias=work.up_bias, token=token
    )
    # `up` has multiplied the hidden rows by the gates, which only the bias still needs
    rows = rows_times(
        hidden,
        work.down,
        schedules,
        tile["down"],
        transposed=True,
        bias=work.down_bias,
        weight=None if work.down_bias is None else work.gates,
        places=y_places,
    )
    return _summed(rows, work, out_dtype), pre


@torch.no_grad()
def backward(
    work: ExpertWork,
    pre: Tensor,
    dy: Tensor,
    wanted: Wanted,
    tiles: Mapping[str, Tile] | None = None,
) -> Gradients:
    """Compute the gradients; see `ExpertKernel.backward`.

    Args:
        work: the call.
        pre: the pre-activations that `forward` returned.
        dy: gradient of the result, in the dtype of `work.x`.
        tiles: tiles by the names in `TILES`; None for the defaults.
    """
    if not supports(work):
        return whole_batch.backward(work, pre, dy, wanted)
    check_products(work.x.device)
    tile = default_tiles(work) if tiles is None else tiles
    dy_token = _narrow(work.y_rows)
    ends = work.ends
    schedules = Schedules(ends, work.num_rows)
    d_pre, hidden, parts = down_grad(
        dy, work.down, pre, schedules, tile["down_grad"], **_form(work), token=dy_token
    )
    d_down_bias = None
    if work.down_bias is not None:
        d_down_bias, bias_parts = bias_grad(
            dy, ends, bias=work.down_bias, weight=work.gates, token=dy_token
        )
        parts = torch.cat([parts, bias_parts], 1)  # a routing weight multiplies the bias too
    d_gates = _gates_gradient(parts, work, wanted)

    d_up = None
    d_up_bias = None
    d_down = None
    if wanted.weights:
        order = longest_first(ends)
        d_down = outer_products(
            dy, hidden, ends, tile["weight_grad_down"], p_token=dy_token, order=order
        )
    del hidden  # its memory serves the next products
    if wanted.weights:
        d_up = outer_products(
            d_pre, work.x, ends, tile["weight_grad"], q_token=_narrow(work.x_rows), order=order
        ).view(work.up.shape)
        if work.up_bias is not None:
            bias_sums, _ = bias_grad(d_pre, ends)
            d_up_bias = bias_sums.view(work.up_bias.shape)
    else:
        d_down_bias = None  # it was a by-product of the routing weights' gradient

    d_x = None
    if wanted.x:
        rows = _rows_gradient(d_pre, work, schedules, tile["rows_grad"])
        del d_pre
        d_x = _summed(rows, work, work.x.dtype)
    return Gradients(
        x=d_x, gates=d_gates, up=d_up, up_bias=d_up_bias, down=d_down, down_bias=d_down_bias
    )


def _gates_gradient(parts: Tensor, work: ExpertWork, wanted: Wanted) -> Tensor | None:
    """Return the gradient of the routing weights from its partial sums; None if not wanted."""
    if not wanted.gates or work.gates is None:
        return None
    return whole_batch.of_sent(parts.sum(1), work).to(work.gates.dtype)


def _rows_gradient(d_pre: Tensor, work: ExpertWork, schedules: Schedules, tile: Tile) -> Tensor:
    """Return the gradient of the rows that the experts read, (R, D)."""
    places = _narrow(work.d_x_rows)
    matrices = work.up.flatten(1, 2)
    return rows_times(d_pre, matrices, schedules, tile, transposed=False, places=places)


def rows_times_any(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix, with a default tile: (R, K) x (E, K, N) -> (R,
    N)."""
    transposed = w.stride(2) != 1 and w.stride(1) == 1  # a view of matrices as `nn.Linear` has them
    shape = Shape(
        product="down",  # any product of rows takes a tile of this one
        rows=len(x),
        num_experts=len(ends),
        columns=w.shape[2],
        depth=w.shape[1],
        itemsize=x.itemsize,
        is_odd=any(is_odd_width(width, x.itemsize) for width in w.shape[1:]),
    )
    tile = tile_for(shape, device_of(x.device))
    stored = w.transpose(1, 2) if transposed else w
    return rows_times(x, stored, ends, tile, transposed=transposed)


def outer_products_any(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's `dy.T @ x` over its own rows, with a default tile: (R, N), (R, K) -> (E,
    N, K)."""
    per_expert = max(1, len(x) // max(1, len(ends)))
    shape = Shape(
        product="weight_grad",  # any outer product takes a tile of this one
        rows=len(x),
        num_experts=len(ends),
        columns=x.shape[1],
        depth=per_expert,
        itemsize=x.itemsize,
        is_odd=any(is_odd_width(each.shape[1], x.itemsize) for each in (dy, x)),
    )
    return outer_products(dy, x, ends, tile_for(shape, device_of(x.device)))


def _form(work: ExpertWork) -> dict[str, Any]:
    """Return the arguments that `up` and `down_grad` have in common."""
    return {"activation": work.activation, "clamp": work.clamp, "weight": work.gates}


def _narrow(index: Tensor | None) -> Tensor | None:
    """Return indices in int32, as the kernels read them; None for None."""
    return None if index is None else index.to(torch.int32)


def _summed(rows: Tensor, work: ExpertWork, dtype: torch.dtype) -> Tensor:
    """Return the sum of each token's rows, or the rows themselves if the call has no dispatch."""
    if work.dispatch is None:
        return rows.to(dtype)
    dispatch = work.dispatch
    # without weights, which the rows have already; 0 rows per token if their number varies
    return sum_tokens(
        rows, dispatch.by_token, dispatch.starts, None, dispatch.per_token or 0, dtype
    )
