"""Compiles what checks and the search of tiles will run, on all cores and without the GPU, and says what came of each kernel.

The launch code runs as it is, on tensors that nobody touches; only the launch is left out (`compiled.py`). Where the cache is
the one that the search reads, the search compiles nothing. A kernel that spills registers or whose tensor-core products the
assembler makes wait for each other is named in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton

from moesaic_lab.gpu.shapes import LAYERS, GpuLayer

SPILLED_BYTES = 64
"""Per thread; a few in an epilogue cost nothing."""


CHECKS = ("check float32", "check bfloat16")
"""What stands in the place of a product for the whole layer that is checked first, in a dtype: sanitizers run it, too."""


def work(*, dry: bool) -> list[tuple[GpuLayer, str, int]]:
    """Return (layer, product, number of the candidate): what is checked, then all that a search tries."""
    from moesaic.kernels.triton.expert_stage import shapes
    from moesaic_lab.gpu.command import PRODUCTS, TUNED
    from moesaic_lab.gpu.compiled import DEVICES
    from moesaic_lab.gpu.run import SMALL
    from moesaic_lab.gpu.search import candidates

    found = [] if dry else [(SMALL, check, 0) for check in CHECKS]
    for layer in (each for each in LAYERS if any(part in each.name for part in TUNED)):
        sizes = shapes(layer.tokens * layer.top_k, layer.num_experts, layer.dim, layer.hidden, 2, gated=True)
        for product in PRODUCTS:
            found += [(layer, product, n) for n, _ in enumerate(candidates(sizes[product], DEVICES[90]))]
    return found[:1] if dry else found


def compile_one(layer: GpuLayer, product: str, number: int, capability: int, cache: str) -> list[dict[str, Any]]:
    """Compile one product of a layer with one tile, or one of `CHECKS`; returns a row for each kernel."""
    from moesaic.kernels.triton.expert_stage import shapes
    from moesaic.kernels.triton.rows.tiles import Tile
    from moesaic_lab.gpu.compiled import DEVICES, compiling_for
    from moesaic_lab.gpu.layers import Inputs
    from moesaic_lab.gpu.search import candidates
    from moesaic_lab.gpu.tune import products

    private = Path(cache) / f"of_process_{os.getpid()}"
    private.mkdir(parents=True, exist_ok=True)
    tile = None
    if product in CHECKS:
        with compiling_for(capability, Path(cache), private) as found:
            _compile_layer(layer, getattr(torch, product.removeprefix("check ")))
    else:
        sizes = shapes(layer.tokens * layer.top_k, layer.num_experts, layer.dim, layer.hidden, 2, gated=True)
        tile = list(candidates(sizes[product], DEVICES[capability]))[number].as_ints()
        with compiling_for(capability, Path(cache), private) as found, torch.no_grad():
            products(Inputs.untouched(layer), is_compiling=True)[product](Tile.of(tile))
    return [
        {
            "layer": layer.name, "product": product, "tile": tile, "kernel": each.name,
            "shared_bytes": each.shared_bytes, "registers": each.registers, "spilled_bytes": each.spilled_bytes,
            "is_serialized": each.is_serialized,
        }
        for each in found
    ]  # fmt: skip


def _compile_layer(layer: GpuLayer, dtype: torch.dtype) -> None:
    """Compile a layer forward and backward, and the choice of its experts."""
    from moesaic.kernels.triton.rows.top_k import top_k_columns
    from moesaic_lab.gpu.layers import Inputs, ours

    top_k_columns(torch.zeros(layer.tokens, layer.num_experts), layer.top_k)
    of = Inputs.random(layer, "cpu", dtype)
    torch.autograd.grad(ours(of, None).forward(), of.leaves, of.dy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile everything; returns 0, or 1 if a kernel did not compile."""
    parser = argparse.ArgumentParser(description="Compile the candidates of the search.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args(arguments)
    cache, failures, rows = (
        triton.knobs.cache.dir,
        list[str](),
        list[Any](),
    )
    jobs = work(dry=given.dry)
    with ProcessPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 2)) as pool:
        futures = {pool.submit(compile_one, *job, 90, cache): job for job in jobs}
        for future in as_completed(futures):
            layer, product, number = futures[future]
            try:
                rows += future.result()
            except Exception as error:  # a tile that the compiler refuses is a finding
                failures.append(f"{layer.name} {product} {number}: {type(error).__name__}: {error}"[:300])
            bad = [each for each in rows if each["spilled_bytes"] > SPILLED_BYTES or each["is_serialized"]]
            held = {
                "compiled": len(rows),
                "of": len(jobs),
                "failures": failures,
                "spilled_or_serialized": bad,
                "rows": rows,
            }
            given.out.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
