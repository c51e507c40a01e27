"""Samples that change home between the MoE layers of a model, with the same results: a forward pass as a trip.

NetMoE (Liu et al., ICLR 2025); docs/balance.md says what is decided from what, and under which plans results go straight to new
homes. An MoE layer's results go to whichever rank makes the next layer's copies cheap to send, and what belongs to the samples
(residuals, masks, ids, labels) follows. A sample is somewhere whole, so all that looks along a sample is the same anywhere.

    moving = MovingMoE(moe)                                      once per layer
    trip = relocator.start(followings, num_samples, length)      once per forward pass
    move = trip.next()                                           in front of each MoE layer
    x = moving(norm(x), move=move, residual=Residual(x, norm))   routed here, delivered to the new homes, x added

or, where something stands between the layer and the sum,

    y = moving(norm(x), move=move)                               decides where samples go, so it comes first
    x = move.carry(x) + dropout(y)                               the residual follows on its own

A prediction of the next layer's routing decides what is cheap, and nothing else: a wrong one costs time. To decide costs 3
to 7 % of a step on an emulated cluster, as much where nobody moves, so after passes in which nobody moved a policy rests, the
same passes on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad, TwoStage, Volume
from moesaic.comm.collectives import all_gather, all_gather_rows, gather_rows, share_of, slice_rows
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.errors import InputError
from moesaic.experts.experts import is_dtensor
from moesaic.plan import Compiled, compile_plan
from moesaic.plan.compile import moving
from moesaic.program.sizes import LayoutIndex, Runs
from moesaic.routing.replay import own_choice
from moesaic.routing.router import AbstractRouter
from moesaic.runtime.expert_order import ExpertOrder


def carry(
    transport: AbstractTransport, x: Tensor, before: Homes, after: Homes, rows: np.ndarray | None = None
) -> Tensor:
    """Return this rank's samples after a move; differentiable. All ranks call it; samples that stay cross no link.

    Args:
        transport: between all ranks.
        x: (rows of this rank, ...) what it has of the samples that are its own before, slot after slot.
        before: where the samples are.
        after: where they go.
        rows: (ranks, slots) int64 rows of each sample, by where it is before, the same on all ranks; None for one each.

    Returns:
        (rows, ...), in the order of the slots after; a sample's values are the same bits.
    """
    rows = np.ones(before.samples.shape, dtype=np.int64) if rows is None else rows
    assert len(x) == rows[transport.rank].sum(), f"{len(x)} rows for {before.slots} slots"
    if before.same_as(after):
        return x
    if not x.is_floating_point():
        return _exchange(transport, transport.take_tags(1), x, before, after, rows)
    out: Tensor = _Carry.apply(transport, before, after, rows, x)
    return out


class _Carry(torch.autograd.Function):
    """The exchange, whose transpose goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, transport: AbstractTransport, before: Homes, after: Homes, rows: np.ndarray, x: Tensor
    ) -> Tensor:
        # The backward pass has its own tag from the start: ranks may differ in what comes before it.
        tag = transport.take_tags(2)
        ctx.transport, ctx.before, ctx.after, ctx.tag, ctx.was_run = transport, before, after, tag + 1, False
        ctx.rows = rows_after(rows, before, after)
        return _exchange(transport, tag, x, before, after, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None, Tensor]:
        tag = ctx.transport.take_tags(1) if ctx.was_run else ctx.tag
        ctx.was_run = True
        return None, None, None, None, _exchange(ctx.transport, tag, gradient, ctx.after, ctx.before, ctx.rows)


def rows_after(rows: np.ndarray, before: Homes, after: Homes) -> np.ndarray:
    """Return rows per sample, (ranks, slots) int64, by where samples are after a move; `rows` has them by where they were."""
    found: np.ndarray = rows[after.targets(before)]
    return found


def _exchange(
    transport: AbstractTransport, tag: int, x: Tensor, before: Homes, after: Homes, rows: np.ndarray
) -> Tensor:
    """Send each sample to where it goes; a message holds samples in the order of the slots that they leave."""
    rank = transport.rank
    targets, _ = before.targets(after)
    sources, source_slots = after.targets(before)
    held, wanted = rows[rank], rows_after(rows, before, after)[rank]
    x = x.detach().contiguous()
    out = x.new_empty(int(wanted.sum()), *x.shape[1:])
    sends: dict[int, Tensor] = {}
    arriving: dict[int, tuple[Tensor, Tensor]] = {}
    for peer in range(transport.world):
        coming = np.flatnonzero(sources[rank] == peer)
        leaving = _places(held, np.flatnonzero(targets[rank] == peer)).to(x.device)
        places = _places(wanted, coming[np.argsort(source_slots[rank][coming])]).to(x.device)
        if peer == rank:
            out[places] = x[leaving]
            continue
        if len(leaving):
            sends[peer] = x[leaving]
        if len(places):
            arriving[peer] = places, x.new_empty(len(places), *x.shape[1:])
    receives = {peer: buffer for peer, (_, buffer) in arriving.items()}
    if x.shape[1:].numel() and (sends or receives):
        transport.wait(transport.issue(Transfer(rank, tag, sends, receives)))
    for places, buffer in arriving.values():
        out[places] = buffer
    return out


def _places(rows: np.ndarray, slots: np.ndarray) -> Tensor:
    """Return where the rows of some slots are, (rows,) int64, in the order of the slots; `rows` says how many each has."""
    return torch.from_numpy(Runs((rows.cumsum() - rows)[slots], rows[slots]).rows)


def sample_dropout(x: Tensor, p: float, samples: Tensor, seed: int) -> Tensor:
    """Zero entries with probability p and scale the others by 1 / (1 - p), the same ones wherever a sample is computed: a mask
    that is drawn from the number of the sample is a property of the batch, and not of a rank's random generator.

    Args:
        x: (samples, ...).
        p: from 0 to below 1.
        samples: (samples,) int64: the number of each sample in the whole batch, as `SampleTrip.samples` has it.
        seed: at least 0; of the place in the model, the micro-batch and the step: one that no other call has.

    Returns:
        of x's shape.
    """
    if not p:
        return x
    keep = torch.empty(x.shape, device=x.device)
    for row, sample in zip(keep, samples.tolist()):
        state = np.random.SeedSequence((seed, sample)).generate_state(1, np.uint64)
        generator = torch.Generator(x.device).manual_seed(int(state[0]))
        row.bernoulli_(1 - p, generator=generator)
    return x * keep.to(x.dtype) / (1 - p)


PATIENCE = 2
"""Passes in a row in which nobody moves, before a policy may rest."""


@dataclass(frozen=True)
class Following:
    """How an MoE layer will route: what a prediction of its load needs."""

    router: AbstractRouter
    top_k: int
    order: ExpertOrder | None = None
    """Where its experts are; None where they never move."""


class Relocator:
    """Decides, for a model's forward passes, where samples live after each MoE layer. All ranks make it alike.

    Args:
        mesh: of the MoE layers.
        placer: the policy; None for the two stages of NetMoE.
        ends_home: the last MoE layer takes the samples home. False: it goes by its own cost, and labels have to follow.
    """

    def __init__(self, mesh: Mesh, placer: AbstractPlacer | None = None, *, ends_home: bool = True) -> None:
        self.mesh, self.placer, self.ends_home = mesh, placer or TwoStage(), ends_home
        self.group = mesh.grid.group(mesh.rank, ("tp",))
        """The tensor group of this rank, which works on its samples together."""
        self.trip: SampleTrip | None = None
        """The forward pass that was begun last; None before the first."""
        self._compiled: dict[tuple[bytes, bool], Compiled | None] = {}
        self._shapes: dict[tuple[bytes, int, int], LayoutIndex] = {}
        self._solver = ThreadPoolExecutor(1, "placement")
        self._rest = Rest()

    def start(self, followings: Sequence[Following], num_samples: int, length: int) -> SampleTrip:
        """Begin a forward pass; all ranks call it.

        Args:
            followings: the MoE layers in the order in which the pass reaches them.
            num_samples: that this rank's tensor group has.
            length: tokens of each.

        Raises:
            InputError: on every rank: if ranks have different numbers of samples or tokens, or a tensor group does not split
                its samples evenly, or a router looks across tokens or draws random numbers by rank.
        """
        before = [] if self.trip is None else self.trip.moves
        rests = self._rest.begins(self.placer.rest, [move.moves_anybody for move in before])
        for following in followings:
            _check_router(following.router, self.mesh.transport.device)
        mine = torch.tensor([num_samples, length], device=self.mesh.transport.device)
        told = torch.stack(all_gather(self.mesh.transport, tuple(range(self.mesh.grid.world)), mine)).cpu()
        different = (told != told[0]).any(1).nonzero().flatten().tolist()
        if different:
            (a, b), (c, d) = told[0].tolist(), told[different[0]].tolist()
            raise InputError(
                f"sample placement needs samples that split evenly: rank 0 has {a} of {b} tokens, rank {different[0]} has {c} "
                f"of {d}: give every rank equally many of one length"
            )
        tp = self.mesh.grid.tp
        if num_samples % tp:
            raise InputError(
                f"sample placement with mesh.tp={tp} needs a multiple of {tp} samples per tensor group, got {num_samples}: "
                "each of its ranks answers for as many of them"
            )
        self.trip = SampleTrip(self, followings, num_samples // tp, length, rests=rests)
        return self.trip

    def compiled(self, plain: Compiled, *, bias: bool) -> Compiled | None:
        """Return the programs that deliver to new homes, made once per plan; None for a plan whose results go home first.

        Args:
            plain: those of the layer.
            bias: for experts whose shards hold parameters in common.
        """
        key = (plain.digest, bias)
        if key not in self._compiled:
            has_bias = "b" in plain.logical.inputs
            base = plain if has_bias == bias else compile_plan(plain.plan, plain.grid, bias=bias)
            try:  # each rank of a tensor group sends its own copies; where all of them send all, results go home first
                self._compiled[key] = moving(base) if plain.grid.tp == 1 or plain.routes_slices else None
            except InputError:  # which says what about the plan does not let results go straight to new homes
                self._compiled[key] = None
        return self._compiled[key]

    def shapes(self, plain: Compiled, num_experts: int, slots: int) -> LayoutIndex:
        """Return what all calls of a plan, with so many experts and samples, have in common."""
        key = (plain.digest, num_experts, slots)
        if key not in self._shapes:
            self._shapes[key] = LayoutIndex(plain.grid, num_experts, slots, parts=plain.plan.chunks)
        return self._shapes[key]

    def decide(self, load: SampleLoad) -> Future[Homes]:
        """Start to decide, beside the caller."""
        return self._solver.submit(self.placer.decide, load)

    def carry(self, x: Tensor, before: Homes, after: Homes) -> Tensor:
        """Return what belongs to the samples that a tensor group has after a move: (samples, ...), differentiable.

        Args:
            x: the same of those that it has before, of one shape on all ranks and alike in a tensor group.
            before: where the samples are.
            after: where they go.
        """
        if before.same_as(after):
            return x
        transport, tp = self.mesh.transport, len(self.group)
        if tp == 1:
            return carry(transport, x, before, after)
        if x.is_floating_point():
            mine = carry(transport, slice_rows(transport, self.group, x), before, after)
            return gather_rows(transport, self.group, mine, len(x))
        mine = carry(transport, x[share_of(len(x), self.group.index(self.mesh.rank), tp)], before, after)
        return all_gather_rows(transport, self.group, mine, len(x))


class Rest:
    """Counts the passes of one relocator."""

    def __init__(self) -> None:
        self._still = self._left = 0

    def begins(self, rest: int, moved: Sequence[bool | None]) -> bool:
        """Return whether the pass that begins goes by unasked.

        Args:
            rest: passes that may go by unasked after some in which nobody moved; 0 for none.
            moved: of each layer in the pass before, which is over: whether a policy that was asked moved anybody; None where
                none was asked.
        """
        asked = [found for found in moved if found is not None]
        if asked:
            self._still = 0 if any(asked) else self._still + 1
            self._left = rest if self._still >= PATIENCE else 0
        elif self._left:
            self._left -= 1
        return self._left > 0


class SampleTrip:
    """One forward pass: where the samples are as it goes on. Made by `Relocator.start`."""

    def __init__(
        self, relocator: Relocator, followings: Sequence[Following], slots: int, length: int, *, rests: bool = False
    ) -> None:
        self.relocator, self.length, self._rests = relocator, length, rests
        self.home = Homes.start(relocator.mesh.grid.world, slots)
        self.moves: list[SampleMove] = []
        """One per MoE layer that was reached."""
        self._followings = followings

    @property
    def homes(self) -> Homes:
        """Where the samples are now."""
        return self.moves[-1].after if self.moves else self.home

    @property
    def samples(self) -> Tensor:
        """(samples,) int64: this group's samples now, by their number in the whole batch: what random masks may depend on."""
        return samples_of(self.relocator, self.homes)

    def next(self) -> SampleMove:
        """Return the move of the next MoE layer."""
        number = len(self.moves) + 1
        assert number <= len(self._followings), "more MoE layers than the trip was started for"
        is_last = number == len(self._followings)
        following = None if is_last else self._followings[number]
        goal = self.home if self._rests or (is_last and self.relocator.ends_home) else None
        self.moves.append(SampleMove(self.relocator, self.homes, following, self.length, goal, rests=self._rests))
        return self.moves[-1]

    def bring(self, x: Tensor) -> Tensor:
        """Return what belongs to the samples that are here now, from where it is at home: (samples, ...), differentiable."""
        return self.relocator.carry(x, self.home, self.homes)

    def take_home(self, x: Tensor) -> Tensor:
        """Return what belongs to this rank's own samples, from where they are now: (samples, ...), differentiable."""
        return self.relocator.carry(x, self.homes, self.home)


def samples_of(relocator: Relocator, homes: Homes) -> Tensor:
    """Return which samples this rank's tensor group has, (samples,) int64, by their number in the whole batch."""
    return torch.from_numpy(homes.samples[list(relocator.group)].reshape(-1).copy())


class SampleMove:
    """What one MoE layer does to the homes. It decides once: a recomputation finds what the first pass decided.

    Args:
        relocator: whose policy decides.
        before: where the samples are when the layer is called.
        following: the next MoE layer; None after the last.
        length: tokens of a sample.
        goal: where samples go, whatever it costs; None to decide.
        rests: nobody is asked in this pass and nobody moves: the layer runs like any other.
    """

    def __init__(
        self,
        relocator: Relocator,
        before: Homes,
        following: Following | None,
        length: int,
        goal: Homes | None,
        *,
        rests: bool = False,
    ) -> None:
        self.relocator, self.before, self.length, self.goal, self.rests = relocator, before, length, goal, rests
        self.load: SampleLoad | None = None
        """What was decided from; None before the layer's call; empty where nobody is asked."""
        self.copies: np.ndarray | None = None
        """(ranks, slots, num_experts) int64: the layer's copies of each sample, by where the samples are; None before."""
        self.alone: np.ndarray | None = None
        """(ranks, slots) int64: tokens of each sample that have no copy, by where the samples are; None before."""
        self.rides = False
        """Whether the residual travelled with the results; known after the layer's call."""
        self.stays: bool | None = None
        """Whether the layer runs like any other and samples stay, for those that choose; None before it is decided."""
        self._following = following
        self._future: Future[Homes] | None = None
        if rests:
            nothing = np.zeros((before.samples.size, relocator.mesh.grid.ep), dtype=np.int64)
            self.load = SampleLoad(relocator.mesh.grid, before, nothing, None)

    @property
    def after(self) -> Homes:
        """Where the samples are after the layer; waits for the decision."""
        if self.goal is not None:
            return self.goal
        if self._future is None:
            raise InputError(
                "sample placement: where samples go is decided in the MoE layer's call: call the layer with this move first"
            )
        return self._future.result()

    @property
    def moves_anybody(self) -> bool | None:
        """Whether a policy that was asked moved samples; None where none was."""
        return None if self._future is None else not self.before.same_as(self.after)

    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where the sample in each slot goes, (ranks, slots) int64 each: its rank and its slot there."""
        return self.before.targets(self.after)

    def carry(self, x: Tensor) -> Tensor:
        """Take what belongs to samples along: (samples, ...) or (samples * length, ...) of this rank's tensor group, of one
        shape on all ranks."""
        samples = self.before.slots * len(self.relocator.group)
        split = x.unflatten(0, (samples, -1)) if len(x) != samples else x
        return self.relocator.carry(split, self.before, self.after).view(x.shape)

    def carry_tokens(self, rows: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Take along rows of the tokens that have no copy; all ranks call it where any has one.

        Args:
            rows: (tokens without copy, dim), differentiable.
            token: (tokens without copy,) int64, ascending: their places among the tokens for which this rank answers.

        Returns:
            the rows that come, and their places among the tokens for which this rank answers then.
        """
        transport = self.relocator.mesh.transport
        assert self.alone is not None
        way = (self.before, self.after, self.alone)
        place = carry(transport, token % self.length, *way)
        come = torch.from_numpy(rows_after(self.alone, self.before, self.after)[transport.rank]).to(token.device)
        first = torch.arange(self.before.slots, device=token.device) * self.length
        return carry(transport, rows, *way), place + first.repeat_interleave(come)

    def volumes(self) -> tuple[Volume, Volume]:
        """Return the rows that cross links from this layer's experts to the next layer's (as predicted) if nobody moved, and
        as it was decided; residuals that travel count as rows."""
        assert self.load is not None, "the MoE layer was not called with this move yet"
        return self.load.volume(self.before), self.load.volume(self.after)

    def decide(
        self, copies: Tensor, alone: Tensor, predicted: Tensor | None, *, rides: bool, carried: int, is_direct: bool
    ) -> None:
        """Tell all ranks this rank's counts and start to decide from everyone's; all ranks call it.

        Args:
            copies: (slots, num_experts) int64 of this layer, of the samples for which this rank answers.
            alone: (slots,) int64: tokens of each that have no copy.
            predicted: as `copies`, of the next layer; None where it is not asked for.
            rides: the residual travels with the results, but that of tokens without copies.
            carried: rows per token that travel on their own where it does not.
            is_direct: see `SampleLoad`.
        """
        mesh, self.rides = self.relocator.mesh, rides
        mine = torch.cat([alone[:, None], copies, *([] if predicted is None else [predicted])], dim=1)
        told = all_gather(mesh.transport, tuple(range(mesh.grid.world)), mine.to(torch.int32))
        table = torch.stack(told).cpu().numpy().astype(np.int64)
        self.alone = table[:, :, 0]
        self.copies, following = np.split(table[:, :, 1:], [copies.shape[1]], axis=2)
        place = self.before.place
        by_sample = [part.reshape(len(place), part.shape[2])[place] for part in (self.copies, following)]
        self.load = SampleLoad(
            mesh.grid,
            self.before,
            by_sample[0],
            None if predicted is None else by_sample[1],
            carried=self.alone.reshape(-1)[place] if rides else carried * self.length,
            is_direct=is_direct,
        )
        if self.goal is None:
            self._future = self.relocator.decide(self.load)

    def predict(self, x_TD: Tensor, valid_T: Tensor | None, token_ids: Tensor | None) -> Tensor | None:
        """Return the copies that each sample will have for each expert of the next layer, if it routed this layer's input.

        Args:
            x_TD: (tokens, dim), this layer's input, all tokens of the tensor group.
            valid_T: (tokens,) bool, or None.
            token_ids: (tokens,) int64, or None.

        Returns:
            (slots, num_experts) int64, of the samples for which this rank answers; None where nobody asks.
        """
        if self._following is None or self.goal is not None:
            return None
        mine = self.tokens(len(x_TD))
        x_TD = x_TD[mine]
        valid_T, token_ids = (None if each is None else each[mine] for each in (valid_T, token_ids))
        router, top_k = self._following.router, self._following.top_k
        with torch.no_grad(), torch.autocast(x_TD.device.type, enabled=False), _whole_parameters(router):
            scores = router.scores(x_TD.to(torch.promote_types(x_TD.dtype, torch.float32)), None, token_ids)
            choice = own_choice(router)(scores, top_k, valid_T, None)
        alive = slice(None) if valid_T is None else valid_T[choice.token]
        order = self._following.order
        expert = choice.expert if order is None else order.slots(choice.expert)
        return self.count(choice.token[alive], expert[alive], router.num_experts)

    def tokens(self, num_tokens: int) -> slice:
        """Return which of the tensor group's tokens this rank answers for."""
        group = self.relocator.group
        return share_of(num_tokens, group.index(self.relocator.mesh.rank), len(group))

    def count(self, token: Tensor, expert: Tensor, num_experts: int) -> Tensor:
        """Return how many of these copies each sample has for each expert, (slots, num_experts) int64."""
        cell = token // self.length * num_experts + expert
        return torch.bincount(cell, minlength=self.before.slots * num_experts).view(-1, num_experts)


@contextmanager
def _whole_parameters(router: nn.Module) -> Iterator[None]:
    """Let a router that is split over data-parallel ranks score where it stands: its parameters are gathered meanwhile."""
    held = [(part, name, value) for part in router.modules() for name, value in part._parameters.items()]
    try:
        for part, name, value in held:
            if is_dtensor(value):
                part._parameters[name] = value.full_tensor()
        yield
    finally:
        for part, name, value in held:
            part._parameters[name] = value


def _check_router(router: AbstractRouter, device: torch.device) -> None:
    """Raise InputError for a router whose choices depend on where samples are."""
    if router.looks_across_tokens:
        raise InputError(
            f"sample placement clashes with the router {type(router).__name__}, whose choice for a token depends on its rank "
            "or on the others there: choose one that looks at each token alone, such as softmax"
        )
    if router.draw(0, device) is not None:
        raise InputError(
            f"sample placement clashes with the router {type(router).__name__}, which draws random numbers rank by rank: "
            "choose one without noise, such as softmax"
        )
