"""The dense model against an independent one with the same weights: torchvision's Swin V2, where that is installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moesaic_lab.vision.config import SwinConfig
from moesaic_lab.vision.swin import SwinBlock, SwinMoE

try:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
    pytest.skip(f"no torchvision: {error}", allow_module_level=True)

CONFIG = SwinConfig(image_size=32, num_classes=7, patch_size=2, window=4, dim=8, depths=(2, 2, 1), heads=(2, 2, 4))


def theirs() -> nn.Module:
    return SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 2, 1], num_heads=[2, 2, 4], window_size=[4, 4],
        stochastic_depth_prob=0.0, num_classes=7, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip


def names_of(model: SwinMoE) -> dict[str, str]:
    """Our name of a parameter to theirs."""
    names = {"patches": "features.0.0", "patch_norm": "features.0.2", "norm": "norm", "head": "head"}
    inner = {
        "attention_norm": "norm1",
        "ffn_norm": "norm2",
        "attention.out": "attn.proj",
        "attention.position_bias.0": "attn.cpb_mlp.0",
        "attention.position_bias.2": "attn.cpb_mlp.2",
        "ffn.0": "mlp.0",
        "ffn.2": "mlp.3",
        "attention.qkv": "attn.qkv",
    }
    index = 0
    for stage, depth in enumerate(model.config.depths):
        for block in range(depth):
            for ours, others in inner.items():
                names[f"blocks.{index}.{ours}"] = f"features.{2 * stage + 1}.{block}.{others}"
            index += 1
        names[f"merges.{stage}.reduce"] = f"features.{2 * stage + 2}.reduction"
        names[f"merges.{stage}.norm"] = f"features.{2 * stage + 2}.norm"
    return names


def copy_weights(source: nn.Module, model: SwinMoE) -> None:
    """Draw all weights of theirs anew and take them over."""
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = dict(source.named_parameters())
    names = names_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if owner in names:
                parameter.copy_(weights[f"{names[owner]}.{leaf}"].view_as(parameter))
        for index, block in enumerate(model.blocks):
            assert isinstance(block, SwinBlock)
            attention = names[f"blocks.{index}.attention.qkv"].removesuffix(".qkv")
            q, k, v = weights[f"{attention}.qkv.bias"].chunk(3)
            k.zero_()
            block.attention.q_bias.copy_(q)
            block.attention.v_bias.copy_(v)
            block.attention.log_scale.copy_(weights[f"{attention}.logit_scale"].flatten())


def test_logits_and_gradients_are_those_of_torchvision() -> None:
    model, other = SwinMoE(CONFIG).double().eval(), theirs().double().eval()
    copy_weights(other, model)
    assert model.num_parameters() + 80 == sum(
        parameter.numel() for parameter in other.parameters()
    )  # theirs has biases of the keys, and sets them to zero
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def run(network: nn.Module) -> tuple[Tensor, Tensor]:
        x = images.clone().requires_grad_()
        logits = network(x)
        logits.square().sum().backward()
        assert x.grad is not None
        return logits.detach(), x.grad

    for ours, expected in zip(run(model), run(other)):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
