"""Built-in experts: stacked 3-D weights, so that one grouped matmul serves all experts and one tensor shards over them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts.experts import (
    AbstractExperts,
    Weights,
    add_bias,
    compute_dtype,
    init_stacked,
    init_stacked_normal,
    stacked,
)
from moesaic.kernels.activation import ACTIVATIONS, activate, swiglu
from moesaic.kernels.grouped_matmul import grouped_matmul, outer_products, rows_times


class StackedExperts(AbstractExperts):
    """What built-in experts share: matrices that read the token, an activation, one matrix that writes the result.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        bias: add biases.
    """

    ups: tuple[str, ...]
    """Names of the matrices that read the token; the bias of w1 is b1."""

    def __init__(self, dim: int, hidden: int, num_experts: int, *, bias: bool) -> None:
        super().__init__(dim, num_experts)
        self.bias = bias
        for name in self.ups:
            self.register_parameter(name, stacked(num_experts, hidden, dim))
        self.w2 = stacked(num_experts, dim, hidden)
        for name in (*self.ups, "w2"):
            width = dim if name == "w2" else hidden
            self.register_parameter(_bias_of(name), nn.Parameter(torch.empty(num_experts, width)) if bias else None)
        self.reset_parameters()

    @abstractmethod
    def activated(self, read: Sequence[Tensor], gates: Tensor | None) -> Tensor:
        """Return the hidden rows, times the gates, from what the `ups` give: (R, hidden) each."""

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        biases = tuple(map(_bias_of, self.ups))
        return (*self.ups, "w2", *(biases if self.bias else ())), ("b2",) if self.bias else ()

    def shard_dim(self, name: str) -> int | None:
        return {"w2": 2, "b2": None}.get(name, 1)

    def reset_parameters(self) -> None:
        """Initialise every matrix and bias uniformly in +-1/sqrt(its input width)."""
        for name in (*self.ups, "w2"):
            init_stacked(self.get_parameter(name), getattr(self, _bias_of(name)))

    def init_normal(self, std: float, out_std: float) -> None:
        for name in (*self.ups, "w2"):
            deviation = out_std if name == "w2" else std
            init_stacked_normal(self.get_parameter(name), getattr(self, _bias_of(name)), deviation)

    def compute(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> Tensor:
        dtype = compute_dtype(rows)
        rows = rows.to(dtype)
        read = [
            add_bias(grouped_matmul(rows, matrix.to(dtype), ends), bias, ends)
            for matrix, bias in zip(*self._reading(sharded))
        ]
        out = grouped_matmul(self.activated(read, gates), sharded[len(self.ups)].to(dtype), ends)
        return add_bias(out, common[0] / shards if common else None, ends, gates)

    @torch.no_grad()
    def run(
        self, sharded: Weights, common: Weights, rows: Tensor, gates: Tensor | None, ends: Tensor, shards: int = 1
    ) -> tuple[Tensor, Weights]:
        """Run; kept is what the `ups` give."""
        read = tuple(
            add_bias(rows_times(rows, matrix.transpose(1, 2), ends), bias, ends)
            for matrix, bias in zip(*self._reading(sharded))
        )
        out = rows_times(self.activated(read, gates), sharded[len(self.ups)].transpose(1, 2), ends)
        return add_bias(out, common[0] / shards if common else None, ends, gates), read

    @torch.no_grad()
    def gradients(
        self,
        sharded: Weights,
        common: Weights,
        rows: Tensor,
        gates: Tensor | None,
        ends: Tensor,
        kept: Weights,
        dy: Tensor,
        shards: int = 1,
    ) -> tuple[Tensor, Tensor | None, Weights, Weights]:
        """Return the gradients by explicit products; only the activation goes through autograd."""
        leaves = [read.detach().requires_grad_() for read in kept]
        leaves += [] if gates is None else [gates.detach().requires_grad_()]
        with torch.enable_grad():
            hidden = self.activated(leaves[: len(kept)], None if gates is None else leaves[-1])
        write = sharded[len(self.ups)]
        grads = torch.autograd.grad(hidden, leaves, rows_times(dy, write, ends))
        d_gates = None if gates is None else grads[-1]
        d_common: Weights = ()
        if common:
            counts = ends.long().diff(prepend=ends.new_zeros(1).long())
            weighted = dy if gates is None else dy * gates.to(dy.dtype).unsqueeze(1)
            d_common = (_sums(weighted, counts).to(common[0].dtype) / shards,)
            if d_gates is not None:
                per_row = common[0].to(dy.dtype).repeat_interleave(counts, dim=0, output_size=len(dy)) / shards
                d_gates = d_gates + (dy * per_row).sum(1).to(d_gates.dtype)
        matrices = self._reading(sharded)[0]
        d_rows = torch.stack([rows_times(grad, matrix, ends) for grad, matrix in zip(grads, matrices)]).sum(0)
        d_sharded = [outer_products(grad, rows, ends) for grad in grads[: len(kept)]]
        d_sharded.append(outer_products(dy, hidden.detach(), ends))
        if self.bias:
            counts = ends.long().diff(prepend=ends.new_zeros(1).long())
            d_sharded += [_sums(grad, counts) for grad in grads[: len(kept)]]
        return d_rows, d_gates, tuple(d_sharded), d_common

    def num_units(self, sharded: Weights) -> int:
        """Return the hidden width of (a shard of) an expert."""
        return sharded[0].shape[1]

    def pack(self, sharded: Weights) -> Tensor:
        """Return (num_experts * hidden, columns): a hidden unit's row of every matrix, and its biases."""
        reading, biases = self._reading(sharded)
        columns = [*reading, sharded[len(self.ups)].transpose(1, 2)]
        columns += [bias.unsqueeze(2) for bias in biases if bias is not None]
        return torch.cat(columns, dim=2).flatten(0, 1)

    def unpack(self, rows: Tensor, num_experts: int) -> Weights:
        """Return the parameters from rows of `pack`, as views."""
        matrices = len(self.ups) + 1
        widths = [self.dim] * matrices + [1] * (len(self.ups) if self.bias else 0)
        columns = rows.view(num_experts, -1, sum(widths)).split(widths, dim=2)
        read = [columns[i] if i + 1 < matrices else columns[i].transpose(1, 2) for i in range(matrices)]
        return (*read, *(column.squeeze(2) for column in columns[matrices:]))

    def _reading(self, sharded: Weights) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Return the matrices that read the token, and their biases."""
        ups = len(self.ups)
        return sharded[:ups], sharded[ups + 1 :] if self.bias else (None,) * ups


class PlainExperts(StackedExperts):
    """Two matrices: `act(x @ w1.T + b1) @ w2.T + b2`.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        activation: "gelu", "relu" or "silu".
        bias: add biases, (num_experts, hidden) and (num_experts, dim).
    """

    ups = ("w1",)

    def __init__(
        self, dim: int, hidden: int, num_experts: int, *, activation: str = "gelu", bias: bool = False
    ) -> None:
        if activation not in ACTIVATIONS:
            raise InputError(f"activation={activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}")
        super().__init__(dim, hidden, num_experts, bias=bias)
        self.activation = activation

    def activated(self, read: Sequence[Tensor], gates: Tensor | None) -> Tensor:
        """Return the activation of what w1 gives, times the gates."""
        return activate(read[0], self.activation, gates)


class GatedExperts(StackedExperts):
    """Three matrices, SwiGLU: `(silu(x @ w1.T + b1) * (x @ w3.T + b3)) @ w2.T + b2`; the names are Mixtral's.

    Args:
        dim: width of a token.
        hidden: inner width of one expert.
        num_experts: how many experts there are.
        bias: add biases.
    """

    ups = ("w1", "w3")

    def __init__(self, dim: int, hidden: int, num_experts: int, *, bias: bool = False) -> None:
        super().__init__(dim, hidden, num_experts, bias=bias)

    def activated(self, read: Sequence[Tensor], gates: Tensor | None) -> Tensor:
        """Return what w3 gives, gated by the activation of what w1 gives, times the gates."""
        return swiglu(read[0], read[1], gates)


def _bias_of(name: str) -> str:
    return f"b{name[1:]}"


def _sums(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each expert's rows, (num_experts, width), in a fixed order."""
    return torch.segment_reduce(rows, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
