"""`moe_mlp`: a layer's experts from tokens to tokens, sorted by `sort`, as one differentiable operator.

The steps are those of `kernels/triton/expert_stage.py`, which has their bytes and FLOPs. Backward keeps x, the routing and the
pre-activations: T D + R C I elements and 12 R + 4 E bytes, C being 2 with a gate and else 1. The layer of the library comes
through `kernels/expert_ffn.py` instead, with the same steps; this operator takes tiles from a search and copies that are
not sent, and waits for no host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.kernels.activation import ACTIVATIONS
from moesaic.kernels.triton import expert_stage
from moesaic.kernels.triton.expert_stage import TILES, shapes
from moesaic.kernels.triton.rows.launch import device_of
from moesaic.kernels.triton.rows.tiles import Tile, default_tile
from moesaic.kernels.work import Dispatch, ExpertWork, Wanted

NUMBERS = len(Tile.__dataclass_fields__)
"""Numbers of one tile."""


def as_numbers(tiles: Mapping[str, Tile]) -> list[int]:
    """Return a layer's tiles as the operator's argument."""
    return [number for name in TILES for number in tiles[name].as_ints()]


@torch.library.custom_op("moesaic::triton_mlp", mutates_args=())
def mlp_forward(
    x: Tensor, up: Tensor, down: Tensor, weight: Tensor, copy: Tensor, row: Tensor, ends: Tensor,
    top_k: int, activation: str, tiles: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the tokens' results, (T, D), and the pre-activations, (T K, C I)."""
    work = _work(x, up, down, weight, copy, row, ends, top_k, activation)
    return expert_stage.forward(work, x.dtype, _unpack(tiles))


@mlp_forward.register_fake
def _(
    x: Tensor, up: Tensor, down: Tensor, weight: Tensor, copy: Tensor, row: Tensor, ends: Tensor,
    top_k: int, activation: str, tiles: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty(copy.shape[0], up.shape[1] * up.shape[2])


@register_flop_formula(torch.ops.moesaic.triton_mlp)
def _(x, up, down, weight, copy, *_, **__) -> int:  # type: ignore[no-untyped-def]
    """One product per matrix, of all copies, those that are not sent among them; arguments are shapes."""
    return (up[1] + 1) * 2 * copy[0] * down[1] * down[2]


@torch.library.custom_op("moesaic::triton_mlp_backward", mutates_args=())
def mlp_backward(
    dy: Tensor, x: Tensor, up: Tensor, down: Tensor, weight: Tensor, copy: Tensor, row: Tensor,
    ends: Tensor, pre: Tensor, top_k: int, activation: str, tiles: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, up, down and weight."""
    work = _work(x, up, down, weight, copy, row, ends, top_k, activation)
    found = expert_stage.backward(work, pre, dy.contiguous(), Wanted(), _unpack(tiles))
    assert found.x is not None
    assert found.up is not None
    assert found.down is not None
    assert found.gates is not None
    is_sent = row >= 0
    d_weight = found.gates.index_select(0, row.clamp(0, max(len(row) - 1, 0)))
    d_weight = d_weight.masked_fill(~is_sent, 0.0).to(weight.dtype)
    return found.x, found.up, found.down, d_weight


@mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, up: Tensor, down: Tensor, weight: Tensor, copy: Tensor, row: Tensor,
    ends: Tensor, pre: Tensor, top_k: int, activation: str, tiles: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), up.new_empty(up.shape), down.new_empty(down.shape), weight.new_empty(weight.shape)


@register_flop_formula(torch.ops.moesaic.triton_mlp_backward)
def _(dy, x, up, down, weight, copy, *_, **__) -> int:  # type: ignore[no-untyped-def]
    """Twice as many products as forward; arguments are shapes."""
    return 2 * (up[1] + 1) * 2 * copy[0] * down[1] * down[2]


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
    tiles: Mapping[str, Tile] | None = None,
) -> Tensor:
    """Run every token's experts and sum their weighted results, differentiable in x, the matrices and weight.

    Args:
        x: (T, D) tokens.
        up: (E, C, I, D): one matrix that reads the token, or two; the first one's activation gates the second.
        down: (E, D, I), writes the result.
        weight: (T K,) float32 routing weights, token after token.
        copy: (T K,) int32, from `sort`.
        row: (T K,) int32, from `sort`.
        ends: (E,) int32, from `sort`.
        top_k: K, copies of a token.
        activation: "silu", "gelu" or "relu".
        tiles: by names in `expert_stage.TILES`, from `Tuned.tiles`; None for the defaults.

    Returns:
        (T, D) in the dtype of `x`.
    """
    assert activation in ACTIVATIONS, activation
    assert x.dtype == up.dtype == down.dtype, (x.dtype, up.dtype, down.dtype)
    assert len(weight) == len(copy) == len(row) == len(x) * top_k, (weight.shape, copy.shape, x.shape, top_k)
    if tiles is None:
        device = device_of(x.device)
        of_layer = shapes(len(copy), len(ends), x.shape[1], up.shape[2], x.itemsize, gated=up.shape[1] == 2)
        tiles = {name: default_tile(shape, device) for name, shape in of_layer.items()}
    y: Tensor = mlp_forward(x, up, down, weight, copy, row, ends, top_k, activation, as_numbers(tiles))[0]
    return y


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.top_k, ctx.activation, ctx.tiles = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 10
    gradients = mlp_backward(dy, *ctx.saved_tensors, ctx.top_k, ctx.activation, ctx.tiles)
    return (*gradients, None, None, None, None, None, None)


mlp_forward.register_autograd(_gradients, setup_context=_keep)


def _work(
    x: Tensor, up: Tensor, down: Tensor, weight: Tensor, copy: Tensor, row: Tensor, ends: Tensor,
    top_k: int, activation: str,
) -> ExpertWork:  # fmt: skip
    """Return the call as the stage takes it: weights in expert order, a token's rows in the order of its copies."""
    starts = torch.arange(0, len(row), top_k, device=row.device)
    return ExpertWork(
        x=x, dispatch=Dispatch(token=copy // top_k, by_token=row, starts=starts, per_token=top_k),
        gates=weight.index_select(0, copy), gates_first=False, ends=ends, up=up,
        up_bias=None, down=down, down_bias=None, activation=activation,
    )  # fmt: skip


def _unpack(tiles: list[int]) -> dict[str, Tile]:
    return {name: Tile.of(tiles[i * NUMBERS : (i + 1) * NUMBERS]) for i, name in enumerate(TILES)}
