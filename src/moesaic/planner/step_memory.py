"""The memory of a training step on a rank, under the closed form of `step.py`.

A rank keeps bytes from the forward to the backward pass (activations), and needs further bytes
while a layer runs (buffers). States are parameters, gradients and the optimizer's moments. "Whole"
is before sharding over data-parallel ranks. Values are wide in the dtype of activations, and narrow
in that of products if it has fewer bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from moesaic.planner.rank_memory import Memory, layer_memory
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel, StepModel
from moesaic.planner.workload import Workload
from moesaic.program.compile import Compiled
from moesaic.program.sizes import CallSizes


def step_memory(
    cost_model: StepCostModel, compiled: Compiled, sizes: CallSizes | None = None
) -> Memory:
    """Return the memory of a rank.

    Besides its feed-forward layer, a block keeps what attention keeps and the inputs of two norms
    (Korthikanti et al. 2022, section 4.1, with fused scores). A recomputed part keeps only its
    input. Narrow products read weights by rows and by columns, which takes two copies besides the
    wide ones. They keep their inputs by columns only, in place of wide values that nothing else
    needs (Transformer Engine, "FP8 weight caching" and "Handling transposes").

    Args:
        compiled: the plan of MoE layers.
        sizes: of a call of the forward program; the rank with the most rows counts. None: even
            routing.
    """
    of_layer = layer_bytes(cost_model.simulator, cost_model.model.layer, compiled, sizes)
    return rank_memory(cost_model, *of_layer)


def layer_bytes(
    simulator: Simulator, layer: Workload, compiled: Compiled, sizes: CallSizes | None = None
) -> tuple[float, float]:
    """Return the bytes that an MoE layer keeps for its backward pass, and the most that it needs
    besides while it runs; arguments as of `step_memory`."""
    volumes = simulator.volumes(compiled.forward, layer, compiled.grid, sizes=sizes)
    kernel = "cpu" if simulator.cluster.host.runs_compute else "triton"
    budget = compiled.plan.memory_budget
    return layer_memory(compiled.forward, compiled.backward, volumes, budget, kernel=kernel)


def rank_memory(cost_model: StepCostModel, kept_bytes: float, buffers: float) -> Memory:
    """Return the memory of a rank at the moment at which it needs most, from the bytes that one of
    its MoE layers keeps, and needs besides while it runs.

    The moments are the loss; the backward pass of the last block, beside the activations of all
    blocks; and that of the first block, beside the gradients of all others. All gradients are there
    from the start if the step has several micro-batches, or they are not sharded like parameters.
    """
    model = cost_model.model
    kept = _kept_bytes(cost_model, kept_bytes)
    states, moving = _states(cost_model)
    logits = 0.0
    if model.outputs:
        logits = model.layer.tokens * model.vocab / cost_model.grid.tp
    # bytes; `loss_kept` and `logits_kept` are bytes per logit
    at_loss = logits * model.loss_kept / model.loss_chunks
    backward = kept.recomputed + buffers + logits * model.logits_kept
    # at the loss, or in the backward pass of the last block
    last = replace(states, activations=kept.blocks, buffers=moving + max(at_loss, backward))
    if not model.gathers_per_block or model.micro_batches > 1:
        return last
    # in the backward pass of the first block; the layer's buffers have its own experts' gradients
    _, expert_parameters = cost_model.block_parameters
    own_gradients = expert_parameters * model.parameter_bytes
    other_gradients = max(states.gradients - own_gradients, 0.0)
    first = replace(
        states, gradients=other_gradients, activations=kept.block, buffers=moving + backward
    )
    last = replace(last, gradients=0.0)
    return max(last, first, key=lambda memory: memory.total)


def _states(cost_model: StepCostModel) -> tuple[Memory, float]:
    """Return the parameters, gradients and optimizer states of a rank, and the bytes of whole
    parameters and gradients of blocks besides."""
    model = cost_model.model
    if not model.gathers_per_block:
        return _whole_states(cost_model), 0.0
    size = model.parameter_bytes
    held_parameters = cost_model.held_parameters  # those of the rank's shards
    whole_parameters = _sharded_parameters(cost_model)
    gathered_size = model.gathered_bytes or size
    # gathered parameters that the rank holds between micro-batches
    held = whole_parameters * gathered_size if model.held == "parameters" else 0.0
    whole_gradients = 0.0 if model.held == "nothing" else whole_parameters
    tables = model.moe_layers * model.table_bytes
    states = Memory(
        weights=held_parameters * size + _cast_bytes(cost_model) + held + tables,
        gradients=(held_parameters + whole_gradients) * size,
        optimizer=held_parameters * 2 * size,  # two moments
        activations=0.0,
        buffers=0.0,
    )
    # two blocks' parameters, one block's gradients, one block's narrow weights, and the embedding
    # and output, which stay whole from the forward to the backward pass; unless these are held
    dense, experts = cost_model.block_parameters
    shards, expert_shards = cost_model.num_shards
    gathered = (dense if shards > 1 else 0.0) + (experts if expert_shards > 1 else 0.0)
    root = cost_model.root_parameters if shards > 1 else 0.0
    moving = {  # by what a rank holds whole between micro-batches
        "nothing": (2 * gathered + root) * gathered_size + gathered * size,
        "gradients": (2 * gathered + root) * gathered_size,
        "parameters": 0.0,
    }
    narrow_bytes = 2 * model.narrow_bytes * (dense + experts)  # by rows and by columns
    return states, moving[model.held] + narrow_bytes


def _whole_states(cost_model: StepCostModel) -> Memory:
    """Return the parameters, gradients and optimizer states of a rank whose parameters are
    whole."""
    model = cost_model.model
    whole_parameters = cost_model.whole_parameters
    with_gradients = whole_parameters
    if model.sharded == "gradients":
        # Sharded gradients of one block are whole while they are reduced.
        with_gradients = cost_model.held_parameters + sum(cost_model.block_parameters)
    # weights in the dtype of activations, and two narrow copies of those that narrow products read;
    # the optimizer has the masters and two moments
    weights = whole_parameters * model.layer.element_bytes
    narrow_weights = 2 * model.narrow_bytes * _multiplied_parameters(cost_model)
    tables = model.moe_layers * model.table_bytes
    return Memory(
        weights=weights + narrow_weights + tables,
        gradients=with_gradients * model.parameter_bytes,
        optimizer=cost_model.stepped_parameters * 3 * model.parameter_bytes,
        activations=0.0,
        buffers=0.0,
    )


def _cast_bytes(cost_model: StepCostModel) -> float:
    """Return the bytes of copies of experts' parameters in the dtype of their products.

    FSDP2 gathers experts in that dtype; those that are whole are cast in the forward pass, and the
    copies kept for backward, of one layer at a time where blocks are recomputed.
    """
    model = cost_model.model
    _, expert_shards = cost_model.num_shards
    is_whole = expert_shards == 1 and not model.gathered_bytes
    if not is_whole or model.layer.element_bytes == model.parameter_bytes:
        return 0.0
    _, expert_parameters = cost_model.block_parameters
    # one layer if all blocks are recomputed, all layers if none is
    cast_layers = model.moe_layers - model.recomputed_share * (model.moe_layers - 1)
    return cast_layers * expert_parameters * model.layer.element_bytes


def _sharded_parameters(cost_model: StepCostModel) -> float:
    """Return how many of a rank's parameters, before sharding, are sharded over other ranks."""
    shards, expert_shards = cost_model.num_shards
    experts = cost_model.model.expert_parameters / (cost_model.grid.ep * cost_model.grid.etp)
    dense = cost_model.whole_parameters - experts
    return (dense if shards > 1 else 0.0) + (experts if expert_shards > 1 else 0.0)


class _Kept(NamedTuple):
    """Bytes that a rank keeps from forward to backward passes."""

    blocks: float
    """Of all blocks and micro-batches."""
    block: float
    """Of one block, on average."""
    recomputed: float
    """Of blocks that the backward pass recomputes together, while it does."""


def _kept_bytes(cost_model: StepCostModel, moe_bytes: float) -> _Kept:
    """Return the bytes that a rank keeps from forward to backward passes.

    Args:
        cost_model: of the rank.
        moe_bytes: bytes that one MoE layer's program keeps.
    """
    model = cost_model.model
    recomputed = model.recomputed
    # bytes of one value of every token
    value_bytes = model.layer.tokens * model.layer.element_bytes / cost_model.grid.tp
    dim = model.layer.dim
    around = _attention_bytes(cost_model, value_bytes)
    dense, sparse = _feed_forward_bytes(cost_model, value_bytes, moe_bytes)
    recomputed_norms = dim * value_bytes if "layernorm" in recomputed else 0.0
    dense_layers = model.num_layers - model.moe_layers
    blocks = (
        model.num_layers * (around - recomputed_norms)
        + model.moe_layers * sparse
        + dense_layers * dense
    )
    # `alive` micro-batches have their activations kept at once
    if "block" not in recomputed:  # parts of blocks at most
        return _Kept(
            blocks=cost_model.alive * blocks,
            block=blocks / model.num_layers,
            recomputed=moe_bytes if "moe" in recomputed else 0.0,
        )
    share = model.recomputed_share
    together = model.recomputed_together
    groups = share * model.num_layers / together  # of blocks, each of which keeps its input
    inputs = groups * dim * value_bytes
    return _Kept(
        blocks=cost_model.alive * (inputs + (1 - share) * blocks),
        block=dim * value_bytes,
        recomputed=together * (around + max(sparse, dense)),
    )


def _attention_bytes(cost_model: StepCostModel, value_bytes: float) -> float:
    """Return the bytes that a block keeps outside its feed-forward layer; `value_bytes`: bytes of
    one value of every token."""
    model = cost_model.model
    dim = model.layer.dim
    # values per token; 5.5 widths as `StepModel.attention_kept` says
    attention = model.attention_kept or 5.5 * dim
    if "mla_up_proj" in model.recomputed:
        attention -= model.attention_up_kept
    norms = dim if "layernorm" in model.recomputed else 2 * dim
    # the projections' normed input is kept as they read it, narrow if they are
    return (attention + norms - dim * (1 - _read_share(model))) * value_bytes


def _feed_forward_bytes(
    cost_model: StepCostModel, value_bytes: float, moe_bytes: float
) -> tuple[float, float]:
    """Return the bytes that a dense feed-forward layer keeps, and those of an MoE layer; arguments
    as of `_kept_bytes` and `_attention_bytes`."""
    model = cost_model.model
    layer = model.layer
    recomputed = model.recomputed
    dim = layer.dim
    # bytes of a value as products read it, over those of a wide one
    read_share = _read_share(model)
    # results of the first products, and of the activation if it is kept, per value of inner width
    inner = float(layer.matrices - 1)
    if model.keeps_activated:
        inner += read_share
    dense = dim * value_bytes  # its input
    if "mlp" not in recomputed:
        dense = (dim + inner * model.inner) * value_bytes
    if "moe" in recomputed:
        return dense, dim * value_bytes
    shared = 0.0
    if "shared_experts" not in recomputed:
        shared = inner * model.shared_hidden * layer.tokens * layer.element_bytes
    activated = 0.0
    if model.keeps_activated and "moe_act" not in recomputed:
        activated = cost_model.activated_values * layer.element_bytes * read_share
    # rows of a rank's experts, whose hidden width is divided over etp
    rows = cost_model.activated_values / layer.hidden * cost_model.grid.etp
    # `moe_bytes` has them wide, but they are kept as products read them: saves the rest
    added = activated - rows * dim * layer.element_bytes * (1 - read_share)
    return dense, moe_bytes + added + shared


def _read_share(model: StepModel) -> float:
    """Return the bytes of a product's kept input over those of a wide value, 1 if products are not
    narrow: of normed inputs, experts' rows and activations' results."""
    return model.narrow_bytes / model.layer.element_bytes or 1.0


def _multiplied_parameters(cost_model: StepCostModel) -> float:
    """Return the parameters of a rank that narrow products read: all but embeddings, output and
    routers."""
    model = cost_model.model
    table = model.embeddings * model.vocab * model.layer.dim
    routers = model.moe_layers * model.layer.dim * model.layer.num_experts
    return cost_model.whole_parameters - (table + routers) / cost_model.grid.tp


def least_bytes_of_plans(cost_model: StepCostModel) -> float:
    """Return a lower bound on the bytes of a rank under any lossless plan of a layout: experts keep
    their inputs, which the weights' gradients read, and the results of their first products.

    A plan that gathers weights divides the rows of a rank by its factor on the hidden units.
    """
    layer = cost_model.model.layer
    grid = cost_model.grid
    inputs = grid.dp * layer.copies / grid.world * layer.dim
    results = (layer.matrices - 1) * cost_model.activated_values
    kept_bytes = (inputs + results) * layer.element_bytes
    return rank_memory(cost_model, kept_bytes, buffers=0.0).total
