"""The plain layer with a codec inserted: what a coded plan must give, row by row and shard by shard.

Straight through: the backward pass takes the codec for the identity, and codes the gradients that travel if the plan says
so. A row is coded where the rank that it comes from is not the rank of the shard that it goes to. Exact for s1 and s2 and for
codecs that treat each row by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.experts import GatedExperts, PlainExperts
from moesaic.kernels.codecs import codec_named
from moesaic.layer import MoE
from moesaic.testing.cases import Case


@dataclass(frozen=True)
class Travel:
    """Which rank each copy starts from, and where each expert's shards live."""

    case: Case
    origin: dict[tuple[int, int], int]
    """(token, expert) to rank."""

    @classmethod
    def of(cls, case: Case, copies: list[tuple[int, int]], tokens: list[int]) -> Travel:
        """Find the origins of the copies that are sent.

        Args:
            case: its schedule delivers at once, as s1 and s2 do.
            copies: (token, expert) in the order in which the router chose them; tokens count over all groups.
            tokens: of each group.
        """
        grid, origin, slices = case.grid, {}, case.plan.program.routes_slices
        for group, count in enumerate(tokens):
            start = sum(tokens[:group])
            for expert in range(case.num_experts):
                run = [token for token, e in copies if e == expert and start <= token < start + count]
                for place, token in enumerate(run):
                    of, at = (count, token - start) if slices else (len(run), place)
                    tp = next(t for t in range(grid.tp) if of * t // grid.tp <= at < of * (t + 1) // grid.tp)
                    origin[(token, expert)] = group * grid.tp + tp
        return cls(case, origin)

    def target(self, origin: int, expert: int, shard: int) -> int:
        """Return the rank of a shard, in the origin's copy of the experts."""
        grid = self.case.grid
        home = expert // (self.case.num_experts // grid.ep)
        peers = grid.group(origin, ("ep", "etp"))
        return next(r for r in peers if grid.coordinate(r, "ep") == home and grid.coordinate(r, "etp") == shard)


def coded_output(twin: MoE, x_TD: Tensor, weight_TE: Tensor, travel: Travel) -> Tensor:
    """Return the sum of every copy's results, coded on their ways, (tokens, dim)."""
    plan, rows = travel.case.plan, []
    for (token, expert), origin in travel.origin.items():
        weight, row = weight_TE[token, expert], x_TD[token]
        for shard in range(travel.case.grid.etp):
            crosses = travel.target(origin, expert, shard) != origin
            seen = _Coded.apply(row, plan.codec, plan.backward_codec) if crosses else row
            part = _shard_output(twin, expert, shard, travel.case.grid.etp, seen, weight)
            part = _Coded.apply(part, plan.codec, plan.backward_codec) if crosses else part
            rows.append(part)
    tokens = torch.tensor([token for token, _ in travel.origin for _ in range(travel.case.grid.etp)], dtype=torch.int64)
    return torch.zeros_like(x_TD).index_add(0, tokens, torch.stack(rows)) if rows else 0 * x_TD


def _shard_output(twin: MoE, expert: int, shard: int, shards: int, row: Tensor, weight: Tensor) -> Tensor:
    """Return one shard's part of an expert's weighted result, (dim,)."""
    experts = twin.experts
    assert isinstance(experts, (GatedExperts, PlainExperts)), "the codec is followed through built-in experts only"
    if twin.apply_weight == "before":
        row = weight * row

    def read(name: str) -> Tensor:
        out: Tensor = getattr(experts, f"w{name}")[expert].chunk(shards)[shard] @ row
        return out + getattr(experts, f"b{name}")[expert].chunk(shards)[shard] if experts.bias else out

    hidden = F.silu(read("1")) * read("3") if isinstance(experts, GatedExperts) else F.gelu(read("1"))
    out: Tensor = experts.w2[expert].chunk(shards, 1)[shard] @ hidden
    if experts.bias:
        out = out + experts.get_parameter("b2")[expert] / shards
    return out if twin.apply_weight == "before" else weight * out


class _Coded(torch.autograd.Function):
    """There and back through a codec; backward the same for the gradient, with its own codec."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, codec: str, backward_codec: str) -> Tensor:
        ctx.codec = backward_codec
        return _there_and_back(row, codec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _there_and_back(gradient, ctx.codec), None, None


def _there_and_back(row: Tensor, name: str) -> Tensor:
    codec, rows = codec_named(name), row.detach().unsqueeze(0)
    return codec.decode(codec.encode(rows), 1, rows.shape[1], rows.dtype).squeeze(0).clone()
