"""Training a whole model on a mesh: MoE layers, FSDP2 or DDP for the other parameters, and the norm of the whole gradient.

`parallelize_model` puts every MoE layer on the mesh and, if asked to, all parameters under FSDP2. Without FSDP2, call
`prepare_ddp` next, or call `moesaic.average_gradients` before each step. Let each rank's loss be the mean over its own tokens.
After the backward pass every gradient is that of the mean over all tokens:

    dense part   averaged over dp; complete on every rank of a tp group, or split like its parameter
    experts      summed over the tokens of one copy of the experts (ep x etp ranks), summed over edp, divided by dp

FSDP2's own average over edp would be wrong by dp / edp, and torch's `clip_grad_norm_` refuses parameters of two meshes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts, StackedExperts
from moesaic.experts.modules import copies_of
from moesaic.layer import MoE
from moesaic.models.split import local_part
from moesaic.named import CallsOf
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.plan import Plan
from moesaic.runtime.data_parallel import DDP_IGNORES, UnpreparedForDDP, expert_parameters

SEES_DATACLASSES = torch.__version__ >= "2.12"
"""Whether FSDP2 finds the tensors of an output that is a dataclass."""


def parallelize_model(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | dist.ProcessGroup,
    plan: Plan | Compiled | Literal["auto"] | None = None,
    *,
    fsdp: bool | Sequence[nn.Module] = False,
    broadcast: bool = False,
) -> Mesh:
    """Put every MoE layer of a model on a mesh, in place. All ranks of the mesh call this together.

    Args:
        model: any tree of modules, whole and the same on every rank.
        mesh: the ranks, in any form that `MoE.parallelize` accepts.
        plan: the plan of the MoE layers; None for `Plan()`, "auto" to search for one during training.
        fsdp: also apply FSDP2, see `shard_over_data`: True, or the modules whose parameters are gathered together. True takes
            the model's blocks, which are the entries of its outermost `nn.ModuleList`s.
        broadcast: send the first rank's weights of the MoE layers to all ranks, instead of comparing them.

    Returns:
        the mesh.

    Raises:
        InputError: for a model without MoE layers, and in the cases in which `MoE.parallelize` raises it.
    """
    mesh = Mesh.of(mesh)
    if not any(isinstance(module, MoE) for module in model.modules()):
        raise InputError(
            f"{type(model).__name__} has no MoE layer: put moesaic.MoE where its feed-forward layers are"
        )
    parallelize_layers(model, mesh, plan or Plan(), broadcast=broadcast)
    UnpreparedForDDP.mark(model)
    if fsdp is not False and mesh.is_distributed:
        shard_over_data(model, mesh, _blocks(model) if fsdp is True else fsdp)
    return mesh


def parallelize_layers(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan | Compiled | Literal["auto"],
    *,
    calls: CallsOf | None = None,
    broadcast: bool = False,
) -> None:
    """Put every MoE layer of a model on a mesh, in place. Layers with and without biases get one compiled plan each.

    Args:
        model, mesh, plan, broadcast: as for `parallelize_model`.
        calls: as for `MoE.parallelize`.
    """
    compiled: dict[bool, Compiled] = {}
    for layer in [module for module in model.modules() if isinstance(module, MoE)]:
        if not isinstance(plan, Plan):
            layer.parallelize(mesh, plan, calls=calls, broadcast=broadcast)
            continue
        bias = bool(layer.experts.names[1])
        if bias not in compiled:
            compiled[bias] = compile_plan(plan, mesh.grid, bias=bias)
        layer.parallelize(mesh, compiled[bias], calls=calls, broadcast=broadcast)


def parameter_groups(
    model: nn.Module | Iterable[nn.Parameter], **options: Any
) -> list[dict[str, Any]]:
    """Return a model's parameters as parameter groups for an optimizer: one group for plain tensors and one per device mesh.

    torch's fused and foreach steps refuse a group that mixes tensors with DTensors, or DTensors of two meshes.

    Args:
        model: the model, or parameters of it, after it was parallelized.
        options: optimizer options for every group, such as `weight_decay=0.1`.
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters() if isinstance(model, nn.Module) else model:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters, **options} for parameters in groups.values()]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the entries of the outermost module lists."""
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [
        block
        for child in model.children()
        if not isinstance(child, MoE)
        for block in _blocks(child)
    ]


def shard_over_data(
    model: nn.Module,
    mesh: Mesh,
    units: Iterable[nn.Module] = (),
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Apply FSDP2 in place: experts over edp, all other parameters over dp. Axes of size 1 are skipped.

    Args:
        model: the model, on its device; its MoE layers are parallelized on `mesh`.
        mesh: the mesh of the MoE layers.
        units: modules of the model whose parameters are gathered together, such as its blocks, inner modules first.
            Parameters in none of them are gathered with the model.
        dtype: dtype in which experts are gathered: that of their products under autocast. Then less is sent, and each rank
            casts only its own shard; gradients are summed in the parameters' dtype. None: experts are gathered in the dtype
            in which they are stored, as experts that are modules of the user's own always are.

    The forward pass of a unit, or of the model, raises InputError if FSDP2 finds none of the tensors of its output: it would
    not gather the unit's own parameters again for the backward pass.
    """
    dp, edp = mesh.grid.dp, mesh.grid.edp
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers if edp > 1 else ():
        gather_dtype = dtype if isinstance(layer.experts, StackedExperts) else None
        _shard(layer.experts, mesh.sparse["edp"], divide_by=dp, dtype=gather_dtype)
    if dp == 1:
        return
    for layer in layers if edp == 1 else ():
        layer.experts.mark(partial(_divide_gradient, dp=dp))
    done = {parameter for layer in layers for parameter in layer.experts.parameters()}
    leave_out = set() if edp > 1 else done.copy()
    for unit in (*units, model):
        has_own = not done.issuperset(unit.parameters())
        _shard(unit, mesh.dense["dp"], divide_by=dp, leave_out=leave_out)
        done |= set(unit.parameters())
        if has_own:
            unit.register_forward_hook(_refuse_hidden_output)


def _divide_gradient(parameter: nn.Parameter, dp: int) -> None:
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: gradient / dp)


def _refuse_hidden_output(module: nn.Module, _: Any, output: Any) -> None:
    """Refuse an output that has tensors to propagate, but none that FSDP2 finds."""
    parts = tree_leaves(output)
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        return
    for part in parts:
        if isinstance(part, Tensor) or (is_dataclass(part) and SEES_DATACLASSES):
            continue
        names = (
            [field.name for field in fields(part)]
            if is_dataclass(part)
            else getattr(part, "__dict__", ())
        )
        values = [getattr(part, name) for name in names]
        if any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(values)):
            raise InputError(
                f"{type(module).__name__.removeprefix('FSDP')} returns a {type(part).__name__}, in which FSDP2 of torch "
                f"{torch.__version__} finds no tensors: return a tensor, tuple, list, dict or NamedTuple"
            )


def prepare_ddp(model: nn.Module, mesh: Mesh) -> None:
    """Make a model ready for `DistributedDataParallel(model)`, in place: DDP ignores the experts, which hooks average instead.

    DDP cannot handle parameters that differ between ranks. It is set to ignore the experts. A hook on each expert's gradient
    sums over the copies of the experts and divides by dp, in every backward pass (under `no_sync` too). On a mesh over a part
    of the world, or with tensor parallelism, pass `process_group=mesh.dense["dp"].get_group()` to DDP.

    Args:
        model: the model that you or a trainer will wrap in DDP; its MoE layers are parallelized on `mesh`.
        mesh: the mesh of the MoE layers.
    """
    group = mesh.sparse["edp"].get_group() if mesh.grid.edp > 1 else None
    average = partial(_average_expert_gradient, group=group, dp=mesh.grid.dp)
    for module in model.modules():
        if isinstance(module, AbstractExperts) and module.is_spread:
            module.mark(
                lambda parameter: parameter.requires_grad and parameter.register_hook(average)
            )
    experts, chosen = set(expert_parameters(model)), getattr(model, DDP_IGNORES, ())
    ignored = set() if isinstance(chosen, UnpreparedForDDP) else set(chosen)
    ignored |= {name for name, parameter in model.named_parameters() if parameter in experts}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


def _average_expert_gradient(
    gradient: Tensor, *, group: dist.ProcessGroup | None, dp: int
) -> Tensor:
    """Return an expert's gradient, summed over the copies of the expert and divided by dp."""
    total = local_part(gradient) / dp
    if group is not None:
        dist.all_reduce(total, group=group)
    if isinstance(gradient, DTensor):
        return DTensor.from_local(total, gradient.device_mesh, gradient.placements, run_check=False)
    return total


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    divide_by: int,
    leave_out: set[nn.Parameter] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Make a module an FSDP2 unit, gathered in `dtype`. Its gradients are summed over `mesh` and divided by `divide_by`."""
    gate_and_up = {
        parameter
        for experts in module.modules()
        if isinstance(experts, StackedExperts)
        for name, parameter in experts.named_parameters(recurse=False)
        if name in experts.paired
    }
    reduce_dtype = None if dtype is None else next(module.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(
            shard_dim(parameter, mesh.size(), whole=(1,) if parameter in gate_and_up else ())
        )

    # Reshard the outermost unit too: if an evaluation left it gathered, it would miss the optimizer step that follows.
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=True,
        shard_placement_fn=place,
        mp_policy=policy,
        ignored_params=leave_out,
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(divide_by)
    module.set_force_sum_reduction_for_comms(True)  # Gloo knows no other reduction


def shard_dim(parameter: Tensor, parts: int, whole: Collection[int] = ()) -> int:
    """Return the dimension along which to shard a parameter over data-parallel ranks.

    The first choice is a dimension that divides evenly and that no model axis splits: any reader of a checkpoint
    understands such shards. The second is any dimension that divides evenly, and the last is dimension 0.

    Args:
        parameter: the parameter, perhaps already sharded over model axes.
        parts: number of shards.
        whole: dimensions that must not be split, such as the one that holds gate and up.
    """
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    split_dims = {place.dim for place in placements if isinstance(place, Shard)}
    sizes = local_part(parameter).shape
    even_dims = [dim for dim, size in enumerate(sizes) if size % parts == 0 and dim not in whole]
    return next(
        (dim for dim in even_dims if dim not in split_dims), even_dims[0] if even_dims else 0
    )


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`, like torch's function of the same name.

    Parameters may be plain tensors and DTensors of several meshes. If they are more than one of these kinds, or experts are
    spread over a mesh, all ranks must call this together. They get the same number, the norm of the whole model, at the cost
    of one message. Otherwise torch's function is called.

    Args:
        model: a model or its parameters, after gradients were averaged over data parallelism.
        max_norm: the largest allowed norm; `math.inf` to measure only.
        norm_type: p of the p-norm; `math.inf` for the largest absolute value.
        error_if_nonfinite: raise RuntimeError if the norm is not finite.
        mesh: as for `gradient_norm`; needed if the mesh of the model is only a part of the world.
        group: as for `gradient_norm`.

    Returns:
        the norm before clipping, ().
    """
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    meshes = {
        parameter.device_mesh if isinstance(parameter, DTensor) else None
        for parameter in parameters
    }
    # Experts that are spread over a mesh differ between ranks.
    is_spread = any(
        {"ep", "edp"} & {*_axes(each)} or copies_of(each) is not None for each in parameters
    )
    if mesh is group is None and len(meshes) < 2 and not is_spread:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    norm = gradient_norm(parameters, norm_type, mesh=mesh, group=group)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the gradient's norm is {float(norm)}: nothing was clipped")
    clip(parameters, norm, max_norm)
    return norm


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float = 2.0,
    *,
    mesh: Mesh | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the norm of the whole gradient, (), the same on all ranks that together hold the model.

    norm^p = sum over ranks, over parameters of |this rank's part|^p / (ranks that hold the same part)

    Args:
        parameters: those of the model or of this rank's pipeline stage. A parameter without a gradient counts as zero.
        norm_type: p.
        mesh: the ranks that hold these parameters, whole or in parts; None for the whole world.
        group: the ranks that together hold the model, in all pipeline stages; None for the ranks of `mesh`.
    """
    parameters = list(parameters)
    with_gradient = [
        (parameter, parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    holders = world if mesh is None else mesh.grid.world
    group = mesh.process_group if group is None and mesh is not None else group
    if world == 1:
        return nn.utils.get_total_norm(
            [local_part(gradient) for _, gradient in with_gradient], norm_type
        )
    parts_by_copies: dict[int, list[Tensor]] = {}
    for parameter, gradient in with_gradient:
        if local_part(gradient).numel():
            parts_by_copies.setdefault(
                num_copies(gradient, _holders(parameter, holders)), []
            ).append(local_part(gradient))
    total = torch.zeros(
        (), dtype=torch.float64, device=parameters[0].device if parameters else None
    )
    for copies, parts in parts_by_copies.items():
        norm = nn.utils.get_total_norm(parts, norm_type).double()
        total = (
            torch.maximum(total, norm)
            if math.isinf(norm_type)
            else total + norm.pow(norm_type) / copies
        )
    if math.isinf(norm_type):
        total = total.nan_to_num(nan=math.inf)  # a maximum over ranks may drop NaN
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total
    dist.all_reduce(total, group=group)
    return total.pow(1 / norm_type)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`.

    Args:
        parameters: the model's parameters.
        norm: their norm, from `gradient_norm`.
        limit: the largest allowed norm.
    """
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    parts = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for dtype in {part.dtype for part in parts}:
        same_dtype = [part for part in parts if part.dtype == dtype]
        torch._foreach_mul_(same_dtype, factor.to(dtype))


def num_copies(tensor: Tensor, holders: int) -> int:
    """Return how many ranks hold the same part of a tensor as this one.

    Args:
        tensor: a sharded tensor, or a plain one, which every rank holds whole.
        holders: number of ranks that hold the tensor, whole or in part.
    """
    if not isinstance(tensor, DTensor):
        return holders
    shards = [
        tensor.device_mesh.size(axis)
        for axis, place in enumerate(tensor.placements)
        if not place.is_replicate()
    ]
    return holders // math.prod(shards)


def _axes(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the mesh dimensions of a DTensor; () for a plain tensor."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def _holders(parameter: nn.Parameter, world: int) -> int:
    """Return how many ranks of the model hold a parameter. Modules of the user's own differ between ranks, as experts do."""
    if isinstance(parameter, DTensor):
        axes = _axes(parameter)
        return parameter.device_mesh.size() if "edp" in axes and "ep" not in axes else world
    return copies_of(parameter) or world
