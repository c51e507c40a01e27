"""How many bytes the rows of a message take on their way: of tokens, with a codec, of routing weights, indices and weights."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.codecs import codec_spec
from moesaic.errors import InputError
from moesaic.program.task import INDEX_BYTES, Kind, Slot

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "float64"}
"""The dtype of rows that a codec codes, by the bytes of an element: planning knows no more."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What decides how large rows, weights and products are."""

    dim: int
    """Width of a token."""
    hidden: int
    """Inner width of one expert."""
    element_bytes: int = 2
    """Of activations and weights."""
    matrices: int = 3
    """Of an expert: 3 for SwiGLU, 2 for a plain one."""


def row_bytes(slot: Slot, codec: str, rows: float, shape: LayerShape) -> float:
    """Return the bytes of a message.

    Args:
        slot: that the rows come from.
        codec: of token rows; "" for none.
        rows: of the message; fractions are expected values.
        shape: of the layer.
    """
    if slot.kind is Kind.LANE:
        return rows * 4
    if slot.kind is Kind.INDEX:
        return rows * INDEX_BYTES
    if slot.kind is Kind.WEIGHT:
        return rows * shape.element_bytes * shape.dim * (shape.matrices if slot.layout.flow == "weights" else 1)
    return coded_bytes(codec, rows, shape.dim, shape.element_bytes)


def coded_bytes(codec: str, rows: float, dim: int, element_bytes: int) -> float:
    """Return the bytes of one message.

    Args:
        codec: a codec's name; "" or "none" for none.
        rows: of the message.
        dim: columns.
        element_bytes: of a row's elements; 2 stands for bfloat16 (float16 rows under fp16 would need no scale).

    Raises:
        InputError: there is no such codec, or it takes no rows of such elements.
    """
    spec = codec_spec(codec)
    if codec in ("", "none"):
        return rows * dim * element_bytes
    if element_bytes not in DTYPES:
        raise InputError(f"codec {codec} takes no elements of {element_bytes} bytes: use codec none for them")
    return spec.num_bytes(rows, dim, DTYPES[element_bytes])
