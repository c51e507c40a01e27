"""The tokens of each micro-batch and of each evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import InputError
from moesaic.train.data import Batches, as_batch, even_windows, share


@given(
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(1, 60),
    st.integers(0, 3),
    st.integers(0, 2**63 - 1),
)
def test_every_epoch_holds_every_window_once(seq_len, batch_size, extra, epoch, seed):
    tokens = np.arange(seq_len + extra, dtype=np.uint16)
    windows = (len(tokens) - 1) // seq_len
    batches = Batches(tokens, seq_len, batch_size, seed)
    first = epoch * windows
    last = (epoch + 1) * windows
    starts = {}
    for index in range(first // batch_size, (last - 1) // batch_size + 1):
        x, y = batches.get(index)
        assert x.shape == y.shape == (batch_size, seq_len)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)
        starts |= {index * batch_size + row: int(x[row, 0]) for row in range(batch_size)}
    assert sorted(starts[place] for place in range(first, last)) == [
        w * seq_len for w in range(windows)
    ]


def test_a_batch_is_a_function_of_seed_and_index():
    tokens = np.random.default_rng(0).integers(0, 256, 400).astype(np.uint8)
    one = Batches(tokens, 8, 3, 5)
    two = Batches(tokens, 8, 3, 5)
    expected = [one.get(index)[0] for index in range(40)]
    for index in (39, 0, 17, 16, 39):
        assert torch.equal(two.get(index)[0], expected[index])
    other = Batches(tokens, 8, 3, 6)
    assert not torch.equal(other.get(0)[0], expected[0])
    windows = (len(tokens) - 1) // 8
    epochs = [torch.cat(expected)[place : place + windows] for place in (0, windows)]
    assert not torch.equal(*epochs)


def test_batches_leave_the_global_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Batches(np.arange(100, dtype=np.uint8), 8, 3, 5).get(9)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_too_short_data_is_an_error():
    Batches(np.zeros(9, dtype=np.uint8), 8, 1, 0)
    with pytest.raises(
        InputError,
        match=r"training data: 8 tokens are fewer than model.seq_len \+ 1 = 9: give more",
    ):
        Batches(np.zeros(8, dtype=np.uint8), 8, 1, 0)
    with pytest.raises(
        InputError,
        match=r"validation data: 8 tokens are fewer than model.seq_len \+ 1 = 9: give more",
    ):
        even_windows(np.zeros(8, dtype=np.uint8), 8, 1)


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [(81, 3, [0, 4, 9]), (81, 99, list(range(10))), (81, 1, [0]), (80, 2, [0, 8]), (9, 5, [0])],
)
def test_validation_windows_are_spread_evenly(tokens, count, expected):
    assert even_windows(np.zeros(tokens, dtype=np.uint8), 8, count) == expected


def test_targets_are_the_next_tokens():
    tokens = np.arange(30, dtype=np.uint32)
    x, y = as_batch(tokens, [2, 0], 5)
    assert x.tolist() == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]
    assert y.tolist() == [[11, 12, 13, 14, 15], [1, 2, 3, 4, 5]]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 50), st.integers(0, 3))
def test_the_parts_of_a_batch_make_up_the_batch(parts, each, index, seed):
    tokens = np.arange(100, dtype=np.uint8)
    whole = Batches(tokens, 4, parts * each, seed).get(index)
    split = [
        Batches(tokens, 4, parts * each, seed, (part, parts)).get(index) for part in range(parts)
    ]
    for place in (0, 1):
        assert torch.equal(torch.cat([part[place] for part in split]), whole[place])


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(
        InputError,
        match=r"batch_size=5 does not split over 2 data parallel groups: choose a multiple of 2",
    ):
        Batches(np.arange(100, dtype=np.uint8), 4, 5, 0, (0, 2))


def test_no_windows_are_an_empty_batch():
    x, y = as_batch(np.arange(100, dtype=np.uint8), [], 4)
    assert x.shape == y.shape == (0, 4)
    assert x.dtype == torch.int64


@given(st.integers(0, 20), st.integers(1, 6))
def test_shares_are_even_and_make_up_the_list(length, count):
    windows = list(range(length))
    parts = [share(windows, index, count) for index in range(count)]
    assert [window for part in parts for window in part] == windows
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
