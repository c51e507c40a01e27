"""The interface of codecs: encode rows into one message of bytes, decode them, and bound the error
of decoded rows.

Sender and receiver derive a message's length from the shape and the dtype of its rows. Only the
message is sent, and scales are part of it. A codec is a pure function of its rows, is never
differentiated, and knows neither ranks nor programs.

A message consists of parts (`moesaic.codecs.Part`), such as scales and values; its fields are
these parts as tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from moesaic.codecs import CODECS, CodecSpec, Part
from moesaic.errors import InputError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of rows that every codec supports."""


class AbstractCodec(ABC):
    """Encodes rows into bytes and decodes them.

    `moesaic.codecs.CODECS` defines the layout of a message; subclasses write and read its parts.
    Rows with an infinity or a NaN never decode to finite rows. A codec without a shared scale keeps
    each such value; one with a shared scale decodes all values under that scale to NaN
    (`docs/codecs.md`).
    """

    name: ClassVar[str]
    """The codec's key in `moesaic.codecs.CODECS`."""

    @property
    def spec(self) -> CodecSpec:
        """The codec's entry in `moesaic.codecs.CODECS`, with this instance's options."""
        return CODECS[self.name]

    def layout(self, num_rows: int, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the layout of a message of (num_rows, dim) rows in `dtype`, neither number
        being 0."""
        return self.spec.layout(num_rows, dim, _name(dtype))

    def num_bytes(self, num_rows: int, dim: int, dtype: torch.dtype) -> int:
        """Return the length of the message of (num_rows, dim) rows in `dtype`, in bytes; 0 for no
        rows."""
        return int(self.spec.num_bytes(num_rows, dim, _name(dtype)))

    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows into one message.

        Args:
            rows: (R, D) in a dtype of `FLOATS`, on any device, in any memory layout; R may be 0.

        Returns:
            (num_bytes,) uint8, contiguous, on the device of `rows`. The codec "none" returns a view
            of contiguous rows.

        Raises:
            InputError: the codec does not support this dtype.
        """
        rows = rows.detach()
        self._check(rows)
        num_rows, dim = rows.shape
        num_bytes = self.num_bytes(num_rows, dim, rows.dtype)
        message = torch.empty(num_bytes, dtype=torch.uint8, device=rows.device)
        if num_bytes:
            fields = split(message, self.layout(num_rows, dim, rows.dtype))
            self._write(rows, fields)
        return message

    def decode(self, message: Tensor, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Decode a message of `encode`.

        Args:
            message: (num_bytes,) uint8; may be a slice of a larger buffer, at any offset.
            num_rows: R of the encoded rows.
            dim: D of the encoded rows.
            dtype: dtype of the encoded rows.

        Returns:
            (R, D) in `dtype`. The codec "none" returns a view of the message if that is aligned.
            Sum decoded rows in float32.
        """
        expected = self.num_bytes(num_rows, dim, dtype)
        assert message.shape == (expected,), (
            f"{self.name}: {expected} bytes expected, got {tuple(message.shape)}"
        )
        if expected == 0:
            return torch.empty(num_rows, dim, dtype=dtype, device=message.device)
        fields = split(message, self.layout(num_rows, dim, dtype))
        return self._read(fields, num_rows, dim, dtype)

    def error_bound(self, rows: Tensor) -> Tensor:
        """Return the codec's upper bound of `|decode(encode(rows)) - rows|` for these rows.

        Returns:
            (R, D) float64; infinite for values that are not finite, or that decode to NaN because
            of another value.
        """
        rows = rows.detach()
        self._check(rows)
        if rows.numel() == 0:
            return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
        return self._bound(rows).nan_to_num(nan=math.inf, posinf=math.inf)

    def check_available(self) -> None:  # noqa: B027 (most codecs need nothing)
        """Raise InputError if a package that the codec needs is not installed."""

    @abstractmethod
    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        """Fill every byte of the fields from (R, D) rows, neither R nor D being 0."""

    @abstractmethod
    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Return (R, D) rows in `dtype` from the fields."""

    @abstractmethod
    def _bound(self, rows: Tensor) -> Tensor:
        """Return the `error_bound` of rows, neither R nor D being 0; NaN stands for infinity."""

    def _check(self, rows: Tensor) -> None:
        """Refuse rows of another shape, or of a dtype that the codec does not take."""
        assert rows.dim() == 2, f"{self.name}: (rows, dim) expected, got {tuple(rows.shape)}"
        if rows.dtype not in FLOATS and not self.spec.is_lossless:
            takes = ", ".join(map(_name, FLOATS))
            raise InputError(
                f"codec {self.name} takes rows in {takes}, got {rows.dtype}: use codec none "
                "for them"
            )


def _name(dtype: torch.dtype) -> str:
    """Return a dtype's name as `moesaic.codecs` has it: "float32"."""
    return str(dtype).removeprefix("torch.")


def split(message: Tensor, layout: tuple[Part, ...]) -> list[Tensor]:
    """Return the parts of a message as tensors with their own shape and dtype: views of aligned
    parts, copies of others.

    Args:
        message: (num_bytes,) uint8; all parts of a newly allocated message are aligned.
        layout: the message's parts.
    """
    parts = []
    start = 0
    for part in layout:
        dtype = getattr(torch, part.dtype)
        end = start + int(part.num_bytes)
        field = message[start:end]
        # torch views bytes as a dtype only from a multiple of its size on
        if field.storage_offset() % dtype.itemsize or field.data_ptr() % dtype.itemsize:
            field = field.clone()
        shape = [int(size) for size in part.shape]
        parts.append(field.view(dtype).view(shape))
        start = end
    return parts


@final
class Identity(AbstractCodec):
    """Sends the bytes of the rows unchanged, for any dtype. The message is a view of the rows if
    they are contiguous."""

    name: ClassVar[str] = "none"

    def encode(self, rows: Tensor) -> Tensor:
        self._check(rows)
        return rows.detach().contiguous().view(-1).view(torch.uint8)

    def _write(self, rows: Tensor, fields: list[Tensor]) -> None:
        fields[0].copy_(rows)

    def _read(self, fields: list[Tensor], num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        return fields[0]

    def _bound(self, rows: Tensor) -> Tensor:
        return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
