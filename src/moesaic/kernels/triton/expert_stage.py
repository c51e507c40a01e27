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
    parts = 2 if gated else 1
    sizes = {
        "up": ("up", hidden, dim),
        "down": ("down", dim, hidden),
        "down_grad": ("down_grad", hidden, dim),
        "rows_grad": ("rows_grad", dim, parts * hidden),
        "weight_grad": ("weight_grad", dim, per_expert),
        "weight_grad_down": ("weight_grad", hidden, per_expert),
    }
    return {
        name: Shape(
            product=product,
            rows=num_rows,
            num_experts=num_experts,
            columns=columns,
            depth=depth,
            itemsize=itemsize,
            gated=gated,
            is_odd=is_odd,
        )
        for name, (product, columns, depth) in sizes.items()
    }


def default_tiles(work: ExpertWork) -> Mapping[str, Tile]:
    """Return the default tiles of a call, by the names in `TILES`."""
    sizes = (work.num_rows, len(work.ends), work.x.shape[1], work.hidden, work.x.itemsize)
    return _tiles_of(sizes, work.up.shape[1] == 2, device_of(work.x.device))


@lru_cache(maxsize=256)
def _tiles_of(
    sizes: tuple[int, int, int, int, int], gated: bool, device: TileDevice
) -> Mapping[str, Tile]:
    """Return the tiles for the sizes that `shapes` takes."""
    return {name: tile_for(shape, device) for name, shape in shapes(*sizes, gated=gated).items()}


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
    weight = None if work.down_bias is None else work.gates
    options: dict[str, Any] = {
        "transposed": True,
        "bias": work.down_bias,
        "weight": weight,
        "places": y_places,
    }
    rows = rows_times(hidden, work.down, schedules, tile["down"], **options)
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
    x_token = _narrow(work.x_rows)
    token = _narrow(work.y_rows)
    ends = work.ends
    schedules = Schedules(ends, work.num_rows)
    d_gates = None
    d_x = None
    d_pre, hidden, parts = down_grad(
        dy, work.down, pre, schedules, tile["down_grad"], **_form(work), token=token
    )
    d_down_bias = d_up_bias = None
    if work.down_bias is not None:
        d_down_bias, more_parts = bias_grad(
            dy, ends, bias=work.down_bias, weight=work.gates, token=token
        )
        parts = torch.cat([parts, more_parts], 1)
    if wanted.gates and work.gates is not None:
        d_gates = whole_batch.of_sent(parts.sum(1), work).to(work.gates.dtype)
    d_down = d_up = None
    if wanted.weights:
        order = longest_first(ends)
        d_down = outer_products(
            dy, hidden, ends, tile["weight_grad_down"], p_token=token, order=order
        )
    del hidden
    if wanted.weights:
        d_up = outer_products(
            d_pre, work.x, ends, tile["weight_grad"], q_token=x_token, order=order
        ).view(work.up.shape)
    if wanted.weights and work.up_bias is not None:
        d_up_bias = bias_grad(d_pre, ends)[0].view(work.up_bias.shape)
    if wanted.x:
        options: dict[str, Any] = {"transposed": False, "places": _narrow(work.d_x_rows)}
        rows = rows_times(d_pre, work.up.flatten(1, 2), schedules, tile["rows_grad"], **options)
        del d_pre
        d_x = _summed(rows, work, work.x.dtype)
    if not wanted.weights:
        d_down_bias = None
    return Gradients(
        x=d_x, gates=d_gates, up=d_up, up_bias=d_up_bias, down=d_down, down_bias=d_down_bias
    )


def rows_times_any(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix, with a default tile: (R, K) x (E, K, N) -> (R,
    N)."""
    transposed = w.stride(2) != 1 and w.stride(1) == 1
    shape = Shape(
        product="down",
        rows=len(x),
        num_experts=len(ends),
        columns=w.shape[2],
        depth=w.shape[1],
        itemsize=x.itemsize,
        is_odd=any(is_odd_width(width, x.itemsize) for width in w.shape[1:]),
    )
    tile = tile_for(shape, device_of(x.device))
    return rows_times(x, w.transpose(1, 2) if transposed else w, ends, tile, transposed=transposed)


def outer_products_any(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's `dy.T @ x` over its own rows, with a default tile: (R, N), (R, K) -> (E,
    N, K)."""
    per_expert = max(1, len(x) // max(1, len(ends)))
    shape = Shape(
        product="weight_grad",
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
    return None if index is None else index.to(torch.int32)


def _summed(rows: Tensor, work: ExpertWork, dtype: torch.dtype) -> Tensor:
    """Return the sum of each token's rows, or the rows themselves if the call has no dispatch."""
    if work.dispatch is None:
        return rows.to(dtype)
    dispatch = work.dispatch
    return sum_tokens(
        rows, dispatch.by_token, dispatch.starts, None, dispatch.per_token or 0, dtype
    )
