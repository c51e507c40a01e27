"""The interface of a layer's experts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class AbstractExperts(nn.Module, ABC):
    """All experts of a layer, run over rows that are sorted by expert.

    Args:
        dim: width of a token, in and out.
        num_experts: how many experts there are.
    """

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.dim = dim
        self.num_experts = num_experts

    @abstractmethod
    def forward(self, rows: Tensor, weight: Tensor | None, ends: Tensor) -> Tensor:
        """Run each expert on its rows and scale each result by its routing weight.

        Args:
            rows: (R, dim), expert after expert.
            weight: (R,) routing weights, or None for weights of 1.
            ends: (num_experts,) int32, one past the last row of each expert.

        Returns:
            (R, dim).
        """

    @abstractmethod
    def init_normal(self, std: float, out_std: float) -> None:
        """Draw the weights anew, as a model wants them, and set biases to zero; modules of a user stay as they are.

        Args:
            std: deviation of the matrices that read the token.
            out_std: deviation of the matrices that write the result.
        """


def stacked(num_experts: int, out_width: int, in_width: int) -> nn.Parameter:
    """Return uninitialised matrices, (num_experts, out_width, in_width), each as `nn.Linear` stores it."""
    return nn.Parameter(torch.empty(num_experts, out_width, in_width))


@torch.no_grad()
def init_stacked(weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Initialise each expert as `nn.Linear` would: uniform in +-1/sqrt(in_width), the bias too.

    Args:
        weight: (num_experts, out_width, in_width).
        bias: (num_experts, out_width) or None.
    """
    bound = 1 / math.sqrt(weight.shape[2])
    weight.uniform_(-bound, bound)
    if bias is not None:
        bias.uniform_(-bound, bound)


@torch.no_grad()
def init_stacked_normal(weight: nn.Parameter, bias: nn.Parameter | None, std: float) -> None:
    """Initialise matrices from N(0, std), biases to zero; shapes as for `init_stacked`."""
    weight.normal_(std=std)
    if bias is not None:
        bias.zero_()


def add_bias(rows: Tensor, bias: Tensor | None, ends: Tensor, weight: Tensor | None = None) -> Tensor:
    """Add each row's expert's bias, scaled by the row's weight where there is one.

    Args:
        rows: (R, width).
        bias: (num_experts, width) or None.
        ends: (num_experts,) int32.
        weight: (R,) or None for 1.
    """
    if bias is None:
        return rows
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    per_row = bias.to(rows.dtype).repeat_interleave(counts, dim=0, output_size=len(rows))
    return rows + (per_row if weight is None else per_row * weight.to(rows.dtype).unsqueeze(1))


def compute_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype of the products: autocast's where it is on, else that of the rows."""
    device_type = rows.device.type
    if torch.is_autocast_enabled(device_type) and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return rows.dtype
