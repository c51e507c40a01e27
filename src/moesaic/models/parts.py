"""Consecutive parts of a model for pipeline stages, cut where their time and memory are even."""

from __future__ import annotations

from torch import nn

from moesaic.layer import MoE
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT
from moesaic.program.stage_cuts import cut


def cut_model(model: GPT, count: int) -> list[range]:
    """Return which blocks each part of a model has, for `count` parts.

    The slowest part is as fast as it can be, up to a twentieth; among such cuts, the part with the
    most parameters has as few as it can. The first part also embeds, and the last one multiplies by
    the output matrix.
    """
    config = model.config
    flops = [_block_flops(block, config) for block in model.blocks]  # proportional to seconds
    sizes = [_num_parameters(block) for block in model.blocks]
    # what the first part has besides blocks, and what the last one has
    embedding_size = model.embedding.weight.numel()
    output_size = embedding_size
    if model.unembedding is not None:
        output_size = _num_parameters(model.unembedding)
    # a lookup needs none, the output matrix two for each weight
    flops_of_ends = (0.0, 2.0 * embedding_size)
    return cut(
        flops,
        sizes,
        count,
        times_of_ends=flops_of_ends,
        sizes_of_ends=(embedding_size, output_size),
    )


def _block_flops(block: nn.Module, config: ModelConfig) -> float:
    """Return the FLOPs of one token in a block's forward pass: two for each parameter that it uses,
    and those of attention to all earlier positions."""
    used = float(_num_parameters(block))
    for layer in block.modules():
        if isinstance(layer, MoE):
            used -= _num_parameters(layer.experts) * (1 - layer.top_k / layer.num_experts)
    # Scores and weighted values need 4 * dim for each position that a token attends to. Averaged
    # over the positions of causal attention that is half the sequence, hence 2 and not 4.
    return 2.0 * used + 2.0 * config.dim * config.seq_len


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
