"""Whole steps on one GPU: a layer eagerly, compiled and replayed from a CUDA graph, and models of
transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from moesaic.cuda_graphs import capture
from moesaic.layer import MoE
from moesaic_lab.device.results import Row, reason
from moesaic_lab.device.timing import GIB, seconds_of
from moesaic_lab.measure import in_turn, over_ranks

REPEATS = 20
LAYER = {"dim": 1024, "hidden": 1024, "num_experts": 32, "top_k": 4}
TOKENS = 8192
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "head_dim": 8,
    "num_hidden_layers": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "mixtral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
    },
}
"""Models of the size of Qwen3-30B-A3B, Mixtral 8x7B and gpt-oss-20b, with few layers, by the name
of their family."""
IMPLEMENTATIONS = ("moesaic", "grouped_mm")
BATCH = (4, 4096)
BATCHES = {"gpt_oss": (4, 1024)}
"""Sequences and their lengths; shorter ones for a family whose attention keeps all its weights."""


def layer_row(*, dry: bool) -> Row:
    """Return milliseconds of a step of a layer: wall time by way of running it, and the host's and
    the GPU's share of it."""
    torch.manual_seed(0)
    device, tokens = ("cpu", 32) if dry else ("cuda", TOKENS)
    sizes: dict[str, Any] = LAYER | ({"dim": 32, "hidden": 16} if dry else {})
    layer = MoE(**sizes, device=device, dtype=torch.bfloat16)
    x = torch.randn(tokens, layer.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    ways: dict[str, Callable[..., Any]] = {"eager": layer}  # functions of x
    row: Row = {
        "tokens": tokens,
        "dim": layer.dim,
        "hidden": layer.hidden,
        "num_experts": layer.num_experts,
    }
    makers: dict[str, Callable[[], Any]] = {
        "compiled": lambda: torch.compile(layer, backend="aot_eager" if dry else "inductor"),
        "replayed": lambda: capture(layer, x),
    }
    for name, make in makers.items():
        try:
            ways[name] = make()
            _step(ways[name], layer, x, dy)
        except Exception as error:  # the others are measured without it
            row[f"{name}_absent"] = reason(error)
            ways.pop(name, None)
    methods = {name: partial(_step, way, layer, x, dy) for name, way in ways.items()}
    row |= {f"{name}_ms": 1e3 * seconds for name, seconds in _wall(methods).items()}
    for name, method in methods.items():
        row[f"{name}_gpu_ms"] = 1e3 * seconds_of(method)
        row[f"{name}_host_ms"] = 1e3 * median(_until_return(method) for _ in range(REPEATS))
    return row


def _step(run: Callable[..., Any], layer: MoE, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Run the layer forward and backward."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    run(x).backward(dy)


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _until_return(method: Callable[[], object]) -> float:
    """Return the seconds until a call returns, while the GPU may still be busy."""
    _wait()
    start = time.perf_counter()
    method()
    return time.perf_counter() - start


def _wall(methods: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each method until the GPU is done, measured in turn."""

    def until_done(method: Callable[[], object]) -> None:
        method()
        _wait()

    repeats = REPEATS if torch.cuda.is_available() else 2
    waiting = {name: partial(until_done, method) for name, method in methods.items()}
    spans = in_turn(waiting, repeats, barrier=_wait)
    return {name: median(seconds) for name, seconds in over_ranks([spans]).items()}


def model_row(family: str, *, dry: bool) -> Row:
    """Return step time, peak memory and loss of a model of transformers under each implementation
    of the experts, in turn."""
    import transformers

    import moesaic.transformers  # noqa: F401

    fields = FAMILIES[family] | {"vocab_size": 32768}
    batch = BATCHES.get(family, BATCH)
    if dry:
        fields |= SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
        batch = (1, 16)
    config = transformers.AutoConfig.for_model(family, **fields)
    torch.manual_seed(0)
    with torch.device("cpu" if dry else "cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(config.vocab_size, batch)
    row: Row = {"tokens": ids.numel(), "family": family}

    def step(implementation: str) -> torch.Tensor:
        model.set_experts_implementation(implementation)
        model.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    for name in IMPLEMENTATIONS:
        row[f"{name}_loss"] = float(step(name))
        if not dry:
            torch.cuda.reset_peak_memory_stats()
            step(name)
            row[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    seconds_by_name = _wall({name: partial(step, name) for name in IMPLEMENTATIONS})
    row |= {f"{name}_ms": 1e3 * seconds for name, seconds in seconds_by_name.items()}
    return row | {"over_grouped_mm": row["moesaic_ms"] / row["grouped_mm_ms"]}
