"""What data-parallel ranks hold of a model: over which of them it is sharded, and what each holds
whole between the micro-batches of a step.

The rule behind `auto` counts bytes before anything is allocated: 4 for each weight, 4 for its
gradient and 8 for its two moments, divided by the ranks that share it, and the whole copies that a
rank holds meanwhile. They may fill half of a rank's memory, in the pipeline stage that has most of
them; activations have the other half. The first way that fits is taken, from the one that sends
least to the one that holds least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import nn

from moesaic.comm.mesh import Mesh, Sharding
from moesaic.layer import MoE
from moesaic.measure.compute import memory_gib
from moesaic.models.gpt import GPT
from moesaic.parallel import Held
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.pipeline import parts_of
from moesaic.train.ranks import Ranks

SHARE = 0.5
"""Share of a rank's memory that parameters, gradients and optimizer states may fill."""
STATES = 4
"""Numbers that a trained weight has: itself, its gradient and AdamW's two moments."""


@dataclass(frozen=True)
class Holding:
    """How data-parallel ranks hold a model."""

    shard: Sharding
    """Over which ranks it is sharded."""
    hold: Held
    """What each rank holds whole between micro-batches."""


def choose_holding(config: TrainConfig, model: nn.Module, ranks: Ranks) -> Holding:
    """Return how the ranks hold a model, the same on all of them, which call this together.

    Args:
        config: its `mesh` may leave the choice open.
        model: the whole model, on any device.
        ranks: the ranks, on a mesh.
    """
    mesh = ranks.mesh
    assert mesh is not None
    options = _options(config.mesh, mesh)
    if len(options) == 1:
        return options[0]
    memory = min(ranks.gathered(_memory(mesh)))
    stages = [model]
    if isinstance(model, GPT) and config.mesh.pp > 1:
        stages = [
            # whose autocast dtype does not count here
            nn.ModuleList(parts_of(model, config, stage, dtype=torch.float32))
            for stage in range(config.mesh.pp)
        ]
    for option in options:
        sharded = replace(mesh, shard=option.shard)
        if max(bytes_held(option, stage, sharded) for stage in stages) <= SHARE * memory:
            return option
    return options[-1]  # none fits: the one that holds least


def bytes_held(holding: Holding, model: nn.Module, mesh: Mesh) -> int:
    """Return the bytes of parameters, gradients, optimizer states and whole copies of them that a
    rank holds at most.

    Args:
        holding: how they are held.
        model: the whole model, or the parts of it in a pipeline stage.
        mesh: the mesh of the ranks that share it, with the sharding of `holding`.
    """
    grid = mesh.grid
    experts: set[nn.Parameter] = set()
    for layer in model.modules():
        if isinstance(layer, MoE):
            experts.update(layer.experts.parameters())
    # parameters and gradients, gradients alone, or neither
    copies = {"parameters": 2, "gradients": 1, "nothing": 0}[holding.hold]
    total = 0.0
    for parameter in model.parameters():
        axis: Literal["dp", "edp"] = "edp" if parameter in experts else "dp"
        # over how many ranks the parameter is split before it is sharded
        split = grid.ep * grid.etp if axis == "edp" else grid.tp
        shards = mesh.shards_of(axis)
        whole_copies = copies if shards > 1 else 0  # a single shard is whole anyway
        states = STATES if parameter.requires_grad else 1  # a frozen one has itself alone
        total += parameter.nbytes / split * (states / shards + whole_copies)
    return int(total)


def _options(config: MeshConfig, mesh: Mesh) -> list[Holding]:
    """Return the ways that a configuration leaves open, from the one that sends least.

    Where tensor parallelism fills the nodes, FSDP2 shards over all ranks: nothing is left to shard
    inside a node.
    """
    grid = mesh.grid
    shardings: tuple[str, ...] = (config.shard,)
    holds: tuple[str, ...] = (config.hold,)
    if config.shard == "auto":
        spans_nodes = (grid.ranks_per_node or grid.world) < grid.world
        shards_in_node = replace(mesh, shard="node").shards_of("dp")
        # with one shard in each node, all nodes hold replicas, but not where tp fills them
        can_shard_in_node = spans_nodes and (shards_in_node > 1 or grid.tp == 1)
        shardings = ("node", "all") if can_shard_in_node else ("all",)
    if config.hold == "auto":
        holds = ("parameters", "gradients", "nothing")
        # stages, and gradients rounded between replicas, need gradients held until the step's end
        if config.pp > 1 or config.replica_precision != "as gradients":
            holds = ("parameters", "gradients")
    options = []
    for shard in shardings:
        for hold in holds:
            options.append(Holding(cast(Sharding, shard), cast(Held, hold)))
    return options


def _memory(mesh: Mesh) -> float:
    """Return the bytes of this rank's memory: its GPU's, or its share of the machine's."""
    if mesh.device.type == "cuda":
        return float(torch.cuda.get_device_properties(mesh.device).total_memory)
    ranks_of_machine = mesh.grid.ranks_per_node or mesh.grid.world
    return memory_gib(ranks_of_machine) * 2**30
