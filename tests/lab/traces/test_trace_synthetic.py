"""Synthetic routing has the given skew, MaxVio, drift and locality, and is determined by its
seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import InputError
from moesaic.planner.workload import Workload, zipf_counts
from moesaic.traces.load import layer_loads, max_violation
from moesaic.traces.trace import Trace, write_segment
from moesaic_lab.traces.synthetic import (
    SyntheticRouting,
    capped,
    dirichlet_capped,
    draw_tokens,
    make_segment,
    make_trace,
    popularity,
)


def workload(tokens: int = 1000, experts: int = 16, top_k: int = 2) -> Workload:
    return Workload(tokens=tokens, num_experts=experts, top_k=top_k, dim=8, hidden=8)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("max_vio", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_counts_have_the_max_vio_that_was_asked_for(max_vio, top_k):
    trace = make_trace(
        SyntheticRouting(steps=1, top_k=top_k, sequences=4, seq_len=1000, max_vio=max_vio, seed=5)
    )
    actual = trace.samples(0, 0)
    assert (actual.sum(1) == 1000 * top_k).all()
    assert actual.max() <= 1000
    assert max_violation(actual.sum(0)) == pytest.approx(max_vio, abs=16 / (1000 * top_k))


def test_popularity_follows_zipfs_law():
    for skew in (0.0, 0.4, 0.7):
        shares = popularity(np.arange(16), skew, top_k=2)
        law = np.arange(1, 17) ** -skew
        assert shares == pytest.approx(law / law.sum(), abs=1e-12)
        counted = zipf_counts(1, workload(tokens=10**6), exponent=skew, seed=3)[0]
        assert np.sort(counted)[::-1] / counted.sum() == pytest.approx(shares, abs=1e-5)
    assert popularity(np.arange(16), 30.0, top_k=2).max() == 0.5


@given(st.integers(1, 4), st.integers(4, 12), st.integers(0, 2**32 - 1))
def test_caps_keep_order_and_sum(top_k, experts, seed):
    shares = np.random.default_rng(seed).dirichlet(np.full(experts, 0.3), size=5) + 1e-12
    actual = capped(shares, top_k)
    assert actual.sum(1) == pytest.approx(np.ones(5))
    assert actual.max() <= 1 / top_k
    for before, after in zip(shares / shares.sum(1, keepdims=True), actual):
        assert (np.diff(after[np.argsort(before)]) >= -1e-12).all()
        below = after < 1 / top_k - 1e-9
        if below.sum() > 1:
            ratio = after[below] / before[below]
            assert ratio == pytest.approx(np.full(len(ratio), ratio[0]), rel=1e-6)


def test_draws_of_any_concentration_are_capped():
    for spread in (1e-3, 0.1, 1.0, 100.0):
        actual = dirichlet_capped(np.full(6, spread), 200, 2, np.random.default_rng(0))
        assert actual.sum(1) == pytest.approx(np.ones(200))
        assert actual.max() <= 0.5
    assert (
        np.sort(dirichlet_capped(np.full(6, 1e-3), 200, 2, np.random.default_rng(0)), 1)[:, -2]
        > 0.49
    ).mean() > 0.9
    mean = dirichlet_capped(
        np.array([4.0, 2.0, 1.0, 1.0]), 20000, 1, np.random.default_rng(0)
    ).mean(0)
    assert mean == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.01)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_tokens_choose_distinct_experts_by_their_shares(top_k):
    shares = capped(np.array([[0.4, 0.3, 0.1, 0.1, 0.05, 0.05]]), top_k)[0]
    experts = draw_tokens(shares, 2000, top_k, np.random.default_rng(1))
    assert experts.shape == (2000, top_k)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    actual = np.bincount(experts.reshape(-1), minlength=6)
    assert actual == pytest.approx(shares * 2000 * top_k, abs=top_k + 1)
    if top_k > 1:  # no expert is always the first choice
        assert 0.2 < (experts[:, 0] == 0).sum() / actual[0] < 0.8


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("local", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("max_vio", [0.0, 2.0])
def test_traces_have_the_locality_and_the_max_vio(local, max_vio, tokens):
    config = SyntheticRouting(
        steps=3,
        num_layers=2,
        sequences=64,
        seq_len=128,
        locality=local,
        max_vio=max_vio,
        tokens=tokens,
    )
    for row in layer_loads(make_trace(config)):
        assert row.locality == pytest.approx(local, abs=0.05)
        assert row.max_violation == pytest.approx([max_vio] * 3, abs=0.03)


def test_drift_moves_who_is_hot_and_not_how_hot():
    still, slow, wild = (
        layer_loads(
            make_trace(
                SyntheticRouting(steps=80, sequences=4, seq_len=512, max_vio=2.0, drift=drift)
            )
        )[0]
        for drift in (0.0, 0.1, 1.0)
    )
    assert still.drift < 0.005 < 0.015 < slow.drift < 0.1 < wild.drift
    assert [len(set(row.busiest)) for row in (still, slow, wild)] == [
        1,
        pytest.approx(5, abs=3),
        pytest.approx(15, abs=3),
    ]
    for row in (still, slow, wild):
        assert row.max_violation == pytest.approx([2.0] * 80, abs=0.05)


def test_a_seed_is_a_trace_and_layers_differ(tmp_path):
    config = SyntheticRouting(
        steps=4, num_layers=2, skew=1.0, drift=0.3, locality=0.3, tokens=True, groups=4
    )
    one = make_segment(config)
    other = make_segment(config)
    assert (one.table == other.table).all()
    assert (one.table[:, :, 0] != one.table[:, :, 1]).any()
    assert (one.table != make_segment(SyntheticRouting(**{**vars(config), "seed": 1})).table).any()
    write_segment(one, tmp_path / "a.npz")
    trace = Trace.open(tmp_path / "a.npz")
    assert (trace.experts(1, 3) == one.table[3, 0, 1]).all()
    assert trace.counts(0, 0).sum(1).tolist() == [16 // 4 * 256 * 2] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"skew": 1.0, "max_vio": 1.0}, "skew=1.0 and max_vio=1.0: give one of them"),
        (
            {"max_vio": 8.0},
            "max_vio=8.0: these numbers of experts and experts per token allow 0 to 7",
        ),
        ({"skew": -1.0}, "skew=-1.0: choose an exponent from 0"),
        ({"drift": 1.5}, "drift=1.5: choose 0 to 1"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"locality": 1.0}, "locality=1.0: choose 0 to 0.99"),
        (
            {"groups": 3},
            "groups=3: give at least one step, and groups that divide the 16 sequences",
        ),
        ({"top_k": 17}, "top_k=17: choose at most num_experts=16"),
        ({"num_layers": 0}, "num_layers=0: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_made_is_refused(changes, message):
    with pytest.raises(InputError) as caught:
        make_segment(SyntheticRouting(**changes))
    assert message in str(caught.value)
