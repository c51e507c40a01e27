"""The device benchmark's parts: steered routing, the bound's work, claims, memory; never a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moesaic.kernels import products
from moesaic_lab.device import on_cpu
from moesaic_lab.device.bound import Bound, RouterBound
from moesaic_lab.device.cases import SHAPES, DeviceCase, DeviceShape, cases, peak_growth_bytes
from moesaic_lab.device.on_cpu import LAYER, LB, ROUTER, DeviceCell, claims, measure, measure_all

SMALL = DeviceShape(tokens=32, dim=16, hidden=8, experts=4, top_k=2)


def case(**options: str) -> DeviceCase:
    return DeviceCase(
        **{
            "shape": SMALL,
            "dtype": "float32",
            "activation": "swiglu",
            "routed": "balanced",
            **options,
        }
    )  # type: ignore[arg-type]


def test_the_table_has_every_case_once() -> None:
    assert len(set(cases())) == len(cases()) == len(SHAPES) * 2 * 2 * 2


def test_a_balanced_case_is_balanced() -> None:
    layer = case().layer()
    (x, _) = case().inputs()
    layer(x)
    assert layer.step_counts.tolist() == [16] * 4


def test_a_zipf_case_has_the_skew_that_the_figures_were_taken_at() -> None:
    found = []
    for shape in SHAPES:
        x, _ = DeviceCase(shape=shape, dtype="float32", activation="gelu", routed="zipf").inputs()
        chosen = x.detach()[:, : shape.experts].topk(shape.top_k).indices.reshape(-1)
        counts = torch.bincount(chosen, minlength=shape.experts).double()
        found.append(float(counts.max() / counts.mean()))
    assert found == pytest.approx([2.35, 7.7, 6.5], abs=0.1)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_bound_writes_every_gradient(activation: str) -> None:
    bound = Bound(case(activation=activation), [16, 0, 20, 28])
    for gradient in (*bound.d_ups, bound.d_down):
        gradient.fill_(torch.nan)
    bound()
    for gradient in (*bound.d_ups, bound.d_down):
        assert gradient[[0, 2, 3]].isfinite().all()
        assert gradient[1].isnan().all(), "an expert without rows has no product"


def test_growth_counts_what_is_alive_at_once() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.float32)
        del first
        return torch.empty(3000, dtype=torch.float32)

    assert 12000 <= peak_growth_bytes(call) < 13000


def test_the_routers_bound_multiplies_as_its_gradients_do() -> None:
    bound = RouterBound(case())
    bound()
    logits = bound.x @ bound.weight.T
    torch.testing.assert_close(bound.dx, logits @ bound.weight)
    torch.testing.assert_close(bound.d_weight, logits.T @ bound.x)


def cell(layer: float, **options: str) -> DeviceCell:
    seconds = {LB: (1.0,) * 3, ROUTER: (0.25,) * 3, LAYER: (layer,) * 3}
    growth = {LAYER: 10}
    if options.get("activation") != "gelu":
        seconds |= {"slow": (4.0,) * 3, "fast": (2.0,) * 2}
        growth |= {"slow": 20, "fast": 40}
    return DeviceCell(
        case=case(**options), counts=(16,) * 4, seconds=seconds, growth_bytes=growth, absent={}
    )


def rows_of(*cells: DeviceCell, kept: bool = True) -> list[dict[str, object]]:
    return [row | {"kept_memory": kept} for cell in cells for row in cell.rows()]


def test_claims_are_the_worst_of_their_cases() -> None:
    rows = rows_of(cell(1.05, activation="gelu"), cell(1.2))
    found = {claim.name: claim for claim in claims(rows)}
    name = "cpu.t32_d16_h8_e4_k2"
    assert found[f"{name}.float32.balanced_over_lb"].value == pytest.approx(1.2)
    assert found[f"{name}.float32.balanced_over_lb"].holds is False
    assert found[f"{name}.over_best_peer"].value == pytest.approx(0.6)
    assert found[f"{name}.memory_over_best_peer"].value == pytest.approx(0.5)


def test_a_row_has_both_bounds() -> None:
    row = next(row for row in cell(1.5).rows() if row["method"] == LAYER)
    assert (row["over_lb"], row["over_lb_with_router"]) == (1.5, 1.2)


def test_claims_of_the_systems_own_allocator_say_so() -> None:
    rows = [
        *rows_of(cell(1.05, dtype="bfloat16")),
        *rows_of(cell(1.02)),
        *rows_of(cell(1.4), kept=False),
    ]
    found = {claim.name: claim.value for claim in claims(rows)}
    name = "cpu.t32_d16_h8_e4_k2"
    assert found[f"{name}.float32.balanced_over_lb"] == pytest.approx(1.02)
    assert found[f"{name}.bfloat16.balanced_over_lb"] == pytest.approx(1.05)
    assert found[f"{name}.over_best_peer"] == pytest.approx(0.525)
    assert found["cpu.default_allocator.t32_d16_h8_e4_k2.over_best_peer"] == pytest.approx(0.7)


def test_a_kept_case_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_cpu, "measure", lambda chosen, *_: cell(1.1, dtype=chosen.dtype))
    rows = rows_with("e8 float32 gelu balanced", keep=str(tmp_path))
    monkeypatch.setattr(on_cpu, "measure", None)
    assert rows_with("e8 float32 gelu balanced", keep=str(tmp_path)) == rows


def rows_with(
    only: str, keep: str | None = None, told: Callable[[str], object] = len
) -> list[dict[str, object]]:
    return measure_all(
        only,
        20,
        threads=torch.get_num_threads(),
        peers=True,
        keep_freed=False,
        keep=keep,
        told=told,
    )


def test_a_missing_peer_leaves_a_claim_without_a_value() -> None:
    seconds = {LB: (1.0,), ROUTER: (1.0,), LAYER: (1.0,)}
    one = DeviceCell(
        case=case(),
        counts=(16,) * 4,
        seconds=seconds,
        growth_bytes={},
        absent={"deepspeed": "not installed"},
    )
    claim = next(claim for claim in claims(rows_of(one)) if claim.name.endswith("over_best_peer"))
    assert (claim.value, claim.reason) == (None, "not installed")


def test_methods_are_repeated_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def peers() -> dict[str, object]:
        return {"same": lambda layer: layer, "gone": "not installed"}

    monkeypatch.setattr("moesaic_lab.device.on_cpu.peers", peers)
    found = measure(case(), 7)
    assert {name: len(seconds) for name, seconds in found.seconds.items() if name != "same"} == {
        LB: 7,
        ROUTER: 7,
        LAYER: 7,
    }
    assert len(found.seconds["same"]) in (2, 5, 7)
    assert found.absent == {"gone": "not installed"}
    assert found.growth_bytes[LAYER] > 0


@pytest.mark.parametrize("has_instructions", [False, True])
def test_bfloat16_is_measured_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, has_instructions: bool
) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: has_instructions)
    measured: list[DeviceCase] = []

    def one(chosen: DeviceCase, *_: object) -> DeviceCell:
        measured.append(chosen)
        return cell(1.1, dtype=chosen.dtype)

    monkeypatch.setattr(on_cpu, "measure", one)
    told: list[str] = []
    rows = rows_with("e8 gelu balanced", told=told.append)
    assert {row["dtype"] for row in rows} == {each.dtype for each in measured}
    assert [each.dtype for each in measured] == ["float32", "bfloat16"][: 1 + has_instructions]
    assert sum("no instructions for bfloat16" in line for line in told) == (not has_instructions)
