"""Mixed-precision weights: cast once per optimizer step, with the results and gradients of a cast
in every call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moesaic import MoE, balance_on_step

DIM = 8
HIDDEN = 12
EXPERTS = 3


class Casts(TorchDispatchMode):
    """Counts casts of tensors of the experts' shapes: (E, 2, H, D), (E, D, H), their biases, and
    the shared expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].dim() >= 3
            and kwargs["dtype"] == torch.bfloat16
        ):
            self.found += 1
        return func(*args, **(kwargs or {}))


def a_layer(**options: object) -> tuple[MoE, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, EXPERTS, 2, **options)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)


def pass_over(layer: nn.Module, x: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = (run or layer)(x)
    y.square().mean().backward()
    return y.detach()


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "shared_hidden": 4}, {"experts": "gelu"}], ids=str
)
def test_once_per_step_and_to_the_bit(options):
    """Return two steps of three micro-batches, compared with a layer without `begin_step`, which
    casts in every call."""
    (told, optimizer) = a_layer(**options)
    (untold, other) = a_layer(**options)
    balance_on_step(optimizer, told)
    told.finish_step()
    matrices = sum(parameter.dim() >= 3 for parameter in told.parameters())
    for _ in range(2):
        batches = [torch.randn(5, DIM) for _ in range(3)]
        with Casts() as once:
            found = [pass_over(told, x) for x in batches]
        with Casts() as every:
            exact = [pass_over(untold, x) for x in batches]
        assert (once.found, every.found) == (matrices, 3 * matrices)
        assert all(map(torch.equal, found, exact))
        for mine, its in zip(told.parameters(), untold.parameters(), strict=True):
            assert mine.grad.dtype == torch.float32
            assert torch.equal(mine.grad, its.grad)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()


def test_a_checkpoint_casts_nothing_twice():
    layer, _ = a_layer()
    layer.finish_step()
    x = torch.randn(5, DIM)
    with Casts() as counted:
        pass_over(layer, x, partial(checkpoint, layer, use_reentrant=False))
    assert counted.found == 2


@pytest.mark.parametrize(
    "change", ["load_state_dict", "in place", "eval", "another dtype", "functional call"]
)
def test_what_changes_within_a_step_is_seen(change):
    layer, _ = a_layer()
    layer.finish_step()
    x = torch.randn(5, DIM)
    dtype = torch.bfloat16
    pass_over(layer, x)
    own = dict(layer.named_parameters()) if change == "functional call" else layer.state_dict()
    weights = {
        name: value.detach() + 1 if "experts" in name else value.detach()
        for name, value in own.items()
    }
    run: nn.Module | Callable[[Tensor], Tensor] = layer
    if change == "load_state_dict":
        layer.load_state_dict(weights)
    elif change == "in place":
        with torch.no_grad():
            layer.experts.w2.add_(1)
    elif change == "eval":
        # a write that bypasses the version counter is at least seen by evaluation
        layer.experts.w2.data.add_(1)
        layer.eval()
    elif change == "another dtype":
        dtype = torch.float16
    else:
        run = partial(torch.func.functional_call, layer, weights)
    expected = copy.deepcopy(layer)  # a copy keeps no cast
    if change == "functional call":
        expected.load_state_dict(weights)
    with torch.autocast("cpu", dtype):
        assert torch.equal(run(x), expected(x))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
def test_a_copy_keeps_nothing_of_the_step(duplicate):
    layer, _ = a_layer()
    layer.finish_step()
    pass_over(layer, torch.randn(5, DIM))
    assert layer.experts._casts["w13"].cast is not None
    assert duplicate(layer).experts._casts == {}
    assert not any("cast" in name for name in layer.state_dict())
