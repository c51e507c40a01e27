"""Layers with weights that tensor parallelism may shard, and the logits of a sharded vocabulary.

Each rank computes with its own shard, on plain tensors. The code that shards the weights adds the
sums and copies around the layers. (DTensor arithmetic would do both, but it is slower on a CPU, and
its view rules hang for an empty batch in torch 2.13.)
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
    """`count` linear maps of the same input, computed in one product.

    The weight is stacked, (count, out_features, in_features), so that tensor parallelism can shard
    its second dimension by heads. Shards of one flat matrix of queries, keys and values would cut
    across them.

    Args:
        count: the number of maps.
        in_features: width of the input.
        out_features: output width of each map.
        bias: add biases, initialised to zero.
    """

    input_is_whole = False
    """Whether the input has all positions even if ranks share them out between layers."""

    def __init__(self, count: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(count, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Linear` does, and set the bias to zero."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., count, out_features); with a sharded weight, only to this
        rank's out_features."""
        weight = local_part(self.weight)
        bias = None if self.bias is None else local_part(self.bias).flatten()
        outputs = F.linear(x, weight.flatten(0, 1), bias)
        return outputs.unflatten(-1, weight.shape[:2])  # (count, this rank's out_features)


class RowLinear(nn.Linear):
    """`nn.Linear`. If the weight is sharded by its inputs, the result is a partial sum that
    includes a share of the bias."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else bias_share(self.bias)
        return F.linear(input, local_part(self.weight), bias)


class Norm(nn.RMSNorm):
    """`nn.RMSNorm` that ranks may apply to different positions or heads; its weight gradient is
    then summed over ranks."""

    different_over: DeviceMesh | None = None
    """The mesh of ranks that normalise different positions or heads; None if all ranks normalise
    the same."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.different_over is not None:
            weight = with_summed_gradient(weight, self.different_over)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that ranks may apply to different positions or heads, like `Norm`."""

    different_over: DeviceMesh | None = None
    """See `Norm.different_over`."""

    def forward(self, input: Tensor) -> Tensor:
        if self.different_over is None:
            return super().forward(input)
        weight = with_summed_gradient(self.weight, self.different_over)
        bias = with_summed_gradient(self.bias, self.different_over)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def bias_share(bias: Tensor) -> Tensor:
    """Return the part of a bias that a rank adds: an equal share if ranks sum their outputs, else
    the whole bias."""
    if not isinstance(bias, DTensor):  # the weight is not sharded
        return bias
    return bias.to_local(grad_placements=[Partial()]) / bias.device_mesh.size()


def with_summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `x`, which is the same on all ranks of a mesh; sum its gradient over the ranks, which
    use it differently."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, differentiable, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unembed(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary.

    Args:
        x: (batch, positions, dim), the same on all ranks that share the embedding.
        weight: (vocab_size, dim); if sharded, a DTensor over one mesh dimension that is sharded by
            rows.

    Returns:
        (batch, positions, vocab_size), the same on all these ranks.
    """
    if not isinstance(weight, DTensor):
        return F.linear(x, weight)
    mesh = weight.device_mesh
    part = F.linear(with_summed_gradient(x, mesh), local_part(weight))
    logits: Tensor = GatherVocabulary.apply(part, mesh, weight.shape[0])
    return logits


class GatherVocabulary(torch.autograd.Function):
    """Gathers the logits of all ranks. All ranks use them identically, so backward takes a rank's
    own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, vocab_size: int) -> Tensor:
        """Return the logits of the whole vocabulary from those of this rank's part of it, both
        (batch, positions, vocabulary)."""
        ctx.mesh = mesh
        # given, since DTensor assumes that all parts are as large as this one
        shape = torch.Size((*part.shape[:2], vocab_size))
        stride = (shape[1] * vocab_size, vocab_size, 1)  # row-major
        split = DTensor.from_local(
            part, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride
        )
        return split.full_tensor().clone()  # FSDP warns of a module that returns a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = DTensor.from_local(gradient, ctx.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(2)]).to_local(), None, None
