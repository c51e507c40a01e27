"""The sort of copies by expert and the schedule of tiles, against plain Python."""

from __future__ import annotations

import pytest
import torch
from triton_references import RowOrder, row_tiles_reference, sort_reference

from moesaic.kernels.triton.parts import max_tiles, row_tiles
from moesaic.kernels.triton.rows.sort import sort

COPIES = [(0, 3), (5, 1), (128, 4), (259, 5), (64, 100)]


@pytest.mark.parametrize(("num_copies", "num_experts"), COPIES)
@pytest.mark.parametrize("sent", ["all", "some", "one expert", "experts that do not exist"])
def test_sort_is_stable_and_complete(num_copies, num_experts, sent, device):
    expert = torch.randint(0, num_experts, (num_copies,))
    if sent == "some":
        expert[torch.rand(num_copies) < 0.3] = -1
    if sent == "experts that do not exist":
        wrong = torch.tensor([num_experts, num_experts + 1, 2**30, 2**31 - 1, -(2**31), -7])
        expert = torch.where(
            torch.rand(num_copies) < 0.4, wrong[torch.randint(0, 6, (num_copies,))], expert
        )
    if sent == "one expert":
        expert.fill_(num_experts - 1)
    actual = RowOrder(*sort(expert.to(device), num_experts))
    expected = sort_reference(expert, num_experts)
    for name in RowOrder._fields:
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


def test_more_blocks_than_one_scan_takes(device, monkeypatch):
    monkeypatch.setattr("moesaic.kernels.triton.rows.sort.SCANNED", 4)
    expert = torch.randint(0, 3, (128 * 9 + 5,))
    for actual, expected in zip(sort(expert.to(device), 3), sort_reference(expert, 3)):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("counts", [[0], [1], [17], [0, 40, 0, 3], [5, 0, 0], [16, 32]])
@pytest.mark.parametrize("unused", [0, 7])
def test_every_row_of_an_expert_is_in_one_tile(counts, unused, device):
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    num_rows = int(ends[-1]) + unused
    schedule = row_tiles(ends.to(device), num_rows, 16).tolist()
    capacity = max_tiles(num_rows, len(counts), 16)
    total = schedule[0]
    fields = schedule[1:]
    actual = [tuple(fields[i * capacity + tile] for i in range(3)) for tile in range(total)]
    assert actual == row_tiles_reference(ends, 16)
    assert total <= capacity
