"""User-defined experts: any `nn.Module` that maps (rows, dim) to (rows, dim)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts


class ModuleExperts(AbstractExperts):
    """One module per expert, run one after the other.

    An expert without a token still runs, on zero rows: its parameters then get zero gradients rather than none, and
    wrappers that wait for every gradient do not hang. It needs the row counts on the host, hence one sync per call.

    Args:
        factory: called once per expert; each module maps (rows, dim) to (rows, dim), for zero rows too.
        dim: width of a token.
        num_experts: how many experts there are.
    """

    def __init__(self, factory: Callable[[], nn.Module], dim: int, num_experts: int) -> None:
        super().__init__(dim, num_experts)
        self.experts = nn.ModuleList(factory() for _ in range(num_experts))

    def init_normal(self, std: float, out_std: float) -> None:
        """Leave the modules as `factory` made them."""

    def forward(self, rows: Tensor, weight: Tensor | None, ends: Tensor) -> Tensor:
        starts = [0, *ends.tolist()[:-1]]
        out = torch.cat([module(rows[a:b]) for module, a, b in zip(self.experts, starts, ends.tolist())])
        if out.shape != rows.shape:
            raise InputError(
                f"a user-defined expert must map (rows, {self.dim}) to the same shape, got {tuple(out.shape)}"
            )
        return out if weight is None else out * weight.to(out.dtype).unsqueeze(1)
