"""The constructor's arguments: numbers as capacities, a single loss, devices, dtypes, biases, and
refused values."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import moesaic
from helpers import TOP_K, refused
from moesaic import Capacity, LoadBalance, MoE, PlainExperts, ZLoss
from moesaic.errors import InputError, to_install
from moesaic.routing.routers import ROUTERS


@pytest.mark.parametrize("factor", [1.25, 2])
def test_a_number_is_a_capacity_factor(factor: float) -> None:
    layer = MoE(8, 8, 4, 2, capacity=factor, eval_capacity=2 * factor)
    assert layer.capacity == Capacity.fixed(factor)
    assert layer.eval_capacity == Capacity.fixed(2 * factor)
    x = torch.randn(12, 8)
    one, other = (layer(x, capacity=c, return_routing=True)[1] for c in (0.5, Capacity.fixed(0.5)))
    assert int(one.dropped) == int(other.dropped) > 0


@pytest.mark.parametrize("capacity", ["1.25", True, (1.25,)])
@pytest.mark.parametrize("name", ["capacity", "eval_capacity"])
def test_what_is_no_capacity_is_refused(name: str, capacity: object) -> None:
    with pytest.raises(
        InputError,
        match=rf"MoE: {name}=.* is not a capacity: write Dropless\(\), Capacity.fixed\(1.25\)",
    ):
        MoE(8, 8, 4, 2, **{name: capacity})


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), "1.25"])
def test_a_factor_that_is_no_limit_is_refused(factor: float) -> None:
    assert "a capacity factor must be a finite number above 0" in refused(Capacity.fixed, factor)


@pytest.mark.parametrize("coefficient", [-1, float("inf"), "0.01"])
def test_a_coefficient_that_is_no_number_of_0_or_more_is_refused(coefficient: float) -> None:
    assert "LoadBalance: the coefficient must be a finite number of 0 or more, got" in refused(
        LoadBalance, coefficient
    )


def test_one_loss_needs_no_tuple() -> None:
    assert MoE(8, 8, 4, 2, losses=LoadBalance(0.01)).losses == (LoadBalance(0.01),)
    assert MoE(8, 8, 4, 2, losses=[ZLoss(0.1)]).losses == (ZLoss(0.1),)


@pytest.mark.parametrize("losses", [0.01, None, (0.01,), "load_balance", (LoadBalance,)])
def test_what_is_no_loss_is_refused(losses: object) -> None:
    with pytest.raises(
        InputError, match=r"MoE: losses holds .*, which is not a loss: write losses=\(LoadBalance"
    ):
        MoE(8, 8, 4, 2, losses=losses)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(ROUTERS))
def test_device_and_dtype_are_where_and_what_parameters_are(name: str, dtype: torch.dtype) -> None:
    options = {"device": "meta", "dtype": dtype}
    layer = MoE(8, 8, 4, TOP_K.get(name, 2), router=name, shared_hidden=4, **options)
    for tensor in layer.state_dict().values():
        assert tensor.is_meta
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    real = MoE(8, 8, 4, TOP_K.get(name, 2), router=name, dtype=dtype)
    assert real(torch.randn(3, 8).to(dtype), token_ids=torch.arange(3)).dtype == dtype
    router = ROUTERS[name](8, 4, **options) if name != "group_limited" else None
    for parameter in [] if router is None else router.parameters():
        assert parameter.is_meta
        assert parameter.dtype == dtype
    kept = [
        getattr(module, each)
        for module in layer.router.modules()
        for each in getattr(module, "float32_buffers", ())
    ]
    assert all(buffer.dtype == torch.float32 for buffer in kept)


def test_experts_take_device_and_dtype() -> None:
    experts = PlainExperts(8, 8, 4, bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.is_meta, p.dtype) for p in experts.parameters()} == {(True, torch.bfloat16)}


@pytest.mark.parametrize("experts", ["swiglu", "gelu", "relu"])
def test_named_experts_take_biases(experts: str) -> None:
    layer = MoE(8, 8, 4, 2, experts=experts, bias=True, shared_hidden=4)
    assert "experts.b2" in dict(layer.named_parameters())
    assert ("shared.b13" if experts == "swiglu" else "shared.b1") in dict(layer.named_parameters())


def test_a_function_says_itself_whether_it_has_biases() -> None:
    assert "bias=True is only for experts given by name" in refused(
        MoE, 8, 8, 4, 2, experts=PlainExperts, bias=True
    )


BLOCKED = """import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split('.')[0] == 'torch':
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
"""


WITHOUT_TORCH = f"""{BLOCKED}
import moesaic, traceback
print(*dir(moesaic))
for name in ("MoE", "collect_losses", "Mesh"):
    try:
        exec(f"from moesaic import {{name}}")
    except ImportError:
        traceback.print_exc()
"""


def test_names_are_listed_and_say_what_to_install_before_they_are_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if line.startswith("ImportError")] == [
        f"ImportError: moesaic.{name} needs torch: {to_install('.[train]')}"
        for name in ("MoE", "collect_losses", "Mesh")
    ]
    assert "During handling" not in done.stderr
    assert done.stdout.split() == sorted([*moesaic.__all__, "__version__"])
    assert {
        "MoE",
        "parallelize_model",
        "prepare_ddp",
        "parameter_groups",
        "shard_over_data",
    } <= set(moesaic.__all__)
    assert all(hasattr(moesaic, name) for name in moesaic.__all__)
    assert dir(moesaic) == done.stdout.split(), (
        "the modules that were imported since then are no part of the interface"
    )
