"""How many bytes rows take on their way, by codec."""

from __future__ import annotations

from moesaic.codecs import codec_spec
from moesaic.errors import InputError

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "float64"}
"""The dtype of rows that a codec codes, by the bytes of an element: planning knows no more."""


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
