"""Memory and speed of a fine-tune of adapters whose base model is frozen, with experts in NF4 or in 16 bits, on small cards.

It runs as `moesaic.transformers` does: blocks are recomputed, experts are spread over all ranks, FSDP2 shards the rest, and
adapters are float32. Frozen parameters have neither gradients nor states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moesaic.balance.machine import Machine
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.hub import HubShape
from moesaic.planner.memory import FRAGMENTED, GIB
from moesaic.planner.model import DataShape, Job
from moesaic.planner.rates import cluster_of
from moesaic.planner.simulate import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.program.grid import Grid
from moesaic.shapes import ModelShape

Method = Literal["qlora", "lora"]
"""Whether frozen experts are in NF4, or in 16 bits."""
WEIGHT_BYTES: dict[Method, float] = {"qlora": 0.5 + 4 / 64, "lora": 2.0}
"""Bytes of a frozen weight of experts: a code of 4 bits and its share of a float32 scale for each 64, or 16 bits."""
RESERVED = 1.0 * GIB
"""Memory of a device that the framework uses besides tensors."""
LOGIT_BYTES = 12
"""Bytes of each logit where the loss needs most: float32 log-probabilities, their gradient, and the logits' (transformers'
`ForCausalLMLoss` over PyTorch's cross entropy; the logits in 16 bits are free by then)."""
TOKEN_BYTES = 18
"""Bytes of each value of a token that a recomputed block keeps, and its gradients: float32 copies for two norms and two
adapters, 16 bits for the gradient of the residual stream."""
COPY_VALUES = (5.0, 6.0)
"""Values of the token's width, and of the hidden width, that backward of frozen experts has for each copy of a token: rows,
the results' gradient without and with routing weights, the rows' gradient and its adapters' part; pre-activations of gate and
up, their gradients, hidden values and their gradient (`FrozenExperts.gradients`)."""
SENT_VALUES = 2.5
"""Further values of the token's width for each copy in buffers of the exchange. Measured on two ranks."""
COPY_BYTES = 58
"""Bytes of indices, routing weights and order of each copy."""


@dataclass(frozen=True, kw_only=True)
class FinetunePrediction:
    """What a fine-tune needs and how fast it is."""

    parts: dict[str, float]
    """Bytes of tensors on the fullest rank at the peak of a step that accumulates gradients, under even routing."""
    fits: bool | None
    """Whether a device holds `bytes`, with fragments and what the framework uses; None if its memory is not given."""

    @property
    def bytes(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())


def predict_finetune(
    shape: ModelShape, *, ranks: int, memory_bytes: float | None, tokens: int, length: int, method: Method, rank: int,
    cluster: ClusterSpec | None = None, logits: int | None = None,
) -> FinetunePrediction:  # fmt: skip
    """Predict a fine-tune with gradient checkpointing, of adapters on every expert and on queries and values.

    Args:
        shape: from `read_job` or `read_shape`.
        ranks: ranks that share the experts, each with tokens of its own.
        memory_bytes: memory of a rank's device; None for that of the cluster, if there is one.
        tokens: tokens of a rank's micro-batch, whole sequences of `length`.
        length: tokens of a sequence.
        method: "qlora" for experts in NF4, "lora" for 16 bits.
        rank: rank of the adapters.
        cluster: the cluster, of as many devices as ranks; None predicts memory only.
        logits: tokens whose logits exist at once; None for those of a micro-batch, as in transformers.

    Raises:
        InputError: the model is none of the Hugging Face hub, or the sizes do not fit each other.
    """
    cost_model = _cost_model(shape, ranks, tokens, length, cluster)
    parts = _memory(cost_model, method, rank, logits or tokens)
    if memory_bytes is None and cluster is not None:
        memory_bytes = cluster.device.memory_gib * GIB
    needed = sum(parts.values()) * FRAGMENTED + RESERVED
    return FinetunePrediction(parts=parts, fits=None if memory_bytes is None else needed <= memory_bytes)


def _cost_model(shape: ModelShape, ranks: int, tokens: int, length: int, cluster: ClusterSpec | None) -> StepCostModel:
    if not isinstance(shape, HubShape):
        raise InputError("fine-tuning is planned for models of the Hugging Face hub: give the config.json of one")
    for name, value in (("ranks", ranks), ("tokens", tokens), ("length", length)):
        if value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    if tokens % length:
        raise InputError(f"tokens={tokens} are not whole sequences of length={length}: choose a multiple")
    if shape.moe.num_experts % ranks:
        raise InputError(f"{shape.moe.num_experts} experts do not split over {ranks} ranks: choose a divisor")
    grid = Grid(world=ranks, ep=ranks, ranks_per_node=None if cluster is None else cluster.devices_per_node)
    machine = cluster or cluster_of(Machine(), grid)
    model = replace(shape, seq_len=length, checkpoint_activations=True)
    job = Job(
        batch_size=ranks * tokens // length, precision="bfloat16", model=model, data=DataShape(vocab_size=shape.vocab)
    )
    return StepCostModel(job.step_model(machine, grid.dp), grid, Simulator(machine))


def adapter_parameters(cost_model: StepCostModel, rank: int) -> tuple[float, float]:
    """Return the parameters of a block's adapters on a rank: those of queries and values, and those of its experts."""
    model, layer = cost_model.model, cost_model.model.layer
    queries, values = model.attention_result or layer.dim, (model.key_values or 2 * layer.dim) / 2
    of_expert = (layer.dim + (layer.matrices - 1) * layer.hidden) + (layer.hidden + layer.dim)
    return rank * (2 * layer.dim + queries + values), rank * of_expert * layer.num_experts / cost_model.grid.ep


def _memory(cost_model: StepCostModel, method: Method, rank: int, logits: int) -> dict[str, float]:
    """Return the bytes of a rank by part, at the peak of a step."""
    model, grid, layer = cost_model.model, cost_model.grid, cost_model.model.layer
    attention, experts = adapter_parameters(cost_model, rank)
    adapters = model.num_layers * attention + model.moe_layers * experts
    head, block = model.vocab * layer.dim * 2, cost_model.block_parameters[0] * 2
    is_sharded = grid.dp > 1
    peaks = {
        "logits and loss": logits * model.vocab * LOGIT_BYTES + is_sharded * head,
        "a block's activations": _block_bytes(cost_model, experts) + is_sharded * 2 * block,
    }
    largest = max(peaks, key=lambda name: peaks[name])
    return {
        "experts": model.expert_parameters * WEIGHT_BYTES[method] / grid.ep,
        "other weights": (model.dense_parameters + model.shared_parameters) * 2 / grid.dp,
        "adapters": 4 * adapters,
        "gradients": 4 * adapters,
        "optimizer": 8 * adapters,
        "blocks' inputs": model.num_layers * layer.tokens * layer.dim * 2.0,
        largest: peaks[largest],
    }


def _block_bytes(cost_model: StepCostModel, adapters: float) -> float:
    """Return the bytes of a block's recomputed activations where its backward pass needs most."""
    model, layer = cost_model.model, cost_model.model.layer
    widths, hidden = COPY_VALUES
    widths += SENT_VALUES * (cost_model.grid.ep > 1)
    copies = layer.copies * (2 * (widths * layer.dim + hidden * layer.hidden) + COPY_BYTES)
    # Norms of queries and keys keep them in float32.
    attention = 2 * (model.attention_kept - layer.dim + model.attention_normed)
    shared = 2 * 2 * layer.matrices * model.shared_hidden
    dense = 2 * 2 * layer.matrices * model.inner * layer.tokens * (model.moe_layers < model.num_layers)
    # Factors of a block in 16 bits, their gradients, and the same in float32.
    return layer.tokens * (TOKEN_BYTES * layer.dim + attention + shared) + max(copies, dense) + 8 * adapters
