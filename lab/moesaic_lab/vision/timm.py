"""Converts the names of SwinV2 weights in timm and in the authors' files to those of `SwinMoE`, for `moesaic vision --init`.

timm has patch merging at the start of a stage, the authors' files at the end of the previous stage. Buffers that follow from
sizes are left out. In an MoE layer of the model, every expert starts as the file's dense layer (sparse upcycling, Komatsuzaki
et al. 2023), and the router keeps its initial weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from moesaic.layer import MoE
from moesaic_lab.vision.swin import SwinBlock, SwinMoE

OUTSIDE = {
    "patch_embed.proj.": "patches.", "patch_embed.norm.": "patch_norm.", "norm.": "norm.", "head.fc.": "head.",
    "head.": "head.",
}  # fmt: skip
INSIDE = {
    "attn.qkv.": "attention.qkv.", "attn.q_bias": "attention.q_bias", "attn.v_bias": "attention.v_bias",
    "attn.logit_scale": "attention.log_scale", "attn.cpb_mlp.": "attention.position_bias.",
    "attn.proj.": "attention.out.", "norm1.": "attention_norm.", "norm2.": "ffn_norm.",
}  # fmt: skip
"""Prefixes of names inside a block."""
BUFFERS = ("relative_position_index", "relative_coords_table", "attn_mask", "attn.k_bias")
EXPERTS = {
    "mlp.fc1.weight": "w1", "mlp.fc1.bias": "b1", "mlp.fc2.weight": "w2", "mlp.fc2.bias": "b2",
}  # fmt: skip
DENSE = {"mlp.fc1.": "ffn.0.", "mlp.fc2.": "ffn.2."}


def is_timm(weights: Mapping[str, Tensor]) -> bool:
    """Return whether weights have the names of timm or of the authors' files."""
    return "patch_embed.proj.weight" in weights


def from_timm(weights: Mapping[str, Tensor], model: SwinMoE) -> dict[str, Tensor]:
    """Return weights with the names of `SwinMoE`. Unknown weights keep their names, and loading them then fails.

    Args:
        weights: weights by their names in the file.
        model: the model, not sharded; it determines where MoE layers are.
    """
    ends_with_merge = "layers.0.downsample.reduction.weight" in weights
    depths, converted = model.config.depths, {}
    for name, value in weights.items():
        if any(each in name for each in BUFFERS):
            continue
        if joined := re.fullmatch(r"layers\.(\d+)\.downsample\.(reduction|norm)(\.\w+)", name):
            stage = int(joined[1]) - (not ends_with_merge)
            converted[f"merges.{stage}.{'reduce' if joined[2] == 'reduction' else 'norm'}{joined[3]}"] = value
        elif inner := re.fullmatch(r"layers\.(\d+)\.blocks\.(\d+)\.(.+)", name):
            index = sum(depths[: int(inner[1])]) + int(inner[2])
            for key, tensor in _of_block(inner[3], value, model.blocks[index]).items():  # type: ignore[arg-type]
                converted[f"blocks.{index}.{key}"] = tensor
        else:
            converted[_renamed(name, OUTSIDE)] = value
    return converted


def _of_block(name: str, value: Tensor, block: SwinBlock) -> dict[str, Tensor]:
    """Return a block's weight with the names of `SwinBlock`."""
    if isinstance(block.ffn, MoE) and name in EXPERTS:
        ours = getattr(block.ffn.experts, EXPERTS[name])
        converted = {f"ffn.experts.{EXPERTS[name]}": value.expand_as(ours)}
        if name == "mlp.fc1.weight":  # only once per layer
            converted |= {f"ffn.router.{key}": drawn for key, drawn in block.ffn.router.state_dict().items()}
        return converted
    if name == "attn.logit_scale":
        value = value.flatten()
    return {_renamed(name, INSIDE | DENSE): value}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
