"""`MovingMoE`: a wrapper of an MoE layer whose results go to its samples' new homes; the layer knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, Weights, compute_dtype
from moesaic.program.placed import PlacedIndex, placed_sizes
from moesaic.routing.route import Routed, RoutedCall
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routing import Routing
from moesaic.runtime.balance.calls import bare_of, selector_of
from moesaic.runtime.balance.samples.relocate import SampleMove
from moesaic.runtime.balance.samples.residual import Residual, WithResidual, rides_along
from moesaic.runtime.executor import LayerRun, run_program
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.runtime.tasks import Call


class WrappedLayer(Protocol):
    """What is asked of a layer; `MoE` is one."""

    experts: AbstractExperts
    router: AbstractRouter
    shared: AbstractExperts | None
    on_mesh: ExpertParallel | None

    def __call__(self, x: Tensor, **options: Any) -> Any:
        """Run the layer with samples that stay."""

    @property
    def call_with(self) -> Callable[..., tuple[Tensor, Routing]]:
        """Runs the layer with another middle; see `MoE.call_with`."""

    def run_shared(self, x_TD: Tensor, mask: Tensor | None) -> Tensor | None:
        """Run the shared expert; see `MoE.run_shared`."""


class MovingMoE(nn.Module):
    """An MoE layer around which samples change home: x is of the samples before a move, the result of those after it.

    Make the wrapper a unit of FSDP, or what it is in, and not the layer: hooks of the layer itself do not run in a move.

    Args:
        layer: an `MoE`, on a mesh by its first move.
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
            move: of the layer in this forward pass, from `SampleTrip.next`; None where samples stay.
            residual: what to add to the result, moved as it is; None for nothing.
            return_routing: also return the call's `Routing`.
            **options: mask, token_ids, top_k and capacity, as for `MoE.forward`.

        Returns:
            y, of x's shape and dtype and of the samples of `move.after`; with `return_routing` the pair (y, routing).

        Raises:
            InputError: for a layer, plan or capacity under which samples cannot move; for tokens of other samples.
        """
        if move is None:
            y, routing = self.layer(x, return_routing=True, **options)
            y = y if residual is None else y + residual.x
        else:
            y, routing = self.layer.call_with(partial(self._compute, move, residual), x, **options)
        return (y, routing) if return_routing else y

    def _compute(self, move: SampleMove, residual: Residual | None, call: RoutedCall) -> Tensor:
        """Return what the experts make of a routed call, and the residual where there is one, of the samples after the move."""
        if call.routed.record.capacity is not None:
            raise InputError(
                "sample placement clashes with a capacity, which drops copies by where their samples are: choose dropless"
            )
        riding = residual if self.layer.shared is None else None  # what the shared expert adds must travel anyway
        y = _run_moved(self.layer, call, move, riding).view(call.x.shape)
        shared_TD = self.layer.run_shared(call.x_TD, call.mask)
        added = None if shared_TD is None else shared_TD.view(call.x.shape)
        if residual is not None and not move.rides:
            added = residual.x if added is None else residual.x + added
        return y if added is None else y + move.carry(added)


def _run_moved(layer: WrappedLayer, call: RoutedCall, move: SampleMove, residual: Residual | None) -> Tensor:
    """Dispatch, run and combine: the tokens of the samples that are here to those of the samples that come.

    The decision starts as soon as all ranks know the counts, and is waited for where results start to travel.

    Args:
        layer: on a mesh.
        call: of it, without drops.
        move: of the layer in this forward pass.
        residual: what is to be added to the result; `move.rides` says afterwards whether it was.

    Returns:
        (tokens, dim).
    """
    on_mesh, experts, routed, x_TD = layer.on_mesh, layer.experts, call.routed, call.x_TD
    if on_mesh is None:
        raise InputError("sample placement: the layer is on no mesh: call parallelize(mesh, plan) first")
    if len(x_TD) != move.before.slots * move.length:
        raise InputError(
            f"sample placement: the layer got {len(x_TD)} tokens, the trip was started for {move.before.slots} samples of "
            f"{move.length}: give start() the batch that the layers see"
        )
    selector = selector_of(on_mesh.calls)
    if move.rests or (selector is not None and selector.stays(move)):
        return on_mesh.run_experts(experts, x_TD, routed, None)
    routing = on_mesh.order.in_slots(routed.routing)
    order = (routing.expert * max(len(x_TD), 1) + routing.token).argsort(stable=True)
    token, expert, gates = routing.token[order], routing.expert[order], routing.weight[order]
    move.rides = rides_along(residual, layer.router, bare_of(on_mesh.calls).plan, call.mask, on_mesh._weight_first)
    on_mesh._check_digests(routed)
    if move.copies is None:
        of_tokens = (None if each is None else each.reshape(-1) for each in (call.mask, call.token_ids))
        move.decide(move.count(token, expert, experts.num_experts), move.predict(x_TD, *of_tokens))
    if residual is None or not move.rides:
        return _run(on_mesh, experts, experts, x_TD, gates, token, move, routed)
    riding = WithResidual(experts, residual.norm)
    return _run(on_mesh, experts, riding, residual.x.view(x_TD.shape), gates, token, move, routed)


def _run(
    on_mesh: ExpertParallel,
    held: AbstractExperts,
    computing: AbstractExperts,
    x_TD: Tensor,
    gates: Tensor,
    token: Tensor,
    move: SampleMove,
    routed: Routed,
) -> Tensor:
    """Run the programs with the weights of one object and the arithmetic of another: the same, or one around it."""
    plain, relocator, dtype, transport = (
        bare_of(on_mesh.calls),
        move.relocator,
        compute_dtype(x_TD.dtype, x_TD.device),
        on_mesh.transport,
    )
    shapes = relocator.shapes(plain, held.num_experts, move.before.slots)
    copies, selector = move.copies, selector_of(on_mesh.calls)
    assert copies is not None

    def run(x: Tensor, gate: Tensor | None, sharded: Weights, common: Weights) -> Tensor:
        assert gate is not None
        if isinstance(computing, WithResidual):
            common = computing.joined(common, held.num_experts // plain.grid.ep, plain.grid.etp)
        if selector is not None:
            selector.note_move(routed.record, move, copies.sum(1), held.num_units(sharded))
        compiled = relocator.compiled(plain, bias=bool(common))
        of_call = PlacedIndex(shapes, move.targets, move.length)
        sizes = placed_sizes(plain.grid, copies, of_call, held.num_units(sharded))
        call = Call(on_mesh.rank, sizes, computing, 0, on_mesh._weight_first, False, codecs=on_mesh.codecs)
        forward, backward = len(compiled.forward.tasks), len(compiled.backward.tasks)
        call.first_tag = transport.take_tags(forward + backward)
        work = LayerRun(compiled, transport, call, call.first_tag + forward, {"index": token.unsqueeze(1)})
        cast = (tuple(weight.to(dtype) for weight in weights) for weights in (sharded, common))
        return run_program(work, x.to(dtype), gate, *cast)

    y: Tensor = held(x_TD, gates.unsqueeze(1), run=run)
    return y.to(x_TD.dtype)
