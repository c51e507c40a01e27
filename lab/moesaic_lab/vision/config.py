"""The configuration of `SwinMoE`, and presets with the published sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from moesaic.errors import InputError
from moesaic.routing.capacity import AbstractCapacity, Capacity
from moesaic.routing.routers import ON_MESH, ROUTERS

if TYPE_CHECKING:
    RouterName: TypeAlias = str
else:
    RouterName = Literal[tuple(ROUTERS | ON_MESH)]
"""A registered router's name; command lines list all names as choices."""

PUBLISHED_CAPACITY = Capacity.fixed(1.0)
"""The capacity with which Tutel trains Swin."""


@dataclass(frozen=True, kw_only=True)
class SwinConfig:
    """Configuration of a Swin Transformer V2, dense or with MoE feed-forward layers. The default is
    the dense SwinV2-S."""

    ffn: Literal["moe", "dense"] = "dense"
    """Feed-forward layers: "dense", or "moe" to make every second one from stage `dense_stages` on
    an MoE layer."""
    image_size: int = 192
    """Height and width of an image in pixels."""
    channels: int = 3
    """Colour channels of an image."""
    num_classes: int = 21841
    """Logits per image; ImageNet-22K has 21,841 classes."""
    patch_size: int = 4
    """Height and width in pixels of a patch, which becomes one token."""
    window: int = 12
    """Height and width in tokens of an attention window; a stage with fewer tokens has one window
    for all of them."""
    dim: int = 96
    """Width of a token in the first stage; every later stage doubles the width and halves the
    image's height and width."""
    depths: Sequence[int] = (2, 2, 18, 2)
    """Blocks of each stage. Every second block shifts its windows."""
    heads: Sequence[int] = (3, 6, 12, 24)
    """Attention heads of each stage."""
    mlp_ratio: float = 4.0
    """Inner width of a feed-forward layer, and of one expert, over the width of a token."""
    norm: Literal["post", "pre"] = "post"
    """Where a block normalises: the outputs of its layers ("post", Swin V2) or their inputs
    ("pre"). A norm after an MoE layer of top_k 1 cancels the routing weight, and the router then
    learns from little more than the auxiliary loss. So Swin's published MoE code uses "pre", as do
    the presets with MoE layers."""
    num_experts: int = 32
    """Experts per MoE layer."""
    top_k: int = 1
    """Experts per token."""
    dense_stages: int = 2
    """Stages at the start without MoE layers."""
    router: RouterName = "switch"
    """Router, see docs/layer.md. "switch" is Tutel's linear router, "cosine" is Tutel's cosine
    router."""
    capacity: AbstractCapacity = PUBLISHED_CAPACITY
    """Capacity of the experts in training; `order="score"` is batch-prioritised routing."""
    eval_capacity: AbstractCapacity | None = None
    """Capacity in evaluation; None uses that of training."""
    balance_loss: float = 0.01
    """Coefficient of the load-balance loss; 0 turns it off."""

    def __post_init__(self) -> None:
        for names, holds, requirement in self._requirements():
            if not holds:
                values = ", ".join(f"swin.{name}={getattr(self, name)!r}" for name in names.split())
                raise InputError(f"{values}: must be {requirement}")

    def _requirements(self) -> Iterator[tuple[str, bool, str]]:
        """Yield names of fields, whether they are valid, and what they must be."""
        for name in (
            "image_size",
            "channels",
            "num_classes",
            "patch_size",
            "window",
            "dim",
            "num_experts",
            "top_k",
        ):
            yield name, getattr(self, name) >= 1, "at least 1"
        yield "dense_stages", self.dense_stages >= 0, "at least 0"
        yield "balance_loss", 0 <= self.balance_loss < math.inf, "at least 0 and finite"
        yield "mlp_ratio", 0 < self.mlp_ratio < math.inf, "above 0 and finite"
        yield "ffn", self.ffn in ("moe", "dense"), "moe or dense"
        yield "norm", self.norm in ("post", "pre"), "post or pre"
        yield (
            "router",
            self.router in ROUTERS and self.router != "hash",
            "a router that reads no token ids",
        )
        yield "depths", bool(self.depths) and min(self.depths) >= 1, "blocks of at least one stage"
        yield (
            "top_k num_experts",
            self.ffn == "dense" or self.top_k <= self.num_experts,
            "at most as many as experts",
        )
        yield "heads depths", len(self.heads) == self.num_stages, "one number per stage each"
        least = self.patch_size * 2 ** (self.num_stages - 1)
        yield (
            "image_size",
            self.image_size % least == 0,
            f"a multiple of {least}, which all stages can halve",
        )
        for stage, heads in enumerate(self.heads):
            width = self.width(stage)
            side = self.resolution(stage)
            yield (
                "heads",
                heads >= 1 and width % heads == 0,
                f"a divisor of the width {width} in stage {stage}",
            )
            yield (
                "window",
                side % self.window_of(stage) == 0,
                f"a divisor of the {side} tokens of a side in stage {stage}",
            )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.depths)

    def resolution(self, stage: int) -> int:
        """Return the tokens along a side of an image in a stage."""
        return self.image_size // self.patch_size // 2**stage

    def width(self, stage: int) -> int:
        """Return the width of a token in a stage."""
        return self.dim * int(2**stage)

    def hidden(self, stage: int) -> int:
        """Return the inner width of a feed-forward layer of a stage."""
        return int(self.width(stage) * self.mlp_ratio)

    def window_of(self, stage: int) -> int:
        """Return the tokens along a side of a window in a stage."""
        return min(self.window, self.resolution(stage))

    def shift(self, stage: int, block: int) -> int:
        """Return the number of tokens by which a block's windows are shifted; 0 in a stage with one
        window."""
        return self.window // 2 if block % 2 and self.resolution(stage) > self.window else 0

    def is_sparse(self, stage: int, block: int) -> bool:
        """Return whether a block has an MoE layer: every second one does, from stage `dense_stages`
        on."""
        return self.ffn == "moe" and stage >= self.dense_stages and block % 2 == 1


_SMALL = SwinConfig()
_BASE = replace(_SMALL, dim=128, heads=(4, 8, 16, 32))
_DIGITS = SwinConfig(
    image_size=8,
    channels=1,
    num_classes=10,
    patch_size=2,
    window=2,
    dim=32,
    depths=(2, 2),
    heads=(2, 4),
    mlp_ratio=0.5,
    norm="pre",
    num_experts=8,
    dense_stages=0,
)

PRESETS: dict[str, SwinConfig] = {
    "swinv2-s": _SMALL,
    "swinv2-moe-s": replace(_SMALL, ffn="moe", norm="pre"),
    "swinv2-b": _BASE,
    "swinv2-moe-b": replace(_BASE, ffn="moe", norm="pre"),
    "swin-tiny": replace(_DIGITS, ffn="moe"),
    "swin-tiny-dense": _DIGITS,
}
"""Models by name: SwinV2-S and -B, the models with 32 experts of Tutel's section 5.3, and one for
8x8 images of digits."""
