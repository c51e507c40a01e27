"""Compiles kernels without a GPU: the unchanged launch code runs, but the launch itself is skipped.

Triton's interpreter runs kernels as Python, so it accepts code that the compiler refuses and does
not count registers. Triton and its assembler can compile for a GPU that the machine does not have.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
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
from moesaic_lab.device.results import reason
from moesaic_lab.device.shapes import LAYERS, GpuLayer

DEVICES = {
    80: TileDevice(name="Ampere", capability=(8, 0), multiprocessors=108, shared_bytes=166_912),
    86: TileDevice(name="RTX 30", capability=(8, 6), multiprocessors=82, shared_bytes=101_376),
    89: TileDevice(name="Ada", capability=(8, 9), multiprocessors=128, shared_bytes=101_376),
    90: TileDevice(name="Hopper", capability=(9, 0), multiprocessors=132, shared_bytes=232_448),
    100: TileDevice(
        name="Blackwell", capability=(10, 0), multiprocessors=148, shared_bytes=232_448
    ),
    103: TileDevice(name="B300", capability=(10, 3), multiprocessors=148, shared_bytes=232_448),
    120: TileDevice(
        name="consumer Blackwell", capability=(12, 0), multiprocessors=170, shared_bytes=101_376
    ),
    121: TileDevice(name="DGX Spark", capability=(12, 1), multiprocessors=48, shared_bytes=101_376),
}

SPILLED_BYTES = 64
"""Allowed bytes of spilled registers per thread; a few in an epilogue cost nothing."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Resource use and PTX of one compiled kernel."""

    name: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    ptx: str
    ttir: str
    is_serialized: bool = False
    """Whether the assembler serializes tensor-core instructions (its warning C7515)."""


PRODUCT = re.compile(r"(%[\w#]+) = tt\.dot %[\w#]+, %[\w#]+, (%[\w#]+)")
"""A product in Triton's code: its result, and the accumulator that it adds to."""


def chained_products(ttir: str) -> list[str]:
    """Return the results to which a further product is added in the same iteration, a pattern that
    Triton miscompiles for B200 (`kernels/triton/self_check.py`)."""
    results = {match[1] for match in PRODUCT.finditer(ttir)}
    return [match[2] for match in PRODUCT.finditer(ttir) if match[2] in results]


class _Driver:
    """Replaces Triton's driver: reports a GPU of the given capability, which the machine need not
    have."""

    def __init__(self, capability: int, device: int) -> None:
        self.capability = capability
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(
    capability: int, cache: Path, private: Path | None = None
) -> Iterator[list[CompiledKernel]]:
    """Compile kernels for a capability instead of launching them, and yield the list to which each
    compiled kernel is added.

    Args:
        capability: compute capability, 80 for (8, 0).
        cache: Triton's cache folder, which processes may share.
        private: folder that only this process uses; None to use `cache`.
    """
    kernels: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> object:
        # Triton's warm-up compiles and does not launch
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.append(_describe(kernel, capability, private or cache))
        return kernel

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.knobs.cache, "dir", str(cache)))
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(_device(capability, capability))
        yield kernels


@contextmanager
def counting_for(capability: int) -> Iterator[dict[str, set[str]]]:
    """Neither compile nor launch kernels; yield the variants of each by name that would be compiled
    for a capability."""
    variants: dict[str, set[str]] = {}

    def compile_nothing(self: JITFunction, key: str, *call: Any) -> None:
        _, _, constants, *_ = call  # after the signature and the device
        named = {self.arg_names[path[0]]: value for path, value in constants.items()}
        _, _, name = self.repr(SimpleNamespace(constants=named)).rpartition(".")
        variants.setdefault(name, set()).add(key)

    run = JITFunction.run

    def run_nothing(self: JITFunction, *args: object, warmup: bool, **options: object) -> object:
        return run(self, *args, warmup=True, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "_do_compile", compile_nothing))
        stack.enter_context(mock.patch.object(JITFunction, "run", run_nothing))
        # Triton remembers kernels by the device's number: one that `compiling_for` does not use,
        # so that no kernel counts as compiled
        stack.enter_context(_device(capability, -capability))
        yield variants


@contextmanager
def _device(capability: int, device: int) -> Iterator[None]:
    """Let launches see a GPU of a capability and number, which the machine need not have."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(capability, device)))
        for user in (launch, expert_stage):
            stack.enter_context(
                mock.patch.object(user, "device_of", return_value=DEVICES[capability])
            )
        yield


def _describe(kernel: object, capability: int, cache: Path) -> CompiledKernel:
    """Return what the assembler says about a kernel."""
    ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
    source = cache / "kernel.ptx"
    source.write_text(ptx)
    options = []
    if "--regAllocOptLevel" in inspect.getsource(compiler):  # an option that Triton itself sets
        options = ["--regAllocOptLevel=2"]
    target = compiler.sm_arch_from_capability(capability)
    command = [
        compiler.get_ptxas(capability).path,
        "-v",
        *options,
        f"--gpu-name={target}",
        str(source),
        "-o",
        "/dev/null",
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    return CompiledKernel(
        name=kernel.metadata.name,  # type: ignore[attr-defined]
        shared_bytes=kernel.metadata.shared,  # type: ignore[attr-defined]
        registers=int(registers.group(1)),
        spilled_bytes=int(spilled.group(1)) if spilled else 0,
        ptx=ptx,
        ttir=kernel.asm["ttir"],  # type: ignore[attr-defined]
        is_serialized="C7515" in log or "serialized" in log,
    )


Job = tuple[GpuLayer, str, dict[str, Any] | None]
"""A layer, a product and its tile; without a tile, the whole layer with its default tiles."""
WHOLE = "the whole layer"
PROCESSES = 4
"""As many compile side by side: a layer takes 50 seconds in one process."""


def jobs(capability: int, *, dry: bool) -> list[Job]:
    """Return all layers with their default tiles, then the candidates of the tile search."""
    from moesaic_lab.device.on_gpu import TINY
    from moesaic_lab.device.search import candidates
    from moesaic_lab.device.steps import FIRST, PRODUCTS, TUNED

    if dry:
        return [(TINY, WHOLE, None)]
    # those that are measured first (False sorts before True)
    layers = sorted(LAYERS, key=lambda layer: layer.name not in FIRST)
    entries: list[Job] = [(layer, WHOLE, None) for layer in layers]
    for layer in LAYERS:
        if not any(part in layer.name for part in TUNED):
            continue
        copies = layer.tokens * layer.top_k
        sizes = expert_stage.shapes(
            copies, layer.num_experts, layer.dim, layer.hidden, 2, gated=True
        )
        for product in PRODUCTS:
            entries += [
                (layer, product, asdict(tile))
                for tile in candidates(sizes[product], DEVICES[capability])
            ]
    return entries


def compile_one(job: Job, capability: int, cache: str) -> list[dict[str, Any]]:
    """Compile a job's kernels, and return one row per kernel.

    Args:
        job: what to compile.
        capability: compute capability, a key of `DEVICES`.
        cache: Triton's cache folder.
    """
    from moesaic_lab.device.layers import Inputs, ours
    from moesaic_lab.device.tune import products

    layer, product, tile = job
    private = Path(cache) / f"of_process_{os.getpid()}"
    private.mkdir(parents=True, exist_ok=True)
    inputs = Inputs.untouched(layer)
    with compiling_for(capability, Path(cache), private) as kernels:
        if tile is None:
            torch.autograd.grad(ours(inputs, None).forward(), inputs.leaves, inputs.dy)
        else:
            with torch.no_grad():
                products(inputs, is_compiling=True)[product](Tile(**tile))
    figures = ("shared_bytes", "registers", "spilled_bytes", "is_serialized")
    return [
        {"layer": layer.name, "product": product, "tile": tile, "kernel": kernel.name}
        | {name: getattr(kernel, name) for name in figures}
        for kernel in kernels
    ]


def compile_all(folder: Path, *, dry: bool) -> int:
    """Compile all kernels of the layers and of the tile search, without the GPU, into Triton's
    cache, and write their rows.

    Kernels that spill registers, or whose tensor-core instructions the assembler serializes, are
    listed separately. Return the exit code: 1 if a kernel did not compile.
    """
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    # the newest known one that is not newer than the GPU, else the oldest
    older = [known for known in DEVICES if known <= 10 * major + minor]
    capability = max(older, default=min(DEVICES))
    failures = list[str]()
    rows = list[Any]()
    todo = jobs(capability, dry=dry)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        futures = {
            pool.submit(compile_one, job, capability, triton.knobs.cache.dir): job for job in todo
        }
        for future in as_completed(futures):
            layer, product, tile = futures[future]
            try:
                rows += future.result()
            except Exception as error:  # a tile that the compiler refuses is a result
                failures.append(f"{layer.name} {product} {tile}: {reason(error)}")
            slow = [
                row for row in rows if row["spilled_bytes"] > SPILLED_BYTES or row["is_serialized"]
            ]
            report = {
                "compiled": len(rows),
                "of": len(todo),
                "failures": failures,
                "spilled_or_serialized": slow,
                "rows": rows,
            }
            (folder / "compiled.json").write_text(
                json.dumps(report, indent=1) + "\n", encoding="utf-8"
            )
    return int(bool(failures))
