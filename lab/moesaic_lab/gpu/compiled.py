"""Compiles kernels for a GPU that is not there: the launch code runs as it is, the launch itself is left out.

The interpreter runs kernels as Python and so accepts what the compiler refuses, and says nothing of registers. Triton and
its assembler need no GPU to compile for one.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moesaic.kernels.triton import expert_stage
from moesaic.kernels.triton.rows import launch
from moesaic.kernels.triton.rows.tiles import TileDevice

DEVICES = {
    80: TileDevice(name="Ampere", capability=(8, 0), multiprocessors=108, shared_bytes=166_912),
    89: TileDevice(name="Ada", capability=(8, 9), multiprocessors=128, shared_bytes=101_376),
    90: TileDevice(name="Hopper", capability=(9, 0), multiprocessors=132, shared_bytes=232_448),
    100: TileDevice(name="Blackwell", capability=(10, 0), multiprocessors=148, shared_bytes=232_448),
}


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """What came out of one kernel's compilation."""

    name: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    ptx: str
    is_serialized: bool = False
    """The assembler makes products of the tensor cores wait for each other (its warning C7515)."""


class _Driver:
    """Answers what Triton asks before it compiles."""

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
    """Within, kernels that are launched are compiled for a capability instead, and listed.

    Args:
        capability: 80 for (8, 0).
        cache: a folder, which processes may share.
        private: a folder of this process alone; None for `cache`.
    """
    found: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(_describe(kernel, capability, private or cache))
        return kernel

    with ExitStack() as within:
        within.enter_context(mock.patch.object(triton.knobs.cache, "dir", str(cache)))
        within.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        within.enter_context(mock.patch.object(driver, "_active", _Driver(capability)))
        for user in (launch, expert_stage):
            within.enter_context(mock.patch.object(user, "device_of", return_value=DEVICES[capability]))
        yield found


def _describe(kernel: object, capability: int, cache: Path) -> CompiledKernel:
    ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
    source = cache / "kernel.ptx"
    source.write_text(ptx)
    options = (
        ["--regAllocOptLevel=2"] if "--regAllocOptLevel" in inspect.getsource(compiler) else []
    )  # as Triton itself does
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
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None, said
    return CompiledKernel(
        name=kernel.metadata.name,  # type: ignore[attr-defined]
        shared_bytes=kernel.metadata.shared,  # type: ignore[attr-defined]
        registers=int(registers.group(1)),
        spilled_bytes=int(spilled.group(1)) if spilled else 0,
        ptx=ptx,
        is_serialized="C7515" in said or "serialized" in said,
    )
