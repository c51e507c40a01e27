"""Routing of the balance benchmark: exact loads, legal tokens, recorded counts; and what its memory
counter counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.traces.load import locality
from moesaic.traces.trace import Trace
from moesaic_lab.balance.config import COMMITTED
from moesaic_lab.balance.loads import (
    Skew,
    by_shares,
    deal,
    hot_experts_on_one_rank,
    identical_counts,
    made_up,
    max_vio,
    recorded,
    recorded_shares,
    zipf_shares,
)
from moesaic_lab.balance.methods import placed_by
from moesaic_lab.balance.tracked_memory import peak_bytes
from moesaic_lab.traces.synthetic import SyntheticRouting, make_trace

SKEW = Skew(ranks=8, num_experts=32, top_k=2, samples=32, sample_tokens=32, max_vio=1.0)


@pytest.mark.parametrize("load", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_every_call_has_the_max_vio_that_was_asked_for(load: float) -> None:
    routes = made_up(replace(SKEW, max_vio=load))
    for call in range(SKEW.calls):
        counts = routes.counts(call, 8, 32)
        assert counts.sum(axis=1).tolist() == [256] * 8
        assert max_vio(counts, 8) == pytest.approx(load, abs=4 / 256)
    assert max_vio(routes.history[None], 8) == pytest.approx(load, abs=4 / 256)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_no_token_chooses_an_expert_twice(top_k: int) -> None:
    routes = made_up(replace(SKEW, top_k=top_k, max_vio=1.5))
    assert routes.experts.shape == (4, 32, 32, top_k)
    ordered = np.sort(routes.experts, axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all()
    assert 0 <= routes.experts.min() <= routes.experts.max() < 32


def test_a_load_that_no_routing_has_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"max_vio=3.5: 4 ranks of 4 experts with top_k=2 allow 0 to 3$"
    ):
        made_up(replace(SKEW, ranks=4, num_experts=16, max_vio=3.5))
    with pytest.raises(InputError, match="allow 0 to 1"):
        made_up(replace(SKEW, ranks=4, num_experts=4, max_vio=1.5))


def test_hot_experts_last_and_change() -> None:
    lasting, fresh = (made_up(replace(SKEW, persistence=p, locality=0.0)) for p in (0.99, 0.01))

    def alike(routes: object) -> float:
        loads = np.array([routes.counts(call, 8, 32).sum(axis=0) for call in range(4)], dtype=float)  # type: ignore[attr-defined]
        return float(np.corrcoef(loads)[np.triu_indices(4, 1)].mean())

    assert alike(lasting) > 0.7
    assert alike(fresh) < 0.4
    calls = lasting.experts.reshape(4, -1)
    assert not np.array_equal(calls[0], calls[1])


def test_samples_have_tastes_of_their_own() -> None:
    local, even = (made_up(replace(SKEW, locality=share, max_vio=0.5)) for share in (0.4, 0.0))
    assert locality(local.samples(0, 32), 2) > 0.25
    assert abs(locality(even.samples(0, 32), 2)) < 0.1
    counted = local.counts(0, 8, 32)
    assert np.array_equal(local.samples(0, 32).reshape(8, 4, 32).sum(axis=1), counted)


def test_the_first_places_stand_on_one_rank_and_the_others_keep_theirs() -> None:
    places = np.array([7, 0, 3, 4, 1, 5, 6, 2])
    skew = replace(SKEW, ranks=4, num_experts=8)
    assert hot_experts_on_one_rank(places, skew).tolist() == [1, 0, 3, 4, 7, 5, 6, 2]
    loads = (
        zipf_shares(hot_experts_on_one_rank(places, skew), replace(skew, max_vio=2.5))
        .reshape(4, 2)
        .sum(axis=1)
    )
    assert loads.max() * 4 - 1 == pytest.approx(2.5)
    assert loads.argmax() == 0


def test_dealing_keeps_counts_and_wants_whole_tokens() -> None:
    table = np.array([[3, 3, 0], [1, 2, 3]])
    experts = deal(table, 3, 2)
    assert [
        np.bincount(each.reshape(-1), minlength=3).tolist() for each in experts
    ] == table.tolist()
    assert all(len(set(token)) == 2 for sample in experts.tolist() for token in sample)
    with pytest.raises(AssertionError, match="was not sent to top_k"):
        deal(np.array([[3, 2, 0]]), 3, 2)
    with pytest.raises(AssertionError, match="more copies for an expert than tokens"):
        deal(np.array([[4, 2, 0]]), 3, 2)


def test_recorded_routing_has_the_trace_s_counts() -> None:
    trace = make_trace(
        SyntheticRouting(
            steps=4, num_layers=2, num_experts=8, sequences=4, seq_len=16, skew=1.0, drift=0.5
        )
    )
    routes = recorded(trace, 1, (1, 3), 0, 4)
    assert routes.experts.shape == (2, 4, 16, 2)
    few = recorded(trace, 1, (1, 3), 0, 2)
    assert np.array_equal(few.samples(1, 8), trace.samples(1, 3)[:2])
    assert np.array_equal(routes.samples(1, 8), trace.samples(1, 3))
    assert np.array_equal(routes.counts(0, 2, 8), trace.counts(1, 1, groups=2))
    assert np.array_equal(routes.history, trace.samples(1, 0).sum(axis=0))


def test_experts_are_placed_heaviest_first_equally_many_each() -> None:
    history = np.array([9, 8, 1, 2, 3, 7])
    place = placed_by(history, Grid(world=3, ep=3))
    assert sorted(place.tolist()) == list(range(6))
    loads = np.bincount(place // 2, weights=history)
    assert sorted(loads.tolist()) == [10, 10, 10]


def test_memory_is_that_of_tensors_alive_at_once() -> None:
    x = torch.zeros(1000)

    def grows() -> None:
        a = x + 1  # 4000
        b = a * 2  # 8000
        del a
        c = b.view(10, 100).sum()  # 4004
        del b
        d = [x.repeat(3) for _ in range(2)]  # 24004
        del c, d
        torch.zeros(10)

    assert peak_bytes(grows) == 24_004
    assert peak_bytes(lambda: x.mul_(2)) == 0


def test_what_is_saved_for_the_backward_pass_counts() -> None:
    x = torch.ones(128, 64, requires_grad=True)
    one = 4 * 128 * 64

    def forward() -> torch.Tensor:
        return x.sigmoid().sigmoid().sigmoid().sum()

    def step() -> None:
        forward().backward()

    assert peak_bytes(step) >= 3 * one + 4
    with torch.no_grad():
        assert peak_bytes(forward) == 2 * one


def test_recorded_loads_of_ranks_keep_their_max_vio_on_other_numbers_of_ranks() -> None:
    trace = Trace.open(COMMITTED.parent / "laer_e16k4.npz")
    loads = trace.samples(11, 9)[0]
    wanted = loads.max() / loads.mean() - 1
    for ranks in (32, 64):
        shares = recorded_shares(trace, 11, 9, ranks, 4)
        counts = identical_counts(shares, ranks, 8192)
        assert counts.sum(1).tolist() == [8192] * ranks
        assert max_vio(counts, ranks) == pytest.approx(wanted, abs=0.02)
    few = recorded_shares(trace, 11, 9, 8, 4)
    assert few.reshape(8, 4).sum(1) == pytest.approx(loads[:8] / loads[:8].sum())
    sizes = Skew(ranks=8, num_experts=32, top_k=2, samples=16, sample_tokens=32, max_vio=0.0)
    routes = by_shares(np.stack([few, few]), sizes)
    counts = routes.counts(0, 8, 32).sum(0).reshape(8, 4).sum(1)
    assert counts == pytest.approx(loads[:8] / loads[:8].sum() * 1024, abs=4)
    assert (
        np.sort(routes.experts, axis=-1)[..., 1:] != np.sort(routes.experts, axis=-1)[..., :-1]
    ).all()


def test_a_share_that_no_token_could_fill_is_capped() -> None:
    sizes = Skew(ranks=4, num_experts=8, top_k=2, samples=4, sample_tokens=16, max_vio=0.0)
    shares = np.array([0.65] + 7 * [0.05])
    routes = by_shares(np.stack([shares, shares]), sizes)
    assert routes.history[0] == 4 * 16  # every token once
    assert routes.history.sum() == 4 * 16 * 2
