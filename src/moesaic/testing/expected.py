"""Computes the expected results of a case: the dense float64 layer on the tokens of all groups
together, without a mesh.

    total = sum over micro-batches of share * loss
    loss = mean over groups of sum(y * dy) + auxiliary loss over all tokens

`reference.py` does the computation, for the whole batch.

With a codec, a row is encoded if its origin rank is not the rank of the shard that it is sent to.
The backward pass treats the codec as the identity (straight-through); the gradients that are sent
are encoded if the plan has a backward codec. This is exact for the schedules s1 and s2, and for
codecs that treat each row by itself.

A group is the ranks that share their tokens (a data-parallel group); tokens are numbered across all
groups. A cotangent dy is the gradient of the loss with respect to the output y. A copy is a token
at one of its experts, a shard the part of an expert that one rank of etp stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
            copies: (token, expert) in the order in which the router chose them; tokens are numbered
                across all groups.
            tokens: number of tokens of each group.
        """
        grid = case.grid
        origin = {}
        first = 0  # the group's first token
        for group, count in enumerate(tokens):
            for expert in range(case.num_experts):
                chosen = [
                    token
                    for token, its_expert in copies
                    if its_expert == expert and first <= token < first + count
                ]
                for place, token in enumerate(chosen):
                    # `tp` is the sender's place in its tensor-parallel group
                    if case.plan.program.routes_slices:  # a rank sends its slice of the tokens
                        tp = _part_with(token - first, count, grid.tp)
                    else:  # a rank sends its slice of each expert's copies
                        tp = _part_with(place, len(chosen), grid.tp)
                    origin[(token, expert)] = group * grid.tp + tp
            first += count
        return cls(case, origin)

    def target(self, origin: int, expert: int, shard: int) -> int:
        """Return the rank that stores a shard of `expert`, in the origin rank's replica of the
        experts."""
        grid = self.case.grid
        home = expert // (self.case.num_experts // grid.ep)
        for rank in grid.group(origin, ("ep", "etp")):
            if grid.coordinate(rank, "ep") == home and grid.coordinate(rank, "etp") == shard:
                return rank
        raise AssertionError(f"no rank stores shard {shard} of expert {expert}")


def _part_with(position: int, length: int, parts: int) -> int:
    """Return the part that holds a position, if `length` positions are cut into parts as equal as
    possible."""
    part = 0
    while position >= length * (part + 1) // parts:  # the end of the part
        part += 1
    return part


def coded_output(twin: MoE, x_TD: Tensor, sent: Sequence[Copy], travel: Travel) -> Tensor:
    """Return each token's sum of its copies' results, (tokens, dim), with the codec applied to all
    rows that cross ranks."""
    plan = travel.case.plan
    shards = travel.case.grid.etp
    tokens = []
    results = []
    for token, expert, _, weight in sent:
        origin = travel.origin[(token, expert)]
        for shard in range(shards):
            crosses = travel.target(origin, expert, shard) != origin
            row = x_TD[token]
            if crosses:
                row = _Coded.apply(row, plan.codec, plan.backward_codec)
            result = _shard_output(twin, expert, shard, shards, row=row, weight=weight)
            if crosses:
                result = _Coded.apply(result, plan.codec, plan.backward_codec)
            tokens.append(token)
            results.append(result)
    if not results:  # zeros with a graph
        return 0 * x_TD
    return torch.zeros_like(x_TD).index_add(0, torch.tensor(tokens), torch.stack(results))


def _shard_output(
    twin: MoE, expert: int, shard: int, shards: int, row: Tensor, weight: Tensor
) -> Tensor:
    """Return one shard's summand of an expert's weighted result, (dim,).

    Args:
        shard: which of the expert's `shards` parts.
        row: the token, (dim,).
        weight: the copy's routing weight, ().
    """
    experts = twin.experts
    assert isinstance(experts, (GatedExperts, PlainExperts)), (
        "the codec is followed through built-in experts only"
    )
    if twin.apply_weight == "before":
        row = weight * row

    def part_of(name: str) -> Tensor:
        """Return the shard's part of one of the expert's parameters, split by its first axis."""
        whole: Tensor = getattr(experts, name)[expert]
        return whole.chunk(shards)[shard]

    def project(number: int) -> Tensor:
        """Return the shard's projection of the row by w1 or w3, with its bias if it has one."""
        out = part_of(f"w{number}") @ row
        return out + part_of(f"b{number}") if experts.bias else out

    if isinstance(experts, GatedExperts):
        hidden = F.silu(project(1)) * project(3)
    else:
        hidden = F.gelu(project(1))
    # w2, (dim, hidden), is split by its inner width, the second axis
    out: Tensor = experts.w2[expert].chunk(shards, 1)[shard] @ hidden
    if experts.bias:  # each shard adds its share of the bias
        out = out + experts.get_parameter("b2")[expert] / shards
    return out if twin.apply_weight == "before" else weight * out


class _Coded(torch.autograd.Function):
    """Encodes and decodes a row. The backward pass encodes and decodes the gradient with the
    backward codec."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, codec: str, backward_codec: str) -> Tensor:
        ctx.codec = backward_codec
        return _round_trip(row, codec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _round_trip(gradient, ctx.codec), None, None


def _round_trip(row: Tensor, name: str) -> Tensor:
    """Return a row, (dim,), after it was encoded and decoded."""
    codec = codec_named(name)
    rows = row.detach().unsqueeze(0)
    received = codec.decode(codec.encode(rows), num_rows=1, dim=rows.shape[1], dtype=rows.dtype)
    return received.squeeze(0).clone()


class Key(NamedTuple):
    """Which value of a rank: a quantity, such as "expert gradient", and which of its values."""

    quantity: str
    name: str


class Values(dict[Key, Tensor | None]):
    """The values of one rank, or of several that have the same; None stands for zeros."""

    def add(self, quantity: str, name: str, value: Tensor | None) -> None:
        """Add one value of a quantity."""
        self[Key(quantity, name)] = value


def quantity_of(parameter: str) -> str:
    """Return the quantity to which the gradient of a layer's parameter belongs, such as "router
    gradient" for `router.weight`."""
    module, _, _ = parameter.partition(".")
    return "expert gradient" if module == "experts" else f"{module} gradient"


def expect(case: Case, work: CaseData) -> list[Values]:
    """Compute the values that each rank must have after a case, in float64.

    The gradient of the input is that of a rank's own backward pass: dp times the gradient of the
    total.
    """
    step = _Step.of(case, work)
    for micro in range(len(work.batches)):
        step.run_forward(micro)
    gradients = step.run_backward()
    step.finish()
    step.add_gradients(gradients)
    return [step.values_of(rank, gradients) for rank in range(case.grid.world)]


@dataclass(frozen=True)
class _Gradients:
    """Gradients of the total."""

    tokens: list[list[Tensor]]
    """By micro-batch, then by group."""
    parameters: dict[str, Tensor | None]
    """By name; None for zeros."""

    @property
    def norm(self) -> Tensor:
        """The norm of the gradients of all parameters, ()."""
        zero = torch.zeros((), dtype=torch.float64)
        present = [each for each in self.parameters.values() if each is not None]
        return sum((each.square().sum() for each in present), start=zero).sqrt()


@dataclass
class _Step:
    """One step of training on the tokens of all groups, and the values that it must have."""

    case: Case
    work: CaseData
    twin: MoE
    """The layer in float64."""
    tokens: list[list[Tensor]]
    """By micro-batch, then by group: (sequences, length, dim) float64 leaves."""
    total: Tensor
    """The loss of the micro-batches that ran forward, ()."""
    common: Values
    """Values that all ranks have."""
    values_of_groups: list[Values]
    """Values that all ranks of a data-parallel group have, by group."""

    @classmethod
    def of(cls, case: Case, work: CaseData) -> _Step:
        """Return the step before its first micro-batch."""
        tokens = []
        for batches in work.batches:
            leaves = [batch.x.detach().double().clone().requires_grad_() for batch in batches]
            tokens.append(leaves)
        return cls(
            case=case,
            work=work,
            twin=in_float64(work.layer),
            tokens=tokens,
            total=torch.zeros((), dtype=torch.float64),
            common=Values(),
            values_of_groups=[Values() for _ in range(case.grid.dp)],
        )

    def run_forward(self, micro: int) -> None:
        """Run a micro-batch forward: add its loss to the total, and its values."""
        case = self.case
        xs = self.tokens[micro]
        batches = self.work.batches[micro]
        result = _pass(case, self.twin, xs, batches)
        cotangents = torch.cat([batch.dy.double().flatten(0, 1) for batch in batches])
        loss = (result.y * cotangents).sum() / case.grid.dp + result.loss
        self.total = self.total + self.work.shares[micro] * loss
        requested = torch.tensor(result.requested)
        self.twin.step_counts += requested
        self.common.add("counts", f"requested {micro}", requested)
        self.common.add("counts", f"sent {micro}", _sent_counts(result, case.num_experts))
        for name, auxiliary in result.losses.items():
            self.common.add("auxiliary loss", f"{name} {micro}", auxiliary.detach())
        self._add_by_group("output", str(micro), _by_group(result.y.detach(), batches))
        if case.evaluate and micro == 0:
            self._add_by_group("evaluation", "", _evaluate(case, self.twin, xs, batches))

    def run_backward(self) -> _Gradients:
        """Return the gradients of the total."""
        leaves: list[Tensor] = []
        for tokens_of_groups in self.tokens:
            leaves += tokens_of_groups
        parameters = dict(self.twin.named_parameters())
        # a group whose tokens reach no output has a gradient of 0
        total = self.total + 0 * sum(x.sum() for x in leaves)
        gradients = torch.autograd.grad(total, [*leaves, *parameters.values()], allow_unused=True)
        leaf_gradients = list(gradients[: len(leaves)])
        parameter_gradients = gradients[len(leaves) :]

        num_groups = self.case.grid.dp
        token_gradients = []
        for first in range(0, len(leaves), num_groups):
            token_gradients.append(leaf_gradients[first : first + num_groups])
        return _Gradients(token_gradients, dict(zip(parameters, parameter_gradients, strict=True)))

    def finish(self) -> None:
        """Finish the step, and add the router's counts before and its state after."""
        self.common.add("counts", "step", self.twin.step_counts.clone())
        self.twin.finish_step()
        for name, buffer in self.twin.router.named_buffers():
            self.common.add("router state", name, buffer)

    def add_gradients(self, gradients: _Gradients) -> None:
        """Add the gradients of the tokens and the norm of those of the parameters."""
        for micro, gradients_of_groups in enumerate(gradients.tokens):
            scaled = [self.case.grid.dp * gradient for gradient in gradients_of_groups]
            self._add_by_group("input gradient", str(micro), scaled)
        self.common.add("gradient norm", "", gradients.norm)

    def values_of(self, rank: int, gradients: _Gradients) -> Values:
        """Return all values of a rank: the common ones, its group's, and its parameters'
        gradients."""
        values = Values(self.common)
        values.update(self.values_of_groups[self.case.grid.coordinate(rank, "dp")])
        for name, gradient in gradients.parameters.items():
            own = _own_part(self.case, self.work, name, gradient, rank)
            values.add(quantity_of(name), name, own)
        return values

    def _add_by_group(self, quantity: str, name: str, values: Sequence[Tensor]) -> None:
        """Add one value of each group."""
        for group_values, value in zip(self.values_of_groups, values, strict=True):
            group_values.add(quantity, name, value)


def _sent_counts(result: Reference, num_experts: int) -> Tensor:
    """Return the number of copies that each expert receives, (num_experts,) int64."""
    experts = torch.tensor([expert for _, expert in result.rows], dtype=torch.int64)
    return torch.bincount(experts, minlength=num_experts)


def _own_part(
    case: Case, work: CaseData, name: str, gradient: Tensor | None, rank: int
) -> Tensor | None:
    """Return the part of a parameter's gradient that a rank has: of stacked experts its shard, of
    all others the whole."""
    if gradient is None or quantity_of(name) != "expert gradient" or case.experts == "modules":
        return gradient
    parameter = name.rpartition(".")[2]
    return shard_of(gradient, case.grid, rank, work.layer.experts.shard_dim(parameter))


def _pass(case: Case, twin: MoE, xs: Sequence[Tensor], batches: Sequence[GroupBatch]) -> Reference:
    """Run the layer on all groups' tokens; see `reference`.

    Args:
        twin: the layer in float64, in training or evaluation.
        xs: (sequences, length, dim) float64 per group.
        batches: the masks, token ids and seeds that belong to `xs`.
    """

    num_tokens = [batch.x.shape[:2].numel() for batch in batches]

    def coded(twin: MoE, x_TD: Tensor, sent: Sequence[Copy]) -> Tensor:
        """Return the output with rows encoded on their way."""
        order = [(copy.token, copy.expert) for copy in sent]
        return coded_output(twin, x_TD, sent, Travel.of(case, order, num_tokens))

    rounds_rows = case.is_exact and not case.plan.is_lossless
    masks = [batch.mask.flatten() for batch in batches if batch.mask is not None]
    return reference(
        twin,
        torch.cat([x.flatten(0, 1) for x in xs]),
        mask=torch.cat(masks) if case.padding else None,
        token_ids=torch.cat([batch.ids.flatten() for batch in batches]),
        noise=_noise(case, twin, batches),
        sequence_T=_sequence_of(batches),
        domains=_slices(case, batches),
        output=coded if rounds_rows else None,
    )


def _slices(case: Case, batches: Sequence[GroupBatch]) -> list[range]:
    """Return the range of tokens that each routing rank routes: a group's tokens or, under s1, its
    slices over tp."""
    parts = case.grid.tp if case.plan.program.routes_slices else 1
    domains = []
    start = 0  # the group's first token
    for batch in batches:
        count = batch.x.shape[:2].numel()
        for part in range(parts):
            first = start + count * part // parts
            end = start + count * (part + 1) // parts
            domains.append(range(first, end))
        start += count
    return domains


def _noise(case: Case, twin: MoE, batches: Sequence[GroupBatch]) -> Tensor | None:
    """Return the random numbers that the ranks' routers draw. With tp > 1, a group's first rank
    draws the seed for all."""
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            torch.default_generator.manual_seed(batch.seed)
            if case.grid.tp > 1:  # drawn as the layer draws it
                torch.manual_seed(int(torch.randint(2**62, (1,))))
            drawn.append(twin.router.draw(batch.x.shape[:2].numel(), torch.device("cpu")))
    noises = [noise for noise in drawn if noise is not None]
    return torch.cat(noises) if noises else None


def _sequence_of(batches: Sequence[GroupBatch]) -> Tensor:
    """Return the number of each token's sequence, (tokens,), counted over all groups."""
    lengths: list[int] = []  # of each sequence
    for batch in batches:
        num_sequences, length, _ = batch.x.shape
        lengths += [length] * num_sequences
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def _evaluate(
    case: Case, twin: MoE, xs: Sequence[Tensor], batches: Sequence[GroupBatch]
) -> list[Tensor]:
    """Return each group's output in evaluation, (sequences, length, dim)."""
    twin.eval()
    with torch.no_grad():
        y_TD = _pass(case, twin, xs, batches).y
    twin.train()
    return _by_group(y_TD, batches)


def _by_group(y_TD: Tensor, batches: Sequence[GroupBatch]) -> list[Tensor]:
    """Cut the rows of all tokens, (tokens, dim), into groups, (sequences, length, dim) each."""
    sizes = [batch.x.shape[:2].numel() for batch in batches]
    return [part.view(batch.x.shape) for part, batch in zip(y_TD.split(sizes), batches)]


def shard_of(whole: Tensor, grid: Grid, rank: int, dim: int | None) -> Tensor:
    """Return the part of a stacked parameter that a rank stores.

    Args:
        whole: (num_experts, ...).
        dim: the dimension that etp splits; None if etp splits none.
    """
    per_rank = len(whole) // grid.ep
    first = grid.coordinate(rank, "ep") * per_rank
    experts = whole[first : first + per_rank]
    if dim is None:
        return experts
    return experts.chunk(grid.etp, dim)[grid.coordinate(rank, "etp")]
