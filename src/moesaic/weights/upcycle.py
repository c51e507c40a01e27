"""Upcycles dense models into sparse ones: every feed-forward layer becomes experts that together
compute the same function.

- Sparse upcycling (Komatsuzaki et al. 2023) copies the layer into each expert and initializes the
  router at random.
- Fine-grained upcycling (He et al. 2024) splits the layer into shards and makes copies of all
  shards. The shards of one copy share a router row (a virtual group), so a token always reaches
  complete copies.

Both preserve the function if routing weights are normalised over the chosen experts: they then sum
to 1 over identical copies. With shards, each weight is smaller by the number of shards, so a
shard's output is scaled by that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from moesaic.errors import InputError
from moesaic.weights.checkpoint import Checkpoint
from moesaic.weights.layout import (
    Computed,
    Layout,
    Readable,
    Region,
    StoredBlock,
    full_region,
    identity,
)
from moesaic.weights.model_tensors import LAYER, Architecture, Part


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Settings with which a dense model is upcycled."""

    num_experts: int = 8
    """Experts per layer; a multiple of granularity."""
    top_k: int = 2
    """Experts per token; a multiple of granularity."""
    granularity: int = 1
    """Shards into which each feed-forward layer is split; 1 copies it whole. A power of two, so
    that scaling is exact."""
    router_std: float = 0.02
    """Standard deviation of the router's weights."""
    seed: int = 0
    """Seed of the router's weights."""

    def __post_init__(self) -> None:
        shards = self.granularity
        is_power_of_two = shards >= 1 and shards & (shards - 1) == 0
        if not is_power_of_two:
            raise InputError(
                f"granularity={shards}: give a power of two, so that a shard's output is "
                "scaled exactly"
            )
        for name, value in (("num_experts", self.num_experts), ("top_k", self.top_k)):
            if value < 1 or value % shards:
                raise InputError(f"{name}={value}: give a multiple of granularity={shards}")
        if self.top_k > self.num_experts:
            raise InputError(f"top_k={self.top_k}: give at most num_experts={self.num_experts}")


INTO = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""Dense model type -> the sparse type that differs in its feed-forward layers only and normalises
routing weights."""


def _router(
    name: str, shape: tuple[int, ...], weights: Mapping[str, Readable], settings: Upcycling
) -> Computed:
    """Return a router, (experts, dim), with rows from a normal distribution and with the dtype of
    its layer's first norm. All shards of one copy have the same row."""
    layer = _layer_of(name)
    dtype = weights[f"model.layers.{layer}.input_layernorm.weight"].dtype

    def make(at: Region) -> torch.Tensor:
        """Return a region of the router's matrix: all of it is drawn anew, from the same seed."""
        # no two pairs of seed and layer give the same number: a model has fewer layers than 100,003
        generator = torch.Generator().manual_seed(settings.seed * 100_003 + layer)
        num_experts, dim = shape
        num_copies = num_experts // settings.granularity
        of_copies = torch.randn(num_copies, dim, generator=generator) * settings.router_std
        of_experts = of_copies.repeat_interleave(settings.granularity, 0).to(dtype)
        index = tuple(
            part if isinstance(part, int) else slice(part.start, part.stop, part.step)
            for part in at
        )
        return of_experts[index]

    return Computed(dtype, shape, make)


def _scaled(tensor: Readable, factor: int) -> Computed:
    """Return a tensor times a power of two; exact unless an element leaves the dtype's range."""
    return Computed(
        tensor.dtype,
        tensor.shape,
        lambda at: torch.from_numpy(tensor.read(at)).view(tensor.dtype) * factor,
    )


def upcycled(dense: Checkpoint, settings: Upcycling) -> Checkpoint:
    """Return a sparse checkpoint that computes the same function as a dense one. Its tensors are
    read on demand only.

    Raises:
        InputError: the type of model has no sparse counterpart, or sizes do not divide.
    """
    sparse = Architecture(_sparse_config(dense.model.config, settings))
    weights = dense.into(identity(dense.model.shapes))
    sources: dict[str, Readable] = {}  # what is read: dense tensors, and routers, by their names
    blocks: list[StoredBlock] = []  # which region of a source goes where in the sparse model
    for name, shape in sparse.shapes.items():
        if sparse.experts_of(name) is not None:
            for part in sparse.parts(name):
                dense_name, weight = _dense_weight(part, weights, settings)
                sources[dense_name] = weight
                blocks += _shards(part, dense_name, weight.shape, settings)
            continue
        if name in weights:
            sources[name] = weights[name]
        else:  # the one other tensor that the dense model lacks is the router
            sources[name] = _router(name, shape, weights, settings)
        whole = full_region(shape)
        blocks.append(StoredBlock(name, at=whole, tensor=name, index=whole))
    dropped = [
        f"optimizer state {state}: upcycled weights have none"
        for state in dense.tensors
        if state is not None
    ]
    layout = Layout(blocks, sparse.shapes, "the dense model", copies=True)
    left_behind = dense.left_behind + dropped
    return Checkpoint(sparse, layout, {None: sources}, left_behind=left_behind)  # None: weights


def _layer_of(name: str) -> int:
    """Return the number of the layer that a tensor is in, by its name."""
    match = LAYER.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def _projection(part: Part) -> str:
    """Return which of the projections of feed-forward layers a part is: gate, up or down."""
    _, _, projection = part.name.rpartition(".")
    return projection


def _dense_weight(
    part: Part, weights: Mapping[str, Readable], settings: Upcycling
) -> tuple[str, Readable]:
    """Return the name of the dense matrix of which the experts' matrices in a part are shards, and
    the matrix; that of the outputs is scaled, as the module docstring says."""
    assert not part.transposed
    projection = _projection(part)
    name = f"model.layers.{_layer_of(part.tensor)}.mlp.{projection}_proj.weight"
    weight = weights[name]
    return name, _scaled(weight, settings.granularity) if projection == "down" else weight


def _shards(
    part: Part, stored: str, shape: tuple[int, ...], settings: Upcycling
) -> Iterator[StoredBlock]:
    """Yield the blocks that give each expert its shard of a dense matrix.

    Args:
        part: the stacked matrices of the experts.
        stored: name of the dense matrix.
        shape: its shape.
    """
    # a shard has some of the hidden features: rows of gate and up, columns of down
    cut = 1 if _projection(part) == "down" else 0
    width = shape[cut] // settings.granularity
    for expert in range(settings.num_experts):
        shard = expert % settings.granularity
        at = list(full_region(shape))
        at[cut] = range(shard * width, (shard + 1) * width)
        # a part's first dimension counts experts
        yield StoredBlock(stored, at=tuple(at), tensor=part.tensor, index=(expert, *part.index[1:]))


def _sparse_config(config: Any, settings: Upcycling) -> Any:
    """Return the configuration of the sparse model."""
    kind = INTO.get(config.model_type)
    table = config.to_dict()
    if kind is None:
        raise InputError(
            f"{config.model_type} cannot be upcycled: take a dense model of type {', '.join(INTO)}"
        )
    if table.get("attention_bias") or table.get("mlp_bias"):
        raise InputError(
            f"{config.model_type} with biases in attention or mlp cannot be upcycled: {kind} "
            "has none"
        )
    if config.intermediate_size % settings.granularity:
        raise InputError(
            f"granularity={settings.granularity}: must divide "
            f"intermediate_size={config.intermediate_size}"
        )
    hidden = config.intermediate_size // settings.granularity
    for name in ("model_type", "architectures", "transformers_version"):
        table.pop(name, None)
    table |= {"num_experts_per_tok": settings.top_k, "output_router_logits": False}
    if kind == "mixtral":
        table |= {"num_local_experts": settings.num_experts, "intermediate_size": hidden}
    else:
        table |= {
            "num_experts": settings.num_experts,
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return transformers.AutoConfig.for_model(kind, **table)
