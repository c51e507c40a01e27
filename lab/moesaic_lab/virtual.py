"""Virtual accelerators: a compute task sleeps for as long as an accelerator of a given rate would
take.

An emulated cluster has more ranks than cores. Real products of many ranks would queue for the
processor and hide what a schedule overlaps. Sleeping ranks do not compete, and messages are still
sent for real. The computed values are meaningless, so every figure measured this way says "virtual
compute".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from moesaic.codecs import CodecSpec, is_coded
from moesaic.errors import InputError
from moesaic.kernels.codecs import AbstractCodec, codec_named
from moesaic.measure.host import IdleExperts
from moesaic.models.attention import Attention, KeyValueCache
from moesaic.runtime.tasks import Codecs
from moesaic.shapes import BlockConfig


@dataclass(kw_only=True)
class Accelerator:
    """One rank's accelerator, which sleeps instead of computing."""

    flops_per_second: float
    """Speed of the experts' products."""
    coded_bytes_per_second: float = 0.0
    """Bytes of rows that a codec encodes, or decodes, per second; needed if a plan names a
    codec."""
    shortest_sleep: float = 1e-3
    """Shortest sleep in seconds. Shorter tasks are added up first, since waking up takes tens of
    microseconds."""
    sleep: Callable[[float], object] = time.sleep
    """Sleeps for a number of seconds."""
    clock: Callable[[], float] = time.perf_counter
    """Measures how long a sleep took; the time by which it was too long is subtracted from the next
    one."""
    charged: float = field(default=0.0, init=False)
    """Total seconds of all tasks so far."""
    _owed: float = field(default=0.0, init=False)
    """Seconds not slept yet; negative after a sleep that was too long."""

    def __post_init__(self) -> None:
        if not self.flops_per_second > 0:
            raise InputError(
                f"a virtual accelerator needs flops_per_second above 0, got {self.flops_per_second}"
            )
        if not self.coded_bytes_per_second >= 0:
            raise InputError(
                f"coded_bytes_per_second={self.coded_bytes_per_second}: write bytes per "
                "second, 0 for none"
            )

    def multiply(self, flops: float) -> None:
        """Spend the time of matrix products."""
        self.charge(flops / self.flops_per_second)

    def code(self, num_bytes: float) -> None:
        """Spend the time of encoding or decoding rows.

        Raises:
            InputError: if `coded_bytes_per_second` is 0.
        """
        if not self.coded_bytes_per_second:
            raise InputError(
                "a plan names a codec: give the virtual accelerator coded_bytes_per_second"
            )
        self.charge(num_bytes / self.coded_bytes_per_second)

    def charge(self, seconds: float) -> None:
        """Spend time, by sleeping now or together with later tasks."""
        self.charged += seconds
        self._owed += seconds
        if self._owed >= self.shortest_sleep:
            start = self.clock()
            self.sleep(self._owed)
            self._owed -= self.clock() - start


def virtual_experts(accelerator: Accelerator) -> Callable[[int, int, int], IdleExperts]:
    """Return a factory of experts that spend time and compute nothing; its arguments are dim,
    hidden and num_experts.

    Args:
        accelerator: spends the time: 2 flops per row and matrix element forward, 4 backward.
    """
    return partial(IdleExperts, on_flops=accelerator.multiply)


@final
class VirtualAttention(Attention):
    """Attention that spends time and computes nothing: the result is its input.

    Args:
        accelerator: spends the time of the projections and of causal attention; twice as much
            backward.
        dim, num_heads, block: as for `Attention`, whose parameters it has.
    """

    def __init__(
        self, accelerator: Accelerator, dim: int, num_heads: int, block: BlockConfig
    ) -> None:
        super().__init__(dim, num_heads, block)
        self._accelerator = accelerator

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return x, after the time of the projections and of attention."""
        parameters = list(self.parameters())
        batch, positions, dim = x.shape
        num_weights = sum(parameter.numel() for parameter in parameters)
        # Scores and weighted sum take dim products each per pair of positions, of which a causal
        # mask leaves half.
        flops = 2.0 * batch * positions * (num_weights + dim * positions)
        result: Tensor = _Slept.apply(self._accelerator, flops, x, *parameters)
        return result


class _Slept(torch.autograd.Function):
    """Takes the time of products that a tensor passes unchanged; parameters get gradients of
    zero."""

    @staticmethod
    def forward(
        ctx: Any, accelerator: Accelerator, flops: float, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.accelerator = accelerator
        ctx.flops = flops
        ctx.save_for_backward(*parameters)
        accelerator.multiply(flops)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ctx.accelerator.multiply(2 * ctx.flops)
        return None, None, dy, *map(torch.zeros_like, ctx.saved_tensors)


@final
class VirtualCodec(AbstractCodec):
    """A codec with messages of the right length and virtual time, which encodes nothing: rows are
    decoded as zeros.

    Args:
        codec: the codec that is imitated.
        accelerator: spends the time of encoding and decoding.
    """

    name: ClassVar[str] = "virtual"

    def __init__(self, codec: AbstractCodec, accelerator: Accelerator) -> None:
        self._codec = codec
        self._accelerator = accelerator

    @property
    def spec(self) -> CodecSpec:
        return self._codec.spec

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        """Take the time of encoding; the fields are 0."""
        self._accelerator.code(rows.numel() * rows.element_size())
        for part in fields:
            part.zero_()

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Take the time of decoding; the rows are 0."""
        self._accelerator.code(num_rows * dim * dtype.itemsize)
        return torch.zeros(num_rows, dim, dtype=dtype, device=fields[0].device)

    def _bound(self, rows: Tensor) -> Tensor:
        """Return infinite bounds of the error, since decoded rows are not those that were sent."""
        return torch.full(rows.shape, torch.inf, dtype=torch.float64, device=rows.device)


def virtual_codecs(accelerator: Accelerator) -> Codecs:
    """Return a replacement for a layer's codecs (`ExpertParallel.codecs`), with the same lengths
    and virtual time."""

    @cache
    def virtual_codec(name: str) -> AbstractCodec:
        return VirtualCodec(codec_named(name), accelerator) if is_coded(name) else codec_named(name)

    return virtual_codec
