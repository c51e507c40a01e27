"""An optimizer that was made before the experts were spread over ranks trains them, or is refused
in one line."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic import Mesh, MoE, average_gradients, balance_on_step, clip_grad_norm_
from moesaic.comm.loopback import run_ranks
from moesaic.experts import ModuleExperts
from moesaic.experts.replaced_parameters import ReplacedParameters
from moesaic.parallel import parallelize_model, parameter_groups
from moesaic.program.grid import Grid
from worlds import on_ranks, refusal

DIM = 4
HIDDEN = 8
EXPERTS = 4
REFUSED = "was made before the model was spread over ranks"


def make_model(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), MoE(DIM, HIDDEN, EXPERTS, EXPERTS, **options))


def spread_model(model: nn.Sequential) -> None:
    parallelize_model(model, Mesh.create(ep=2), "auto")


def spread_layer(model: nn.Sequential) -> None:
    model[1].parallelize(Mesh.create(ep=2))


def spread_with_fsdp(model: nn.Sequential) -> None:
    parallelize_model(model, Mesh.create(ep=2), fsdp=[model[1]])


def shard_experts_only(model: nn.Sequential) -> None:
    """Spread over no rank, with experts that FSDP2 shards."""
    parallelize_model(model, Mesh.create(), fsdp=True)


SPREADS: dict[str, Callable[[nn.Sequential], None]] = {
    "parallelize_model": spread_model,
    "layer": spread_layer,
    "fsdp": spread_with_fsdp,
    "fsdp alone": shard_experts_only,
}


class GroupsOfOnesOwn:
    """No torch optimizer, with parameter groups as apex's have them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


class ListOfOnesOwn:
    """An optimizer with a plain list and slots."""

    __slots__ = ("held",)

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.held = tuple(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.held:
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)


class StateOfOnesOwn(ListOfOnesOwn):
    """An optimizer with a state by parameter and no list."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.state = {parameter: {"momentum": 0.0} for parameter in parameters}

    def __getattr__(self, name: str) -> Any:
        return tuple(self.state)


class Wrapped:
    """An optimizer around another one, as of mixed precision."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._inner = GroupsOfOnesOwn(parameters)

    def step(self) -> None:
        self._inner.step()


class StepOfTheObject:
    """An optimizer whose step its class does not have, in an attribute without a dict."""

    __slots__ = ("held", "step")

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.held = list(parameters)
        self.step = lambda: ListOfOnesOwn.step(self)


class DeepInside:
    """An optimizer whose parameters lie in objects in containers in containers."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.inner = {"a": [{"b": [{"c": [{"d": [SimpleNamespace(held=list(parameters))]}]}]}]}

    def update(self) -> None:
        ListOfOnesOwn.step(self.inner["a"][0]["b"][0]["c"][0]["d"][0])


def function_that_steps(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    held = list(parameters)

    def step() -> None:
        for parameter in held:
            if parameter.grad is not None:
                take_a_step(parameter)

    return step


UNSEEN: dict[str, Callable[[Iterable[nn.Parameter]], Callable[[], object]]] = {
    "a step of the object": lambda parameters: StepOfTheObject(parameters).step,
    "no step": lambda parameters: DeepInside(parameters).update,
    "a function": function_that_steps,
    "a partial": lambda parameters: partial(clip_and_step, list(parameters)),
}
"""Optimizers that no search by a class's `step` finds, as what makes a step."""


def clip_and_step(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)
    for parameter in parameters:
        take_a_step(parameter)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "groups of one's own": lambda model: GroupsOfOnesOwn(model.parameters()),
    "list of one's own": lambda model: ListOfOnesOwn(model.parameters()),
    "state of one's own": lambda model: StateOfOnesOwn(model.parameters()),
    "wrapped": lambda model: Wrapped(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "groups": lambda model: torch.optim.SGD(parameter_groups(model), lr=0.1),
}


def local(parameter: Tensor) -> Tensor:
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part.detach().clone()


def moved(model: nn.Sequential, step: Callable[[], object]) -> int:
    """Return how many parameters of the experts a step moves."""
    parameters = list(model[1].experts.parameters())
    before = [local(parameter) for parameter in parameters]
    step()
    return sum(
        not torch.equal(old, local(new)) for old, new in zip(before, parameters, strict=True)
    )


def backward(model: nn.Module) -> None:
    model(torch.randn(6, DIM)).square().mean().backward()


def outcome(model: nn.Sequential, step: Callable[[], object]) -> str:
    """Return the number of parameters of the experts that a step moves, or why it is refused."""
    counts: list[int] = []
    return refusal(lambda: counts.append(moved(model, step))) or str(counts[0])


def plainly(optimizer: Any, model: nn.Module) -> None:
    backward(model)
    optimizer.step()


def early() -> dict[str, str]:
    """Return what becomes of an optimizer that was made too early, by form."""
    found = {}
    for spread_name, spread in SPREADS.items():
        for name, make in OPTIMIZERS.items():
            model = make_model()
            optimizer = make(model)
            spread(model)
            found[f"{spread_name}, {name}"] = outcome(
                model, lambda o=optimizer, m=model: plainly(o, m)
            )
    return found


def unseen() -> dict[str, str]:
    """Return what becomes of optimizers made too early that no search finds, by form."""
    found = {}
    for spread_name, spread in SPREADS.items():
        for name, make in UNSEEN.items():
            model = make_model()
            step = make(model.parameters())
            spread(model)
            backward(model)
            found[f"{spread_name}, {name}"] = outcome(model, step)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        gc.freeze()
        spread(model)
        backward(model)
        found[f"{spread_name}, frozen"] = outcome(model, optimizer.step)
        found[f"{spread_name}, frozen, cleared"] = refusal(optimizer.zero_grad)
        gc.unfreeze()
    return found


def old_and_new_in_one() -> str:
    """Return the outcome where an optimizer also holds what took the parameters' places."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread_model(model)
    optimizer.add_param_group({"params": list(model[1].experts.parameters())})
    return outcome(model, lambda: plainly(optimizer, model))


def with_wrappers() -> dict[str, str]:
    """Return the same for an optimizer in something else, of which only that is left."""
    found = {}

    model = make_model()
    schedule = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD(model.parameters(), lr=0.1), lambda _: 1.0
    )
    spread_model(model)
    found["scheduler"] = outcome(model, lambda: plainly(schedule.optimizer, model))

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    spread_model(model)

    def scaled_step() -> None:
        scaler.scale(model(torch.randn(6, DIM)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    found["scaler"] = outcome(model, scaled_step)

    model = make_model()
    each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in each:
        parameter.register_post_accumulate_grad_hook(lambda done: each[done].step())
    spread_model(model)
    found["in backward"] = outcome(model, lambda: backward(model))
    return found


@torch.no_grad()
def take_a_step(parameter: Tensor) -> None:
    parameter.sub_(0.1 * parameter.grad)


def by_hooks() -> str:
    """Return how many parameters of the experts hooks move that were registered before."""
    model = make_model()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(take_a_step)
    spread_model(model)
    return outcome(model, lambda: backward(model))


def in_calls() -> dict[str, str]:
    """Return which calls refuse by themselves, and the number of moved parameters where the
    optimizer came after."""
    found = {}
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()  # it has a state
    mesh = parallelize_model(model, Mesh.create(ep=2))
    found["balance_on_step"] = refusal(balance_on_step, optimizer, model)
    found["average_gradients"] = refusal(average_gradients, model, mesh)
    found["clip_grad_norm_"] = refusal(clip_grad_norm_, model, 1.0)
    found["forward"] = refusal(backward, model)

    optimizer = torch.optim.SGD(parameter_groups(model), lr=0.1)
    balance_on_step(optimizer, model)
    found["made again"] = outcome(model, lambda: plainly(optimizer, model))
    kept = torch.optim.SGD(list(make_model().parameters()), lr=0.1)  # of another model
    other = GroupsOfOnesOwn(make_model().parameters())
    found["beside another model's"] = outcome(model, lambda: plainly(optimizer, model))

    model = make_model()
    spread_model(model)
    own = GroupsOfOnesOwn(
        parameter for group in parameter_groups(model) for parameter in group["params"]
    )
    found["of one's own, after"] = outcome(model, lambda: plainly(own, model))
    return found | {"kept": type(kept).__name__, "other": type(other).__name__}


def from_an_early_list(late: bool) -> str:
    """Return the outcome for parameters that were listed before; `late`: the optimizer is made
    after a first step."""
    model = make_model()
    parameters = list(model.parameters())
    spread_model(model)
    backward(model)
    own = torch.optim.SGD(model.parameters() if not late else parameters, lr=0.1)
    return outcome(model, lambda: plainly(own, model))


def with_old_and_new() -> str:
    model = make_model()
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, Mesh.create(), fsdp=True)
    new = torch.optim.SGD(parameter_groups(model), lr=0.1)
    result = outcome(model, lambda: plainly(new, model))
    return result if old.param_groups else ""


def with_modules() -> str:
    model = make_model(
        experts=lambda dim, hidden, n: ModuleExperts(lambda: nn.Linear(dim, dim), dim, n)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread_model(model)
    return outcome(model, lambda: plainly(optimizer, model))


def in_evaluation_mode() -> str:
    """Return the outcome of a step without dropout; a forward pass without gradients comes
    first."""
    model = make_model().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread_model(model)
    with torch.no_grad():
        model(torch.randn(2, DIM))
    return outcome(model, lambda: plainly(optimizer, model))


def frozen_at_first() -> list[str]:
    """Return the outcomes of a step with frozen experts, and of one after they were unfrozen."""
    model = make_model()
    model[1].experts.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spread_model(model)
    frozen = outcome(model, lambda: plainly(optimizer, model))
    model[1].experts.requires_grad_(True)
    return [frozen, outcome(model, lambda: plainly(optimizer, model))]


def assigned() -> dict[str, str]:
    """Return what becomes of whole experts that take the places of spread ones, and of an optimizer
    that holds parameters whose places others took."""
    model = make_model()
    whole = copy.deepcopy(model.state_dict())
    spread_model(model)
    found = {"whole": refusal(lambda: model.load_state_dict(whole, assign=True))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].load_state_dict(copy.deepcopy(model[1].state_dict()), assign=True)
    found["stale"] = outcome(model, lambda: plainly(optimizer, model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["made again"] = outcome(model, lambda: plainly(optimizer, model))
    return found


def everything() -> dict[str, Any]:
    return {
        "assigned": assigned(),
        "frozen at first": frozen_at_first(),
        "early": early(),
        "unseen": unseen(),
        "old and new in one": old_and_new_in_one(),
        "wrapped": with_wrappers(),
        "calls": in_calls(),
        "hooks": by_hooks(),
        "an early list": [from_an_early_list(late) for late in (False, True)],
        "old and new": with_old_and_new(),
        "modules": with_modules(),
        "in evaluation mode": in_evaluation_mode(),
        "world": dist.get_world_size(),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(2, everything)


def test_an_optimizer_made_too_early_is_refused_in_the_first_step(found):
    for rank in found:
        for form, result in rank["early"].items() | rank["wrapped"].items():
            assert REFUSED in result, f"{form}: {result}"
            assert result.startswith("InputError: "), form
            assert "\n" not in result
        assert REFUSED in rank["in evaluation mode"]


def test_what_no_search_finds_is_refused_where_it_reads_a_gradient(found):
    for rank in found:
        for form, result in rank["unseen"].items():
            assert result.startswith("InputError: the gradient of "), f"{form}: {result}"
            assert REFUSED in result, form
            assert "\n" not in result


@pytest.mark.parametrize(
    "call", ["balance_on_step", "average_gradients", "clip_grad_norm_", "forward"]
)
def test_each_call_that_sees_the_model_refuses(found, call):
    assert all(REFUSED in rank["calls"][call] for rank in found)


def test_experts_that_are_unfrozen_later_are_refused_then(found):
    for rank in found:
        frozen, unfrozen = rank["frozen at first"]
        assert frozen == "0"
        assert REFUSED in unfrozen


def test_hooks_of_a_parameter_that_was_replaced_run(found):
    assert [rank["hooks"] for rank in found] == ["2", "2"]


def test_an_optimizer_made_after_trains_the_experts(found):
    for rank in found:
        assert rank["calls"]["made again"] == rank["calls"]["beside another model's"] == "2"
        assert rank["calls"]["of one's own, after"] == "2"
        assert rank["an early list"][0] == "2"
        assert REFUSED in rank["an early list"][1]
        assert rank["old and new"] == rank["old and new in one"] == "2"


def test_parameters_that_a_state_took_the_place_of_are_refused(found):
    for rank in found:
        assert rank["assigned"]["whole"].startswith(
            "InputError: load_state_dict(assign=True) would give this rank the whole of 1.experts."
        )
        assert REFUSED in rank["assigned"]["stale"]
        assert rank["assigned"]["made again"] == "2"


def test_modules_of_ones_own_keep_their_parameters(found):
    assert all(rank["modules"] == "4" for rank in found)


def test_experts_on_ranks_without_process_groups_keep_their_parameters():
    def step(transport: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity(), MoE(DIM, HIDDEN, EXPERTS, EXPERTS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[1].parallelize(Mesh(Grid(world=2, ep=2), transport))
        assert len(model[1].experts.w2) == EXPERTS // 2
        return moved(model, lambda: plainly(optimizer, model))

    assert run_ranks(2, step) == [2, 2]


def test_one_process_keeps_its_parameters():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_model(model, Mesh.create())
    assert moved(model, lambda: plainly(optimizer, model)) == 2


def test_nothing_is_searched_where_nobody_holds_what_was_replaced(monkeypatch):
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("searched"))
    ReplacedParameters().check()
