"""The foreign formats of routing traces. To add one, add a file and a line here."""

from __future__ import annotations

from moesaic.traces.formats import laer, llama_cpp, megatron, routed_experts, smartmoe
from moesaic.traces.formats.base import ReadOptions, TraceFormat

FORMATS: dict[str, TraceFormat] = {
    "laer": laer.FORMAT,
    "megatron": megatron.FORMAT,
    "vllm": routed_experts.VLLM,
    "sglang": routed_experts.SGLANG,
    "llama.cpp": llama_cpp.FORMAT,
    "smartmoe": smartmoe.FORMAT,
}
"""The formats by their names in `moesaic trace convert`."""

__all__ = ["FORMATS", "ReadOptions", "TraceFormat"]
