"""The layers measured on a GPU, the published figures for them, and the claims about them. This
module imports no torch.

Twelve layers are those of SonicMoE's paper (Guo et al. 2025), which compares SonicMoE, ScatterMoE
and others on one H100 with SwiGLU in bfloat16. The published figures are read off the paper's
chart, to about ±3 TFLOP/s. The other four are layers of models that people train: Qwen3-30B-A3B,
Mixtral 8x7B, gpt-oss-120b and DeepSeek-V3.
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
    is_clamped: bool = False
    """Whether the experts are those of gpt-oss: clamped SwiGLU with biases."""

    @property
    def name(self) -> str:
        """The layer's name in claims."""
        return f"T{self.tokens}_H{self.dim}_I{self.hidden}_E{self.num_experts}_K{self.top_k}"

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward pass without the router; the backward pass has twice as many."""
        return 6 * self.tokens * self.dim * self.hidden * self.top_k


@dataclass(frozen=True)
class PublishedTimes:
    """Published figures of one layer on an H100."""

    sonic: tuple[int, int]
    """TFLOP/s of SonicMoE, forward and backward."""
    scatter: tuple[int, int]
    """TFLOP/s of ScatterMoE, forward and backward."""
    sonic_gib: float | None
    """Activation memory of SonicMoE in GiB; None if the paper's chart gives no figure."""


LAYERS: dict[GpuLayer, PublishedTimes | None] = {
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
    GpuLayer(8192, 2048, 768, 128, 8): None,
    GpuLayer(8192, 4096, 14336, 8, 2): None,
    GpuLayer(8192, 2880, 2880, 128, 4, is_clamped=True): None,
    GpuLayer(8192, 7168, 2048, 256, 8): None,
}
"""Published figures by layer, in the order of the paper's chart; None for the layers of models,
which have none."""
LARGEST = GpuLayer(32768, 4096, 2048, 64, 4)
"""The largest layer of the chart."""
OVER_LIGER = 1.5
OVER_DENSE = 0.75
OVER_KERNELS = 1.08
"""Largest allowed time of a whole layer, with router and losses, divided by the time of its
kernels."""
OVER_SONIC_MEMORY = 1.1


def claims(layers: Sequence[GpuLayer], rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return the claims about layers; a claim without a value has a reason.

    Args:
        layers: the layers to claim something about, measured or not.
        rows: rows of `on_gpu.measure` and `measure_sonic` by name: a layer's name, "sonic." and a
            layer's name, or "dense".
    """
    all_claims = []
    for layer in layers:
        all_claims += _layer_claims(layer, rows)
    return all_claims + _largest_claims(layers, rows)


def _layer_claims(layer: GpuLayer, rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return the claims about a layer. The value of a claim is None if what it needs was not
    measured."""
    row = rows.get(layer.name, {"error": "not measured: no time was left"})
    published = LAYERS.get(layer)
    ours = row.get("ours")
    error = row.get("error", "")
    all_claims = list[Claim]()

    def claim(
        what: str,
        value: float | None,
        target: float | None,
        op: Literal[">=", "<="],
        unit: str = "1",
        reason: str = "",
    ) -> None:
        name = f"gpu.{layer.name}.{what}"
        if value is not None:
            reason = ""
        elif error:  # the whole layer failed
            reason = error
        all_claims.append(
            Claim(name=name, value=value, unit=unit, target=target, op=op, reason=reason)
        )

    for number, direction in enumerate(("forward", "backward")):
        what = f"{direction}_tflops"
        tflops = None if ours is None else ours[what]
        target = None if published is None else float(published.sonic[number])
        claim(what, tflops, target, ">=", "TFLOP/s")
    absent = f"liger-kernel could not be run: {row.get('liger_absent', '')}"
    if published is not None and ours is not None:
        absent += (
            "; ScatterMoE's published H100 figures are "
            f"{published.scatter[0]}/{published.scatter[1]} TFLOP/s"
        )
    claim("over_liger", row.get("liger", {}).get("over_ours"), OVER_LIGER, ">=", reason=absent)
    claim(
        "over_grouped_mm",
        row.get("grouped_mm", {}).get("over_ours"),
        None,
        ">=",
        reason=row.get("grouped_mm_absent", ""),
    )
    sonic = rows.get(f"sonic.{layer.name}", {"error": "SonicMoE was not run"})
    claim("over_sonic", sonic.get("over_ours"), None, ">=", reason=sonic.get("error", ""))
    whole = row.get("layer", {}).get("over_ours")
    claim("layer_over_kernels", whole, OVER_KERNELS, "<=", reason=row.get("layer_absent", ""))
    most_gib = None
    if published is not None and published.sonic_gib is not None:
        most_gib = OVER_SONIC_MEMORY * published.sonic_gib
    kept_gib = None if ours is None else ours["memory_gib"]["kept"]
    claim("activation_gib", kept_gib, most_gib, "<=", "GiB")
    return all_claims


def _largest_claims(
    layers: Sequence[GpuLayer], rows: Mapping[str, Mapping[str, Any]]
) -> list[Claim]:
    """Return the claims on the largest layer's TFLOP/s divided by the device's rate on one dense
    product."""
    if LARGEST not in layers:
        return []
    ours = rows.get(LARGEST.name, {}).get("ours")
    dense = rows.get("dense", {}).get("tflops")
    reason = "the largest layer or the dense rate was not measured"
    values: dict[str, float | None] = {"forward": None, "backward": None}
    if ours is not None and dense is not None:
        reason = ""
        values = {way: ours[f"{way}_tflops"] / dense for way in values}
    return [
        Claim(
            name=f"gpu.largest.{way}_over_dense",
            value=value,
            target=OVER_DENSE,
            op=">=",
            reason=reason,
        )
        for way, value in values.items()
    ]
