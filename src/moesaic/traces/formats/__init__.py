"""Every foreign format of routing traces by its name. To add one: a new file, and a line here."""

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
"""By the name that `moesaic trace convert` takes."""

__all__ = ["FORMATS", "ReadOptions", "TraceFormat"]
