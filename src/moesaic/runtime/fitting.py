"""Whether a plan fits a layer, and whether all ranks brought the same one: found out before anything of the layer is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from moesaic.comm import deepep
from moesaic.comm.agree import check_same
from moesaic.comm.transport import AbstractTransport
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts
from moesaic.kernels.codecs import codec_named
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.plan.plan import Crossing
from moesaic.program.grid import Grid
from moesaic.runtime.same_weights import ADVICE


def fitting(
    plan: Plan | Compiled,
    grid: Grid,
    transport: AbstractTransport,
    experts: AbstractExperts,
    settings: Mapping[str, object] | None = None,
    weights: Mapping[str, str] | None = None,
) -> Compiled:
    """Return the compiled plan of a layer. All ranks call it together.

    Args:
        plan: the choices, compiled or not yet.
        grid: the mesh of the layer.
        transport: between its ranks.
        experts: of the layer.
        settings: of the layer, which all ranks must have alike.
        weights: names of tensors to what they are compared by.

    Raises:
        InputError: on every rank, if ranks brought different plans, meshes, settings or weights; if the plan does not fit the
            mesh, or was compiled for another one or for experts with other parameters; if a codec's package is missing on any
            rank.
    """
    choices = plan if isinstance(plan, Plan) else plan.plan
    fields: dict[str, object] = {f"mesh.{name}": value for name, value in asdict(grid).items()}
    fields |= {f"plan.{name}": value for name, value in asdict(choices).items()}
    if isinstance(plan, Compiled):
        fields["compiled plan"] = plan.digest.hex()
    codecs = (choices.codec, choices.backward_codec)
    fields |= {f"whether codec {codec} is installed": _is_installed(codec) for codec in codecs}
    if choices.crossing is Crossing.DEEPEP:
        fields["why deepep cannot run"] = deepep.missing()
    of_weights = {f"weights.{name}": value for name, value in (weights or {}).items()}
    check_same(transport, {**fields, **(settings or {}), **of_weights}, advice=dict.fromkeys(of_weights, ADVICE))
    if fields.get("why deepep cannot run"):
        raise InputError(
            f"plan.all_to_all=deepep: {deepep.missing()}: choose multicast, which sends a token once per node"
        )
    return compiled_for(plan, grid, transport, experts)


def compiled_for(plan: Plan | Compiled, grid: Grid, transport: AbstractTransport, experts: AbstractExperts) -> Compiled:
    """Return the compiled plan of a layer, as this rank finds it by itself; nothing is sent.

    Args:
        plan, grid, transport, experts: as for `fitting`.

    Raises:
        InputError: as `fitting` does, but for what only a comparison of ranks shows.
    """
    choices = plan if isinstance(plan, Plan) else plan.plan
    for codec in (choices.codec, choices.backward_codec):
        codec_named(codec)
    bias = bool(experts.names[1])
    if isinstance(plan, Plan):
        return compile_plan(plan, grid, bias=bias, host_runs_compute=transport.device.type == "cpu")
    if replace(plan.grid, etp_inner=grid.etp_inner) != grid:
        raise InputError(
            f"the plan was compiled for {plan.grid}, the layer is on {grid}: compile it for the layer's mesh"
        )
    if ("b" in plan.forward.inputs) != bias:
        raise InputError(
            f"the plan was compiled with bias={not bias}, which does not fit {type(experts).__name__} that "
            f"{'has' if bias else 'has no'} common biases: compile it with bias={bias}"
        )
    return plan


def _is_installed(codec: str) -> bool:
    try:
        codec_named(codec)
    except InputError:
        return False
    return True
