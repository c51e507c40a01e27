"""NF4: the bytes of bitsandbytes, and products equal to those with dequantized matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.errors import InputError
from moesaic.kernels import nf4

CODES = (
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1"
    "6d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b05d17e29f3c05d18"
    "e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af"
    "4c06d18e2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05"
    "d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b05d17e"
    "29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3"
    "7777777777777777777777777777777777777777777777777777777777777777"
    "17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e2"
)
"""What bitsandbytes 0.50.2 wrote for `weights()`."""
SCALES = [50.0, 50.0, 50.0, 50.0, 12.5, 12.5, 0.0, 12.5]


def weights() -> Tensor:
    """Return two matrices of numbers that bfloat16 holds exactly, with a block of zeros."""
    numbers = ((torch.arange(2 * 2 * 128) * 37) % 101 - 50).float().view(2, 2, 128)
    numbers = numbers * torch.tensor([1.0, 0.25]).view(2, 1, 1)
    numbers[1, 1, :64] = 0
    return numbers.bfloat16()


def test_codes_are_the_bytes_that_bitsandbytes_wrote():
    codes, scales = nf4.quantize(weights())
    assert bytes(codes.flatten().tolist()).hex() == CODES
    assert scales.flatten().tolist() == SCALES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_numbers_are_those_of_bitsandbytes(dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    torch.manual_seed(0)
    weight = (2 * torch.randn(64, 256) * torch.rand(64, 1)).to(dtype)
    weight[3, 64:128] = 0
    weight[4, 0] = 1e-30
    theirs, state = bitsandbytes.quantize_4bit(
        weight, blocksize=64, compress_statistics=False, quant_type="nf4"
    )
    codes, scales = nf4.quantize(weight)
    assert torch.equal(codes.flatten(), theirs.flatten())
    assert torch.equal(scales.flatten(), state.absmax.flatten())
    for out in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = out
        assert torch.equal(
            nf4.dequantize(codes, scales, out), bitsandbytes.dequantize_4bit(theirs, state)
        )


def test_scales_in_eight_bits_are_those_of_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    torch.manual_seed(0)
    for rows in (64, 65):  # whole groups of 256 scales, and a part of one
        weight = torch.randn(rows, 512) * torch.rand(rows, 1)
        weight[3] = 0
        theirs, state = bitsandbytes.quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        codes, scales = nf4.quantize(weight)
        short, groups = nf4.compress(scales)
        assert torch.equal(nf4.scale_values(weight.device), state.state2.code)
        assert torch.equal(short.flatten(), state.absmax)
        assert torch.equal(groups, torch.cat([state.offset.view(1), state.state2.absmax]))
        numbers = nf4.dequantize(
            codes, nf4.expand(short.unsqueeze(0), groups.unsqueeze(0))[0], torch.float32
        )
        state.dtype = torch.float32
        assert torch.equal(numbers, bitsandbytes.dequantize_4bit(theirs, state))


def test_scales_in_eight_bits_are_near_and_of_each_matrix_alone():
    torch.manual_seed(0)
    scales = torch.rand(3, 33, 40) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1)
    parts = [nf4.compress(each) for each in scales]
    codes, groups = (torch.stack(list(each)) for each in zip(*parts))
    assert (codes.dtype, codes.shape, groups.shape) == (torch.uint8, scales.shape, (3, 1 + 6))
    found = nf4.expand(codes, groups)
    assert found.dtype == torch.float32
    # The values lie at most 0.9 / 64 apart, in units of a group's largest difference from the mean.
    assert ((found - scales).abs() <= 0.9 / 128 * 1.01 * groups[:, 1:].amax(1).view(3, 1, 1)).all()
    assert ((found - scales).abs().amax((1, 2)) > 0).all()


@pytest.mark.parametrize("scratch", [nf4.SCRATCH, 64])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_equal_those_with_dequantized_matrices(dtype, transposed, scratch, monkeypatch):
    monkeypatch.setattr(nf4, "SCRATCH", scratch)
    torch.manual_seed(0)
    height = 40
    width = 192
    counts = [3, 0, 5, 1]
    codes, scales = nf4.quantize(torch.randn(4, height, width))
    x = torch.randn(sum(counts), width if transposed else height).to(dtype)
    ends = torch.tensor(counts).cumsum(0).int()
    found = nf4.rows_times(x, codes, scales, ends, transposed)
    assert found.dtype == dtype
    matrices = nf4.dequantize(codes, scales, dtype)
    for matrix, rows, out in zip(matrices, x.split(counts), found.split(counts)):
        matrix = matrix.t() if transposed else matrix
        exact = rows.double() @ matrix.double()
        bound = 8 * torch.finfo(dtype).eps * (rows.double().abs() @ matrix.double().abs())
        assert bool(((out.double() - exact).abs() <= bound).all())
    fake = torch.library.opcheck(
        nf4.rows_times.overload, (x, codes, scales, ends, transposed), test_utils="test_faketensor"
    )
    assert set(fake.values()) == {"SUCCESS"}


def test_widths_that_blocks_do_not_divide_are_refused():
    with pytest.raises(InputError, match="NF4 needs input widths that are multiples of 64, got 96"):
        nf4.quantize(torch.zeros(2, 96))
