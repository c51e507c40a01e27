"""Compiles the kernels of a layer before its first step, several at a time.

Triton compiles a kernel when a call first needs it, for seconds, and a layer needs products for
tiles of several heights, by the number of rows that its experts get. Here every height that calls
of up to a number of tokens can have is asked for at once, each in a thread; Triton's compiler runs
outside of Python's lock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.experts.experts import (
    AbstractExperts,
    ExpertCall,
    StackedExperts,
    Weights,
    compute_dtype,
)
from moesaic.kernels.expert_ffn import expert_gradients, run_experts
from moesaic.kernels.permute import sort_by_expert
from moesaic.kernels.pick import kind_of, triton_products
from moesaic.kernels.work import ExpertWork, Places
from moesaic.layer import MoE
from moesaic.routing.route import choose_at_once, fused_of
from moesaic.routing.router import is_whole

MOST_THREADS = 16
"""The most threads that compile."""


def warm_up(layer: MoE, max_tokens: int, dtype: torch.dtype | None = None) -> None:
    """Compile the kernels of all calls of a layer of up to `max_tokens` tokens, forward and
    backward.

    Nothing of the layer changes. Call it after `parallelize`, on every rank, and under the autocast
    of the training. Layers of the same sizes and options share their kernels: one of them is
    enough. Where no kernel is compiled, on a CPU for example, it does nothing.

    Args:
        layer: a layer of built-in experts.
        max_tokens: the most tokens of a call, on a mesh those of one rank.
        dtype: the dtype of the tokens; None for that of the experts.

    Raises:
        InputError: `max_tokens` is no whole number of at least 1.
    """
    if not is_whole(max_tokens) or max_tokens < 1:
        raise InputError(
            f"warm_up: max_tokens={max_tokens!r}: give the most tokens of a call, at least 1"
        )
    routed = _Calls.of(layer, layer.experts, dtype)
    if routed is None:
        return
    per_token = layer.top_k / layer.num_experts
    if layer.on_mesh is not None:  # tokens of all ranks may go to one expert
        per_token = layer.on_mesh.grid.world
    tasks: list[Callable[[], object]] = [partial(_choose, layer, routed.x)]
    tasks += routed.tasks(math.ceil(max_tokens * per_token))
    shared = None
    if layer.shared is not None:
        shared = _Calls.of(layer, layer.shared, dtype)
    if shared is not None:
        tasks += shared.tasks(max_tokens)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(tasks))) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()


class _Calls(NamedTuple):
    """Calls of a layer's experts, by the rows that each expert gets."""

    layer: MoE
    experts: StackedExperts
    sharded: Weights
    common: Weights
    x: Tensor
    """No tokens, (0, dim), in the dtype of the products."""
    out_dtype: torch.dtype

    @classmethod
    def of(cls, layer: MoE, experts: AbstractExperts, dtype: torch.dtype | None) -> _Calls | None:
        """Return the calls of experts on tokens of a dtype; None if they compile no kernels."""
        if not isinstance(experts, StackedExperts) or experts.kernel != "auto":
            return None
        with torch.no_grad():
            weight = experts.weights()[0][0]
            if kind_of(weight.device) != "triton":
                return None
            out_dtype = weight.dtype if dtype is None else dtype
            own = compute_dtype(out_dtype, weight.device)
            x = weight.new_empty(0, layer.dim, dtype=own)
            return cls(layer, experts, *experts.weights_in(own), x, out_dtype)

    def tasks(self, most: int) -> Iterator[Callable[[], object]]:
        """Yield the passes of calls with up to `most` rows an expert: one call for each set of
        tiles that these take."""
        seen = list[object]()
        rows = 1
        while not seen or rows < 2 * most:
            work = self._work(rows)
            tiles = triton_products().default_tiles(work)
            if tiles not in seen:
                seen.append(tiles)
                yield partial(run_experts, work, self.out_dtype)
                yield partial(_gradients, work)
            rows *= 2

    def _work(self, rows: int) -> ExpertWork:
        """Return a call in which each expert has `rows` rows."""
        number = len(self.sharded[1])
        new = self.x.new_zeros
        ends = torch.arange(rows, rows * number + 1, rows, dtype=torch.int32, device=self.x.device)
        x = new(rows * number, self.layer.dim)
        gates = new(len(x), dtype=torch.float32)
        call = ExpertCall(self.sharded, self.common, rows=x, gates=gates, ends=ends)
        if self.experts is self.layer.shared:
            return self.experts.work(replace(call, gates=None))
        if self.layer.on_mesh is not None:
            place = torch.arange(len(x), dtype=torch.int32, device=x.device)
            places = Places(x=place, y=place, d_x=place)
            return self.experts.work(replace(call, places=places))
        top_k = self.layer.top_k
        copy = torch.arange(-(-len(x) // top_k) * top_k, device=x.device)
        counts = copy.new_zeros(number)
        tokens = len(copy) // top_k
        order = sort_by_expert(copy // top_k, copy % number, counts, tokens, top_k)
        call = replace(
            call, rows=x[:tokens], gates=new(len(copy), dtype=torch.float32), ends=order.ends
        )
        is_first = self.layer.apply_weight == "before"
        return self.experts.work(call, order.dispatch, gates_first=is_first)


def _gradients(work: ExpertWork) -> None:
    """Run the backward pass of a call, on pre-activations of any value."""
    pre = work.x.new_zeros(work.num_rows, work.up.shape[1] * work.hidden)
    rows = len(work.x) if work.dispatch is not None else work.num_rows
    expert_gradients(work, pre, work.x.new_zeros(rows, work.x.shape[1]))


def _choose(layer: MoE, x: Tensor) -> None:
    """Run the choice of experts forward and backward, if it is one operation."""
    fused = fused_of(layer.router, layer.top_k, layer.losses)
    if fused is None:
        return
    with torch.enable_grad():
        leaf = x.new_zeros(1, x.shape[1]).requires_grad_()
        reduced = layer.on_mesh is None
        scored = choose_at_once(fused, leaf, layer.losses, None, None, reduced=reduced)
        results = [scored.weight_N, *(scored.values or ())]
        if scored.sums is not None:
            results.append(scored.sums.probs_GE)
        torch.autograd.grad(sum(each.sum() for each in results), leaf)
