"""Training a whole model on a mesh: MoE layers, FSDP2 or DDP for the other parameters, and the norm
of the whole gradient.

`parallelize_model` puts every MoE layer on the mesh and, if asked to, all parameters under FSDP2.
Without FSDP2, call `prepare_ddp` next, or call `moesaic.average_gradients` before each step. Let
each rank's loss be the mean over its own tokens. After the backward pass every gradient is that of
the mean over all tokens:

    dense part  averaged over dp; complete on every rank of a tp group, or split like its
                parameter
    experts     summed over the tokens of one copy of the experts (ep x etp ranks), summed
                over edp, divided by dp

FSDP2's own average over edp would be wrong by dp / edp, and torch's `clip_grad_norm_` refuses
parameters of two meshes.

dp ranks have different tokens; edp ranks among them hold the same experts. A *unit* is a module
whose parameters FSDP2 gathers together; *replicas* are groups of ranks that each hold all shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal, cast

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
from moesaic.experts.replaced_parameters import owned_parameters
from moesaic.layer import MoE
from moesaic.models.split import local_part
from moesaic.policies import CallsOf
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.plan import Plan
from moesaic.runtime.data_parallel import (
    DDP_IGNORES,
    Replicas,
    UnpreparedForDDP,
    check_optimizers,
    expert_parameters,
)
from moesaic.runtime.sharding import is_spread

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
        plan: the plan of the MoE layers; None for `Plan()`, "auto" to search for one during
            training.
        fsdp: also apply FSDP2, see `shard_over_data`: True, or the modules whose parameters are
            gathered together. True takes the model's blocks, which are the entries of its outermost
            `nn.ModuleList`s.
        broadcast: send the first rank's weights of the MoE layers to all ranks, instead of
            comparing them.

    Returns:
        the mesh.

    Raises:
        InputError: for a model without MoE layers, and in the cases in which `MoE.parallelize`
            raises it.
    """
    mesh = Mesh.of(mesh)
    if not any(isinstance(module, MoE) for module in model.modules()):
        raise InputError(
            f"{type(model).__name__} has no MoE layer: put moesaic.MoE where its feed-forward "
            "layers are"
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
    """Put every MoE layer of a model on a mesh, in place. Layers with and without biases get one
    compiled plan each.

    Args:
        model, mesh, plan, broadcast: as for `parallelize_model`.
        calls: as for `MoE.parallelize`.
    """
    compiled: dict[bool, Compiled] = {}
    for layer in [module for module in model.modules() if isinstance(module, MoE)]:
        if not isinstance(plan, Plan):
            layer.parallelize(mesh, plan, calls=calls, broadcast=broadcast)
            continue
        _, common_names = layer.experts.names
        has_bias = bool(common_names)
        if has_bias not in compiled:
            compiled[has_bias] = compile_plan(plan, mesh.grid, bias=has_bias)
        layer.parallelize(mesh, compiled[has_bias], calls=calls, broadcast=broadcast)


def parameter_groups(
    model: nn.Module | Iterable[nn.Parameter], **options: Any
) -> list[dict[str, Any]]:
    """Return a model's parameters as parameter groups for an optimizer: one group for plain tensors
    and one per device mesh.

    torch's fused and foreach steps refuse a group that mixes tensors with DTensors, or DTensors of
    two meshes.

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
    blocks = []
    for child in model.children():
        if not isinstance(child, MoE):  # whose experts may be a list of modules
            blocks += _blocks(child)
    return blocks


def shard_over_data(
    model: nn.Module,
    mesh: Mesh,
    units: Iterable[nn.Module] = (),
    *,
    dtype: torch.dtype | None = None,
    replica_dtype: torch.dtype | None = None,
) -> None:
    """Apply FSDP2 in place: experts over edp, all other parameters over dp, each sharded and
    replicated as `mesh.shard` says. Axes of size 1 are skipped.

    Gradients of parameters that are only replicated are averaged when a backward pass ends.
    `micro_batches` lets several backward passes share one reduction.

    Args:
        model: the model, on its device; its MoE layers are parallelized on `mesh`.
        mesh: the mesh of the MoE layers.
        units: modules of the model whose parameters are gathered together, such as its blocks,
            inner modules first. Parameters in none of them are gathered with the model.
        dtype: dtype in which experts are gathered: that of their products under autocast. Then less
            is sent, and each rank casts only its own shard; gradients are summed in the parameters'
            dtype. None: experts are gathered in the dtype in which they are stored, as experts that
            are modules of the user's own always are.
        replica_dtype: dtype in which gradients are sent between replicas, such as between nodes
            under `mesh.shard="node"`. None: as inside them, in the parameters' dtype.

    The forward pass of a unit, or of the model, raises InputError if FSDP2 finds none of the
    tensors of its output: it would not gather the unit's own parameters again for the backward
    pass.
    """
    before = owned_parameters(model)
    _shard_over_data(model, mesh, units, dtype, replica_dtype)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return
    # FSDP2 replaces parameters: note it, for the check of optimizers that were made before. The
    # first layer keeps the notes of modules outside of all layers.
    experts_of = {}
    for layer in layers:
        for module in layer.experts.modules():
            experts_of[module] = layer.experts
    for old in before:
        new = getattr(old.owner, old.name)
        if id(new) != old.number:  # `number` is the id of the parameter that was there
            experts = experts_of.get(old.owner, layers[0].experts)
            experts.replaced.note(old, new)


def _shard_over_data(
    model: nn.Module,
    mesh: Mesh,
    units: Iterable[nn.Module],
    dtype: torch.dtype | None,
    replica_dtype: torch.dtype | None,
) -> None:
    """Do the work of `shard_over_data`, except for noting which parameters it replaces."""
    dp = mesh.grid.dp
    edp = mesh.grid.edp
    experts_of_layers = [layer.experts for layer in model.modules() if isinstance(layer, MoE)]
    # the ranks over which FSDP2 shards; None: over none, since the axis has one rank, or since the
    # mesh only replicates over it
    over_dp = mesh.data_mesh("dp") if dp > 1 else None
    over_edp = mesh.data_mesh("edp") if edp > 1 else None
    # every gradient is a sum over all tokens, and becomes the mean over the dp groups
    shard = partial(_shard, divide_by=dp, replica_dtype=replica_dtype)
    for experts in experts_of_layers:
        if over_edp is not None:
            gather_dtype = dtype if isinstance(experts, StackedExperts) else None
            shard(experts, over_edp, dtype=gather_dtype)
            # give FSDP2's parameters the hooks and attributes of those that they replace
            experts.mark_all()
        elif edp == 1 and dp > 1:  # one rank has the whole sum: it is only divided
            experts.mark(partial(_divide_gradient, dp=dp))  # calls it on each parameter

    replicates_dense = over_dp is None and dp > 1
    replicates_experts = over_edp is None and edp > 1
    if replicates_dense or replicates_experts:
        Replicas(
            model, mesh, dense=replicates_dense, experts=replicates_experts, dtype=replica_dtype
        ).attach()
    if over_dp is not None:
        _shard_dense(
            (*units, model),
            partial(shard, mesh=over_dp),
            experts_of_layers,
            experts_are_units=over_edp is not None,
        )


def _shard_dense(
    modules: Iterable[nn.Module],
    shard: Callable[..., None],
    experts_of_layers: Iterable[AbstractExperts],
    *,
    experts_are_units: bool,
) -> None:
    """Make FSDP2 units of modules, inner ones first, of which the last is the model. Experts that
    are no units of their own stay outside of all units."""
    done: set[nn.Parameter] = set()  # parameters that a module around them does not take
    for experts in experts_of_layers:
        done |= set(experts.parameters())
    leave_out: set[nn.Parameter] = set() if experts_are_units else done.copy()
    for module in modules:
        has_own_parameters = not done.issuperset(module.parameters())
        shard(module, leave_out=leave_out)
        done |= set(module.parameters())  # those that FSDP2 put in their place
        if has_own_parameters:
            module.register_forward_hook(_refuse_hidden_output)


REPLICA_DTYPE = "_moesaic_replica_dtype"
"""Attribute of an FSDP2 unit whose gradients are sent between replicas in a dtype of their own."""
Held = Literal["parameters", "gradients", "nothing"]
"""What each rank holds whole between the micro-batches of a step, under FSDP2."""


def micro_batches(model: nn.Module, count: int, *, hold: Held = "parameters") -> Iterator[int]:
    """Yield the numbers of a step's micro-batches, whose gradients are reduced once, in the last
    backward pass.

        for micro in micro_batches(model, 8):
            (loss_of(model, batches[micro]) / 8).backward()

    It works for a model under FSDP2 (`shard_over_data`) or DDP (`prepare_ddp`). Without either,
    `average_gradients` averages once anyway. Under DDP, the forward pass belongs into the loop too.

    Args:
        model: the model that the wrapper returned.
        count: number of micro-batches, each of which has one backward pass.
        hold: under FSDP2, what each rank holds whole meanwhile. "parameters": parameters, gathered
            once in the step, and gradients, reduced once. "gradients": gradients alone; parameters
            are gathered for each forward and each backward pass. "nothing": gradients are reduced
            in each backward pass too, and between replicas in the last one alone.

    If the loop is left before its end, the gradients of this step that are not reduced are dropped;
    call `zero_grad` for the others. What you have set on units and wrappers holds again afterwards,
    and decides when parameters are gathered unless they are held.

    Raises:
        InputError: hold is "nothing", and replicas have a dtype of their own for gradients: they
            would be summed between replicas in every micro-batch.
    """
    if hold == "nothing" and any(hasattr(module, REPLICA_DTYPE) for module in model.modules()):
        raise InputError('hold="nothing" clashes with replica_dtype: choose "gradients"')
    with step_switches([model], keeps=hold == "parameters") as switches:
        for micro in range(count):
            switches.before_pass(is_last=micro == count - 1, reduces=hold == "nothing")
            yield micro


class StepSwitches:
    """What decides when a model's parameters are gathered and its gradients reduced: switches of
    its FSDP2 units, DDP wrappers and replicas.

    Args:
        modules: the model, or its parts.
        keeps: whether parameters stay gathered over the micro-batches of a step.
    """

    def __init__(self, modules: Iterable[nn.Module], *, keeps: bool) -> None:
        self._keeps = keeps
        self.units: list[FSDPModule] = []
        self.wrappers: list[DistributedDataParallel] = []
        self.replicas: list[Replicas] = []
        for part in modules:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    self.units.append(module)
                if isinstance(module, DistributedDataParallel):
                    self.wrappers.append(module)
                self.replicas += Replicas.at(module)

        owners: list[Any] = [unit._get_fsdp_state() for unit in self.units]
        for unit in self.units:
            owners += _groups_of(unit)
        owners += [*self.wrappers, *self.replicas]
        self._found: list[tuple[Any, str, Any]] = []
        """Owner, attribute and value of each switch as it was before the step."""
        for owner in owners:
            for name in _SWITCHES:
                if hasattr(owner, name):
                    self._found.append((owner, name, getattr(owner, name)))

    def before_pass(self, *, is_last: bool, reduces: bool) -> None:
        """Prepare for a micro-batch: gradients are reduced in it if `reduces` or if it is the last
        one, and between replicas in the last one alone."""
        # each unit sets its own switches, since all of them are in the list
        for unit in self.units:
            unit.set_requires_gradient_sync(is_last or reduces, recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)
            if self._keeps:
                unit.set_reshard_after_backward(False, recurse=False)
        for wrapper in self.wrappers:
            wrapper.require_backward_grad_sync = is_last
        for each in self.replicas:
            each.averages = is_last
        if is_last:
            self._put_back("reshard_after_backward")

    def put_back(self) -> None:
        """Set all switches as they were found."""
        self._put_back(*_SWITCHES)

    def drop(self) -> None:
        """Drop the gradients that are not reduced, and what is gathered."""
        for unit in self.units:
            _drop_unreduced(unit)
            unit.reshard()

    def _put_back(self, *names: str) -> None:
        """Set the switches of these names as they were found."""
        for owner, name, value in self._found:
            if name in names:
                setattr(owner, name, value)


_SWITCHES = (
    "_auto_reshard_after_forward",
    "post_forward_mesh_info",
    "reshard_after_backward",
    "reduce_grads",
    "all_reduce_grads",
    "require_backward_grad_sync",
    "averages",
)
"""Attributes of FSDP2's states and groups, of DDP and of `Replicas` that a step changes."""


@contextmanager
def step_switches(modules: Iterable[nn.Module], *, keeps: bool) -> Iterator[StepSwitches]:
    """Yield the switches of a step's passes, and put them back after it; arguments are those of
    `StepSwitches`."""
    switches = StepSwitches(modules, keeps=keeps)
    try:
        if keeps:
            for unit in switches.units:
                unit.set_reshard_after_forward(False, recurse=False)
        yield switches
    except BaseException:  # an unfinished step: an error, or the caller left its loop early
        switches.drop()
        raise
    finally:
        switches.put_back()


def _groups_of(unit: FSDPModule) -> list[Any]:
    """Return the groups of a unit's parameters; earlier versions of torch have one or none."""
    state = unit._get_fsdp_state()
    only_group = getattr(state, "_fsdp_param_group", None)
    groups = getattr(state, "_fsdp_param_groups", [only_group])
    return [group for group in groups if group is not None]


def _drop_unreduced(unit: FSDPModule) -> None:
    """Drop the gradients that FSDP2 keeps aside until it reduces them."""
    for group in _groups_of(unit):
        group._partial_reduce_output = None
        for sharded in group.fsdp_params:
            sharded.unsharded_accumulated_grad = None
            whole = getattr(sharded, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def _divide_gradient(parameter: nn.Parameter, dp: int) -> None:
    """Let a parameter's gradient be divided by dp in each backward pass."""
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: gradient / dp)


def _refuse_hidden_output(module: nn.Module, _: Any, output: Any) -> None:
    """Refuse an output that has tensors with a gradient, but none that FSDP2 finds; a hook of a
    unit's forward pass."""
    parts = tree_leaves(output)
    # torch's `tree_leaves` and FSDP2 open the same containers: these FSDP2 finds
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        return
    for part in parts:
        if isinstance(part, Tensor) or (is_dataclass(part) and SEES_DATACLASSES):
            continue
        # what FSDP2 does not look into: the attributes of an object
        if is_dataclass(part):
            names = [field.name for field in fields(part)]
        else:
            names = list(getattr(part, "__dict__", ()))
        values = [getattr(part, name) for name in names]
        if any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(values)):
            raise InputError(
                f"{type(module).__name__.removeprefix('FSDP')} returns a {type(part).__name__}, "
                f"in which FSDP2 of torch {torch.__version__} finds no tensors: return a tensor, "
                "tuple, list, dict or NamedTuple"
            )


def prepare_ddp(model: nn.Module, mesh: Mesh) -> None:
    """Make a model ready for `DistributedDataParallel(model)`, in place: DDP ignores the experts,
    which average themselves.

    DDP cannot handle parameters that differ between ranks. It is set to ignore the experts. When a
    backward pass ends, their gradients are summed over the copies of the experts and divided by dp;
    those of passes under `no_sync` are added first. On a mesh over a part of the world, or with
    tensor parallelism, pass `process_group=mesh.dense["dp"].get_group()` to DDP.

    Args:
        model: the model that you or a trainer will wrap in DDP; its MoE layers are parallelized on
            `mesh`.
        mesh: the mesh of the MoE layers.
    """
    if mesh.shard == "node":
        raise InputError("prepare_ddp: DDP shards nothing: create the mesh without shard='node'")
    Replicas(model, mesh, dense=False, experts=True).attach()
    experts = set(expert_parameters(model))
    # what the user has set already, or the mark of a model that is not prepared
    ignores = getattr(model, DDP_IGNORES, ())
    ignored = set() if isinstance(ignores, UnpreparedForDDP) else set(ignores)
    ignored |= {name for name, parameter in model.named_parameters() if parameter in experts}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    divide_by: int,
    leave_out: set[nn.Parameter] | None = None,
    dtype: torch.dtype | None = None,
    replica_dtype: torch.dtype | None = None,
) -> None:
    """Make a module an FSDP2 unit, gathered in `dtype`. Its gradients are summed over `mesh`, of
    (replicas, shards) or shards alone, and divided by `divide_by`."""
    replicas = None  # the group over which a hook sums, in a dtype of its own
    if replica_dtype is not None and mesh.ndim == 2:  # FSDP2 sums over both in one dtype
        replicas = mesh.get_group(0)
        # the shards alone
        mesh = mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
    num_shards = mesh.size(-1)
    gate_and_up = set(_gate_and_up_parameters(module))
    reduce_dtype = None if dtype is None else next(module.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )

    def place(parameter: nn.Parameter) -> Shard:
        """Return how to shard a parameter; dimension 1 of gate and up tells the two apart."""
        whole = (1,) if parameter in gate_and_up else ()
        return Shard(shard_dim(parameter, num_shards, whole=whole))

    # Reshard the outermost unit too: if an evaluation left it gathered, it would miss the optimizer
    # step that follows.
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
    if replicas is not None:
        setattr(module, REPLICA_DTYPE, replica_dtype)
        module.set_all_reduce_hook(
            partial(_sum_in_dtype, group=replicas, dtype=cast(torch.dtype, replica_dtype))
        )


def _gate_and_up_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of built-in experts in a module that hold gate and up together."""
    for experts in module.modules():
        if isinstance(experts, StackedExperts):
            for name, parameter in experts.named_parameters(recurse=False):
                if name in experts.paired:
                    yield parameter


def _sum_in_dtype(gradient: Tensor, *, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Sum a gradient over a group, in place, with messages in `dtype`."""
    sent = gradient.to(dtype)
    dist.all_reduce(sent, group=group)
    gradient.copy_(sent)


def shard_dim(parameter: Tensor, parts: int, whole: Collection[int] = ()) -> int:
    """Return the dimension along which to shard a parameter over data-parallel ranks.

    The first choice is a dimension that divides evenly and that no model axis splits: any reader of
    a checkpoint understands such shards. The second is any dimension that divides evenly, and the
    last is dimension 0.

    Args:
        parameter: the parameter, perhaps already sharded over model axes.
        parts: number of shards.
        whole: dimensions that must not be split, such as the one that holds gate and up.
    """
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    split_dims = {place.dim for place in placements if isinstance(place, Shard)}
    sizes = local_part(parameter).shape
    even_dims = [dim for dim, size in enumerate(sizes) if size % parts == 0 and dim not in whole]
    for dim in even_dims:
        if dim not in split_dims:
            return dim
    return even_dims[0] if even_dims else 0


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
    """Scale all gradients in place so that their norm is at most `max_norm`, like torch's function
    of the same name.

    Parameters may be plain tensors and DTensors of several meshes. If they are more than one of
    these kinds, or experts are spread over a mesh, all ranks must call this together. They get the
    same number, the norm of the whole model, at the cost of one message. Otherwise torch's function
    is called.

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
    if isinstance(model, nn.Module):
        check_optimizers(model)
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    meshes = {
        parameter.device_mesh if isinstance(parameter, DTensor) else None
        for parameter in parameters
    }
    # Experts that are spread over a mesh differ between ranks.
    has_one_kind = len(meshes) < 2 and not any(map(is_spread, parameters))
    if mesh is None and group is None and has_one_kind:
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
    """Return the norm of the whole gradient, (), the same on all ranks that together hold the
    model.

    norm^p = sum over ranks, over parameters of |this rank's part|^p / (ranks that hold the same
    part)

    Args:
        parameters: those of the model or of this rank's pipeline stage. A parameter without a
            gradient counts as zero.
        norm_type: p.
        mesh: the ranks that hold these parameters, whole or in parts; None for the whole world.
        group: the ranks that together hold the model, in all pipeline stages; None for the ranks of
            `mesh`.
    """
    parameters = list(parameters)
    with_gradient = [
        (parameter, parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    holders = world if mesh is None else mesh.grid.world
    if group is None and mesh is not None:
        group = mesh.process_group
    if world == 1:
        gradients = [local_part(gradient) for _, gradient in with_gradient]
        return nn.utils.get_total_norm(gradients, norm_type)

    parts_by_copies: dict[int, list[Tensor]] = {}
    for parameter, gradient in with_gradient:
        part = local_part(gradient)
        if part.numel():
            copies = num_copies(gradient, _holders(parameter, holders))
            parts_by_copies.setdefault(copies, []).append(part)

    is_maximum = math.isinf(norm_type)
    device = parameters[0].device if parameters else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, parts in parts_by_copies.items():
        norm = nn.utils.get_total_norm(parts, norm_type).double()
        total = torch.maximum(total, norm) if is_maximum else total + norm.pow(norm_type) / copies
    if is_maximum:
        total = total.nan_to_num(nan=math.inf)  # a maximum over ranks may drop NaN
    from moesaic.comm.waits import said

    operation = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
    with said(group, "the norm of all gradients"):
        dist.all_reduce(total, operation, group=group)
    return total if is_maximum else total.pow(1 / norm_type)


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`.

    Args:
        parameters: the model's parameters.
        norm: their norm, from `gradient_norm`.
        limit: the largest allowed norm.
    """
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # torch adds the same, against norms of 0
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


def _holders(parameter: nn.Parameter, world: int) -> int:
    """Return how many ranks hold a parameter, whole or in part: all of the `world`, unless the
    parameter says how many, as experts do that are modules of the user's own."""
    return copies_of(parameter) or world
