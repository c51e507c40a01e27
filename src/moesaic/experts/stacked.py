"""Built-in experts: stacked 3-D weights, so that one grouped matmul serves all experts and one tensor shards over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, add_bias, compute_dtype, init_stacked, init_stacked_normal, stacked
from moesaic.kernels.activation import ACTIVATIONS, activate, swiglu
from moesaic.kernels.grouped_matmul import grouped_matmul


class PlainExperts(AbstractExperts):
    """Two matrices: `act(x @ w1.T + b1) @ w2.T + b2`.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        activation: "gelu", "relu" or "silu".
        bias: add biases, (num_experts, hidden) and (num_experts, dim).
    """

    def __init__(
        self, dim: int, hidden: int, num_experts: int, *, activation: str = "gelu", bias: bool = False
    ) -> None:
        super().__init__(dim, num_experts)
        if activation not in ACTIVATIONS:
            raise InputError(f"activation={activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.w1 = stacked(num_experts, hidden, dim)
        self.w2 = stacked(num_experts, dim, hidden)
        self.b1 = nn.Parameter(torch.empty(num_experts, hidden)) if bias else None
        self.b2 = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every matrix and bias uniformly in +-1/sqrt(its input width)."""
        init_stacked(self.w1, self.b1)
        init_stacked(self.w2, self.b2)

    def init_normal(self, std: float, out_std: float) -> None:
        init_stacked_normal(self.w1, self.b1, std)
        init_stacked_normal(self.w2, self.b2, out_std)

    def forward(self, rows: Tensor, weight: Tensor | None, ends: Tensor) -> Tensor:
        dtype = compute_dtype(rows)
        hidden = grouped_matmul(rows.to(dtype), self.w1.to(dtype), ends)
        hidden = activate(add_bias(hidden, self.b1, ends), self.activation, weight)
        out = grouped_matmul(hidden, self.w2.to(dtype), ends)
        return add_bias(out, self.b2, ends, weight)


class GatedExperts(AbstractExperts):
    """Three matrices, SwiGLU: `(silu(x @ w1.T + b1) * (x @ w3.T + b3)) @ w2.T + b2`; the names are Mixtral's.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        bias: add biases.
    """

    def __init__(self, dim: int, hidden: int, num_experts: int, *, bias: bool = False) -> None:
        super().__init__(dim, num_experts)
        self.w1 = stacked(num_experts, hidden, dim)
        self.w3 = stacked(num_experts, hidden, dim)
        self.w2 = stacked(num_experts, dim, hidden)
        self.b1 = nn.Parameter(torch.empty(num_experts, hidden)) if bias else None
        self.b3 = nn.Parameter(torch.empty(num_experts, hidden)) if bias else None
        self.b2 = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every matrix and bias uniformly in +-1/sqrt(its input width)."""
        init_stacked(self.w1, self.b1)
        init_stacked(self.w3, self.b3)
        init_stacked(self.w2, self.b2)

    def init_normal(self, std: float, out_std: float) -> None:
        init_stacked_normal(self.w1, self.b1, std)
        init_stacked_normal(self.w3, self.b3, std)
        init_stacked_normal(self.w2, self.b2, out_std)

    def forward(self, rows: Tensor, weight: Tensor | None, ends: Tensor) -> Tensor:
        dtype = compute_dtype(rows)
        rows = rows.to(dtype)
        gate = add_bias(grouped_matmul(rows, self.w1.to(dtype), ends), self.b1, ends)
        up = add_bias(grouped_matmul(rows, self.w3.to(dtype), ends), self.b3, ends)
        out = grouped_matmul(swiglu(gate, up, weight), self.w2.to(dtype), ends)
        return add_bias(out, self.b2, ends, weight)
