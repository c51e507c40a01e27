"""Tests of each router's own rule. `test_router_contract.py` tests what all routers must do."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch

from helpers import make_layer, make_router, refused
from moesaic import MoE
from moesaic.errors import InputError
from moesaic.routing.router import AbstractRouter
from moesaic.routing.routers import (
    CosineTopK,
    ExpertChoice,
    GroupLimited,
    GShardTop2,
    Hash,
    NoisyTopK,
    SigmoidTopK,
    SoftmaxTopK,
    group_limited_sigmoid,
)
from moesaic.routing.routers.base import balanced_assignment
from moesaic.routing.routing import Choice, Scores

CPU = torch.device("cpu")


def ask(
    router: AbstractRouter, x: torch.Tensor, top_k: int, noise: torch.Tensor | None = None
) -> tuple[Scores, Choice]:
    scores = router.scores(x, noise, None)
    return scores, router.choose(scores, top_k, None, noise)


def of_logits(logits: torch.Tensor) -> Scores:
    probs = logits.softmax(-1)
    return Scores(logits, probs, probs, logits)


def test_softmax_after_normalises_over_the_chosen_and_before_over_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    choice = SoftmaxTopK(3, 3).choose(of_logits(logits), 2, None, None)
    after = SoftmaxTopK(3, 3).weigh(of_logits(logits), choice, 2)
    before = SoftmaxTopK(3, 3, normalize="before").weigh(of_logits(logits), choice, 2)
    assert choice.expert.tolist() == [1, 2]
    torch.testing.assert_close(after, torch.tensor([3.0, 2.0]).softmax(0))
    torch.testing.assert_close(before, logits.softmax(-1)[0, [1, 2]])


def test_sigmoid_bias_moves_the_choice_but_not_the_weights() -> None:
    router = SigmoidTopK(8, 4)
    x = torch.randn(5, 8)
    router.bias[3] = 10.0
    scores, choice = ask(router, x, 2)
    assert choice.expert.view(5, 2)[:, 0].tolist() == [3] * 5
    gates = (x @ router.weight.T).sigmoid()
    chosen = gates.gather(1, choice.expert.view(5, 2))
    torch.testing.assert_close(
        router.weigh(scores, choice, 2).view(5, 2), chosen / chosen.sum(1, keepdim=True)
    )


def test_sigmoid_scale_and_normalize_do_what_they_say() -> None:
    x = torch.randn(5, 8)
    scaled = SigmoidTopK(8, 4, scale=2.5)
    plain = SigmoidTopK(8, 4, normalize=False)
    scores, choice = ask(scaled, x, 2)
    torch.testing.assert_close(
        scaled.weigh(scores, choice, 2).view(5, 2).sum(1), torch.full((5,), 2.5)
    )
    scores, choice = ask(plain, x, 2)
    assert torch.equal(plain.weigh(scores, choice, 2), scores.gates[choice.token, choice.expert])


def test_sigmoid_update_is_the_sign_of_the_shortfall() -> None:
    router = SigmoidTopK(8, 4, bias_rate=0.5)
    router.update(torch.tensor([1, 5, 3, 3]))
    assert router.bias.tolist() == [0.5, -0.5, 0.0, 0.0]
    router.update(torch.tensor([0, 0, 0, 8]))
    assert router.bias.tolist() == [1.0, 0.0, 0.5, -0.5]
    router.update(torch.zeros(4, dtype=torch.int64))
    assert router.bias.tolist() == [1.0, 0.0, 0.5, -0.5]


def test_noisy_adds_noise_in_training_only() -> None:
    router = make_router("noisy")
    x = torch.randn(6, 8)
    assert router.draw(6, CPU).shape == (6, 4)
    assert router.eval().draw(6, CPU) is None
    clean = router.scores(x, None, None).logits
    torch.testing.assert_close(clean, x @ router.weight.T)
    noise = torch.randn(6, 4)
    deviation = torch.log1p(torch.exp(x @ router.noise_weight.T))
    torch.testing.assert_close(router.scores(x, noise, None).logits, clean + noise * deviation)


def test_noisy_starts_without_learnt_noise() -> None:
    assert not NoisyTopK(8, 4).noise_weight.any()


def test_cosine_temperature_stops_at_its_floor() -> None:
    router = CosineTopK(8, 4, floor=0.05, temperature=0.07)
    x = torch.randn(6, 8)
    cosine = router.scores(x, None, None).logits * 0.07
    assert cosine.abs().max() <= 1 + 1e-5
    with torch.no_grad():
        router.log_temperature.fill_(-50.0)
    torch.testing.assert_close(router.scores(x, None, None).logits, cosine / 0.05)


def test_cosine_ignores_the_length_of_a_token() -> None:
    router = CosineTopK(8, 4)
    x = torch.randn(6, 8)
    torch.testing.assert_close(
        router.scores(x, None, None).probs, router.scores(7 * x, None, None).probs
    )


@pytest.mark.parametrize("rank_by", ["best", "best_two"])
def test_group_limited_never_leaves_its_groups(rank_by: str) -> None:
    router = GroupLimited(
        make_router("sigmoid", num_experts=12), num_groups=4, top_groups=2, rank_groups_by=rank_by
    )
    _, choice = ask(router, torch.randn(200, 8), 6)
    groups = choice.expert.view(200, 6) // 3
    assert all(len(set(row)) == 2 for row in groups.tolist())
    assert all(len(set(row)) == 6 for row in choice.expert.view(200, 6).tolist())


@pytest.mark.parametrize(("rank_by", "group"), [("best", 0), ("best_two", 1)])
def test_groups_rank_by_their_best_or_by_the_sum_of_their_two_best(
    rank_by: str, group: int
) -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0, 6.0, 5.0, -9.0]])
    router = GroupLimited(SoftmaxTopK(6, 6), num_groups=2, top_groups=1, rank_groups_by=rank_by)
    choice = router.choose(of_logits(logits), 2, None, None)
    assert (choice.expert // 3).tolist() == [group, group]


def test_group_limited_weighs_and_updates_as_the_router_inside() -> None:
    router = group_limited_sigmoid(8, 8, bias_rate=0.25)
    scores, choice = ask(router, torch.randn(5, 8), 2)
    assert torch.equal(router.weigh(scores, choice, 2), router.inner.weigh(scores, choice, 2))
    router.update(torch.tensor([8, 0, 0, 0, 0, 0, 0, 0]))
    assert router.inner.bias.tolist() == [-0.25] + [0.25] * 7


@pytest.mark.parametrize("name", ["expert_choice", "base", "hash", "group_limited"])
def test_group_limited_refuses_routers_that_do_not_pick_by_rank(name: str) -> None:
    with pytest.raises(
        InputError, match=r"GroupLimited cannot wrap .*: give it a router that ranks by scores"
    ):
        GroupLimited(make_router(name), num_groups=2, top_groups=1)


def test_gshard_samples_its_second_choice_in_proportion() -> None:
    tokens = 20_000
    logits = torch.tensor([[3.0, 0.0, 1.0, 2.0]]).log_softmax(-1).repeat(tokens, 1)
    router = GShardTop2(4, 4)
    choice = router.choose(of_logits(logits), 2, None, router.draw(tokens, CPU))
    first, second = choice.expert.view(tokens, 2).unbind(1)
    assert set(first.tolist()) == {0}
    share = second.bincount(minlength=4) / tokens
    expected = torch.tensor([0.0, 1.0, 2.7183, 7.3891]) / 11.1074
    assert (share - expected).abs().max() < 0.015
    assert share[0] == 0


def test_gshard_is_greedy_in_evaluation() -> None:
    router = GShardTop2(8, 4).eval()
    assert router.draw(50, CPU) is None
    scores, choice = ask(router, torch.randn(50, 8), 2)
    assert torch.equal(choice.expert.view(50, 2), scores.logits.topk(2).indices)
    torch.testing.assert_close(router.weigh(scores, choice, 2).view(50, 2).sum(1), torch.ones(50))


def test_gshard_random_dispatch_sends_the_second_copy_with_twice_its_weight() -> None:
    tokens = 20_000
    gates = torch.tensor([[0.8, 0.2]]).repeat(tokens, 1)
    router = GShardTop2(2, 2, second="random_dispatch")
    choice = router.choose(of_logits(gates.log()), 2, None, router.draw(tokens, CPU))
    sent = choice.sent.view(tokens, 2).double().mean(0)
    assert sent[0] == 1
    assert abs(float(sent[1]) - 0.4) < 0.015


def test_copies_that_gshard_holds_back_are_in_no_count() -> None:
    layer = MoE(8, 8, 4, 2, router=lambda d, n: GShardTop2(d, n, second="random_dispatch"))
    routing = layer(torch.randn(64, 8) * 4, return_routing=True)[1]
    assert len(routing.token) == int(routing.requested.sum()) < 128
    assert int(routing.dropped) == 0


@pytest.mark.parametrize(
    ("rows", "experts"), [(0, 3), (1, 3), (4, 2), (5, 2), (6, 3), (5, 1), (2, 4)]
)
def test_the_balanced_assignment_equals_brute_force(rows: int, experts: int) -> None:
    scores = np.random.default_rng(0).normal(size=(rows, experts))
    seats = -(-rows // experts)
    best = max(
        sum(scores[row, e] for row, e in enumerate(assignment))
        for assignment in itertools.product(range(experts), repeat=rows)
        if all(assignment.count(e) <= seats for e in range(experts))
    )
    actual = balanced_assignment(scores)
    assert np.bincount(actual, minlength=experts).max(initial=0) <= seats
    assert scores[np.arange(rows), actual].sum() == pytest.approx(best)


def test_base_is_balanced_in_training_and_greedy_in_evaluation() -> None:
    layer = make_layer("base")
    x = torch.randn(16, 8) + 2
    assert layer(x, return_routing=True)[1].counts.tolist() == [4, 4, 4, 4]
    routing = layer.eval()(x, return_routing=True)[1]
    assert torch.equal(routing.expert, (x @ layer.router.weight.T).argmax(1))
    torch.testing.assert_close(routing.weight, (x @ layer.router.weight.T).amax(1).sigmoid())


def test_base_balances_the_tokens_that_are_not_padding() -> None:
    mask = torch.arange(16) < 8
    routing = make_layer("base")(torch.randn(16, 8), mask=mask, return_routing=True)[1]
    assert routing.counts.tolist() == [2, 2, 2, 2]


def test_base_takes_one_expert_in_every_call() -> None:
    with pytest.raises(
        InputError, match="the BASE router assigns one expert per token, got top_k=2: set top_k=1"
    ):
        make_layer("base")(torch.randn(4, 8), top_k=2)
    assert "got top_k=2: set top_k=1" in refused(MoE, 8, 8, 4, 1, router="base", eval_top_k=2)


@pytest.mark.parametrize(
    ("tokens", "top_k", "each"), [(8, 2, 4), (7, 2, 4), (5, 1, 2), (3, 4, 3), (0, 2, 0)]
)
def test_expert_choice_takes_exactly_its_share(tokens: int, top_k: int, each: int) -> None:
    layer = make_layer("expert_choice", top_k=top_k)
    routing = layer(torch.randn(tokens, 8), return_routing=True)[1]
    assert routing.counts.tolist() == [each] * 4


def test_expert_choice_takes_the_highest_scores_among_valid_tokens() -> None:
    router = ExpertChoice(8, 4)
    x = torch.randn(10, 8)
    valid = torch.arange(10) != 3
    scores = router.scores(x, None, None)
    choice = router.choose(scores, 1, valid, None)
    for e in range(4):
        ranking = [t for t in scores.probs[:, e].argsort(descending=True).tolist() if t != 3]
        assert choice.token[choice.expert == e].tolist() == ranking[:3]


def test_hash_reads_ids_only_and_gives_each_token_different_experts() -> None:
    layer = make_layer("hash", num_experts=6, top_k=3).eval()
    ids = torch.randint(0, 100_000, (200,))
    first = layer(torch.randn(200, 8), token_ids=ids, return_routing=True)[1]
    second = layer(torch.randn(200, 8), token_ids=ids, return_routing=True)[1]
    assert torch.equal(first.expert, second.expert)
    assert all(len(set(row)) == 3 for row in first.expert.view(200, 3).tolist())
    torch.testing.assert_close(first.weight, torch.full((600,), 1 / 3))
    assert (first.counts > 60).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hash_takes_the_tables_experts_however_many_there_are(dtype: torch.dtype) -> None:
    """bfloat16 has no whole numbers between 256 and 258, float16 none between 2048 and 2050."""
    router = Hash(8, 4096, buckets=64)
    ids = torch.arange(64)
    scores = router.scores(torch.zeros(64, 8, dtype=dtype), None, ids)
    chosen = router.choose(scores, 8, None, None).expert.view(64, 8)
    assert torch.equal(chosen, router.table[:, :8].long())


def test_hash_tables_differ_by_seed_only() -> None:
    assert torch.equal(Hash(8, 4, buckets=64).table, Hash(8, 4, buckets=64).table)
    assert not torch.equal(Hash(8, 4, buckets=64).table, Hash(8, 4, buckets=64, seed=1).table)


BAD = [
    (
        lambda: SoftmaxTopK(0, 4),
        "a router needs dim and num_experts of at least 1, got dim=0, num_experts=4",
    ),
    (
        lambda: SoftmaxTopK(8, 4).check(1),
        'top_k=1 with normalize="after" gives every token weight 1',
    ),
    (lambda: SoftmaxTopK(8, 4, scale="2"), "scale='2': must be a finite number"),
    (
        lambda: SoftmaxTopK(8, 4, normalize="sum"),
        "normalize='sum' is unknown: write normalize=\"before\"",
    ),
    (lambda: SigmoidTopK(8, 4).check(1), "top_k=1 with normalize=True .* normalize=False"),
    (
        lambda: NoisyTopK(8, 4).check(1),
        'top_k=1 with normalize="after" .* write normalize="before"',
    ),
    (
        lambda: CosineTopK(8, 4, floor=0.0),
        "needs 0 < floor <= temperature, got floor=0.0, temperature=0.07",
    ),
    (
        lambda: GShardTop2(8, 4).check(1),
        "the GShard router chooses two experts per token, got top_k=1: set top_k=2",
    ),
    (lambda: GShardTop2(8, 4, second="best"), "second='best' is unknown: write second=\"sampled\""),
    (
        lambda: GShardTop2(8, 1).check(2),
        "top_k=2 does not fit num_experts=1: choose 1 <= top_k <= 1",
    ),
    (lambda: Hash(8, 4, buckets=0), "a hash router needs at least one bucket, got buckets=0"),
    (
        lambda: group_limited_sigmoid(8, 6),
        "num_groups=4 does not divide num_experts=6: choose a divisor of it",
    ),
    (
        lambda: group_limited_sigmoid(8, 8, top_groups=5),
        "top_groups=5 does not fit num_groups=4: choose 1 to 4",
    ),
    (
        lambda: group_limited_sigmoid(8, 8, top_groups=1).check(3),
        "top_k=3 exceeds the 2 experts in 1 of 4 groups",
    ),
    (
        lambda: GroupLimited(SoftmaxTopK(8, 4), num_groups=2, top_groups=1, rank_groups_by="sum"),
        "rank_groups_by='sum' is unknown",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_settings_are_refused_in_one_line(make, message: str) -> None:
    assert re.search(message, refused(make))
