"""Measures MoE layers on one GPU: TFLOP/s forward and backward and activation memory, beside other
implementations.

The results of each layer are checked first. Then the implementations are timed in turn, and their
memory is measured. SonicMoE has a step of its own, since compiling its kernels may take minutes,
and a layer's figures must not be lost to that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from moesaic_lab.device.layers import (
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
from moesaic_lab.device.results import Row, StepRows, reason, say
from moesaic_lab.device.shapes import LAYERS, GpuLayer
from moesaic_lab.device.timing import dense_tflops, in_turn, memory_of

SONIC = "sonic"
DENSE_SIZE = 8192
TINY = GpuLayer(tokens=24, dim=40, hidden=24, num_experts=3, top_k=2)
"""The layer that a dry run measures: Triton's interpreter takes a second per kernel."""
REPEATS = 20


def measure(folder: Path, *names: str, dry: bool) -> int:
    """Measure layers beside other implementations, write their rows, and return the exit code: 1 if
    one failed.

    Args:
        folder: folder of rows.json and tiles.json.
        names: names or parts of names of the layers; all without any.
        dry: measure a tiny layer, without a GPU.
    """
    results = StepRows(folder, dry=dry)
    others = {"grouped_mm": grouped_mm, "liger": liger, "layer": layer_of}
    # A processor without bfloat16 instructions takes minutes for what is milliseconds on a GPU.
    dense = partial(dense_tflops, 64 if dry else DENSE_SIZE, torch.bfloat16, results.device)
    done = [results.attempt("dense", lambda: {"tflops": dense()})]
    done += [
        results.attempt(layer.name, partial(_row, layer, folder, results, others))
        for layer in chosen(names, dry)
    ]
    return int(not all(done))


def measure_sonic(folder: Path, *names: str, dry: bool) -> int:
    """Measure SonicMoE's own kernels in turn with ours, as `measure` does."""
    results = StepRows(folder, dry=dry)
    others = {SONIC: sonic}
    done = [
        results.attempt(f"{SONIC}.{layer.name}", partial(_row, layer, folder, results, others))
        for layer in chosen(names, dry)
    ]
    return int(not all(done))


def tune(folder: Path, name: str, product: str, seconds: str, *, dry: bool) -> int:
    """Search tiles for one product of one layer, write them to tiles.json, and return the exit
    code 0.

    Args:
        name: part of the layer's name.
        product: name of the product.
        seconds: time after which no further candidate is tried.
        dry: search for a tiny layer, without a GPU.
    """
    from moesaic.kernels.triton.rows.launch import device_of
    from moesaic_lab.device import search
    from moesaic_lab.device.tune import tune as search_tiles

    deadline = time.monotonic() + float(seconds)
    for layer in chosen((name,), dry):
        inputs = Inputs.random(layer, "cpu" if dry else "cuda", torch.bfloat16)
        path = folder / "tiles.json"
        search_tiles(
            layer,
            inputs,
            tuned=search.load(path, device_of(inputs.x.device)),
            path=path,
            deadline=deadline,
            say=say,
            only=(product,),
        )
    return 0


def chosen(names: Sequence[str], dry: bool) -> list[GpuLayer]:
    """Return the layers whose names have one of the parts; all without any. In a dry run the tiny
    one alone."""
    if dry:
        return [TINY]
    if not names:
        return list(LAYERS)
    return [layer for layer in LAYERS if any(part in layer.name for part in names)]


Makers = Mapping[str, Callable[[Inputs], Implementation]]


def _row(layer: GpuLayer, folder: Path, results: StepRows, others: Makers) -> Row:
    """Check and measure one layer; return its row, or only SonicMoE's part of it if that is among
    the others.

    Args:
        layer: the layer.
        folder: folder of tiles.json.
        results: the rows so far, which know the device.
        others: what makes the other implementations, by name.
    """
    from moesaic.kernels.triton.expert_stage import shapes
    from moesaic.kernels.triton.rows.launch import device_of
    from moesaic_lab.device.search import load
    from moesaic_lab.device.tune import breakdown

    inputs = Inputs.random(layer, results.device, torch.bfloat16)
    tuned = load(folder / "tiles.json", device_of(inputs.x.device))
    sizes = (
        layer.tokens * layer.top_k,
        layer.num_experts,
        layer.dim,
        layer.hidden,
        inputs.x.itemsize,
    )
    own = ours(inputs, tuned.tiles(shapes(*sizes, gated=True)))
    if SONIC in others:
        row = _compared(layer, inputs, own, others)
        if f"{SONIC}_absent" in row:
            raise RuntimeError(row[f"{SONIC}_absent"])
        sonic_figures: Row = row[SONIC]
        return sonic_figures

    y = own.forward()
    grads = torch.autograd.grad(y, inputs.leaves, inputs.dy)
    error_by_name = errors(inputs, y.detach(), grads)
    # "not <" also finds NaN
    wrong = {name: error for name, error in error_by_name.items() if not error < TOLERANCE}
    assert not wrong, f"wrong results: {wrong}"
    del y, grads  # before memory is measured
    rows_per_expert = layer.tokens * layer.top_k // layer.num_experts
    row = {"rows_per_expert": rows_per_expert, "errors": error_by_name}
    row |= _compared(layer, inputs, own, others)
    return row | {"steps": breakdown(layer, inputs, tuned)}


def _compared(layer: GpuLayer, inputs: Inputs, own: Implementation, others: Makers) -> Row:
    """Return times and memory of our kernels and of others that compute the same, or why another
    could not be run."""
    implementations = {"ours": own}
    row = Row()

    exact = own.forward().detach()
    for name, make in others.items():
        try:
            implementation = make(inputs)
            distance = relative(implementation.forward().detach(), exact)
            if name != "layer" and not distance < TOLERANCE:  # `layer_of` routes by itself
                raise AssertionError(f"its result differs from ours by {distance:.3g}")
            implementations[name] = implementation
        except Exception as error:  # an optional peer: absent, too old or out of memory
            row[f"{name}_absent"] = reason(error)
    del exact

    seconds = _timed(implementations, inputs.dy)
    flops_by_pass = {"forward": layer.forward_flops, "backward": 2 * layer.forward_flops}
    for name, implementation in implementations.items():
        row[name] = {"over_ours": _ratio(seconds, name)}
        for direction, flops in flops_by_pass.items():
            low, median, high = statistics.quantiles(seconds[f"{name} {direction}"], n=4)
            row[name] |= {
                f"{direction}_ms": median * 1e3,
                f"{direction}_tflops": flops / median / 1e12,
                f"{direction}_ms_spread": [low * 1e3, high * 1e3],
            }
        row[name]["memory_gib"] = vars(
            memory_of(implementation.forward, inputs.x, implementation.leaves, inputs.dy)
        )
    return row


def _timed(
    implementations: Mapping[str, Implementation], dy: torch.Tensor
) -> dict[str, list[float]]:
    """Return the seconds of each implementation's forward and backward pass, timed in turn."""
    methods: dict[str, Callable[[], object]] = {}
    for name, implementation in implementations.items():
        methods[f"{name} forward"] = implementation.forward
        methods[f"{name} backward"] = partial(
            torch.autograd.grad,
            implementation.forward(),
            implementation.leaves,
            dy,
            retain_graph=True,
        )
    return in_turn(methods, REPEATS)


def _ratio(seconds: Mapping[str, list[float]], name: str) -> float:
    """Return the median over the repeats of an implementation's forward plus backward time divided
    by ours."""

    def both_passes(implementation: str) -> list[float]:
        forward = seconds[f"{implementation} forward"]
        backward = seconds[f"{implementation} backward"]
        return [there + back for there, back in zip(forward, backward)]

    pairs = zip(both_passes(name), both_passes("ours"))
    return statistics.median(theirs / own for theirs, own in pairs)
