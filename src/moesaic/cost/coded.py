"""How many bytes rows take on their way, by codec. `kernels/codecs` does the coding; a test holds the two together."""

from __future__ import annotations

import math

ROWS_PER_BLOCK = {"zfp": 4}
"""Rows that a codec codes together, where it is more than one."""


def coded_bytes(codec: str, rows: float, dim: int, element_bytes: int) -> float:
    """Return the bytes of one message.

    Args:
        codec: a codec's name; "" or "none" for none.
        rows: of the message.
        dim: columns.
        element_bytes: of a row's elements; 2 stands for bfloat16 (float16 rows under fp16 would need no scale).
    """
    if rows == 0 or dim == 0:
        return 0
    scale = 8 if element_bytes == 8 else 4
    if codec == "bf16":
        return 2 * rows * dim + (2 * rows if element_bytes == 8 else 0)
    if codec == "fp16":
        return 2 * rows * dim + 2 * rows
    if codec == "int8":
        return rows * dim + scale * rows
    if codec == "fp8":
        return rows * dim + scale * rows * math.ceil(dim / 128)
    if codec == "zfp":
        blocks = math.ceil(rows / 4) * math.ceil(dim / 4)
        return 8 * math.ceil(blocks * 16 * 8 / 64) + 2 + math.ceil(rows / 8)
    return rows * dim * element_bytes
