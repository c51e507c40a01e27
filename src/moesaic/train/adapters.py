"""Adapters of the experts of a frozen model: what is trained, and how a rank reads its part of the
frozen weights.

The model is that of another run. Its experts become NF4 (`FourBitExperts`) weight by weight as they
are read; all else stays as it is. Checkpoints hold no frozen parameter, so a run is read together
with the run that it adapts.

A field is one kind of an expert's weights (up, down and their biases). In NF4 a matrix has 4-bit
codes, two to a byte, and a scale for each block of 64 weights; biases are kept as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.errors import InputError
from moesaic.experts import FourBitExperts
from moesaic.experts.experts import StackedExperts
from moesaic.experts.four_bit import NAMES
from moesaic.kernels import nf4
from moesaic.layer import MoE
from moesaic.models.config import ModelConfig
from moesaic.models.split import local_part
from moesaic.program.grid import Grid
from moesaic.train.checkpoint import Checkpoint, require_architecture
from moesaic.train.config import AdaptersConfig
from moesaic.train.distributed_checkpoint import read_into, shard_sizes


def freeze(model: nn.Module, config: AdaptersConfig, grid: Grid | None) -> None:
    """Give each MoE layer experts in NF4 with adapters, and freeze all other parameters; before the
    model is split.

    Raises:
        InputError: there are no experts, a width of theirs is no multiple of 64, or the mesh keeps
            several copies of one.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise InputError("adapters.base: a dense model has no experts to adapt: leave it out")
    if grid is not None and grid.edp > 1:
        raise InputError(
            f"adapters.base: the mesh keeps {grid.edp} copies of each expert: choose mesh.ep and "
            f"mesh.etp whose product is {grid.ep * grid.etp * grid.edp}"
        )
    for layer in layers:
        assert isinstance(layer.experts, StackedExperts)
        layer.experts = FourBitExperts.like(layer.experts, rank=config.rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("_lora_" in name)


@torch.no_grad()
def read_frozen(saved: Checkpoint, model: nn.Module, config: ModelConfig, vocab_size: int) -> None:
    """Read this rank's part of a checkpoint into the frozen parameters and the buffers of a model
    after `freeze`.

    Raises:
        InputError: the checkpoint is of another architecture, or of a run with adapters.
    """
    require_architecture(saved, config, vocab_size)
    experts = {
        name: module for name, module in model.named_modules() if isinstance(module, FourBitExperts)
    }
    prefixes = tuple(f"{name}." for name in experts)
    other_tensors = {
        f"model.{name}": tensor.detach()
        for name, tensor in model.state_dict().items()
        if not name.startswith(prefixes)
    }
    names_in_file: dict[tuple[str, str], str] = {}  # by path of the experts, and field
    for path, module in experts.items():
        for field, name in _stored_names(module):
            names_in_file[path, field] = f"model.{path}.{name}"

    stored = {name for name in shard_sizes(saved.folder) if name.startswith("model.")}
    if stored != other_tensors.keys() | set(names_in_file.values()):
        raise InputError(
            f"adapters.base: {saved.folder} holds adapters, not a whole model: name the run "
            "that it adapts"
        )
    read_into(saved.folder, other_tensors)
    for (path, field), name in names_in_file.items():
        _read_field(saved, experts[path], field, name)


def _read_field(saved: Checkpoint, experts: FourBitExperts, field: str, name: str) -> None:
    """Read this rank's part of one field of experts, whose tensor is called `name` in the
    checkpoint; of matrices, store codes and scales."""
    parameter = experts.get_parameter(NAMES[field])  # `NAMES`: the parameter of each field
    local = local_part(parameter.detach())
    is_matrix = field in ("up", "down")
    width = 2 * local.shape[-1] if is_matrix else local.shape[-1]  # a byte has two codes
    weights = local.new_empty(*local.shape[:-1], width, dtype=torch.float32)
    # what is read into the view is then in `weights`
    read_into(saved.folder, {name: _as_stored(weights, parameter, experts, field)})
    if not is_matrix:
        local.copy_(weights)
        return
    scales = local_part(experts.get_parameter(NAMES[f"{field}_scales"]).detach())
    for expert, weight in enumerate(weights):
        codes, scales_of_blocks = nf4.quantize(weight)
        local[expert].copy_(codes)
        scales[expert].copy_(scales_of_blocks)


def _stored_names(experts: FourBitExperts) -> list[tuple[str, str]]:
    """Return the frozen fields besides scales, each with the name under which built-in experts
    store it."""
    # gated experts stack w1 (gate) and w3 (up) as w13; plain ones have w1 (up) alone
    up = "13" if experts.gated else "1"
    names = {"up": f"w{up}", "down": "w2", "up_bias": f"b{up}", "down_bias": "b2"}
    return [(field, name) for field, name in names.items() if experts.form.has(field)]


def _as_stored(weights: Tensor, parameter: Tensor, experts: FourBitExperts, field: str) -> Tensor:
    """Return a tensor of this rank's part of a weight as a view that is sharded and shaped as
    checkpoints store it.

    Args:
        weights: this rank's part, not quantized.
        parameter: the frozen parameter that it belongs to, from which the sharding is taken.
    """
    if isinstance(parameter, DTensor):
        weights = DTensor.from_local(
            weights, parameter.device_mesh, parameter.placements, run_check=False
        )
    # dimension 1 of "up" is gate and up; without a gate, checkpoints lack that dimension
    lacks_gate = field.startswith("up") and not experts.gated
    return weights.squeeze(1) if lacks_gate else weights
