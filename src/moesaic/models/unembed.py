"""From activations to the logits of the whole vocabulary, by the embedding matrix, which may be split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moesaic.models.split import local_part, use_differently


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
