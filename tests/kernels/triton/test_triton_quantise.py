"""The int8 and fp8 kernels give the oracle's bytes, bit for bit, and its decoded rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers import pairwise
from moesaic.kernels.codecs.codec import split
from moesaic.kernels.codecs.eight import Fp8, Int8
from moesaic.kernels.triton.quantise import decode, fp8_encode, int8_encode

OPS = {"int8": (Int8(), int8_encode), "fp8": (Fp8(), fp8_encode)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bad_rows(num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows from tiny to huge, a row of zeros, one with an infinity, one with a NaN, one of
    subnormals, one of ties."""
    rows = torch.randn(num_rows, dim) * 10.0 ** torch.linspace(-12, 3, num_rows)[:, None]
    if num_rows > 5:
        rows[1] = 0
        rows[2, dim // 2] = torch.inf
        rows[3, dim - 1] = torch.nan
        rows[4] = torch.arange(dim) * 1e-41
        rows[5] = (torch.arange(dim) % 255 - 127) * 0.5
    return rows.to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "size"), pairwise(OPS, DTYPES, ((1, 1), (7, 300), (6, 128))), ids=str
)
def test_bytes_and_rows_are_the_oracles(name, dtype, size, device):
    (codec, encode) = OPS[name]
    (num_rows, dim) = size
    rows = bad_rows(num_rows, dim, dtype)
    expected = codec.encode(rows)
    message = torch.full_like(expected, 77, device=device)
    encode(rows.to(device), *split(message, codec.layout(num_rows, dim, dtype)))
    assert torch.equal(message.cpu(), expected)
    actual = decode(*split(message, codec.layout(num_rows, dim, dtype)), dtype).cpu()
    decoded = codec.decode(expected, num_rows, dim, dtype)
    assert torch.equal(actual.isnan(), decoded.isnan())
    torch.testing.assert_close(actual, decoded, atol=0, rtol=0, equal_nan=True)


def test_every_float8_number_comes_back(device):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(2)[None]
    scale = torch.tensor([[1.0, 1.0, 0.5, 3.0]])
    actual = decode(scale.to(device), codes.to(device), torch.float32).cpu()
    expected = codes.float() * scale.repeat_interleave(128, dim=1)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)
