"""Operators of the library: eager calls run the function itself, and all else sees one operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.errors import InputError
from moesaic.kernels.operator import operator


@operator("probe", refuses_gradient=True)
def probe(x: Tensor, factor: float) -> Tensor:
    return x * factor


@torch.library.register_fake(probe.overload)
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


class Names(TorchDispatchMode):
    """Lists the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def dispatched(x: Tensor) -> bool:
    """Return whether a call goes through torch's dispatcher."""
    with torch.autograd.profiler.profile() as profile:
        assert torch.equal(probe(x, 2.0), 2 * x)
    return "moesaic::probe" in {event.name for event in profile.function_events}


def test_an_eager_call_without_gradients_runs_the_function_itself():
    x = torch.randn(3, requires_grad=True)
    assert dispatched(x), "the operator refuses gradients"
    with torch.no_grad():
        assert not dispatched(x)
        assert dispatched(torch.nn.Parameter(torch.ones(2))), "a subclass may have its own way"


def test_the_gradient_of_a_gradient_is_refused():
    with pytest.raises(InputError, match="no second derivatives"):
        probe(torch.randn(3, requires_grad=True), 2.0).sum().backward()


@torch.no_grad()
def test_modes_fake_tensors_and_the_compiler_see_one_operator():
    with Names() as seen:
        probe(torch.ones(2), 3.0)
    assert seen.names == ["aten.ones.default", "moesaic.probe.default"]
    with FakeTensorMode():
        assert probe(torch.empty(5), 1.0).shape == (5,)
    graphs = []

    def keep(module, inputs):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: probe(x, 3.0) + 1, backend=keep, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert graphs[0][0] is probe.overload
