"""The torch-free byte counts of codecs are the codecs' own."""

from __future__ import annotations

import pytest
import torch

from moesaic.cost.coded import ROWS_PER_BLOCK, coded_bytes
from moesaic.kernels.codecs import CODECS

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65]
DIMS = [0, 1, 3, 4, 5, 16, 127, 128, 129, 300]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_messages_are_as_long_as_the_codec_says(codec: str, dtype: torch.dtype) -> None:
    for rows in ROWS:
        for dim in DIMS:
            assert coded_bytes(codec, rows, dim, dtype.itemsize) == CODECS[codec]().num_bytes(rows, dim, dtype), (
                rows,
                dim,
            )


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "zfp"])
def test_messages_are_as_long_as_what_is_encoded(codec: str) -> None:
    for dtype in DTYPES:
        rows = torch.randn(5, 130).to(dtype)
        assert coded_bytes(codec, 5, 130, dtype.itemsize) == CODECS[codec]().encode(rows).numel()


def test_no_codec_has_two_names() -> None:
    assert coded_bytes("", 3, 5, 2) == coded_bytes("none", 3, 5, 2) == 30


def test_blocks_are_the_codecs_own() -> None:
    assert {name: codec.rows_per_block for name, codec in CODECS.items() if codec.rows_per_block > 1} == ROWS_PER_BLOCK
