"""LB, the lower bound of `moesaic bench device`: the matrix products of a layer alone.

Each expert runs `torch.mm(out=)` into allocated buffers: two products forward (three with SwiGLU),
and the input and weight gradient of each. The activation and its derivative take one in-place pass
each over the hidden rows; SwiGLU's product of gate and up is omitted. Nothing is routed, gathered,
weighted, summed or allocated. `RouterBound` is separate: it runs the three products of the layer's
router in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic_lab.device.cases import DeviceCase


class Bound:
    """The experts' matrix products of one case, as a callable.

    Args:
        case: the layer.
        counts: rows of each expert.

    The tensors of rows (x, y, h: hidden rows) are indexed by expert; `ups` holds the up matrix, or
    SwiGLU's gate and up matrices, of which `h` and `dh` have one entry each. `d` marks gradients.
    """

    def __init__(self, case: DeviceCase, counts: Sequence[int]) -> None:
        shape = case.shape
        rows = sum(counts)
        num_ups = 2 if case.activation == "swiglu" else 1

        def scaled(*size: int) -> Tensor:
            return torch.randn(size).mul_(0.05).to(case.torch_dtype)

        def rows_by_expert(width: int) -> Sequence[Tensor]:
            return scaled(rows, width).split(list(counts))

        experts = shape.experts
        dim = shape.dim
        hidden = shape.hidden
        self.has_silu = num_ups > 1
        self.x = rows_by_expert(dim)
        self.y = rows_by_expert(dim)
        self.dy = rows_by_expert(dim)
        self.dx = [rows_by_expert(dim) for _ in range(num_ups)]
        # one tensor for all experts, on which the activation runs; h[0] and dh[0] are its views
        self.hidden, self.d_hidden = (scaled(rows, hidden) for _ in range(2))
        self.h = [
            self.hidden.split(list(counts)),
            *(rows_by_expert(hidden) for _ in range(num_ups - 1)),
        ]
        self.dh = [
            self.d_hidden.split(list(counts)),
            *(rows_by_expert(hidden) for _ in range(num_ups - 1)),
        ]
        self.ups, self.d_ups = (
            [scaled(experts, hidden, dim) for _ in range(num_ups)] for _ in range(2)
        )
        self.down, self.d_down = (scaled(experts, dim, hidden) for _ in range(2))
        self.experts = [expert for expert, count in enumerate(counts) if count]

    @torch.no_grad()
    def __call__(self) -> None:
        """Run all products once. Only their time counts: the activation overwrites its input, so
        that its derivative is taken of the result."""
        # forward
        for up, matrices in enumerate(self.ups):
            for e in self.experts:
                torch.mm(self.x[e], matrices[e].t(), out=self.h[up][e])
        if self.has_silu:
            torch.ops.aten.silu_(self.hidden)
        else:
            torch.ops.aten.gelu_(self.hidden)
        for e in self.experts:
            torch.mm(self.h[0][e], self.down[e].t(), out=self.y[e])

        # backward
        for e in self.experts:
            torch.mm(self.dy[e], self.down[e], out=self.dh[0][e])
            torch.mm(self.dy[e].t(), self.h[0][e], out=self.d_down[e])
        if self.has_silu:
            torch.ops.aten.silu_backward.grad_input(
                self.d_hidden, self.hidden, grad_input=self.d_hidden
            )
        else:
            torch.ops.aten.gelu_backward.grad_input(
                self.d_hidden, self.hidden, grad_input=self.d_hidden
            )
        for up, matrices in enumerate(self.ups):
            for e in self.experts:
                torch.mm(self.dh[up][e], matrices[e], out=self.dx[up][e])
                torch.mm(self.dh[up][e].t(), self.x[e], out=self.d_ups[up][e])


class RouterBound:
    """The router's matrix products of one case, as a callable."""

    def __init__(self, case: DeviceCase) -> None:
        tokens = case.shape.tokens
        dim = case.shape.dim
        experts = case.shape.experts
        self.x = torch.randn(tokens, dim)
        self.dx = torch.empty(tokens, dim)
        self.weight = torch.randn(experts, dim)
        self.d_weight = torch.empty(experts, dim)
        self.logits = torch.empty(tokens, experts)

    @torch.no_grad()
    def __call__(self) -> None:
        """Run all products once."""
        torch.mm(self.x, self.weight.t(), out=self.logits)
        torch.mm(self.logits, self.weight, out=self.dx)
        torch.mm(self.logits.t(), self.x, out=self.d_weight)
