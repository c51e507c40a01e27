"""Spreading a layer over a mesh: checks that the plan fits and that all ranks agree, and shards the
experts.

All checks run before anything of the layer is sent. One storage layout serves every plan: the
experts are split over the axis ep of the mesh, the hidden width of each over etp, and edp ranks
have equal copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moesaic.comm.collectives import broadcast, check_same
from moesaic.comm.transport import AbstractTransport, as_bytes
from moesaic.errors import InputError
from moesaic.experts import ModuleExperts
from moesaic.experts.experts import AbstractExperts
from moesaic.experts.replaced_parameters import OwnedParameter
from moesaic.initial_values import is_dtensor
from moesaic.kernels.codecs import codec_named
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Crossing, Plan
from moesaic.runtime import deepep


def fitting(
    plan: Plan | Compiled,
    grid: Grid,
    transport: AbstractTransport,
    experts: AbstractExperts,
    settings: Mapping[str, object] | None = None,
    weights: Mapping[str, str] | None = None,
) -> Compiled:
    """Return the compiled plan of a layer, after a comparison with the other ranks. All ranks call
    this together.

    Args:
        plan: the plan, compiled or not.
        grid: the mesh of the layer.
        transport: the transport between the ranks.
        experts: the layer's experts.
        settings: settings of the layer by name, which must be the same on all ranks.
        weights: for each tensor, by name, a text that must be the same on all ranks; see
            `described`.

    Raises:
        InputError: on every rank, if plans, meshes, settings or weights differ between ranks; if
            the plan does not fit the mesh, or was compiled for another mesh or for experts with
            other parameters; if a codec's package is missing on any rank.
    """
    choices = plan if isinstance(plan, Plan) else plan.plan
    fields: dict[str, object] = {f"mesh.{name}": value for name, value in asdict(grid).items()}
    fields |= {f"plan.{name}": value for name, value in asdict(choices).items()}
    if isinstance(plan, Compiled):
        fields["compiled plan"] = plan.digest.hex()
    for codec in (choices.codec, choices.backward_codec):
        fields[f"whether codec {codec} is installed"] = _is_installed(codec)
    missing = ""
    if choices.crossing is Crossing.DEEPEP:
        missing = deepep.missing()
        fields["why deepep cannot run"] = missing
    weight_fields = {f"weights.{name}": value for name, value in (weights or {}).items()}
    transport.doing = "parallelize"
    check_same(
        transport,
        {**fields, **(settings or {}), **weight_fields},
        advice=dict.fromkeys(weight_fields, ADVICE),
    )
    transport.doing = ""
    if missing:
        raise InputError(
            f"plan.all_to_all=deepep: {missing}: choose multicast, which sends a "
            "token once per node"
        )
    return compiled_for(plan, grid, transport, experts)


def compiled_for(
    plan: Plan | Compiled, grid: Grid, transport: AbstractTransport, experts: AbstractExperts
) -> Compiled:
    """Return the compiled plan of a layer, without communication. The arguments are those of
    `fitting`.

    Raises:
        InputError: in those cases of `fitting` that do not need a comparison of ranks.
    """
    choices = plan if isinstance(plan, Plan) else plan.plan
    for codec in (choices.codec, choices.backward_codec):
        codec_named(codec)  # raises if its package is missing
    _, common_names = experts.names  # of parameters that etp splits, and of the others: biases
    bias = bool(common_names)
    if isinstance(plan, Plan):
        return compile_plan(plan, grid, bias=bias)
    if replace(plan.grid, etp_inner=grid.etp_inner) != grid:  # a plan may factor etp by itself
        raise InputError(
            f"the plan was compiled for {plan.grid}, the layer is on {grid}: compile it for "
            "the layer's mesh"
        )
    if ("b" in plan.forward.inputs) != bias:
        raise InputError(
            f"the plan was compiled with bias={not bias}, which does not fit "
            f"{type(experts).__name__} that {'has' if bias else 'has no'} common biases: compile "
            f"it with bias={bias}"
        )
    return plan


def _is_installed(codec: str) -> bool:
    """Return whether the package that a codec needs is installed."""
    try:
        codec_named(codec)
    except InputError:
        return False
    return True


ADVICE = (
    "give every rank the same weights (set the same seed before creating the layer), or call "
    "parallelize(..., broadcast=True)"
)
"""Advice in the error for weights that differ."""
_WORDS = 65536
"""Number of 8-byte words that are hashed at a time: few enough to need little memory, enough to
need few steps."""
_ODD = -7046029254386353131
"""A multiplier without small factors: 2**64 over the golden ratio, as a signed number."""


def described(module: nn.Module, *, values: bool) -> dict[str, str]:
    """Return dtype, shape and (optionally) a hash of each of a module's parameters and persistent
    buffers, by name.

    Tensors on the meta device are never hashed.

    Args:
        module: a module that is not sharded.
        values: whether to hash the values.

    Raises:
        InputError: for weights that are already sharded.
    """
    descriptions = {}
    for name, tensor in module.state_dict().items():
        if is_dtensor(tensor):
            raise InputError(
                f"MoE.parallelize: {name} is sharded already: call parallelize first, then "
                "fully_shard"
            )
        descriptions[name] = description(tensor, values=values)
    return descriptions


def description(tensor: Tensor, *, values: bool = True) -> str:
    """Return dtype, shape and (optionally) a hash of a tensor."""
    value = ""
    if tensor.is_meta:
        value = "on meta"
    elif values:
        value = fingerprint(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {value}".strip()


def fingerprint(tensor: Tensor) -> str:
    """Return a hash of 16 hexadecimal digits, computed on the tensor's device. Different bits
    almost surely differ in it.

    It is a polynomial in odd multipliers modulo 2**64: a difference in a single word is always
    detected.
    """
    data = as_bytes(tensor.detach().contiguous())
    num_missing = -len(data) % 8  # to whole words of 8 bytes
    if num_missing:
        data = F.pad(data, (0, num_missing))
    words = data.view(torch.int64)
    odd_numbers = 2 * torch.arange(min(_WORDS, len(words)), device=words.device) + 1
    factors = odd_numbers * _ODD  # int64 products wrap around, modulo 2**64
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in words.split(_WORDS):
        # low bits of a float64 that was a float32 are all zero: mix the high half into them
        mixed = piece ^ (piece >> 32 & 0xFFFFFFFF)
        total = total * _ODD + (mixed * factors[: len(piece)]).sum()
    return f"{int(total) % 2**64:016x}"


@torch.no_grad()
def take_first(module: nn.Module, transport: AbstractTransport) -> None:
    """Give all ranks the first rank's parameters and persistent buffers, in place. Tensors on the
    meta device are unchanged.

    Names, dtypes and shapes must be the same on all ranks.
    """
    everyone = tuple(range(transport.world))
    for tensor in module.state_dict().values():
        if not tensor.is_meta:
            tensor.copy_(broadcast(transport, everyone, tensor.to(transport.device), source=0))


def shard_experts(
    experts: AbstractExperts, grid: Grid, rank: int, device_mesh: DeviceMesh | None
) -> None:
    """Keep only this rank's shard of every parameter, in place.

    Args:
        experts: not sharded, with the same values on all ranks.
        grid: the mesh.
        rank: the rank whose shard is kept.
        device_mesh: a mesh with dimensions ("ep", "etp"), on which parameters become DTensors:
            sharded over ep on the expert dimension and over etp on the hidden one. None: parameters
            become plain tensors.

    Raises:
        InputError: if the experts do not split evenly.
    """
    _check_shards(experts, grid)
    experts.is_spread = True
    experts_per_rank = experts.num_experts // grid.ep
    first_expert = grid.coordinate(rank, "ep") * experts_per_rank
    own_experts = range(first_expert, first_expert + experts_per_rank)
    if isinstance(experts, ModuleExperts):
        experts.keep_only(own_experts, copies=grid.edp)
    else:
        for names in experts.names:
            for name in names:
                etp_place = grid.coordinate(rank, "etp")
                _shard_parameter(experts, name, own_experts, (etp_place, grid.etp), device_mesh)
    # These attributes tell other trainers that a parameter differs between data-parallel ranks:
    # DeepSpeed and Megatron-Core read `allreduce`, and DeepSpeed reads from `group_name` over how
    # many ranks the parameter is spread.
    experts.mark(partial(_mark_spread, num_ranks=grid.ep * grid.etp))


def _shard_parameter(
    experts: AbstractExperts,
    name: str,
    own_experts: range,
    shard: tuple[int, int],
    device_mesh: DeviceMesh | None,
) -> None:
    """Keep only this rank's shard of one parameter.

    Args:
        name: of the parameter, whose first dimension is the experts.
        own_experts: the experts of this rank.
        shard: the number of this rank's shard of the hidden width, and of all shards.
        device_mesh: as in `shard_experts`.
    """
    whole = experts.get_parameter(name)
    dim = experts.shard_dim(name)
    local = whole.detach()[own_experts.start : own_experts.stop]
    if dim is not None:
        number, num_shards = shard
        local = local.chunk(num_shards, dim)[number]
    value: Tensor = local.clone(memory_format=torch.contiguous_format)
    if device_mesh is not None:
        from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

        placements: list[Placement] = [Shard(0), Replicate() if dim is None else Shard(dim)]
        value = DTensor.from_local(value, device_mesh, placements, run_check=False)
    part = nn.Parameter(value, requires_grad=whole.requires_grad)
    if device_mesh is None and _swap(whole, part):  # the experts' parameter itself is now the part
        return
    # Noted, so that an optimizer which still holds the whole parameter is found.
    setattr(experts, name, part)
    experts.replaced.note(OwnedParameter.of(experts, name, whole), part)


def is_spread(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is this rank's part of experts that are spread over a mesh."""
    return getattr(parameter, "allreduce", None) is False


def _swap(whole: nn.Parameter, part: nn.Parameter) -> bool:
    """Swap what the two objects are, so that an optimizer that holds the whole holds the part then.
    Return False if torch refuses, since something else refers to one: an earlier pass's graph.

    Its data alone would not do: a graph that is alive keeps the shape that gradients had.
    """
    try:
        torch.utils.swap_tensors(whole, part)
    except RuntimeError:
        return False
    return True


def _mark_spread(parameter: nn.Parameter, num_ranks: int) -> None:
    """Set the attributes by which other trainers know that a parameter is spread over ranks."""
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.group_name = f"ep_size_{num_ranks}"  # type: ignore[attr-defined]


def _check_shards(experts: AbstractExperts, grid: Grid) -> None:
    """Refuse experts that do not split evenly over ep and etp."""
    if experts.num_experts % grid.ep:
        raise InputError(
            f"num_experts={experts.num_experts} does not split over mesh.ep={grid.ep}: choose "
            "ep as a divisor of it"
        )
    if grid.etp == 1:
        return
    names = [name for name in experts.names[0] if experts.shard_dim(name) is not None]
    if not names:
        raise InputError(
            f"{type(experts).__name__} cannot be cut into shards: choose mesh.etp=1 (mesh.ep "
            "spreads whole experts)"
        )
    for name in names:
        dim = experts.shard_dim(name)
        assert dim is not None
        width = experts.get_parameter(name).shape[dim]
        if width % grid.etp:
            raise InputError(
                f"an expert's hidden width of {width} does not split over "
                f"mesh.etp={grid.etp}: choose etp as a divisor of it"
            )
