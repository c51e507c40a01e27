"""Weights under timm's names: the model is then the one that transformers builds from them, dense or with MoE layers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moesaic import Capacity
from moesaic.errors import InputError
from moesaic_lab.vision.config import SwinConfig
from moesaic_lab.vision.swin import SwinMoE
from moesaic_lab.vision.train import load_weights

transformers = pytest.importorskip("transformers")
CONFIG = SwinConfig(image_size=32, num_classes=7, patch_size=2, window=4, dim=8, depths=(2, 2, 1), heads=(2, 2, 4))
NAMES = {
    "swinv2.embeddings.patch_embeddings.projection": "patch_embed.proj", "swinv2.embeddings.norm": "patch_embed.norm",
    "swinv2.layernorm": "norm", "swinv2.encoder.": "", "attention.self.continuous_position_bias_mlp": "attn.cpb_mlp",
    "attention.self.logit_scale": "attn.logit_scale", "attention.output.dense": "attn.proj",
    "intermediate.dense": "mlp.fc1", "layernorm_before": "norm1", "layernorm_after": "norm2",
}  # fmt: skip
"""Of transformers to timm's."""


def as_timm(theirs: torch.nn.Module, *, authors: bool) -> dict[str, Tensor]:
    """Return the weights of a model of transformers under timm's names, or those of the model's authors."""
    found, parts = {}, dict(theirs.state_dict())
    for name in list(parts):
        if ".attention.self.query.weight" in name:
            block = name.removesuffix("query.weight")
            target = block.replace("swinv2.encoder.", "").replace("attention.self.", "attn.")
            matrices = [parts.pop(f"{block}{each}.weight") for each in ("query", "key", "value")]
            parts[f"{target}qkv.weight"] = torch.cat(matrices)
            for each in ("query", "value"):
                parts[f"{target}{each[0]}_bias"] = parts.pop(f"{block}{each}.bias")
    for name, value in parts.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        name = re.sub(r"(blocks\.\d+)\.output\.dense", r"\1.mlp.fc2", name)
        name = name.replace("classifier.", "head." if authors else "head.fc.")
        if not authors:  # transformers joins tokens at the end of a stage, as the authors do
            name = re.sub(r"layers\.(\d+)\.downsample", lambda found: f"layers.{int(found[1]) + 1}.downsample", name)
        found[name] = value.clone().contiguous()
    found["layers.0.blocks.1.attn_mask"] = torch.zeros(1)  # a buffer, which old files have
    return found


def theirs() -> torch.nn.Module:
    config = transformers.Swinv2Config(
        image_size=32, patch_size=2, num_channels=3, embed_dim=8, depths=[2, 2, 1], num_heads=[2, 2, 4], window_size=4,
        drop_path_rate=0.0, num_labels=7,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Swinv2ForImageClassification(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def logits(model: torch.nn.Module) -> Tensor:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(images)
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.parametrize("authors", [False, True])
def test_a_dense_model_is_the_one_of_transformers(tmp_path: Path, authors: bool) -> None:
    other, model = theirs(), SwinMoE(CONFIG).eval()
    save_file(as_timm(other, authors=authors), tmp_path / "swinv2.safetensors")
    load_weights(model, tmp_path / "swinv2.safetensors")
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)


def test_experts_begin_as_the_dense_layer(tmp_path: Path) -> None:
    """A norm behind the layer takes the routing weight out again, so the sparse model begins as the dense one."""
    other = theirs()
    config = replace(CONFIG, ffn="moe", num_experts=4, dense_stages=1, eval_capacity=Capacity.fixed(4.0))
    model = SwinMoE(config).eval()
    assert len(model.moe_layers()) == 1
    save_file(as_timm(other, authors=False), tmp_path / "swinv2.safetensors")
    load_weights(model, tmp_path / "swinv2.safetensors")
    torch.testing.assert_close(logits(model), logits(other), rtol=2e-3, atol=2e-3)
    experts = model.moe_layers()[0].experts
    assert torch.equal(experts.w1[0], experts.w1[3])


def test_a_head_of_other_classes_starts_anew_and_another_model_is_refused(tmp_path: Path) -> None:
    save_file(as_timm(theirs(), authors=False), tmp_path / "swinv2.safetensors")
    model = SwinMoE(replace(CONFIG, num_classes=3))
    drawn = model.head.weight.clone()
    load_weights(model, tmp_path / "swinv2.safetensors")
    assert torch.equal(model.head.weight, drawn)
    with pytest.raises(InputError, match="of another model"):
        load_weights(SwinMoE(replace(CONFIG, norm="pre")), tmp_path / "swinv2.safetensors")
