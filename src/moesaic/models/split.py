"""Layers that tensor parallelism splits, and the logits of a vocabulary that it splits: each rank computes with its part.

They compute on plain tensors; the sums and copies around them belong to whoever splits them. (DTensor arithmetic would do
both, slower on a CPU, and its view rules never return for an empty batch in torch 2.13.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class StackedLinear(nn.Module):
    """`count` linear maps, computed in one product.

    Queries, keys and values in one flat matrix would be cut across by tensor parallelism; stacked, its second dimension
    splits into heads.

    Args:
        bias: add biases, which start at zero.
    """

    def __init__(self, count: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)  # as nn.Linear starts
        self.weight = nn.Parameter(torch.empty(count, out_features, in_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(count, out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., count, out_features), of which a rank computes the part that its shard has."""
        weight = local_part(self.weight)
        bias = None if self.bias is None else local_part(self.bias).flatten()
        return F.linear(x, weight.flatten(0, 1), bias).unflatten(-1, weight.shape[:2])


class RowLinear(nn.Linear):
    """`nn.Linear`. Where the weight is split over its inputs, the result is a part of a sum, with its part of the bias."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else part_of_sum(self.bias)
        return F.linear(input, local_part(self.weight), bias)


class Norm(nn.RMSNorm):
    """`nn.RMSNorm`, which the ranks of a mesh may apply to positions or heads of their own: its gradient is then summed."""

    different_over: DeviceMesh | None = None
    """Over which ranks what is normalised is split; None for not at all."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.different_over is None else use_differently(self.weight, self.different_over)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, the same."""

    different_over: DeviceMesh | None = None
    """As of `Norm`."""

    def forward(self, input: Tensor) -> Tensor:
        if self.different_over is None:
            return super().forward(input)
        weight, bias = (use_differently(each, self.different_over) for each in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def part_of_sum(bias: Tensor) -> Tensor:
    """Return what a rank adds of a bias: its share, where the ranks that split the weight sum their outputs."""
    if not isinstance(bias, DTensor):  # beside a whole weight
        return bias
    return bias.to_local(grad_placements=[Partial()]) / bias.device_mesh.size()


def use_differently(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `x`, which the ranks of a mesh have alike and use differently: its gradient is the sum of theirs."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, differentiable; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unembed(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of all tokens of the vocabulary.

    Args:
        x: (batch, positions, dim), the same on all ranks that share the embedding.
        weight: (vocab_size, dim); where it is split, by its rows, a DTensor of one mesh dimension.

    Returns:
        (batch, positions, vocab_size), the same on all those ranks.
    """
    if not isinstance(weight, DTensor):
        return F.linear(x, weight)
    mesh = weight.device_mesh
    part = F.linear(use_differently(x, mesh), local_part(weight))
    logits: Tensor = GatherVocabulary.apply(part, mesh, weight.shape[0])
    return logits


class GatherVocabulary(torch.autograd.Function):
    """All ranks' logits from each rank's part; as all use them alike, a rank's gradient is its part of theirs."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, vocab_size: int) -> Tensor:
        ctx.mesh = mesh
        shape = torch.Size((*part.shape[:2], vocab_size))
        stride = (shape[1] * vocab_size, vocab_size, 1)
        split = DTensor.from_local(part, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)
        return split.full_tensor().clone()  # FSDP warns of a module that returns a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = DTensor.from_local(gradient, ctx.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(2)]).to_local(), None, None
