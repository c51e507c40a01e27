"""The choice of experts by Triton against the torch functions: choices bit for bit, weights, sums
and gradients closely."""

from __future__ import annotations

import pytest
import torch

from helpers import ODD_LOGITS, pairwise
from moesaic.kernels import choice
from moesaic.kernels.choice import choose
from moesaic.kernels.choice_call import ChoiceResult, ChoiceRule, WantedSums
from moesaic.kernels.triton.rows import choose as kernels

RULES = {
    "softmax": ChoiceRule(2, by_sigmoid=False, normalize=True, scale=1.0),
    "switch": ChoiceRule(3, by_sigmoid=False, normalize=False, scale=0.5),
    "sigmoid": ChoiceRule(4, by_sigmoid=True, normalize=True, scale=2.5),
    "plain sigmoid": ChoiceRule(1, by_sigmoid=True, normalize=False, scale=1.0),
    "two best groups": ChoiceRule(
        3, by_sigmoid=True, normalize=True, scale=1.0, num_groups=4, top_groups=2, by_best_two=True
    ),
    "best groups": ChoiceRule(
        2, by_sigmoid=False, normalize=True, scale=1.0, num_groups=2, top_groups=1
    ),
}
SUMS = {
    "no sums": WantedSums(balance=False, z=False, reduced=True),
    "losses": WantedSums(balance=True, z=True, reduced=True),
    "sums": WantedSums(balance=True, z=True, reduced=False),
}
SIZES = [(0, 8), (19, 8), (3, 64)]


def both(monkeypatch, device, logits, rule, wanted, *, valid=None, bias=None, given=None):
    """Return (result, gradient of the logits) of the torch functions and of the kernels."""
    results = []
    for by_triton in (False, True):
        monkeypatch.setattr(choice, "kind_of", lambda _, kind=("cpu", "triton")[by_triton]: kind)
        place = device if by_triton else "cpu"
        leaf = logits.detach().clone().to(place).requires_grad_()
        options = {"valid_T": valid, "bias": bias, "expert": given}
        chosen = choose(
            leaf,
            rule,
            wanted,
            **{k: None if v is None else v.to(place) for k, v in options.items()},
        )
        used = (
            chosen.weight,
            *([chosen.balance] if wanted.balance else []),
            *([chosen.z] if wanted.z else []),
        )
        sum(
            (each * torch.linspace(-1, 2, each.numel(), device=place).view_as(each)).sum()
            for each in used
        ).backward()
        results.append((ChoiceResult(*(each.detach().cpu() for each in chosen)), leaf.grad.cpu()))
    return results


def check(expected, actual):
    (torch_chosen, torch_grad) = expected
    (chosen, grad) = actual
    for name in ("expert", "token", "slot", "counts", "nonfinite", "num_valid"):
        assert torch.equal(getattr(torch_chosen, name), getattr(chosen, name)), name
    for name in ("weight", "balance", "z"):
        torch.testing.assert_close(
            getattr(chosen, name), getattr(torch_chosen, name), equal_nan=True
        )
    torch.testing.assert_close(grad, torch_grad, equal_nan=True, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("rule", "sums", "size", "padded"),
    pairwise(RULES, SUMS, SIZES, (False, True), empty=lambda _, __, size, ___: size[0] == 0),
    ids=str,
)
def test_the_kernels_do_what_the_torch_functions_do(rule, sums, size, padded, device, monkeypatch):
    torch.manual_seed(0)
    logits = (torch.randn(size) * 2).round(decimals=1)  # with ties
    valid = torch.rand(size[0]) < 0.7 if padded else None
    bias = torch.randn(size[1]) * 0.1 if RULES[rule].by_sigmoid else None
    expected, actual = both(
        monkeypatch, device, logits, RULES[rule], SUMS[sums], valid=valid, bias=bias
    )
    check(expected, actual)


@pytest.mark.parametrize("rule", RULES)
def test_odd_rows_are_chosen_and_counted_as_by_torch(rule, device, monkeypatch):
    """NaN, infinities and equal zeros."""
    logits = torch.tensor(list(ODD_LOGITS.values()))
    logits = torch.cat([logits, logits.flip(1)], 1)[:, :8].contiguous()
    torch_chosen, chosen = (
        result[0] for result in both(monkeypatch, device, logits, RULES[rule], SUMS["no sums"])
    )
    assert torch.equal(chosen.expert, torch_chosen.expert)
    assert torch.equal(chosen.counts, torch_chosen.counts)
    assert torch.equal(chosen.nonfinite, torch_chosen.nonfinite)
    torch.testing.assert_close(chosen.weight, torch_chosen.weight, equal_nan=True)


def test_given_experts_are_used_again(device, monkeypatch):
    logits = torch.randn(6, 8)
    given = torch.tensor([[7, 0], [1, 2], [3, 4], [0, 1], [5, 6], [2, 7]]).flatten()
    expected, actual = both(
        monkeypatch, device, logits, RULES["softmax"], SUMS["losses"], given=given
    )
    check(expected, actual)
    assert torch.equal(actual[0].expert, given)


@pytest.mark.parametrize("sums", ["losses", "sums"])
def test_no_program_adds_the_sums_of_all_others(sums, device, monkeypatch):
    """Ten programs in groups of four, of which the last has two."""
    monkeypatch.setattr(kernels, "VALUES", 16)
    monkeypatch.setattr(kernels, "GROUP", 4)
    added = []
    kernel = kernels._sum_kernel

    class Noted:
        def __getitem__(self, grid):
            return lambda floats, *others, **named: (
                added.append(len(floats)) or kernel[grid](floats, *others, **named)
            )

    monkeypatch.setattr(kernels, "_sum_kernel", Noted())
    logits = torch.randn(19, 8)
    logits[3, 2] = torch.nan
    valid = torch.arange(19) != 5
    expected, actual = both(monkeypatch, device, logits, RULES["softmax"], SUMS[sums], valid=valid)
    check(expected, actual)
    assert added == [3]
