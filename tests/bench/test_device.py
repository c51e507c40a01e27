"""The device benchmark's parts: steered routing, the bound's work, claims, memory; never a time."""

from __future__ import annotations

import pytest
import torch

from moesaic.bench.device import EXPERTS, LAYER, LB, LB_ROUTER, Cell, GivenRouting
from moesaic.bench.device_bound import Bound
from moesaic.bench.device_cases import SHAPES, Case, Shape, cases, step
from moesaic.bench.device_claims import claims
from moesaic.bench.device_memory import peak_growth_bytes

SMALL = Shape(tokens=32, dim=16, hidden=8, experts=4, top_k=2)


def case(**options: str) -> Case:
    return Case(**{"shape": SMALL, "dtype": "float32", "activation": "swiglu", "routed": "balanced", **options})  # type: ignore[arg-type]


def test_the_table_has_every_case_once() -> None:
    assert len(set(cases())) == len(cases()) == len(SHAPES) * 2 * 2 * 2


def test_a_balanced_case_is_balanced() -> None:
    layer, (x, _) = case().layer(), case().inputs()
    layer(x)
    assert layer.step_counts.tolist() == [16] * 4


def test_a_zipf_case_has_the_skew_that_the_figures_were_taken_at() -> None:
    found = []
    for shape in SHAPES:
        x, _ = Case(shape=shape, dtype="float32", activation="gelu", routed="zipf").inputs()
        chosen = x.detach()[:, : shape.experts].topk(shape.top_k).indices.reshape(-1)
        counts = torch.bincount(chosen, minlength=shape.experts).double()
        found.append(float(counts.max() / counts.mean()))
    assert found == pytest.approx([2.35, 7.7, 6.5], abs=0.1)


def test_given_routing_computes_what_the_layer_does() -> None:
    layer, (x, dy) = case(routed="zipf").layer(), case(routed="zipf").inputs()
    y = layer(x)
    torch.testing.assert_close(GivenRouting(layer, x)(x), y)
    step(layer, x, dy)
    assert x.grad is not None


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_bound_writes_every_gradient(activation: str) -> None:
    bound = Bound(case(activation=activation), [16, 0, 20, 28], router=True)
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


def test_claims_are_the_worst_of_their_cases() -> None:
    def cell(activation: str, layer: float) -> Cell:
        seconds = {LB: (1.0,) * 3, LB_ROUTER: (1.0,) * 3, LAYER: (layer,) * 3, EXPERTS: (1.0,) * 3}
        growth = {LAYER: 10, EXPERTS: 10}
        if activation == "swiglu":
            seconds |= {"slow": (4.0,) * 3, "fast": (2.0,) * 3}
            growth |= {"slow": 20, "fast": 40}
        return Cell(case=case(activation=activation), counts=(16,) * 4, seconds=seconds, growth_bytes=growth, absent={})

    found = {claim.name: claim for claim in claims([cell("gelu", 1.05), cell("swiglu", 1.2)])}
    name = "cpu.t32_d16_h8_e4_k2"
    assert found[f"{name}.float32.balanced_over_lb"].value == pytest.approx(1.2)
    assert found[f"{name}.float32.balanced_over_lb"].holds is False
    assert found[f"{name}.over_best_peer"].value == pytest.approx(0.6)
    assert found[f"{name}.memory_over_best_peer"].value == pytest.approx(0.5)


def test_a_missing_peer_leaves_a_claim_without_a_value() -> None:
    seconds = {LB: (1.0,), LB_ROUTER: (1.0,), LAYER: (1.0,), EXPERTS: (1.0,)}
    one = Cell(case=case(), counts=(16,) * 4, seconds=seconds, growth_bytes={}, absent={"deepspeed": "not installed"})
    claim = next(claim for claim in claims([one]) if claim.name.endswith("over_best_peer"))
    assert (claim.value, claim.reason) == (None, "not installed")
