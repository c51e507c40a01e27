"""The dropless path compiles to one graph and computes what eager computes."""

from __future__ import annotations

import contextlib

import pytest
import torch

from helpers import make_layer, run
from moesaic import Importance, LoadBalance, MoE, ZLoss, checkpoint
from moesaic.kernels import grouped_matmul, permute, pick
from moesaic.routing.injection import TAKES_OBJECTS

LOSSES = (LoadBalance(0.3), LoadBalance(0.1, level="sequence"), Importance(0.1), ZLoss(0.05))
MODES = {
    "float32": (torch.float32, contextlib.nullcontext()),
    "float64": (torch.float64, contextlib.nullcontext()),
    "autocast": (torch.float32, torch.autocast("cpu", dtype=torch.bfloat16)),
}


def layer_for(router: str, dtype: torch.dtype, **options: object) -> MoE:
    return make_layer(router, losses=LOSSES, shared_hidden=8, **options).to(dtype)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("router", "mode"),
    [
        ("softmax", "autocast"),
        ("group_limited", "float32"),
        pytest.param("cosine", "float64", marks=pytest.mark.random),
        pytest.param("sigmoid", "autocast", marks=pytest.mark.random),
    ],
)
def test_forward_and_backward_equal_eager(router: str, mode: str) -> None:
    dtype, autocast = MODES[mode]
    layer = layer_for(router, dtype)
    compiled = torch.compile(layer, fullgraph=TAKES_OBJECTS, backend="aot_eager")
    x = torch.randn(2, 6, 8, dtype=dtype)
    upstream = torch.randn(2, 6, 8, dtype=dtype)
    with autocast:
        eager = run(layer, x, upstream)
        counts = layer.step_counts.clone()
        layer.step_counts.zero_()
        layer.zero_grad()
        x = x.requires_grad_()
        y = compiled(x)
        (y * upstream).sum().backward()
    torch.testing.assert_close(y.detach(), eager.y)
    torch.testing.assert_close(x.grad, eager.dx)
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, eager.grads[key], msg=key)
    assert torch.equal(layer.step_counts, counts)


def test_evaluation_compiles_for_every_batch_size_top_k_and_an_odd_width() -> None:
    layer = layer_for("softmax", torch.float32, dim=5, hidden=7).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (6, 9):
        x = torch.randn(tokens, 5)
        torch.testing.assert_close(compiled(x), layer(x))
    x = torch.randn(6, 5)
    torch.testing.assert_close(compiled(x, top_k=1), layer(x, top_k=1))


def test_a_checkpointed_block_runs_eagerly_between_two_graphs() -> None:
    block = torch.nn.Sequential(torch.nn.Tanh(), layer_for("noisy", torch.float32), torch.nn.Tanh())

    def eager(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x.sin()).cos()

    x = torch.randn(6, 8)
    results = []
    for call in (eager, torch.compile(eager, backend="aot_eager")):
        block.zero_grad()
        block[1].step_counts.zero_()
        torch.manual_seed(1)
        call(x).sum().backward()
        results.append(
            {name: parameter.grad.clone() for name, parameter in block.named_parameters()}
        )
        assert int(block[1].step_counts.sum()) == 12
    torch.testing.assert_close(results[0], results[1])


def test_asking_a_device_for_its_kernels_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def untraceable(name: str) -> None:
        torch._dynamo.graph_break()

    def kind_of(device: torch.device) -> str:
        return "triton" if pick._runs_triton(device) else "cpu"  # asks as on a GPU

    monkeypatch.setattr(pick.importlib.util, "find_spec", untraceable)
    for module in (pick, permute, grouped_matmul):
        monkeypatch.setattr(module, "kind_of", kind_of)
    explanation = torch._dynamo.explain(layer_for("softmax", torch.float32))(torch.randn(2, 6, 8))
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0), (
        explanation.break_reasons
    )
