"""The operations of `moesaic bench device --part operations`, each with plain PyTorch code for the
same, its FLOPs and bytes.

The plain code also serves as the reference: run in float64 on the same inputs it gives the correct
result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.activation import hidden_rows_into
from moesaic.kernels.encode import Encoding, encoding, fast_decode, fast_encode
from moesaic.kernels.expert_ffn import expert_ffn
from moesaic.kernels.permute import Permutation, dot_rows, sort_by_expert, sum_rows
from moesaic.kernels.work import ExpertWork
from moesaic_lab.device.cases import DeviceShape

CAPACITY_FACTOR = 1.25
"""Capacity factor of encode and decode."""


@dataclass(frozen=True, kw_only=True)
class KernelOp:
    """One operation with its inputs."""

    name: str
    inputs: tuple[Tensor, ...]
    run: Callable[..., Tensor]
    """Our implementation, a function of the inputs."""
    plain: Callable[..., Tensor]
    """Plain PyTorch code for the same operation; accepts inputs of any dtype."""
    flops: float
    """Floating-point operations that any implementation needs."""
    num_bytes: float
    """Bytes of the inputs and results, each counted once."""

    def error(self) -> float:
        """Return the norm of our difference from the plain code in float64, relative to the norm of
        its result."""
        exact_inputs = [
            tensor.double() if tensor.is_floating_point() else tensor for tensor in self.inputs
        ]
        exact = self.plain(*exact_inputs).double()
        difference = self.run(*self.inputs).double() - exact
        return float(difference.norm() / exact.norm().clamp_min(1e-300))


def ops(shape: DeviceShape, dtype: torch.dtype) -> list[KernelOp]:
    """Return the operations of one layer with random routing."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    tokens = shape.tokens
    experts = shape.experts
    top_k = shape.top_k
    # the first top_k of a random order of the experts, (tokens, top_k)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    token = torch.arange(tokens).repeat_interleave(top_k)
    expert = chosen.reshape(-1)
    counts = torch.bincount(expert, minlength=experts)
    order = sort_by_expert(token, expert, counts, tokens, top_k)
    gates = torch.rand(len(token), generator=generator).to(dtype)
    operations = [
        _sort(token, expert, counts, tokens, top_k),
        *_moves(order, normal(tokens, shape.dim), gates, top_k),
    ]
    operations += _pointwise(normal(len(token), shape.hidden), normal(len(token), shape.hidden))
    operations += _coding(chosen, experts, normal(tokens, shape.dim), gates.view(tokens, top_k))
    return [*operations, _experts(shape, order, gates, normal)]


def _sort(token: Tensor, expert: Tensor, counts: Tensor, tokens: int, top_k: int) -> KernelOp:
    """Return the operation that sorts copies by expert."""
    return KernelOp(
        name="sort by expert",
        inputs=(token, expert),
        run=lambda token, expert: (
            sort_by_expert(token, expert, counts, tokens, top_k).dispatch.by_token
        ),
        # the sorted order's inverse: the row of each copy
        plain=lambda token, expert: expert.argsort(stable=True).argsort(),
        flops=0.0,
        num_bytes=5.0 * 8 * len(token),  # five arrays of int64
    )


def _moves(order: Permutation, x: Tensor, gates: Tensor, top_k: int) -> list[KernelOp]:
    """Return the gather of tokens into expert order, and the combine of expert rows into tokens."""
    sent = order.dispatch
    dim = x.shape[1]
    item = x.element_size()
    num_rows = len(sent.token)
    rows = x.index_select(0, sent.token)

    def combine(rows: Tensor, gates: Tensor) -> Tensor:
        weighted = rows[sent.by_token] * gates[sent.by_token].unsqueeze(1)
        return weighted.view(-1, top_k, dim).sum(1)

    gather = KernelOp(
        name="gather",
        inputs=(x,),
        run=lambda x: x.index_select(0, sent.token),
        plain=lambda x: x[sent.token],
        flops=0.0,
        num_bytes=item * dim * (len(x) + num_rows) + 8.0 * num_rows,
    )
    combined = KernelOp(
        name="combine",
        inputs=(rows, gates),
        run=lambda rows, gates: sum_rows(rows, sent, weights=gates),
        plain=combine,
        flops=2.0 * num_rows * dim,
        num_bytes=item * dim * (len(x) + num_rows) + (8.0 + item) * num_rows,
    )
    return [gather, combined]


def _pointwise(a: Tensor, b: Tensor) -> list[KernelOp]:
    """Return the activations between the matrix products, and the row-wise dot products of the
    routing weights' gradient."""

    def into(activation: str, *pre: Tensor) -> Tensor:
        out = torch.empty_like(pre[0])
        hidden_rows_into(pre, activation, out)
        return out

    size = a.nbytes
    return [
        KernelOp(
            name="GELU",
            inputs=(a,),
            run=partial(into, "gelu"),
            plain=F.gelu,
            flops=0.0,
            num_bytes=2.0 * size,
        ),
        KernelOp(
            name="SwiGLU",
            inputs=(a, b),
            run=partial(into, "silu"),
            plain=lambda gate, up: F.silu(gate) * up,
            flops=0.0,
            num_bytes=3.0 * size,
        ),
        KernelOp(
            name="dot products",
            inputs=(a, b),
            run=dot_rows,
            plain=lambda a, b: (a * b).sum(1),
            flops=2.0 * a.numel(),
            num_bytes=2.0 * size,
        ),
    ]


def _coding(chosen: Tensor, experts: int, x: Tensor, gates: Tensor) -> list[KernelOp]:
    """Return fast encode and decode, with GShard's einsum as the plain code."""
    capacity = int(CAPACITY_FACTOR * chosen.numel() / experts)
    form = encoding(chosen, experts, capacity)
    encoded = fast_encode(x, form)
    num_bytes = float(x.nbytes + encoded.nbytes)
    return [
        KernelOp(
            name="fast encode",
            inputs=(x,),
            run=lambda x: fast_encode(x, form),
            plain=lambda x: encode_reference(x, form),
            flops=0.0,
            num_bytes=num_bytes,
        ),
        KernelOp(
            name="fast decode",
            inputs=(encoded, gates),
            run=lambda rows, gates: fast_decode(rows, gates, form),
            plain=lambda rows, gates: decode_reference(rows, gates, form),
            flops=2.0 * chosen.numel() * x.shape[1],
            num_bytes=num_bytes,
        ),
    ]


def _experts(
    shape: DeviceShape, order: Permutation, gates: Tensor, normal: Callable[..., Tensor]
) -> KernelOp:
    """Return the expert stage with SwiGLU, forward and backward. Its result is the gradient of the
    tokens."""
    experts = shape.experts
    dim = shape.dim
    hidden = shape.hidden
    up = normal(experts, 2, hidden, dim) * dim**-0.5
    down = normal(experts, dim, hidden) * hidden**-0.5
    x = normal(shape.tokens, dim)
    dy = normal(shape.tokens, dim)
    work = ExpertWork(
        x=x,
        dispatch=order.dispatch,
        gates=gates,
        gates_first=False,
        ends=order.ends,
        up=up,
        up_bias=None,
        down=down,
        down_bias=None,
        activation="silu",
    )
    rows = len(order.token)
    matrices_bytes = 3 * down.nbytes  # gate, up and down have equal sizes
    return KernelOp(
        name="experts, both passes",
        inputs=(x, gates, up, down, dy),
        run=lambda *inputs: _backward(work, inputs, expert_ffn),
        plain=lambda *inputs: _backward(work, inputs, _one_by_one),
        flops=3.0 * 3 * 2 * rows * dim * hidden,  # a forward and two backward products per matrix
        # x, y and gradients; matrices and gradients; pre-activations written and read
        num_bytes=float(
            4 * x.nbytes + 2 * matrices_bytes + 2 * 2 * rows * hidden * x.element_size()
        ),
    )


def _backward(work: ExpertWork, inputs: Any, run: Callable[[ExpertWork], Tensor]) -> Tensor:
    """Return the gradient of the tokens, for the inputs (x, gates, up, down, dy)."""
    x, gates, up, down, dy = (tensor.detach().requires_grad_() for tensor in inputs)
    run(replace(work, x=x, gates=gates, up=up, down=down)).backward(dy.detach())
    assert x.grad is not None
    return x.grad


def _one_by_one(work: ExpertWork) -> Tensor:
    """Return the layer's output, computed one expert after the other and differentiated by
    autograd."""
    assert work.dispatch is not None
    assert work.gates is not None
    y = torch.zeros_like(work.x)
    start = 0
    for expert, end in enumerate(work.ends.tolist()):
        token = work.dispatch.token[start:end]
        weight = work.gates[start:end].unsqueeze(1)
        gate, up = (work.x[token] @ matrices[expert].T for matrices in work.up.unbind(1))
        y = y.index_add(0, token, (F.silu(gate) * up) @ work.down[expert].T * weight)
        start = end
    return y


def mask_of(form: Encoding, gates: Tensor) -> Tensor:
    """Return GShard's combine mask, (T, E, C): each copy's weight at its place (Lepikhin et al.
    2020, section 2.2)."""
    num_places = form.num_experts * form.capacity
    # one more column takes the weights of dropped copies
    flat = gates.new_zeros(len(gates), num_places + 1).scatter(1, form.place, gates)
    return flat[:, :-1].view(len(gates), form.num_experts, form.capacity)


def encode_reference(x: Tensor, form: Encoding) -> Tensor:
    """Compute `fast_encode` by GShard's einsum; the oracle."""
    mask = mask_of(form, torch.ones(form.place.shape, dtype=x.dtype, device=x.device))
    return torch.einsum("tec,td->ecd", mask, x)


def decode_reference(rows: Tensor, gates: Tensor, form: Encoding) -> Tensor:
    """Compute `fast_decode` by GShard's einsum; the oracle."""
    return torch.einsum("tec,ecd->td", mask_of(form, gates), rows)
