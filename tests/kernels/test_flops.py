"""`FlopCounterMode` counts exactly the products that the experts compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesaic import GatedExperts, MoE, PlainExperts
from moesaic.kernels.grouped_matmul import grouped_matmul

TOKENS = 5
DIM = 8
HIDDEN = 16
EXPERTS = 4
TOP_K = 2
PRODUCT = 2 * TOKENS * TOP_K * DIM * HIDDEN
ROUTER = 2 * TOKENS * DIM * EXPERTS


def flops(layer: torch.nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Return the FLOPs of forward and backward."""
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(("make", "matrices"), [(GatedExperts, 3), (PlainExperts, 2)])
@pytest.mark.parametrize("apply_weight", ["after", "before"])
def test_a_layer_makes_one_product_per_matrix_and_two_in_backward(
    make: type, matrices: int, apply_weight: str
) -> None:
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, experts=make, losses=(), apply_weight=apply_weight)
    actual = flops(layer, torch.randn(TOKENS, DIM, requires_grad=True))
    assert actual == (matrices * PRODUCT + ROUTER, 2 * matrices * PRODUCT + 2 * ROUTER)


@pytest.mark.parametrize("wants_x", [True, False])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("apply_weight", ["after", "before"])
def test_gradients_that_nobody_wants_are_no_products(
    apply_weight: str, trains: bool, wants_x: bool
) -> None:
    """Torch counts the products inside the kernels, with the FLOP formula removed."""
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, losses=(), apply_weight=apply_weight)
    layer.experts.requires_grad_(trains)
    x = torch.randn(TOKENS, DIM, requires_grad=wants_x)
    with FlopCounterMode(display=False) as by_formula:
        layer(x).sum().backward()
    with FlopCounterMode(display=False) as by_torch:
        expected = products_of(layer, x.detach().requires_grad_(wants_x))
    assert by_torch.get_total_flops() == 0
    assert by_formula.get_flop_counts()["Global"][torch.ops.moesaic.expert_backward] == expected


def products_of(layer: MoE, x: torch.Tensor) -> int:
    """Return the FLOPs of the backward kernel's products, counted by wrapping the functions that
    multiply."""
    product_flops = []

    def counting(by: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
            product_flops.append(2 * tensors[-2].numel() * tensors[-1].shape[1])
            return by(*tensors, **options)

        return counted

    with (
        pytest.MonkeyPatch.context() as patch,
        torch.utils._python_dispatch._disable_current_modes(),
    ):
        y = layer(x)
        patch.setattr(torch, "mm", counting(torch.mm))
        patch.setattr(torch.Tensor, "addmm_", counting(torch.Tensor.addmm_))
        y.sum().backward()
    return sum(product_flops)


def test_a_grouped_product_counts_its_rows() -> None:
    x = torch.randn(6, DIM, requires_grad=True)
    w = torch.randn(EXPERTS, HIDDEN, DIM, requires_grad=True)
    ends = torch.tensor([1, 1, 4, 6], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        grouped_matmul(x, w, ends).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * DIM * HIDDEN


def test_compiled_code_counts_as_eager() -> None:
    torch._dynamo.reset()
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, losses=())
    x = torch.randn(TOKENS, DIM, requires_grad=True)
    assert flops(torch.compile(layer, backend="aot_eager"), x) == flops(layer, x)
