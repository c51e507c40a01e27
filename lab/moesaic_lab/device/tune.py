"""Searches tiles for the grouped products of one layer on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.kernels.triton.down_grad import down_grad
from moesaic.kernels.triton.expert_stage import shapes
from moesaic.kernels.triton.grouped import rows_times
from moesaic.kernels.triton.outer import outer_products
from moesaic.kernels.triton.rows.measured import bucket
from moesaic.kernels.triton.rows.permute import sum_tokens
from moesaic.kernels.triton.rows.sort import sort
from moesaic.kernels.triton.rows.tiles import Tile
from moesaic.kernels.triton.up import up
from moesaic_lab.device.layers import Inputs
from moesaic_lab.device.search import Tuned, save, search
from moesaic_lab.device.shapes import GpuLayer
from moesaic_lab.device.timing import seconds_of


def products(inputs: Inputs, *, is_compiling: bool = False) -> dict[str, Callable[[Tile], object]]:
    """Return the grouped products of a layer as functions of a tile, with operands shaped as in the
    layer.

    Args:
        inputs: tensors of the layer.
        is_compiling: whether the products are only compiled, so that their operands need no values.
    """
    x, w13, w2, dy = (tensor.detach() for tensor in (inputs.x, inputs.w13, inputs.w2, inputs.dy))
    num_experts, _, hidden_size, _ = w13.shape
    top_k = inputs.expert.shape[1]

    # the token and the routing weight of each row, in the order of experts
    copy, _, ends = sort(inputs.expert.view(-1), num_experts)
    token = copy // top_k
    weight = inputs.weight.detach().view(-1)[copy.long()]
    form: dict[str, Any] = {"activation": "silu", "clamp": inputs.clamp, "weight": weight}

    hidden = x.new_empty(len(copy), hidden_size)
    pre = x.new_empty(len(copy), 2 * hidden_size)  # pre-activations of gate and up
    if len(x) and not is_compiling:
        hidden.normal_()
        pre.normal_()

    up_bias = down_bias = down_weight = None
    if inputs.biases:  # `up` weights the hidden rows; only the down bias still needs the weights
        up_bias, down_bias = (bias.detach() for bias in inputs.biases)
        down_weight = weight
    return {
        "up": lambda tile: up(x, w13, ends, tile, **form, bias=up_bias, token=token),
        "down": lambda tile: rows_times(
            hidden, w2, ends, tile, transposed=True, bias=down_bias, weight=down_weight
        ),
        "down_grad": lambda tile: down_grad(dy, w2, pre, ends, tile, **form, token=token),
        "rows_grad": lambda tile: rows_times(pre, w13.flatten(1, 2), ends, tile, transposed=False),
        "weight_grad": lambda tile: outer_products(pre, x, ends, tile, q_token=token),
        "weight_grad_down": lambda tile: outer_products(dy, hidden, ends, tile, p_token=token),
    }


def tune(
    layer: GpuLayer,
    inputs: Inputs,
    tuned: Tuned,
    path: Path | None,
    deadline: float,
    say: Callable[[str], None],
    only: Sequence[str] = (),
) -> Tuned:
    """Search the tiles that `tuned` does not have yet, and write each result to the file at once.

    Args:
        layer: sizes of the layer.
        inputs: tensors of the layer.
        tuned: tiles known so far.
        path: file of the tiles; None to write no file.
        deadline: time of `time.monotonic` after which the search stops; unfinished products keep
            default tiles, unwritten.
        say: called with a line of text about each candidate.
        only: names of the products to search; empty for all.

    Returns:
        `tuned` with the tiles found.
    """
    runs = products(inputs)
    sizes = (
        layer.tokens * layer.top_k,
        layer.num_experts,
        layer.dim,
        layer.hidden,
        inputs.x.itemsize,
    )
    for name, shape in shapes(*sizes, gated=True).items():
        if bucket(shape) in tuned.by_bucket or (only and name not in only):
            continue
        time_tile = partial(_seconds_with, runs[name])
        tile, is_done = search(shape, tuned.device, time_tile, deadline=deadline, say=say)
        if not is_done:
            break
        tuned = tuned.with_tile(shape, tile)
        if path is not None:
            save(path, tuned)
    return tuned


def breakdown(layer: GpuLayer, inputs: Inputs, tuned: Tuned) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each step of a layer, timed alone, and its TFLOP/s, or GB/s if it
    only moves bytes."""
    runs = products(inputs)
    num_rows = layer.tokens * layer.top_k
    sizes = (num_rows, layer.num_experts, layer.dim, layer.hidden, inputs.x.itemsize)
    flops = 2.0 * num_rows * layer.dim * layer.hidden  # of one matrix per expert
    steps = {}
    for name, shape in shapes(*sizes, gated=True).items():
        seconds = _seconds_with(runs[name], tuned.tile(shape))
        num_matrices = 2 if name in ("up", "rows_grad", "weight_grad") else 1  # gate and up
        steps[name] = {"ms": seconds * 1e3, "tflops": flops * num_matrices / seconds / 1e12}

    _, row_of_copy, _ = sort(inputs.expert.view(-1), layer.num_experts)
    starts = torch.arange(0, num_rows, layer.top_k, device=inputs.x.device)
    rows = torch.randn(num_rows, layer.dim, device=inputs.x.device, dtype=inputs.x.dtype)
    seconds = seconds_of(
        lambda: sum_tokens(rows, row_of_copy, starts, None, layer.top_k, rows.dtype)
    )
    steps["sum"] = {
        "ms": seconds * 1e3,
        "gb_per_s": (rows.nbytes + inputs.x.nbytes) / seconds / 1e9,
    }
    steps["sort"] = {
        "ms": seconds_of(lambda: sort(inputs.expert.view(-1), layer.num_experts)) * 1e3
    }
    return steps


def _seconds_with(product: Callable[[Tile], object], tile: Tile) -> float:
    """Return the seconds of a product with a tile."""
    return seconds_of(partial(product, tile))
