"""The codecs by name: what a message of each is made of and what it loses, read by planning, simulation and the kernels.

Nothing here needs torch. What encodes and decodes stands in `kernels/codecs`, one codec a file. To add one: a new file there
and a line in `CODECS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from moesaic.errors import InputError

ELEMENT_BYTES = {
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4,
    "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of an element, by the name of its dtype in torch."""


class Part(NamedTuple):
    """One part of a message: an array, laid down in row-major order."""

    shape: tuple[float, ...]
    """Whole numbers, but where a simulator asks for an expected number of rows."""
    dtype: str
    """A key of `ELEMENT_BYTES`."""

    @property
    def num_bytes(self) -> float:
        """How long the part is."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


Layout = Callable[[float, int, str], tuple[Part, ...]]
"""From (rows, dim, dtype of the rows by name), neither number being 0, to the parts of a message. Parts of wide elements come
first, so that each is aligned. The dtype is one of the rows that the codec takes."""


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """What everyone but the codec itself has to know of a codec."""

    implementation: str
    """Where its class is: "file.Class" in `kernels/codecs`, an `AbstractCodec`."""
    layout: Layout
    """The parts of a message; nothing else says how long a message is."""
    tolerance: float
    """The largest error of a layer's results under it, relative to the largest of them, that `moesaic check` accepts against a
    layer without it. 0 says that decoded rows equal the rows bit for bit, whatever they are."""
    rows_per_block: int = 1
    """Rows that are encoded together: a message of a multiple of them wastes no bytes."""
    option: str = ""
    """The whole number that may follow the codec's name and a colon, by the name that the implementation and the layout take
    it under; "" for none."""
    allowed: range = range(0)
    """What it may be."""
    value: int | None = None
    """What it is; None for the implementation's own."""

    @property
    def arguments(self) -> dict[str, int]:
        """What the implementation is made with."""
        return {} if self.value is None else {self.option: self.value}

    @property
    def is_lossless(self) -> bool:
        """Whether decoded rows equal the rows bit for bit."""
        return self.tolerance == 0

    def num_bytes(self, rows: float, dim: int, dtype: str) -> float:
        """Return the length of the message of (rows, dim) rows, in bytes; 0 for no rows.

        Args:
            rows: of the message; a fraction is an expected number.
            dim: columns.
            dtype: of the rows, by its name in torch.
        """
        if rows == 0 or dim == 0:
            return 0
        return sum(part.num_bytes for part in self.layout(rows, dim, dtype))


def scale_dtype(dtype: str) -> str:
    """Return the dtype that codecs compute in, and that their scales have: float64 for float64 rows, else float32."""
    return "float64" if dtype == "float64" else "float32"


def sixteen_bits(rows: float, dim: int, dtype: str, *, transport: str) -> tuple[Part, ...]:
    """Return the parts of rows cast to 16 bits; those of a wider range than the transport's carry a power of two per row."""
    values = Part((rows, dim), transport)
    is_wider = dtype == "float64" if transport == "bfloat16" else dtype != "float16"
    return (Part((rows, 1), "int16"), values) if is_wider else (values,)


def blocks_of_bits(rows: float, dim: int, dtype: str, *, rate: int = 8) -> tuple[Part, ...]:
    """Return the parts of rows at a fixed rate: an exponent, blocks of 4 x 4 values in words of 64 bits, a flag per row.

    Args:
        rows, dim, dtype: of the rows.
        rate: bits per value.
    """
    num_bits = math.ceil(rows / 4) * math.ceil(dim / 4) * 16 * rate
    return Part((1,), "int16"), Part((math.ceil(num_bits / 64) * 8,), "uint8"), Part((math.ceil(rows / 8),), "uint8")


def scaled(rows: float, dim: int, dtype: str, *, transport: str, width: int | None = None) -> tuple[Part, ...]:
    """Return the parts of rows cast to `transport`, with a scale per `width` values of a row; None: one per row."""
    return Part((rows, math.ceil(dim / (width or dim))), scale_dtype(dtype)), Part((rows, dim), transport)


NO_CODEC = "none"
"""The name under which rows travel as they are."""

CODECS: dict[str, CodecSpec] = {
    NO_CODEC: CodecSpec(
        implementation="codec.Identity", layout=lambda rows, dim, dtype: (Part((rows, dim), dtype),), tolerance=0.0
    ),
    "bf16": CodecSpec(
        implementation="sixteen.Bf16", layout=partial(sixteen_bits, transport="bfloat16"), tolerance=0.06
    ),
    "fp16": CodecSpec(implementation="sixteen.Fp16", layout=partial(sixteen_bits, transport="float16"), tolerance=0.01),
    "int8": CodecSpec(implementation="eight.Int8", layout=partial(scaled, transport="int8"), tolerance=0.15),
    "fp8": CodecSpec(
        implementation="eight.Fp8", layout=partial(scaled, width=128, transport="float8_e4m3fn"), tolerance=0.6
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
"""All codecs, by the name that `Plan.codec` takes, with a colon and a number behind it where there is an option: zfp:12 has 12
bits per value. `NO_CODEC` comes first."""


def is_coded(name: str) -> bool:
    """Whether rows under a codec are encoded at all; "" stands for no codec."""
    return name not in ("", NO_CODEC)


def codec_spec(codec: str) -> CodecSpec:
    """Return what is known of a codec; "" stands for "none". This is the one place that reads what stands behind a colon.

    Args:
        codec: its name, or the name, a colon and its option.

    Raises:
        InputError: there is no such codec, or it does not take that option.
    """
    name, colon, text = codec.partition(":")
    if name and name not in CODECS:
        known = ", ".join(f"{each}:{spec.option.upper()}" if spec.option else each for each, spec in CODECS.items())
        raise InputError(f"codec {codec!r} is unknown: write one of {known}")
    spec = CODECS[name or NO_CODEC]
    if not colon:
        return spec
    if not spec.option:
        raise InputError(f"codec {codec!r}: {name or NO_CODEC} takes no option: leave out what follows the colon")
    value = int(text) if text.isascii() and text.isdecimal() else -1
    if value not in spec.allowed:
        allowed = f"{spec.option} as a whole number from {spec.allowed[0]} to {spec.allowed[-1]}"
        raise InputError(f"codec {codec!r}: write {allowed}, such as {name}:8")
    layout = partial(spec.layout, **{spec.option: value})
    return replace(spec, layout=layout, value=value, tolerance=spec.tolerance * 2.0 ** (8 - value))


def name_of(codec: str) -> str:
    """Return a codec's name without its option."""
    return codec.partition(":")[0]
