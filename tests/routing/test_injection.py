"""Tests of how auxiliary losses reach the parameters: collected losses, and the weights of injected
ones in a step."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers import make_layer, refused
from moesaic import LoadBalance, MoE, ZLoss, collect_losses, set_loss_scale
from moesaic.errors import InputError
from moesaic.routing import gradient_scalers, injection
from moesaic.routing.injection import InjectsLosses
from moesaic.runtime.routing_cache import checkpoint

LOSSES = (ZLoss(0.1), LoadBalance(0.2))


def layer_of(**options: object) -> MoE:
    torch.manual_seed(1)
    return make_layer(losses=LOSSES, **options).double()


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def propagate(layer: nn.Module, x: Tensor, weight: float = 0.0) -> None:
    """Run a backward pass whose main gradient is `weight` times ones."""
    (layer(x) * weight).sum().backward()


def once(layer: MoE) -> Tensor:
    """Return the gradient of the auxiliary losses of one call."""
    layer = copy.deepcopy(layer)
    layer.zero_grad()
    set_loss_scale(layer, 1.0)
    propagate(layer, tokens())
    return layer.router.weight.grad


def weight_of(layer: MoE, gradient: Tensor) -> float:
    """Return the weight of the losses in the router's gradient."""
    ratio = layer.router.weight.grad / gradient
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(ratio.mean())))
    return round(float(ratio.mean()), 9)


def test_injection_leaves_values_and_the_main_gradient_alone() -> None:
    layer = InjectsLosses()
    layer.own = nn.Parameter(torch.ones(()))
    y = torch.randn(3, requires_grad=True)
    loss = torch.tensor(2.0, requires_grad=True)
    out = layer.inject_loss(y, loss, 0.5, False)
    assert torch.equal(out, y)
    (3 * out).sum().backward()
    assert y.grad.tolist() == [3.0, 3.0, 3.0]
    assert float(loss.grad) == 0.5


@pytest.mark.parametrize("to_none", [True, False])
def test_the_losses_of_accumulated_micro_batches_weigh_one_in_every_step(to_none: bool) -> None:
    layer = layer_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    weights = []
    for _ in range(3):
        gradient = once(layer)
        per_pass = []
        for _ in range(8):
            propagate(layer, tokens())
            per_pass.append(weight_of(layer, gradient))
        weights.append(per_pass)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert weights[0] == [1.0] * 8
    assert weights[1] == weights[2] == [each / 8 for each in range(1, 9)]


def test_more_passes_than_in_the_step_before_add_nothing() -> None:
    layer = layer_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for passes in (2, 5):
        gradient = once(layer)
        for _ in range(passes):
            propagate(layer, tokens())
        assert weight_of(layer, gradient) == 1.0
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:moesaic")
def test_a_layer_that_a_pass_uses_twice_injects_twice_and_counts_once() -> None:
    layer = layer_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(2):
        gradient = once(layer)
        for _ in range(2):
            ((layer(tokens()) + layer(tokens())) * 0).sum().backward()
        assert weight_of(layer, gradient) == 2.0
        optimizer.step()
        optimizer.zero_grad()


def test_cleared_gradients_begin_anew_without_a_step() -> None:
    """Steps may be missing: a gradient scaler skips some, and tests of gradients take none."""
    layer = layer_of()
    gradient = once(layer)
    for _ in range(3):
        propagate(layer, tokens())
        assert weight_of(layer, gradient) == 1.0
        layer.zero_grad()


def test_gradients_that_nobody_accumulates_have_the_losses_every_time() -> None:
    layer = layer_of()
    gradient = once(layer)
    for _ in range(3):
        found = torch.autograd.grad((layer(tokens()) * 0).sum(), layer.router.weight)[0]
        torch.testing.assert_close(found, gradient)


def test_an_optimizer_within_the_backward_pass_makes_every_pass_a_step() -> None:
    layer = layer_of()
    found = []

    def step(parameter: Tensor) -> None:
        if parameter is layer.router.weight:
            found.append(weight_of(layer, gradient))
        with torch.no_grad():
            parameter.sub_(1e-3 * parameter.grad)
        parameter.grad = None

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        gradient = once(layer)
        propagate(layer, tokens())
    assert found == [1.0, 1.0, 1.0]


def test_an_optimizer_that_changes_data_is_a_step_once_gradients_are_cleared() -> None:
    layer = layer_of()
    for _ in range(3):
        gradient = once(layer)
        for _ in range(2):
            propagate(layer, tokens())
        assert weight_of(layer, gradient) == 1.0
        for parameter in layer.parameters():
            parameter.data.sub_(1e-3 * parameter.grad)
        layer.zero_grad()


def test_a_layer_without_a_trainable_parameter_injects_nothing() -> None:
    layer = layer_of().requires_grad_(False)
    for scale in (None, 1.0):
        x = tokens().requires_grad_()
        if scale is not None:
            set_loss_scale(layer, scale)
        propagate(layer, x)
        assert bool(x.grad.any()) == (scale is not None)


@pytest.mark.parametrize("frozen", ["router", "experts"])
def test_what_is_trainable_tells_steps_apart(frozen: str) -> None:
    layer = layer_of()
    getattr(layer, frozen).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        x = tokens().requires_grad_()
        alone = copy.deepcopy(layer)
        set_loss_scale(alone, 1.0)
        propagate(alone, x)
        gradient = x.grad
        x.grad = None
        for _ in range(4):
            propagate(layer, x)
        torch.testing.assert_close(x.grad, gradient)
        optimizer.step()
        optimizer.zero_grad()


def test_a_scale_that_was_set_is_taken_exactly() -> None:
    layer = layer_of()
    gradient = once(layer)
    set_loss_scale(layer, 0.25)
    for each in range(1, 5):
        propagate(layer, tokens())
        assert weight_of(layer, gradient) == each / 4


# Compiled

in_one_graph = pytest.mark.skipif(
    not injection.TAKES_OBJECTS, reason="this torch injects losses between two graphs"
)


@pytest.fixture
def compiled() -> Callable[[MoE], Callable[[Tensor], Tensor]]:
    torch._dynamo.reset()
    return lambda layer: torch.compile(
        layer, fullgraph=injection.TAKES_OBJECTS, backend="aot_eager"
    )


@in_one_graph
def test_compiled_micro_batches_weigh_one(
    compiled: Callable[[MoE], Callable[[Tensor], Tensor]],
) -> None:
    layer = layer_of()
    call = compiled(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(2):
        gradient = once(layer)
        for _ in range(4):
            (call(tokens()) * 0).sum().backward()
        assert weight_of(layer, gradient) == 1.0
        optimizer.step()
        optimizer.zero_grad()
    (call(tokens()) * 0).sum().backward()
    assert "the last call of a MoE was compiled, and its graph injects the losses" in refused(
        collect_losses, layer
    )
    gradient = once(layer)
    layer.zero_grad()
    y = call(tokens())
    set_loss_scale(layer, 0.5)  # between forward and backward
    (y * 0).sum().backward()
    (call(tokens()) * 0).sum().backward()
    assert weight_of(layer, gradient) == 1.0


@in_one_graph
def test_layers_share_their_compiled_code(
    compiled: Callable[[MoE], Callable[[Tensor], Tensor]],
) -> None:
    torch._dynamo.utils.counters.clear()  # of what was compiled before
    layers = [layer_of() for _ in range(4)]
    for layer in layers:
        gradient = once(layer)
        for _ in range(2):
            (compiled(layer)(tokens()) * 0).sum().backward()
        assert weight_of(layer, gradient) == 1.0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_a_torch_whose_graphs_take_no_objects_injects_between_two_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(injection, "TAKES_OBJECTS", False)
    layer = layer_of()
    gradient = once(layer)
    call = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        (call(tokens()) * 0).sum().backward()
    assert weight_of(layer, gradient) == 1.0
    y = call(tokens())
    assert y.requires_grad
    assert len(collect_losses(layer)) == 1


# Float16


def in_half(layer: MoE) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return layer(tokens().float())


@pytest.mark.parametrize("how", ["autocast", "compiled", "half"])
def test_float16_refuses_to_guess_the_scale(
    how: str, compiled: Callable[[MoE], Callable[[Tensor], Tensor]]
) -> None:
    layer = make_layer(losses=LOSSES)
    call = compiled(layer) if how == "compiled" else layer
    if how == "half":
        y = layer.half()(tokens().half())
    else:
        with torch.autocast("cpu", torch.float16):
            y = call(tokens().float())
    with pytest.raises(
        InputError, match=r"add collect_losses\(model\) to your loss .* or call set_loss_scale"
    ) as error:
        y.sum().backward()
    assert "\n" not in str(error.value)


def test_losses_under_a_gradient_scaler_have_their_weight() -> None:
    found = []
    for how in ("collected", "set"):
        torch.manual_seed(1)
        layer = make_layer(losses=LOSSES)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(4):
            if how == "set":
                set_loss_scale(layer, scaler.get_scale() / 4)
            loss = in_half(layer).float().sum() * 0
            if how == "collected":
                loss = loss + sum(collect_losses(layer))
            scaler.scale(loss / 4).backward()
        scaler.unscale_(optimizer)
        found.append(layer.router.weight.grad)
    torch.testing.assert_close(found[0], found[1])
    torch.manual_seed(1)
    plain = make_layer(losses=LOSSES)
    propagate(plain, tokens().float())
    torch.testing.assert_close(found[0], plain.router.weight.grad, rtol=2e-2, atol=1e-3)


SCALERS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "a class of one's own": lambda: type("Own", (torch.amp.GradScaler,), {})("cpu"),
}
UNDIVIDED: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "scale of 1": lambda: torch.amp.GradScaler("cpu", init_scale=1.0),
    "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
}


def scaled_steps(
    layer: MoE,
    scaler: torch.amp.GradScaler,
    loss_of: Callable[[Tensor], Tensor],
    dtype: torch.dtype = torch.bfloat16,
    **options: bool,
) -> list[str]:
    """Return the warnings of two steps of a scaler."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, **options)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = loss_of(tokens().float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return warned(step) + warned(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", SCALERS)
def test_a_scaler_that_divides_injected_losses_is_warned_of_once(
    name: str, fused: bool, dtype: torch.dtype
) -> None:
    layer = layer_of().float()

    def loss_of(x: Tensor) -> Tensor:
        return layer(x).float().sum()

    found = scaled_steps(layer, SCALERS[name](), loss_of, dtype, fused=fused)
    assert found == [gradient_scalers.SCALED]


@pytest.mark.parametrize("name", UNDIVIDED)
def test_a_scaler_that_divides_by_one_is_not_warned_of(name: str) -> None:
    layer = layer_of().float()
    assert scaled_steps(layer, UNDIVIDED[name](), lambda x: layer(x).float().sum()) == []


def test_a_scaler_of_collected_or_scaled_losses_or_of_another_model_is_not_warned_of() -> None:
    other = layer_of().float()
    propagate(other, tokens().float())  # injects, and no scaler steps it
    layer = layer_of().float()
    collected = scaled_steps(
        layer,
        torch.amp.GradScaler("cpu"),
        lambda x: layer(x).float().sum() + sum(collect_losses(layer)),
    )
    assert collected == []
    scaler = torch.amp.GradScaler("cpu")

    def scaled_loss(x: Tensor) -> Tensor:
        set_loss_scale(layer, scaler.get_scale())
        return layer(x).float().sum()

    assert scaled_steps(layer, scaler, scaled_loss) == []
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    assert warned(plain.step) == []
    linear = nn.Linear(8, 8)
    assert scaled_steps(linear, torch.amp.GradScaler("cpu"), lambda x: linear(x).sum()) == []


# Collected


def test_collected_losses_are_those_of_the_calls_and_are_not_injected() -> None:
    layer = layer_of()
    gradient = once(layer)
    y, routing = layer(tokens(), return_routing=True)
    losses = collect_losses(layer)
    expected = sum(loss.coefficient * routing.losses[loss.name] for loss in LOSSES)
    torch.testing.assert_close(losses[0].detach(), expected)
    assert len(losses) == 1
    assert collect_losses(layer) == []
    ((y * 0).sum() + 3 * losses[0]).backward()
    assert weight_of(layer, gradient) == 3.0


def test_losses_of_several_calls_and_layers_are_collected() -> None:
    model = nn.Sequential(layer_of(), nn.Tanh(), layer_of())
    y = model(model(tokens()))
    losses = collect_losses(model)
    assert len(losses) == 4
    ((y * 0).sum() + 0 * sum(losses)).backward()
    assert not model[0].router.weight.grad.any(), "a collected loss that weighs 0 weighs 0"


def test_injected_losses_cannot_be_collected_afterwards() -> None:
    layer = layer_of()
    y = layer(tokens())
    y.sum().backward()
    assert collect_losses(layer) == []


def test_evaluation_has_no_losses_to_collect() -> None:
    layer = layer_of().eval()
    layer(tokens())
    layer.train()
    with torch.no_grad():
        layer(tokens())
    assert collect_losses(layer) == []


def test_losses_that_nobody_collects_hold_no_graph() -> None:
    layer = layer_of()
    y = layer(tokens())
    graph = weakref.ref(layer._injections[0]())
    del y
    gc.collect()
    assert graph() is None
    for _ in range(3):
        layer(tokens())
    assert len(layer._injections) <= 1


def test_losses_in_a_checkpoint_are_collected() -> None:
    block = nn.Sequential(nn.Tanh(), layer_of(), nn.Tanh())
    results = []
    for recompute in (False, True):
        block.zero_grad()
        x = tokens().requires_grad_()
        y = torch_checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        losses = collect_losses(block)
        assert len(losses) == 1
        (y.sum() + 2 * losses[0]).backward()
        assert collect_losses(block) == []
        results.append([p.grad for p in block.parameters()])
    torch.testing.assert_close(results[0], results[1])


# Copies


@pytest.mark.parametrize("how", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_counts_by_itself(how: Callable[[MoE], MoE]) -> None:
    layer = layer_of()
    set_loss_scale(layer, 1.0)
    layer.loss_scale_is_set = False
    gradient = once(layer)
    propagate(layer, tokens())
    other = how(layer)
    other.zero_grad()
    for each in (layer, other):
        propagate(each, tokens())
        assert weight_of(each, gradient) == 1.0
    del layer
    gc.collect()
    propagate(other, tokens())
    assert weight_of(other, gradient) == 1.0


def test_a_layer_that_nobody_else_holds_injects_its_loss() -> None:
    torch.manual_seed(0)
    layer = MoE(8, 8, 4, losses=(LoadBalance(0.5),))
    x = torch.randn(6, 8)
    kept = x.clone().requires_grad_()
    layer(kept).sum().backward()
    alone = x.clone().requires_grad_()
    y = None
    torch.manual_seed(0)
    y = MoE(8, 8, 4, losses=(LoadBalance(0.5),))(alone)
    gc.collect()
    y.sum().backward()
    torch.testing.assert_close(alone.grad, kept.grad)


def warned(run: Callable[[], object]) -> list[str]:
    """Return the warnings of ours that a call gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in found if str(each.message).startswith("moesaic: ")]


def test_losses_of_several_forward_passes_in_one_backward_pass_warn_once() -> None:
    layer = layer_of()

    def together() -> None:
        (sum((layer(tokens(seed)) * 0.5).sum() for seed in range(3)) / 3).backward()

    assert warned(together) == [injection.BESIDE]
    assert warned(together) == [], "once"


def test_a_layer_that_does_not_train_injects_nothing_and_does_not_warn() -> None:
    layer = layer_of().requires_grad_(False)

    def together() -> None:
        sum(layer(tokens(seed).requires_grad_()).sum() for seed in range(2)).backward()

    assert warned(together) == []


@in_one_graph
def test_compiled_forward_passes_in_one_backward_pass_warn_once(
    compiled: Callable[[MoE], Callable[[Tensor], Tensor]],
) -> None:
    layer = layer_of()
    call = compiled(layer)

    def each_alone() -> None:
        for seed in range(3):
            call(call(tokens(seed))).sum().backward()

    def together() -> None:
        (sum(call(tokens(seed)).sum() for seed in range(3)) / 3).backward()

    assert warned(each_alone) == []
    assert warned(together) == [injection.BESIDE]
    assert warned(together) == [], "once"
    other = layer_of()
    set_loss_scale(other, 1 / 3)
    call = compiled(other)
    assert warned(together) == []


@pytest.mark.parametrize("how", ["set_loss_scale", "collect_losses"])
def test_there_is_no_warning_where_the_caller_says_the_weight(how: str) -> None:
    layer = layer_of()
    if how == "set_loss_scale":
        set_loss_scale(layer, 0.5)

    def together() -> None:
        loss = sum(layer(tokens(seed)).sum() for seed in range(2)) / 2
        if how == "collect_losses":
            loss = loss + sum(collect_losses(layer)) / 2
        loss.backward()

    assert warned(together) == []


def test_a_set_scale_gives_averaged_losses_their_weight() -> None:
    layer = layer_of()
    twin = layer_of()
    set_loss_scale(layer, 1 / 2)
    (sum(layer(tokens(seed)).square().mean() for seed in range(2)) / 2).backward()
    for seed in range(2):
        loss = twin(tokens(seed)).square().mean()
        ((loss + sum(collect_losses(twin))) / 2).backward()
    torch.testing.assert_close(layer.router.weight.grad, twin.router.weight.grad)


@pytest.mark.parametrize("wrapped", ["plain", "non-reentrant", "reentrant", "replayed"])
def test_ordinary_passes_do_not_warn(wrapped: str) -> None:
    layer = layer_of()
    run = {
        "plain": lambda x: layer(x),
        "non-reentrant": lambda x: torch_checkpoint(layer, x, use_reentrant=False),
        "reentrant": lambda x: torch_checkpoint(layer, x, use_reentrant=True),
        "replayed": lambda x: checkpoint(layer, x),
    }[wrapped]

    def accumulate() -> None:
        for seed in range(3):
            run(tokens(seed).requires_grad_()).sum().backward()

    def in_a_pipeline() -> None:
        losses = [run(tokens(seed).requires_grad_()).sum() for seed in range(3)]
        for loss in losses:
            loss.backward()

    def shared() -> None:
        x = run(run(tokens().requires_grad_())) + tokens(1)
        (x + run(x)).sum().backward()

    for each in (accumulate, in_a_pipeline, shared):
        assert warned(each) == [], each.__name__


def test_a_shared_layer_in_several_forward_passes_warns() -> None:
    layer = layer_of()

    def together(number: int) -> None:
        sum(layer(layer(tokens(seed))).sum() for seed in range(number)).backward()

    assert warned(lambda: together(1)) == []
    assert warned(lambda: together(2)) == [injection.BESIDE]
