"""Built-in and user-defined experts: values, initialisation, experts without tokens."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from helpers import Scripted, agree, pairwise
from moesaic import GatedExperts, Mesh, ModuleExperts, MoE, PlainExperts
from moesaic.errors import InputError
from moesaic.experts import EXPERTS, AbstractExperts
from moesaic.testing.reference import reference_expert
from worlds import on_ranks, refusal

FACTORIES = {
    **EXPERTS,
    "silu": lambda d, h, n: PlainExperts(d, h, n, activation="silu"),
    "plain_bias": lambda d, h, n: PlainExperts(d, h, n, bias=True),
    "gated_bias": lambda d, h, n: GatedExperts(d, h, n, bias=True),
    "modules": lambda d, h, n: ModuleExperts(
        lambda: nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, d)), d, n
    ),
}
COUNTS = [[0], [3], [0, 0], [2, 0, 3], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("name", "counts", "weighted"),
    pairwise(FACTORIES, COUNTS, (True, False), empty=lambda _, counts, __: not any(counts)),
    ids=str,
)
def test_rows_equal_the_reference_row_by_row(name: str, counts: list[int], weighted: bool) -> None:
    experts = FACTORIES[name](6, 5, len(counts)).double()
    rows = torch.randn(sum(counts), 6, dtype=torch.float64)
    weight = torch.rand(len(rows), dtype=torch.float64) if weighted else None
    out = experts(rows, weight, torch.tensor(counts).cumsum(0).to(torch.int32))
    assert out.shape == rows.shape
    expert_of = [e for e, n in enumerate(counts) for _ in range(n)]
    for i, e in enumerate(expert_of):
        expected = reference_expert(experts, e, rows[i]) * (1 if weight is None else weight[i])
        torch.testing.assert_close(out[i], expected)


@pytest.mark.parametrize("name", list(FACTORIES))
def test_an_expert_without_tokens_gets_zero_gradients(name: str) -> None:
    experts: AbstractExperts = FACTORIES[name](8, 8, 3)
    experts(
        torch.randn(5, 8), torch.rand(5), torch.tensor([2, 2, 5], dtype=torch.int32)
    ).sum().backward()
    for key, parameter in experts.named_parameters():
        grad = parameter.grad if "experts." in key else parameter.grad[1]
        assert grad.any() != ("experts.1." in key or "experts." not in key), key


@pytest.mark.parametrize("apply_weight", ["after", "before"])
@pytest.mark.parametrize("name", list(FACTORIES))
def test_the_layer_equals_the_reference(name: str, apply_weight: str) -> None:
    layer = MoE(
        8, 4, 4, 2, experts=FACTORIES[name], shared_hidden=4, apply_weight=apply_weight
    ).double()
    agree(layer, torch.randn(2, 5, 8, dtype=torch.float64))


@pytest.mark.parametrize("name", ["swiglu", "gelu", "plain_bias", "gated_bias"])
def test_every_expert_starts_within_the_bound_of_its_input_width(name: str) -> None:
    experts = FACTORIES[name](64, 16, 5)
    for key, parameter in experts.named_parameters():
        bound = (16 if key in ("w2", "b2") else 64) ** -0.5
        for e in range(5):
            largest = float(parameter[e].detach().abs().max())
            assert 0.8 * bound < largest <= bound, (key, e)


@pytest.mark.parametrize("name", list(FACTORIES))
def test_init_normal_draws_matrices_zeroes_biases_and_leaves_modules(name: str) -> None:
    experts: AbstractExperts = FACTORIES[name](64, 64, 4)
    before = {key: value.clone() for key, value in experts.state_dict().items()}
    experts.init_normal(0.02, 0.005)
    for key, value in experts.state_dict().items():
        if name == "modules":
            assert torch.equal(value, before[key]), key
        elif key.startswith("b"):
            assert not value.any(), key
        else:
            assert float(value.std()) == pytest.approx(0.005 if key == "w2" else 0.02, rel=0.1), key


@pytest.mark.parametrize("name", [key for key in FACTORIES if key != "modules"])
def test_autocast_computes_products_in_16_bit(name: str) -> None:
    experts = FACTORIES[name](8, 8, 2)
    ends = torch.tensor([3, 5], dtype=torch.int32)
    rows = torch.randn(5, 8)
    exact = experts(rows, None, ends)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = experts(rows, None, ends)
    assert exact.dtype == torch.float32
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, rtol=5e-2, atol=5e-2)


class Scale(nn.Module):
    """A user-defined expert with one parameter and no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_a_users_module_is_an_expert() -> None:
    layer = MoE(
        4, 4, 3, 1, router=Scripted, experts=lambda d, h, n: ModuleExperts(Scale, d, n), losses=()
    )
    x = torch.randn(6, 4)
    x[:, 1] = -9.0
    y = layer(x)
    torch.testing.assert_close(y, 3 * x * x[:, :3].softmax(1).amax(1, keepdim=True))
    y.sum().backward()
    factors = [module.factor.grad for module in layer.experts.experts]
    assert float(factors[1]) == 0.0
    assert float(factors[0]) != 0.0


def test_a_module_of_the_wrong_width_is_refused() -> None:
    layer = MoE(4, 4, 2, 2, experts=lambda d, h, n: ModuleExperts(lambda: nn.Linear(4, 5), d, n))
    message = r"a user-defined expert must map \(rows, 4\) to the same shape, got \(6, 5\)"
    with pytest.raises(InputError, match=message):
        layer(torch.randn(3, 4))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(
        InputError,
        match="activation='tanh' is unknown: choose one of gelu, gelu_tanh, relu, relu2, silu",
    ):
        PlainExperts(4, 4, 2, activation="tanh")


def converted_while_held() -> tuple[str, torch.dtype]:
    """Convert a layer on a mesh while somebody refers to a parameter, as DeepSpeed's engine does,
    and then without."""
    layer = MoE(4, 8, 4)
    layer.parallelize(Mesh.create(ep=2), broadcast=True)
    held = weakref.ref(layer.experts.get_parameter("w13"))
    message = refusal(layer.double)
    del held
    return message, layer.double().experts.get_parameter("w13").dtype


def test_spread_experts_that_another_library_holds_are_refused_in_one_line() -> None:
    for message, dtype in on_ranks(2, converted_while_held):
        assert message.startswith(
            "InputError: GatedExperts is spread over ranks and another library already refers "
            "to its"
        )
        assert "\n" not in message
        assert dtype == torch.float64
