"""Every kernel starts on the device of its operands, wherever the caller is: on fake tensors of
cuda:1, without a GPU."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason='the GPU extra is not installed: pip install ".[gpu]"')

from triton.runtime.jit import JITFunction

import moesaic
from moesaic import MoE, cuda_graphs
from moesaic.kernels import choice, expert_ffn, grouped_matmul, nf4, operator, pick, router_product
from moesaic.kernels.choice import empty_chosen
from moesaic.kernels.choice_call import ChoiceRule, WantedSums
from moesaic.kernels.triton import quantise
from moesaic.kernels.triton.rows import launch, permute, sort
from moesaic.kernels.work import Dispatch, ExpertWork

PLACE = torch.device("cuda:1")
T = 8
E = 4
K = 2
D = 64
H = 32
"""Tokens, experts, copies of a token, width of a token and of an expert."""
FOLDER = Path(moesaic.__file__).parent


class Devices:
    """Stands for the current device, and lists the kernels that start with the device on which each
    does."""

    def __init__(self) -> None:
        self.current = 0
        self.switches = 0
        self.started: list[tuple[str, int]] = []

    def exchange(self, index: int) -> int:
        self.switches += 1
        previous = self.current
        self.current = index
        return previous

    def start(self, name: str) -> None:
        self.started.append((name, self.current))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    found = Devices()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, found.exchange)
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *_, **__: found.start(kernel.fn.__name__)
    )
    monkeypatch.setattr(pick, "_can_run_triton", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "_is_aligned", lambda _: False)  # fake tensors have no address
    with FakeTensorMode(), torch.no_grad():
        yield found


def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device=PLACE)


def work_of(*, dispatched: bool) -> ExpertWork:
    rows = T * K
    token = new(rows, dtype=torch.int64)
    starts = new(T, dtype=torch.int64)
    dispatch = (
        Dispatch(token=token, by_token=token, starts=starts, per_token=K) if dispatched else None
    )
    return ExpertWork(
        x=new(T if dispatched else rows, D),
        dispatch=dispatch,
        gates=new(rows),
        gates_first=False,
        ends=new(E, dtype=torch.int32),
        up=new(E, 2, H, D),
        up_bias=new(E, 2, H),
        down=new(E, D, H),
        down_bias=new(E, D),
        activation="silu",
        clamp=None,
        kernel="auto",
    )


def choose() -> None:
    rule = ChoiceRule(K, by_sigmoid=False, normalize=True, scale=1.0)
    wanted = WantedSums(balance=True, z=True, reduced=True)
    logits = new(2**14, E)  # enough for sums in two levels
    run(choice.choose_forward, logits, None, None, None, *rule, *wanted)
    chosen = empty_chosen(logits, rule, wanted)
    counted = (
        chosen.expert,
        chosen.counts,
        chosen.num_valid,
        chosen.weight,
        chosen.balance,
        chosen.z,
    )
    run(choice.choose_backward, logits, None, *counted, *rule, *wanted)


def codecs() -> None:
    rows = new(T, D)
    scale = new(T, 1)
    run(quantise.int8_encode, rows, scale, new(T, D, dtype=torch.int8))
    run(quantise.fp8_encode, rows, scale, new(T, D, dtype=torch.uint8))
    run(quantise.decode, scale, new(T, D, dtype=torch.uint8), torch.float32)


def order() -> None:
    run(sort.sort, new(T * K, dtype=torch.int64), E)
    run(
        permute.sum_tokens,
        new(T * K, D),
        *[new(T * K, dtype=torch.int64)] * 2,
        None,
        K,
        torch.float32,
    )


def products() -> None:
    x = new(T * K, D)
    ends = new(E, dtype=torch.int32)
    run(grouped_matmul.rows_times, x, new(E, D, H), ends)
    run(grouped_matmul.outer_products, new(T * K, H), x, ends)
    run(nf4.rows_times, x, new(E, H, D // 2, dtype=torch.uint8), new(E, H, D // 64), ends, True)


def experts() -> None:
    tensors, settings = expert_ffn._flatten(work_of(dispatched=True))
    run(expert_ffn.expert_forward, *tensors, *settings, torch.float32)
    pre = new(T * K, 2 * H)
    dy = new(T, D)
    run(expert_ffn.expert_backward, *tensors, *settings, pre, dy, True, True, True)


def experts_of_a_mesh() -> None:
    work = work_of(dispatched=False)
    y, pre = expert_ffn.run_experts(work)
    expert_ffn.expert_gradients(work, pre, y)


def run(called: Any, *arguments: object) -> None:
    """Run the function that torch's dispatcher runs, which is also what an eager call runs."""
    called.overload.function(*arguments)


def router() -> None:
    run(router_product.router_forward, new(T, D, dtype=torch.bfloat16), new(E, D))


CALLS: list[Callable[[], None]] = [
    choose,
    codecs,
    order,
    products,
    experts,
    experts_of_a_mesh,
    router,
]


def launches() -> set[str]:
    """Return the names of all kernels that the library starts anywhere, from its source."""
    nodes = [
        node
        for path in FOLDER.rglob("*.py")
        if "triton" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
    ]
    kernels = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    started = {
        ast.unparse(node.func.value).rpartition(".")[2]
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    # a kernel that no other calls, and that nothing starts, would be one that this does not see
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    # an epilogue is handed to the kernel that calls it
    given = [each for node in nodes if isinstance(node, ast.Call) for each in node.args]
    handed = {each.id for each in given if isinstance(each, ast.Name)}
    assert kernels - called - handed == started & kernels
    return started & kernels


def test_every_kernel_starts_on_the_device_of_its_operands(devices: Devices) -> None:
    for call in CALLS:
        call()
    assert {name for name, _ in devices.started} == launches()
    assert [name for name, device in devices.started if device != PLACE.index] == []
    assert devices.current == 0, "the caller's device is as before"


def test_nothing_is_switched_where_the_device_is_current(devices: Devices) -> None:
    devices.current = 1
    for call in CALLS:
        call()
    assert {device for _, device in devices.started} == {1}
    assert devices.switches == 0


def test_the_device_is_as_before_after_a_kernel_that_fails(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("out of memory"))
    with pytest.raises(pytest.fail.Exception):
        order()
    assert devices.current == 0


def test_an_eager_call_and_the_dispatcher_run_the_guarded_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guarded: list[Tensor] = []

    def note(tensor: Tensor, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        guarded.append(tensor)
        return function(*arguments, **options)

    monkeypatch.setattr(operator, "on_device_of", note)
    x = torch.ones(2, 4)
    w = torch.ones(1, 4, 3)
    ends = torch.tensor([2], dtype=torch.int32)
    with torch.no_grad():
        grouped_matmul.rows_times(x, w, ends)
        grouped_matmul.rows_times.overload(x, w, ends)
    assert len(guarded) == 2
    assert all(each is x or each.data_ptr() == x.data_ptr() for each in guarded)


def test_a_layer_is_captured_on_its_device(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []

    class Recorder:
        def __init__(self) -> None:
            made.append(("recorder", devices.current))

    class Captured:
        def __init__(self, *_: object) -> None:
            made.append(("graphs", devices.current))

    monkeypatch.setattr(cuda_graphs, "CudaRecorder", Recorder)
    monkeypatch.setattr(cuda_graphs, "CapturedMoE", Captured)
    cuda_graphs.capture(MoE(D, H, E, K), new(T, D))
    assert made == [("recorder", 1), ("graphs", 1)]
    assert devices.current == 0
