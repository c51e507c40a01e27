"""Moves samples between ranks between a model's MoE layers, with the same results. A forward pass
is a trip.

This is NetMoE (Liu et al., ICLR 2025). docs/balance.md explains how decisions are made, and under
which plans results go straight to new homes. An MoE layer sends its results to the ranks from which
the next layer's copies are cheap to send. Everything else that belongs to the samples (residuals,
masks, ids, labels) follows. A sample is always whole on one rank, so computations along a sample
have the same result on any rank.

    moving = MovingMoE(moe)                                      once per layer
    trip = relocator.start(followings, num_samples, length)      once per forward pass
    move = trip.next()                                           before each MoE layer
    x = moving(norm(x), move=move, residual=Residual(x, norm))   routed here, delivered to new homes

or, if there is another operation between the layer and the sum,

    y = moving(norm(x), move=move)                               decides where samples go
    x = move.carry(x) + dropout(y)                               the residual follows separately

A prediction of the next layer's routing only decides what is cheap; a wrong one costs time.
Deciding costs 3 to 7 % of a step on an emulated cluster, even if no sample moves. So after passes
without moves a policy rests, in the same passes on all ranks.

The *home* of a sample is its rank, where it takes one of as many *slots* as every rank has. A
*goal* is a move's homes if they are fixed and not decided. Tokens *alone* have no copies, since all
were dropped. A residual *rides* if it travels with the experts' results.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad, TwoStage, Volume
from moesaic.comm.collectives import (
    all_gather,
    all_gather_rows,
    gather_rows,
    share_of,
    slice_rows,
    with_gradient,
)
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.errors import InputError
from moesaic.initial_values import is_dtensor
from moesaic.program.compile import Compiled, compile_plan, moving
from moesaic.program.layouts import LayoutIndex
from moesaic.program.sizes import Runs
from moesaic.routing.replay import own_choice
from moesaic.routing.router import AbstractRouter
from moesaic.runtime.expert_order import ExpertOrder
from moesaic.runtime.expert_parallel import parameters_as


def carry(
    transport: AbstractTransport,
    x: Tensor,
    before: Homes,
    after: Homes,
    rows: np.ndarray | None = None,
) -> Tensor:
    """Return this rank's samples after a move; differentiable. All ranks call this; samples that
    stay are not sent.

    Args:
        transport: the transport between all ranks.
        x: (rows of this rank, ...): the rows of the samples on this rank before the move, slot by
            slot.
        before: homes of the samples before the move.
        after: homes of the samples after the move.
        rows: (ranks, slots) int64: number of rows of each sample, by slot before the move, the same
            on all ranks; None for one row per sample.

    Returns:
        (rows, ...), in the order of the slots after the move; values are moved bit by bit.
    """
    rows = np.ones(before.samples.shape, dtype=np.int64) if rows is None else rows
    assert len(x) == rows[transport.rank].sum(), f"{len(x)} rows for {before.slots} slots"
    if before.same_as(after):
        return x
    if not x.is_floating_point():
        return _exchange(transport, transport.take_tags(1), x, before, after, rows)
    # The backward pass has a tag of its own from the start, since ranks may run different
    # operations before it.
    tag = transport.take_tags(2)
    tags_back = [tag + 1]  # empty after the first backward pass; a second one takes a new tag
    arrived = rows_after(rows, before, after)

    def back(gradient: Tensor) -> Tensor:
        """Exchange in the other direction."""
        tag_back = tags_back.pop() if tags_back else transport.take_tags(1)
        return _exchange(transport, tag_back, gradient, after, before, arrived)

    return with_gradient(x, lambda own: _exchange(transport, tag, own, before, after, rows), back)


def rows_after(rows: np.ndarray, before: Homes, after: Homes) -> np.ndarray:
    """Return rows per sample, (ranks, slots) int64, by slot after a move, from `rows` by slot
    before it."""
    moved: np.ndarray = rows[after.targets(before)]
    return moved


def _exchange(
    transport: AbstractTransport, tag: int, x: Tensor, before: Homes, after: Homes, rows: np.ndarray
) -> Tensor:
    """Send each sample to its new home. A message holds samples in the order of the slots that they
    leave."""
    rank = transport.rank
    # (ranks, slots): by slot before, where its sample goes; by slot after, where its sample was
    targets, _ = before.targets(after)
    sources, source_slots = after.targets(before)
    own_rows_before = rows[rank]
    own_rows_after = rows_after(rows, before, after)[rank]
    x = x.detach().contiguous()
    out = x.new_empty(int(own_rows_after.sum()), *x.shape[1:])

    sends: dict[int, Tensor] = {}
    receives: dict[int, Tensor] = {}
    arriving_rows: dict[int, Tensor] = {}
    for peer in range(transport.world):
        leaving_slots = np.flatnonzero(targets[rank] == peer)
        leaving = _rows_of(own_rows_before, leaving_slots).to(x.device)
        arriving_slots = np.flatnonzero(sources[rank] == peer)
        in_order_of_leaving = np.argsort(source_slots[rank][arriving_slots])
        arriving = _rows_of(own_rows_after, arriving_slots[in_order_of_leaving]).to(x.device)
        if peer == rank:
            out[arriving] = x[leaving]
            continue
        if len(leaving):
            sends[peer] = x[leaving]
        if len(arriving):
            arriving_rows[peer] = arriving
            receives[peer] = x.new_empty(len(arriving), *x.shape[1:])

    has_values = x.shape[1:].numel() > 0  # rows without values are not sent
    if has_values and (sends or receives):
        transport.wait(transport.issue(Transfer(rank, tag, sends, receives)))
    for peer, arriving in arriving_rows.items():
        out[arriving] = receives[peer]
    return out


def _rows_of(rows: np.ndarray, slots: np.ndarray) -> Tensor:
    """Return the indices of the rows of some slots, (rows,) int64, in the order of `slots`; `rows`
    has the number of rows of each slot."""
    starts = rows.cumsum() - rows
    return torch.from_numpy(Runs(starts[slots], rows[slots]).rows)


def sample_dropout(x: Tensor, p: float, samples: Tensor, seed: int) -> Tensor:
    """Zero entries with probability p and scale the others by 1 / (1 - p), identically on whichever
    rank a sample is computed.

    The mask is drawn from the number of the sample, so it depends on the batch and not on a rank's
    random generator.

    Args:
        x: (samples, ...).
        p: probability, from 0 to below 1.
        samples: (samples,) int64: the number of each sample in the whole batch, as in
            `SampleTrip.samples`.
        seed: at least 0, and different for every call: derive it from the place in the model,
            micro-batch and step.

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
"""Number of passes in a row without moves, before a policy may rest."""


@dataclass(frozen=True)
class Following:
    """The settings with which an MoE layer will route, for a prediction of its load."""

    router: AbstractRouter
    top_k: int
    order: ExpertOrder | None = None
    """The order of its experts; None if they never move."""


class Relocator:
    """Decides where samples live after each MoE layer, for a model's forward passes. All ranks
    create it identically.

    Args:
        mesh: the mesh of the MoE layers.
        placer: the policy; None for NetMoE's two stages.
        ends_home: whether the last MoE layer returns the samples to their first homes. False: it
            decides by its own cost, and labels have to follow.
    """

    def __init__(
        self, mesh: Mesh, placer: AbstractPlacer | None = None, *, ends_home: bool = True
    ) -> None:
        self.mesh = mesh
        self.placer = placer or TwoStage()
        self.ends_home = ends_home
        self.group = mesh.grid.group(mesh.rank, ("tp",))
        """The tensor-parallel group of this rank, which shares its samples."""
        self.trip: SampleTrip | None = None
        """The forward pass that was started last; None before the first."""
        self._compiled: dict[tuple[bytes, bool], Compiled | None] = {}
        """The results of `compiled`, by the plain programs' digest and whether there are biases."""
        self._shapes: dict[tuple[bytes, int, int], LayoutIndex] = {}
        """The results of `shapes`, by the digest, the number of experts and of slots."""
        self._solver = ThreadPoolExecutor(1, "placement")
        """The thread that decides."""
        self._rest = Rest()

    def start(self, followings: Sequence[Following], num_samples: int, length: int) -> SampleTrip:
        """Start a forward pass. All ranks call this together.

        Args:
            followings: the MoE layers in the order in which the pass reaches them.
            num_samples: number of samples of this rank's tensor-parallel group.
            length: tokens per sample.

        Raises:
            InputError: on every rank: if ranks have different numbers of samples or tokens, if a
                tensor-parallel group does not split its samples evenly, or if a router looks across
                tokens or draws random numbers by rank.
        """
        moves_before = [] if self.trip is None else self.trip.moves
        rests = self._rest.begins(self.placer.rest, [move.moves_anybody for move in moves_before])
        for following in followings:
            _check_router(following.router, self.mesh.transport.device)
        self._check_sizes(num_samples, length)
        tp = self.mesh.grid.tp
        if num_samples % tp:
            raise InputError(
                f"sample placement with mesh.tp={tp} needs a multiple of {tp} samples per tensor "
                f"group, got {num_samples}: each of its ranks is responsible for equally many"
            )
        self.trip = SampleTrip(
            self, followings, slots=num_samples // tp, length=length, rests=rests
        )
        return self.trip

    def _check_sizes(self, num_samples: int, length: int) -> None:
        """Raise InputError, on every rank, if ranks have different numbers of samples or tokens per
        sample."""
        transport = self.mesh.transport
        own_sizes = torch.tensor([num_samples, length], device=transport.device)
        everyone = tuple(range(self.mesh.grid.world))
        sizes = torch.stack(all_gather(transport, everyone, own_sizes)).cpu()
        is_different = (sizes != sizes[0]).any(1)
        different_ranks = is_different.nonzero().flatten().tolist()
        if not different_ranks:
            return
        other = different_ranks[0]
        samples, tokens = sizes[0].tolist()
        other_samples, other_tokens = sizes[other].tolist()
        raise InputError(
            f"sample placement needs samples that split evenly: rank 0 has {samples} of "
            f"{tokens} tokens, rank {other} has {other_samples} of {other_tokens}: "
            "give every rank equally many samples of one length"
        )

    def compiled(self, plain: Compiled, *, bias: bool) -> Compiled | None:
        """Return the programs that deliver to new homes, cached per plan; None if results under the
        plan go home first.

        Args:
            plain: the programs of the layer.
            bias: whether the shards of an expert have parameters in common.
        """
        key = (plain.digest, bias)
        if key in self._compiled:
            return self._compiled[key]
        self._compiled[key] = None
        # else each rank of a tensor-parallel group sends all copies of the group, and results go
        # home first
        if plain.grid.tp == 1 or plain.routes_slices:
            has_bias = "b" in plain.logical.inputs  # the input of what shards have in common
            base = plain if has_bias == bias else compile_plan(plain.plan, plain.grid, bias=bias)
            # InputError: the plan does not let results go straight to new homes
            with suppress(InputError):
                self._compiled[key] = moving(base)
        return self._compiled[key]

    def shapes(self, plain: Compiled, num_experts: int, slots: int) -> LayoutIndex:
        """Return the tables that all calls under a plan share, for a number of experts and of slots
        per rank."""
        key = (plain.digest, num_experts, slots)
        if key not in self._shapes:
            self._shapes[key] = LayoutIndex(plain.grid, num_experts, slots, parts=plain.plan.chunks)
        return self._shapes[key]

    def decide(self, load: SampleLoad) -> Future[Homes]:
        """Start to decide, on another thread."""
        return self._solver.submit(self.placer.decide, load)

    def carry(self, x: Tensor, before: Homes, after: Homes) -> Tensor:
        """Return values of the samples that a tensor-parallel group has after a move: (samples,
        ...), differentiable.

        Args:
            x: the values of the samples that it has before the move. Shapes are the same on all
                ranks, values within a group.
            before: homes of the samples before the move.
            after: homes of the samples after the move.
        """
        if before.same_as(after):
            return x
        transport = self.mesh.transport
        tp = len(self.group)
        if tp == 1:
            return carry(transport, x, before, after)
        if x.is_floating_point():
            own = carry(transport, slice_rows(transport, self.group, x), before, after)
            return gather_rows(transport, self.group, own, len(x))
        # whole numbers or bools, which have no gradient
        own_share = share_of(len(x), self.group.index(self.mesh.rank), tp)
        own = carry(transport, x[own_share], before, after)
        return all_gather_rows(transport, self.group, own, len(x))


class Rest:
    """Decides in which passes of one relocator the policy rests."""

    def __init__(self) -> None:
        self._still = 0
        """Number of passes in a row in which the policy was asked and moved nothing."""
        self._left = 0
        """Number of passes that are left to rest."""

    def begins(self, rest: int, moved: Sequence[bool | None]) -> bool:
        """Return whether the policy rests in the pass that starts now.

        Args:
            rest: number of passes to rest for, after passes without moves; 0 to never rest.
            moved: for each layer in the previous pass, which has ended: whether the policy moved
                samples; None if the policy was not asked.
        """
        answers = [answer for answer in moved if answer is not None]
        if answers:  # else the previous pass rested, or had no move to decide
            self._still = 0 if any(answers) else self._still + 1
            self._left = rest if self._still >= PATIENCE else 0
        elif self._left:
            self._left -= 1
        return self._left > 0


class SampleTrip:
    """One forward pass, with the present homes of the samples. Created by `Relocator.start`."""

    def __init__(
        self,
        relocator: Relocator,
        followings: Sequence[Following],
        slots: int,
        length: int,
        *,
        rests: bool = False,
    ) -> None:
        self.relocator = relocator
        self.length = length
        """Tokens of a sample."""
        self._rests = rests
        """Whether the policy is not asked in this pass, so that no sample moves."""
        self.home = Homes.start(relocator.mesh.grid.world, slots)
        """The first homes of the samples."""
        self.moves: list[SampleMove] = []
        """The moves of the MoE layers that the pass has reached."""
        self._followings = followings
        """All MoE layers of the pass, in their order."""

    @property
    def homes(self) -> Homes:
        """The present homes of the samples."""
        return self.moves[-1].after if self.moves else self.home

    @property
    def samples(self) -> Tensor:
        """(samples,) int64: this group's present samples, by number in the whole batch. Random
        masks may depend on them."""
        return samples_of(self.relocator, self.homes)

    def next(self) -> SampleMove:
        """Return the move of the next MoE layer."""
        number = len(self.moves) + 1
        assert number <= len(self._followings), "more MoE layers than the trip was started for"
        is_last = number == len(self._followings)
        # in a pass that rests no sample has left home, so "home" is where it stays
        goes_home = self._rests or (is_last and self.relocator.ends_home)
        move = SampleMove(
            self.relocator,
            before=self.homes,
            following=None if is_last else self._followings[number],  # the layer after it
            length=self.length,
            goal=self.home if goes_home else None,
            rests=self._rests,
        )
        self.moves.append(move)
        return move

    def bring(self, x: Tensor) -> Tensor:
        """Return values of the samples that are here now, given those of the home samples:
        (samples, ...), differentiable."""
        return self.relocator.carry(x, self.home, self.homes)

    def take_home(self, x: Tensor) -> Tensor:
        """Return values of this rank's home samples, given those of the samples here now: (samples,
        ...), differentiable."""
        return self.relocator.carry(x, self.homes, self.home)


def samples_of(relocator: Relocator, homes: Homes) -> Tensor:
    """Return the samples of this rank's tensor-parallel group, (samples,) int64, by their number in
    the whole batch."""
    samples = homes.samples[list(relocator.group)]
    return torch.from_numpy(samples.reshape(-1).copy())


class SampleMove:
    """One MoE layer's change of the homes. It is decided once; a recomputation reuses the decision
    of the first pass.

    Args:
        relocator: the relocator whose policy decides.
        before: homes of the samples when the layer is called.
        following: the next MoE layer; None after the last.
        length: tokens of a sample.
        goal: homes after the layer, if they are fixed; None to decide.
        rests: the policy is not asked in this pass, and no sample moves: the layer runs as without
            moves.
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
        self.relocator = relocator
        self.before = before
        self.length = length
        self.goal = goal
        self.rests = rests
        self.load: SampleLoad | None = None
        """The load from which homes are decided; None before the layer's call; without copies if
        the policy rests."""
        self.copies: np.ndarray | None = None
        """(ranks, slots, num_experts) int64: the layer's copies of each sample, by its slot before;
        None before the call."""
        self.alone: np.ndarray | None = None
        """(ranks, slots) int64: tokens of each sample without copies, by slot before the move; None
        before the call."""
        self.rides = False
        """Whether the residual was sent with the results; valid after the layer's call."""
        self.stays: bool | None = None
        """Whether an arbiter decided that samples stay in this call; None before that decision."""
        self._following = following
        self._future: Future[Homes] | None = None
        """The decision, on its way; None if there is none (yet)."""
        if rests:
            grid = relocator.mesh.grid
            # for as few experts as the mesh can have
            no_copies = np.zeros((before.samples.size, grid.ep), dtype=np.int64)
            self.load = SampleLoad(grid, homes=before, copies=no_copies, following=None)

    @property
    def after(self) -> Homes:
        """The homes after the layer; waits for the decision."""
        if self.goal is not None:
            return self.goal
        if self._future is None:
            raise InputError(
                "sample placement: where samples go is decided in the MoE layer's call: call "
                "the layer with this move first"
            )
        return self._future.result()

    @property
    def moves_anybody(self) -> bool | None:
        """Whether the policy moved samples; None if it was not asked."""
        return None if self._future is None else not self.before.same_as(self.after)

    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where the sample in each slot goes: its new rank and its slot there, (ranks,
        slots) int64 each."""
        return self.before.targets(self.after)

    def carry(self, x: Tensor) -> Tensor:
        """Move values of samples along: (samples, ...) or (samples * length, ...) of this rank's
        tensor-parallel group, of the same shape on all ranks."""
        samples = self.before.slots * len(self.relocator.group)
        split = x.unflatten(0, (samples, -1)) if len(x) != samples else x
        return self.relocator.carry(split, self.before, self.after).view(x.shape)

    def carry_tokens(self, rows: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Move rows of the tokens that have no copy. All ranks call this if any rank has such
        tokens.

        Args:
            rows: (tokens without copy, dim), differentiable.
            token: (tokens without copy,) int64, ascending: their indices among the tokens of this
                rank.

        Returns:
            the rows that arrive, and their indices among the tokens of this rank after the move.
        """
        transport = self.relocator.mesh.transport
        assert self.alone is not None
        place_in_sample = token % self.length
        arriving_places = carry(transport, place_in_sample, self.before, self.after, self.alone)
        rows_of_slots = rows_after(self.alone, self.before, self.after)[transport.rank]
        arriving_by_slot = torch.from_numpy(rows_of_slots).to(token.device)
        first_of_slot = torch.arange(self.before.slots, device=token.device) * self.length
        arriving_tokens = arriving_places + first_of_slot.repeat_interleave(arriving_by_slot)
        return carry(transport, rows, self.before, self.after, self.alone), arriving_tokens

    def volumes(self) -> tuple[Volume, Volume]:
        """Return the rows that cross links from this layer's experts to the next layer's (as
        predicted): first if no sample moved, then as decided. Residuals that are sent count as
        rows."""
        assert self.load is not None, "the MoE layer was not called with this move yet"
        return self.load.volume(self.before), self.load.volume(self.after)

    def decide(
        self,
        copies: Tensor,
        alone: Tensor,
        predicted: Tensor | None,
        *,
        rides: bool,
        carried: int,
        is_direct: bool,
    ) -> None:
        """Exchange this rank's counts with all ranks, and start to decide from all counts. All
        ranks call this.

        Args:
            copies: (slots, num_experts) int64: this layer's copies of this rank's samples.
            alone: (slots,) int64: tokens of each sample without copies.
            predicted: like `copies`, for the next layer; None if no prediction is needed.
            rides: whether the residual is sent with the results, except for tokens without copies.
            carried: rows per token that are sent separately, if the residual is not.
            is_direct: as in `SampleLoad`.
        """
        mesh = self.relocator.mesh
        self.rides = rides
        columns = [alone[:, None], copies]
        if predicted is not None:
            columns.append(predicted)
        own_counts = torch.cat(columns, dim=1).to(torch.int32)
        counts = all_gather(mesh.transport, tuple(range(mesh.grid.world)), own_counts)
        table = torch.stack(counts).cpu().numpy().astype(np.int64)  # (ranks, slots, columns)
        self.alone = table[:, :, 0]
        num_experts = copies.shape[1]
        self.copies = table[:, :, 1 : 1 + num_experts]
        following = table[:, :, 1 + num_experts :]

        place = self.before.place

        def by_sample(by_slot: np.ndarray) -> np.ndarray:
            """Return a table by sample, (samples, columns), from one by slot."""
            return by_slot.reshape(len(place), by_slot.shape[2])[place]

        self.load = SampleLoad(
            mesh.grid,
            homes=self.before,
            copies=by_sample(self.copies),
            following=None if predicted is None else by_sample(following),
            # rows of each sample that travel separately
            carried=self.alone.reshape(-1)[place] if rides else carried * self.length,
            is_direct=is_direct,
        )
        if self.goal is None:
            self._future = self.relocator.decide(self.load)

    def predict(
        self, x_TD: Tensor, valid_T: Tensor | None, token_ids: Tensor | None
    ) -> Tensor | None:
        """Predict the copies of each sample for each expert of the next layer, by routing this
        layer's input with its router.

        Args:
            x_TD: (tokens, dim), this layer's input, all tokens of the tensor-parallel group.
            valid_T: (tokens,) bool, or None.
            token_ids: (tokens,) int64, or None.

        Returns:
            (slots, num_experts) int64, for this rank's samples; None if no prediction is needed.
        """
        # after the last layer, or where homes are fixed
        if self._following is None or self.goal is not None:
            return None
        own_tokens = self.tokens(len(x_TD))
        x_TD = x_TD[own_tokens]
        if valid_T is not None:
            valid_T = valid_T[own_tokens]
        if token_ids is not None:
            token_ids = token_ids[own_tokens]

        router = self._following.router
        score_dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with (
            torch.no_grad(),
            torch.autocast(x_TD.device.type, enabled=False),
            parameters_as(router, _whole),
        ):
            # None: `_check_router` refuses routers that draw noise
            scores = router.scores(x_TD.to(score_dtype), None, token_ids)
            choice = own_choice(router)(scores, self._following.top_k, valid_T, None)

        token = choice.token
        expert = choice.expert
        if self._following.order is not None:  # experts may have moved: count by their slots
            expert = self._following.order.slots(expert)
        if valid_T is not None:
            is_valid = valid_T[token]
            token = token[is_valid]
            expert = expert[is_valid]
        return self.count(token, expert, router.num_experts)

    def tokens(self, num_tokens: int) -> slice:
        """Return which of the tensor-parallel group's tokens this rank is responsible for."""
        group = self.relocator.group
        return share_of(num_tokens, group.index(self.relocator.mesh.rank), len(group))

    def count(self, token: Tensor, expert: Tensor, num_experts: int) -> Tensor:
        """Return the number of copies that each sample has for each expert, (slots, num_experts)
        int64."""
        slot = token // self.length
        cell = slot * num_experts + expert
        counts = torch.bincount(cell, minlength=self.before.slots * num_experts)
        return counts.view(-1, num_experts)


def _whole(parameter: nn.Parameter) -> Tensor:
    """Return a parameter, gathered if it is sharded over data-parallel ranks."""
    return parameter.full_tensor() if is_dtensor(parameter) else parameter


def _check_router(router: AbstractRouter, device: torch.device) -> None:
    """Raise InputError for a router whose choices depend on where samples are."""
    if router.looks_across_tokens:
        raise InputError(
            f"sample placement clashes with the router {type(router).__name__}, whose choice for "
            "a token depends on its rank or on the others there: choose one that looks at each "
            "token alone, such as softmax"
        )
    if router.draw(0, device) is not None:
        raise InputError(
            f"sample placement clashes with the router {type(router).__name__}, which draws "
            "random numbers rank by rank: choose one without noise, such as softmax"
        )
