"""Tensors of one layer on a GPU, several implementations of the layer, and a check of their
results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.experts import GPT_OSS, GatedExperts
from moesaic.kernels.activation import Clamp
from moesaic.kernels.expert_ffn import expert_ffn
from moesaic.kernels.permute import sort_by_expert
from moesaic.kernels.work import ExpertWork
from moesaic_lab.device.shapes import GpuLayer

LEAVES = ("x", "w13", "w2", "weight", "up_bias", "down_bias")
"""Names of `Inputs.leaves`; the biases belong to gpt-oss's experts only."""
TOLERANCE = 0.02
"""Largest allowed error, relative to a result's root mean square. bfloat16 rounds to 2**-9, a few
times per result."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one layer: leaves of the autograd graph, the chosen experts, and the gradient of
    the output."""

    x: Tensor
    """(T, D)."""
    w13: Tensor
    """(E, 2, I, D), the gate matrix and then the up matrix."""
    w2: Tensor
    """(E, D, I)."""
    weight: Tensor
    """(T, K) float32."""
    expert: Tensor
    """(T, K) int32."""
    dy: Tensor
    """(T, D)."""
    biases: tuple[Tensor, ...] = ()
    """(E, 2, I) and (E, D) for gpt-oss's experts, clamped SwiGLU with biases; empty for SwiGLU."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that receive gradients, in the order of `LEAVES`."""
        return self.x, self.w13, self.w2, self.weight, *self.biases

    @property
    def clamp(self) -> Clamp | None:
        """The constants of clamped SwiGLU; None for SwiGLU."""
        return GPT_OSS if self.biases else None

    @staticmethod
    def random(layer: GpuLayer, device: str, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """Return a layer with random weights and random routing; the loads of the experts differ at
        random."""
        generator = torch.Generator(device=device).manual_seed(seed)
        factory: dict[str, Any] = {"device": device, "generator": generator}

        def leaf(*sizes: int) -> Tensor:
            return (torch.randn(*sizes, **factory) / sizes[-1] ** 0.5).to(dtype).requires_grad_()

        logits = torch.randn(layer.tokens, layer.num_experts, **factory)
        best = logits.topk(layer.top_k, dim=1)
        x = torch.randn(layer.tokens, layer.dim, **factory).to(dtype).requires_grad_()
        w13 = leaf(layer.num_experts, 2, layer.hidden, layer.dim)
        w2 = leaf(layer.num_experts, layer.dim, layer.hidden)
        dy = torch.randn(layer.tokens, layer.dim, **factory).to(dtype)
        biases: tuple[Tensor, ...] = ()
        if layer.is_clamped:
            biases = (leaf(layer.num_experts, 2, layer.hidden), leaf(layer.num_experts, layer.dim))
        return Inputs(
            x=x,
            w13=w13,
            w2=w2,
            weight=best.values.softmax(1).detach().requires_grad_(),
            expert=best.indices.to(torch.int32),
            dy=dy,
            biases=biases,
        )

    @staticmethod
    def untouched(layer: GpuLayer) -> Inputs:
        """Return tensors of a layer's shapes for the compiler; the large ones are uninitialized, so
        no memory is touched."""
        tokens = layer.tokens
        dim = layer.dim
        hidden = layer.hidden
        experts = layer.num_experts
        expert = torch.zeros(tokens, layer.top_k, dtype=torch.int32)
        weight = torch.zeros(tokens, layer.top_k, requires_grad=True)

        def leaf(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.bfloat16, requires_grad=True)

        biases: tuple[Tensor, ...] = ()
        if layer.is_clamped:
            biases = (leaf(experts, 2, hidden), leaf(experts, dim))
        return Inputs(
            x=leaf(tokens, dim),
            w13=leaf(experts, 2, hidden, dim),
            w2=leaf(experts, dim, hidden),
            weight=weight,
            expert=expert,
            dy=leaf(tokens, dim).detach(),
            biases=biases,
        )


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One implementation of the layer on these tensors."""

    forward: Callable[[], Tensor]
    """Returns the differentiable output, (T, D)."""
    leaves: tuple[Tensor, ...]
    """Tensors that receive gradients in the backward pass: input, matrices, routing weights."""


def ours(inputs: Inputs, tiles: Mapping[str, Any] | None) -> Implementation:
    """Return the implementation by our Triton kernels: `sort`, then `moe_mlp`."""
    from moesaic.kernels.triton.rows.sort import sort
    from moesaic_lab.device.mlp import moe_mlp

    def forward() -> Tensor:
        order = sort(inputs.expert.view(-1), len(inputs.w13))
        top_k = inputs.expert.shape[1]
        return moe_mlp(
            inputs.x,
            inputs.w13,
            inputs.w2,
            inputs.weight.view(-1),
            *order,
            top_k=top_k,
            activation="silu",
            biases=inputs.biases,
            clamp=inputs.clamp,
            tiles=tiles,
        )

    return Implementation(forward=forward, leaves=inputs.leaves)


def grouped_mm(inputs: Inputs) -> Implementation:
    """Return the implementation by torch's `grouped_mm`, one operation after the other."""
    num_experts = len(inputs.w13)
    top_k = inputs.expert.shape[1]
    token = torch.arange(len(inputs.x), device=inputs.x.device).repeat_interleave(top_k)
    up_bias, down_bias = inputs.biases or (None, None)

    def forward() -> Tensor:
        flat = inputs.expert.view(-1).long()
        counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        order = sort_by_expert(token, flat, counts, len(inputs.x), top_k)
        work = ExpertWork(
            x=inputs.x,
            dispatch=order.dispatch,
            gates=inputs.weight.view(-1)[order.order],
            gates_first=False,
            ends=order.ends,
            up=inputs.w13,
            up_bias=up_bias,
            down=inputs.w2,
            down_bias=down_bias,
            activation="silu",
            clamp=inputs.clamp,
            kernel="grouped_mm",
        )
        return expert_ffn(work)

    return Implementation(forward=forward, leaves=inputs.leaves)


def liger(inputs: Inputs) -> Implementation:
    """Return liger-kernel's fused layer with the same weights. It also uses Triton kernels, with
    gate and up in one matrix.

    Raises:
        ImportError: the package is not installed.
        ValueError: the experts are not SwiGLU.
    """
    _check_plain(inputs, "liger")
    function = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    gate_up = inputs.w13.detach().flatten(1, 2).requires_grad_()

    def forward() -> Tensor:
        y: Tensor = function.apply(inputs.x, gate_up, inputs.w2, inputs.expert, inputs.weight)
        return y

    return Implementation(forward=forward, leaves=(inputs.x, inputs.weight, gate_up, inputs.w2))


def sonic(inputs: Inputs) -> Implementation:
    """Return SonicMoE's own kernels with the same weights and routing.

    SonicMoE expects the rows of gate and up interleaved, and the experts as the last dimension.
    QuACK, whose products it uses, takes its default configurations.

    Raises:
        ImportError: the package is not installed.
        ValueError: the experts are not SwiGLU.
    """
    _check_plain(inputs, "SonicMoE")
    quack = import_module("quack.gemm_interface")
    for name in ("gemm", "gemm_gated", "gemm_dgated"):
        product = getattr(quack, name)
        setattr(quack, name, partial(product, tuned=False))  # else it tunes for minutes
    run = import_module("sonicmoe.functional").moe_general_routing_inputs
    swiglu = import_module("sonicmoe.enums").ActivationType.SWIGLU
    num_experts = len(inputs.w13)
    top_k = inputs.expert.shape[1]
    # (E, 2, I, D) -> (E, I, 2, D) -> (E, 2 I, D): a gate row, then its up row
    gate_up = inputs.w13.detach().transpose(1, 2).flatten(1, 2).contiguous().requires_grad_()
    token = torch.arange(
        len(inputs.x), dtype=torch.int32, device=inputs.x.device
    ).repeat_interleave(top_k)

    def forward() -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream if inputs.x.is_cuda else 0
        copies = (inputs.weight.view(-1), token, inputs.expert.view(-1))
        # each matrix with its bias
        weights = (gate_up.permute(1, 2, 0), None, inputs.w2.permute(1, 2, 0), None)
        y: Tensor = run(inputs.x, *copies, *weights, num_experts, stream, swiglu)[0]
        return y

    return Implementation(forward=forward, leaves=(inputs.x, inputs.weight, gate_up, inputs.w2))


def layer_of(inputs: Inputs) -> Implementation:
    """Return the library's `MoE` layer with these experts, its router and its load-balancing loss.
    It routes by itself."""
    from moesaic.layer import MoE

    num_experts, _, hidden, dim = inputs.w13.shape
    top_k = inputs.expert.shape[1]
    experts = partial(GatedExperts, clamp=inputs.clamp, bias=True) if inputs.biases else "swiglu"
    layer = MoE(
        dim,
        hidden,
        num_experts,
        top_k,
        experts=experts,
        device=inputs.x.device,  # the host would take minutes to draw the weights
        dtype=inputs.x.dtype,
    )
    values = {"w13": inputs.w13, "w2": inputs.w2}
    if inputs.biases:
        values["b13"], values["b2"] = inputs.biases
    with torch.no_grad():
        for name, value in values.items():
            layer.experts.get_parameter(name).copy_(value)
    return Implementation(forward=lambda: layer(inputs.x), leaves=(inputs.x, *layer.parameters()))


def errors(inputs: Inputs, y: Tensor, grads: tuple[Tensor | None, ...]) -> dict[str, float]:
    """Return the errors of results against experts one after another in float32, relative to their
    root mean square.

    Args:
        inputs: tensors of the layer.
        y: (T, D), the output.
        grads: gradients of `inputs.leaves` for the output gradient `inputs.dy`; None for a gradient
            that is not compared.
    """
    results = {"y": y} | {
        name: gradient for name, gradient in zip(LEAVES, grads) if gradient is not None
    }
    error_squares = {name: _float64_zero(y) for name in results}
    exact_squares = {name: _float64_zero(y) for name in results}

    def compare(name: str, exact: Tensor, result: Tensor) -> None:
        """Add the squares of the error and of the exact values of a result, or of one expert's
        part."""
        error_squares[name] += (result.float() - exact).double().square().sum()
        exact_squares[name] += exact.double().square().sum()

    parameters = {"w13": inputs.w13, "w2": inputs.w2}
    if inputs.biases:
        parameters["up_bias"], parameters["down_bias"] = inputs.biases
    exact_y = torch.zeros_like(y, dtype=torch.float32)
    exact_dx = torch.zeros_like(y, dtype=torch.float32)
    for e in range(len(inputs.w13)):
        # the copies that go to this expert: their tokens, and which choice of the token each is
        token, choice = (inputs.expert == e).nonzero(as_tuple=True)
        operands = [inputs.x[token], inputs.weight[token, choice]]
        operands += [parameter[e] for parameter in parameters.values()]
        leaves = [operand.detach().float().requires_grad_() for operand in operands]
        with torch.enable_grad():
            rows = _rows_of(inputs.clamp, *leaves)
        d_x, d_weight, *d_parameters = torch.autograd.grad(rows, leaves, inputs.dy[token].float())
        exact_y.index_add_(0, token, rows.detach())
        exact_dx.index_add_(0, token, d_x)
        if "weight" in results:
            compare("weight", d_weight, results["weight"][token, choice])
        for name, gradient in zip(parameters, d_parameters):
            if name in results:
                compare(name, gradient, results[name][e])
    compare("y", exact_y, y)
    if "x" in results:
        compare("x", exact_dx, results["x"])
    return {
        name: float((error_squares[name] / exact_squares[name].clamp_min(1e-30)).sqrt())
        for name in results
    }


def _float64_zero(like: Tensor) -> Tensor:
    """Return a scalar zero on the device of a tensor."""
    return torch.zeros((), dtype=torch.float64, device=like.device)


def _rows_of(
    clamp: Clamp | None, x: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, *biases: Tensor
) -> Tensor:
    """Return the weighted results of one expert, (rows, D).

    Args:
        clamp: the constants of clamped SwiGLU; None for SwiGLU.
        x: (rows, D), the expert's tokens.
        weight: (rows,) routing weights.
        w13: (2, I, D), the gate matrix and the up matrix.
        w2: (D, I).
        biases: (2, I) and (D,); empty for none.
    """
    up_bias, down_bias = biases or (torch.zeros(2, 1), 0.0)
    gate, up = (x @ matrix.T + bias.to(x) for matrix, bias in zip(w13, up_bias))
    if clamp is None:
        hidden = F.silu(gate) * up
    else:
        gate = gate.clamp(max=clamp.limit)
        up = up.clamp(-clamp.limit, clamp.limit)
        hidden = gate * torch.sigmoid(clamp.alpha * gate) * (up + clamp.offset)
    return (hidden @ w2.T + down_bias) * weight.unsqueeze(1)


def _check_plain(inputs: Inputs, name: str) -> None:
    """Raise ValueError for experts that are not SwiGLU."""
    if inputs.biases:
        raise ValueError(f"{name} has no clamped SwiGLU with biases")


def relative(result: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference divided by the root mean square of `exact`."""
    return float((result.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-30))
