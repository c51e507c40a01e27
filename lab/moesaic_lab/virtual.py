"""Virtual accelerators: a compute task sleeps for as long as an accelerator of a given rate would take.

An emulated cluster has more ranks than cores, so real products of many ranks would queue for the processor and hide what
a schedule overlaps. Sleeping ranks do not compete, and what travels meanwhile really travels. What is computed is
meaningless: every figure that rests on this says "virtual compute".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import ClassVar, final

import torch
from torch import Tensor

from moesaic.codecs import CodecSpec, is_coded
from moesaic.errors import InputError
from moesaic.kernels.codecs import AbstractCodec, codec_named
from moesaic.profiling.host import IdleExperts
from moesaic.runtime.tasks import Codecs


@dataclass(kw_only=True)
class Accelerator:
    """One rank's accelerator: takes time, computes nothing."""

    flops_per_second: float
    """Of the experts' products."""
    coded_bytes_per_second: float = 0.0
    """Bytes of rows that a codec encodes, or decodes, per second; needed where a plan names a codec."""
    shortest_sleep: float = 1e-3
    """Seconds: shorter tasks add up until they are worth a sleep, since waking up takes tens of microseconds."""
    sleep: Callable[[float], object] = time.sleep
    """What takes the time, in seconds."""
    clock: Callable[[], float] = time.perf_counter
    """What tells how long a sleep took; what it took too long is taken off the next one."""
    charged: float = field(default=0.0, init=False)
    """Seconds of all tasks so far."""
    _owed: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if not self.flops_per_second > 0:
            raise InputError(f"a virtual accelerator needs flops_per_second above 0, got {self.flops_per_second}")
        if not self.coded_bytes_per_second >= 0:
            raise InputError(
                f"coded_bytes_per_second={self.coded_bytes_per_second}: write bytes per second, 0 for none"
            )

    def multiply(self, flops: float) -> None:
        """Take the time of products."""
        self.charge(flops / self.flops_per_second)

    def code(self, num_bytes: float) -> None:
        """Take the time of encoding or decoding rows.

        Raises:
            InputError: if nobody said how fast that is.
        """
        if not self.coded_bytes_per_second:
            raise InputError("a plan names a codec: give the virtual accelerator coded_bytes_per_second")
        self.charge(num_bytes / self.coded_bytes_per_second)

    def charge(self, seconds: float) -> None:
        """Take some time."""
        self.charged += seconds
        self._owed += seconds
        if self._owed >= self.shortest_sleep:
            start = self.clock()
            self.sleep(self._owed)
            self._owed -= self.clock() - start


def virtual_experts(accelerator: Accelerator) -> Callable[[int, int, int], IdleExperts]:
    """Return what makes experts that take time and compute nothing, from dim, hidden and num_experts.

    Args:
        accelerator: takes the time: 2 flops per row and matrix element forward, 4 backward.
    """
    return partial(IdleExperts, on_flops=accelerator.multiply)


@final
class VirtualCodec(AbstractCodec):
    """A codec that sends messages of the right length and takes time, and encodes nothing: rows come back as zeros.

    Args:
        codec: whose messages they are.
        accelerator: takes the time.
    """

    name: ClassVar[str] = "virtual"

    def __init__(self, codec: AbstractCodec, accelerator: Accelerator) -> None:
        self._codec, self._accelerator = codec, accelerator

    @property
    def spec(self) -> CodecSpec:
        return self._codec.spec

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        self._accelerator.code(rows.numel() * rows.element_size())
        for part in fields:
            part.zero_()

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        self._accelerator.code(num_rows * dim * dtype.itemsize)
        return torch.zeros(num_rows, dim, dtype=dtype, device=fields[0].device)

    def _bound(self, rows: Tensor) -> Tensor:
        return torch.full(rows.shape, torch.inf, dtype=torch.float64, device=rows.device)


def virtual_codecs(accelerator: Accelerator) -> Codecs:
    """Return what to put in the place of a layer's codecs (`ExpertParallel.codecs`): the same lengths, virtual time."""

    @cache
    def made(name: str) -> AbstractCodec:
        return VirtualCodec(codec_named(name), accelerator) if is_coded(name) else codec_named(name)

    return made
