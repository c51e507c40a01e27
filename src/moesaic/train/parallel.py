"""Sharding of our models over a mesh: tensor parallelism of the dense part, expert parallelism by
the MoE layers, then FSDP2.

A model that is on the meta device is split there; each rank then allocates and draws only its part.

Tensor parallelism (tp) is written as DTensor placements: `Shard(d)` splits dimension d over the
ranks, `Replicate()` gives each the whole, and of `Partial()` tensors the ranks' sum is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from moesaic.comm.mesh import Mesh
from moesaic.layer import MoE
from moesaic.models.attention import Attention, ShortConv
from moesaic.models.gpt import GPT, Dense, LearnedPositions
from moesaic.models.split import LayerNorm, Norm, RowLinear, StackedLinear
from moesaic.parallel import parallelize_layers, shard_over_data
from moesaic.policies import CallsOf
from moesaic.program.plan import Plan
from moesaic.train.pipeline import PipelinedGPT


def parallelize(
    model: GPT | PipelinedGPT,
    mesh: Mesh,
    plan: Plan,
    *,
    sequence_parallel: bool = False,
    calls: CallsOf | None = None,
    dtype: torch.dtype | None = None,
    replica_dtype: torch.dtype | None = None,
) -> None:
    """Split a model over a mesh, in place.

    Args:
        model: the full model, identical on all ranks, or this pipeline stage's parts of it; on its
            device or on meta.
        sequence_parallel: give each rank of a tp group a part of the positions between layers.
        calls: as for `MoE.parallelize`.
        dtype, replica_dtype: as for `shard_over_data`.

    Raises:
        InputError: for a plan that the mesh or a layer does not support.
    """
    parallelize_layers(model, mesh, plan, calls=calls)
    if mesh.grid.tp > 1:
        split_dense(model, mesh.dense["tp"], by_position=sequence_parallel)
    for model_part in model.parts if isinstance(model, PipelinedGPT) else [model]:
        shard_over_data(
            model_part, mesh, model_part.blocks.children(), dtype=dtype, replica_dtype=replica_dtype
        )


def split_dense(model: GPT | PipelinedGPT, tp: DeviceMesh, *, by_position: bool) -> None:
    """Split attention by heads, dense layers by their inner width, and the embedding by vocabulary;
    replicate the rest.

    This is Megatron-LM's scheme (Shoeybi et al. 2019, section 3): column-wise, then row-wise, with
    one sum per pair. `by_position` adds its sequence parallelism (Korthikanti et al. 2022, section
    4.2.2), where norms and residuals see a part of the positions. The short convolution and the MoE
    layers need all positions, so their inputs are gathered and their outputs split.

    Args:
        model: a model with `num_heads` and inner width divisible by the mesh size, and positions
            too if they are split.
        tp: a mesh of one dimension.
        by_position: split positions between the layers.
    """
    # activations between the layers, (batch, positions, dim)
    outside: Placement = Shard(1) if by_position else Replicate()
    # by name of the module; `SplitParameters` gets the dimension that is split by name of parameter
    styles: dict[str, ParallelStyle] = {}
    if hasattr(model, "embedding"):
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    if getattr(model, "unembedding", None) is not None:
        styles["unembedding"] = SplitParameters(
            {"weight": 0}, input_layout=None, output_layout=None
        )
    for name, module in model.named_modules():
        if isinstance(module, StackedLinear):
            inputs = Replicate() if module.input_is_whole else outside
            styles[name] = SplitParameters(
                {"weight": 1, "bias": 1}, input_layout=inputs, output_layout=None
            )
        elif isinstance(module, RowLinear):
            styles[name] = SplitParameters({"weight": 1}, input_layout=None, output_layout=outside)
        elif isinstance(module, Dense):
            dims = _split_dims(module)
            styles[name] = SplitParameters(dims, input_layout=outside, output_layout=outside)
        elif isinstance(module, Attention):
            for norm in (module.q_norm, module.k_norm):
                if norm is not None:  # each rank normalises its own heads
                    norm.different_over = tp
    parallelize_module(model, tp, styles, src_data_rank=None)
    if by_position:
        _split_between_layers(model, tp)


def _split_dims(dense: Dense) -> dict[str, int]:
    """Return the dimension that is split of each of a dense layer's parameters that are split."""
    expert = dense.expert
    sharded, _ = expert.names  # those that shards of an expert split, and those held in common
    dims = {}
    for name in sharded:
        dim = expert.shard_dim(name)
        if dim is not None:
            dims[name] = dim
    return dims


def _split_between_layers(model: GPT | PipelinedGPT, tp: DeviceMesh) -> None:
    """Let modules of a model, whose ranks have a part of the positions between layers, gather what
    they need whole, and split it again."""
    for module in model.modules():
        if isinstance(module, Norm | LayerNorm):
            module.different_over = tp
        if isinstance(module, MoE | ShortConv | LearnedPositions):
            module.register_forward_pre_hook(partial(_gather_positions, tp))
            module.register_forward_hook(partial(_split_positions, tp))
    # what the last norms return is gathered too; a pipeline stage may lack them
    for name in getattr(model, "last_norms", GPT.last_norms):
        if hasattr(model, name):
            norm = getattr(model, name)
            norm.register_forward_hook(lambda _, __, y: move(y, tp, Shard(1), Replicate()))


class SplitParameters(ParallelStyle):
    """A parallel style for modules that compute on plain tensors with their shards of their
    parameters.

    It covers `ColwiseParallel`, `RowwiseParallel` and both combined.

    Args:
        dims: parameter name (without the path) to the dimension that is split. Other parameters are
            replicated.
        input_layout: placement of the module's input, which is gathered for every rank; None for an
            input that is split as the weight needs it.
        output_layout: placement that the sum of the ranks' outputs gets; None for outputs that are
            not partial sums.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        *,
        input_layout: Placement | None,
        output_layout: Placement | None,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.input_layout = input_layout
        self.output_layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Let the module compute with its part: its input is gathered, its output summed or
        scattered."""

        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            """Gather the input; its gradients are summed."""
            assert self.input_layout is not None
            x, *others = inputs
            return (move(x, mesh, self.input_layout, Replicate(), gradient=Partial()), *others)

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            """Sum the parts of the output."""
            assert self.output_layout is not None
            return move(output, mesh, Partial(), self.output_layout)

        return distribute_module(
            module,
            device_mesh,
            partition_fn=self._partition,
            input_fn=None if self.input_layout is None else enter,
            output_fn=None if self.output_layout is None else leave,
        )

    def _partition(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Replace the parameters by their parts on the ranks."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name not in self.dims:
                continue
            placement: Placement = Shard(self.dims[name])
            # sends nothing (`src_data_rank=None`), since all ranks have the same parameter
            split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )


def move(
    x: Tensor,
    mesh: DeviceMesh,
    source: Placement,
    target: Placement,
    gradient: Placement | None = None,
) -> Tensor:
    """Return this rank's part of a tensor after changing its placement; differentiable.

    Args:
        x: this rank's part of the tensor before the change, split evenly if it is split.
        source: the tensor's placement on the mesh.
        target: the new placement.
        gradient: placement of the result's gradient; None for the same as the result.
    """
    before = DTensor.from_local(x, mesh, [source], run_check=False)
    after = before.redistribute(placements=[target])
    return after.to_local(grad_placements=None if gradient is None else [gradient])


def _gather_positions(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (move(inputs[0], mesh, Shard(1), Replicate()), *inputs[1:])


def _split_positions(mesh: DeviceMesh, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    """Return a module's output with this rank's positions alone, as a forward hook; of several
    outputs only the first is split."""
    if isinstance(output, tuple):
        return (move(output[0], mesh, Replicate(), Shard(1)), *output[1:])
    return move(output, mesh, Replicate(), Shard(1))
