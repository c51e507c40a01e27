"""Tags, and the transport of a world of one rank."""

from __future__ import annotations

import pytest
import torch

from moesaic.comm.transport import TAG_LIMIT, NoTransport, Transfer, as_bytes


def test_tags_are_consecutive_ranges_without_overlap():
    transport = NoTransport()
    assert [transport.take_tags(n) for n in (3, 0, 1, 5, 2)] == [0, 3, 3, 4, 9]


def test_tags_start_again_before_a_range_would_be_split():
    transport = NoTransport()
    assert transport.take_tags(TAG_LIMIT - 3) == 0
    assert transport.take_tags(3) == TAG_LIMIT - 3
    assert transport.take_tags(2) == 0
    assert transport.take_tags(TAG_LIMIT - 3) == 2
    assert transport.take_tags(2) == 0
    assert transport.take_tags(TAG_LIMIT) == 0
    assert transport.take_tags(1) == 0


def test_counters_belong_to_a_transport():
    first = NoTransport()
    second = NoTransport()
    first.take_tags(9)
    assert second.take_tags(1) == 0


def test_a_world_of_one_sends_nothing():
    transport = NoTransport()
    transport.wait(transport.issue(Transfer(0, 0, {}, {})))
    with pytest.raises(AssertionError, match="nobody to talk to"):
        transport.issue(Transfer(0, 0, {1: torch.ones(1)}, {}))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)])
def test_tensors_are_viewed_as_bytes(shape):
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    seen = as_bytes(tensor)
    assert (seen.dtype, seen.numel()) == (torch.uint8, 2 * tensor.numel())
    seen.zero_()
    assert not tensor.any()


def test_parts_and_expanded_elements_are_viewed_in_place():
    whole = torch.zeros(3, 2)
    as_bytes(whole[1:2])[:] = torch.tensor([0, 0, 128, 63] * 2, dtype=torch.uint8)
    assert whole.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert as_bytes(torch.ones(4)[1].expand(1, 1)).tolist() == [0, 0, 128, 63]
    with pytest.raises(AssertionError, match="not contiguous"):
        as_bytes(whole.t())
