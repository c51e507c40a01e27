"""Adapters of the experts of a frozen model: what is trained, and how a rank reads its part of the
frozen weights.

The model is that of another run. Its experts become NF4 (`FourBitExperts`) weight by weight as they
are read; all else stays as it is. Checkpoints hold no frozen parameter, so a run is read together
with the run that it adapts.
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
    targets = {
        f"model.{n}": t.detach()
        for n, t in model.state_dict().items()
        if not n.startswith(prefixes)
    }
    stored = {name for name in shard_sizes(saved.folder) if name.startswith("model.")}
    of_experts = {
        (path, field): f"model.{path}.{name}"
        for path, each in experts.items()
        for field, name in _stored_names(each)
    }
    if stored != targets.keys() | set(of_experts.values()):
        raise InputError(
            f"adapters.base: {saved.folder} holds adapters, not a whole model: name the run "
            "that it adapts"
        )
    read_into(saved.folder, targets)
    for (path, field), name in of_experts.items():
        parameter = experts[path].get_parameter(NAMES[field])
        local = local_part(parameter.detach())
        is_matrix = field in ("up", "down")
        width = local.shape[-1] * (2 if is_matrix else 1)
        whole = local.new_empty(*local.shape[:-1], width, dtype=torch.float32)
        read_into(saved.folder, {name: _as_stored(whole, parameter, experts[path], field)})
        if not is_matrix:
            local.copy_(whole)
            continue
        scales = local_part(experts[path].get_parameter(NAMES[f"{field}_scales"]).detach())
        for expert, weight in enumerate(whole):
            codes, of_blocks = nf4.quantize(weight)
            local[expert].copy_(codes)
            scales[expert].copy_(of_blocks)


def _stored_names(experts: FourBitExperts) -> list[tuple[str, str]]:
    """Return the frozen fields besides scales, each with the name under which built-in experts
    store it."""
    up = "13" if experts.gated else "1"
    names = {"up": f"w{up}", "down": "w2", "up_bias": f"b{up}", "down_bias": "b2"}
    return [(field, name) for field, name in names.items() if experts.form.has(field)]


def _as_stored(whole: Tensor, parameter: Tensor, experts: FourBitExperts, field: str) -> Tensor:
    """Return a tensor of this rank's part of a weight as a view that is sharded and shaped as
    checkpoints store it."""
    if isinstance(parameter, DTensor):
        whole = DTensor.from_local(
            whole, parameter.device_mesh, parameter.placements, run_check=False
        )
    return whole if experts.gated or not field.startswith("up") else whole.squeeze(1)
