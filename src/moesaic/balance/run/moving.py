"""`MovingMoE`: a wrapper of an MoE layer that delivers results to the samples' new homes. The layer
itself is unchanged.

Homes, slots of samples, moves and riding residuals are those of `relocate.py`. An expert is in a
*slot* of the mesh too (`_OwnCopies.slot`), since experts may have moved. A call is *direct* if its
programs send results to the new homes; otherwise results return home first, and then travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.balance.run.calls import BalancedCalls, bare_of
from moesaic.balance.run.relocate import SampleMove
from moesaic.balance.run.residual import Residual, WithResidual, rides_along
from moesaic.comm.collectives import gather_rows, slice_rows
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, compute_dtype
from moesaic.program.sample_layouts import PlacedIndex, placed_sizes
from moesaic.routing.route import Routed, RoutedCall
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Routing
from moesaic.runtime.call_counts import CountedCall
from moesaic.runtime.expert_parallel import CallInputs, Chosen, ExpertParallel


class WrappedLayer(Protocol):
    """The attributes and methods that `MovingMoE` needs of a layer; `MoE` has them."""

    experts: AbstractExperts
    router: AbstractRouter
    shared: AbstractExperts | None
    on_mesh: ExpertParallel | None

    def __call__(self, x: Tensor, **options: Any) -> Any:
        """Run the layer without moving samples."""

    @property
    def call_with(self) -> Callable[..., tuple[Tensor, Routing]]:
        """Route, compute the result with a given function, and inject losses; see
        `MoE.call_with`."""

    def run_shared(self, x_TD: Tensor, mask: Tensor | None) -> Tensor | None:
        """Run the shared expert; see `MoE.run_shared`."""


class MovingMoE(nn.Module):
    """An MoE layer that moves samples: its input belongs to the samples before a move, its result
    to those after the move.

    Let FSDP wrap this module or one around it, not the layer inside: hooks of the layer do not run
    in a move.

    Args:
        layer: an `MoE`. It must be on a mesh before its first move.
    """

    def __init__(self, layer: WrappedLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        x: Tensor,
        *,
        move: SampleMove | None = None,
        residual: Residual | None = None,
        return_routing: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Routing]:
        """Run the layer.

        Args:
            x: (..., dim), of the samples of `move.before`.
            move: the layer's move in this forward pass, from `SampleTrip.next`; None if samples
                stay.
            residual: a residual that is moved unchanged and added to the result; None for none.
            return_routing: also return the call's `Routing`.
            **options: mask, token_ids, top_k and capacity, as for `MoE.forward`.

        Returns:
            y, of x's shape and dtype, of the samples of `move.after`; with `return_routing` the
            pair (y, routing).

        Raises:
            InputError: if the layer is on no mesh, or the number of tokens does not fit the trip.
        """
        if move is None:
            y, routing = self.layer(x, return_routing=True, **options)
            y = y if residual is None else y + residual.x
        else:
            y, routing = self.layer.call_with(partial(self._compute, move, residual), x, **options)
        return (y, routing) if return_routing else y

    def _compute(self, move: SampleMove, residual: Residual | None, call: RoutedCall) -> Tensor:
        """Return the experts' results of a routed call, plus the residual if any, for the samples
        after the move."""
        delivered_TD = _run_moved(self.layer, call, move, residual)
        shared_TD = self.layer.run_shared(call.x_TD, call.mask)
        # what is added to the experts' results, at the old homes
        extra = None if shared_TD is None else shared_TD.view(call.x.shape)
        if residual is not None and not move.rides:
            extra = residual.x if extra is None else residual.x + extra
        if delivered_TD is not None:
            y = delivered_TD.view(call.x.shape)
            return y if extra is None else y + move.carry(extra)
        # results at the old homes, which then travel with what is added
        on_mesh = _on_mesh(self.layer)
        y_TD = on_mesh.run_experts(self.layer.experts, call.x_TD, call.routed, call.padded_rows)
        y = y_TD.view(call.x.shape)
        return move.carry(y if extra is None else y + extra)


def _on_mesh(layer: WrappedLayer) -> ExpertParallel:
    """Return what runs the layer on its mesh; raise InputError if it is on none."""
    if layer.on_mesh is None:
        raise InputError(
            "sample placement: the layer is on no mesh: call parallelize(mesh, plan) first"
        )
    return layer.on_mesh


def _run_moved(
    layer: WrappedLayer, call: RoutedCall, move: SampleMove, residual: Residual | None
) -> Tensor | None:
    """Start to decide where samples go and, if the call is direct, run the experts and return their
    results at the new homes, (tokens, dim). Return None, without running the experts, if results
    must return home first: the call is not direct, or no sample moves.

    The decision starts as soon as all ranks have the counts. It is awaited when results are sent.
    """
    _require_tokens_of_trip(call, move)
    on_mesh = _on_mesh(layer)
    calls = on_mesh.calls
    # the policy rests in this pass, or what balances the layer's calls chose that samples stay
    if move.rests or (isinstance(calls, BalancedCalls) and calls.stays(move)):
        return None
    moved = _MovedCall.of(layer, on_mesh, call, move, residual)
    if moved.is_direct:  # its programs send rows: before that, ranks check that all run the same
        on_mesh.check_digests(call.routed)
    is_recomputation = move.copies is not None  # then the first pass has decided
    if not is_recomputation:
        moved.decide(has_residual=residual is not None)
    return moved.deliver() if moved.is_direct else None


def _require_tokens_of_trip(call: RoutedCall, move: SampleMove) -> None:
    """Raise InputError unless a call has the tokens of all samples for which the trip was started:
    those in the slots of each rank of the tensor-parallel group."""
    num_samples = move.before.slots * len(move.relocator.group)
    if len(call.x_TD) != num_samples * move.length:
        raise InputError(
            f"sample placement: the layer got {len(call.x_TD)} tokens, the trip was started for "
            f"{num_samples} samples of {move.length}: give start() the batch that the layers see"
        )


class _OwnCopies(NamedTuple):
    """The copies that this rank sends, sorted by slot."""

    token: Tensor
    """(copies,) int64."""
    slot: Tensor
    """(copies,) int64: the slot of each copy's expert."""
    gates: Tensor
    """(copies,) routing weights."""


@dataclass(frozen=True, kw_only=True)
class _MovedCall:
    """A routed call of a layer in a pass that moves samples."""

    on_mesh: ExpertParallel
    experts: AbstractExperts
    call: RoutedCall
    move: SampleMove
    copies: _OwnCopies
    num_tokens: int
    """Tokens that this rank routed."""
    is_direct: bool
    """Whether programs send results to the new homes, instead of home first."""
    riding: Residual | None
    """The residual that is sent with the results; None if none is."""

    @classmethod
    def of(
        cls,
        layer: WrappedLayer,
        on_mesh: ExpertParallel,
        call: RoutedCall,
        move: SampleMove,
        residual: Residual | None,
    ) -> _MovedCall:
        """Return a call with this rank's copies, and with the residual if it can ride along."""
        experts = layer.experts
        plain = bare_of(on_mesh.calls)
        programs = None  # those that send results to the new homes, if the plan allows it
        if call.padded_rows is None:
            _, common_names = experts.names
            programs = move.relocator.compiled(plain, bias=bool(common_names))

        # The shared expert's result is sent separately anyway, and the residual is added to it.
        riding = residual if layer.shared is None and programs is not None else None
        if not rides_along(riding, plain.plan, on_mesh.weight_first):
            riding = None

        # the ranks of a tensor-parallel group route a slice of its tokens each, or all of them
        num_slices = on_mesh.grid.tp if plain.routes_slices else 1
        return cls(
            on_mesh=on_mesh,
            experts=experts,
            call=call,
            move=move,
            copies=_own_copies(on_mesh, call.routed, experts.num_experts),
            num_tokens=len(call.x_TD) // num_slices,
            is_direct=programs is not None,
            riding=riding,
        )

    def decide(self, *, has_residual: bool) -> None:
        """Count the copies of this rank's samples, and start to decide where samples go."""
        move = self.move
        x_TD = self.call.x_TD
        mask = self.call.mask
        token_ids = self.call.token_ids
        # among the tokens that this rank routed, those of its own samples: all of its slice or, if
        # it routed the tokens of its whole group, its share of them
        own = slice(0, self.num_tokens)
        if self.num_tokens == len(x_TD):
            own = move.tokens(len(x_TD))

        token = self.copies.token
        is_own = (token >= own.start) & (token < own.stop)
        own_token = token[is_own] - own.start
        copies_of_token = torch.bincount(own_token, minlength=own.stop - own.start)
        is_alone = copies_of_token.view(-1, move.length) == 0  # (slots, tokens of a sample)

        move.decide(
            copies=move.count(own_token, self.copies.slot[is_own], self.experts.num_experts),
            alone=is_alone.sum(1),
            predicted=move.predict(
                x_TD,
                None if mask is None else mask.reshape(-1),
                None if token_ids is None else token_ids.reshape(-1),
            ),
            rides=self.riding is not None,
            # results that go home first travel too, as one row with the residual if it is given
            carried=1 if self.is_direct or has_residual else 2,
            is_direct=self.is_direct,
        )

    def deliver(self) -> Tensor:
        """Run the experts, and return results at the samples' new homes, (tokens, dim)."""
        move = self.move
        assert move.copies is not None
        computing = self.experts
        x = self.call.x_TD
        token = self.copies.token
        if self.riding is not None:
            copies_of_token = torch.bincount(token, minlength=self.num_tokens)
            num_copies = copies_of_token[token]
            computing = WithResidual(
                self.experts, self.riding.norm, num_copies, move.relocator.mesh
            )
            x = self.riding.x.view(x.shape)  # tokens before the norm, which the experts apply

        inputs = CallInputs(
            experts=computing,
            record=self.call.routed.record,
            token=token,
            expert=self.copies.slot,
            gates=self.copies.gates,
            node_tokens=None,
            copies=move.copies.sum(1),  # of all samples of a rank: (world, num_experts)
            tokens=np.full(self.on_mesh.grid.world, self.num_tokens),
            num_tokens=self.num_tokens,
            dtype=compute_dtype(x.dtype, x.device),
            choose=partial(self._programs, computing),
        )
        y = self.on_mesh.run_experts(
            computing, x, self.call.routed, padded_rows=None, inputs=inputs
        )
        return y if self.riding is None else _add_residuals_left_behind(y, x, token, move)

    def _programs(self, experts: AbstractExperts, counted: CountedCall) -> Chosen:
        """Return the programs that deliver results to the new homes, and the sizes of the call."""
        move = self.move
        plain = bare_of(self.on_mesh.calls)
        assert move.copies is not None
        if isinstance(self.on_mesh.calls, BalancedCalls):
            record = self.call.routed.record
            self.on_mesh.calls.note_move(record, move, counted.copies, counted.units)
        _, common_names = experts.names
        compiled = move.relocator.compiled(plain, bias=bool(common_names))
        assert compiled is not None
        shapes = move.relocator.shapes(plain, experts.num_experts, move.before.slots)
        placed_index = PlacedIndex(shapes, move.targets, move.length)
        sizes = placed_sizes(plain.grid, move.copies, placed_index, counted.units)
        return Chosen(compiled, sizes=sizes)


def _own_copies(on_mesh: ExpertParallel, routed: Routed, num_experts: int) -> _OwnCopies:
    """Return the copies that this rank sends."""
    routing = on_mesh.in_slots(routed.routing)
    token = routing.token
    slot = routing.expert
    gates = routing.weight
    if routing.has_unsent:  # copies that no expert takes have the slot num_experts
        sent = (slot < num_experts).nonzero().squeeze(1)
        token = token[sent]
        slot = slot[sent]
        gates = gates[sent]
    # a number for each copy that sorts by slot first, then by token
    by_slot_and_token = slot * max(routing.num_tokens, 1) + token
    order = by_slot_and_token.argsort(stable=True)
    return _OwnCopies(token[order], slot[order], gates[order])


def _add_residuals_left_behind(y: Tensor, x: Tensor, token: Tensor, move: SampleMove) -> Tensor:
    """Return results plus the residuals of tokens without copies.

    A sample's residual travels inside its copies' results. A token whose copies were all dropped
    has none, so its residual is sent separately here.

    Args:
        y: (tokens, dim) results of the tensor-parallel group, after the move.
        x: (tokens, dim) the residual before the move.
        token: (copies,) int64, the tokens of this rank's copies.
        move: a move that was decided.
    """
    assert move.alone is not None
    if not move.alone.any():  # known on all ranks, so all skip together
        return y
    transport = move.relocator.mesh.transport
    group = move.relocator.group
    own_tokens = move.tokens(len(x))
    num_tokens = own_tokens.stop - own_tokens.start
    copies_of_token = torch.bincount(token, minlength=num_tokens)
    alone = (copies_of_token == 0).nonzero().squeeze(1)
    # each rank of a tensor-parallel group carries its slice
    own = x if len(group) == 1 else slice_rows(transport, group, x)
    rows, tokens = move.carry_tokens(own[alone], alone)  # those that arrive here
    if len(group) == 1:
        return y.index_add(0, tokens, rows)
    added = rows.new_zeros(num_tokens, x.shape[1]).index_add(0, tokens, rows)
    return y + gather_rows(transport, group, added, len(x))
