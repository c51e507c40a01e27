"""The memory of a training step on a rank, under the closed form of `step.py`."""

from __future__ import annotations

from dataclasses import replace

from moesaic.planner.rank_memory import Memory, layer_memory
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Program


def step_memory(
    cost_model: StepCostModel,
    forward: Program,
    backward: Program,
    grid: Grid,
    *,
    memory_budget: int | None = None,
    sizes: CallSizes | None = None,
) -> Memory:
    """Return the memory of a rank.

    Besides its feed-forward layer, a block keeps what attention keeps and the inputs of two norms
    (Korthikanti et al. 2022, section 4.1, with fused scores). A recomputed part keeps only its
    input. Narrow products read weights by rows and by columns, which takes two copies besides the
    wide ones. They keep their inputs by columns only, in place of wide values that nothing else
    needs (Transformer Engine, "FP8 weight caching" and "Handling transposes").

    Args:
        forward: the lowered program of an MoE layer.
        backward: the lowered program of its gradients.
        grid: the layout, with etp factored as the plan requires.
        memory_budget: most bytes that a layer may hold.
        sizes: of a call of the forward program; the rank with the most rows counts. None: even
            routing.
    """
    of_layer = layer_bytes(
        cost_model.simulator,
        cost_model.model.layer,
        forward,
        backward,
        grid,
        memory_budget=memory_budget,
        sizes=sizes,
    )
    return rank_memory(cost_model, *of_layer)


def layer_bytes(
    simulator: Simulator,
    layer: Workload,
    forward: Program,
    backward: Program,
    grid: Grid,
    *,
    memory_budget: int | None = None,
    sizes: CallSizes | None = None,
) -> tuple[float, float]:
    """Return the bytes that an MoE layer keeps for its backward pass, and the most that it needs
    besides while it runs; arguments as of `step_memory`."""
    volumes = simulator.volumes(forward, layer, grid, sizes=sizes)
    kernel = "cpu" if simulator.cluster.host.runs_compute else "triton"
    return layer_memory(forward, backward, volumes, memory_budget, kernel=kernel)


def rank_memory(cost_model: StepCostModel, kept_bytes: float, buffers: float) -> Memory:
    """Return the memory of a rank at the moment at which it needs most, from the bytes that one of
    its MoE layers keeps, and needs besides while it runs.

    The moments are the loss; the backward pass of the last block, beside the activations of all
    blocks; and that of the first block, beside the gradients of all others. All gradients are there
    from the start if the step has several micro-batches, or they are not sharded like parameters.
    """
    model = cost_model.model
    layer = model.layer
    kept, block, again = _kept_bytes(cost_model, kept_bytes)
    logits = layer.tokens * model.vocab / cost_model.grid.tp * bool(model.outputs)
    at_loss = logits * model.loss_kept / model.loss_chunks
    states, moving = _states(cost_model)
    backward = again + buffers + logits * model.logits_kept
    last = replace(states, activations=kept, buffers=moving + max(at_loss, backward))
    if not model.gathers_per_block or model.micro_batches > 1:
        return last
    # the layer's buffers have its own experts' gradients
    own = cost_model.block_parameters[1] * model.parameter_bytes
    gradients = max(states.gradients - own, 0.0)
    first = replace(states, gradients=gradients, activations=block, buffers=moving + backward)
    return max(replace(last, gradients=0.0), first, key=lambda memory: memory.total)


def _states(cost_model: StepCostModel) -> tuple[Memory, float]:
    """Return the parameters, gradients and optimizer states of a rank, and the bytes of whole
    parameters and gradients of blocks besides."""
    model = cost_model.model
    layer = model.layer
    narrow = 2 * model.narrow_bytes
    size = model.parameter_bytes
    tables = model.moe_layers * model.table_bytes
    held_parameters = cost_model.held_parameters
    if not model.gathers_per_block:
        whole_parameters = cost_model.whole_parameters
        # Sharded gradients of one block are whole while they are reduced.
        with_gradients = (
            held_parameters + sum(cost_model.block_parameters)
            if model.sharded == "gradients"
            else whole_parameters
        )
        weights = whole_parameters * layer.element_bytes
        states = Memory(
            weights=weights + narrow * _multiplied_parameters(cost_model) + tables,
            gradients=with_gradients * size,
            optimizer=cost_model.stepped_parameters * 3 * size,
            activations=0.0,
            buffers=0.0,
        )
        return states, 0.0
    dense, experts = cost_model.block_parameters
    shards, expert_shards = cost_model.num_shards
    # FSDP2 gathers experts in the dtype of their products; those that are whole are cast and kept
    is_whole = expert_shards == 1 and not model.gathered_bytes
    is_cast = is_whole and layer.element_bytes != size
    casts = model.moe_layers - model.recomputed_share * (model.moe_layers - 1)
    gathered = (dense if shards > 1 else 0.0) + (experts if expert_shards > 1 else 0.0)
    root = cost_model.root_parameters if shards > 1 else 0.0
    gathered_size = model.gathered_bytes or size
    whole = _sharded_parameters(cost_model)
    held = whole * gathered_size if model.held == "parameters" else 0.0
    casted = casts * experts * layer.element_bytes if is_cast else 0.0
    whole_gradients = 0.0 if model.held == "nothing" else whole
    states = Memory(
        weights=held_parameters * size + casted + held + tables,
        gradients=(held_parameters + whole_gradients) * size,
        optimizer=held_parameters * 2 * size,
        activations=0.0,
        buffers=0.0,
    )
    # two blocks' parameters, one block's gradients, one block's narrow weights, and the embedding
    # and output, which stay whole from the forward to the backward pass; unless these are held
    moving = {
        "nothing": (2 * gathered + root) * gathered_size + gathered * size,
        "gradients": (2 * gathered + root) * gathered_size,
        "parameters": 0.0,
    }
    return states, moving[model.held] + narrow * (dense + experts)


def _sharded_parameters(cost_model: StepCostModel) -> float:
    """Return how many of a rank's parameters, before sharding, are sharded over other ranks."""
    shards, expert_shards = cost_model.num_shards
    experts = cost_model.model.expert_parameters / (cost_model.grid.ep * cost_model.grid.etp)
    dense = cost_model.whole_parameters - experts
    return (dense if shards > 1 else 0.0) + (experts if expert_shards > 1 else 0.0)


def _kept_bytes(cost_model: StepCostModel, moe_bytes: float) -> tuple[float, float, float]:
    """Return the bytes that a rank keeps from forward to backward passes, those of one block, and
    those of blocks that the backward pass recomputes together.

    Args:
        moe_bytes: bytes that one MoE layer's program keeps.
    """
    model = cost_model.model
    grid = cost_model.grid
    layer = model.layer
    recomputed = model.recomputed
    row = layer.tokens * layer.element_bytes / grid.tp
    dim = layer.dim
    # Bytes of a product's kept input over those of a wide value: normed inputs, experts' rows,
    # activations' results.
    read = model.narrow_bytes / layer.element_bytes or 1.0
    attention = model.attention_kept or 5.5 * dim
    if "mla_up_proj" in recomputed:
        attention -= model.attention_up_kept
    norms = dim if "layernorm" in recomputed else 2 * dim
    around = (attention + norms - dim * (1 - read)) * row
    inner = float(layer.matrices - 1)
    if model.keeps_activated:
        inner += read
    dense = dim * row
    if "mlp" not in recomputed:
        dense = (dim + inner * model.inner) * row
    shared = 0.0
    if "shared_experts" not in recomputed:
        shared = inner * model.shared_hidden * layer.tokens * layer.element_bytes
    activated = 0.0
    if model.keeps_activated and "moe_act" not in recomputed:
        activated = cost_model.activated_values * layer.element_bytes * read
    activated -= (
        cost_model.activated_values
        / layer.hidden
        * grid.etp
        * dim
        * layer.element_bytes
        * (1 - read)
    )
    sparse = dim * row if "moe" in recomputed else moe_bytes + activated + shared
    recomputed_norms = dim * row if "layernorm" in recomputed else 0.0
    dense_layers = model.num_layers - model.moe_layers
    blocks = (
        model.num_layers * (around - recomputed_norms)
        + model.moe_layers * sparse
        + dense_layers * dense
    )
    block = blocks / model.num_layers
    if "block" not in recomputed:
        together_bytes = moe_bytes if "moe" in recomputed else 0.0
        return cost_model.alive * blocks, block, together_bytes
    share = model.recomputed_share
    together = model.recomputed_together
    inputs = share * model.num_layers / together * dim * row
    again = together * (around + max(sparse, dense))
    return cost_model.alive * (inputs + (1 - share) * blocks), dim * row, again


def _multiplied_parameters(cost_model: StepCostModel) -> float:
    """Parameters of a rank that narrow products read: all but embeddings, output and routers."""
    model = cost_model.model
    wide = (
        model.embeddings * model.vocab * model.layer.dim
        + model.moe_layers * model.layer.dim * model.layer.num_experts
    )
    return cost_model.whole_parameters - wide / cost_model.grid.tp


def least_bytes_of_plans(cost_model: StepCostModel) -> float:
    """Return a lower bound on the bytes of a rank under any lossless plan of a layout: experts keep
    their inputs, which the weights' gradients read, and the results of their first products.

    A plan that gathers weights divides the rows of a rank by its factor on the hidden units.
    """
    layer = cost_model.model.layer
    grid = cost_model.grid
    inputs = grid.dp * layer.copies / grid.world * layer.dim
    results = (layer.matrices - 1) * cost_model.activated_values
    return rank_memory(cost_model, (inputs + results) * layer.element_bytes, 0.0).total
