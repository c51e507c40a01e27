"""The whole layer, forward and backward, against a float64 loop over copies, with odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.kernels.activation import ACTIVATIONS
from moesaic.kernels.triton.expert_stage import TILES, shapes
from moesaic.kernels.triton.rows.sort import sort
from moesaic.kernels.triton.rows.tiles import Tile
from moesaic_lab.device.mlp import moe_mlp

#        tokens, top_k, experts, dim, hidden
SIZES = [(0, 2, 3, 40, 24), (1, 1, 1, 40, 24), (19, 2, 3, 17, 33), (6, 4, 9, 16, 16)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LEAVES = ("x", "up", "down", "weight")


def moe_mlp_reference(
    x: Tensor, up: Tensor, down: Tensor, weight_TK: Tensor, expert_TK: Tensor, activation: str
) -> Tensor:
    """Run copy by copy in float64, differentiable; copies with a negative expert are not sent."""
    x, up, down, weight_TK = (each.double() for each in (x, up, down, weight_TK))
    results = []
    for token, experts in enumerate(expert_TK.tolist()):
        total = torch.zeros_like(x[token])
        for slot, e in enumerate(experts):
            if e >= 0:
                first, *other = up[e] @ x[token]
                hidden = ACTIVATIONS[activation](first) * (other[0] if other else 1.0)
                total = total + weight_TK[token, slot] * (down[e] @ hidden)
        results.append(total)
    return torch.stack(results) if results else x * 1.0


def layer(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str, *, gated: bool, dropped: bool = False
) -> dict[str, Any]:
    num_tokens, top_k, num_experts, dim, hidden = sizes
    expert = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].to(torch.int32)
    # expert 0 gets no rows
    expert[expert == 0] = -1 if dropped or num_experts == 1 else min(1, num_experts - 1)
    if num_experts == 1 and not dropped:
        expert.zero_()
    return {
        "x": torch.randn(num_tokens, dim, device=device).to(dtype),
        "up": (
            torch.randn(num_experts, 2 if gated else 1, hidden, dim, device=device) / dim**0.5
        ).to(dtype),
        "down": (torch.randn(num_experts, dim, hidden, device=device) / hidden**0.5).to(dtype),
        "weight": torch.rand(num_tokens * top_k, device=device),
        "expert": expert,
    }


def leaves_of(inputs: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return copies of the differentiable inputs as leaves, in `dtype` if one is given."""
    return {
        name: inputs[name].detach().clone().to(dtype or inputs[name].dtype).requires_grad_()
        for name in LEAVES
    }


def run(
    inputs: dict[str, Any], activation: str, tile: Tile | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = leaves_of(inputs)
    expert = inputs["expert"]
    order = sort(expert.reshape(-1).to(inputs["x"].device), len(inputs["up"]))
    tiles = None if tile is None else dict.fromkeys(TILES, tile)
    return moe_mlp(
        *leaves.values(), *order, top_k=expert.shape[1], activation=activation, tiles=tiles
    ), leaves


def check(inputs: dict[str, Any], activation: str, tile: Tile | None = None) -> None:
    y, leaves = run(inputs, activation, tile)
    exact = leaves_of(inputs, torch.float64)
    expert = inputs["expert"]
    matrices = [exact[name] for name in ("x", "up", "down")]
    expected = moe_mlp_reference(*matrices, exact["weight"].view(expert.shape), expert, activation)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    pairs = [("y", y, expected)]
    pairs += [(name, leaf.grad, exact[name].grad) for name, leaf in leaves.items()]
    for name, actual, true in pairs:
        true = torch.zeros_like(actual).double() if true is None else true
        scale = max(1.0, float(true.abs().max())) if true.numel() else 1.0
        assert actual.dtype == (torch.float32 if name == "weight" else inputs["x"].dtype)
        tolerance = TOLERANCES[inputs["x"].dtype] * scale
        torch.testing.assert_close(
            actual.double(), true, atol=tolerance, rtol=0, msg=f"{name} is off: {{}}".format
        )


FORMS = {"swiglu": ("silu", True), "gelu": ("gelu", False)}
LAYERS = [
    *((sizes, torch.float32, "swiglu") for sizes in SIZES),
    (SIZES[2], torch.bfloat16, "gelu"),
]


@pytest.mark.parametrize(("sizes", "dtype", "form"), LAYERS, ids=str)
def test_layer_and_its_gradients(sizes, dtype, form, device):
    activation, gated = FORMS[form]
    check(layer(sizes, dtype, device, gated=gated), activation)


def test_copies_that_are_not_sent_add_nothing_and_get_no_gradient(device):
    check(layer((21, 2, 4, 40, 24), torch.float32, device, gated=True, dropped=True), "silu")


def test_more_tiles_than_one(device):
    """Every kernel runs several row tiles, column tiles and steps, also with persistent
    programs."""
    inputs = layer((20, 2, 2, 40, 24), torch.float32, device, gated=True)
    tile = Tile(
        rows=16, columns=16, depth=16, warps=4, stages=2, group=2, programs=1, descriptors=1
    )
    check(inputs, "silu", tile)


def test_the_same_bits_every_time(device):
    inputs = layer((20, 2, 3, 40, 24), torch.bfloat16, device, gated=True)
    results = []
    for _ in range(2):
        y, leaves = run(inputs, "silu")
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves.values())])
    assert all(torch.equal(one, two) for one, two in zip(*results))


def test_backward_keeps_the_input_the_routing_and_the_pre_activation(device):
    sizes = num_tokens, top_k, num_experts, dim, hidden = 20, 2, 3, 40, 24
    inputs = layer(sizes, torch.bfloat16, device, gated=True)
    saved: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t
    ):
        run(inputs, "silu")
    copies = num_tokens * top_k
    weights = sum(inputs[name].nbytes for name in ("up", "down"))
    activations = 2 * (num_tokens * dim + copies * 2 * hidden)
    routing = 12 * copies + 4 * num_experts
    assert sum(saved.values()) == weights + activations + routing


def test_shapes_name_every_tile():
    actual = shapes(80, 4, 40, 24, 2, gated=True)
    assert tuple(actual) == TILES
    assert (actual["rows_grad"].columns, actual["rows_grad"].depth) == (40, 48)


def test_logits_of_nan_and_experts_that_do_not_exist_spoil_no_other_token(device):
    num_tokens = 20
    top_k = 2
    num_experts = 5
    dim = 16
    hidden = 16
    logits = torch.randn(num_tokens, num_experts, device=device)
    logits[::3] = float("nan")
    logits[1::7, 2] = float("nan")
    expert = logits.topk(top_k).indices.int()
    weight = logits.gather(1, expert.long()).softmax(1)
    expert[2::5, 0] = num_experts
    inputs = layer((num_tokens, top_k, num_experts, dim, hidden), torch.float32, device, gated=True)
    y, leaves = run(inputs | {"expert": expert, "weight": weight.reshape(-1)}, "silu")
    y.sum().backward()
    is_odd = logits.isnan().any(1)
    assert torch.equal(y.isnan().any(1), is_odd)
    assert torch.equal(leaves["x"].grad.isnan().any(1), is_odd)
