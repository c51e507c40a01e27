"""CPU products by torch and by oneDNN against float64, including sizes that are not multiples of `STEP`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.kernels import products
from moesaic.kernels.products import linear, rows_product, sum_product

SIZES = [(0, 3, 5), (1, 4, 2), (7, 5, 3), (16, 8, 8), (33, 24, 40), (100, 7, 1)]
"""(rows, input width, output width)."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def has_operator() -> bool:
    try:
        return products._by_onednn(torch.ones(1, 2), torch.ones(3, 2)).shape == (1, 3)
    except (AttributeError, RuntimeError, TypeError):
        return False


@pytest.fixture(params=["torch", "onednn"])
def onednn(request, monkeypatch) -> list[int]:
    """Let oneDNN compute all float32 products, or none; return the numbers of rows that it got."""
    if request.param == "onednn" and not has_operator():
        pytest.skip("this torch has no such operator of oneDNN")
    row_counts: list[int] = []

    def counted(rows, transposed, by=products._by_onednn):
        row_counts.append(len(rows))
        return by(rows, transposed)

    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param == "onednn")
    monkeypatch.setattr(products, "FEWEST", 0)
    monkeypatch.setattr(products, "NARROWEST", 1)
    monkeypatch.setattr(products, "_by_onednn", counted)
    return row_counts


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((actual.double() - exact).norm() <= TOLERANCE[actual.dtype] * exact.norm().clamp_min(1e-30))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("form", ["plain", "transposed", "part"])
def test_rows_times_a_matrix(size, dtype, form, onednn):
    num_rows, inner, columns = size
    rows = torch.randn(num_rows, 2 * inner).to(dtype)[:, :inner]  # half of a tensor, like one of two pre-activations
    matrix = torch.randn(inner, columns).to(dtype)
    if form != "plain":  # a view of interleaved matrices, like weights from other ranks
        matrix = torch.randn(columns, inner * (2 if form == "part" else 1)).to(dtype)[:, :inner].t()
    out = torch.full((num_rows, columns), torch.nan, dtype=dtype)
    rows_product(rows, matrix, out)
    assert close(out, rows.double() @ matrix.double())
    if dtype != torch.float32:
        assert onednn == []


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_a_sum_over_rows(size, dtype, adds, onednn):
    num_rows, first, second = size
    a, b = torch.randn(num_rows, first).to(dtype), torch.randn(num_rows, second).to(dtype)
    before = torch.randn(first, second).to(dtype)
    out = before.clone() if adds else torch.full_like(before, torch.nan)
    sum_product(a, b, out, adds=adds)
    assert close(out, a.double().t() @ b.double() + (before.double() if adds else 0))


def test_onednn_gets_numbers_of_rows_that_come_again(onednn):
    """oneDNN compiles code for every number of rows."""
    for num_rows in range(products.STEP, 4 * products.STEP):
        rows_product(torch.randn(num_rows, 3), torch.randn(3, 2), torch.empty(num_rows, 2))
    assert all(rows % products.STEP == 0 for rows in onednn)


def test_a_row_that_is_not_finite_stays_alone(onednn):
    rows, out = torch.randn(40, 8), torch.empty(40, 6)
    rows[3], rows[37] = torch.nan, torch.inf
    rows_product(rows, torch.randn(8, 6), out)
    assert (~out.isfinite()).any(1).nonzero().flatten().tolist() == [3, 37]


@pytest.mark.parametrize("width", [8, 4096], ids=["small", "narrow"])
def test_small_and_narrow_products_are_left_to_torch(width, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_by_onednn", None)
    rows_product(torch.randn(512, width), torch.randn(width, 8), torch.empty(512, 8))
    sum_product(torch.randn(512, width), torch.randn(512, 8), torch.empty(width, 8))


def test_who_turns_onednn_off_gets_none(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "FEWEST", 0)
    monkeypatch.setattr(products, "NARROWEST", 1)
    monkeypatch.setattr(products, "_by_onednn", None)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    rows_product(torch.randn(16, 4), torch.randn(4, 4), torch.empty(16, 4))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("wanted", ["x", "weight", "all"])
def test_a_linear_layer_and_its_gradients(with_bias, wanted, onednn):
    x, weight, bias, dy = torch.randn(37, 12), torch.randn(5, 12), torch.randn(5), torch.randn(37, 5)
    leaves = {"x": x, "weight": weight} | ({"bias": bias} if with_bias else {})
    results = []
    for run, dtype in ((linear, torch.float32), (torch.nn.functional.linear, torch.float64)):
        given = {
            name: leaf.detach().clone().to(dtype).requires_grad_(wanted in (name, "all"))
            for name, leaf in leaves.items()
        }
        y = run(*given.values())
        y.backward(dy.to(dtype))
        results.append([y.detach(), *(each.grad for each in given.values() if each.grad is not None)])
    assert len(results[0]) == (1 + len(leaves) if wanted == "all" else 2)
    for actual, exact in zip(*results, strict=True):
        assert close(actual, exact)


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
def test_processors_are_told_apart(cpuinfo: str, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo, encoding="utf-8")
    assert products._is_zen_5(path) is expected
    assert not products._is_zen_5(tmp_path / "absent")


def test_float16_is_multiplied_as_float32_also_beside_other_rows():
    """torch's own float16 products of matrices are slow on most processors."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                assert all(each.dtype == torch.float32 for each in args if isinstance(each, torch.Tensor))
            return func(*args, **(kwargs or {}))

    rows, matrix = torch.randn(13, 8).half(), torch.randn(8, 6).half()
    both = torch.full((13, 12), torch.nan, dtype=torch.float16)
    total = torch.zeros(8, 6, dtype=torch.float16)
    with Products():
        rows_product(rows, matrix, both[:, 6:])
        sum_product(rows, rows[:, :6], total, adds=True)
    assert both[:, :6].isnan().all()
    assert close(both[:, 6:], rows.double() @ matrix.double())
    assert close(total, rows.double().t() @ rows[:, :6].double())
