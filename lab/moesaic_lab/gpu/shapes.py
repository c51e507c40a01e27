"""The twelve layers that a GPU is measured on, what others published for them, and what is claimed of them. No torch.

SonicMoE's paper (Guo et al. 2025) compares itself, ScatterMoE and others on one H100 on these: SwiGLU, bfloat16, figures
read off its chart, about 3 TFLOP/s either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moesaic_lab.claims import Claim


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class PublishedTimes:
    """TFLOP/s forward and backward on an H100, and memory."""

    sonic: tuple[int, int]
    scatter: tuple[int, int]
    sonic_gib: float | None
    """Activation memory of a layer; None where no figure was read."""


LAYERS: dict[GpuLayer, PublishedTimes] = {
    GpuLayer(40960, 768, 256, 128, 8): PublishedTimes((337, 365), (181, 204), None),
    GpuLayer(40960, 768, 512, 64, 4): PublishedTimes((397, 401), (202, 243), None),
    GpuLayer(40960, 768, 1024, 32, 2): PublishedTimes((403, 433), (234, 268), None),
    GpuLayer(24576, 1536, 256, 128, 8): PublishedTimes((363, 403), (204, 211), 0.60),
    GpuLayer(24576, 1536, 512, 64, 4): PublishedTimes((433, 437), (232, 247), 0.60),
    GpuLayer(24576, 1536, 1024, 32, 2): PublishedTimes((465, 465), (264, 279), 0.60),
    GpuLayer(32768, 4096, 256, 256, 16): PublishedTimes((427, 459), (260, 236), 2.5),
    GpuLayer(32768, 4096, 512, 128, 8): PublishedTimes((502, 511), (322, 303), 2.5),
    GpuLayer(32768, 4096, 1024, 64, 4): PublishedTimes((552, 554), (367, 339), 2.5),
    GpuLayer(32768, 4096, 512, 256, 16): PublishedTimes((517, 526), (335, 313), None),
    GpuLayer(32768, 4096, 1024, 128, 8): PublishedTimes((558, 567), (380, 352), None),
    GpuLayer(32768, 4096, 2048, 64, 4): PublishedTimes((597, 586), (384, 369), None),
}
"""In the order of the paper's chart; the last is the largest."""
LARGEST = list(LAYERS)[-1]
OVER_LIGER = 1.5
OVER_DENSE = 0.75
OVER_KERNELS = 1.08
"""Of a whole layer, router and losses among it, over its kernels."""
OVER_SONIC_MEMORY = 1.1


def claims(layers: Sequence[GpuLayer], rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return the claims of these layers; one without a value says why.

    Args:
        layers: that were to be measured.
        rows: by layer name, as `run.measure` makes them, and "dense".
    """
    return [claim for layer in layers for claim in _of_layer(layer, rows)] + _of_largest(layers, rows)


def _of_layer(layer: GpuLayer, rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    row, published = rows.get(layer.name, {"error": "not measured: no time was left"}), LAYERS.get(layer)
    mine, error, found = row.get("ours"), row.get("error", ""), list[Claim]()

    def claim(
        what: str, value: float | None, target: float | None, op: Literal[">=", "<="], unit: str = "1", why: str = ""
    ) -> None:
        name, reason = f"gpu.{layer.name}.{what}", error or why if value is None else ""
        found.append(Claim(name=name, value=value, unit=unit, target=target, op=op, reason=reason))

    for number, which in enumerate(("forward", "backward")):
        target = None if published is None else float(published.sonic[number])
        claim(f"{which}_tflops", mine and mine[f"{which}_tflops"], target, ">=", "TFLOP/s")
    absent = f"liger-kernel could not be run: {row.get('liger_absent', '')}"
    if published is not None and mine is not None:
        absent += f"; ScatterMoE's published H100 figures are {published.scatter[0]}/{published.scatter[1]} TFLOP/s"
    claim("over_liger", row.get("liger", {}).get("over_ours"), OVER_LIGER, ">=", why=absent)
    claim(
        "over_grouped_mm", row.get("grouped_mm", {}).get("over_ours"), None, ">=", why=row.get("grouped_mm_absent", "")
    )
    kernels = rows.get(f"sonic.{layer.name}", {"error": "SonicMoE was not run"})
    claim("over_sonic", kernels.get("over_ours"), None, ">=", why=kernels.get("error", ""))
    whole = row.get("layer", {}).get("over_ours")
    claim("layer_over_kernels", whole, OVER_KERNELS, "<=", why=row.get("layer_absent", ""))
    gib = None if published is None else published.sonic_gib
    kept = None if mine is None else mine["memory_gib"]["kept"]
    claim("activation_gib", kept, None if gib is None else OVER_SONIC_MEMORY * gib, "<=", "GiB")
    return found


def _of_largest(layers: Sequence[GpuLayer], rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return how near the largest layer comes to the card's rate on one dense product."""
    if LARGEST not in layers:
        return []
    mine, dense = rows.get(LARGEST.name, {}).get("ours"), rows.get("dense", {}).get("tflops")
    reason = "" if mine is not None and dense is not None else "the largest layer or the dense rate was not measured"
    return [
        Claim(
            name=f"gpu.largest.{which}_over_dense", unit="1", target=OVER_DENSE, op=">=", reason=reason,
            value=mine[f"{which}_tflops"] / dense if mine is not None and dense is not None else None,
        )
        for which in ("forward", "backward")
    ]  # fmt: skip
