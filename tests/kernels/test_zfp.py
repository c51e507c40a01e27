"""zfp: worst-case blocks, and numbers that zfp decodes wrongly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.codecs import CODECS
from moesaic.errors import InputError
from moesaic.kernels.codecs.zfp import WRAPPED, Zfp, block_errors
from stand_in import DEVICE, StandIn, pretending, values

zfpy = pytest.importorskip("zfpy")

doubles = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def error_and_bound(codec: Zfp, rows: Tensor) -> tuple[Tensor, Tensor]:
    decoded = codec.decode(codec.encode(rows), *rows.shape, rows.dtype)
    return (decoded.double() - rows.double()).abs(), codec.error_bound(rows)


@doubles
@pytest.mark.parametrize("rate", [4, 6, 8, 12, 20, 32])
def test_blocks_that_were_climbed_to_be_bad_stay_within_the_bound(
    rate: int, dtype: torch.dtype
) -> None:
    """Hill climbing on many blocks: random changes are kept if the error grows relative to the
    bound."""
    random = torch.Generator().manual_seed(rate)
    codec = Zfp(rate=rate)
    num_blocks = 64

    def uniform() -> Tensor:
        return torch.rand(4, 4 * num_blocks, generator=random, dtype=torch.float64)

    def badness(rows: Tensor) -> Tensor:
        error, bound = error_and_bound(codec, rows)
        return (error / bound).view(4, num_blocks, 4).amax((0, 2))

    rows = (uniform() * 1.9 - 0.95).to(dtype)
    bad = badness(rows)
    start = float(bad.mean())
    for _ in range(40):
        step = torch.where(
            uniform() < 0.3,
            (uniform() - 0.5).sign() * 2,
            (uniform() - 0.5) * 10 ** (-9 * uniform()),
        )
        changed = torch.where(uniform() < 0.15, rows + step, rows).clamp(-0.999, 0.999).to(dtype)
        candidate = badness(changed)
        rows = torch.where((candidate > bad).repeat_interleave(4), changed, rows)
        bad = torch.maximum(bad, candidate)
    assert float(bad.max()) <= 1
    assert float(bad.mean()) > start


@doubles
def test_the_error_halves_with_each_bit_of_the_rate(dtype: torch.dtype) -> None:
    rows = torch.randn(64, 64, dtype=dtype, generator=torch.Generator().manual_seed(0))
    results = [error_and_bound(Zfp(rate=rate), rows) for rate in (6, 10, 14, 18)]
    for coarse, fine in pairwise(results):
        for before, after in zip(coarse, fine):
            assert 10 < float(before.mean() / after.mean()) < 25  # 2**4


def test_the_promise_for_rate_8_holds_for_every_block() -> None:
    rows = (
        torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).clamp(-0.99, 0.99).numpy()
    )
    signs = np.sign(rows) * np.float32(0.999)
    assert block_errors(rows, 8).max() <= 0.62
    assert block_errors(signs, 8).max() <= 0.62
    assert block_errors(signs, 4).max() == WRAPPED


@doubles
def test_tiny_blocks_are_not_noise(dtype: torch.dtype) -> None:
    """zfp itself decodes such blocks with the wrong sign and 2.7 times too large."""
    tiny = 2.0**-100 if dtype == torch.float32 else 2.0**-970
    rows = torch.full((4, 4), 1.5 * tiny, dtype=dtype)
    raw = zfpy.compress_numpy(rows.numpy(), rate=8, write_header=False)
    ztype = zfpy.dtype_to_ztype(rows.numpy().dtype)
    assert (zfpy._decompress(raw, ztype, (4, 4), rate=8) < 0).all()
    error, _ = error_and_bound(Zfp(), rows)
    assert (error == 0).all()
    error, _ = error_and_bound(Zfp(), torch.cat([rows, torch.ones_like(rows)]))
    assert float(error.max()) <= 1.5 * tiny


def test_a_row_with_a_nan_costs_its_block_nothing() -> None:
    rows = torch.randn(4, 16)
    zeroed = rows.clone()
    zeroed[1] = 0.0
    rows[1, 3] = torch.nan
    codec = Zfp()
    decoded = codec.decode(codec.encode(rows), 4, 16, torch.float32)
    expected = codec.decode(codec.encode(zeroed), 4, 16, torch.float32)
    others = [0, 2, 3]
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[others], expected[others])


def test_partial_blocks_cost_no_accuracy() -> None:
    codec = Zfp(rate=12)
    for shape in [(1, 1), (2, 3), (5, 6), (7, 9)]:
        error, bound = error_and_bound(codec, torch.full(shape, 0.7))
        assert (error <= bound).all()
        assert float(error.max()) < 1e-4


def test_rows_of_a_gpu_are_coded_on_the_host() -> None:
    """Whatever kernels the GPU runs: message and decoded rows are on it again, with the CPU's
    bytes."""
    codec = Zfp()
    rows = torch.randn(9, 14)
    expected = codec.encode(rows)
    with pretending(triton=True), StandIn():
        message = codec.encode(rows.to(DEVICE))
        decoded = codec.decode(message, 9, 14, torch.float32)
    assert message.device == decoded.device == DEVICE
    assert torch.equal(values(message), expected)
    assert torch.equal(values(decoded), codec.decode(expected, 9, 14, torch.float32))


@pytest.mark.parametrize("rate", [0, 3, 33, 7.5, True, "8"])
def test_a_rate_that_zfp_cannot_do_is_one_line(rate: object) -> None:
    with pytest.raises(
        InputError, match=r"codec .*: write rate as a whole number from 4 to 32, such as zfp:8"
    ):
        Zfp(rate=rate)


@doubles
def test_every_accepted_rate_gives_the_length_it_promises(dtype: torch.dtype) -> None:
    for rate in CODECS["zfp"].allowed:
        codec = Zfp(rate=rate)
        rows = torch.randn(9, 14, dtype=dtype)
        assert len(codec.encode(rows)) == codec.num_bytes(9, 14, dtype)
        error, bound = error_and_bound(codec, rows)
        assert (error <= bound).all()
