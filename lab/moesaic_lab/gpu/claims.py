"""The figures that documentation and issues quote of the GPU benchmark, from its rows. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic_lab.claims import Claim
from moesaic_lab.gpu.shapes import LARGEST, LAYERS, GpuLayer

OVER_LIGER = 1.5
OVER_DENSE = 0.75
OVER_KERNELS = 1.08
"""Of a whole layer, router and losses among it, over its kernels."""
OVER_SONIC_MEMORY = 1.1


def claims(layers: Sequence[GpuLayer], rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return the claims of these layers; one without a value says why.

    Args:
        layers: that were to be measured.
        rows: by layer name, as `gpu_device.measure` makes them, and "dense".
    """
    return [claim for layer in layers for claim in _of_layer(layer, rows)] + _of_largest(layers, rows)


def _of_layer(layer: GpuLayer, rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    row, published = rows.get(layer.name, {"error": "not measured: no time was left"}), LAYERS.get(layer)
    mine, reason = row.get("ours"), row.get("error", "")
    found = []
    for number, which in enumerate(("forward", "backward")):
        target = None if published is None else float(published.sonic[number])
        value = None if mine is None else mine[f"{which}_tflops"]
        found.append(_claim(layer, f"{which}_tflops", value, "TFLOP/s", target, ">=", reason))
    peer = row.get("liger")
    absent = reason or f"liger-kernel could not be run: {row.get('liger_absent', '')}"
    if published is not None and mine is not None and peer is None:
        absent += f"; ScatterMoE's published H100 figures are {published.scatter[0]}/{published.scatter[1]} TFLOP/s"
    value = None if peer is None else peer["over_ours"]
    found.append(_claim(layer, "over_liger", value, "1", OVER_LIGER, ">=", absent))
    torch_way = row.get("grouped_mm")
    value = None if torch_way is None else torch_way["over_ours"]
    found.append(_claim(layer, "over_grouped_mm", value, "1", None, ">=", reason or row.get("grouped_mm_absent", "")))
    kernels = rows.get(f"sonic.{layer.name}", {"error": "SonicMoE was not run"})
    value = kernels.get("over_ours")
    found.append(_claim(layer, "over_sonic", value, "1", None, ">=", reason or kernels.get("error", "")))
    whole = row.get("layer")
    value = None if whole is None else whole["over_ours"]
    found.append(
        _claim(layer, "layer_over_kernels", value, "1", OVER_KERNELS, "<=", reason or row.get("layer_absent", ""))
    )
    target = None
    if published is not None and published.sonic_gib is not None:
        target = OVER_SONIC_MEMORY * published.sonic_gib
    value = None if mine is None else mine["memory_gib"]["kept"]
    found.append(_claim(layer, "activation_gib", value, "GiB", target, "<=", reason))
    return found


def _of_largest(layers: Sequence[GpuLayer], rows: Mapping[str, Mapping[str, Any]]) -> list[Claim]:
    """Return how near the largest layer comes to the card's rate on one dense product."""
    if LARGEST not in layers:
        return []
    mine, dense = rows.get(LARGEST.name, {}).get("ours"), rows.get("dense", {}).get("tflops")
    found = []
    for which in ("forward", "backward"):
        value = None if mine is None or dense is None else mine[f"{which}_tflops"] / dense
        reason = "" if value is not None else "the largest layer or the dense rate was not measured"
        found.append(
            Claim(
                name=f"gpu.largest.{which}_over_dense", value=value, unit="1", target=OVER_DENSE, op=">=", reason=reason
            )
        )
    return found


def _claim(
    layer: GpuLayer, what: str, value: float | None, unit: str, target: float | None, op: Any, reason: str
) -> Claim:
    name = f"gpu.{layer.name}.{what}"
    return Claim(name=name, value=value, unit=unit, target=target, op=op, reason="" if value is not None else reason)
