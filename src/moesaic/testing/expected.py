"""Computes the expected results of a case: the dense float64 layer on the tokens of all groups together, without a mesh.

    total = sum over micro-batches of share * (mean over groups of sum(y * dy) + auxiliary loss over all tokens)

`reference.py` does the computation, for the whole batch.

With a codec, a row is encoded if its origin rank is not the rank of the shard that it is sent to. The backward pass treats the
codec as the identity (straight-through); the gradients that are sent are encoded if the plan has a backward codec. This is
exact for the schedules s1 and s2, and for codecs that treat each row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.experts import GatedExperts, PlainExperts
from moesaic.kernels.codecs import codec_named
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.testing.cases import Case
from moesaic.testing.reference import Copy, Reference, in_float64, reference
from moesaic.testing.workload import CaseData, GroupBatch


@dataclass(frozen=True)
class Travel:
    """The rank from which each copy is sent, and the ranks that store each expert's shards."""

    case: Case
    origin: dict[tuple[int, int], int]
    """(token, expert) -> the rank that sends this copy."""

    @classmethod
    def of(cls, case: Case, copies: list[tuple[int, int]], tokens: list[int]) -> Travel:
        """Compute the origins of the copies.

        Args:
            case: must have a schedule that delivers at once, as s1 and s2 do.
            copies: (token, expert) in the order in which the router chose them; tokens are numbered across all groups.
            tokens: number of tokens of each group.
        """
        grid, origin, slices = case.grid, {}, case.plan.program.routes_slices
        for group, count in enumerate(tokens):
            start = sum(tokens[:group])
            for expert in range(case.num_experts):
                chosen = [
                    token for token, e in copies if e == expert and start <= token < start + count
                ]
                for place, token in enumerate(chosen):
                    length, position = (count, token - start) if slices else (len(chosen), place)
                    tp = next(
                        t
                        for t in range(grid.tp)
                        if length * t // grid.tp <= position < length * (t + 1) // grid.tp
                    )
                    origin[(token, expert)] = group * grid.tp + tp
        return cls(case, origin)

    def target(self, origin: int, expert: int, shard: int) -> int:
        """Return the rank that stores a shard of `expert`, in the origin rank's replica of the experts."""
        grid = self.case.grid
        home = expert // (self.case.num_experts // grid.ep)
        peers = grid.group(origin, ("ep", "etp"))
        return next(
            r
            for r in peers
            if grid.coordinate(r, "ep") == home and grid.coordinate(r, "etp") == shard
        )


def coded_output(twin: MoE, x_TD: Tensor, sent: Sequence[Copy], travel: Travel) -> Tensor:
    """Return each token's sum of its copies' results, (tokens, dim), with the codec applied to all rows that cross ranks."""
    plan, shards, rows = travel.case.plan, travel.case.grid.etp, []
    for token, expert, _, weight in sent:
        origin, row = travel.origin[(token, expert)], x_TD[token]
        for shard in range(shards):
            crosses = travel.target(origin, expert, shard) != origin
            received = _Coded.apply(row, plan.codec, plan.backward_codec) if crosses else row
            part = _shard_output(twin, expert, shard, shards, received, weight)
            part = _Coded.apply(part, plan.codec, plan.backward_codec) if crosses else part
            rows.append(part)
    tokens = torch.tensor([copy.token for copy in sent for _ in range(shards)], dtype=torch.int64)
    return torch.zeros_like(x_TD).index_add(0, tokens, torch.stack(rows)) if rows else 0 * x_TD


def _shard_output(
    twin: MoE, expert: int, shard: int, shards: int, row: Tensor, weight: Tensor
) -> Tensor:
    """Return one shard's summand of an expert's weighted result, (dim,)."""
    experts = twin.experts
    assert isinstance(experts, (GatedExperts, PlainExperts)), (
        "the codec is followed through built-in experts only"
    )
    if twin.apply_weight == "before":
        row = weight * row

    def read(name: str) -> Tensor:
        out: Tensor = getattr(experts, f"w{name}")[expert].chunk(shards)[shard] @ row
        return (
            out + getattr(experts, f"b{name}")[expert].chunk(shards)[shard] if experts.bias else out
        )

    hidden = (
        F.silu(read("1")) * read("3") if isinstance(experts, GatedExperts) else F.gelu(read("1"))
    )
    out: Tensor = experts.w2[expert].chunk(shards, 1)[shard] @ hidden
    if experts.bias:
        out = out + experts.get_parameter("b2")[expert] / shards
    return out if twin.apply_weight == "before" else weight * out


class _Coded(torch.autograd.Function):
    """Encodes and decodes a row. The backward pass encodes and decodes the gradient with the backward codec."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, codec: str, backward_codec: str) -> Tensor:
        ctx.codec = backward_codec
        return _round_trip(row, codec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _round_trip(gradient, ctx.codec), None, None


def _round_trip(row: Tensor, name: str) -> Tensor:
    codec, rows = codec_named(name), row.detach().unsqueeze(0)
    return codec.decode(codec.encode(rows), 1, rows.shape[1], rows.dtype).squeeze(0).clone()


Values = dict[tuple[str, str], Tensor | None]
"""(quantity, such as "expert gradient"; which of its values) -> the value on one rank; None stands for zeros."""


def quantity_of(parameter: str) -> str:
    """Return the quantity to which the gradient of a layer's parameter belongs."""
    kind = parameter.split(".")[0]
    return f"{kind.removesuffix('s') if kind == 'experts' else kind} gradient"


def expect(case: Case, work: CaseData) -> list[Values]:
    """Compute the values that each rank must have after a case, in float64.

    The gradient of the input is that of a rank's own backward pass: dp times the gradient of the total.
    """
    twin, grid = in_float64(work.layer), case.grid
    leaves = [
        [batch.x.detach().double().clone().requires_grad_() for batch in of_groups]
        for of_groups in work.batches
    ]
    total, of_groups = torch.zeros((), dtype=torch.float64), [Values() for _ in range(grid.dp)]
    whole: Values = {}
    for micro, (share, xs, batches) in enumerate(zip(work.shares, leaves, work.batches)):
        result = _pass(case, twin, xs, batches)
        cotangents = torch.cat([batch.dy.double().flatten(0, 1) for batch in batches])
        total = total + share * ((result.y * cotangents).sum() / grid.dp + result.loss)
        twin.step_counts += torch.tensor(result.requested)
        sent = torch.bincount(
            torch.tensor([expert for _, expert in result.rows], dtype=torch.int64),
            minlength=case.num_experts,
        )
        whole |= {
            ("counts", f"requested {micro}"): torch.tensor(result.requested),
            ("counts", f"sent {micro}"): sent,
        }
        whole |= {
            ("auxiliary loss", f"{name} {micro}"): loss.detach()
            for name, loss in result.losses.items()
        }
        _store(of_groups, ("output", str(micro)), _by_group(result.y.detach(), batches))
        if case.evaluate and micro == 0:
            _store(of_groups, ("evaluation", ""), _evaluate(case, twin, xs, batches))
    whole["counts", "step"] = twin.step_counts.clone()
    flat = [x for xs in leaves for x in xs]
    variables = [*flat, *twin.parameters()]
    flat_grads = torch.autograd.grad(
        total + 0 * sum(x.sum() for x in flat), variables, allow_unused=True
    )
    for micro in range(len(leaves)):
        dxs = flat_grads[micro * grid.dp : (micro + 1) * grid.dp]
        _store(of_groups, ("input gradient", str(micro)), [grid.dp * dx for dx in dxs])
    gradients = dict(zip((name for name, _ in twin.named_parameters()), flat_grads[len(flat) :]))
    twin.finish_step()
    whole |= {("router state", name): buffer for name, buffer in twin.router.named_buffers()}
    whole["gradient norm", ""] = sum(
        (g.square().sum() for g in gradients.values() if g is not None), start=0 * total
    ).sqrt()
    return [
        whole
        | of_groups[grid.coordinate(rank, "dp")]
        | {
            (quantity_of(name), name): _own_part(case, work, name, gradient, rank)
            for name, gradient in gradients.items()
        }
        for rank in range(grid.world)
    ]


def _store(of_groups: list[Values], key: tuple[str, str], values: Sequence[Tensor]) -> None:
    """Store one value of each group."""
    for own, value in zip(of_groups, values, strict=True):
        own[key] = value


def _own_part(
    case: Case, work: CaseData, name: str, gradient: Tensor | None, rank: int
) -> Tensor | None:
    """Return the part of a parameter's gradient that a rank has."""
    if gradient is None or quantity_of(name) != "expert gradient" or case.experts == "modules":
        return gradient
    return shard_of(gradient, case.grid, rank, work.layer.experts.shard_dim(name.split(".")[-1]))


def _pass(case: Case, twin: MoE, xs: Sequence[Tensor], batches: Sequence[GroupBatch]) -> Reference:
    """Run the layer on all groups' tokens; see `reference`.

    Args:
        twin: the layer in float64, in training or evaluation.
        xs: (sequences, length, dim) float64 per group.
        batches: the masks, token ids and seeds that belong to `xs`.
    """

    def coded(twin: MoE, x_TD: Tensor, sent: Sequence[Copy]) -> Tensor:
        order = [(copy.token, copy.expert) for copy in sent]
        return coded_output(
            twin,
            x_TD,
            sent,
            Travel.of(case, order, [batch.x.shape[:2].numel() for batch in batches]),
        )

    masks = [batch.mask.flatten() for batch in batches if batch.mask is not None]
    return reference(
        twin,
        torch.cat([x.flatten(0, 1) for x in xs]),
        mask=torch.cat(masks) if case.padding else None,
        token_ids=torch.cat([batch.ids.flatten() for batch in batches]),
        noise=_noise(case, twin, batches),
        sequence_T=_sequence_of(batches),
        domains=_slices(case, batches),
        output=None if case.plan.is_lossless or not case.is_exact else coded,
    )


def _slices(case: Case, batches: Sequence[GroupBatch]) -> list[range]:
    """Return the range of tokens that each routing rank routes: a group's tokens or, under s1, its slices over tp."""
    parts = case.grid.tp if case.plan.program.routes_slices else 1
    domains, start = [], 0
    for batch in batches:
        count = batch.x.shape[:2].numel()
        domains += [
            range(start + count * i // parts, start + count * (i + 1) // parts)
            for i in range(parts)
        ]
        start += count
    return domains


def _noise(case: Case, twin: MoE, batches: Sequence[GroupBatch]) -> Tensor | None:
    """Return the random numbers that the ranks' routers draw. With tp > 1, a group's first rank draws the seed for all."""
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            torch.default_generator.manual_seed(batch.seed)
            if case.grid.tp > 1:
                torch.manual_seed(int(torch.randint(2**62, (1,))))
            drawn.append(twin.router.draw(batch.x.shape[:2].numel(), torch.device("cpu")))
    noises = [noise for noise in drawn if noise is not None]
    return torch.cat(noises) if noises else None


def _sequence_of(batches: Sequence[GroupBatch]) -> Tensor:
    lengths = [batch.x.shape[1] for batch in batches for _ in range(batch.x.shape[0])]
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def _evaluate(
    case: Case, twin: MoE, xs: Sequence[Tensor], batches: Sequence[GroupBatch]
) -> list[Tensor]:
    twin.eval()
    with torch.no_grad():
        y_TD = _pass(case, twin, xs, batches).y
    twin.train()
    return _by_group(y_TD, batches)


def _by_group(y_TD: Tensor, batches: Sequence[GroupBatch]) -> list[Tensor]:
    sizes = [batch.x.shape[:2].numel() for batch in batches]
    return [part.view(batch.x.shape) for part, batch in zip(y_TD.split(sizes), batches)]


def shard_of(whole: Tensor, grid: Grid, rank: int, dim: int | None) -> Tensor:
    """Return the part of a stacked parameter that a rank stores.

    Args:
        whole: (num_experts, ...).
        rank: the rank.
        dim: the dimension that etp splits; None if etp splits none.
    """
    per_rank = len(whole) // grid.ep
    part = whole[grid.coordinate(rank, "ep") * per_rank :][:per_rank]
    return part if dim is None else part.chunk(grid.etp, dim)[grid.coordinate(rank, "etp")]
