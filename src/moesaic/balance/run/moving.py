"""`MovingMoE`: a wrapper of an MoE layer that delivers results to the samples' new homes. The layer itself is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.balance.run.calls import BalancedCalls, bare_of
from moesaic.balance.run.relocate import SampleMove
from moesaic.balance.run.residual import Residual, WithResidual, rides_along
from moesaic.comm.collectives import gather_rows, slice_rows
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, compute_dtype
from moesaic.program.placed import PlacedIndex, placed_sizes
from moesaic.routing.route import Routed, RoutedCall
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Routing
from moesaic.runtime.counted import CountedCall
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
        """Route, compute the result with a given function, and inject losses; see `MoE.call_with`."""

    def run_shared(self, x_TD: Tensor, mask: Tensor | None) -> Tensor | None:
        """Run the shared expert; see `MoE.run_shared`."""


class MovingMoE(nn.Module):
    """An MoE layer that moves samples: its input belongs to the samples before a move, its result to those after the move.

    Let FSDP wrap this module or one around it, not the layer inside: hooks of the layer do not run in a move.

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
            move: the layer's move in this forward pass, from `SampleTrip.next`; None if samples stay.
            residual: a residual that is moved unchanged and added to the result; None for none.
            return_routing: also return the call's `Routing`.
            **options: mask, token_ids, top_k and capacity, as for `MoE.forward`.

        Returns:
            y, of x's shape and dtype, of the samples of `move.after`; with `return_routing` the pair (y, routing).

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
        """Return the experts' results of a routed call, plus the residual if any, for the samples after the move."""
        y = _run_moved(self.layer, call, move, residual)
        shared_TD = self.layer.run_shared(call.x_TD, call.mask)
        extra = None if shared_TD is None else shared_TD.view(call.x.shape)
        if residual is not None and not move.rides:
            extra = residual.x if extra is None else residual.x + extra
        if y is not None:
            y = y.view(call.x.shape)
            return y if extra is None else y + move.carry(extra)
        on_mesh = _on_mesh(self.layer)
        y = on_mesh.run_experts(self.layer.experts, call.x_TD, call.routed, call.padded_rows).view(
            call.x.shape
        )
        return move.carry(y if extra is None else y + extra)


def _on_mesh(layer: WrappedLayer) -> ExpertParallel:
    if layer.on_mesh is None:
        raise InputError(
            "sample placement: the layer is on no mesh: call parallelize(mesh, plan) first"
        )
    return layer.on_mesh


def _run_moved(
    layer: WrappedLayer, call: RoutedCall, move: SampleMove, residual: Residual | None
) -> Tensor | None:
    """Decide where samples go, and deliver results there, (tokens, dim); None if results must return home first.

    The decision starts as soon as all ranks have the counts. It is awaited when results are sent.
    """
    on_mesh, experts, routed, x_TD = _on_mesh(layer), layer.experts, call.routed, call.x_TD
    samples = move.before.slots * len(move.relocator.group)
    if len(x_TD) != samples * move.length:
        raise InputError(
            f"sample placement: the layer got {len(x_TD)} tokens, the trip was started for {samples} samples of "
            f"{move.length}: give start() the batch that the layers see"
        )
    if move.rests or (isinstance(on_mesh.calls, BalancedCalls) and on_mesh.calls.stays(move)):
        return None
    plain = bare_of(on_mesh.calls)
    programs = None
    if call.padded_rows is None:
        programs = move.relocator.compiled(plain, bias=bool(experts.names[1]))
    token, expert, gates = _copies(on_mesh, routed, experts.num_experts)
    num_tokens = len(x_TD) // (on_mesh.grid.tp if plain.routes_slices else 1)
    # The shared expert's result is sent separately anyway, and the residual is added to it.
    riding = residual if layer.shared is None and programs is not None else None
    rides = rides_along(riding, plain.plan, on_mesh.weight_first)
    if programs is not None:
        on_mesh.check_digests(routed)
    if move.copies is None:
        own_tokens = move.tokens(len(x_TD)) if num_tokens == len(x_TD) else slice(0, num_tokens)
        inside = (token >= own_tokens.start) & (token < own_tokens.stop)
        own_copies = (token[inside] - own_tokens.start, expert[inside])
        copies_of_token = torch.bincount(
            own_copies[0], minlength=own_tokens.stop - own_tokens.start
        ).view(-1, move.length)
        mask_and_ids = (
            None if each is None else each.reshape(-1) for each in (call.mask, call.token_ids)
        )
        move.decide(
            move.count(*own_copies, experts.num_experts),
            (copies_of_token == 0).sum(1),
            move.predict(x_TD, *mask_and_ids),
            rides=rides,
            carried=1 if programs is not None or residual is not None else 2,
            is_direct=programs is not None,
        )
    if programs is None:
        return None
    assert move.copies is not None
    computing, x = experts, x_TD
    if riding is not None and rides:
        num_copies = torch.bincount(token, minlength=num_tokens)[token]
        computing = WithResidual(experts, riding.norm, num_copies, move.relocator.mesh)
        x = riding.x.view(x_TD.shape)
    inputs = CallInputs(
        experts=computing, record=routed.record, token=token, expert=expert, gates=gates, node_tokens=None,
        copies=move.copies.sum(1), tokens=np.full(on_mesh.grid.world, num_tokens), num_tokens=num_tokens,
        dtype=compute_dtype(x.dtype, x.device), choose=lambda counted: _programs(on_mesh, computing, move, routed, counted),
    )  # fmt: skip
    y = on_mesh.run_experts(computing, x, routed, None, inputs)
    return _add_alone(y, x, token, move) if computing is not experts else y


def _copies(
    on_mesh: ExpertParallel, routed: Routed, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, slots and weights of the copies that this rank sends, sorted by slot."""
    routing = on_mesh.in_slots(routed.routing)
    token, expert, gates = routing.token, routing.expert, routing.weight
    if routing.has_unsent:
        sent = (expert < num_experts).nonzero().squeeze(1)
        token, expert, gates = token[sent], expert[sent], gates[sent]
    order = (expert * max(routing.num_tokens, 1) + token).argsort(stable=True)
    return token[order], expert[order], gates[order]


def _add_alone(y: Tensor, x: Tensor, token: Tensor, move: SampleMove) -> Tensor:
    """Return results plus the residuals of tokens without copies, whose residuals could not ride along.

    Args:
        y: (tokens, dim) results of the tensor-parallel group, after the move.
        x: (tokens, dim) the residual before the move.
        token: (copies,) int64, the tokens of this rank's copies.
        move: a move that was decided.
    """
    assert move.alone is not None
    if not move.alone.any():
        return y
    transport, group, own_tokens = (
        move.relocator.mesh.transport,
        move.relocator.group,
        move.tokens(len(x)),
    )
    num_tokens = own_tokens.stop - own_tokens.start
    alone = (torch.bincount(token, minlength=num_tokens) == 0).nonzero().squeeze(1)
    own = x if len(group) == 1 else slice_rows(transport, group, x)
    rows, places = move.carry_tokens(own[alone], alone)
    if len(group) == 1:
        return y.index_add(0, places, rows)
    added = rows.new_zeros(num_tokens, x.shape[1]).index_add(0, places, rows)
    return y + gather_rows(transport, group, added, len(x))


def _programs(
    on_mesh: ExpertParallel,
    experts: AbstractExperts,
    move: SampleMove,
    routed: Routed,
    call: CountedCall,
) -> Chosen:
    """Return the programs that deliver results to the new homes, and the sizes of the call."""
    plain, copies = bare_of(on_mesh.calls), move.copies
    assert copies is not None
    if isinstance(on_mesh.calls, BalancedCalls):
        on_mesh.calls.note_move(routed.record, move, call.copies, call.units)
    compiled = move.relocator.compiled(plain, bias=bool(experts.names[1]))
    assert compiled is not None
    shapes = move.relocator.shapes(plain, experts.num_experts, move.before.slots)
    placed_index = PlacedIndex(shapes, move.targets, move.length)
    return Chosen(compiled, sizes=placed_sizes(plain.grid, copies, placed_index, call.units))
