"""Several movements in one message per peer: a rank reads what its peer wrote, for any widths,
dtypes and counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.program.sizes import Runs, Splits
from moesaic.runtime.messages import Bundle
from moesaic.runtime.tasks import Indices, rows

KINDS = {
    "rows and weights": [(1, torch.float32), (6, torch.float32)],
    "16-bit rows and float32 weights": [(1, torch.float32), (5, torch.bfloat16)],
    "indices, weights, rows of an odd width": [
        (1, torch.int64),
        (1, torch.float32),
        (3, torch.float32),
    ],
    "float64": [(1, torch.float64), (4, torch.float64)],
    "as wide as each other": [(2, torch.float32), (2, torch.float32)],
    "rows of bytes": [(3, torch.uint8), (1, torch.int64)],
}


def lot(peers: list[int], counts: list[int], rows: list[int] | None = None) -> Splits:
    places = np.arange(sum(counts)) if rows is None else np.array(rows, dtype=np.int64)
    runs = Runs(places, np.ones(len(places), dtype=np.int64))
    return Splits(tuple(peers), tuple(counts), runs, rows is None)


def values_of(kinds: list[tuple[int, torch.dtype]], rows: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 100, (count, width), generator=generator).to(dtype)
        for count, (width, dtype) in zip(rows, kinds)
    ]


def written(splits: list[Splits], values: list[Tensor]) -> dict[int, Tensor]:
    bundle = Bundle(splits, values, Indices())
    memory, messages = bundle.buffer()
    memory.fill_(77)
    bundle.write(memory, values)
    return messages


def read(
    splits: list[Splits], like: list[Tensor], messages: dict[int, Tensor], *, in_place: bool = True
) -> list[Tensor]:
    bundle = Bundle(splits, like, Indices())
    memory, buffers = bundle.buffer()
    memory.fill_(55)
    for peer, buffer in buffers.items():
        assert buffer.is_contiguous()
        buffer.copy_(messages[peer])
    return [
        rows(bundle.read(memory, n, value.dtype, in_place=in_place)) for n, value in enumerate(like)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_gathered_on_one_side_and_placed_on_the_other(kind: str) -> None:
    kinds = KINDS[kind]
    order = [4, 0, 3, 3, 1]
    places = [2, 4, 0, 1, 3]
    values = values_of(kinds, [5] * len(kinds))
    out = [lot([1, 2], [2, 3], order) for _ in kinds]
    back = [lot([1, 2], [2, 3], places) for _ in kinds]
    messages = written(out, values)
    in_place, as_sent = (read(back, values, messages, in_place=mode) for mode in (True, False))
    for value, placed, sent in zip(values, in_place, as_sent):
        assert torch.equal(sent, value[order])
        expected = torch.empty_like(value)
        expected[places] = value[order]
        assert torch.equal(placed, expected)


def test_movements_of_a_bundle_may_have_other_peers_and_counts() -> None:
    kinds = KINDS["indices, weights, rows of an odd width"]
    values = values_of(kinds, [4, 4, 3])
    splits = [lot([0, 1], [1, 3]), lot([0, 1], [1, 3]), lot([1, 2], [0, 3])]
    messages = written(splits, values)
    assert sorted(messages) == [0, 1, 2]
    assert [len(messages[peer]) for peer in (0, 1, 2)] == [3, 9, 9], (
        "in numbers of 4 bytes: nothing but rows is sent"
    )
    for value, back in zip(values, read(splits, values, messages)):
        assert torch.equal(back, value)


def test_the_widest_rows_stand_first_in_every_message() -> None:
    values = values_of(KINDS["rows and weights"], [3, 3])
    messages = written([lot([0, 1], [1, 2])] * 2, values)
    assert torch.equal(messages[1].view(torch.float32)[:12].view(2, 6), values[1][1:])
    assert torch.equal(messages[1].view(torch.float32)[12:], values[0][1:, 0])
