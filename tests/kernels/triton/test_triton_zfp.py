"""The zfp kernels give zfpy's bytes at every rate, and decode zfpy's values from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.kernels.codecs.codec import split
from moesaic.kernels.codecs.zfp import Zfp
from moesaic.kernels.triton.zfp import zfp_decode, zfp_encode

pytest.importorskip("zfpy")


def bad_rows(num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Return rows from tiny to huge, with blocks of zeros, values below `ZFP_FLUSH`, a NaN and an infinity."""
    rows = torch.randn(num_rows, dim) * 10.0 ** torch.linspace(-30, 3, num_rows)[:, None]
    if num_rows > 8:
        rows[4:8] = 0
        rows[2, dim // 2], rows[num_rows - 1, 0] = torch.nan, -torch.inf
    return rows.to(dtype)


RATES = (4, 7, 8)
SIZES = [
    (4, 8, torch.float32),
    (9, 30, torch.float32),
    (33, 18, torch.bfloat16),
    (6, 5, torch.float16),
    (1, 1, torch.float32),
]
CASES = [
    pytest.param(rate, *size, id=f"{rate}-{size}", marks=() if RATES[number % 3] == rate else pytest.mark.slow)
    for number, size in enumerate(SIZES)
    for rate in RATES
]
"""Return every size at every rate; `make test` runs each size at one rate."""


@pytest.mark.parametrize(("rate", "num_rows", "dim", "dtype"), CASES)
def test_bytes_and_rows_are_zfpys(rate, num_rows, dim, dtype, device):
    codec = Zfp(rate=rate)
    rows = bad_rows(num_rows, dim, dtype) if num_rows > 4 else torch.randn(num_rows, dim).to(dtype)
    layout = codec.layout(num_rows, dim, dtype)
    expected = codec.encode(rows)
    message = torch.full_like(expected, 77, device=device)
    zfp_encode(rows.to(device), *split(message, layout), rate)
    assert torch.equal(message.cpu(), expected)
    actual = zfp_decode(*split(message, layout), num_rows, dim, dtype, rate).cpu()
    decoded = codec.decode(expected, num_rows, dim, dtype)
    torch.testing.assert_close(actual, decoded, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("rate", range(4, 33))
def test_every_rate_at_size(rate, device, interpreted):
    if interpreted:
        pytest.skip("a bit at a time: too slow under the interpreter")
    codec = Zfp(rate=rate)
    rows = torch.randn(1030, 1026)
    expected = codec.encode(rows)
    message = torch.empty_like(expected, device=device)
    layout = codec.layout(*rows.shape, rows.dtype)
    zfp_encode(rows.to(device), *split(message, layout), rate)
    assert torch.equal(message.cpu(), expected)
    actual = zfp_decode(*split(message, layout), *rows.shape, rows.dtype, rate).cpu()
    assert torch.equal(actual, codec.decode(expected, *rows.shape, rows.dtype))
