"""Tests of capacities and of the admission of copies, which is compared with a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import Scripted, refused
from moesaic import Capacity, Dropless, MoE
from moesaic.errors import InputError
from moesaic.routing.capacity import admit
from moesaic.routing.routing import Choice
from moesaic.testing.reference import Copy, reference_admission


def rows(capacity: Capacity, requested: list[int], num_valid: int, top_k: int) -> int:
    return int(capacity.rows(torch.tensor(requested), torch.tensor(num_valid), top_k))


def choice_of(experts: list[list[int]]) -> Choice:
    """Return the choice for each token's list of experts, best first; lists may differ in
    length."""
    flat = [(t, e, s) for t, row in enumerate(experts) for s, e in enumerate(row)]
    token, expert, slot = (
        torch.tensor([entry[i] for entry in flat], dtype=torch.int64) for i in range(3)
    )
    return Choice(token, expert, slot)


def test_dropless_has_no_limit() -> None:
    assert Dropless().rows(torch.tensor([9, 0]), torch.tensor(9), 1) is None


def test_only_what_drops_has_an_order() -> None:
    assert not hasattr(Dropless(), "order")
    by_score = [
        Dropless(),
        Capacity.fixed(1.0),
        Capacity.fixed(1.0, order="score"),
        Capacity.fitted(order="score"),
    ]
    assert [capacity.admits_by_score for capacity in by_score] == [False, False, True, True]


def test_fixed_is_the_factor_times_the_mean_load_rounded_up() -> None:
    assert rows(Capacity.fixed(1.0), [3, 3, 3, 3], num_valid=6, top_k=2) == 3
    assert rows(Capacity.fixed(1.25), [6, 2, 2, 2], num_valid=6, top_k=2) == 4  # 3.75
    assert rows(Capacity.fixed(0.5), [6, 2, 2, 2], num_valid=6, top_k=2) == 2  # 1.5
    assert rows(Capacity.fixed(4.0), [1, 1, 1, 1], num_valid=2, top_k=2) == 4


def test_fitted_is_what_the_fullest_expert_needs() -> None:
    assert rows(Capacity.fitted(), [5, 1, 0, 0], num_valid=6, top_k=1) == 5


def test_fitted_at_most_is_the_smaller_of_the_two() -> None:
    assert rows(Capacity.fitted(at_most=2.0), [5, 1, 0, 0], num_valid=6, top_k=1) == 3
    assert rows(Capacity.fitted(at_most=2.0), [2, 2, 1, 1], num_valid=6, top_k=1) == 2


def test_no_valid_token_gives_no_row() -> None:
    assert rows(Capacity.fixed(1.25), [0, 0], num_valid=0, top_k=2) == 0
    assert rows(Capacity.fitted(), [0, 0], num_valid=0, top_k=2) == 0


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("make", [Capacity.fixed, lambda factor: Capacity.fitted(at_most=factor)])
def test_a_factor_that_is_no_positive_number_is_refused(make, factor: float) -> None:
    with pytest.raises(
        InputError, match=r"a capacity factor must be .*above 0, got .*write Dropless\(\)"
    ):
        make(factor)


@pytest.mark.parametrize(
    "make", [lambda: Capacity.fixed(1.0, order="best"), lambda: Capacity.fitted(order="best")]
)
def test_an_unknown_order_is_refused(make) -> None:
    assert 'order=\'best\' is unknown: write order="position" or order="score"' in refused(make)


def test_first_choices_come_before_second_choices() -> None:
    choice = choice_of([[0, 1], [1, 0], [1, 0]])
    # expert 0: token 0 first, then tokens 1 and 2 second; expert 1: tokens 1 and 2 first, then
    # token 0 second
    assert admit(choice, None, torch.tensor(2), None, 2).nonzero().flatten().tolist() == [
        0,
        2,
        3,
        4,
    ]


def test_copies_held_back_take_no_room() -> None:
    choice = choice_of([[0], [0], [0]])
    alive = torch.tensor([False, True, True])
    assert admit(choice, alive, torch.tensor(2), None, 1).nonzero().flatten().tolist() == [1, 2]
    assert admit(choice, alive, None, None, 1).nonzero().flatten().tolist() == [1, 2]
    assert admit(choice, None, None, None, 1) is None


@given(data=st.data())
def test_admission_equals_the_loop(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 4))
    top_k = data.draw(st.integers(1, num_experts))
    experts = data.draw(
        st.lists(st.permutations(range(num_experts)).map(lambda p: p[:top_k]), max_size=8)
    )
    limit = data.draw(st.integers(0, 5))
    order = data.draw(st.sampled_from(["position", "score"]))
    choice = choice_of(experts)
    weights = torch.tensor(
        data.draw(
            st.lists(
                st.sampled_from([0.1, 0.2, 0.7]),
                min_size=len(choice.token),
                max_size=len(choice.token),
            )
        ),
        dtype=torch.float32,
    )
    alive = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(weights), max_size=len(weights))),
        dtype=torch.bool,
    )
    # The best weight of a token is that of its alive copies; the reference does not see the other
    # copies.
    best = torch.zeros(len(experts)).scatter_reduce(0, choice.token, weights * alive, "amax")
    copies = [
        Copy(t, e, s, w)
        for t, e, s, w, a in zip(
            choice.token.tolist(), choice.expert.tolist(), choice.slot.tolist(), weights, alive
        )
        if a
    ]
    expected = sorted(
        (c.token, c.slot, c.expert) for c in reference_admission(copies, limit, order)
    )
    sent = admit(
        choice, alive, torch.tensor(limit), best if order == "score" else None, num_experts
    )
    indices = sent.nonzero().flatten()
    actual = [(int(choice.token[i]), int(choice.slot[i]), int(choice.expert[i])) for i in indices]
    assert actual == expected


def layer_with_one_full_expert(**options: object) -> tuple[MoE, torch.Tensor]:
    """Return a layer and four tokens that all choose expert 0."""
    layer = MoE(4, 4, 2, 1, router=Scripted, losses=(), **options)
    return layer, torch.tensor([[2.0, 0.0, 1.0, 1.0]]).repeat(4, 1) + torch.tensor(
        [0.0, 0.3, 0.1, 0.2]
    ).view(4, 1) * (torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_dropped_tokens_contribute_zero_and_are_counted() -> None:
    layer, x = layer_with_one_full_expert(capacity=Capacity.fixed(1.0))
    y, routing = layer(x, return_routing=True)
    assert routing.counts.tolist() == [2, 0]
    assert routing.requested.tolist() == [4, 0]
    assert int(routing.dropped) == 2
    assert int(routing.capacity) == 2
    assert routing.token.tolist() == [0, 1]
    assert y[:2].abs().min() > 0
    assert not y[2:].any()


def test_by_score_the_layer_serves_the_surest_tokens() -> None:
    layer, x = layer_with_one_full_expert(capacity=Capacity.fixed(1.0, order="score"))
    assert layer(x, return_routing=True)[1].token.tolist() == [1, 3]
