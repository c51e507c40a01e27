"""One call of an MoE layer whose results go to its samples' new homes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, Weights, compute_dtype
from moesaic.program.placed import PlacedIndex, placed_sizes
from moesaic.routing.route import Routed
from moesaic.routing.router import AbstractRouter
from moesaic.runtime.balance.calls import selector_of
from moesaic.runtime.balance.samples.relocate import SampleMove
from moesaic.runtime.balance.samples.residual import Residual, WithResidual, rides_along
from moesaic.runtime.call import Call
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.runtime.function import Run, run_program


@dataclass(frozen=True)
class RelocatedCall:
    """What a call has besides tokens, routing and experts."""

    move: SampleMove
    """Of the layer in this forward pass."""
    router: AbstractRouter
    """Of the layer."""
    mask: Tensor | None = None
    """Of as many entries as tokens, bool, False for padding; None for none."""
    token_ids: Tensor | None = None
    """As many, int64, for routers that read ids."""
    residual: Residual | None = None
    """What is to be added to the result; `move.rides` says afterwards whether it was."""


def run_relocated(
    on_mesh: ExpertParallel | None, experts: AbstractExperts, x_TD: Tensor, routed: Routed, call: RelocatedCall
) -> Tensor:
    """Dispatch, run and combine: the tokens of the samples that are here to those of the samples that come.

    The decision starts as soon as all ranks know the counts, and is waited for where results start to travel.

    Args:
        on_mesh: of the layer.
        experts: of the layer.
        x_TD: (tokens, dim), this rank's samples one after the other.
        routed: of these tokens, without drops.
        call: what else the layer was called with.

    Returns:
        (tokens, dim).

    Raises:
        InputError: for a layer or plan that cannot move samples, or tokens that are not the trip's samples.
    """
    move, mask, residual = call.move, call.mask, call.residual
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
    move.rides = rides_along(residual, call.router, on_mesh.calls.bare.plan, mask, on_mesh._weight_first)
    on_mesh._check_digests(routed)
    if move.copies is None:
        of_tokens = (None if each is None else each.reshape(-1) for each in (mask, call.token_ids))
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
    plain, relocator, dtype, transport = on_mesh.calls.bare, move.relocator, compute_dtype(x_TD), on_mesh.transport
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
        work = Run(compiled, transport, call, call.first_tag + forward, {"index": token.unsqueeze(1)})
        cast = (tuple(weight.to(dtype) for weight in weights) for weights in (sharded, common))
        return run_program(work, x.to(dtype), gate, *cast)

    y: Tensor = held(x_TD, gates.unsqueeze(1), run=run)
    return y.to(x_TD.dtype)
