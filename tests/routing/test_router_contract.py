"""Tests of what the layer requires of every router. A new line in `ROUTERS` is covered without a
new test."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import DETERMINISTIC, TOP_K, agree, ids_for, make_layer, make_router, pairwise, run
from moesaic import Capacity, finish_step
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import ROUTERS
from moesaic.routing.routing import Choice, Scores

NAMES = list(ROUTERS)


def ask(
    router: AbstractRouter, x: torch.Tensor, top_k: int, valid: torch.Tensor | None = None
) -> tuple[Scores, Choice, torch.Tensor | None]:
    noise = router.draw(len(x), x.device)
    scores = router.scores(x, noise, ids_for(x))
    return scores, router.choose(scores, top_k, valid, noise), noise


@pytest.mark.parametrize(
    ("name", "tokens", "train"),
    pairwise(NAMES, (0, 1, 7), (True, False), empty=lambda _, tokens, __: tokens == 0),
)
def test_scores_choice_and_weights_have_their_shapes(name: str, tokens: int, train: bool) -> None:
    router = make_router(name).train(train)
    top_k = TOP_K.get(name, 2)
    scores, choice, _ = ask(router, torch.randn(tokens, 8), top_k)
    assert {tuple(part.shape) for part in scores} == {(tokens, 4)}
    assert not scores.rank_by.requires_grad
    torch.testing.assert_close(scores.probs.sum(1), torch.ones(tokens))
    weight = router.weigh(scores, choice, top_k)
    assert choice.token.shape == choice.expert.shape == choice.slot.shape == weight.shape
    assert {choice.token.dtype, choice.expert.dtype, choice.slot.dtype} == {torch.int64}
    assert (weight >= 0).all()
    if tokens:
        assert 0 <= int(choice.expert.min()) <= int(choice.expert.max()) < 4
        assert 0 <= int(choice.token.min()) <= int(choice.token.max()) < tokens
    pairs = list(zip(choice.token.tolist(), choice.expert.tolist()))
    assert len(set(pairs)) == len(pairs), "a token goes to an expert once"
    if choice.per_token is not None:
        assert choice.token.tolist() == [t for t in range(tokens) for _ in range(choice.per_token)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_the_arithmetic_has_the_dtype_of_its_input(name: str, dtype: torch.dtype) -> None:
    router = make_router(name)
    top_k = TOP_K.get(name, 2)
    scores, choice, _ = ask(router, torch.randn(5, 8, dtype=dtype), top_k)
    assert scores.logits.dtype == scores.probs.dtype == scores.gates.dtype == dtype
    assert router.weigh(scores, choice, top_k).dtype == dtype


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_the_router_in_float32(name: str, low: torch.dtype) -> None:
    layer = make_layer(name)
    x = torch.randn(16, 8)
    expected = run(layer, x.to(low).float(), token_ids=ids_for(x)).routing
    with torch.autocast("cpu", dtype=low):
        torch.manual_seed(0)
        actual = layer(x, token_ids=ids_for(x), return_routing=True)[1]
    assert actual.weight.dtype == torch.float32
    assert torch.equal(actual.weight, expected.weight)
    assert torch.equal(actual.expert, expected.expert)
    assert actual.losses == expected.losses


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_16_bit_tokens_are_routed_in_float32(name: str, low: torch.dtype) -> None:
    layer = make_layer(name)
    x = torch.randn(16, 8).to(low)
    torch.manual_seed(0)
    y, actual = layer(x, token_ids=ids_for(x), return_routing=True)
    expected = run(layer, x.float(), token_ids=ids_for(x)).routing
    assert y.dtype == low
    assert actual.weight.dtype == torch.float32
    assert torch.equal(actual.weight, expected.weight)


SATURATING = ("sigmoid", "group_limited", "expert_choice")
"""Routers that rank by scores which reach 1 or 0, and then tie, where logits are large."""


@pytest.mark.parametrize(
    ("name", "low", "scale"),
    pairwise(NAMES, (torch.float32, torch.bfloat16, torch.float16), (1.0, 100.0, 300.0, 1e4)),
    ids=str,
)
def test_choices_differ_from_float64_among_equal_scores_only(
    name: str, low: torch.dtype, scale: float
) -> None:
    router = ROUTERS[name](8, 8).to(low).eval()
    top_k = TOP_K.get(name, 2)
    tokens = torch.randn(64, 8).to(low)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.mul_(scale)
    exact_scores, exact_choice, _ = ask(copy.deepcopy(router).double(), tokens.double(), top_k)
    _, choice, _ = ask(router, tokens.float(), top_k)
    pairs = [
        sorted(zip(each.token.tolist(), each.expert.tolist())) for each in (choice, exact_choice)
    ]
    assert name in SATURATING or pairs[0] == pairs[1]
    by = 1 if name == "expert_choice" else 0  # each expert chooses tokens
    size = max(1.0, float(exact_scores.rank_by.detach().abs().max()))
    best = [torch.zeros(64 if by == 0 else 8, dtype=torch.float64) for _ in pairs]
    for total, chosen in zip(best, pairs):
        for pair in chosen:
            total[pair[by]] += exact_scores.rank_by[pair]
    torch.testing.assert_close(best[0], best[1], rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize(
    ("name", "train", "capacity"),
    pairwise(
        NAMES, (True, False), (None, Capacity.fixed(0.75), Capacity.fixed(0.75, order="score"))
    ),
    ids=str,
)
def test_the_layer_equals_the_reference(name: str, train: bool, capacity: Capacity | None) -> None:
    layer = make_layer(name, shared_hidden=4).double().train(train)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    agree(layer, x, token_ids=ids_for(x), capacity=capacity)


# Other routers draw other random numbers for other numbers of tokens, so only these can be compared
# in training.
@pytest.mark.parametrize(
    ("name", "train"), [(n, False) for n in NAMES] + [(n, True) for n in DETERMINISTIC]
)
def test_padding_changes_nothing_for_the_other_tokens(name: str, train: bool) -> None:
    layer = make_layer(name).double().train(train)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    ids = ids_for(x)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [False] * 6])
    upstream = torch.randn_like(x)
    with_padding = run(layer, x, upstream, mask=mask, token_ids=ids)
    alone = run(layer, x[mask], upstream[mask], token_ids=ids[mask])
    assert torch.equal(with_padding.routing.requested, alone.routing.requested)
    assert int(with_padding.routing.num_valid) == 10
    torch.testing.assert_close(with_padding.routing.losses, alone.routing.losses)
    torch.testing.assert_close(with_padding.y[mask], alone.y)
    torch.testing.assert_close(with_padding.dx[mask], alone.dx)
    assert not with_padding.y[~mask].any()
    assert not with_padding.dx[~mask].any()
    for key, grad in alone.grads.items():
        torch.testing.assert_close(with_padding.grads[key], grad, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_padding_only_gives_zeros(name: str) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 3, 8)
    result = run(layer, x, mask=torch.zeros(2, 3, dtype=torch.bool), token_ids=ids_for(x))
    assert not result.y.any()
    assert not result.routing.requested.any()
    assert {float(value) for value in result.routing.losses.values()} == {0.0}
    for grad in result.grads.values():
        assert not grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_call_without_tokens_gives_every_parameter_a_zero_gradient(name: str) -> None:
    layer = make_layer(name, shared_hidden=8)
    x = torch.randn(2, 0, 8)
    result = run(layer, x, token_ids=ids_for(x))
    assert result.y.shape == (2, 0, 8)
    for key, grad in result.grads.items():
        assert not grad.any(), key


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_result(name: str) -> None:
    layer = make_layer(name)
    x = torch.randn(16, 8)
    first, second = (run(layer, x, token_ids=ids_for(x), seed=5) for _ in range(2))
    assert torch.equal(first.y, second.y)
    assert torch.equal(first.dx, second.dx)
    for key in first.grads:
        assert first.grads[key] is second.grads[key] is None or torch.equal(
            first.grads[key], second.grads[key]
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_router_learns_from_the_main_loss(name: str) -> None:
    layer = make_layer(name, losses=())
    x = torch.randn(16, 8)
    grads = run(layer, x, torch.randn(16, 8), token_ids=ids_for(x)).grads
    for key, grad in grads.items():
        if key.startswith("router."):
            assert grad.abs().max() > 0, key


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NAMES)
def test_a_router_that_looks_at_each_token_alone_chooses_the_same_for_it_alone(
    name: str, train: bool
) -> None:
    router = make_router(name).train(train)
    top_k = TOP_K.get(name, 2)
    if router.looks_across_tokens or router.draw(1, torch.device("cpu")) is not None:
        pytest.skip("its choice depends on other tokens, or on chance")
    x = torch.randn(9, 8)
    ids = ids_for(torch.randn(9, 8))
    scores = router.scores(x, None, ids)
    together = router.choose(scores, top_k, None, None)
    weights = router.weigh(scores, together, top_k)
    for token in range(9):
        scores = router.scores(x[token : token + 1], None, ids[token : token + 1])
        alone = router.choose(scores, top_k, None, None)
        assert alone.expert.tolist() == together.expert[together.token == token].tolist()
        torch.testing.assert_close(
            router.weigh(scores, alone, top_k), weights[together.token == token]
        )


@pytest.mark.parametrize("name", NAMES)
def test_finish_step_starts_the_counts_anew(name: str) -> None:
    layer = make_layer(name)
    x = torch.randn(16, 8)
    before = copy.deepcopy(layer.router.state_dict())
    routing = layer(x, token_ids=ids_for(x), return_routing=True)[1]
    assert torch.equal(layer.step_counts, routing.requested)
    finish_step(layer)
    assert not layer.step_counts.any()
    changed = {
        key
        for key, value in layer.router.state_dict().items()
        if not torch.equal(value, before[key])
    }
    assert all(key.endswith("bias") for key in changed)
