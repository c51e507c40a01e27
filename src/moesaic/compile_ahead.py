"""Compiles the kernels of a layer before its first step, several at a time.

Triton compiles a kernel when a call first needs it, for seconds, and a layer needs products for
tiles of several heights, by the number of rows that its experts get. Here every height that calls
of up to a number of tokens can have is asked for at once, each in a thread; Triton's compiler runs
outside of Python's lock. A *row* is one token for one of its experts; *gates* are the routing
weights of rows.
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
    expert_calls = _Calls.of(layer, layer.experts, dtype)
    if expert_calls is None:
        return
    tasks: list[Callable[[], object]] = [partial(_choose, layer, expert_calls.x)]

    # rows of an expert for each token of this rank: the mean, or on a mesh the most
    rows_per_token = layer.top_k / layer.num_experts
    if layer.on_mesh is not None:  # the tokens of all ranks may go to each expert of one rank
        rows_per_token = layer.on_mesh.grid.world
    tasks += expert_calls.tasks(math.ceil(max_tokens * rows_per_token))

    if layer.shared is not None:
        shared_calls = _Calls.of(layer, layer.shared, dtype)
        if shared_calls is not None:
            tasks += shared_calls.tasks(max_tokens)

    num_threads = min(MOST_THREADS, os.cpu_count() or 1, len(tasks))
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(task) for task in tasks]
        for future in futures:
            future.result()


class _Calls(NamedTuple):
    """Calls of a layer's experts, by the rows that each expert gets."""

    layer: MoE
    experts: StackedExperts
    sharded: Weights
    """As in `ExpertCall`, in the dtype of the products."""
    common: Weights
    """As in `ExpertCall`, in the dtype of the products."""
    x: Tensor
    """No tokens, (0, dim), in the dtype of the products."""
    out_dtype: torch.dtype
    """Dtype of the experts' results."""

    @classmethod
    def of(cls, layer: MoE, experts: AbstractExperts, dtype: torch.dtype | None) -> _Calls | None:
        """Return the calls of experts on tokens of a dtype; None if they compile no kernels."""
        if not isinstance(experts, StackedExperts) or experts.kernel != "auto":
            return None
        with torch.no_grad():
            sharded, _ = experts.weights()
            weight = sharded[0]
            if kind_of(weight.device) != "triton":
                return None
            out_dtype = weight.dtype if dtype is None else dtype
            product_dtype = compute_dtype(out_dtype, weight.device)
            sharded, common = experts.weights_in(product_dtype)
            x = weight.new_empty(0, layer.dim, dtype=product_dtype)
            return cls(layer, experts, sharded, common, x, out_dtype)

    def tasks(self, max_rows: int) -> Iterator[Callable[[], object]]:
        """Yield the forward and backward passes of calls with up to `max_rows` rows an expert: one
        call for each set of tiles that these take."""
        tiles_so_far = list[object]()
        rows = 1
        # rows are the powers of 2 up to the first that is not below `max_rows`
        while not tiles_so_far or rows < 2 * max_rows:
            work = self._work(rows)
            tiles = triton_products().default_tiles(work)
            if tiles not in tiles_so_far:
                tiles_so_far.append(tiles)
                yield partial(run_experts, work, self.out_dtype)
                yield partial(_gradients, work)
            rows *= 2

    def _work(self, rows: int) -> ExpertWork:
        """Return a call in which each expert has `rows` rows, of zeros; of a layer on no mesh,
        about as many."""
        num_experts = len(self.sharded[1])  # of the down projection, (experts, ...)
        num_rows = rows * num_experts
        x = self.x.new_zeros(num_rows, self.layer.dim)
        gates = x.new_zeros(num_rows, dtype=torch.float32)
        ends = torch.arange(rows, num_rows + 1, rows, dtype=torch.int32, device=x.device)
        call = ExpertCall(self.sharded, self.common, rows=x, gates=gates, ends=ends)
        if self.experts is self.layer.shared:  # its results have no routing weights
            return self.experts.work(replace(call, gates=None))
        if self.layer.on_mesh is not None:  # such calls say where each row lies: here, row i at i
            place = torch.arange(num_rows, dtype=torch.int32, device=x.device)
            places = Places(x=place, y=place, d_x=place)
            return self.experts.work(replace(call, places=places))
        return self._work_of_tokens(call, num_experts)

    def _work_of_tokens(self, call: ExpertCall, num_experts: int) -> ExpertWork:
        """Return a call of one rank, which reads tokens, with at least as many rows as `call`."""
        top_k = self.layer.top_k
        num_tokens = math.ceil(len(call.rows) / top_k)
        copy = torch.arange(num_tokens * top_k, device=call.rows.device)
        token = copy // top_k
        expert = copy % num_experts
        counts = copy.new_zeros(num_experts)  # what the passes compute does not matter
        order = sort_by_expert(token, expert, counts, num_tokens, top_k)
        call = replace(
            call,
            rows=call.rows[:num_tokens],
            gates=call.rows.new_zeros(len(copy), dtype=torch.float32),
            ends=order.ends,
        )
        gates_first = self.layer.apply_weight == "before"
        return self.experts.work(call, order.dispatch, gates_first=gates_first)


def _gradients(work: ExpertWork) -> None:
    """Run the backward pass of a call, on pre-activations and gradients of zeros."""
    num_up_matrices = work.up.shape[1]  # (experts, matrices, hidden, dim)
    pre_activations = work.x.new_zeros(work.num_rows, num_up_matrices * work.hidden)
    # with a dispatch, x are tokens, each of which has one result; else x are rows
    num_results = len(work.x) if work.dispatch is not None else work.num_rows
    grad_y = work.x.new_zeros(num_results, work.x.shape[1])
    expert_gradients(work, pre_activations, grad_y)


def _choose(layer: MoE, x: Tensor) -> None:
    """Run the choice of experts forward and backward for one token, if it is one operation; x gives
    width and dtype."""
    fused = fused_of(layer.router, layer.top_k, layer.losses)
    if fused is None:  # the choice is not one operation
        return
    with torch.enable_grad():
        leaf = x.new_zeros(1, x.shape[1]).requires_grad_()
        reduced = layer.on_mesh is None  # losses follow from this rank's tokens alone
        scored = choose_at_once(
            fused, leaf, layer.losses, valid_T=None, given=None, reduced=reduced
        )
        # all that a loss may give a gradient to
        results = [each.sum() for each in (scored.weight_N, *scored.values)]
        torch.autograd.grad(results, leaf)
