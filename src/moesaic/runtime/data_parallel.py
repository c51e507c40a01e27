"""Data parallelism around a layer: averaging gradients over a mesh without FSDP, and the ranks that
train a layer on no mesh.

On a mesh, a local backward pass produces dense gradients for the rank's data-parallel group. Expert
gradients are sums over all tokens of one copy of the experts. If the loss is a mean over each
group's tokens, the global gradient is the dense sum over dp and the expert sum over edp, both
divided by dp. No factor depends on ep, etp or tp.

If a layer is on no mesh, each rank under DDP or FSDP2 has tokens of its own (`DataRanks`).
Quantities over all tokens are then summed over these ranks: the load that a router adapts to, and
the counts of a loss over the global batch. Counting the copies of a rank several times (over a
tensor-parallel dimension, for example) changes neither.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from moesaic.comm.collectives import all_reduce_sum, check_same
from moesaic.comm.mesh import Mesh
from moesaic.errors import InputError
from moesaic.experts import AbstractExperts
from moesaic.experts.experts import StackedExperts
from moesaic.initial_values import is_dtensor
from moesaic.program.grid import Axis

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module from which DDP reads the names of parameters that it leaves alone."""
REPLICAS = "_moesaic_replicas"
"""Attribute of a model whose whole copies of parameters `Replicas` averages."""
BUCKET_BYTES = 32 * 2**20
"""Largest size of a bucket of gradients, unless a single gradient is larger. One message per
gradient would cost its latency each."""


def expert_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of all experts that are spread over a mesh. Shared experts are left out:
    they are dense layers."""
    for part in module.modules():
        if isinstance(part, AbstractExperts) and part.is_spread:
            yield from part.parameters()


def check_optimizers(module: nn.Module) -> None:
    """Raise InputError if an optimizer holds parameters that were replaced when the module's
    experts were spread."""
    for part in module.modules():
        if isinstance(part, AbstractExperts):
            part.replaced.check()


@torch.no_grad()
def average_gradients(module: nn.Module, mesh: Mesh) -> None:
    """Make the gradients of a module those of the mean over all ranks' tokens. Call it once, before
    the optimizer step.

    All ranks call it together. A parameter without a gradient on this rank counts as zero, so ranks
    need not agree on which parameters have one.

    Args:
        module: a module with its MoE layers on the mesh and no part wrapped by FSDP or DDP, which
            average by themselves.

    Raises:
        InputError: `mesh` is no `Mesh`; an optimizer was made before the experts were spread, so
            that it would train none; in the first call with a module, on every rank, if ranks
            froze different parameters.
    """
    if not isinstance(mesh, Mesh):
        raise InputError(
            f"average_gradients: mesh={mesh!r} is no Mesh: give the mesh of the module's layers"
        )
    check_optimizers(module)
    _check_frozen(module, mesh)
    _average_parameters(module, mesh, dense=True, experts=True)


class _Compared(weakref.WeakSet[nn.Module]):
    """Modules of which all ranks of a mesh have compared what is frozen."""


def _check_frozen(module: nn.Module, mesh: Mesh) -> None:
    """Raise InputError on every rank if ranks froze different parameters, once for a module: their
    messages would differ in size, or mix parameters. Experts that are modules may differ."""
    compared: _Compared = mesh.shared.setdefault(_Compared, _Compared())
    if module in compared:
        return
    may_differ = set[int]()
    for part in module.modules():
        if isinstance(part, AbstractExperts) and not isinstance(part, StackedExperts):
            may_differ.update(id(parameter) for parameter in part.parameters())
    settings = {
        f"requires_grad of {name}": parameter.requires_grad
        for name, parameter in module.named_parameters()
        if id(parameter) not in may_differ
    }
    advice = dict.fromkeys(settings, "freeze the same parameters on every rank")
    mesh.transport.doing = "average_gradients"
    check_same(mesh.transport, settings, advice=advice)
    mesh.transport.doing = ""
    compared.add(module)


def _average_parameters(
    module: nn.Module, mesh: Mesh, *, dense: bool, experts: bool, dtype: torch.dtype | None = None
) -> None:
    """Average the gradients of a module's dense parameters, of its spread experts, or of both, sent
    in `dtype`; see `average_gradients`."""
    expert_ids = {id(parameter) for parameter in expert_parameters(module)}
    buckets: dict[tuple[Axis, torch.dtype], list[Tensor]] = {}
    # by name, since ranks may have registered them in different orders
    for _, parameter in sorted(module.named_parameters()):
        is_expert = id(parameter) in expert_ids
        is_averaged = experts if is_expert else dense
        if not is_averaged or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        local: Tensor = gradient.to_local() if is_dtensor(gradient) else gradient
        axis: Axis = "edp" if is_expert else "dp"
        bucket = buckets.setdefault((axis, local.dtype), [])
        is_too_large = sum(member.nbytes for member in bucket) + local.nbytes > BUCKET_BYTES
        if bucket and is_too_large:
            _average(buckets.pop((axis, local.dtype)), axis, mesh, dtype)
            bucket = buckets.setdefault((axis, local.dtype), [])
        bucket.append(local)
    for (axis, _), bucket in buckets.items():
        _average(bucket, axis, mesh, dtype)


def _average(
    gradients: list[Tensor], axis: Axis, mesh: Mesh, dtype: torch.dtype | None = None
) -> None:
    """Sum gradients of one dtype over an axis, in one all-reduce in `dtype` (None: in theirs), and
    divide them by dp, in place."""
    flat = [gradient.flatten() for gradient in gradients]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat)
    sent = joined if dtype is None else joined.to(dtype)
    mesh.transport.doing = f"average_gradients of {joined.numel():,} values of {joined.dtype}"
    summed = all_reduce_sum(mesh.transport, mesh.grid.group(mesh.rank, (axis,)), sent)
    mesh.transport.doing = ""
    averages = summed.to(joined.dtype) / mesh.grid.dp
    lengths = [gradient.numel() for gradient in gradients]
    for gradient, average in zip(gradients, averages.split(lengths)):
        gradient.copy_(average.view_as(gradient))


class Replicas:
    """Parameters that ranks hold as whole copies while a wrapper takes care of the others: their
    gradients are averaged when a backward pass ends, once for all micro-batches of a step.

    Gradients of several backward passes add up on each rank until one whose gradients are to be
    averaged, as under DDP's `no_sync`. All ranks average then, in one order, whichever parameters
    got a gradient.

    Args:
        model: the model, whose MoE layers are on `mesh`.
        mesh: the ranks.
        dense: whether dense parameters are such copies, and
        experts: whether experts are.
        dtype: dtype in which gradients are sent; None for their own.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        dense: bool,
        experts: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.averages = True
        """Whether the gradients are averaged when the next backward pass ends."""
        self._model = model
        self._mesh = mesh
        self._dense = dense
        self._experts = experts
        self._dtype = dtype
        self._is_summing = False
        """Whether gradients of a backward pass were added up since the last average."""
        self._is_expected = False
        """Whether a backward pass has begun and not ended."""
        # imported here, since it imports the compiler, which one process does not need
        from moesaic.runtime.graph_breaks import outside_graphs

        self._outside_graphs = outside_graphs
        """Calls a `partial` outside of the graphs of `torch.compile`."""

    @classmethod
    def at(cls, module: nn.Module) -> list[Replicas]:
        """Return the replicas whose model is this module."""
        found = getattr(module, REPLICAS, None)
        return [] if found is None else [found]

    def attach(self) -> None:
        """Watch the backward passes of the model: those that reach its output, or that of one of
        its MoE layers."""
        setattr(self._model, REPLICAS, self)
        self._model.register_forward_hook(self._watch_model)
        for module in self._model.modules():
            if isinstance(module, AbstractExperts):
                module.register_forward_hook(self._watch)

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients now. All ranks call it together."""
        self._is_expected = False
        self._is_summing = False
        _average_parameters(
            self._model, self._mesh, dense=self._dense, experts=self._experts, dtype=self._dtype
        )

    def _watch_model(self, _: nn.Module, __: Any, output: Any) -> None:
        """Note a pass of the model, as a forward hook."""
        self._outside_graphs(partial(self._note_pass, output))

    def _watch(self, _: nn.Module, __: Any, output: Any) -> None:
        """Note the output of a layer's experts, as a forward hook."""
        self._outside_graphs(partial(self._note_output, output))

    def _note_pass(self, output: Any) -> None:
        """Note the output of a forward pass of the model, and whether the gradients of its backward
        pass are to be averaged."""
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is not None:
            self.averages = bool(wrapper.require_backward_grad_sync)  # False under `no_sync`
        self._is_expected = False  # of a backward pass that ended in an error
        self._note_output(output)

    def _note_output(self, output: Any) -> None:
        """Have the backward pass through an output noticed."""
        for part in tree_leaves(output):
            if isinstance(part, Tensor) and part.requires_grad:
                part.register_hook(self._begin)

    @torch.no_grad()
    def _begin(self, _: Tensor) -> None:
        """Expect the end of a backward pass."""
        if self._is_expected:  # it has begun at another output
            return
        self._is_expected = True
        grid = self._mesh.grid
        if not self._is_summing and self._experts and grid.edp != grid.dp:
            # Gradients that are still there were averaged, and the next average, which sums edp
            # equal ones and divides by dp, must leave them as they are.
            for parameter in expert_parameters(self._model):
                if parameter.grad is not None:
                    parameter.grad *= grid.dp / grid.edp
        self._is_summing = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Average the gradients at the end of a backward pass, if they are to be averaged."""
        if self._is_expected and self.averages:
            self.average()
        self._is_expected = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        return Replicas(
            copy.deepcopy(self._model, memo),
            self._mesh,
            dense=self._dense,
            experts=self._experts,
            dtype=self._dtype,
        )


Group = dist.ProcessGroup | Literal["auto"] | None
"""The ranks that train a layer together: a process group, "auto" to detect them, or None for this
process alone."""


class DataRanks:
    """The ranks that train one layer on tokens of their own. Copied or unpickled, it forgets them
    and detects them anew."""

    def __init__(self) -> None:
        self._groups: tuple[dist.ProcessGroup, ...] | None = None
        """The process groups over which counts are summed, one after the other; (): this process
        trains alone; None: not known yet."""
        self._is_fixed = False
        """Whether the user gave the group."""

    def settle(self, group: Group, parameters: Iterable[nn.Parameter] = ()) -> None:
        """Set the ranks, or detect them from the parameters.

        Args:
            group: the user's argument; "auto" keeps an earlier group that was given.
            parameters: the layer's parameters; FSDP2's sharded ones have a device mesh of the
                ranks.
        """
        if group != "auto":
            self._groups = () if group is None else (group,)
            self._is_fixed = True
        elif not self._is_fixed:
            for parameter in parameters:  # the first that is sharded tells
                if not is_dtensor(parameter):
                    continue
                if any(placement.is_shard() for placement in parameter.placements):
                    self._groups = tuple(parameter.device_mesh.get_all_groups())
                    return

    def note_wrapper(self) -> None:
        """Take the ranks of the DDP wrapper that is in its forward pass, if any."""
        if self._groups is None and _world() > 1 and not torch.compiler.is_compiling():
            wrapper = DistributedDataParallel._get_active_ddp_module()
            if wrapper is not None:
                self._groups = (wrapper.process_group,)

    def total(self, counts: Tensor, purpose: str) -> Tensor:
        """Return the sum over the ranks. All of them call this together.

        Args:
            counts: (n,) int64 of this rank.
            purpose: the use of the counts, for the error message.

        Raises:
            InputError: if there are several processes, and it is unknown which of them train the
                layer.
        """
        if _world() == 1:
            return counts
        if self._groups is None:
            raise InputError(
                f"{purpose} spans the tokens of all ranks, and which of the {_world()} processes "
                "train this layer together is unknown: call balance_on_step(optimizer, model) on "
                "the model that DDP or FSDP2 has wrapped, or pass it group=a process group, or "
                "group=None if each process trains alone"
            )
        total = counts.clone()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> DataRanks:
        return DataRanks()

    def __reduce__(self) -> tuple[type[DataRanks], tuple[()]]:
        return DataRanks, ()


class UnpreparedForDDP:
    """What a module has in place of the names of parameters that DDP ignores, until `prepare_ddp`
    sets them.

    DDP reads the names of the module that it wraps first of all. Without them it fails later on, in
    words about DTensors.
    """

    REFUSAL = (
        "DDP would give all ranks the first one's experts, which are spread over a mesh: call "
        "moesaic.prepare_ddp(model, mesh) before DDP wraps the model"
    )

    def __iter__(self) -> Iterator[str]:
        raise InputError(self.REFUSAL)

    @classmethod
    def mark(cls, module: nn.Module) -> None:
        """Mark a module some of whose experts are spread, unless somebody chose what DDP ignores in
        it."""
        if not hasattr(module, DDP_IGNORES):
            setattr(module, DDP_IGNORES, cls())


def wrapped_by_ddp(model: nn.Module) -> dict[nn.Module, dist.ProcessGroup]:
    """Return the process group of each module that is wrapped by DDP in `model`."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return {module: wrapper.process_group for wrapper in wrappers for module in wrapper.modules()}


def _world() -> int:
    """Return the number of processes; 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
