"""The kernel benchmark's operations, rooflines and memory formula; never a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.cli.main import main
from moesaic_lab.device import benchmark, products
from moesaic_lab.device.cases import DeviceShape
from moesaic_lab.device.operations import Roof, claims, measure, panels
from moesaic_lab.device.ops import KernelOp, ops
from moesaic_lab.device.tutel_memory import LayerSizes, measured_bytes
from moesaic_lab.device.tutel_memory import claims as memory_claims
from moesaic_lab.pictures import write_picture

SMALL = DeviceShape(tokens=32, dim=16, hidden=8, experts=4, top_k=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_operation_agrees_with_the_plain_way(dtype: torch.dtype) -> None:
    found = {op.name: op.error() for op in ops(SMALL, dtype)}
    assert len(found) == 9
    assert all(error <= 8 * torch.finfo(dtype).eps for error in found.values()), found


def test_an_error_is_seen() -> None:
    x = torch.ones(4, 4)
    op = KernelOp(
        name="off", inputs=(x,), run=lambda x: 1.5 * x, plain=lambda x: x, flops=0, num_bytes=1
    )
    assert op.error() == pytest.approx(0.5)


def test_arithmetic_and_bytes_are_those_of_the_shapes() -> None:
    found = {op.name: op for op in ops(SMALL, torch.float32)}
    rows = 64
    assert found["gather"].num_bytes == 4 * 16 * (32 + rows) + 8 * rows
    assert found["SwiGLU"].num_bytes == 3 * 4 * rows * 8
    assert found["experts, both passes"].flops == 3 * (3 * 2 * rows * 16 * 8)


def test_the_roof_is_the_longer_of_arithmetic_and_bytes() -> None:
    roof = Roof(flops=100.0, bandwidth=10.0)
    heavy = {"flops": 1000.0, "num_bytes": 50.0}
    light = {"flops": 100.0, "num_bytes": 50.0}
    made = [
        KernelOp(name="", inputs=(), run=torch.zeros, plain=torch.zeros, **each)
        for each in (heavy, light)
    ]
    assert [roof.bound(op) for op in made] == [10.0, 5.0]


def test_rows_claims_and_picture(tmp_path: Path) -> None:
    rows = measure(2, SMALL, ("float32",))
    assert [row["of_bound"] == row["bound_seconds"] / row["median_seconds"] for row in rows] == [
        True
    ] * 9
    found = {claim.name: claim for claim in claims(rows)}
    assert {name for name in found if "einsum" in name} == {
        f"kernels.fast_{which}.float32.{what}over_einsum"
        for which in ("encode", "decode")
        for what in ("", "memory_")
    }
    assert found["kernels.experts_both_passes.float32.of_bound"].value == rows[-1]["of_bound"]
    write_picture(tmp_path / "kernels.svg", "x", panels(rows), columns=2)
    assert "both passes" in (tmp_path / "kernels.svg").read_text()


def _flat(result: Any) -> torch.Tensor:
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return torch.cat([tensor.double().flatten() for tensor in tensors])


@pytest.mark.parametrize("name", list(products.PRODUCTS))
def test_products_equal_torchs_in_every_layout(name: str) -> None:
    product = products.PRODUCTS[name]
    for dtype in product.dtypes:
        sizes = product.sizes(24, 64, 64)
        for operand in sizes:
            for layout in products.LAYOUTS:
                made = products.operands(
                    sizes, operand, layout, benchmark.operations.DTYPES[dtype], seed=1
                )
                ours = _flat(product.ours(*made))
                plain = _flat(product.plain(*made))
                assert (ours - plain).norm() <= {"float32": 1e-5, "bfloat16": 2e-2}[
                    dtype
                ] * plain.norm()


def test_layouts_lie_in_memory_as_they_say() -> None:
    strides = {name: lay(torch.empty(3, 4, 6)).stride() for name, lay in products.LAYOUTS.items()}
    assert strides == {
        "dense": (24, 6, 1),
        "rows with gaps": (48, 12, 1),
        "transposed": (24, 1, 4),
        "one of three": (72, 18, 1),
    }


def test_inputs_change_from_call_to_call_and_the_better_of_two_ratios_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, float]] = []
    spoiled = products.CpuProduct(
        sizes=lambda *_: {"x": (2, 2)},
        ours=lambda x: seen.append(("ours", float(x.sum()))),
        plain=lambda x: seen.append(("plain", float(x.sum()))),
        dtypes=("float32",),
    )
    monkeypatch.setattr(products, "PRODUCTS", {"it": spoiled})
    rounds = iter([(5.0, 2.0), (3.0, 2.0), (3.0, 2.0)] + [(1.0, 1.0)] * 2)
    best = products.best
    calls = []

    def scripted(product: Any, made: Any) -> tuple[float, float]:
        best(product, made)
        calls.append(None)
        return next(rounds)

    monkeypatch.setattr(products, "best", scripted)
    rows = products.measure(lambda _: None, None, torch.get_num_threads(), [(1, 1, 1)])
    # the first was measured twice
    assert [row["over_torch"] for row in rows] == [1.5, 1.5, 1.0, 1.0]
    assert len({total for _, total in seen[:42]}) == 42
    (claim,) = products.claims(rows)
    assert (claim.name, claim.value, claim.holds) == (
        "kernels.products.it.float32.over_torch",
        1.5,
        True,
    )
    assert products.claims([{**rows[0], "over_torch": 2.1}])[0].holds is False
    assert products.claims([])[0].holds is None


def test_one_half_of_the_operations_keeps_the_rows_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    old = {"op": "gather", "dtype": "float32"}
    machine = {"cpu": "Old", "cores": 1, "system": "", "gpu": None}
    path.write_text(json.dumps({"rows": [old], "machine": machine, "date": "2026-01-02"}))
    row = {"part": "products", "dtype": "float32", "product": "rows_product", "over_torch": 1.0}
    monkeypatch.setattr(products, "measure", lambda *_: [row])
    options = benchmark.DeviceOptions(part="operations", only="products", json=str(path))
    found = benchmark.part_of(options).measure(options, lambda _: None)
    assert found[0] == old | {"cpu": "Old", "date": "2026-01-02"}
    assert found[1].items() > row.items()
    assert found[1]["cpu"] != "Old"


@pytest.mark.parametrize("tokens", [6144, 12288])
def test_the_memory_formula_is_what_the_profiler_counts(tokens: int) -> None:
    sizes = LayerSizes(dim=1024, hidden=256)
    assert measured_bytes(tokens, sizes) == pytest.approx(sizes.peak_bytes(tokens), rel=0.06)


def test_a_size_that_was_not_measured_says_so() -> None:
    rows = [
        {"tokens": 4096, "measured_gib": 1.0, "formula_gib": 9.0, "tutel_gib": 2.9},
        {"tokens": 8192, "measured_gib": None, "formula_gib": 4.0, "tutel_gib": 3.2},
    ]
    found = [(claim.name, claim.value, claim.holds) for claim in memory_claims(rows)]
    assert found == [
        ("memory.table5.4096_tokens", 1.0, True),
        ("memory.table5.8192_tokens.by_formula", 4.0, False),
    ]


@pytest.mark.parametrize(
    "words",
    [
        "--part operations --repeats 0",
        "--threads 0",
        "--part operations --only gather",
        "--part operations --only products --picture x.svg",
        "--part operations --picture x.gif",
        "--picture x.svg",
        "--only nothing",
        "--device cuda",
        "--seconds y",
    ],
)
def test_bad_input_is_refused_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "device", *words.split()]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
