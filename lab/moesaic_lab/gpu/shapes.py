"""The twelve layers that a GPU is measured on, and what others published for them. No torch.

SonicMoE's paper (Guo et al. 2025) compares itself, ScatterMoE and others on one H100 on these: SwiGLU, bfloat16, figures
read off its chart, about 3 TFLOP/s either way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuLayer:
    """The sizes of one layer."""

    tokens: int
    dim: int
    hidden: int
    num_experts: int
    top_k: int

    @property
    def name(self) -> str:
        """Name the layer as claims do."""
        return f"T{self.tokens}_H{self.dim}_I{self.hidden}_E{self.num_experts}_K{self.top_k}"

    @property
    def forward_flops(self) -> int:
        """Products of the forward pass, the router left out; backward has twice as many."""
        return 6 * self.tokens * self.dim * self.hidden * self.top_k


@dataclass(frozen=True, kw_only=True)
class PublishedTimes:
    """TFLOP/s forward and backward on an H100, and memory."""

    sonic: tuple[int, int]
    scatter: tuple[int, int]
    sonic_gib: float | None
    """Activation memory of a layer; None where no figure was read."""


def _layer(tokens: int, dim: int, hidden: int, num_experts: int, top_k: int) -> GpuLayer:
    return GpuLayer(tokens=tokens, dim=dim, hidden=hidden, num_experts=num_experts, top_k=top_k)


def _published(sonic: tuple[int, int], scatter: tuple[int, int], sonic_gib: float | None) -> PublishedTimes:
    return PublishedTimes(sonic=sonic, scatter=scatter, sonic_gib=sonic_gib)


LAYERS: dict[GpuLayer, PublishedTimes] = {
    _layer(40960, 768, 256, 128, 8): _published((337, 365), (181, 204), None),
    _layer(40960, 768, 512, 64, 4): _published((397, 401), (202, 243), None),
    _layer(40960, 768, 1024, 32, 2): _published((403, 433), (234, 268), None),
    _layer(24576, 1536, 256, 128, 8): _published((363, 403), (204, 211), 0.60),
    _layer(24576, 1536, 512, 64, 4): _published((433, 437), (232, 247), 0.60),
    _layer(24576, 1536, 1024, 32, 2): _published((465, 465), (264, 279), 0.60),
    _layer(32768, 4096, 256, 256, 16): _published((427, 459), (260, 236), 2.5),
    _layer(32768, 4096, 512, 128, 8): _published((502, 511), (322, 303), 2.5),
    _layer(32768, 4096, 1024, 64, 4): _published((552, 554), (367, 339), 2.5),
    _layer(32768, 4096, 512, 256, 16): _published((517, 526), (335, 313), None),
    _layer(32768, 4096, 1024, 128, 8): _published((558, 567), (380, 352), None),
    _layer(32768, 4096, 2048, 64, 4): _published((597, 586), (384, 369), None),
}
"""In the order of the paper's chart; the last is the largest."""
LARGEST = list(LAYERS)[-1]
