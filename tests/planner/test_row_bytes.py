"""Byte counts without torch equal the codecs' own."""

from __future__ import annotations

import pytest
import torch

from helpers import refused
from moesaic.codecs import CODECS, ELEMENT_BYTES
from moesaic.kernels.codecs import codec_named
from moesaic.planner import movement
from moesaic.planner.movement import coded_bytes
from moesaic.planner.search import COMPRESSION

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65]
DIMS = [0, 1, 3, 4, 5, 16, 127, 128, 129, 300]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_messages_are_as_long_as_the_codec_says(codec: str, dtype: torch.dtype) -> None:
    for rows in ROWS:
        for dim in DIMS:
            assert coded_bytes(codec, rows, dim, dtype.itemsize) == codec_named(codec).num_bytes(
                rows, dim, dtype
            ), (rows, dim)


def test_no_codec_has_two_names() -> None:
    assert coded_bytes("", 3, 5, 2) == coded_bytes("none", 3, 5, 2) == 30


def test_an_unknown_codec_has_no_size() -> None:
    assert "codec 'int3' is unknown: write one of none, bf16, fp16" in refused(
        coded_bytes, "int3", 3, 5, 2
    )


def test_a_codec_refuses_elements_of_unknown_size() -> None:
    assert coded_bytes("none", 3, 5, 3) == 45
    assert "codec int8 does not support elements of 3 bytes: use codec none" in refused(
        coded_bytes, "int8", 3, 5, 3
    )


@pytest.mark.parametrize(
    ("codec", "element_bytes", "expected"),
    [
        ("bf16", 8, 2 * 7.3 * 300 + 2 * 7.3),
        ("fp16", 2, 2 * 7.3 * 300 + 2 * 7.3),
        ("int8", 4, 7.3 * 300 + 4 * 7.3),
        ("int8", 8, 7.3 * 300 + 8 * 7.3),
        ("fp8", 2, 7.3 * 300 + 4 * 7.3 * 3),
        ("zfp", 2, 8 * 2 * 75 * 2 + 2 + 1),
        ("none", 2, 7.3 * 300 * 2),
    ],
)
def test_an_expected_number_of_rows_has_expected_bytes(
    codec: str, element_bytes: int, expected: float
) -> None:
    assert coded_bytes(codec, 7.3, 300, element_bytes) == expected


@pytest.mark.parametrize("codec", CODECS)
def test_floors_allow_codecs_at_least_what_they_save(codec: str) -> None:
    for size in movement.DTYPES:
        assert 1000 * 4096 * size <= COMPRESSION * coded_bytes(codec, 1000, 4096, size)


def test_elements_are_as_wide_as_in_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ELEMENT_BYTES} == ELEMENT_BYTES
