"""The foreign formats of routing traces. To add one, add a file and a line here."""

from __future__ import annotations

from moesaic.traces.formats import counts, megatron, routed_experts
from moesaic.traces.formats.base import ReadOptions, TraceFormat

FORMATS: dict[str, TraceFormat] = {
    "megatron": megatron.FORMAT,
    "vllm": routed_experts.VLLM,
    "sglang": routed_experts.SGLANG,
    "counts": counts.FORMAT,
}
"""The formats by their names in `moesaic trace convert`."""

__all__ = ["FORMATS", "ReadOptions", "TraceFormat"]
