"""CPU products by torch and by oneDNN against float64, including sizes that are not multiples of
`STEP`."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.kernels import products
from moesaic.kernels.grouped_matmul import outer_products, rows_times
from moesaic.kernels.products import rows_product, sum_product

SIZES = [(0, 3, 5), (1, 4, 2), (7, 5, 3), (16, 8, 8), (53, 24, 40), (100, 7, 1)]
"""(rows, input width, output width)."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=["torch", "onednn"])
def onednn(request, monkeypatch) -> list[int]:
    """Let oneDNN compute all float32 and bfloat16 products, or none; return the numbers of float32
    rows that it got."""
    if request.param == "onednn" and not products.has_onednn():
        pytest.skip("this torch has no such operator of oneDNN")
    row_counts: list[int] = []

    def counted(rows, transposed, *others):
        assert transposed.is_contiguous() or transposed.t().is_contiguous(), (
            "a matrix for oneDNN's reference code"
        )
        row_counts.append(len(rows))
        return operator(rows, transposed, *others)

    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param == "onednn")
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: request.param == "onednn")
    if request.param == "onednn":
        operator = torch.ops.mkldnn._linear_pointwise
        counted.default = operator.default  # which dispatch modes look for
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    for name in ("FEWEST", "NARROWEST"):
        monkeypatch.setattr(products, name, 0)
    return row_counts


@pytest.fixture(params=[0, 10**6], ids=["copied", "left to MKL"])
def fewest_to_copy(request, monkeypatch) -> int:
    """Copy all matrices whose rows lie apart for oneDNN, or none."""
    monkeypatch.setattr(products, "FEWEST_TO_COPY", request.param)
    return request.param


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool(
        (actual.double() - exact).norm() <= TOLERANCE[actual.dtype] * exact.norm().clamp_min(1e-30)
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("form", ["plain", "transposed", "part"])
def test_rows_times_a_matrix(size, dtype, form, onednn):
    num_rows, inner, columns = size
    # half of a tensor, like one of two pre-activations
    rows = torch.randn(num_rows, 2 * inner).to(dtype)[:, :inner]
    matrix = torch.randn(inner, columns).to(dtype)
    if form != "plain":  # a view of interleaved matrices, like weights from other ranks
        matrix = torch.randn(columns, inner * (2 if form == "part" else 1)).to(dtype)[:, :inner].t()
    out = torch.full((num_rows, columns), torch.nan, dtype=dtype)
    exact = rows.double() @ matrix.double()
    rows_product(rows, matrix, out)
    assert close(out, exact)
    first = num_rows // 2  # the rows behind it may be overwritten, as those of the next expert
    out[:first] = torch.nan
    rows_product(rows[:first], matrix, out[:first], num_rows - first)
    assert close(out[:first], exact[:first])
    assert dtype == torch.float32 or onednn == []


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_a_sum_over_rows(size, dtype, adds, onednn):
    num_rows, *widths = size
    for gap in (0, 5):
        a, b = (torch.randn(num_rows, width + gap).to(dtype)[:, :width] for width in widths)
        before = torch.randn(widths).to(dtype)
        out = before.clone() if adds else torch.full_like(before, torch.nan)
        sum_product(a, b, out, adds=adds)
        assert close(out, a.double().t() @ b.double() + (before.double() if adds else 0))


FORMS = {
    "packed": lambda height, width: torch.randn(height, width),
    "rows apart": lambda height, width: torch.randn(height, 3 * width)[:, width : 2 * width],
    "columns": lambda height, width: torch.randn(width, height).t(),
    "columns apart": lambda height, width: torch.randn(width, 3 * height)[
        :, height : 2 * height
    ].t(),
    "one of two in turn": lambda height, width: torch.randn(height, 2, width)[:, 1],
    "every other": lambda height, width: torch.randn(height, 2 * width)[:, ::2],
    "one row": lambda height, width: torch.randn(1, width).expand(height, width),
}
"""Matrices of each layout in memory that a product may get."""


@pytest.mark.parametrize("form", FORMS)
def test_onednn_gets_packed_matrices(form, fewest_to_copy, onednn, request):
    """For others it has reference code only, 2,000 times as long. Autocast and inference change
    nothing."""
    rows = torch.randn(48, 24)
    matrix = FORMS[form](24, 40)
    out = torch.full((48, 40), torch.nan)
    with torch.inference_mode():
        rows_product(rows, matrix, out)
    assert close(out, rows.double() @ matrix.double())
    is_packed = form in ("packed", "columns")
    assert onednn == (
        [48] if (is_packed or not fewest_to_copy) and "onednn-" in request.node.name else []
    )
    a = torch.randn(48, 16)
    b = FORMS[form](48, 40)
    total = torch.full((16, 40), torch.nan)
    sum_product(a, b, total)
    assert close(total, a.double().t() @ b.double())


class Multiplied(TorchDispatchMode):
    """Note the dtype and the numbers of rows and columns of what torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[torch.dtype, torch.Size]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.operands += [
                (each.dtype, each.shape) for each in args if isinstance(each, torch.Tensor)
            ]
        return func(*args, **(kwargs or {}))


def test_onednn_gets_numbers_of_rows_that_come_again(onednn):
    """oneDNN compiles code for every number of rows."""
    with Multiplied() as multiplied:
        for num_rows in range(products.STEP, 40 * products.STEP):
            rows = torch.randn(num_rows, 3)
            rows_product(rows, torch.randn(3, 2), torch.empty(num_rows, 2))
            sum_product(rows.bfloat16(), rows.bfloat16(), torch.empty(3, 3).bfloat16())
    assert all(rows % products.STEP == 0 for rows in onednn)
    assert (
        len(
            {
                size[0]
                for dtype, size in multiplied.operands
                if dtype == torch.bfloat16 and size[1] == 3
            }
        )
        <= 16 * 3
    )


def test_a_row_that_is_not_finite_stays_alone(onednn):
    rows = torch.randn(40, 8)
    out = torch.empty(40, 6)
    rows[3] = torch.nan
    rows[37] = torch.inf
    rows_product(rows, torch.randn(8, 6), out)
    assert (~out.isfinite()).any(1).nonzero().flatten().tolist() == [3, 37]


@pytest.mark.parametrize(
    ("case", "size"), [("small", (8, 8)), ("narrow", (4096, 8)), ("switched off", (512, 64))]
)
def test_small_and_narrow_products_and_all_without_onednn_are_left_to_torch(
    case, size, monkeypatch
):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "product_by_onednn", None)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", case != "switched off")
    rows_product(torch.randn(512, size[0]), torch.randn(size), torch.empty(512, size[1]))
    sum_product(torch.randn(512, size[0]), torch.randn(512, size[1]), torch.empty(size))


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\n\nvendor_id\t: x\n", True),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\n", False),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 26\n", False),
        ("CPU implementer\t: 0x41\n", False),
        ("", False),
    ],
)
def test_processors_are_told_apart(cpuinfo, expected, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo, encoding="utf-8")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # which torch 2.10 lacks
    monkeypatch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if expected else "AVX2"
    )
    assert products.multiplies_bfloat16.__wrapped__() is products._is_zen_5(path) is expected
    assert not products._is_zen_5(tmp_path / "absent")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_without_instructions_are_multiplied_as_float32_also_beside_other_rows(
    dtype, monkeypatch
):
    """torch's own products of such matrices are slow on most processors. Autocast would make them
    of 16 bits again."""
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(products, "FEWEST", 0)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    rows = torch.randn(16, 8).to(dtype)
    matrix = torch.randn(8, 8).to(dtype)
    both = torch.full((16, 16), torch.nan, dtype=dtype)
    total = torch.zeros(8, 8, dtype=dtype)
    ends = torch.tensor([16], dtype=torch.int32)
    with torch.autocast("cpu", dtype), Multiplied() as multiplied:
        rows_product(rows, matrix, both[:, 8:])
        sum_product(rows, rows, total, adds=True)
        others = rows_times(rows, matrix[None], ends), outer_products(rows, rows, ends)
    assert {dtype for dtype, _ in multiplied.operands} == {torch.float32}
    assert both[:, :8].isnan().all()
    for product in (both[:, 8:], others[0]):
        assert close(product, rows.double() @ matrix.double())
    for product in (total, others[1][0]):
        assert close(product, rows.double().t() @ rows.double())
