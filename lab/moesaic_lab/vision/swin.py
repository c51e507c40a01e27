"""`SwinMoE`: a Swin Transformer V2 that classifies images, with MoE layers among its feed-forward
layers.

Liu et al., "Swin Transformer V2" (2022). MoE layers are placed as in Hwang et al., "Tutel" (2023),
section 5.3: every second feed-forward layer, except in the first two stages.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from moesaic.errors import InputError
from moesaic.experts import PlainExperts
from moesaic.layer import MoE
from moesaic.models.split import StackedLinear
from moesaic.routing.losses import LoadBalance
from moesaic.routing.routers import ROUTERS, CosineTopK, RouterFactory
from moesaic_lab.vision.attention import WindowAttention
from moesaic_lab.vision.config import SwinConfig

COSINE_TEMPERATURE = 0.5
"""Initial temperature of Swin's cosine routers; the default of the layer, meant for language, is
0.07."""
INIT_STD = 0.02
"""Standard deviation of all matrices at initialisation."""


class FeedForward(nn.Sequential):
    """A dense feed-forward layer with GELU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class SwinBlock(nn.Module):
    """Windowed attention, then a dense or sparse feed-forward layer, each with a residual.

    Args:
        config: the model's configuration.
        stage: the block's stage.
        block: the block's index in the stage.
    """

    def __init__(self, config: SwinConfig, stage: int, block: int) -> None:
        super().__init__()
        dim = config.width(stage)
        self.post_norm = config.norm == "post"
        self.attention = WindowAttention(
            dim,
            config.heads[stage],
            resolution=config.resolution(stage),
            window=config.window_of(stage),
            shift=config.shift(stage, block),
        )
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn_norm = nn.LayerNorm(dim)
        sparse = config.is_sparse(stage, block)
        self.ffn: MoE | FeedForward = (
            make_vision_moe(config, stage) if sparse else FeedForward(dim, config.hidden(stage))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, height, width, dim) to the same shape."""
        x = x + self._normed(x, self.attention, self.attention_norm)
        tokens = x.flatten(1, 2)
        y = self._normed(tokens, self.ffn, self.ffn_norm)
        return x + y.view(x.shape)

    def _normed(self, x: Tensor, layer: nn.Module, norm: nn.LayerNorm) -> Tensor:
        """Run a layer with its norm, before or after it."""
        y: Tensor = norm(layer(x)) if self.post_norm else layer(norm(x))
        return y


class PatchMerging(nn.Module):
    """Merges each 2x2 tokens to one token of twice the width.

    Args:
        norm: "post" normalises the output (Swin V2), "pre" the input (Swin).
    """

    def __init__(self, dim: int, norm: str) -> None:
        super().__init__()
        self.post_norm = norm == "post"
        self.reduce = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(2 * dim if self.post_norm else 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, height, width, dim) to (batch, height / 2, width / 2, 2 * dim)."""
        # (batch, tile row, row within, tile column, column within, dim)
        tiles = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        together = tiles.permute(0, 1, 3, 4, 2, 5).flatten(3)
        merged: Tensor
        if self.post_norm:
            merged = self.norm(self.reduce(together))
        else:
            merged = self.reduce(self.norm(together))
        return merged


class SwinMoE(nn.Module):
    """A Swin Transformer V2 that classifies images.

    Matrices are initialised from a normal distribution with standard deviation 0.02, biases with
    zero. The weights of norms after a layer start at zero, as in Swin V2: each block then starts as
    the identity, and in the first step only these norms of a block have gradients.
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.dim, config.patch_size, config.patch_size)
        self.patch_norm = nn.LayerNorm(config.dim)
        self.blocks = nn.ModuleList(
            SwinBlock(config, stage, block)
            for stage, depth in enumerate(config.depths)
            for block in range(depth)
        )
        self.merges = nn.ModuleList(
            PatchMerging(config.width(stage), config.norm) for stage in range(config.num_stages - 1)
        )
        last = config.width(config.num_stages - 1)
        self.norm = nn.LayerNorm(last)
        self.head = nn.Linear(last, config.num_classes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all weights, as the class describes."""
        for module in self.modules():
            if isinstance(module, nn.Linear | StackedLinear):
                module.weight.normal_(std=INIT_STD)
                if module.bias is not None:
                    module.bias.zero_()
            if isinstance(module, SwinBlock) and module.post_norm:
                module.attention_norm.weight.zero_()
                module.ffn_norm.weight.zero_()
        for layer in self.moe_layers():
            layer.init_normal(INIT_STD, INIT_STD)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (batch, num_classes).

        Args:
            images: (batch, channels, image_size, image_size), floating point.

        Raises:
            InputError: for images of another shape.
        """
        expected = (self.config.channels, self.config.image_size, self.config.image_size)
        if images.dim() != 4 or images.shape[1:] != expected:
            raise InputError(
                f"SwinMoE: images of shape {tuple(images.shape)}: give (batch, "
                f"{', '.join(map(str, expected))})"
            )
        x = self.patch_norm(self.patches(images).permute(0, 2, 3, 1))
        blocks = iter(self.blocks)
        for stage, depth in enumerate(self.config.depths):
            if stage > 0:
                x = self.merges[stage - 1](x)
            for _ in range(depth):
                x = next(blocks)(x)
        logits: Tensor = self.head(self.norm(x).mean((1, 2)))
        return logits

    def moe_layers(self) -> list[MoE]:
        """Return the MoE layers, in order."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_active_parameters(self) -> int:
        """Return the number of parameters that one token uses: all but those of experts to which it
        is not routed."""
        idle = 0
        for layer in self.moe_layers():
            of_experts = sum(parameter.numel() for parameter in layer.experts.parameters())
            idle += of_experts * (layer.num_experts - layer.top_k) // layer.num_experts
        return self.num_parameters() - idle


def make_vision_moe(config: SwinConfig, stage: int) -> MoE:
    """Build the MoE layer of a stage."""
    router: RouterFactory = ROUTERS[config.router]
    if config.router == "cosine":
        router = partial(CosineTopK, temperature=COSINE_TEMPERATURE)
    return MoE(
        config.width(stage),
        config.hidden(stage),
        config.num_experts,
        config.top_k,
        router=router,
        experts=partial(PlainExperts, bias=True),
        capacity=config.capacity,
        losses=(LoadBalance(config.balance_loss),) if config.balance_loss else (),
        eval_capacity=config.eval_capacity,
    )
