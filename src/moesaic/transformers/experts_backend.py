"""`experts_implementation="moesaic"`: runs the experts of a transformers model on Moesaic's
kernels, for any layout and gate.

`@use_experts_implementation` describes a module's layout by flags, but the gate is a method that
each model family writes itself. The gate is therefore recognised by its results: it is called once
on fixed numbers, and compared with Moesaic's gates. If it matches none, the family's own method
runs between Moesaic's grouped products.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.experts.experts import BorrowedExperts, Weights, compute_dtype
from moesaic.kernels.activation import ACTIVATIONS, Clamp, hidden_rows
from moesaic.kernels.expert_ffn import expert_ffn
from moesaic.kernels.grouped_matmul import grouped_matmul
from moesaic.kernels.permute import (
    Permutation,
    expert_of_rows,
    in_expert_order,
    only_sent,
    permute,
    sort_by_expert,
    unpermute,
)
from moesaic.kernels.work import ExpertWork
from moesaic.routing.capacity import count

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
"""Attributes by which `@use_experts_implementation` describes a module's layout."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Gate:
    """The function between an expert's matrix products, in the form that Moesaic's kernels
    accept."""

    activation: str
    """A key of `ACTIVATIONS`."""
    clamp: Clamp | None = None


@dataclass(frozen=True)
class Matrices:
    """An experts module's parameters in the layout of the kernels, as differentiable views.

    E: experts, C: input matrices per expert, D: dim, H: hidden.
    """

    up: Tensor
    """(E, C, H, D). C is 1 for plain experts; for gated ones C is 2, and the gate comes first."""
    up_bias: Tensor | None
    """(E, C, H)."""
    down: Tensor
    """(E, D, H)."""
    down_bias: Tensor | None
    """(E, D)."""

    @classmethod
    def of(cls, module: Any) -> Matrices:
        """Return the matrices of a transformers experts module."""
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        up, down = (getattr(module, name) for name in names)
        if module.is_transposed:
            up = up.transpose(1, 2)
            down = down.transpose(1, 2)
        biases = (
            [getattr(module, f"{name}_bias") for name in names] if module.has_bias else [None, None]
        )
        return cls(
            split_inputs(module, up),
            None if biases[0] is None else split_inputs(module, biases[0]),
            down,
            biases[1],
        )


def split_inputs(module: Any, whole: Tensor) -> Tensor:
    """Split (E, C H, ...) into (E, C, H, ...), the gate's rows first."""
    if not module.has_gate:
        return whole.unsqueeze(1)
    return (
        whole.unflatten(1, (2, -1))
        if module.is_concatenated
        else whole.unflatten(1, (-1, 2)).transpose(1, 2)
    )


def refusal(module: Any) -> str | None:
    """Return why Moesaic cannot compute a module's experts, as a predicate for a sentence; None if
    it can."""
    missing = [flag for flag in FLAGS if not hasattr(module, flag)]
    if missing:
        return f"has no {missing[0]}, which this version of transformers should set"
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names] if module.has_bias else []
    for name in names:
        weight = getattr(module, name, None)
        if not isinstance(weight, Tensor):
            return f"has no tensor {name}"
        if weight.dtype not in FLOATS:
            return f"has a {name} of {weight.dtype}, which Moesaic's kernels do not support"
    return None


def gate_of(module: Any) -> Gate | None:
    """Return a module's gate or, for plain experts, its activation; None if Moesaic has no such
    gate.

    The first call evaluates the module's gate; the result is stored on the module.
    """
    if not hasattr(module, "_moesaic_gate"):
        module._moesaic_gate = _recognised(module)
    gate: Gate | None = module._moesaic_gate
    return gate


@torch.no_grad()
def _recognised(module: Any) -> Gate | None:
    """Return the activation that a module's gate computes at some points; None if it is none that
    the kernels know."""
    own_ids = {id(parameter) for parameter in module._parameters.values()}
    if module.has_post_expert_norm or any(id(each) not in own_ids for each in module.parameters()):
        return None  # a norm after the expert, or a gate with parameters
    points = torch.tensor(
        [0.0, 0.01, 0.3, 1.0, 2.5, 6.0, 9.0, 30.0, 300.0], dtype=torch.float64, device="cpu"
    )
    points = torch.cat([points, -points[1:]])
    gate, up = (each.reshape(1, -1) for each in torch.meshgrid(points, points, indexing="ij"))
    if module.has_gate:
        pre = [gate, up]
        together = torch.cat(pre, 1) if module.is_concatenated else torch.stack(pre, 2).flatten(1)
        computed = module._apply_gate(together)
    else:
        pre = [points.reshape(1, -1)]
        computed = module.act_fn(pre[0])
    for candidate in _candidates(module):
        expected = hidden_rows(pre, candidate.activation, candidate.clamp)
        if computed.shape == expected.shape and torch.allclose(
            computed.double(), expected, rtol=1e-6, atol=1e-6
        ):
            return candidate
    return None


def _candidates(module: Any) -> Iterator[Gate]:
    """Yield the gates that a module may have, with limits and slopes that it stores under the usual
    attribute names."""
    yield from map(Gate, ACTIVATIONS)
    values = {
        name: getattr(module, name, None)
        for name in ("limit", "swiglu_limit", "alpha", "swiglu_alpha")
    }
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and value > 0
    }
    limits = (
        [value for name, value in numbers.items() if name.endswith("limit")]
        if module.has_gate
        else []
    )
    for limit in limits:
        for alpha in (1.0, *(value for name, value in numbers.items() if name.endswith("alpha"))):
            for offset in (0.0, 1.0):
                yield Gate("silu", Clamp(limit, alpha, offset))


def run_tokens(module: Any, x: Tensor, weight: Tensor, permutation: Permutation) -> Tensor:
    """Dispatch tokens to a module's experts, run them and sum by routing weight; differentiable.

    Args:
        module: a transformers experts module for which `refusal` returns None.
        x: (tokens, dim).
        weight: (R,) routing weights of the copies, in the order in which they were routed.
        permutation: sorts the copies by expert.

    Returns:
        (tokens, dim) in the dtype of `x`.
    """
    dtype = compute_dtype(x.dtype, x.device)
    gate = gate_of(module)
    matrices = Matrices.of(module)
    up = matrices.up.to(dtype)
    down = matrices.down.to(dtype)
    up_bias, down_bias = (
        None if each is None else each.to(dtype) for each in (matrices.up_bias, matrices.down_bias)
    )
    gates = in_expert_order(weight, permutation)
    ends = permutation.ends
    if gate is not None:
        work = ExpertWork(
            x=x.to(dtype),
            dispatch=permutation.dispatch,
            gates=gates,
            gates_first=False,
            ends=ends,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
            activation=gate.activation,
            clamp=gate.clamp,
        )
        return expert_ffn(work, x.dtype)
    rows = permute(x.to(dtype), permutation)
    own = expert_of_rows(ends, len(rows))

    def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        out = grouped_matmul(rows, matrix, ends)
        if bias is not None:
            out = out + bias.index_select(0, own)
        return only_sent(out, permutation)

    pre = product(rows, up.flatten(1, 2), None if up_bias is None else up_bias.flatten(1))
    if module.has_gate and not module.is_concatenated:
        pre = pre.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    hidden = module._apply_gate(pre) if module.has_gate else module.act_fn(pre)
    out = product(hidden, down, down_bias)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    gates = only_sent(gates, permutation)
    return unpermute(out * gates.to(out.dtype).unsqueeze(1), permutation, dtype=x.dtype)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run a module's experts on Moesaic's kernels. If these cannot, warn once and run the module's
    own loop.

    Args:
        hidden_states: (tokens, dim).
        top_k_index: (tokens, K) experts. If transformers spread the experts, `num_experts` marks an
            expert of another rank.
        top_k_weights: (tokens, K) routing weights.

    Returns:
        (tokens, dim) in the dtype of `hidden_states`.
    """
    reason = refusal(self)
    if reason is not None:
        warn(f"{type(self).__name__} {reason}: transformers' own loop over experts runs instead")
        output: Tensor = type(self).forward.__wrapped__(
            self, hidden_states, top_k_index, top_k_weights
        )
        return output
    weight, permutation = sorted_copies(self, top_k_index, top_k_weights)
    return run_tokens(self, hidden_states, weight, permutation)


def sorted_copies(
    module: Any, top_k_index: Tensor, top_k_weights: Tensor
) -> tuple[Tensor, Permutation]:
    """Return the routing weights of the copies for this rank's experts, (R,), and what sorts the
    copies by expert. On a GPU, copies for other ranks come last and are not sent."""
    num_tokens, top_k = top_k_index.shape
    expert = top_k_index.reshape(-1).long()
    weight = top_k_weights.reshape(-1)
    token = torch.arange(num_tokens, device=expert.device).repeat_interleave(
        top_k, output_size=len(expert)
    )
    rows_per_token: int | None = top_k
    has_unsent = module._is_expert_parallel and expert.device.type != "cpu"
    if module._is_expert_parallel and not has_unsent:
        local = (expert < module.num_experts).nonzero().squeeze(1)
        token, expert, weight = (each.index_select(0, local) for each in (token, expert, weight))
        rows_per_token = None
    counts = count(expert, None, module.num_experts + 1)[: module.num_experts]
    return weight, sort_by_expert(
        token, expert, counts, num_tokens, rows_per_token, has_unsent=has_unsent
    )


def warn(line: str) -> None:
    """Show the user a warning; Python shows the same text once only."""
    warnings.warn(f"moesaic: {line}", stacklevel=3)


def family_experts(module: nn.Module, num_experts: int) -> BorrowedExperts:
    """Return a transformers experts module with Moesaic's experts interface. The parameters stay in
    the module.

    Args:
        module: this rank's part of the experts; `gate_of` must recognise its gate.
        num_experts: experts of all ranks together.
    """
    gate = gate_of(module)
    dim = Matrices.of(module).down.shape[1]
    assert gate is not None
    gated = bool(module.has_gate)
    bias = bool(module.has_bias)

    def read() -> tuple[Weights, Weights]:
        """Return the experts' tensors, sharded ones and common ones, as the layer takes them."""
        matrices = Matrices.of(module)
        ups = [parameter for parameter in (matrices.up, matrices.up_bias) if parameter is not None]
        reading = ups if gated else [parameter.squeeze(1) for parameter in ups]
        return (reading[0], matrices.down, *reading[1:]), () if matrices.down_bias is None else (
            matrices.down_bias,
        )

    return BorrowedExperts(
        dim,
        num_experts,
        read=read,
        gated=gated,
        activation=gate.activation,
        clamp=gate.clamp,
        bias=bias,
    )
