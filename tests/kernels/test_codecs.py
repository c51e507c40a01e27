"""Every codec of `CODECS`: its error bound over dtypes, shapes and magnitudes, then its own
properties."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import pairwise
from moesaic.codecs import CODECS, codec_spec
from moesaic.errors import InputError
from moesaic.kernels.codecs import AbstractCodec, codec_named
from moesaic.kernels.codecs.codec import FLOATS, Identity
from moesaic.kernels.codecs.eight import Fp8, Int8
from moesaic.kernels.codecs.sixteen import Bf16, Fp16
from moesaic.kernels.codecs.zfp import Zfp

SHAPES = [(1, 1), (3, 7), (4, 128), (5, 131)]

codecs = pytest.mark.parametrize("name", CODECS)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def make(name: str) -> AbstractCodec:
    if name == "zfp":
        pytest.importorskip("zfpy")
    return codec_named(name)


def round_trip(codec: AbstractCodec, rows: Tensor) -> Tensor:
    return codec.decode(codec.encode(rows), *rows.shape, rows.dtype)


def worst(codec: AbstractCodec, rows: Tensor) -> float:
    """Return the largest error as a fraction of the error bound; at most 1 if the bound holds."""
    decoded = round_trip(codec, rows)
    bound = codec.error_bound(rows)
    assert decoded.dtype == rows.dtype
    assert decoded.shape == rows.shape
    assert decoded.device == rows.device
    assert bound.dtype == torch.float64
    assert bound.isfinite().all()
    error = (decoded.double() - rows.double()).abs().expand_as(bound)
    assert (error[bound == 0] == 0).all()
    return float(torch.where(bound == 0, 0.0, error / bound).max()) if rows.numel() else 0.0


def workloads(rows: int, dim: int, seed: int) -> dict[str, Tensor]:
    """Return float64 test rows of many kinds, (rows, dim) each."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, dim, generator=random, dtype=torch.float64)

    def power(low: float, high: float, *shape: int) -> Tensor:
        return 10.0 ** (
            low + (high - low) * torch.rand(*shape, generator=random, dtype=torch.float64)
        )

    sparse = torch.where(torch.rand(rows, dim, generator=random) < 0.9, 0.0, normal)
    return {
        "normal": normal,
        "zeros": torch.zeros(rows, dim, dtype=torch.float64),
        "constant": torch.full((rows, dim), -0.3, dtype=torch.float64),
        "one constant per row": normal[:, :1].expand(rows, dim).contiguous(),
        "sparse": sparse,
        "heavy tails": normal
        / torch.rand(rows, dim, generator=random, dtype=torch.float64).clamp(min=1e-6),
        "offset": normal * 1e-3 + 100.0,
        "a magnitude per row": normal * power(-30, 30, rows, 1),
        "magnitudes within a row": normal * power(-30, 30, rows, dim),
        "close to subnormal": normal * power(-45, -36, rows, dim),
        "the whole range of float32": normal * power(-45, 38, rows, dim),
        "alternating": torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(rows, dim)[:, :dim]
        * 0.99,
    }


def in_range(rows: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return rows.clamp(-limit, limit).to(dtype)


class DividesByTensors(TorchDispatchMode):
    """Refuses divisions by a number: a GPU multiplies by its reciprocal, which is rounded, and
    gives other bytes than a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.divisions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (
            torch.ops.aten.div,
            torch.ops.aten.div_,
            torch.ops.aten.true_divide,
        ):
            self.divisions += 1
            assert isinstance(args[1], Tensor), f"{func} by the number {args[1]}"
            assert args[1].dim(), f"{func} by a tensor without dimensions"
        return func(*args, **(kwargs or {}))


@codecs
@dtypes
def test_no_codec_divides_by_a_number(name: str, dtype: torch.dtype) -> None:
    codec = make(name)
    rows = torch.randn(5, 131).to(dtype)
    with DividesByTensors() as mode:
        message = codec.encode(rows)
        codec.decode(message, 5, 131, dtype)
    # other codecs may divide by tensors too; these show that divisions are seen
    assert mode.divisions == {"int8": 2, "fp8": 2}.get(name, mode.divisions)


@codecs
@dtypes
def test_errors_stay_within_the_bound(name: str, dtype: torch.dtype) -> None:
    codec = make(name)
    for seed, shape in enumerate(SHAPES):
        for kind, rows in workloads(*shape, seed).items():
            assert worst(codec, in_range(rows, dtype)) <= 1, (shape, kind)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "none"])
def test_the_bound_is_not_far_off(name: str) -> None:
    """zfp's holds for the worst block, from which ordinary rows are far."""
    rows = workloads(64, 256, 0)["normal"].float()
    assert worst(make(name), rows) > (0.05 if name == "zfp" else 0.3)


@codecs
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_errors_stay_within_the_bound_for_any_numbers(name: str, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 5))
    dim = data.draw(st.integers(1, 9))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = data.draw(st.lists(finite, min_size=rows * dim, max_size=rows * dim))
    assert worst(make(name), torch.tensor(values, dtype=torch.float32).view(rows, dim)) <= 1


@codecs
@dtypes
def test_the_largest_and_smallest_numbers_stay_finite(name: str, dtype: torch.dtype) -> None:
    numbers = torch.finfo(dtype)
    extremes = [
        numbers.max,
        -numbers.max,
        numbers.smallest_normal,
        numbers.smallest_normal * numbers.eps,
        0.0,
    ]
    rows = torch.tensor(extremes, dtype=torch.float64).to(dtype)
    codec = make(name)
    for row in (rows, rows[:2], rows[2:], rows[3:4]):
        assert worst(codec, row.repeat(4, 3)) <= 1
        assert worst(codec, row[:, None].repeat(1, 5)) <= 1


@codecs
@dtypes
def test_a_message_has_the_length_that_both_ends_derive(name: str, dtype: torch.dtype) -> None:
    codec = make(name)
    for shape in [*SHAPES, (0, 12)]:
        message = codec.encode(torch.randn(shape).to(dtype))
        assert message.dtype == torch.uint8
        assert message.is_contiguous()
        assert message.shape == (codec.num_bytes(*shape, dtype),)
    assert codec.num_bytes(0, 12, dtype) == 0
    rows = torch.empty(0, 12, dtype=dtype)
    assert (round_trip(codec, rows).shape, round_trip(codec, rows).dtype) == ((0, 12), dtype)
    assert codec.error_bound(rows).shape == (0, 12)


@codecs
def test_messages_are_deterministic_and_leave_the_rows_alone(name: str) -> None:
    codec = make(name)
    rows = workloads(7, 130, 3)["magnitudes within a row"].float()
    rows[2, 5] = torch.nan
    before = rows.clone()
    first = codec.encode(rows)
    second = codec.encode(rows.clone())
    assert torch.equal(first, second)
    torch.testing.assert_close(rows, before, rtol=0, atol=0, equal_nan=True)


@codecs
def test_the_memory_layout_of_the_rows_does_not_matter(name: str) -> None:
    codec = make(name)
    rows = torch.randn(6, 20)
    strided = torch.stack([rows, rows + 1], dim=2)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(codec.encode(strided), codec.encode(rows))
    assert torch.equal(codec.encode(rows.t().contiguous().t()), codec.encode(rows))


@codecs
@dtypes
def test_a_message_is_read_at_any_offset_of_a_buffer(name: str, dtype: torch.dtype) -> None:
    codec = make(name)
    rows = torch.randn(5, 33).to(dtype)
    message = codec.encode(rows)
    for offset in (1, 2, 4):
        buffer = torch.full((len(message) + offset + 3,), 255, dtype=torch.uint8)
        buffer[offset : offset + len(message)] = message
        decoded = codec.decode(buffer[offset : offset + len(message)], 5, 33, dtype)
        assert torch.equal(decoded, codec.decode(message, 5, 33, dtype))


@codecs
def test_codecs_are_outside_of_autograd(name: str) -> None:
    codec = make(name)
    rows = torch.randn(4, 8, requires_grad=True)
    assert not round_trip(codec, rows).requires_grad
    assert not codec.error_bound(rows).requires_grad


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    pairwise(CODECS, FLOATS, (torch.inf, -torch.inf, torch.nan)),
    ids=str,
)
def test_what_is_not_finite_never_comes_back_finite(
    name: str, dtype: torch.dtype, value: float
) -> None:
    codec = make(name)
    rows = torch.randn(6, 260).to(dtype)
    rows[3, 7] = value
    decoded = round_trip(codec, rows)
    assert decoded[3, 7].isnan() or torch.equal(decoded[3, 7], rows[3, 7])
    others = torch.ones(6, dtype=torch.bool)
    others[3] = False
    assert decoded[others].isfinite().all()
    bound = codec.error_bound(rows)
    error = (decoded.double() - rows.double()).abs()
    assert (error <= bound)[others].all()
    touched = decoded[3].isnan() & rows[3].isfinite()
    assert bound[3][touched].isinf().all()
    assert (error[3] <= bound[3])[rows[3].isfinite() & ~touched].all()


@codecs
@dtypes
def test_a_codec_that_claims_to_be_lossless_is(name: str, dtype: torch.dtype) -> None:
    codec = make(name)
    rows = torch.cat([in_range(rows, dtype) for rows in workloads(5, 37, 1).values()])
    rows[0, :3] = torch.tensor([torch.nan, torch.inf, -0.0]).to(dtype)
    same = torch.equal(round_trip(codec, rows).view(torch.uint8), rows.view(torch.uint8))
    if codec.spec.is_lossless:
        assert same
        assert (codec.error_bound(rows) == 0).all()
    elif not name.endswith(str(dtype.itemsize * 8)):
        assert not same


@codecs
def test_what_is_no_float_goes_without_a_codec_only(name: str) -> None:
    codec = make(name)
    rows = torch.arange(12).view(3, 4)
    if codec.spec.is_lossless:
        assert torch.equal(round_trip(codec, rows), rows)
        return
    with pytest.raises(
        InputError, match=rf"codec {name} takes rows in float16, .* got torch.int64: use codec none"
    ):
        codec.encode(rows)


@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
def test_codecs_without_a_shared_scale_keep_infinities(name: str) -> None:
    rows = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan]])
    torch.testing.assert_close(round_trip(make(name), rows), rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rate", [4, 12, 32])
def test_the_number_behind_the_colon_is_the_codecs_option(rate: int) -> None:
    codec = codec_named(f"zfp:{rate}")
    assert codec == Zfp(rate=rate)
    assert codec.num_bytes(8, 16, torch.float32) == codec_spec(f"zfp:{rate}").num_bytes(
        8, 16, "float32"
    )
    assert codec.num_bytes(8, 16, torch.float32) == 2 + 8 * 16 * rate // 8 + 1
    assert codec.spec.tolerance == CODECS["zfp"].tolerance * 2.0 ** (8 - rate)


def test_zfp_without_its_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zfpy", None)
    message = r'^codec zfp needs zfpy: in a clone of the repository, pip install "\.\[zfp\]"$'
    with pytest.raises(InputError, match=message):
        codec_named("zfp")
    with pytest.raises(InputError, match=message):
        Zfp().encode(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("codec", "dtype", "expected"),
    [
        (Identity(), torch.float64, 6 * 300 * 8),
        (Bf16(), torch.float32, 6 * 300 * 2),
        (Bf16(), torch.float64, 6 * (300 * 2 + 2)),
        (Fp16(), torch.float32, 6 * (300 * 2 + 2)),
        (Fp16(), torch.float16, 6 * 300 * 2),
        (Int8(), torch.bfloat16, 6 * (300 + 4)),
        (Int8(), torch.float64, 6 * (300 + 8)),
        (Fp8(), torch.float32, 6 * (300 + 3 * 4)),
        (Zfp(), torch.float32, 8 * 300 + 2 + 1),
        (Zfp(rate=5), torch.float32, 8 * 300 * 5 // 8 + 4 + 2 + 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AbstractCodec) else str(value),
)
def test_lengths(codec: AbstractCodec, dtype: torch.dtype, expected: int) -> None:
    assert codec.num_bytes(6, 300, dtype) == expected


@pytest.mark.parametrize("codec", [Bf16(), Fp16()], ids=lambda codec: type(codec).__name__)
def test_16_bit_rows_of_ordinary_size_are_those_of_a_plain_cast(codec: Bf16 | Fp16) -> None:
    rows = torch.randn(50, 64).clamp(min=1e-4) * 100
    assert torch.equal(round_trip(codec, rows), rows.to(codec.transport).float())


def test_int8_rounds_to_nearest_without_a_bias() -> None:
    rows = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    step = rows.abs().amax(1, keepdim=True) / 127
    error = (round_trip(Int8(), rows) - rows) / step
    assert float(error.abs().max()) <= 0.5001
    # truncation would give a bias of up to 0.5, depending on the sign
    assert abs(float(error.mean())) < 0.005
    assert abs(float((error * rows.sign()).mean())) < 0.005


def test_int8_keeps_zero_and_the_ends_of_each_row() -> None:
    rows = torch.tensor([[0.0, 3.0, -1.0], [0.0, -5e-4, 5e-4], [0.0, 0.0, 0.0], [7.0, 7.0, 7.0]])
    decoded = round_trip(Int8(), rows)
    assert (decoded[rows == 0] == 0).all()
    torch.testing.assert_close(
        decoded[[0, 1, 3], [1, 1, 2]], torch.tensor([3.0, -5e-4, 7.0]), rtol=1e-6, atol=0
    )


def test_fp8_has_a_scale_per_128_values() -> None:
    rows = torch.ones(1, 300)
    rows[0, :128] = 448e6
    rows[0, 128:256] = 448.0
    rows[0, 256:] = 448e-6
    assert torch.equal(round_trip(Fp8(), rows), rows)
    rows[0, 130] = torch.inf
    decoded = round_trip(Fp8(), rows)
    assert decoded[0, 128:256].isnan().all()
    assert torch.equal(decoded[0, :128], rows[0, :128])
    assert torch.equal(decoded[0, 256:], rows[0, 256:])


def test_fp8_gives_each_e4m3_number_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes[codes.isfinite()]
    rows = torch.cat([numbers.view(-1, 1), torch.full((len(numbers), 1), 448.0)], dim=1)
    assert len(numbers) == 254
    assert torch.equal(round_trip(Fp8(), rows), rows)
