"""DeepSpeed's MoE layer (from the optional package `deepspeed`) on Gloo, with the weights of one of
our layers.

DeepSpeed's closest option to a dropless layer is `drop_tokens=False`. Each expert then gets as many
rows from each rank as the fullest expert of any rank has. Zeros pad the rows, and are sent and
multiplied. Each expert of a rank is a module of its own.

With torch's exchange the layer is DeepSpeed's own, unchanged. For another exchange, DeepSpeed is
configured as if all experts were local (`ep_size=1`), and its experts are wrapped. The wrapper
exchanges rows before and after the experts, in place of DeepSpeed's two all-to-alls. DeepSpeed's
gate still agrees on the capacity over all ranks.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts import GatedExperts
from moesaic.layer import MoE
from moesaic.routing.routers import SoftmaxTopK
from moesaic_lab.peers.exchange import AbstractExchange, TorchExchange


class DeepSpeedLayer(nn.Module):
    """DeepSpeed's layer, to replace one of ours. All ranks create it together, in an initialized
    Gloo process group.

    Args:
        layer: our unsharded layer, the same on all ranks. DeepSpeed needs SwiGLU experts without
            biases, and a softmax router that normalizes over the chosen experts.
        exchange: exchanges rows between all ranks; `TorchExchange` leaves DeepSpeed unchanged.

    Raises:
        InputError: DeepSpeed cannot compute the layer.
    """

    def __init__(self, layer: MoE, exchange: AbstractExchange) -> None:
        super().__init__()
        router = layer.router
        experts = layer.experts
        if not isinstance(router, SoftmaxTopK) or router.normalize != "after" or layer.top_k < 2:
            raise InputError(
                "DeepSpeed's gate is a softmax over the chosen experts: use SoftmaxTopK with "
                "top_k >= 2"
            )
        if not isinstance(experts, GatedExperts) or experts.bias:
            raise InputError(
                "DeepSpeed is compared with SwiGLU experts without biases: use experts='swiglu'"
            )
        self.exchange = exchange
        self.is_own = isinstance(exchange, TorchExchange)
        with _quiet():
            self.layer = self._make(layer, exchange.world)
        experts_per_rank = layer.num_experts // exchange.world
        first = exchange.rank * experts_per_rank
        moe = self.layer.deepspeed_moe
        # Without its exchange DeepSpeed has made all experts (`_make`): the first ones become those
        # of this rank, and the others are deleted below.
        own_experts = moe.experts.deepspeed_experts[:experts_per_rank]
        with torch.no_grad():
            moe.gate.wg.weight.copy_(router.weight)
            for number, expert in enumerate(own_experts, start=first):
                for name in ("w1", "w3", "w2"):
                    getattr(expert, name).copy_(getattr(experts, name)[number])
        if not self.is_own:
            del moe.experts.deepspeed_experts[experts_per_rank:]
            moe.experts.num_local_experts = experts_per_rank
            moe.experts = _Exchanged(moe.experts, exchange)

    def _make(self, layer: MoE, world: int) -> Any:
        """Create DeepSpeed's layer and set up its process groups."""
        deepspeed: Any = import_module("deepspeed")
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        peer = import_module("deepspeed.moe.layer").MoE(
            layer.dim,
            _Expert(layer.dim, layer.hidden),
            num_experts=layer.num_experts,
            ep_size=world if self.is_own else 1,
            k=layer.top_k,
            min_capacity=0,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )
        if self.is_own:
            peer.set_deepspeed_parallelism()
        else:
            peer.deepspeed_moe.gate.ep_group = dist.group.WORLD
        return peer

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (..., dim) -> (..., dim)."""
        y: Tensor = self.layer(x)[0]
        return y


class _Expert(nn.Module):
    """One SwiGLU expert, with the names and layouts of our matrices."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(hidden, dim))
        self.w3 = nn.Parameter(torch.empty(hidden, dim))
        self.w2 = nn.Parameter(torch.empty(dim, hidden))

    def forward(self, rows: Tensor) -> Tensor:
        gate = F.silu(F.linear(rows, self.w1))
        up = F.linear(rows, self.w3)
        return F.linear(gate * up, self.w2)


class _Exchanged(nn.Module):
    """DeepSpeed's experts of this rank, with an exchange of rows before and after them.

    Args:
        experts: DeepSpeed's experts, which map (world, experts of this rank, capacity, dim) to the
            same shape.
        exchange: exchanges rows between all ranks.
    """

    def __init__(self, experts: nn.Module, exchange: AbstractExchange) -> None:
        super().__init__()
        self.experts = experts
        self.exchange = exchange

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (1, all experts, capacity, dim) to the same shape."""
        rows_ECD = inputs.squeeze(0)
        world = self.exchange.world
        even = (len(rows_ECD) // world,) * world  # as many experts on each rank
        arrived = self.exchange(rows_ECD, even, even)
        results = self.experts(arrived.view(world, -1, *rows_ECD.shape[1:]))
        return self.exchange(results.view_as(rows_ECD), even, even).unsqueeze(0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what DeepSpeed prints to standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
