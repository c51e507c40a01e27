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

from collections.abc import Iterator
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
    shape: tuple[int, ...], dtype: torch.dtype, settings: Upcycling, layer: int
) -> Computed:
    """Return a router, (experts, dim), with rows from a normal distribution. All shards of one copy
    have the same row."""

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
    model = Architecture(_sparse_config(dense.model.config, settings))
    weights = dense.into(identity(dense.model.shapes))
    tensors: dict[str, Readable] = {}  # those of the dense model, and routers, by their names
    blocks: list[StoredBlock] = []
    for name, shape in model.shapes.items():
        match = LAYER.fullmatch(name)
        if model.experts_of(name) is not None:
            assert match is not None
            for part in model.parts(name):
                assert not part.transposed
                _, _, projection = part.name.rpartition(".")
                dense_name = f"model.layers.{match[1]}.mlp.{projection}_proj.weight"
                weight = weights[dense_name]
                # A shard has some of the hidden features: rows of gate and up, columns of down.
                # Outputs of shards are scaled, as the module docstring says.
                hidden_dim = 1 if projection == "down" else 0
                if projection == "down":
                    weight = _scaled(weight, settings.granularity)
                tensors[dense_name] = weight
                blocks += _shards(part, dense_name, weight.shape, settings, cut=hidden_dim)
            continue
        if name in weights:
            tensors[name] = weights[name]
        else:
            assert match is not None, name
            # the one tensor without a dense one is the router: its dtype is that of a neighbour
            norm = weights[f"model.layers.{match[1]}.input_layernorm.weight"]
            tensors[name] = _router(shape, norm.dtype, settings, int(match[1]))
        whole = full_region(shape)
        blocks.append(StoredBlock(name, at=whole, tensor=name, index=whole))
    dropped = [
        f"optimizer state {state}: upcycled weights have none"
        for state in dense.tensors
        if state is not None
    ]
    layout = Layout(blocks, model.shapes, "the dense model", copies=True)
    return Checkpoint(model, layout, {None: tensors}, left_behind=dense.left_behind + dropped)


def _shards(
    part: Part, stored: str, shape: tuple[int, ...], settings: Upcycling, *, cut: int
) -> Iterator[StoredBlock]:
    """Yield the blocks that give each expert its shard of a dense matrix.

    Args:
        part: the stacked matrices of the experts.
        stored: name of the dense matrix.
        shape: its shape.
        cut: the dimension that is cut into shards.
    """
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
