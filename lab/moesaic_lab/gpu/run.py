"""Measures MoE layers on one GPU: TFLOP/s forward and backward and activation memory, compared with other implementations.

`measure` first checks results on a small layer. Then it searches tiles (or reads them from a file), checks each layer's
results, times the implementations in turn, and measures their memory. Results are written to files at once, so an interrupted
run continues where it stopped. A layer that fails gets a row with the reason, and its claims have no value.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moesaic.errors import InputError, to_install
from moesaic_lab.claims import Measurement, describe_machine, write_whole
from moesaic_lab.gpu.layers import (
    TOLERANCE,
    Implementation,
    Inputs,
    errors,
    grouped_mm,
    layer_of,
    liger,
    ours,
    relative,
    sonic,
)
from moesaic_lab.gpu.shapes import LAYERS, GpuLayer, claims
from moesaic_lab.gpu.timing import dense_tflops, in_turn, memory_of

STAGES = ("check", "tune", "measure")
SONIC = "sonic"
"""Name of the stage that times SonicMoE. It is separate because compiling SonicMoE's kernels may take minutes, and a layer's
figures must not be lost to that."""
DENSE_SIZE = 8192
SMALL = GpuLayer(tokens=1000, dim=264, hidden=136, num_experts=7, top_k=3)
"""The layer of the stage `check`: no size is a multiple of a tile."""
TINY = GpuLayer(tokens=24, dim=40, hidden=24, num_experts=3, top_k=2)
"""The layer that a dry run measures: Triton's interpreter takes a second per kernel."""


NOTES = (
    "One SwiGLU layer, bfloat16, forward 6 T H I K and backward 12 T H I K FLOPs, router excluded, sorting of copies "
    "included; random router. Ways run in turn, median over the repeats by CUDA events, the host ahead of the GPU as in "
    "training. activation_gib: held between forward and backward, the layer's input included. Published figures were "
    "measured on an H100 by SonicMoE's authors."
)


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of the layers' benchmark."""

    layers: tuple[str, ...] = ()
    """Names or parts of names of the layers to measure; empty for all."""
    stages: tuple[str, ...] = STAGES
    """Which of check, tune, measure and sonic to run; an earlier run may have done the tuning."""
    folder: Path = Path("gpu_results")
    """Folder of tiles.json and rows.json, from which a later run continues."""
    repeats: int = 20
    """Timed runs of each implementation."""
    seconds: float = 1500.0
    """Time after which no further layer or tile is started."""
    products: tuple[str, ...] = ()
    """Grouped products to search tiles for; empty for all."""
    dry: bool = False
    """Whether to run on the CPU under Triton's interpreter. The figures then say nothing about a GPU."""

    @property
    def device(self) -> str:
        """The device of all tensors."""
        return "cpu" if self.dry else "cuda"

    @property
    def device_name(self) -> str:
        """The GPU's name as torch reports it."""
        return "none: a dry run" if self.dry else torch.cuda.get_device_name()


def measure(options: GpuOptions) -> Measurement:
    """Run the stages and return rows and claims.

    Raises:
        InputError: there is no GPU or no Triton, a stage is unknown, or a name matches no layer.
    """
    _require(options)
    deadline = time.monotonic() + options.seconds
    layers = _chosen(options)
    results = _ResultFile(options)
    if "check" in options.stages:
        for dtype in (torch.float32, torch.bfloat16):
            _check_small(dtype, options.device)
        _check_odd_logits(options.device)
    if "measure" in options.stages and "dense" not in results.rows:
        # A processor without bfloat16 instructions takes minutes for what is milliseconds on a GPU.
        size = 64 if options.dry else DENSE_SIZE
        results.write("dense", {"tflops": dense_tflops(size, torch.bfloat16, options.device)})
    for stage in ("tune", "measure", SONIC):
        for layer in layers:
            if stage not in options.stages or (stage != "tune" and results.is_done(_row_name(stage, layer))):
                continue
            if time.monotonic() > deadline:
                _say(f"{layer.name}: no time left to {stage}")
                continue
            _attempt(stage, layer, options, results, deadline)
    return Measurement(
        rows=list(results.rows.values()), claims=claims(layers, results.rows), notes=NOTES,
        packages=("torch", "triton", "liger_kernel"),
        machine=describe_machine() | {"gpu": options.device_name},
    )  # fmt: skip


class _ResultFile:
    """The rows measured so far, kept in `rows.json`. Rows of another GPU or torch version are discarded."""

    def __init__(self, options: GpuOptions) -> None:
        self.path = options.folder / "rows.json"
        self.key = f"{options.device_name}, torch {torch.__version__}"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.rows = content["rows"] if content.get("key") == self.key else {}

    def is_done(self, name: str) -> bool:
        """Return whether a row was measured without an error."""
        return "error" not in self.rows.get(name, {"error": "not measured"})

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Add a row and rewrite the file."""
        self.rows[name] = {"name": name} | row
        write_whole(self.path, json.dumps({"key": self.key, "rows": self.rows}, indent=1))


def _attempt(stage: str, layer: GpuLayer, options: GpuOptions, results: _ResultFile, deadline: float) -> None:
    """Run one stage of one layer and record any exception in the layer's row."""
    start = time.monotonic()
    try:
        _run(stage, layer, options, results, deadline)
    except Exception as error:  # a kernel that does not compile must not cost the other layers
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        _say(f"{layer.name}: {stage} failed: {reason}")
        if stage != "tune":
            results.write(_row_name(stage, layer), {"error": reason})
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # after a persistent CUDA error, which the row already has
            torch.cuda.empty_cache()
    _say(f"{layer.name}: {stage} took {time.monotonic() - start:.0f} s")


def _run(stage: str, layer: GpuLayer, options: GpuOptions, results: _ResultFile, deadline: float) -> None:
    from moesaic.kernels.triton.expert_stage import shapes
    from moesaic.kernels.triton.rows.launch import device_of
    from moesaic_lab.gpu.search import load
    from moesaic_lab.gpu.tune import breakdown, tune

    inputs = Inputs.random(layer, options.device, torch.bfloat16)
    path = options.folder / "tiles.json"
    tuned = load(path, device_of(inputs.x.device))
    if stage == "tune":
        tune(layer, inputs, tuned, path, deadline, _say, options.products)
        return
    sizes = (layer.tokens * layer.top_k, layer.num_experts, layer.dim, layer.hidden, inputs.x.itemsize)
    own = ours(inputs, tuned.tiles(shapes(*sizes, gated=True)))
    if stage == SONIC:
        row = _compared(layer, inputs, own, {SONIC: sonic}, options.repeats)
        if f"{SONIC}_absent" in row:
            raise RuntimeError(row[f"{SONIC}_absent"])
        results.write(_row_name(stage, layer), row[SONIC])
        return
    exact = own.forward()
    found = _errors_within_tolerance(inputs, exact, torch.autograd.grad(exact, inputs.leaves, inputs.dy))
    del exact
    row = {"rows_per_expert": layer.tokens * layer.top_k // layer.num_experts, "errors": found}
    row |= _compared(layer, inputs, own, {"grouped_mm": grouped_mm, "liger": liger, "layer": layer_of}, options.repeats)
    results.write(layer.name, row | {"steps": breakdown(layer, inputs, tuned)})
    _say(f"{layer.name}: {row['ours']['forward_tflops']:.0f} / {row['ours']['backward_tflops']:.0f} TFLOP/s")


def _row_name(stage: str, layer: GpuLayer) -> str:
    return f"{SONIC}.{layer.name}" if stage == SONIC else layer.name


def _compared(
    layer: GpuLayer, inputs: Inputs, own: Implementation, others: Mapping[str, Callable[[Inputs], Implementation]],
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Return times and memory of our kernels and of others that compute the same, or why another could not be run."""
    implementations, row = {"ours": own}, dict[str, Any]()
    exact = own.forward().detach()
    for name, make in others.items():
        try:
            implementation = make(inputs)
            distance = relative(implementation.forward().detach(), exact)
            if name != "layer" and not distance < TOLERANCE:  # `layer_of` routes by itself
                raise AssertionError(f"its result differs from ours by {distance:.3g}")
            implementations[name] = implementation
        except Exception as error:  # an optional peer: absent, too old or out of memory
            row[f"{name}_absent"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    del exact
    seconds = _timed(implementations, inputs.dy, repeats)
    for name, implementation in implementations.items():
        row[name] = {"over_ours": _ratio(seconds, name)}
        for direction, flops in (("forward", layer.forward_flops), ("backward", 2 * layer.forward_flops)):
            times = seconds[f"{name} {direction}"]
            low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
            row[name] |= {
                f"{direction}_ms": median * 1e3, f"{direction}_tflops": flops / median / 1e12,
                f"{direction}_ms_spread": [low * 1e3, high * 1e3],
            }  # fmt: skip
        row[name]["memory_gib"] = vars(memory_of(implementation.forward, inputs.x, implementation.leaves, inputs.dy))
    return row


def _timed(implementations: dict[str, Implementation], dy: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each implementation's forward and backward pass, timed in turn."""
    methods: dict[str, Callable[[], object]] = {}
    for name, implementation in implementations.items():
        methods[f"{name} forward"] = implementation.forward
        methods[f"{name} backward"] = partial(
            torch.autograd.grad, implementation.forward(), implementation.leaves, dy, retain_graph=True
        )
    return in_turn(methods, repeats)


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Return the median over the repeats of an implementation's forward plus backward time divided by ours."""
    pairs = zip(*(seconds[f"{own} {which}"] for own in (name, "ours") for which in ("forward", "backward")))
    return statistics.median((a + b) / (c + d) for a, b, c, d in pairs)


def _check_small(dtype: torch.dtype, device: str) -> None:
    """Check the kernels on a layer of odd sizes before anything is timed."""
    inputs = Inputs.random(SMALL, device, dtype)
    y = ours(inputs, None).forward()
    by_result = _errors_within_tolerance(inputs, y, torch.autograd.grad(y, inputs.leaves, inputs.dy))
    _say(f"check {dtype}: largest error {max(by_result.values()):.2g} of a result's size")


def _check_odd_logits(device: str) -> None:
    """Check that NaN logits and copies for no existing expert affect no other token and cause no access out of bounds."""
    from moesaic.kernels.triton.rows.top_k import top_k_columns

    inputs = Inputs.random(SMALL, device, torch.bfloat16)
    logits = torch.randn(SMALL.tokens, SMALL.num_experts, device=inputs.x.device)
    logits[::3] = float("nan")
    logits[1::7, 2] = float("nan")
    expert = top_k_columns(logits, SMALL.top_k)
    weight = logits.gather(1, expert.long()).softmax(1).detach().requires_grad_()
    expert[2::5, 0] = SMALL.num_experts
    odd = ours(replace(inputs, expert=expert, weight=weight), None)
    y = odd.forward()
    torch.autograd.grad(y, odd.leaves, inputs.dy)
    is_odd = logits.isnan().any(1)
    assert torch.equal(y.isnan().any(1), is_odd), "the outputs that are NaN are not those of the tokens with NaN logits"
    _say(f"check logits of NaN: {int(is_odd.sum())} tokens of {len(is_odd)}")


def _errors_within_tolerance(
    inputs: Inputs, y: torch.Tensor, grads: tuple[torch.Tensor | None, ...]
) -> dict[str, float]:
    by_result = errors(inputs, y.detach(), grads)
    wrong = {name: error for name, error in by_result.items() if not error < TOLERANCE}
    assert not wrong, f"wrong results: {wrong}"
    return by_result


def _chosen(options: GpuOptions) -> list[GpuLayer]:
    layers = [layer for layer in LAYERS if not options.layers or any(part in layer.name for part in options.layers)]
    if not layers:
        names = ", ".join(layer.name for layer in LAYERS)
        raise InputError(f"layers {' '.join(options.layers)}: none of that name: choose from {names}")
    return [TINY] if options.dry else layers


def _require(options: GpuOptions) -> None:
    if not torch.cuda.is_available() and not options.dry:
        raise InputError("the GPU benchmark needs a CUDA device, and torch finds none: run it on a machine with a GPU")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise InputError(f"the GPU benchmark needs Triton: {to_install('.[gpu]')}") from error
    for stage in options.stages:
        if stage not in (*STAGES, SONIC):
            raise InputError(f"stage {stage!r} is unknown: choose from {', '.join((*STAGES, SONIC))}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
