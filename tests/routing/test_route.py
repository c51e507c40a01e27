"""Tests of the route stage: its record, its replay and its counts."""

from __future__ import annotations

import pytest
import torch

from helpers import DETERMINISTIC, Scripted, ids_for, make_router
from moesaic import Capacity, Dropless, LoadBalance
from moesaic.routing.route import Routed, TokenInfo, route
from moesaic.routing.routers import ROUTERS


def routed(name: str, x: torch.Tensor, **options: object) -> Routed:
    options.setdefault("capacity", Dropless())
    options.setdefault("top_k", 1 if name in ("base", "switch") else 2)
    batch = TokenInfo(token_ids=ids_for(x), valid_T=options.pop("valid_T", None))
    torch.manual_seed(1)
    return route(make_router(name), x, batch=batch, **options)


@pytest.mark.parametrize("capacity", [Dropless(), Capacity.fixed(0.5)], ids=["dropless", "fixed"])
@pytest.mark.parametrize("name", list(ROUTERS))
def test_a_replay_repeats_the_call_bit_for_bit(name: str, capacity) -> None:
    router = make_router(name)
    x = torch.randn(12, 8)
    top_k = 1 if name in ("base", "switch") else 2
    call = {
        "top_k": top_k,
        "capacity": capacity,
        "losses": (LoadBalance(1.0),),
        "batch": TokenInfo(token_ids=ids_for(x)),
    }
    first = route(router, x, **call)
    state = torch.get_rng_state()
    again = route(router, x, replay=first.record, **call)
    assert torch.equal(torch.get_rng_state(), state), "a replay draws nothing"
    for field in ("token", "expert", "weight", "counts", "requested"):
        assert torch.equal(getattr(first.routing, field), getattr(again.routing, field)), field
    assert torch.equal(first.loss, again.loss)
    assert first.routing.rows_per_token == again.routing.rows_per_token


def test_a_replay_reads_the_counts_of_the_first_pass() -> None:
    router = make_router("softmax")
    x = torch.randn(6, 8)
    losses = (LoadBalance(1.0, level="global_batch"),)
    earlier = torch.tensor([5, 0, 0, 0])
    first = route(
        router,
        x,
        top_k=2,
        capacity=Dropless(),
        losses=losses,
        batch=TokenInfo(earlier_counts=earlier),
    )
    value = first.loss.clone()
    earlier += 100
    batch = TokenInfo(earlier_counts=earlier)
    again = route(
        router, x, top_k=2, capacity=Dropless(), losses=losses, batch=batch, replay=first.record
    )
    assert torch.equal(again.loss, value)


def test_rows_per_token_is_known_only_when_every_copy_is_sent() -> None:
    x = torch.randn(6, 8)
    assert routed("softmax", x).routing.rows_per_token == 2
    assert routed("softmax", x, capacity=Capacity.fixed(9.0)).routing.rows_per_token is None
    assert (
        routed("softmax", x, valid_T=torch.ones(6, dtype=torch.bool)).routing.rows_per_token is None
    )
    assert routed("expert_choice", x).routing.rows_per_token is None


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_an_unneeded_limit_and_a_full_mask_change_no_row(name: str) -> None:
    x = torch.randn(6, 8)
    plain = routed(name, x).routing
    for options in ({"capacity": Capacity.fitted()}, {"valid_T": torch.ones(6, dtype=torch.bool)}):
        other = routed(name, x, **options).routing
        assert torch.equal(plain.token, other.token)
        assert torch.equal(plain.expert, other.expert)
        assert torch.equal(plain.weight, other.weight)


def test_counts_are_rows_and_requested_are_copies() -> None:
    x = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    valid = torch.tensor([True, True, True, False])
    batch = TokenInfo(valid_T=valid)
    # ceil(1.8) = 2
    result = route(Scripted(3, 3), x, top_k=2, capacity=Capacity.fixed(0.9), batch=batch).routing
    assert result.requested.tolist() == [3, 2, 1]
    assert result.counts.tolist() == [2, 2, 1]
    assert int(result.dropped) == 1
    assert int(result.num_valid) == 3
    assert list(zip(result.token.tolist(), result.expert.tolist())) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 2),
    ]
