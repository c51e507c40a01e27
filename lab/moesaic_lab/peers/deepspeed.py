"""DeepSpeed's MoE layer (the package `deepspeed`, optional) with the weights of one of ours, as it runs on Gloo.

Its nearest to a dropless layer is `drop_tokens=False`: every expert gets as many rows from every rank as the fullest expert
of any rank has, the rest zeros, which are sent and multiplied. Each of a rank's experts is a module of its own.

With torch's exchange the layer is DeepSpeed's own, untouched. To swap the exchange, DeepSpeed is told that all experts are
local (`ep_size=1`), and its experts are wrapped: rows leave in front of them and come back behind them, where
DeepSpeed's two all-to-alls would stand. Its gate still agrees on the capacity over all ranks.
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
    """DeepSpeed's layer in place of one of ours; all ranks make it together, in an initialised Gloo world.

    Args:
        layer: whole, the same on every rank; SwiGLU experts without biases behind a softmax router that normalizes over
            the chosen experts, which is what DeepSpeed computes.
        exchange: between all ranks; a `TorchExchange` leaves DeepSpeed as it is.

    Raises:
        InputError: for a layer that DeepSpeed cannot compute.
    """

    def __init__(self, layer: MoE, exchange: AbstractExchange) -> None:
        super().__init__()
        router, experts = layer.router, layer.experts
        if not isinstance(router, SoftmaxTopK) or router.normalize != "after" or layer.top_k < 2:
            raise InputError("DeepSpeed's gate is a softmax over the chosen experts: use SoftmaxTopK with top_k >= 2")
        if not isinstance(experts, GatedExperts) or experts.bias:
            raise InputError("DeepSpeed is compared with SwiGLU experts without biases: use experts='swiglu'")
        self.exchange, self.is_own = exchange, isinstance(exchange, TorchExchange)
        with _quiet():
            self.layer = self._make(layer, exchange.world)
        each = layer.num_experts // exchange.world
        first = exchange.rank * each
        moe = self.layer.deepspeed_moe
        with torch.no_grad():
            moe.gate.wg.weight.copy_(router.weight)
            for number, expert in enumerate(moe.experts.deepspeed_experts[:each]):
                for name in ("w1", "w3", "w2"):
                    getattr(expert, name).copy_(getattr(experts, name)[first + number])
        if not self.is_own:
            del moe.experts.deepspeed_experts[each:]
            moe.experts.num_local_experts = each
            moe.experts = _Exchanged(moe.experts, exchange)

    def _make(self, layer: MoE, world: int) -> Any:
        """Return DeepSpeed's layer, its groups set up."""
        deepspeed: Any = import_module("deepspeed")
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        made = import_module("deepspeed.moe.layer").MoE(
            layer.dim, _Expert(layer.dim, layer.hidden), num_experts=layer.num_experts,
            ep_size=world if self.is_own else 1, k=layer.top_k, min_capacity=0, drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )  # fmt: skip
        if self.is_own:
            made.set_deepspeed_parallelism()
        else:
            made.deepspeed_moe.gate.ep_group = dist.group.WORLD
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (..., dim) -> (..., dim)."""
        y: Tensor = self.layer(x)[0]
        return y


class _Expert(nn.Module):
    """One SwiGLU expert, its matrices named and laid out as ours."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(hidden, dim))
        self.w3 = nn.Parameter(torch.empty(hidden, dim))
        self.w2 = nn.Parameter(torch.empty(dim, hidden))

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(rows, self.w1)) * F.linear(rows, self.w3), self.w2)


class _Exchanged(nn.Module):
    """DeepSpeed's experts of this rank, behind and in front of an exchange.

    Args:
        experts: DeepSpeed's, (world, experts of this rank, capacity, dim) -> the same.
        exchange: between all ranks.
    """

    def __init__(self, experts: nn.Module, exchange: AbstractExchange) -> None:
        super().__init__()
        self.experts, self.exchange = experts, exchange

    def forward(self, inputs: Tensor) -> Tensor:
        rows_ECD = inputs.squeeze(0)
        even = (len(rows_ECD) // self.exchange.world,) * self.exchange.world
        arrived = self.exchange(rows_ECD, even, even).view(self.exchange.world, -1, *rows_ECD.shape[1:])
        return self.exchange(self.experts(arrived).view_as(rows_ECD), even, even).unsqueeze(0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what DeepSpeed prints and logs while it is set up off standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
