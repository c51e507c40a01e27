"""Compiles kernels without a GPU: the unchanged launch code runs, but the launch itself is skipped.

Triton's interpreter runs kernels as Python, so it accepts code that the compiler refuses and does not count registers.
Triton and its assembler can compile for a GPU that the machine does not have.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moesaic.kernels.triton import expert_stage
from moesaic.kernels.triton.rows import launch
from moesaic.kernels.triton.rows.tiles import Tile, TileDevice
from moesaic_lab.gpu.shapes import LAYERS, GpuLayer

DEVICES = {
    80: TileDevice(name="Ampere", capability=(8, 0), multiprocessors=108, shared_bytes=166_912),
    89: TileDevice(name="Ada", capability=(8, 9), multiprocessors=128, shared_bytes=101_376),
    90: TileDevice(name="Hopper", capability=(9, 0), multiprocessors=132, shared_bytes=232_448),
    100: TileDevice(name="Blackwell", capability=(10, 0), multiprocessors=148, shared_bytes=232_448),
}

SPILLED_BYTES = 64
"""Allowed bytes of spilled registers per thread; a few in an epilogue cost nothing."""


CHECKS = ("check float32", "check bfloat16")
"""Entries of `work` in place of a product's name: each compiles the whole layer of the stage `check`, in one dtype."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Resource use and PTX of one compiled kernel."""

    name: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    ptx: str
    is_serialized: bool = False
    """Whether the assembler serializes tensor-core instructions (its warning C7515)."""


class _Driver:
    """Replaces Triton's driver: reports a GPU of the given capability, which the machine need not have."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int, cache: Path, private: Path | None = None) -> Iterator[list[CompiledKernel]]:
    """Compile kernels for a capability instead of launching them, and yield the list to which each compiled kernel is added.

    Args:
        capability: compute capability, 80 for (8, 0).
        cache: Triton's cache folder, which processes may share.
        private: folder that only this process uses; None to use `cache`.
    """
    kernels: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.append(_describe(kernel, capability, private or cache))
        return kernel

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.knobs.cache, "dir", str(cache)))
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(capability)))
        for user in (launch, expert_stage):
            stack.enter_context(mock.patch.object(user, "device_of", return_value=DEVICES[capability]))
        yield kernels


def _describe(kernel: object, capability: int, cache: Path) -> CompiledKernel:
    ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
    source = cache / "kernel.ptx"
    source.write_text(ptx)
    options = (
        ["--regAllocOptLevel=2"] if "--regAllocOptLevel" in inspect.getsource(compiler) else []
    )  # as Triton itself does
    target = compiler.sm_arch_from_capability(capability)
    command = [
        compiler.get_ptxas(capability).path, "-v", *options, f"--gpu-name={target}", str(source), "-o", "/dev/null",
    ]  # fmt: skip
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    return CompiledKernel(
        name=kernel.metadata.name,  # type: ignore[attr-defined]
        shared_bytes=kernel.metadata.shared,  # type: ignore[attr-defined]
        registers=int(registers.group(1)),
        spilled_bytes=int(spilled.group(1)) if spilled else 0,
        ptx=ptx,
        is_serialized="C7515" in log or "serialized" in log,
    )


Job = tuple[GpuLayer, str, dict[str, Any] | None]
"""A layer, a product and its tile; for an entry of `CHECKS`, no tile."""


def work(*, dry: bool) -> list[Job]:
    """Return the layers to check, then all candidates of the tile search."""
    from moesaic_lab.gpu.command import PRODUCTS, TUNED
    from moesaic_lab.gpu.run import SMALL
    from moesaic_lab.gpu.search import candidates

    entries: list[Job] = [] if dry else [(SMALL, check, None) for check in CHECKS]
    for layer in (layer for layer in LAYERS if any(part in layer.name for part in TUNED)):
        copies = layer.tokens * layer.top_k
        sizes = expert_stage.shapes(copies, layer.num_experts, layer.dim, layer.hidden, 2, gated=True)
        for product in PRODUCTS:
            entries += [(layer, product, asdict(tile)) for tile in candidates(sizes[product], DEVICES[90])]
    return entries[:1] if dry else entries


def compile_one(job: Job, capability: int, cache: str) -> list[dict[str, Any]]:
    """Compile one product of a layer with one tile, or one of `CHECKS`, and return one row per kernel."""
    from moesaic_lab.gpu.layers import Inputs
    from moesaic_lab.gpu.tune import products

    layer, product, tile = job
    private = Path(cache) / f"of_process_{os.getpid()}"
    private.mkdir(parents=True, exist_ok=True)
    with compiling_for(capability, Path(cache), private) as kernels:
        if tile is None:
            _compile_layer(layer, getattr(torch, product.removeprefix("check ")))
        else:
            with torch.no_grad():
                products(Inputs.untouched(layer), is_compiling=True)[product](Tile(**tile))
    return [
        {
            "layer": layer.name, "product": product, "tile": tile, "kernel": kernel.name,
            "shared_bytes": kernel.shared_bytes, "registers": kernel.registers, "spilled_bytes": kernel.spilled_bytes,
            "is_serialized": kernel.is_serialized,
        }
        for kernel in kernels
    ]  # fmt: skip


def _compile_layer(layer: GpuLayer, dtype: torch.dtype) -> None:
    """Compile the kernels of a layer's forward and backward pass and of its choice of experts."""
    from moesaic.kernels.triton.rows.top_k import top_k_columns
    from moesaic_lab.gpu.layers import Inputs, ours

    top_k_columns(torch.zeros(layer.tokens, layer.num_experts), layer.top_k)
    inputs = Inputs.random(layer, "cpu", dtype)
    torch.autograd.grad(ours(inputs, None).forward(), inputs.leaves, inputs.dy)


def write(out: Path, *, dry: bool) -> int:
    """Compile all kernels of the checks and the tile search, on all but two cores and without the GPU, and write their rows.

    If the search uses the same Triton cache, it compiles nothing. Kernels that spill registers, or whose tensor-core
    instructions the assembler serializes, are listed separately. Return the exit code: 1 if a kernel did not compile.
    """
    cache, failures, rows, jobs = triton.knobs.cache.dir, list[str](), list[Any](), work(dry=dry)
    with ProcessPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 2)) as pool:
        futures = {pool.submit(compile_one, job, 90, cache): job for job in jobs}
        for future in as_completed(futures):
            layer, product, tile = futures[future]
            try:
                rows += future.result()
            except Exception as error:  # a tile that the compiler refuses is a result
                failures.append(f"{layer.name} {product} {tile}: {type(error).__name__}: {error}"[:300])
            slow = [row for row in rows if row["spilled_bytes"] > SPILLED_BYTES or row["is_serialized"]]
            report = {
                "compiled": len(rows), "of": len(jobs), "failures": failures, "spilled_or_serialized": slow, "rows": rows,
            }  # fmt: skip
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(bool(failures))
