"""Two micro-batches in flight compute what they compute one after the other, and share nothing."""

from __future__ import annotations

import copy
import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet
from meshes import DIM, EXPERTS, HIDDEN
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import moesaic
from moesaic import LoadBalance, Mesh, MoE, ZLoss, collect_losses, in_flight, set_loss_scale
from moesaic.balance.run.calls import calls_by
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.errors import InputError
from moesaic.parallel import parallelize_model
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.runtime.data_parallel import average_gradients
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import (
    budget_by_rows,
    call_relocated,
    compile_case,
    relocator_of,
    shuffle_experts,
)
from moesaic.testing.workload import draw_workload
from moesaic_lab.balance.tracked_memory import peak_bytes
from worlds import on_ranks, refusal


class Model(nn.Module):
    """Blocks of a dense layer and a MoE layer, and a head."""

    def __init__(self, num_blocks: int = 3, **options: Any) -> None:
        super().__init__()
        options = {"losses": (), **options}
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_blocks))
        self.moe = nn.ModuleList(MoE(DIM, HIDDEN, EXPERTS, 2, **options) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        for dense, moe in zip(self.dense, self.moe):
            x = x + moe(torch.tanh(dense(x)))
        return self.head(x).square().mean()


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def batches_of(rank: int, count: int = 2, tokens: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(tokens, DIM, generator=generator, dtype=torch.float64) for _ in range(count)
    ]


def spread(model: Model, mesh: Mesh, plan: Plan | None = None) -> Model:
    for layer in model.moe:
        layer.parallelize(mesh, plan or Plan())
    return model


def take_gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        found.append(local.clone())
        parameter.grad = None
    return found


def one_after_another(
    model: nn.Module, batches: list[Tensor], loss_of: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[float], list[Tensor]]:
    losses = []
    for batch in batches:
        loss = (model if loss_of is None else loss_of)(batch)
        (loss / len(batches)).backward()
        losses.append(float(loss.detach()))
    return losses, take_gradients(model)


def together(
    model: nn.Module, batches: list[Tensor], loss_of: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[float], list[Tensor]]:
    found = []
    for losses in in_flight(model if loss_of is None else loss_of, batches):
        (torch.stack(losses).sum() / len(batches)).backward()
        found += [float(loss.detach()) for loss in losses]
    return found, take_gradients(model)


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    pairs = list(zip(some, others, strict=True))
    return max(float((one - other).abs().max()) for one, other in pairs if one.numel())


def both_ways(rank_batches: int = 2) -> tuple[list[float], list[float], float]:
    mesh = Mesh.create(ep=2)
    model = spread(make_model(), mesh)
    batches = batches_of(mesh.rank, rank_batches)
    expected = one_after_another(model, batches)
    found = together(model, batches)
    return expected[0], found[0], largest_difference(expected[1], found[1])


def test_two_ranks_over_gloo_get_the_same_bits() -> None:
    for expected, found, difference in on_ranks(2, both_ways):
        assert found == expected
        assert difference == 0


def on_loopback(
    function: Callable[[Mesh], Any], *, in_order: bool = False, **sizes: int
) -> list[Any]:
    """Run a function on all ranks of a loopback mesh of these sizes."""
    grid = Grid(**sizes)

    def of_rank(transport: AbstractTransport) -> Any:
        return function(Mesh(grid, transport))

    return run_ranks(grid.world, of_rank, in_order=in_order)


SCHEDULES = {
    "baseline": (Plan(schedule="baseline"), {"world": 2, "ep": 2}),
    "s1 in chunks": (Plan(schedule="s1", chunks=2), {"world": 4, "tp": 2, "ep": 2, "etp": 2}),
    "s2": (Plan(schedule="s2"), {"world": 4, "tp": 2, "ep": 4}),
    "weights gathered": (
        Plan(schedule="s2", gather_weights=0),
        {"world": 4, "tp": 2, "ep": 2, "etp": 2},
    ),
    "multicast": (
        Plan(schedule="s2", all_to_all="multicast"),
        {"world": 4, "ep": 4, "ranks_per_node": 2},
    ),
    "hier2d": (
        Plan(schedule="s3", all_to_all="hier2d"),
        {"world": 4, "ep": 4, "ranks_per_node": 2},
    ),
    "data parallel experts": (Plan(), {"world": 4, "ep": 2}),
}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_gets_the_same_bits(schedule: str, in_order: bool) -> None:
    """With `in_order`, messages match in the order of issue, as on NCCL."""
    plan, sizes = SCHEDULES[schedule]
    whole = make_model(losses=(LoadBalance(0.1), ZLoss(0.01)))

    def rank(mesh: Mesh) -> tuple[list[float], list[float], float]:
        model = spread(copy.deepcopy(whole), mesh, plan)
        batches = batches_of(mesh.grid.coordinate(mesh.rank, "dp"))
        set_loss_scale(model, 0.5)
        expected = one_after_another(model, batches)
        found = together(model, batches)
        return expected[0], found[0], largest_difference(expected[1], found[1])

    for expected, found, difference in on_loopback(rank, in_order=in_order, **sizes):
        assert found == expected
        assert difference == 0


def test_messages_of_the_second_leave_before_the_first_waits() -> None:
    """The issue order is the same on all ranks, also on one without tokens, and no rank waits for
    messages of one micro-batch before those of the other are under way."""

    def rank(mesh: Mesh) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        model = spread(make_model(num_blocks=1), mesh)
        batches = batches_of(mesh.rank, 2, tokens=6 if mesh.rank else 0)
        recorder = _Recorder(mesh.transport)
        for losses in in_flight(lambda x: model(x).nan_to_num(), batches):
            forward = recorder.take()
            torch.stack(losses).sum().backward()
        return forward, recorder.take()

    (first_forward, first_backward), (forward, backward) = on_loopback(rank, world=2, ep=2)
    assert first_forward == forward
    assert first_backward == backward
    # counts and dispatch of one, then of the other; combine of one, then of the other
    of_programs = [kind for kind, _ in forward if kind != "counts"]
    assert of_programs == ["issue", "issue", "wait", "issue", "wait", "issue", "wait", "wait"]
    tags = [tag for kind, tag in forward if kind == "issue"]
    assert len(set(tags)) == 4
    assert [kind for kind, _ in backward] == [
        *("issue", "issue", "wait", "issue"),
        *("wait", "issue", "wait", "wait"),
    ]


class _Recorder:
    """Records what a transport issues and waits for."""

    def __init__(self, transport: AbstractTransport) -> None:
        self._events: list[tuple[str, int]] = []
        self._issue, self._wait = transport.issue, transport.wait
        transport.issue = self.issue  # type: ignore[method-assign]
        transport.wait = self.wait  # type: ignore[method-assign]

    def take(self) -> list[tuple[str, int]]:
        """Return what was recorded since the last call; an exchange of counts in one word."""
        events = self._events
        self._events = []
        found: list[tuple[str, int]] = []
        for kind, tag in events:
            if kind == "wait" and found and found[-1] == ("issue", tag):
                found[-1] = ("counts", tag)
            else:
                found.append((kind, tag))
        return found

    def issue(self, transfer: Transfer) -> Handle:
        self._events.append(("issue", transfer.tag))
        return self._issue(transfer)

    def wait(self, handle: Handle) -> None:
        self._events.append(("wait", handle.transfer.tag))
        self._wait(handle)


def what_torch_keeps() -> dict[str, object]:
    """Return everything that a micro-batch must not see of another one."""
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "grad": torch.is_grad_enabled(),
        "forward grad": torch._C._is_fwd_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "autocast's depth": depth,
        "modes": (*stacks, is_in_torch_dispatch_mode(), is_in_torch_dispatch_mode(False)),
        "device": torch.get_default_device(),
        "hooks": hooks,
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    }


class _Modes(TorchFunctionMode):
    """A mode that does nothing."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def _on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@contextmanager
def _with_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@contextmanager
def _deterministically() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "function mode": _Modes,
    "dispatch mode": _Dispatches,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "device": lambda: torch.device("cpu"),
    "default device": _on_meta,
    "default dtype": _with_dtype,
    "deterministic": _deterministically,
}


def looks(mesh: Mesh, context: str) -> list[bool]:
    """Return whether two micro-batches and the caller saw what they should, in turn: the first of
    one pair, the second of the next, and both of the last enter a context around a layer."""
    layer = make_model(num_blocks=1).moe[0]
    layer.parallelize(mesh)
    outside = what_torch_keeps()
    as_expected: list[bool] = []

    def loss_of(numbered: tuple[int, Tensor]) -> Tensor:
        number, batch = numbered
        enters = number in (0, 3, 4, 5)
        with CONTEXTS[context]() if enters else nullcontext():
            inside = what_torch_keeps()
            as_expected.append((inside != outside) == enters)
            y = layer(batch)
            as_expected.append(what_torch_keeps() == inside)
        as_expected.append(what_torch_keeps() == outside)
        return y.sum()

    for _ in in_flight(loss_of, list(enumerate(batches_of(mesh.rank, 6)))):
        as_expected.append(what_torch_keeps() == outside)
    return as_expected


def of_all_contexts() -> dict[str, list[bool]]:
    mesh = Mesh.create(ep=2)
    return {context: looks(mesh, context) for context in CONTEXTS}


def test_a_context_of_one_is_seen_neither_by_the_other_nor_by_the_caller() -> None:
    for found in on_ranks(2, of_all_contexts):
        assert found == dict.fromkeys(CONTEXTS, [True] * 21)


class Noisy(Model):
    """A model with dropout, which draws before and after each layer."""

    def forward(self, x: Tensor) -> Tensor:
        for dense, moe in zip(self.dense, self.moe):
            x = x + nn.functional.dropout(moe(torch.tanh(nn.functional.dropout(dense(x)))))
        return self.head(x).square().mean()


def test_random_numbers_are_those_of_the_micro_batch() -> None:
    """A model whose layers send nothing runs one micro-batch at a time, with the same numbers; the
    router is noisy too."""
    torch.manual_seed(0)
    whole = Noisy(router="noisy").double()

    def rank(mesh: Mesh) -> tuple[list[float], float, Tensor]:
        torch.manual_seed(7)
        batches = batches_of(0, 4)  # equal tokens on all ranks: their mean is one rank's
        alone = together(copy.deepcopy(whole), batches)
        torch.manual_seed(7)
        model = spread(copy.deepcopy(whole), mesh)
        losses, _ = together(model, batches)
        after = torch.rand(1)
        return losses, max(abs(a - b) for a, b in zip(losses, alone[0])), after

    torch.manual_seed(7)
    for _ in range(4):
        torch.randint(2**62, ())
    expected = torch.rand(1)
    for losses, difference, after in on_loopback(rank, world=2, ep=2):
        assert len(set(losses)) == 4
        assert difference < 1e-12
        assert torch.equal(after, expected)


@pytest.mark.parametrize("way", ["checkpoint", "checkpoint of torch", "reentrant"])
def test_checkpoints_replay_the_routing_of_their_micro_batch(way: str) -> None:
    whole = make_model(losses=(LoadBalance(0.1),))

    def rank(mesh: Mesh) -> tuple[list[float], list[float], float]:
        model = spread(copy.deepcopy(whole), mesh)
        set_loss_scale(model, 0.5)

        def loss_of(x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for dense, moe in zip(model.dense, model.moe):
                block = nn.Sequential(dense, nn.Tanh(), moe)
                if way == "checkpoint":
                    x = x + moesaic.checkpoint(block, x)
                else:
                    x = x + torch_checkpoint(block, x, use_reentrant=way == "reentrant")
            return model.head(x).square().mean()

        batches = batches_of(mesh.rank)
        expected = one_after_another(model, batches, loss_of)
        found = together(model, batches, loss_of)
        assert all(layer.routing_cache is None for layer in model.moe)
        return expected[0], found[0], largest_difference(expected[1], found[1])

    for expected, found, difference in on_loopback(rank, world=2, ep=2):
        assert found == expected
        assert difference < 1e-15


def test_each_collects_its_own_losses() -> None:
    whole = make_model(losses=(LoadBalance(0.1),))

    def rank(mesh: Mesh) -> tuple[list[float], list[float], float]:
        model = spread(copy.deepcopy(whole), mesh)

        def loss_of(x: Tensor) -> Tensor:
            return model(x) + torch.stack(collect_losses(model)).sum()

        batches = batches_of(mesh.rank, 4)
        expected = one_after_another(model, batches, loss_of)
        found = together(model, batches, loss_of)
        return expected[0], found[0], largest_difference(expected[1], found[1])

    for expected, found, difference in on_loopback(rank, world=2, ep=2):
        assert found == expected
        assert difference < 1e-15


def test_injected_losses_weigh_one_over_the_micro_batches() -> None:
    """Without `set_loss_scale`, from the first step on; layers count backward passes as before."""
    whole = make_model(losses=(LoadBalance(0.1), ZLoss(0.1)))

    def rank(mesh: Mesh) -> tuple[float, bool]:
        batches = batches_of(mesh.rank, 3)
        scaled = spread(copy.deepcopy(whole), mesh)
        set_loss_scale(scaled, 1 / 3)
        expected = one_after_another(scaled, batches)
        model = spread(copy.deepcopy(whole), mesh)
        found = together(model, batches)
        return largest_difference(expected[1], found[1]), model.moe[0].loss_scale_is_set

    for difference, is_set in on_loopback(rank, world=2, ep=2):
        assert difference < 1e-15
        assert not is_set


def test_counts_of_the_step_and_losses_over_it_are_those_of_one_after_another() -> None:
    options = {"losses": (LoadBalance(0.1, level="global_batch"),), "router": "sigmoid"}
    whole = make_model(**options)

    def rank(mesh: Mesh) -> tuple[float, bool]:
        batches = batches_of(mesh.rank, 4)
        models = [spread(copy.deepcopy(whole), mesh) for _ in range(2)]
        for model in models:
            set_loss_scale(model, 1 / 4)
        expected = one_after_another(models[0], batches)
        found = together(models[1], batches)
        counts = [[layer.step_counts for layer in model.moe] for model in models]
        same = all(map(torch.equal, *counts))
        return largest_difference(expected[1], found[1]), same

    for difference, same in on_loopback(rank, world=2, ep=2):
        assert difference < 1e-15
        assert same


def test_autocast_in_bfloat16_stays_within_its_rounding() -> None:
    torch.manual_seed(0)
    whole = Model(losses=(LoadBalance(0.1),))

    def rank(mesh: Mesh) -> tuple[list[float], list[float], float]:
        model = spread(copy.deepcopy(whole), mesh)
        set_loss_scale(model, 0.5)

        def loss_of(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        batches = [batch.float() for batch in batches_of(mesh.rank)]
        expected = one_after_another(model, batches, loss_of)
        found = together(model, batches, loss_of)
        scale = max(float(each.abs().max()) for each in expected[1])
        return expected[0], found[0], largest_difference(expected[1], found[1]) / scale

    for expected, found, difference in on_loopback(rank, world=2, ep=2):
        assert found == expected
        assert difference < 1e-6


def of_fsdp(stays: bool, count: int) -> tuple[list[float], list[float], float, int]:
    """Return the losses of both ways, the largest difference of gradients, and how many units stay
    gathered after a step."""
    from torch.distributed.fsdp import FSDPModule

    mesh = Mesh.create(ep=2)
    models = []
    for _ in range(2):
        model = Blocks()
        model = model.double()
        parallelize_model(model, mesh, fsdp=True)
        for unit in model.modules():
            if isinstance(unit, FSDPModule) and stays:
                unit.set_reshard_after_forward(False, recurse=False)
        models.append(model)
    batches = batches_of(mesh.rank, count)
    units = [part for part in models[1].modules() if isinstance(part, FSDPModule)]
    set_loss_scale(models[0], 1 / count)
    expected = one_after_another(models[0], batches)
    found = together(models[1], batches)
    gathered = sum(
        group.is_unsharded for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups
    )
    return expected[0], found[0], largest_difference(expected[1], found[1]), gathered


class Blocks(nn.Module):
    """Blocks that are FSDP2 units, one of them without experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(DIM, DIM),
                MoE(DIM, HIDDEN, EXPERTS, 2, losses=(LoadBalance(0.1),), shared_hidden=4)
                if number != 1
                else nn.Tanh(),
                nn.Linear(DIM, DIM),
            )
            for number in range(4)
        )
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


@pytest.mark.random
@pytest.mark.parametrize(("stays", "count"), [(False, 3), (True, 4)])
def test_under_fsdp2_gradients_are_those_of_one_after_another(stays: bool, count: int) -> None:
    """Where units free their parameters after the forward pass, and where they keep them."""
    for expected, found, difference, gathered in on_ranks(4, of_fsdp, stays, count):
        assert found == expected
        assert difference < 1e-14
        assert gathered == 0


class _Told(BaseException):
    """What a signal's handler raises."""


def fails(
    model: Model, rank: int, error: type[BaseException], failing: int
) -> tuple[list[str], list[int], bool]:
    """Return where an error came from that one micro-batch raises, which micro-batches ended, and
    whether nothing of them is alive."""
    ended: list[int] = []
    alive: list[weakref.ref[Any]] = []

    def fail(x: Tensor) -> Tensor:
        raise error("planted")

    def loss_of(numbered: tuple[int, Tensor]) -> Tensor:
        number, x = numbered
        x = x.clone()
        alive.extend([weakref.ref(x), weakref.ref(getcurrent())])
        try:
            x = model.moe[0](x)
            x = moesaic.checkpoint(model.moe[1], x)
            return (fail if number == failing else model.moe[2])(x).sum()
        finally:
            ended.append(number)

    try:
        for _ in in_flight(loss_of, list(enumerate(batches_of(rank, 4)))):
            raise AssertionError("losses in spite of an error")
    except error as caught:
        places = [frame.name for frame in traceback.extract_tb(caught.__traceback__)]
    gc.collect()
    return places, ended, all(reference() is None for reference in alive)


def of_errors() -> list[tuple[list[str], list[int], bool, bool, float]]:
    mesh = Mesh.create(ep=2)
    model = spread(make_model(losses=(LoadBalance(0.1),)), mesh)
    set_loss_scale(model, 0.5)
    outside = what_torch_keeps()
    found = []
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        for failing in (0, 1):
            result = fails(model, mesh.rank, error, failing)
            is_as_before = what_torch_keeps() == outside and all(
                layer.routing_cache is None for layer in model.moe
            )
            batches = batches_of(mesh.rank)  # another step runs
            expected = one_after_another(model, batches)[1]
            difference = largest_difference(expected, together(model, batches)[1])
            found.append((*result, is_as_before, difference))
    return found


def test_an_error_in_one_ends_both_and_leaves_nothing() -> None:
    """A signal's handler raises in whichever runs: KeyboardInterrupt, SystemExit."""
    for of_rank in on_ranks(2, of_errors):
        assert len(of_rank) == 6
        for places, ended, is_gone, is_as_before, difference in of_rank:
            assert places[-2:] == ["loss_of", "fail"]
            assert sorted(ended) == [0, 1]
            assert is_gone
            assert is_as_before
            assert difference == 0


def of_many_steps(num_steps: int) -> tuple[list[int], list[int]]:
    """Return how many objects, and greenlets, are alive after some steps and after the last."""
    mesh = Mesh.create(ep=2)
    model = spread(make_model(num_blocks=1, losses=(LoadBalance(0.1),)), mesh)
    objects, greenlets = [], []
    for step in range(num_steps):
        together(model, batches_of(mesh.rank))
        if step in (num_steps // 10, num_steps - 1):
            gc.collect()
            objects.append(len(gc.get_objects()))
            greenlets.append(sum(type(each) is greenlet for each in gc.get_objects()))
    return objects, greenlets


@pytest.mark.parametrize(
    "num_steps",
    [pytest.param(100, marks=pytest.mark.random), pytest.param(1_000, marks=pytest.mark.slow)],
)
def test_steps_leave_nothing_behind(num_steps: int) -> None:
    for (some, all_steps), greenlets in on_ranks(2, of_many_steps, num_steps):
        assert all_steps - some < 100
        assert greenlets == [1, 1]  # the thread's own


def values_of_case(case: Case, mesh: Mesh, *, flies: bool) -> tuple[list[Tensor], bool]:
    """Return outputs, gradients, counts and the router's state of a step of a case of the
    conformance suite, and whether two micro-batches were in flight."""
    work = draw_workload(case)
    layer = work.fresh_layer()
    policy = case.policy
    layer.parallelize(mesh, compile_case(case), calls=None if policy is None else calls_by(policy))
    budget_by_rows(layer)
    relocator = relocator_of(case, mesh)
    take_home = shuffle_experts(case, layer, mesh)
    group = case.grid.coordinate(mesh.rank, "dp")
    batches = [work.batches[micro % len(work.batches)][group] for micro in range(4)]
    set_loss_scale(layer, 1 / 4)
    inputs = [batch.x.detach().clone().requires_grad_() for batch in batches]
    values: dict[tuple[int, str], Tensor] = {}

    def loss_of(micro: int) -> Tensor:
        batch = batches[micro]
        torch.default_generator.manual_seed(batch.seed)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16)
            if case.precision == "autocast"
            else nullcontext()
        ):
            y, routing = call_relocated(
                relocator,
                layer,
                inputs[micro],
                recompute=case.recompute,
                mask=batch.mask,
                token_ids=batch.ids,
            )
        values[micro, "output"] = y.detach()
        values[micro, "counts"] = routing.counts
        values.update({(micro, name): loss for name, loss in routing.losses.items()})
        return (y * batch.dy).sum() / 4

    had_two = False
    if flies:
        for losses in in_flight(loss_of, range(4)):
            had_two = had_two or len(losses) == 2
            torch.stack(losses).sum().backward()
    else:
        for micro in range(4):
            loss_of(micro).backward()
    average_gradients(layer, mesh)
    take_home()
    values[4, "counts of the step"] = layer.step_counts.clone()
    layer.finish_step()
    found = [values[key] for key in sorted(values)]
    found += [x.grad for x in inputs if x.grad is not None]
    for parameter in layer.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad)
    return [*found, *(buffer for _, buffer in layer.router.named_buffers())], had_two


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.random) for n in range(10, 60, 10))]
)
def test_cases_of_the_conformance_suite_compute_the_same_in_flight(first: int) -> None:
    """Sums over micro-batches are added in another order: (a + b) + (c + d)."""
    pairs = 0
    for seed in range(first, first + 10):
        case = draw_case(seed)

        def rank(transport: AbstractTransport, case: Case = case) -> tuple[Any, Any]:
            mesh = Mesh(case.grid, transport)
            return tuple(values_of_case(case, mesh, flies=flies) for flies in (False, True))

        for (expected, _), (found, had_two) in run_ranks(case.grid.world, rank, seed=seed):
            pairs += had_two
            assert len(found) == len(expected)
            tolerance = {"float64": 1e-12, "float32": 1e-5, "autocast": 0.02}[case.precision]
            for one, other in zip(found, expected):
                scale = max(float(other.double().abs().max()), 1e-30) if other.numel() else 1.0
                error = (one.double() - other.double()).abs() / scale
                assert not other.numel() or float(error.max()) < tolerance, (seed, case)
    assert pairs


@pytest.mark.random
def test_eight_micro_batches_need_no_more_memory_than_two() -> None:
    """And two halves of a micro-batch in flight need about what the whole one needs."""
    torch.manual_seed(0)
    whole = Model(num_blocks=2, losses=(LoadBalance(0.1),))

    def rank(mesh: Mesh) -> dict[str, int]:
        model = spread(copy.deepcopy(whole), mesh)
        tokens = [batch.float() for batch in batches_of(mesh.rank, 8, tokens=512)]
        halves = list(tokens[0].chunk(2))
        one_after_another(model, tokens[:1])  # layers keep tables

        def with_gradients(run: Callable[[], object]) -> int:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return peak_bytes(run)

        return {
            "one": with_gradients(lambda: one_after_another(model, tokens[:1])),
            "two": with_gradients(lambda: together(model, tokens[:2])),
            "eight": with_gradients(lambda: together(model, tokens)),
            "halves": with_gradients(lambda: together(model, halves)),
        }

    for peaks in on_loopback(rank, world=2, ep=2):
        assert peaks["eight"] <= 1.02 * peaks["two"], peaks
        assert peaks["halves"] <= 1.1 * peaks["one"], peaks
        assert peaks["two"] > 1.5 * peaks["one"], peaks


def of_compiled() -> tuple[list[float], list[float], float]:
    mesh = Mesh.create(ep=2)
    model = spread(make_model(num_blocks=2, losses=(LoadBalance(0.1),)), mesh)
    set_loss_scale(model, 0.5)
    compiled = torch.compile(model, backend="aot_eager")
    batches = batches_of(mesh.rank)
    expected = one_after_another(model, batches)
    found = together(model, batches, compiled)
    again = together(model, batches, compiled)
    assert again[0] == found[0]
    return expected[0], found[0], largest_difference(expected[1], again[1])


@pytest.mark.random
def test_a_compiled_model_computes_the_same() -> None:
    for expected, found, difference in on_ranks(2, of_compiled):
        assert found == pytest.approx(expected, abs=1e-14)
        assert difference < 1e-14


def pauses_of_a_mesh_without_messages() -> int:
    mesh = Mesh.create(ep=1)
    model = spread(make_model(), mesh)
    most = 0
    for losses in in_flight(model, batches_of(mesh.rank, 4)):
        most = max(most, len(losses))
        torch.stack(losses).sum().backward()
    return most


def test_without_messages_micro_batches_run_one_after_another() -> None:
    assert on_ranks(2, pauses_of_a_mesh_without_messages) == [1, 1]


def test_what_cannot_be_in_flight_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="has no length: pass a list"):
        in_flight(lambda x: x, iter([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(InputError, match='at_once=3: write 1, 2 or "auto"'):
        in_flight(lambda x: x, [torch.ones(())], at_once=3)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "greenlet", None)
        with pytest.raises(InputError, match="in_flight needs greenlet: in a clone"):
            in_flight(lambda x: x, [torch.ones(())])
    for wrong in (None, 1.0, (torch.ones(()),)):
        line = f"loss_of returned {type(wrong).__name__}: return the loss, a tensor"
        with pytest.raises(InputError, match=line):
            list(in_flight(lambda _, wrong=wrong: wrong, [0]))
    monkeypatch.delattr(torch._C, "_get_dispatch_stack_at")
    with pytest.raises(InputError, match=r"needs torch\._C\._get_dispatch_stack_at, which torch"):
        in_flight(lambda x: x, [torch.ones(())])


def under_ddp() -> tuple[float, bool]:
    """Return the largest difference of gradients, and whether a forward pass of DDP has not
    ended."""
    mesh = Mesh.create(ep=2)
    model = spread(make_model(), mesh)
    moesaic.prepare_ddp(model, mesh)
    wrapped = DistributedDataParallel(model)
    batches = batches_of(mesh.rank, count=4)
    with wrapped.no_sync():
        for losses in in_flight(wrapped, batches):
            torch.stack(losses).sum().backward()
    found = take_gradients(model)
    in_ddp = DistributedDataParallel._get_active_ddp_module() is not None
    with wrapped.no_sync():
        for batch in batches:
            wrapped(batch).backward()
    return largest_difference(found, take_gradients(model)), in_ddp


def test_a_forward_pass_of_ddp_ends_with_its_micro_batch() -> None:
    for difference, in_ddp in on_ranks(2, under_ddp):
        assert difference < 1e-14
        assert not in_ddp


def out_of_step() -> str:
    mesh = Mesh.create(ep=2)
    model = spread(make_model(), mesh)

    def loss_of(micro: int) -> Tensor:
        y = model.moe[0](batches_of(mesh.rank)[micro])
        return (y if mesh.rank == micro + 1 else model.moe[1](y)).sum()

    return refusal(lambda: list(in_flight(loss_of, range(2))))


def test_a_rank_out_of_step_is_named() -> None:
    """The first micro-batch of one rank leaves out a layer, so that its second one comes first."""
    for text in on_ranks(2, out_of_step):
        assert "call.micro_batch differs: 0 on rank 0, 1 on rank 1" in text
        assert "\n" not in text
