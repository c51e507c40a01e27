"""Tests of auxiliary losses: values, gradients, levels, injection, scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from helpers import Scripted, agree, make_layer, run
from moesaic import Capacity, Importance, LoadBalance, MoE, ZLoss, finish_step, set_loss_scale
from moesaic.errors import InputError
from moesaic.routing.losses import AbstractLoss, RouterStatistics, Sequences
from moesaic.routing.router import token_choice
from moesaic.routing.routing import Scores

ALL_LOSSES = [
    LoadBalance(0.3),
    LoadBalance(0.3, level="sequence"),
    LoadBalance(0.3, level="global_batch"),
    Importance(0.3),
    ZLoss(0.3),
]


def values(layer: MoE, x: torch.Tensor, **options: object) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in layer(x, return_routing=True, **options)[1].losses.items()
    }


def scripted(*losses: AbstractLoss, top_k: int = 1, **options: object) -> MoE:
    return MoE(2, 4, 2, top_k, router=Scripted, losses=losses, **options)


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("router", ["softmax", "sigmoid", "expert_choice"])
def test_value_and_gradient_equal_the_independent_formula(loss: AbstractLoss, router: str) -> None:
    layer = make_layer(router, losses=(loss,)).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 3:] = mask[2] = False
    layer(torch.randn(4, 8, dtype=torch.float64))  # earlier counts, for the global batch
    agree(layer, x, mask=mask)


def test_load_balance_is_one_when_balanced_and_num_experts_when_collapsed() -> None:
    even = torch.tensor([[30.0, -30.0], [-30.0, 30.0]])
    assert values(scripted(LoadBalance(1.0)), even)["load_balance"] == pytest.approx(1.0)
    one = torch.tensor([[30.0, -30.0], [30.0, -30.0]])
    assert values(scripted(LoadBalance(1.0)), one)["load_balance"] == pytest.approx(2.0)


def test_the_sequence_level_sees_an_imbalance_that_the_micro_batch_hides() -> None:
    x = torch.tensor([[[30.0, -30.0]] * 3, [[-30.0, 30.0]] * 3])
    layer = scripted(LoadBalance(1.0), LoadBalance(1.0, level="sequence"))
    assert values(layer, x) == pytest.approx({"load_balance": 1.0, "load_balance_sequence": 2.0})


def test_the_sequence_level_weighs_sequences_by_their_length() -> None:
    x = torch.tensor([[[30.0, -30.0]] * 4, [[30.0, -30.0], [-30.0, 30.0]] * 2])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    layer = scripted(LoadBalance(1.0, level="sequence"))
    assert values(layer, x, mask=mask)["load_balance_sequence"] == pytest.approx(
        (4 * 2 + 2 * 1) / 6
    )


def test_the_global_batch_level_counts_since_the_last_step() -> None:
    to_first = torch.tensor([[30.0, -30.0]] * 3)
    to_second = torch.tensor([[-30.0, 30.0]])
    layer = scripted(LoadBalance(1.0, level="global_batch"))
    assert values(layer, to_first)["load_balance_global_batch"] == pytest.approx(2.0)
    assert values(layer, to_second)["load_balance_global_batch"] == pytest.approx(2 * 1 / 4)
    finish_step(layer)
    assert values(layer, to_second)["load_balance_global_batch"] == pytest.approx(2.0)


def test_importance_is_the_squared_coefficient_of_variation() -> None:
    x = torch.tensor([[30.0, -30.0], [30.0, -30.0], [30.0, -30.0], [-30.0, 30.0]])
    # loads 3 and 1, mean 2, var 1
    assert values(scripted(Importance(1.0)), x)["importance"] == pytest.approx(1 / 4)


def test_z_loss_is_the_mean_squared_logsumexp() -> None:
    x = torch.tensor([[0.0, 0.0], [math.log(2), math.log(2)]])
    expected = (math.log(2) ** 2 + math.log(4) ** 2) / 2
    assert values(scripted(ZLoss(1.0)), x)["z_loss"] == pytest.approx(expected)


def test_losses_are_counted_before_capacity() -> None:
    x = torch.randn(12, 8)
    layer = make_layer(losses=tuple(ALL_LOSSES))
    layer.eval()
    assert values(layer, x) == values(layer, x, capacity=Capacity.fixed(0.25))


@pytest.mark.parametrize(
    "loss", [LoadBalance(0.1), Importance(0.1), ZLoss(0.1)], ids=lambda loss: loss.name
)
def test_the_shape_of_the_batch_does_not_change_the_loss_or_its_gradient(
    loss: AbstractLoss,
) -> None:
    layer = make_layer(losses=(loss,)).double()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    zero = torch.zeros_like(x)
    as_sequences = run(layer, x, zero)
    as_rows = run(layer, x.view(12, 8), zero.view(12, 8))
    assert torch.equal(as_sequences.routing.losses[loss.name], as_rows.routing.losses[loss.name])
    torch.testing.assert_close(as_sequences.grads["router.weight"], as_rows.grads["router.weight"])
    assert as_rows.grads["router.weight"].abs().max() > 0


def test_twice_the_same_tokens_give_the_same_loss() -> None:
    layer = make_layer(losses=tuple(ALL_LOSSES)).double().eval()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    assert values(layer, torch.cat([x, x])) == pytest.approx(values(layer, x))


def test_accumulated_shares_give_the_gradient_of_the_whole_batch() -> None:
    layer = make_layer(losses=(ZLoss(0.1),)).double()
    x = torch.randn(9, 8, dtype=torch.float64)
    whole = run(layer, x, torch.zeros_like(x)).grads["router.weight"]
    layer.zero_grad()
    for part in (x[:6], x[6:]):
        share = len(part) / len(x)
        set_loss_scale(layer, share)
        (share * layer(part).mul(0).sum()).backward()
    torch.testing.assert_close(layer.router.weight.grad, whole)


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=lambda loss: loss.name)
def test_the_gradient_reaches_the_router_without_a_main_gradient(loss: AbstractLoss) -> None:
    layer = make_layer(losses=(loss,))
    grads = run(layer, torch.randn(2, 6, 8), torch.zeros(2, 6, 8)).grads
    assert grads["router.weight"].abs().max() > 0
    assert not grads["experts.w13"].any()


def test_the_coefficient_and_the_scale_multiply_the_gradient() -> None:
    x = torch.randn(6, 8, dtype=torch.float64)
    zero = torch.zeros(6, 8, dtype=torch.float64)
    torch.manual_seed(3)
    layer = make_layer(losses=(ZLoss(0.1),)).double()
    once = run(layer, x, zero).grads["router.weight"]
    set_loss_scale(layer, 0.25)
    torch.testing.assert_close(run(layer, x, zero).grads["router.weight"], 0.25 * once)
    layer.losses = (ZLoss(0.2),)
    torch.testing.assert_close(run(layer, x, zero).grads["router.weight"], 0.5 * once)


def test_the_scale_is_read_in_backward() -> None:
    layer = make_layer(losses=(ZLoss(0.1),))
    x = torch.randn(6, 8)
    once = run(layer, x, torch.zeros(6, 8)).grads["router.weight"]
    layer.zero_grad()
    y = layer(x)
    set_loss_scale(layer, 0.5)
    (y * 0).sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, 0.5 * once)


def test_set_loss_scale_reaches_every_layer() -> None:
    model = nn.Sequential(make_layer(), nn.Linear(8, 8), nn.Sequential(make_layer()))
    set_loss_scale(model, 0.5)
    assert [float(model[0].loss_scale), float(model[2][0].loss_scale)] == [0.5, 0.5]


def test_nothing_is_injected_in_evaluation() -> None:
    layer = make_layer(losses=tuple(ALL_LOSSES)).eval()
    result = run(layer, torch.randn(6, 8), torch.zeros(6, 8))
    assert not result.grads["router.weight"].any()
    assert set(result.routing.losses) == {loss.name for loss in ALL_LOSSES}


def test_nothing_is_injected_without_gradients() -> None:
    layer = make_layer()
    with torch.no_grad():
        y = layer(torch.randn(6, 8))
    assert not y.requires_grad


def test_reported_losses_carry_no_gradient() -> None:
    routing = make_layer(losses=tuple(ALL_LOSSES))(torch.randn(6, 8), return_routing=True)[1]
    assert not any(value.requires_grad for value in routing.losses.values())


def test_padding_of_any_value_leaves_losses_finite() -> None:
    layer = make_layer(losses=tuple(ALL_LOSSES))
    x = torch.randn(2, 4, 8)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, 2:] = False
    clean = layer.eval()(x, mask=mask, return_routing=True)[1].losses
    x[1, 2:] = float("nan")
    assert layer(x, mask=mask, return_routing=True)[1].losses == clean


@pytest.mark.parametrize("make", [LoadBalance, Importance, ZLoss])
@pytest.mark.parametrize("coefficient", [-0.1, float("nan"), float("inf")])
def test_a_coefficient_that_is_no_number_of_0_or_more_is_refused(make, coefficient: float) -> None:
    message = (
        f"{make.__name__}: the coefficient must be a finite number of 0 or more, got {coefficient}"
    )
    with pytest.raises(InputError, match=message):
        make(coefficient)


def statistics(
    with_importance: bool = True, dtype: torch.dtype = torch.float32, **changes: object
) -> RouterStatistics:
    logits = torch.zeros(3, 2, dtype=dtype)
    choice = token_choice(torch.tensor([[0, 1], [1, 0], [0, 1]]))
    arguments = {"alive_N": torch.tensor([True] * 5 + [False]), "valid_T": None}
    arguments |= {
        "sequences": Sequences(),
        "earlier_counts_E": None,
        "with_importance": with_importance,
        "with_logsumexp": False,
        **changes,
    }
    weight = torch.arange(1.0, 7.0, dtype=dtype, requires_grad=True)
    return RouterStatistics.of(
        Scores(logits, logits.softmax(-1), logits, logits), choice, weight, **arguments
    )


def test_counts_are_exact_beyond_the_integers_of_float32() -> None:
    sums = statistics(earlier_counts_E=torch.tensor([2**24 + 3, 2**24 + 2]))
    assert sums.counts_GE.tolist() == [[3.0, 2.0]]
    # in float32 the first would become 2**24 + 8
    assert sums.step_counts_E.tolist() == [2**24 + 6, 2**24 + 4]


def test_importance_sums_the_living_weights_when_a_loss_asks() -> None:
    sums = statistics()
    assert sums.importance_E.tolist() == [1.0 + 4.0 + 5.0, 2.0 + 3.0]
    assert sums.importance_E.requires_grad
    assert statistics(with_importance=False).importance_E is None
    assert [loss.name for loss in ALL_LOSSES if loss.needs_importance] == ["importance"]


def test_the_logsumexp_is_summed_when_a_loss_asks() -> None:
    assert float(statistics(with_logsumexp=True).logsumexp_squared) == pytest.approx(
        3 * math.log(2) ** 2
    )
    assert float(statistics().logsumexp_squared) == 0
    assert [loss.name for loss in ALL_LOSSES if loss.needs_logsumexp] == ["z_loss"]


def test_only_the_global_batch_reads_the_counts_of_the_step() -> None:
    assert [loss.name for loss in ALL_LOSSES if loss.needs_step] == ["load_balance_global_batch"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(
        InputError, match="level='batch' is unknown: write micro_batch, sequence or global_batch"
    ):
        LoadBalance(0.1, level="batch")


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_keeps_its_scale_in_float32(low: torch.dtype) -> None:
    layer = make_layer().to(low)
    for scale in (1 / 3, 2.0**17):
        set_loss_scale(layer, scale)
        assert float(layer.loss_scale) == pytest.approx(scale, rel=1e-6)
