"""`moesaic.capture`: what it refuses, and that a replay equals the layer, on a stand-in for graphs
that runs the work again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import refused
from moesaic import MoE, capture, collect_losses, set_loss_scale
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.cuda_graphs import CapturedMoE, CudaRecorder
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic.routing.losses import LoadBalance, ZLoss
from moesaic.runtime.routing_cache import checkpoint

CAPACITIES: dict[str, AbstractCapacity] = {
    "dropless": Dropless(),
    "fixed": Capacity.fixed(0.75),
    "by score": Capacity.fixed(0.75, order="score", scope="rank"),
    "fitted": Capacity.fitted(),
    "padded": Capacity.fixed(1.0, scope="rank", padded=True),
}
SIZES = (16, 24, 6, 2)
TOKENS = 20


class Again:
    """Stands for a CUDA graph: a replay runs the work again, and writes gradients into the memory
    of the first ones."""

    def __init__(self, run: Callable[[], Sequence[Tensor | None]]) -> None:
        self.with_grad = torch.is_grad_enabled()
        self.run = run
        self.results = run()

    def replay(self) -> None:
        with torch.set_grad_enabled(self.with_grad):
            fresh = self.run()
        if any(result is not None and result.requires_grad for result in fresh):
            self.results = fresh
            return
        for old, new in zip(self.results, fresh, strict=True):
            if old is not None and new is not None:
                old.copy_(new)


class Recorder:
    """Stands for what warms up and records on a GPU."""

    def __init__(self) -> None:
        self.recorded: list[Again] = []

    def warm_up(self, run: Callable[[], object]) -> None:
        run()
        run()

    def record(self, run: Callable[[], Sequence[Tensor | None]]) -> Again:
        self.recorded.append(Again(run))
        return self.recorded[-1]


def layer_of(capacity: str = "dropless", **options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(
        *SIZES,
        capacity=CAPACITIES[capacity],
        **{"losses": (LoadBalance(0.1), ZLoss(0.1)), **options},
    ).double()


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(
        TOKENS, SIZES[0], dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def captured_of(layer: MoE, x: Tensor, **inputs: Tensor) -> CapturedMoE:
    return CapturedMoE(layer, {"x": x, **inputs}, Recorder())


def gradients(layer: MoE) -> list[Tensor]:
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


def assert_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    assert len(some) == len(others) > 0
    for one, other in zip(some, others):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_steps_of_a_captured_layer_are_those_of_the_layer(capacity: str, router: str) -> None:
    layer = layer_of(capacity, router=router, shared_hidden=8)
    twin = copy.deepcopy(layer)
    runs = [(layer, captured_of(layer, tokens())), (twin, twin)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, twin)]
    for step in range(3):
        found = []
        for (module, run), optimizer in zip(runs, optimizers):
            optimizer.zero_grad()
            # whose gradients add up, and whose losses have half the weight each
            for micro_batch in range(2):
                x = tokens(10 * step + micro_batch)
                y = run(x)
                (y * y).sum().backward()
            counts = module.step_counts.double()
            found.append([y.detach(), x.grad, counts, *gradients(module)])
            module.finish_step()
            optimizer.step()
        assert_equal(*found)


def test_parameters_keep_gradients_that_a_replay_would_overwrite() -> None:
    layer = layer_of(losses=())
    run = captured_of(layer, tokens())
    run(tokens()).sum().backward()
    first = [gradient.clone() for gradient in gradients(layer)]
    run(tokens()).sum().backward()
    assert_equal(gradients(layer), [2 * gradient for gradient in first])


def test_gradients_that_the_caller_keeps_stay_as_they_were() -> None:
    """Those that `autograd.grad` returned, and a `.grad` that was moved aside."""
    layer = layer_of(losses=())
    run = captured_of(layer, tokens())
    parameters = list(layer.parameters())
    returned = list(torch.autograd.grad(run(tokens(1)).sum(), parameters))
    run(tokens(2)).sum().backward()
    kept = [*returned, *gradients(layer)]
    before = [each.clone() for each in kept]
    layer.zero_grad()
    run(tokens(3)).square().sum().backward()
    assert all(map(torch.equal, kept, before))


def test_losses_are_collected_and_scaled_as_without_a_graph() -> None:
    layer = layer_of()
    twin = copy.deepcopy(layer)
    found = []
    for module, run in ((layer, captured_of(layer, tokens())), (twin, twin)):
        y = run(tokens(2))
        losses = collect_losses(module)
        (y.sum() + 3 * sum(losses)).backward()
        collected = [loss.detach() for loss in losses], [each.clone() for each in gradients(module)]
        module.zero_grad()
        set_loss_scale(module, 0.25)
        run(tokens(2)).sum().backward()
        found.append([*collected[0], *collected[1], *gradients(module)])
    assert_equal(*found)


def test_masks_and_token_ids_are_inputs_of_the_graph() -> None:
    layer = layer_of(router="hash", losses=())
    ids = torch.arange(TOKENS)
    mask = torch.arange(TOKENS) < 15
    run = captured_of(layer, tokens(), mask=mask, token_ids=ids)
    other = {"mask": ~mask, "token_ids": ids.flip(0)}
    assert_equal([run(tokens(3), **other)], [layer(tokens(3), **other)])
    with pytest.raises(InputError, match=r"captured with x .*, mask .*, token_ids"):
        run(tokens(3))


@pytest.mark.parametrize("mode", ["evaluation", "no gradients"])
def test_another_mode_runs_the_layer(mode: str) -> None:
    layer = layer_of("fixed", eval_capacity=2.0)
    run = captured_of(layer, tokens())
    replayed = run._forward.results
    layer.train(mode != "evaluation")
    with torch.set_grad_enabled(mode == "evaluation"):
        assert_equal([run(tokens(4)[:7])], [layer(tokens(4)[:7])])
    assert run._forward.results is replayed


def test_a_captured_evaluation_keeps_no_activations() -> None:
    layer = layer_of().eval()
    with torch.no_grad():
        run = captured_of(layer, tokens())
        y = [run(tokens(5)), run(tokens(6))]
        assert_equal(y, [layer(tokens(5)), layer(tokens(6))])
    assert run._backward is None


def test_frozen_parameters_get_no_gradient() -> None:
    layer = layer_of(losses=()).requires_grad_(False)
    x = tokens(7)
    captured_of(layer, tokens())(x).sum().backward()
    expected = tokens(7)
    layer(expected).sum().backward()
    assert_equal([x.grad], [expected.grad])
    assert gradients(layer) == []


def changed(change: Callable[[MoE], object], x: Tensor) -> Callable[[MoE, CapturedMoE], object]:
    return lambda layer, run: (change(layer), run(x))


def two_at_once(layer: MoE, run: CapturedMoE) -> None:
    first = run(tokens(1))
    second = run(tokens(2))
    (first + second).sum().backward()


def twice(layer: MoE, run: CapturedMoE) -> None:
    y = run(tokens(1)).sum()
    y.backward(retain_graph=True)
    y.backward()


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda layer, run: run(tokens()[:5]), r"called with x \(5, 16\)"),
        (lambda layer, run: run(tokens()[:1]), r"called with x \(1, 16\)"),
        (lambda layer, run: run(tokens().float()), "torch.float32"),
        (lambda layer, run: run(tokens().detach()), "captured with .* with gradient"),
        (
            changed(lambda layer: layer.router.requires_grad_(False), tokens()),
            "replaced, frozen or unfrozen",
        ),
        (
            changed(
                lambda layer: layer.load_state_dict(layer_of().state_dict(), assign=True), tokens()
            ),
            "replaced",
        ),
        (lambda layer, run: checkpoint(Around(run, layer), tokens()), "checkpoint"),
        (two_at_once, "after a later call"),
        (twice, "ran twice"),
    ],
)
def test_what_a_graph_does_not_fit_is_refused(
    use: Callable[[MoE, CapturedMoE], object], why: str
) -> None:
    layer = layer_of(losses=())
    run = captured_of(layer, tokens())
    with pytest.raises(InputError, match=why):
        use(layer, run)


class Around(torch.nn.Module):
    """A block around a captured layer."""

    def __init__(self, run: CapturedMoE, layer: MoE) -> None:
        super().__init__()
        self.run = run
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_a_layer_that_cannot_be_captured_is_refused_in_one_line() -> None:
    def refusal(layer: MoE, x: Tensor) -> str:
        line = refused(capture, layer, x)
        assert line.startswith("MoE cannot be captured: ")
        return line

    assert "x is on cpu" in refusal(layer_of(), tokens())
    hooked = layer_of()
    hooked.experts.register_forward_hook(lambda *_: None)
    assert "it has hooks" in refusal(hooked, tokens())
    with torch.autocast("cpu", torch.bfloat16):
        assert "cache_enabled=False" in refusal(layer_of(), tokens().float())

    def on_mesh(transport: Any) -> str:
        layer = layer_of()
        layer.parallelize(Mesh(Grid(world=1), transport))
        return refusal(layer, tokens())

    assert "it is on a mesh" in run_ranks(1, on_mesh)[0]


def test_a_host_wait_is_refused_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, other: object) -> None: ...

    def waits() -> None:
        if mode == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")

    mode: list[str] = []
    for name, value in {
        "graph_pool_handle": lambda: None,
        "Stream": Stream,
        "current_stream": Stream,
        "get_sync_debug_mode": lambda: 0,
        "stream": lambda stream: torch.enable_grad(),
        "set_sync_debug_mode": lambda new: mode.__setitem__(slice(None), [new]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(
        InputError, match=r"MoE cannot be captured: the host waits for the GPU in cuda_graphs\.py:"
    ):
        CudaRecorder().warm_up(waits)
    assert mode == [0]
