"""The codecs by name, with the parts of their messages and their error bounds. Planning, simulation
and the kernels read this.

A *message* is the encoded form of rows, (rows, dim), that one rank sends to another; its *parts*
are arrays that follow each other. A *rate* is zfp's number of bits per value.

Nothing here needs torch. The code that encodes and decodes is in `kernels/codecs`, one codec per
file. To add one, write a new file there and add a line to `CODECS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from moesaic.errors import InputError

ELEMENT_BYTES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of an element, by torch's name of its dtype."""
DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "float64"}
"""Dtype of the rows that a codec encodes, by bytes per element, since planning knows no more."""


class Part(NamedTuple):
    """One part of a message: an array in row-major order."""

    shape: tuple[float, ...]
    """Whole numbers, except when a simulator asks for an expected number of rows."""
    dtype: str
    """A key of `ELEMENT_BYTES`."""

    @property
    def num_bytes(self) -> float:
        """Length of the part in bytes."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


Layout = Callable[[float, int, str], tuple[Part, ...]]
"""A function from (rows, dim, name of the rows' dtype) to the parts of a message; rows and dim are
not 0. Parts of wide elements come first, so that each part is aligned. The dtype must be one that
the codec accepts."""


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """Everything about a codec that code outside of the codec needs to know."""

    implementation: str
    """"file.Class" of its `AbstractCodec` in `kernels/codecs`."""
    layout: Layout
    """Returns the parts of a message; the length of a message is defined only here."""
    tolerance: float
    """Largest error of a layer's results under the codec that `moesaic check` accepts, relative to
    the largest result without the codec. 0 means that decoded rows equal the originals bit for
    bit."""
    rows_per_block: int = 1
    """Rows that are encoded together. A message wastes no bytes if its rows are a multiple of
    them."""
    option: str = ""
    """Name of the codec's option, under which the implementation and the layout take it; "" for
    none. Its value is a whole number, which follows the codec's name and a colon."""
    allowed: range = range(0)
    """Values that the option may have."""
    value: int | None = None
    """Value of the option; None for the implementation's default."""

    @property
    def arguments(self) -> dict[str, int]:
        """Keyword arguments for the implementation."""
        return {} if self.value is None else {self.option: self.value}

    @property
    def is_lossless(self) -> bool:
        """Whether decoded rows equal the rows bit for bit."""
        return self.tolerance == 0

    def num_bytes(self, rows: float, dim: int, dtype: str) -> float:
        """Return the length of the message of (rows, dim) rows, in bytes; 0 for no rows.

        Args:
            rows: number of rows in the message; a fraction is an expected number.
            dim: columns.
            dtype: torch's name of the rows' dtype.
        """
        if rows == 0 or dim == 0:
            return 0
        return sum(part.num_bytes for part in self.layout(rows, dim, dtype))


def scale_dtype(dtype: str) -> str:
    """Return the dtype in which codecs compute and store scales: float64 for float64 rows, else
    float32."""
    return "float64" if dtype == "float64" else "float32"


def sixteen_bits(rows: float, dim: int, dtype: str, *, transport: str) -> tuple[Part, ...]:
    """Return the parts of rows cast to 16 bits. If the rows' dtype has a wider range, each row also
    has a power of two."""
    values = Part((rows, dim), transport)
    # bfloat16 has the range of float32, float16 a smaller one
    is_wider = dtype == "float64" if transport == "bfloat16" else dtype != "float16"
    if not is_wider:
        return (values,)
    exponents = Part((rows, 1), "int16")
    return exponents, values


def blocks_of_bits(rows: float, dim: int, dtype: str, *, rate: int = 8) -> tuple[Part, ...]:
    """Return the parts of rows at a fixed rate: an exponent, blocks of 4 x 4 values in words of 64
    bits, a flag per row.

    Args:
        rows, dim, dtype: shape and dtype of the rows; the parts are the same for every dtype.
        rate: bits per value.
    """
    num_blocks = math.ceil(rows / 4) * math.ceil(dim / 4)
    num_bits = num_blocks * 16 * rate  # 16 values a block
    exponent = Part((1,), "int16")
    blocks = Part((math.ceil(num_bits / 64) * 8,), "uint8")  # words of 8 bytes
    row_flags = Part((math.ceil(rows / 8),), "uint8")  # 8 flags a byte
    return exponent, blocks, row_flags


def scaled(
    rows: float, dim: int, dtype: str, *, transport: str, width: int | None = None
) -> tuple[Part, ...]:
    """Return the parts of rows cast to `transport`, with a scale per `width` values of a row, or
    per row if `width` is None."""
    scales_per_row = math.ceil(dim / (width or dim))
    scales = Part((rows, scales_per_row), scale_dtype(dtype))
    values = Part((rows, dim), transport)
    return scales, values


NO_CODEC = "none"
"""The codec that sends rows unchanged."""

CODECS: dict[str, CodecSpec] = {
    NO_CODEC: CodecSpec(
        implementation="codec.Identity",
        layout=lambda rows, dim, dtype: (Part((rows, dim), dtype),),
        tolerance=0.0,
    ),
    "bf16": CodecSpec(
        implementation="sixteen.Bf16",
        layout=partial(sixteen_bits, transport="bfloat16"),
        tolerance=0.06,
    ),
    "fp16": CodecSpec(
        implementation="sixteen.Fp16",
        layout=partial(sixteen_bits, transport="float16"),
        tolerance=0.01,
    ),
    "int8": CodecSpec(
        implementation="eight.Int8", layout=partial(scaled, transport="int8"), tolerance=0.15
    ),
    "fp8": CodecSpec(
        implementation="eight.Fp8",
        layout=partial(scaled, width=128, transport="float8_e4m3fn"),
        tolerance=0.6,
    ),
    "zfp": CodecSpec(
        implementation="zfp.Zfp",
        layout=blocks_of_bits,
        tolerance=0.15,
        rows_per_block=4,
        option="rate",
        allowed=range(4, 33),
    ),
}
"""All codecs, by the name that `Plan.codec` takes. A codec with an option takes a colon and a
number after its name: zfp:12 has 12 bits per value. `NO_CODEC` comes first."""


def is_coded(name: str) -> bool:
    """Return whether a codec changes rows at all; "" stands for no codec."""
    return name not in ("", NO_CODEC)


def codec_spec(codec: str) -> CodecSpec:
    """Return a codec's specification; "" stands for "none". Options after a colon are parsed only
    here.

    Args:
        codec: a codec's name, optionally followed by a colon and its option.

    Raises:
        InputError: if the codec is unknown or does not take the option.
    """
    name, colon, text = codec.partition(":")
    if name and name not in CODECS:
        known = []
        for known_name, known_spec in CODECS.items():
            option = f":{known_spec.option.upper()}" if known_spec.option else ""
            known.append(f"{known_name}{option}")
        raise InputError(f"codec {codec!r} is unknown: write one of {', '.join(known)}")
    spec = CODECS[name or NO_CODEC]
    if not colon:
        return spec
    if not spec.option:
        raise InputError(
            f"codec {codec!r}: {name or NO_CODEC} takes no option: leave out what follows the colon"
        )

    # -1, which no option allows, for a text that is no whole number
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value not in spec.allowed:
        allowed = f"{spec.option} as a whole number from {spec.allowed[0]} to {spec.allowed[-1]}"
        raise InputError(f"codec {codec!r}: write {allowed}, such as {name}:8")
    layout = partial(spec.layout, **{spec.option: value})
    # the specification's tolerance is that of 8 bits per value; each further bit halves the error
    tolerance = spec.tolerance * 2.0 ** (8 - value)
    return replace(spec, layout=layout, value=value, tolerance=tolerance)


def name_of(codec: str) -> str:
    """Return a codec's name without its option."""
    return codec.partition(":")[0]
