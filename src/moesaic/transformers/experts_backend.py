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
        up_name = "gate_up_proj" if module.has_gate else "up_proj"
        up = getattr(module, up_name)
        down = module.down_proj
        if module.is_transposed:
            up = up.transpose(1, 2)
            down = down.transpose(1, 2)
        up_bias = None
        down_bias = None
        if module.has_bias:
            up_bias = split_inputs(module, getattr(module, f"{up_name}_bias"))
            down_bias = module.down_proj_bias
        return cls(up=split_inputs(module, up), up_bias=up_bias, down=down, down_bias=down_bias)


def split_inputs(module: Any, whole: Tensor) -> Tensor:
    """Split (E, C H, ...) into (E, C, H, ...), the gate's rows first; letters as in `Matrices`."""
    if not module.has_gate:
        return whole.unsqueeze(1)
    if module.is_concatenated:
        return whole.unflatten(1, (2, -1))
    return whole.unflatten(1, (-1, 2)).transpose(1, 2)  # rows of gate and up in turn


def refusal(module: Any) -> str | None:
    """Return why Moesaic cannot compute a module's experts, as a predicate for a sentence; None if
    it can."""
    missing = [flag for flag in FLAGS if not hasattr(module, flag)]
    if missing:
        return f"has no {missing[0]}, which this version of transformers should set"
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]
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

    # Around zero, at usual values, beyond usual limits; the gate gets all pairs of them.
    positive = [0.01, 0.3, 1.0, 2.5, 6.0, 9.0, 30.0, 300.0]
    points = torch.tensor([0.0, *positive], dtype=torch.float64, device="cpu")
    points = torch.cat([points, -points[1:]])
    if module.has_gate:
        gate, up = torch.meshgrid(points, points, indexing="ij")
        pre_activations = [gate.reshape(1, -1), up.reshape(1, -1)]
        if module.is_concatenated:
            computed = module._apply_gate(torch.cat(pre_activations, 1))
        else:  # gate and up in turn
            computed = module._apply_gate(torch.stack(pre_activations, 2).flatten(1))
    else:
        pre_activations = [points.reshape(1, -1)]
        computed = module.act_fn(pre_activations[0])

    for candidate in _candidates(module):
        expected = hidden_rows(pre_activations, candidate.activation, candidate.clamp)
        if computed.shape != expected.shape:
            continue
        if torch.allclose(computed.double(), expected, rtol=1e-6, atol=1e-6):
            return candidate
    return None


def _candidates(module: Any) -> Iterator[Gate]:
    """Yield the gates that a module may have, with limits and slopes that it stores under the usual
    attribute names."""
    for activation in ACTIVATIONS:
        yield Gate(activation)
    if not module.has_gate:
        return
    limits = _positive_numbers(module, ("limit", "swiglu_limit"))
    alphas = _positive_numbers(module, ("alpha", "swiglu_alpha"))
    for limit in limits:
        for alpha in (1.0, *alphas):
            for offset in (0.0, 1.0):
                yield Gate("silu", Clamp(limit, alpha=alpha, offset=offset))


def _positive_numbers(module: Any, names: tuple[str, ...]) -> list[float]:
    """Return those of a module's attributes that are numbers above 0."""
    values = [getattr(module, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float) and value > 0]


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
    stored = Matrices.of(module)
    matrices = Matrices(
        up=stored.up.to(dtype),
        up_bias=None if stored.up_bias is None else stored.up_bias.to(dtype),
        down=stored.down.to(dtype),
        down_bias=None if stored.down_bias is None else stored.down_bias.to(dtype),
    )
    weight_of_row = in_expert_order(weight, permutation)
    if gate is None:
        rows = permute(x.to(dtype), permutation)
        out = _family_rows(module, matrices, rows, permutation)
        weight_of_row = only_sent(weight_of_row, permutation)  # 0 for rows of other ranks
        weighted = out * weight_of_row.to(out.dtype).unsqueeze(1)
        return unpermute(weighted, permutation, dtype=x.dtype)
    work = ExpertWork(
        x=x.to(dtype),
        dispatch=permutation.dispatch,
        gates=weight_of_row,
        gates_first=False,  # the weights multiply the experts' results, not their inputs
        ends=permutation.ends,
        up=matrices.up,
        up_bias=matrices.up_bias,
        down=matrices.down,
        down_bias=matrices.down_bias,
        activation=gate.activation,
        clamp=gate.clamp,
    )
    return expert_ffn(work, x.dtype)


def _family_rows(module: Any, matrices: Matrices, rows: Tensor, permutation: Permutation) -> Tensor:
    """Return the outputs of experts whose gate or norm is the family's own, (R, dim), of the rows
    (R, dim) in the order of experts."""
    expert = expert_of_rows(permutation.ends, len(rows))

    def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return each row's product with its expert's matrix (out, in), plus the bias; 0 for rows
        that are not sent."""
        out = grouped_matmul(rows, matrix, permutation.ends)
        if bias is not None:
            out = out + bias.index_select(0, expert)
        return only_sent(out, permutation)

    up_bias = None if matrices.up_bias is None else matrices.up_bias.flatten(1)
    pre_activation = product(rows, matrices.up.flatten(1, 2), up_bias)
    if not module.has_gate:
        hidden = module.act_fn(pre_activation)
    else:
        if not module.is_concatenated:  # the family's gate takes gate and up in turn
            in_turn = pre_activation.unflatten(1, (2, -1)).transpose(1, 2)
            pre_activation = in_turn.flatten(1)
        hidden = module._apply_gate(pre_activation)
    out = product(hidden, matrices.down, matrices.down_bias)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return out


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
        # the family's own method, which the decorator of transformers has wrapped
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
    copies by expert. On a GPU, copies for other ranks come last and are not sent: to pick the
    others would make the host wait for their number.

    Args:
        top_k_index: (tokens, K) experts; `module.num_experts` marks one of another rank.
        top_k_weights: (tokens, K).
    """
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
        token = token.index_select(0, local)
        expert = expert.index_select(0, local)
        weight = weight.index_select(0, local)
        rows_per_token = None  # it differs from token to token
    # all copies count (alive_N=None); the last count, of the mark of other ranks, is left out
    counts = count(expert, alive_N=None, num_experts=module.num_experts + 1)
    counts = counts[: module.num_experts]
    permutation = sort_by_expert(
        token, expert, counts, num_tokens, rows_per_token, has_unsent=has_unsent
    )
    return weight, permutation


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
        """Return the experts' tensors: those that shards of an expert split, up, down and up's
        bias, and those that they have in common, down's bias."""
        matrices = Matrices.of(module)
        up = matrices.up if gated else matrices.up.squeeze(1)
        if matrices.up_bias is None or matrices.down_bias is None:
            return (up, matrices.down), ()
        up_bias = matrices.up_bias if gated else matrices.up_bias.squeeze(1)
        return (up, matrices.down, up_bias), (matrices.down_bias,)

    return BorrowedExperts(
        dim,
        num_experts,
        read=read,
        gated=gated,
        activation=gate.activation,
        clamp=gate.clamp,
        bias=bias,
    )
